// low bits: 128 bytes, high bits: 64 bytes, scales: 16 signed bytes, d: f16; weight = d * scale * (6-bit number - 32).
const BYTES = 210u;
const APART = 2u;

fn load_part(block: u32, part: u32, row: u32) -> Loaded {
    let half = part / 2u;
    let within = 16u * (part % 2u);
    let low = parts_at(block + 64u * half + 32u * (row % 2u) + within, 4u * (row / 2u), 15u);
    let high = parts_at(block + 128u + 32u * half + within, 2u * row, 3u);
    let scale = f32(signed_bytes_of(byte_at(block + 192u + unit_of(part, row))).x);
    return centred(low | (high << vec4u(4u)), f16_at(block + 208u) * scale, 32.0);
}
