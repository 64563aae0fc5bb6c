// Rotary position embedding in place (Su et al. 2021): pair i of each head is turned by the angle of its row.

const THREADS = 64u;

struct Params {
    rows: u32,
    heads: u32,
    head_dim: u32,
    // Pairs that are turned; numbers of a head behind them stay.
    pairs: u32,
    // 1: a pair is two neighbours; 0: its second number lies `pairs` behind its first.
    neighbours: u32,
}

var<immediate> params: Params;

// For each row the cosines of its pairs, then their sines.
@group(0) @binding(0) var<storage, read> angles: array<f32>;
@group(0) @binding(1) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let count = params.rows * params.heads * params.pairs;
    for (var i = id.x; i < count; i += groups.x * THREADS) {
        let pair = i % params.pairs;
        let head = i / params.pairs;
        let row = head / params.heads;
        let cosine = angles[row * 2u * params.pairs + pair];
        let sine = angles[(row * 2u + 1u) * params.pairs + pair];
        var first = head * params.head_dim + pair;
        var second = first + params.pairs;
        if params.neighbours != 0u {
            first += pair;
            second = first + 1u;
        }
        let a = x[first];
        let b = x[second];
        x[first] = a * cosine - b * sine;
        x[second] = a * sine + b * cosine;
    }
}
