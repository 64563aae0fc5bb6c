const BLOCK = 16u;
const BYTES = 64u;

fn load(block: u32, unit: u32) -> Loaded {
    return Sixteen(
        bitcast<vec4f>(words_at(block)),
        bitcast<vec4f>(words_at(block + 16u)),
        bitcast<vec4f>(words_at(block + 32u)),
        bitcast<vec4f>(words_at(block + 48u)),
    );
}
