// third bits: 32 bytes, low bits: 64 bytes, scales: 12 bytes, d: f16; weight = d * scale * (3-bit number - 4).
const BYTES = 110u;
const APART = 2u;

fn load_part(block: u32, part: u32, row: u32) -> Loaded {
    let half = part / 2u;
    let within = part % 2u;
    let low = parts_at(block + 32u + 16u * part, 2u * row, 3u);
    let third = parts_at(block + 16u * within, 4u * half + row, 1u);
    // Scales from -32 to 31: four bits of each, then two bits of each.
    let low_bits = (byte_at(block + 96u + 2u * row + within) >> (4u * half)) & 15u;
    let high_bits = (byte_at(block + 104u + 2u * (row % 2u) + within) >> (4u * half + 2u * (row / 2u))) & 3u;
    let scale = f32(low_bits | (high_bits << 4u)) - 32.0;
    return centred(low | (third << vec4u(2u)), f16_at(block + 108u) * scale, 4.0);
}
