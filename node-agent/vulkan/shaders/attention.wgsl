// Attention of a sequence's rows to the positions before them, flash form: scores are never written (Dao et al. 2022). The query heads
// that share a key head are rows of one tile, so keys and values are read once for all of them. A group of 64 threads has up to
// QUERIES rows of queries and goes through the blocks that one of them sees: first each thread has a position, then a pair of numbers.
// QUERIES is 4 for the only tile of few rows, whose heads mostly share by four, and else 8: rows that are not there take time, too. Of queries
// as wide as latents, shared memory has room for 4.
// Where there are few tiles, several groups each take a part of the blocks, and `combine.wgsl` makes one result of theirs.
// How queries and results lie, and how large heads are, is in `attention_rows.wgsl` or `attention_latents.wgsl`; where keys and values lie, in
// `kv.wgsl` or `kv_latent.wgsl`.

const THREADS = 64u;
// Threads that each row has between the two.
const ROW_THREADS = THREADS / QUERIES;
// Keys and values that a thread loads at once.
const AT_ONCE = 16u;
// Far below any score, and finite, so that differences are.
const UNSEEN = -1e30;

struct Params {
    heads: u32,
    kv_heads: u32,
    // Pairs of numbers of a key, and of a value.
    pairs: u32,
    value_pairs: u32,
    // Rows of the pass.
    pass_rows: u32,
    // Of this sequence: rows, the first of them among those of the pass, and its position.
    rows: u32,
    first_row: u32,
    first_position: u32,
    // Of its blocks, the first that it still has, and where they are listed.
    first_block: u32,
    blocks_at: u32,
    // Positions that a row sees, its own among them.
    window: u32,
    scale: f32,
    // Scores s become softcap * tanh(s / softcap); 0: they do not.
    softcap: f32,
    // Queries at position p are multiplied by 1 + temperature * ln(floor(p / temperature_positions) + 1).
    temperature: f32,
    temperature_positions: u32,
    // Groups that share a tile's blocks, and how many each has.
    parts: u32,
    part_blocks: u32,
    // 1: a group's result is that of its rows; 0: it is one of their parts.
    direct: u32,
    // 1: each head has a sink.
    has_sinks: u32,
    // Groups of all of this that were started before: what takes long is started in parts.
    first_group: u32,
}

var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> blocks: array<u32>;
@group(0) @binding(1) var<storage, read> queries: array<vec2f>;
@group(0) @binding(2) var<storage, read> cache: array<u32>;
// Results; or, of each of the sequence's rows, heads and parts: the largest score and the sum of weights, then the weighed values.
@group(0) @binding(3) var<storage, read_write> out: array<vec2f>;
// Of each head, a score that takes part in the softmax, and has no value (Xiao et al. 2024; gpt-oss).
@group(0) @binding(4) var<storage, read> sinks: array<f32>;

// Pair by pair, of each row of queries.
var<workgroup> query: array<vec2f, QUERIES * MOST_PAIRS>;
// Position by position, a score of each row; then what its value weighs.
var<workgroup> scores: array<array<f32, QUERIES>, THREADS>;
// Of each row, what its threads each found.
var<workgroup> partial: array<f32, THREADS>;
var<workgroup> maxima: array<f32, QUERIES>;
var<workgroup> sums: array<f32, QUERIES>;
var<workgroup> factors: array<f32, QUERIES>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
    let kv_head = group.y;
    let sharing = params.heads / params.kv_heads;
    let count = params.rows * sharing;
    let own_group = params.first_group + group.x;
    let first = own_group / params.parts * QUERIES;
    let part = own_group % params.parts;
    let width = params.kv_heads * params.pairs;

    // Each thread has the pairs of one row, ROW_THREADS apart, up to a multiple of AT_ONCE.
    let own_row = min(first + thread % QUERIES, count - 1u);
    let steps = f32((params.first_position + own_row / sharing) / params.temperature_positions);
    let factor = params.scale * (1.0 + params.temperature * log(steps + 1.0));
    let query_row = params.first_row + own_row / sharing;
    let query_head = kv_head * sharing + own_row % sharing;
    let end = (params.pairs + AT_ONCE - 1u) / AT_ONCE * AT_ONCE;
    for (var start = thread / QUERIES; start < end; start += LOADED * ROW_THREADS) {
        for (var i = 0u; i < LOADED; i++) { // unrolled
            let pair = start + i * ROW_THREADS;
            let number = query_pair(query_row, query_head, min(pair, params.pairs - 1u));
            // Behind a head's pairs, zeros are multiplied.
            query[pair * QUERIES + thread % QUERIES] = select(vec2f(), factor * number, pair < params.pairs);
        }
    }
    if thread < QUERIES {
        maxima[thread] = UNSEEN;
        sums[thread] = 0.0;
        // Of a tile's parts, the first has it.
        if params.has_sinks != 0u && part == 0u {
            maxima[thread] = sinks[query_head];
            sums[thread] = 1.0;
        }
    }
    workgroupBarrier();

    var results: array<vec2f, VALUES * QUERIES>;
    // Positions that one of the rows sees: from the first row's first to the last row's own.
    let last_position = params.first_position + min(first + QUERIES - 1u, count - 1u) / sharing;
    let first_position = seen_from(params.first_position + first / sharing);
    let first_block = first_position / POSITIONS + part * params.part_blocks;
    let last_block = min(last_position / POSITIONS, first_block + params.part_blocks - 1u);
    for (var at = first_block; at <= last_block; at++) {
        let block = blocks[params.blocks_at + at - params.first_block];
        let position = at * POSITIONS + thread;
        var found: array<f32, QUERIES>;
        for (var pair = 0u; pair < params.pairs; pair += AT_ONCE) {
            var keys: array<vec2f, AT_ONCE>;
            for (var p = 0u; p < AT_ONCE; p++) { // unrolled
                let own = kv_head * params.pairs + min(pair + p, params.pairs - 1u);
                keys[p] = unpack2x16float(cache[key_at(block, width, thread, own)]);
            }
            for (var p = 0u; p < AT_ONCE; p++) { // unrolled
                for (var i = 0u; i < QUERIES; i++) { // unrolled
                    found[i] += dot(keys[p], query[(pair + p) * QUERIES + i]);
                }
            }
        }
        for (var i = 0u; i < QUERIES; i++) { // unrolled
            let own = params.first_position + min(first + i, count - 1u) / sharing;
            var score = found[i];
            if params.softcap != 0.0 {
                score = params.softcap * tanh(clamp(score / params.softcap, -15.0, 15.0));
            }
            // What lies behind the last position was never written, and may be anything.
            let seen = position <= own && position >= seen_from(own);
            scores[thread][i] = select(UNSEEN, score, seen);
        }
        workgroupBarrier();

        // ROW_THREADS threads for each row, QUERIES positions for each of them.
        let row = thread / ROW_THREADS;
        let place = thread % ROW_THREADS;
        var most = UNSEEN;
        for (var i = 0u; i < QUERIES; i++) { // unrolled
            most = max(most, scores[place + ROW_THREADS * i][row]);
        }
        partial[thread] = most;
        workgroupBarrier();
        most = maxima[row];
        for (var i = 0u; i < ROW_THREADS; i++) {
            most = max(most, partial[ROW_THREADS * row + i]);
        }
        workgroupBarrier();
        var sum = 0.0;
        for (var i = 0u; i < QUERIES; i++) { // unrolled
            let score = scores[place + ROW_THREADS * i][row];
            let weight = select(exp(score - most), 0.0, score <= UNSEEN);
            scores[place + ROW_THREADS * i][row] = weight;
            sum += weight;
        }
        partial[thread] = sum;
        workgroupBarrier();
        if place == 0u {
            let factor = exp(maxima[row] - most);
            sum = sums[row] * factor;
            for (var i = 0u; i < ROW_THREADS; i++) {
                sum += partial[thread + i];
            }
            factors[row] = factor;
            maxima[row] = most;
            sums[row] = sum;
        }
        workgroupBarrier();

        let positions = min(POSITIONS, last_position - at * POSITIONS + 1u);
        for (var s = 0u; s < VALUES; s++) { // unrolled
            if thread + s * THREADS < params.value_pairs {
                let own = kv_head * params.pairs + thread + s * THREADS;
                for (var i = 0u; i < QUERIES; i++) { // unrolled
                    results[s * QUERIES + i] *= factors[i];
                }
                for (var first = 0u; first < positions; first += AT_ONCE) {
                    // Behind the last position weights are 0.
                    var values: array<vec2f, AT_ONCE>;
                    for (var p = 0u; p < AT_ONCE; p++) { // unrolled
                        let held = min(first + p, positions - 1u);
                        values[p] = unpack2x16float(cache[value_at(block, width, held, own)]);
                    }
                    for (var p = 0u; p < AT_ONCE; p++) { // unrolled
                        for (var i = 0u; i < QUERIES; i++) { // unrolled
                            results[s * QUERIES + i] += scores[first + p][i] * values[p];
                        }
                    }
                }
            }
        }
        workgroupBarrier();
    }

    for (var i = 0u; i < QUERIES; i++) { // unrolled
        if first + i < count {
            let row = (first + i) / sharing;
            let head = kv_head * sharing + (first + i) % sharing;
            var at = result_place(params.first_row + row, head) * params.value_pairs + thread;
            var factor = 1.0 / sums[i];
            if params.direct == 0u {
                let own = row * params.heads + head;
                at = (own * params.parts + part) * (params.value_pairs + 1u) + 1u + thread;
                factor = 1.0;
                if thread == 0u {
                    out[at - 1u] = vec2f(maxima[i], sums[i]);
                }
            }
            for (var s = 0u; s < VALUES; s++) { // unrolled
                if thread + s * THREADS < params.value_pairs {
                    out[at + s * THREADS] = factor * results[s * QUERIES + i];
                }
            }
        }
    }
}

// The first position that a row sees.
fn seen_from(position: u32) -> u32 {
    return select(0u, position + 1u - params.window, position + 1u > params.window);
}
