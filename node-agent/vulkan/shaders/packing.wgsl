// Rows rounded to signed bytes, as products of few rows with quantized weights take them: of each sixteen numbers four words of bytes, the
// first in the lowest bits; behind all of these, for each sixteen, the scale (number = scale * byte) and the sum of what the bytes
// then stand for.

// The `i`th sixteen of `count` in all.
fn pack(i: u32, count: u32, a: vec4f, b: vec4f, c: vec4f, d: vec4f) {
    let most = max(max(abs(a), abs(b)), max(abs(c), abs(d)));
    let largest = max(max(most.x, most.y), max(most.z, most.w));
    let factor = select(0.0, 127.0 / largest, largest > 0.0);
    let bytes = array<vec4i, 4>(vec4i(round(a * factor)), vec4i(round(b * factor)), vec4i(round(c * factor)), vec4i(round(d * factor)));
    let all = bytes[0] + bytes[1] + bytes[2] + bytes[3];
    let scale = largest / 127.0;
    packed[2u * i] = vec2u(word_of(bytes[0]), word_of(bytes[1]));
    packed[2u * i + 1u] = vec2u(word_of(bytes[2]), word_of(bytes[3]));
    packed[2u * count + i] = bitcast<vec2u>(vec2f(scale, scale * f32(all.x + all.y + all.z + all.w)));
}

fn word_of(bytes: vec4i) -> u32 {
    let parts = (bitcast<vec4u>(bytes) & vec4u(0xffu)) << vec4u(0u, 8u, 16u, 24u);
    return parts.x | parts.y | parts.z | parts.w;
}
