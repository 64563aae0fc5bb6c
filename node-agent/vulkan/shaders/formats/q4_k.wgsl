// d: f16, dmin: f16, scales: 12 bytes, nibbles: 128 bytes; groups of 32.
const BYTES = 144u;
const APART = 1u;

fn load_part(block: u32, part: u32, unit: u32) -> Loaded {
    let scales = scale_and_minimum(block, 2u * part + unit / 2u);
    let bytes = parts_at(block + 16u + 32u * part + 16u * (unit % 2u), 4u * (unit / 2u), 15u);
    return Loaded(bytes, scales.x, scales.y);
}
