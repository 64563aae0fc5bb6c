// scales and minimums: 16 bytes, numbers: 64 bytes, d: f16, dmin: f16; sixteen weights share a 4-bit scale and a 4-bit minimum.
const BLOCK = 256u;
const BYTES = 84u;
const NEXT = 2u;

fn load(block: u32, unit: u32) -> Loaded {
    // Each 32 bytes hold four rows of 32 numbers, two bits each.
    let row = unit / 2u;
    let numbers = parts_at(block + 16u + 32u * (row / 4u) + 16u * (unit % 2u), 2u * (row % 4u), 3u);
    let d = unpack2x16float(weights[block / 4u + 20u]);
    let packed = byte_at(block + unit);
    return Loaded(numbers, d.x * f32(packed & 15u), -(d.y * f32(packed >> 4u)));
}
