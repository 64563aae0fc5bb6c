// scales and minimums: 16 bytes, numbers: 64 bytes, d: f16, dmin: f16; sixteen weights share a 4-bit scale and a 4-bit minimum.
const BYTES = 84u;
const APART = 2u;

fn load_part(block: u32, part: u32, row: u32) -> Loaded {
    // Each 32 bytes hold four rows of 32 numbers, two bits each.
    let numbers = parts_at(block + 16u + 16u * part, 2u * row, 3u);
    let d = unpack2x16float(weights[block / 4u + 20u]);
    let packed = byte_at(block + unit_of(part, row));
    return Loaded(numbers, d.x * f32(packed & 15u), -(d.y * f32(packed >> 4u)));
}
