// What becomes of a sequence's new rows before they attend: queries and keys get their norms and are turned by the angles of their rows
// (rotary position embedding, Su et al. 2021), then keys and values are appended to the sequence's blocks, as F16. One group for each head of
// a row: those of queries, then of keys, then of values.

const THREADS = 64u;
const MOST_HEAD_DIM = 256u;
const LARGEST_F16 = 65504.0;

struct Params {
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    // Of this sequence among the rows of the pass, and its position.
    first_row: u32,
    first_position: u32,
    // Of its blocks, the first that it still has, and where they are listed.
    first_block: u32,
    blocks_at: u32,
    // Pairs that are turned; numbers of a head behind them stay.
    turned: u32,
    // 1: a pair is two neighbours; 0: its second number lies `turned` behind its first.
    neighbours: u32,
    // 1: queries and keys have norms.
    normed: u32,
    epsilon: f32,
}

var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> blocks: array<u32>;
@group(0) @binding(1) var<storage, read_write> queries: array<f32>;
@group(0) @binding(2) var<storage, read> keys: array<f32>;
@group(0) @binding(3) var<storage, read> values: array<f32>;
@group(0) @binding(4) var<storage, read_write> cache: array<u32>;
// For each row of the pass the cosines of its pairs, then their sines.
@group(0) @binding(5) var<storage, read> angles: array<f32>;
// Of a head.
@group(0) @binding(6) var<storage, read> query_norm: array<f32>;
@group(0) @binding(7) var<storage, read> key_norm: array<f32>;

var<workgroup> head: array<f32, MOST_HEAD_DIM>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
    let row = params.first_row + group.y;
    let is_query = group.x < params.heads;
    let is_value = group.x >= params.heads + params.kv_heads;
    var kv_head = group.x - params.heads;
    var first = (row * params.heads + group.x) * params.head_dim;
    if is_value {
        kv_head -= params.kv_heads;
    }
    if !is_query {
        first = (row * params.kv_heads + kv_head) * params.head_dim;
    }

    var sum = 0.0;
    for (var i = thread; i < params.head_dim; i += THREADS) {
        var number: f32;
        if is_query {
            number = queries[first + i];
        } else if is_value {
            number = values[first + i];
        } else {
            number = keys[first + i];
        }
        head[i] = number;
        sum += number * number;
    }
    if !is_value && params.normed != 0u {
        let factor = inverseSqrt(group_sum(thread, sum) / f32(params.head_dim) + params.epsilon);
        for (var i = thread; i < params.head_dim; i += THREADS) {
            head[i] *= factor * select(key_norm[i], query_norm[i], is_query);
        }
    }
    workgroupBarrier();
    if !is_value {
        for (var pair = thread; pair < params.turned; pair += THREADS) {
            let cosine = angles[row * 2u * params.turned + pair];
            let sine = angles[(row * 2u + 1u) * params.turned + pair];
            let at = select(pair, 2u * pair, params.neighbours != 0u);
            let other = select(pair + params.turned, 2u * pair + 1u, params.neighbours != 0u);
            let a = head[at];
            let b = head[other];
            head[at] = a * cosine - b * sine;
            head[other] = a * sine + b * cosine;
        }
    }
    workgroupBarrier();

    if is_query {
        for (var i = thread; i < params.head_dim; i += THREADS) {
            queries[first + i] = head[i];
        }
        return;
    }
    let pairs = params.head_dim / 2u;
    let width = params.kv_heads * pairs;
    let position = params.first_position + group.y;
    let block = blocks[params.blocks_at + position / POSITIONS - params.first_block];
    for (var i = thread; i < pairs; i += THREADS) {
        let pair = kv_head * pairs + i;
        let numbers = vec2f(head[2u * i], head[2u * i + 1u]);
        let at = select(key_at(block, width, position % POSITIONS, pair), value_at(block, width, position % POSITIONS, pair), is_value);
        cache[at] = pack2x16float(clamp(numbers, vec2f(-LARGEST_F16), vec2f(LARGEST_F16)));
    }
}
