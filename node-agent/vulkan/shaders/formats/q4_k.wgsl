// d: f16, dmin: f16, scales: 12 bytes, nibbles: 128 bytes; groups of 32.
const BLOCK = 256u;
const BYTES = 144u;
const NEXT = 2u;

fn load(block: u32, unit: u32) -> Loaded {
    let group = unit / 2u;
    let scales = scale_and_minimum(block, group);
    let bytes = parts_at(block + 16u + 32u * (group / 2u) + 16u * (unit % 2u), 4u * (group % 2u), 15u);
    return Loaded(bytes, scales.x, scales.y);
}
