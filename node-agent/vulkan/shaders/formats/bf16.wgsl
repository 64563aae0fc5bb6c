// The upper half of an F32.
const BLOCK = 16u;
const BYTES = 32u;

fn load(block: u32, unit: u32) -> Loaded {
    let first = words_at(block);
    let second = words_at(block + 16u);
    return Sixteen(four(first.xy), four(first.zw), four(second.xy), four(second.zw));
}

fn four(words: vec2u) -> vec4f {
    let halves = vec4u(words.x << 16u, words.x, words.y << 16u, words.y);
    return bitcast<vec4f>(halves & vec4u(0xffff0000u));
}
