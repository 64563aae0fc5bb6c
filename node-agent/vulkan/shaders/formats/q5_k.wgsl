// d: f16, dmin: f16, scales: 12 bytes, fifth bits: 32 bytes, nibbles: 128 bytes; groups of 32.
const BYTES = 176u;
const APART = 1u;

fn load_part(block: u32, part: u32, unit: u32) -> Loaded {
    let group = 2u * part + unit / 2u;
    let scales = scale_and_minimum(block, group);
    let low = parts_at(block + 48u + 32u * part + 16u * (unit % 2u), 4u * (unit / 2u), 15u);
    let fifth = parts_at(block + 16u + 16u * (unit % 2u), group, 1u);
    return Loaded(low | (fifth << vec4u(4u)), scales.x, scales.y);
}
