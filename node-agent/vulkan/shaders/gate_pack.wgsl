// gate = activation(gate) * up of few rows, which are rounded to bytes as well (`packing.wgsl`): they are multiplied next. Each thread has
// sixteen numbers a time.

const THREADS = 64u;

struct Params {
    // Sixteens, of all rows.
    count: u32,
    activation: u32,
}

var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> up: array<vec4f>;
@group(0) @binding(1) var<storage, read_write> gate: array<vec4f>;
@group(0) @binding(2) var<storage, read_write> packed: array<vec2u>;

@compute @workgroup_size(THREADS)
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    for (var i = id.x; i < params.count; i += groups.x * THREADS) {
        var results: array<vec4f, 4>;
        for (var j = 0u; j < 4u; j++) { // unrolled
            results[j] = gated(gate[4u * i + j], up[4u * i + j], params.activation);
        }
        for (var j = 0u; j < 4u; j++) { // unrolled
            gate[4u * i + j] = results[j];
        }
        pack(i, params.count, results[0], results[1], results[2], results[3]);
    }
}
