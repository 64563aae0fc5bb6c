// What heads made of rows, head after head, as rows of all heads. Few of these are rounded to bytes as well (`packing.wgsl`): they are
// multiplied next.

const THREADS = 64u;

struct Params {
    rows: u32,
    heads: u32,
    // Sixteens that a head makes of a row.
    width: u32,
    // 1: rows are rounded.
    rounded: u32,
}

var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> x: array<vec4f>;
@group(0) @binding(1) var<storage, read_write> out: array<vec4f>;
@group(0) @binding(2) var<storage, read_write> packed: array<vec2u>;

@compute @workgroup_size(THREADS)
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let count = params.rows * params.heads * params.width;
    for (var i = id.x; i < count; i += groups.x * THREADS) {
        let row = i / params.width / params.heads;
        let head = i / params.width % params.heads;
        let made = (head * params.rows + row) * params.width + i % params.width;
        var sixteen: array<vec4f, 4>;
        for (var j = 0u; j < 4u; j++) { // unrolled
            sixteen[j] = x[4u * made + j];
        }
        for (var j = 0u; j < 4u; j++) { // unrolled
            out[4u * i + j] = sixteen[j];
        }
        if params.rounded != 0u {
            pack(i, count, sixteen[0], sixteen[1], sixteen[2], sixteen[3]);
        }
    }
}
