// Makes one result of the parts of an attention (`attention.wgsl`): for each row and head, the mean of what they found, each weighed by
// its sum, and by how far its largest score is below the largest of all. Those of few rows are rounded to bytes as well (`packing.wgsl`):
// they are multiplied next.

const THREADS = 64u;
// As `operations/attention.rs` has it.
const MOST_PARTS = 32u;
const AT_ONCE = 8u;
// The largest value, a latent, has 512 numbers.
const MOST_PAIRS = 256u;

struct Params {
    // Of this sequence: rows times heads, and the first row.
    places: u32,
    heads: u32,
    first_row: u32,
    // Rows of the pass, if results lie head after head; 0: row after row.
    pass_rows: u32,
    // Pairs of numbers of a value.
    pairs: u32,
    parts: u32,
    // Of all rows of the pass; 0: they are not rounded.
    sixteens: u32,
}

var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> found: array<vec2f>;
@group(0) @binding(1) var<storage, read_write> out: array<vec2f>;
@group(0) @binding(2) var<storage, read_write> packed: array<vec2u>;

// Of each part, its largest score and its sum.
var<workgroup> weights: array<vec2f, MOST_PARTS>;
var<workgroup> results: array<vec2f, MOST_PAIRS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) thread: u32) {
    let own = min(group.y * groups.x + group.x, params.places - 1u);
    let first = own * params.parts * (params.pairs + 1u);
    var result = params.first_row * params.heads + own;
    if params.pass_rows != 0u {
        result = own % params.heads * params.pass_rows + params.first_row + own / params.heads;
    }
    let place = result * params.pairs;
    if thread < MOST_PARTS {
        weights[thread] = found[first + min(thread, params.parts - 1u) * (params.pairs + 1u)];
    }
    workgroupBarrier();
    var most = -1e30;
    var total = 0.0;
    for (var part = 0u; part < params.parts; part++) {
        most = max(most, weights[part].x);
    }
    for (var part = 0u; part < params.parts; part++) {
        total += exp(weights[part].x - most) * weights[part].y;
    }
    for (var pair = thread; pair < params.pairs; pair += THREADS) {
        var sum: vec2f;
        for (var part = 0u; part < params.parts; part += AT_ONCE) {
            var parts: array<vec2f, AT_ONCE>;
            for (var p = 0u; p < AT_ONCE; p++) { // unrolled
                let held = min(part + p, params.parts - 1u);
                parts[p] = found[first + held * (params.pairs + 1u) + 1u + pair];
            }
            for (var p = 0u; p < AT_ONCE; p++) { // unrolled
                if part + p < params.parts {
                    sum += exp(weights[part + p].x - most) * parts[p];
                }
            }
        }
        results[pair] = sum / total;
        out[place + pair] = sum / total;
    }
    if params.sixteens == 0u {
        return;
    }
    workgroupBarrier();
    if thread < params.pairs / 8u {
        var sixteen: array<vec4f, 4>;
        for (var i = 0u; i < 4u; i++) { // unrolled
            sixteen[i] = vec4f(results[8u * thread + 2u * i], results[8u * thread + 2u * i + 1u]);
        }
        pack(place / 8u + thread, params.sixteens, sixteen[0], sixteen[1], sixteen[2], sixteen[3]);
    }
}
