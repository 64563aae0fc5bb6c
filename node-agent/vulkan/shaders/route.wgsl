// Chooses for each row the experts with the best scores, the best first; of equal ones the one with the lower number. One group for each row.

const THREADS = 128u;
const MOST_EXPERTS = 512u;
const MOST_USED = 64u;
const MOST_GROUPS = 64u;
// The least sum that weights are divided by: the smallest positive normal number in half precision, as in llama.cpp.
const LEAST_SUM = 6.103515625e-5;

struct Params {
    experts: u32,
    used: u32,
    // Experts in groups of equal size, of which a row uses some; 1: they are one group.
    groups: u32,
    groups_used: u32,
    // 0: scores are the softmax of the logits; 1: their sigmoids; 2: the logits, and weights the softmax of those that are chosen.
    gating: u32,
    // 1: experts are chosen with a bias; 2: the weights of a row are divided by their sum.
    flags: u32,
    // What weights are multiplied by at last.
    scale: f32,
    // 1: each choice is a tile of its own, so there is nothing to group.
    ungrouped: u32,
}

var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> selection_bias: array<f32>;
// Of each row: its experts, and the bits of their weights.
@group(0) @binding(2) var<storage, read_write> choices: array<vec2u>;
// As `group_experts.wgsl` writes them, where there is nothing to group.
@group(0) @binding(3) var<storage, read_write> rows: array<u32>;
@group(0) @binding(4) var<storage, read_write> places: array<u32>;
@group(0) @binding(5) var<storage, read_write> tiles: array<vec4u>;

var<workgroup> scores: array<f32, MOST_EXPERTS>;
// What experts are chosen by.
var<workgroup> keys: array<u32, MOST_EXPERTS>;
// The same of groups; then whether a row uses them.
var<workgroup> group_keys: array<u32, MOST_GROUPS>;
var<workgroup> groups_in: array<u32, MOST_GROUPS>;
var<workgroup> chosen: array<u32, MOST_USED>;
var<workgroup> weights: array<f32, MOST_USED>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
    let row = group.x;
    var largest = -3.4e38;
    for (var expert = thread; expert < params.experts; expert += THREADS) {
        let logit = logits[row * params.experts + expert];
        scores[expert] = logit;
        largest = max(largest, logit);
    }
    if params.gating == 0u {
        largest = group_max(thread, largest);
        var sum = 0.0;
        for (var expert = thread; expert < params.experts; expert += THREADS) {
            scores[expert] = exp(scores[expert] - largest);
            sum += scores[expert];
        }
        sum = group_sum(thread, sum);
        for (var expert = thread; expert < params.experts; expert += THREADS) {
            scores[expert] /= sum;
        }
    }
    for (var expert = thread; expert < params.experts; expert += THREADS) {
        if params.gating == 1u {
            scores[expert] = 1.0 / (1.0 + exp(min(-scores[expert], 88.0)));
        }
        keys[expert] = in_order(key_of(expert));
    }
    workgroupBarrier();

    let size = params.experts / params.groups;
    if params.groups > 1u {
        if thread < params.groups {
            group_keys[thread] = in_order(two_best(thread * size, size));
        }
        workgroupBarrier();
        if thread < params.groups {
            var better = 0u;
            for (var other = 0u; other < params.groups; other++) {
                better += u32(is_better(group_keys[other], other, group_keys[thread], thread));
            }
            groups_in[thread] = u32(better < params.groups_used);
        }
        workgroupBarrier();
        for (var expert = thread; expert < params.experts; expert += THREADS) {
            if groups_in[expert / size] == 0u {
                keys[expert] = 0u;
            }
        }
        workgroupBarrier();
    }

    // An expert's place is the number of those that are better. Those of other groups have the least key; no number has it.
    for (var expert = thread; expert < params.experts; expert += THREADS) {
        let key = keys[expert];
        var better = 0u;
        for (var other = 0u; other < params.experts; other++) {
            better += u32(is_better(keys[other], other, key, expert));
        }
        if better < params.used {
            chosen[better] = expert;
            weights[better] = scores[expert];
        }
    }
    workgroupBarrier();
    if thread < params.used {
        let choice = row * params.used + thread;
        choices[choice] = vec2u(chosen[thread], bitcast<u32>(weight_of(thread)));
        if params.ungrouped != 0u {
            rows[choice] = row;
            places[choice] = choice;
            tiles[choice] = vec4u(chosen[thread], choice, choice + 1u, 0u);
        }
    }
}

fn key_of(expert: u32) -> f32 {
    if (params.flags & 1u) != 0u {
        return scores[expert] + selection_bias[expert];
    }
    return scores[expert];
}

// The sum of the best two keys of so many experts.
fn two_best(first: u32, count: u32) -> f32 {
    var best = -3.4e38;
    var second = -3.4e38;
    for (var i = 0u; i < count; i++) {
        let key = key_of(first + i);
        second = max(second, min(best, key));
        best = max(best, key);
    }
    return best + second;
}

// A number above 0 that is larger where `number` is: every pattern of bits has its place, so places are all taken once, whatever the numbers
// are.
fn in_order(number: f32) -> u32 {
    let bits = bitcast<u32>(number);
    return max(bits ^ select(0x80000000u, 0xffffffffu, bits >= 0x80000000u), 1u);
}

fn is_better(key: u32, number: u32, than: u32, its_number: u32) -> bool {
    return key > than || (key == than && number < its_number);
}

fn weight_of(choice: u32) -> f32 {
    var weight = weights[choice];
    if params.gating == 2u {
        var largest = weights[0];
        for (var i = 1u; i < params.used; i++) {
            largest = max(largest, weights[i]);
        }
        var sum = 0.0;
        for (var i = 0u; i < params.used; i++) {
            sum += exp(weights[i] - largest);
        }
        weight = exp(weight - largest) / sum;
    }
    if (params.flags & 2u) != 0u {
        // (Of weights that are a softmax the sum is 1.)
        var sum = 0.0;
        for (var i = 0u; i < params.used; i++) {
            sum += weights[i];
        }
        weight /= max(select(sum, 1.0, params.gating == 2u), LEAST_SUM);
    }
    return params.scale * weight;
}
