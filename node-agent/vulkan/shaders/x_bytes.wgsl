// Rows of x rounded to bytes (`pack.wgsl`): products of bytes are summed four at a time, in whole numbers.

@group(0) @binding(1) var<storage, read> x: array<vec4u>;

fn product(row: u32, unit: u32, loaded: Loaded) -> f32 {
    let units = params.cols / 16u;
    let at = row * units + unit;
    let bytes = x[at];
    let two = bitcast<vec4f>(x[params.rows * units + at / 2u]);
    let scale_and_sum = select(two.xy, two.zw, at % 2u == 1u);
    let sum = dot4I8Packed(loaded.bytes.x, bytes.x)
        + dot4I8Packed(loaded.bytes.y, bytes.y)
        + dot4I8Packed(loaded.bytes.z, bytes.z)
        + dot4I8Packed(loaded.bytes.w, bytes.w);
    return loaded.scale * scale_and_sum.x * f32(sum) + loaded.add * scale_and_sum.y;
}
