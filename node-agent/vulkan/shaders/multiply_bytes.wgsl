// Few rows of x, rounded to bytes (`pack.wgsl`), times quantized weights: parts of four sixteens of weights (`formats/quants.wgsl`) are loaded once
// for ROWS of them. Products of bytes are summed four at a time, in whole numbers. LANES threads share MATRIX_ROWS rows of the matrix; `main`
// (`sums_*.wgsl`) adds up what each of them has.

const THREADS = 64u;
const LANES = 32u;
const MATRIX_ROWS = 2u;

@group(0) @binding(1) var<storage, read> x: array<vec4u>;
// The same: behind the bytes, for each sixteen the scale and the sum.
@group(0) @binding(4) var<storage, read> x_scales: array<vec2f>;

fn own_sums(first_row: u32, first_matrix_row: u32, lane: u32) -> array<f32, ROWS * MATRIX_ROWS> {
    let units = params.cols / 16u;
    let scales = 2u * params.rows * units;
    var rows: array<u32, ROWS>;
    for (var r = 0u; r < ROWS; r++) { // unrolled
        rows[r] = x_row(min(first_row + r, end_of_rows() - 1u));
    }
    var sums: array<f32, ROWS * MATRIX_ROWS>;
    for (var part = lane; part < (units + 3u) / 4u; part += LANES) {
        for (var m = 0u; m < MATRIX_ROWS; m++) { // unrolled
            for (var i = 0u; i < 4u; i++) { // unrolled
                let loaded = load_part_from(first_matrix_row + m, part, i);
                for (var r = 0u; r < ROWS; r++) { // unrolled
                    // Behind the last sixteen, weights are 0.
                    let at = rows[r] * units + min(place_of(part, i), units - 1u);
                    sums[r * MATRIX_ROWS + m] += product(loaded, x[at], x_scales[scales + at]);
                }
            }
        }
    }
    return sums;
}

fn product(loaded: Loaded, bytes: vec4u, scale_and_sum: vec2f) -> f32 {
    let sum = dot4I8Packed(loaded.bytes.x, bytes.x)
        + dot4I8Packed(loaded.bytes.y, bytes.y)
        + dot4I8Packed(loaded.bytes.z, bytes.z)
        + dot4I8Packed(loaded.bytes.w, bytes.w);
    return loaded.scale * scale_and_sum.x * f32(sum) + loaded.add * scale_and_sum.y;
}
