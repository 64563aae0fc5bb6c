// d: f16, nibbles: 16 bytes; weight = d * (nibble - 8).
const BYTES = 18u;

fn load(block: u32, unit: u32) -> Loaded {
    return centred(parts_at(block + 2u, 4u * unit, 15u), f16_at(block), 8.0);
}
