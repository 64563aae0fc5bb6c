// Rounds rows to bytes (`packing.wgsl`).

const THREADS = 64u;

struct Params {
    // Sixteens, of all rows.
    count: u32,
}

var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> x: array<vec4f>;
@group(0) @binding(1) var<storage, read_write> packed: array<vec2u>;

@compute @workgroup_size(THREADS)
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    for (var i = id.x; i < params.count; i += groups.x * THREADS) {
        pack(i, params.count, x[4u * i], x[4u * i + 1u], x[4u * i + 2u], x[4u * i + 3u]);
    }
}
