// gate = activation(gate) * up, number by number (`activations.wgsl`).

const THREADS = 256u;

struct Params {
    // Fours of numbers.
    count: u32,
    activation: u32,
}

var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> up: array<vec4f>;
@group(0) @binding(1) var<storage, read_write> gate: array<vec4f>;

@compute @workgroup_size(THREADS)
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    for (var i = id.x; i < params.count; i += groups.x * THREADS) {
        gate[i] = gated(gate[i], up[i], params.activation);
    }
}
