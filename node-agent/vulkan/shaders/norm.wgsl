// RMS norm of rows (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + epsilon) * weight. One group for each row.

const THREADS = 256u;
// Numbers that a thread loads at once.
const AT_ONCE = 8u;

struct Params {
    width: u32,
    rows: u32,
    epsilon: f32,
    // 1: the result is added to what is there, multiplied by `scale`.
    add: u32,
    scale: f32,
}

var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> weight: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) thread: u32) {
    let row = group.y * groups.x + group.x;
    let first = min(row, params.rows - 1u) * params.width;
    var sum = 0.0;
    for (var start = thread; start < params.width; start += THREADS * AT_ONCE) {
        for (var i = 0u; i < AT_ONCE; i++) { // unrolled
            let number = x[first + min(start + i * THREADS, params.width - 1u)];
            sum += select(0.0, number * number, start + i * THREADS < params.width);
        }
    }
    let factor = inverseSqrt(group_sum(thread, sum) / f32(params.width) + params.epsilon);
    if row >= params.rows {
        return;
    }
    for (var start = thread; start < params.width; start += THREADS * AT_ONCE) {
        var results: array<f32, AT_ONCE>;
        for (var i = 0u; i < AT_ONCE; i++) { // unrolled
            let at = min(start + i * THREADS, params.width - 1u);
            results[i] = x[first + at] * factor * weight[at];
        }
        for (var i = 0u; i < AT_ONCE; i++) { // unrolled
            let at = start + i * THREADS;
            if at < params.width {
                if params.add != 0u {
                    out[first + at] += params.scale * results[i];
                } else {
                    out[first + at] = results[i];
                }
            }
        }
    }
}
