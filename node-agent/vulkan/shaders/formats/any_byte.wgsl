// Formats whose blocks begin at any byte, or at any word.

@group(0) @binding(0) var<storage, read> weights: array<u32>;

// Four bytes from any byte on. Only words that hold some of them are read.
fn word_at(byte: u32) -> u32 {
    let at = byte / 4u;
    let shift = byte % 4u * 8u;
    if BYTES % 4u == 0u || shift == 0u {
        return weights[at];
    }
    return (weights[at] >> shift) | (weights[at + 1u] << (32u - shift));
}

// Sixteen bytes likewise.
fn words_at(byte: u32) -> vec4u {
    let at = byte / 4u;
    let words = vec4u(weights[at], weights[at + 1u], weights[at + 2u], weights[at + 3u]);
    if BYTES % 4u == 0u {
        return words;
    }
    let shift = byte % 4u * 8u;
    let last = weights[at + select(3u, 4u, shift > 0u)];
    // (A shift by 32 is none.)
    return (words >> vec4u(shift)) | ((vec4u(words.yzw, last) << vec4u(1u)) << vec4u(31u - shift));
}

fn byte_at(byte: u32) -> u32 {
    return (weights[byte / 4u] >> (byte % 4u * 8u)) & 0xffu;
}

// Two bytes from an even byte on.
fn half_word_at(byte: u32) -> u32 {
    return (weights[byte / 4u] >> (byte % 4u * 8u)) & 0xffffu;
}

fn f16_at(byte: u32) -> f32 {
    return unpack2x16float(half_word_at(byte)).x;
}
