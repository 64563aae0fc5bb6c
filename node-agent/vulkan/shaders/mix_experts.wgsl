// The weighted sum of what each row's experts made of it, and what the expert for all rows made of it, if there is one.

const THREADS = 256u;

struct Params {
    // Rows, and fours of numbers of each.
    rows: u32,
    fours: u32,
    used: u32,
    // 1: there is an expert for all rows; 2: its part is multiplied by the sigmoid of a logit; 4: the result is added to what is there.
    flags: u32,
    // What the result is multiplied by before.
    scale: f32,
}

var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> choices: array<vec2u>;
// Of each choice, the row of `made` that is its expert's.
@group(0) @binding(1) var<storage, read> places: array<u32>;
@group(0) @binding(2) var<storage, read> made: array<vec4f>;
@group(0) @binding(3) var<storage, read> shared_part: array<vec4f>;
// Of each row.
@group(0) @binding(4) var<storage, read> logits: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<vec4f>;

@compute @workgroup_size(THREADS)
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    for (var i = id.x; i < params.rows * params.fours; i += groups.x * THREADS) {
        let row = i / params.fours;
        var sum: vec4f;
        for (var choice = row * params.used; choice < (row + 1u) * params.used; choice++) {
            let weight = bitcast<f32>(choices[choice].y);
            sum += weight * made[places[choice] * params.fours + i % params.fours];
        }
        if (params.flags & 1u) != 0u {
            var factor = 1.0;
            if (params.flags & 2u) != 0u {
                factor = 1.0 / (1.0 + exp(min(-logits[row], 88.0)));
            }
            sum += factor * shared_part[i];
        }
        if (params.flags & 4u) != 0u {
            sum = out[i] + params.scale * sum;
        }
        out[i] = sum;
    }
}
