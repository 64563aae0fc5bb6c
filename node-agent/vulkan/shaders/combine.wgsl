// Makes one result of the parts of an attention (`attention.wgsl`): for each row and head, the mean of what they found, each weighed by
// its sum, and by how far its largest score is below the largest of all.

const THREADS = 64u;
// As `operations/attention.rs` has it.
const MOST_PARTS = 32u;
const AT_ONCE = 8u;

struct Params {
    // Rows and heads of this sequence, and the first of them.
    places: u32,
    first_place: u32,
    // Pairs of numbers of a head.
    pairs: u32,
    parts: u32,
}

var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> found: array<vec2f>;
@group(0) @binding(1) var<storage, read_write> out: array<vec2f>;

// Of each part, its largest score and its sum.
var<workgroup> weights: array<vec2f, MOST_PARTS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) thread: u32) {
    let own = group.y * groups.x + group.x;
    let first = min(own, params.places - 1u) * params.parts * (params.pairs + 1u);
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
    if own >= params.places {
        return;
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
        out[(params.first_place + own) * params.pairs + pair] = sum / total;
    }
}
