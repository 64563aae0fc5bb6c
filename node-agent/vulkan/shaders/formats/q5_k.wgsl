// d: f16, dmin: f16, scales: 12 bytes, fifth bits: 32 bytes, nibbles: 128 bytes; groups of 32.
const BLOCK = 256u;
const BYTES = 176u;
const NEXT = 2u;

fn load(block: u32, unit: u32) -> Loaded {
    let group = unit / 2u;
    let scales = scale_and_minimum(block, group);
    let low = parts_at(block + 48u + 32u * (group / 2u) + 16u * (unit % 2u), 4u * (group % 2u), 15u);
    let fifth = parts_at(block + 16u + 16u * (unit % 2u), group, 1u);
    return Loaded(low | (fifth << vec4u(4u)), scales.x, scales.y);
}
