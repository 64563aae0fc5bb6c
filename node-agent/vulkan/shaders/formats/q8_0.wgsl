// d: f16, numbers: 32 signed bytes; weight = d * number.
const BYTES = 34u;

fn load(block: u32, unit: u32) -> Loaded {
    return Loaded(words_at(block + 2u + 16u * unit), f16_at(block), 0.0);
}
