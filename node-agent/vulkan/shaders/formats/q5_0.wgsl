// d: f16, fifth bits: 4 bytes, nibbles: 16 bytes; weight = d * (5-bit number - 16).
const BYTES = 22u;

fn load(block: u32, unit: u32) -> Loaded {
    let bytes = parts_at(block + 6u, 4u * unit, 15u) | bits_in_bytes(word_at(block + 2u) >> (16u * unit), 4u);
    return centred(bytes, f16_at(block), 16.0);
}
