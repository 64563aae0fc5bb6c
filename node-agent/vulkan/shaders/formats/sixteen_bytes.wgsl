// Formats whose blocks are of whole sixteens of bytes: each is read at once.

@group(0) @binding(0) var<storage, read> weights: array<vec4u>;

fn words_at(byte: u32) -> vec4u {
    return weights[byte / 16u];
}
