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
    // A row mostly has no more than a sixteen for each thread, which is loaded once, with its weights.
    let own = sixteen_of(first, min(thread, params.width - 1u));
    var sum = select(0.0, square(own), thread < params.width);
    for (var i = thread + THREADS; i < params.width; i += THREADS) {
        sum += square(sixteen_of(first, i));
    }
    let factor = inverseSqrt(group_sum(thread, sum) / f32(16u * params.width) + params.epsilon);
    if thread < params.width {
        put(first, thread, own, factor);
    }
    for (var i = thread + THREADS; i < params.width; i += THREADS) {
        put(first, i, sixteen_of(first, i), factor);
    }
}

// Of a row's numbers and of the weights.
struct Sixteen {
    x: array<vec4f, 4>,
    weights: array<vec4f, 4>,
}

fn sixteen_of(first: u32, i: u32) -> Sixteen {
    var loaded: Sixteen;
    for (var j = 0u; j < 4u; j++) { // unrolled
        loaded.x[j] = x[4u * (first + i) + j];
        loaded.weights[j] = weight[4u * i + j];
    }
    return loaded;
}

fn square(sixteen: Sixteen) -> f32 {
    let x = sixteen.x;
    return dot(x[0], x[0]) + dot(x[1], x[1]) + dot(x[2], x[2]) + dot(x[3], x[3]);
}

fn put(first: u32, i: u32, sixteen: Sixteen, factor: f32) {
    var normed: array<vec4f, 4>;
    for (var j = 0u; j < 4u; j++) { // unrolled
        normed[j] = sixteen.x[j] * factor * sixteen.weights[j];
    }
    for (var j = 0u; j < 4u; j++) { // unrolled
        out[4u * (first + i) + j] = normed[j];
    }
    pack(first + i, params.rows * params.width, normed[0], normed[1], normed[2], normed[3]);
}
