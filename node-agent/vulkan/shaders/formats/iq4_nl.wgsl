// d: f16, nibbles: 16 bytes; weight = d * value of the nibble.
const BYTES = 18u;

fn load(block: u32, unit: u32) -> Loaded {
    return Loaded(looked_up(parts_at(block + 2u, 4u * unit, 15u)), f16_at(block), 0.0);
}
