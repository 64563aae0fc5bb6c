const BLOCK = 16u;
const BYTES = 32u;

fn load(block: u32, unit: u32) -> Loaded {
    let first = words_at(block);
    let second = words_at(block + 16u);
    return Sixteen(four(first.xy), four(first.zw), four(second.xy), four(second.zw));
}

fn four(words: vec2u) -> vec4f {
    return vec4f(unpack2x16float(words.x), unpack2x16float(words.y));
}
