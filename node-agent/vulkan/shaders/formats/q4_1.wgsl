// d: f16, m: f16, nibbles: 16 bytes; weight = d * nibble + m.
const BYTES = 20u;

fn load(block: u32, unit: u32) -> Loaded {
    let scales = unpack2x16float(weights[block / 4u]);
    return Loaded(parts_at(block + 4u, 4u * unit, 15u), scales.x, scales.y);
}
