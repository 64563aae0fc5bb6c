// What becomes of a sequence's new rows before they attend to latents (multi-head latent attention), as `new_rows.wgsl` has it. Of each head's query,
// the numbers that go into the space of latents are put head after head, since each head has a matrix for them; of those behind, the last are
// turned. What a position leaves behind gets the norm of its latent, its last numbers are turned, and it is appended. One group for each head of a
// row, and one for what the row leaves behind.

// Of a query, and of what a position leaves behind.
const MOST_WIDTH = 576u;

struct Params {
    rows: NewRows,
    heads: u32,
    // Numbers of a latent, of what is rotated behind it, and of a query before what is rotated.
    rank: u32,
    rotated: u32,
    unrotated: u32,
    pass_rows: u32,
    epsilon: f32,
}

var<immediate> params: Params;

@group(0) @binding(3) var<storage, read> queries: array<f32>;
@group(0) @binding(4) var<storage, read> keys: array<f32>;
// Of a latent.
@group(0) @binding(5) var<storage, read> norm: array<f32>;
@group(0) @binding(6) var<storage, read_write> into_latents: array<f32>;
@group(0) @binding(7) var<storage, read_write> rotated: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
    let row = params.rows.first_row + group.y;
    let is_query = group.x < params.heads;
    let width = params.rotated + select(params.rank, params.unrotated, is_query);
    let first = select(row, row * params.heads + group.x, is_query) * width;

    var sum = 0.0;
    for (var i = thread; i < width; i += THREADS) {
        var number: f32;
        if is_query {
            number = queries[first + i];
        } else {
            number = keys[first + i];
        }
        numbers[i] = number;
        sum += select(0.0, number * number, i < params.rank);
    }
    if !is_query {
        let factor = inverseSqrt(group_sum(thread, sum) / f32(params.rank) + params.epsilon);
        for (var i = thread; i < params.rank; i += THREADS) {
            numbers[i] *= factor * norm[i];
        }
    }
    workgroupBarrier();
    turn(thread, row, width - 2u * params.rows.turned);
    workgroupBarrier();

    if is_query {
        let place = group.x * params.pass_rows + row;
        for (var i = thread; i < params.unrotated; i += THREADS) {
            into_latents[place * params.unrotated + i] = numbers[i];
        }
        for (var i = thread; i < params.rotated; i += THREADS) {
            rotated[(row * params.heads + group.x) * params.rotated + i] = numbers[params.unrotated + i];
        }
        return;
    }
    let pairs = width / 2u;
    let position = params.rows.first_position + group.y;
    let block = block_of(position);
    for (var pair = thread; pair < pairs; pair += THREADS) {
        cache[key_at(block, pairs, position % POSITIONS, pair)] = in_f16(pair);
    }
}
