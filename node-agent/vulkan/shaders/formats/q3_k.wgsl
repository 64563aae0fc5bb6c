// third bits: 32 bytes, low bits: 64 bytes, scales: 12 bytes, d: f16; weight = d * scale * (3-bit number - 4).
const BLOCK = 256u;
const BYTES = 110u;
const NEXT = 2u;

fn load(block: u32, unit: u32) -> Loaded {
    let row = unit / 2u;
    let low = parts_at(block + 32u + 32u * (row / 4u) + 16u * (unit % 2u), 2u * (row % 4u), 3u);
    let third = parts_at(block + 16u * (unit % 2u), row, 1u);
    // Scales from -32 to 31: four bits of each, then two bits of each.
    let low_bits = (byte_at(block + 96u + unit % 8u) >> (4u * (unit / 8u))) & 15u;
    let high_bits = (byte_at(block + 104u + unit % 4u) >> (2u * (unit / 4u))) & 3u;
    let scale = f32(low_bits | (high_bits << 4u)) - 32.0;
    return centred(low | (third << vec4u(2u)), f16_at(block + 108u) * scale, 4.0);
}
