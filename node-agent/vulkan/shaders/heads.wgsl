// What becomes of a sequence's new rows before they attend (`new_rows.wgsl`): queries and keys get their norms and are turned, then keys and values are
// appended. One group for each head of a row: those of queries, then of keys, then of values.

// Of a head.
const MOST_WIDTH = 256u;

struct Params {
    rows: NewRows,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    // 1: queries and keys have norms.
    normed: u32,
    epsilon: f32,
}

var<immediate> params: Params;

@group(0) @binding(3) var<storage, read_write> queries: array<f32>;
@group(0) @binding(4) var<storage, read> keys: array<f32>;
@group(0) @binding(5) var<storage, read> values: array<f32>;
// Of a head.
@group(0) @binding(6) var<storage, read> query_norm: array<f32>;
@group(0) @binding(7) var<storage, read> key_norm: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
    let row = params.rows.first_row + group.y;
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
        numbers[i] = number;
        sum += number * number;
    }
    if !is_value && params.normed != 0u {
        let factor = inverseSqrt(group_sum(thread, sum) / f32(params.head_dim) + params.epsilon);
        for (var i = thread; i < params.head_dim; i += THREADS) {
            numbers[i] *= factor * select(key_norm[i], query_norm[i], is_query);
        }
    }
    workgroupBarrier();
    if !is_value {
        turn(thread, row, 0u);
    }
    workgroupBarrier();

    if is_query {
        for (var i = thread; i < params.head_dim; i += THREADS) {
            queries[first + i] = numbers[i];
        }
        return;
    }
    let pairs = params.head_dim / 2u;
    let width = params.kv_heads * pairs;
    let position = params.rows.first_position + group.y;
    let block = block_of(position);
    let within = position % POSITIONS;
    for (var i = thread; i < pairs; i += THREADS) {
        let pair = kv_head * pairs + i;
        let at = select(key_at(block, width, within, pair), value_at(block, width, within, pair), is_value);
        cache[at] = in_f16(i);
    }
}
