// RMS norm of few rows (`norm.wgsl`), which are rounded to bytes as well (`packing.wgsl`): they are multiplied next. One group for each row;
// each thread has sixteen numbers a time.

const THREADS = 256u;

struct Params {
    // Sixteens of a row.
    width: u32,
    rows: u32,
    epsilon: f32,
}

var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> weight: array<vec4f>;
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4f>;
@group(0) @binding(3) var<storage, read_write> packed: array<vec2u>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
    let first = group.x * params.width;
    var sum = 0.0;
    for (var i = thread; i < params.width; i += THREADS) {
        for (var j = 0u; j < 4u; j++) { // unrolled
            let four = x[4u * (first + i) + j];
            sum += dot(four, four);
        }
    }
    let factor = inverseSqrt(group_sum(thread, sum) / f32(16u * params.width) + params.epsilon);
    for (var i = thread; i < params.width; i += THREADS) {
        var normed: array<vec4f, 4>;
        for (var j = 0u; j < 4u; j++) { // unrolled
            normed[j] = x[4u * (first + i) + j] * factor * weight[4u * i + j];
        }
        for (var j = 0u; j < 4u; j++) { // unrolled
            out[4u * (first + i) + j] = normed[j];
        }
        pack(first + i, params.rows * params.width, normed[0], normed[1], normed[2], normed[3]);
    }
}
