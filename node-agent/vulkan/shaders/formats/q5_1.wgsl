// d: f16, m: f16, fifth bits: 4 bytes, nibbles: 16 bytes; weight = d * 5-bit number + m.
const BYTES = 24u;

fn load(block: u32, unit: u32) -> Loaded {
    let scales = unpack2x16float(weights[block / 4u]);
    let bytes = parts_at(block + 8u, 4u * unit, 15u) | bits_in_bytes(weights[block / 4u + 1u] >> (16u * unit), 4u);
    return Loaded(bytes, scales.x, scales.y);
}
