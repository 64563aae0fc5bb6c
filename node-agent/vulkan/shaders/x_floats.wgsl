// Rows of x as they are.

@group(0) @binding(1) var<storage, read> x: array<vec4f>;

fn product(row: u32, unit: u32, loaded: Loaded) -> f32 {
    let at = (row * (params.cols / 16u) + unit) * 4u;
    let w = unpacked(loaded);
    return dot(w.a, x[at]) + dot(w.b, x[at + 1u]) + dot(w.c, x[at + 2u]) + dot(w.d, x[at + 3u]);
}
