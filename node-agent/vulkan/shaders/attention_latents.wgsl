// What `attention.wgsl` attends from where keys are latents: queries in the space of latents, head after head, as they are multiplied with a
// matrix of each head before, and so are results behind. What is rotated of queries lies row after row.

// The largest row that a position leaves behind has 576 numbers, 512 of them its latent.
const MOST_PAIRS = 288u;
// As in `attention_rows.wgsl`.
const LOADED = 6u;
const VALUES = 4u;

@group(0) @binding(5) var<storage, read> rotated: array<vec2f>;

fn query_pair(row: u32, head: u32, pair: u32) -> vec2f {
    if pair < params.value_pairs {
        return queries[result_place(row, head) * params.value_pairs + pair];
    }
    let behind = params.pairs - params.value_pairs;
    return rotated[(row * params.heads + head) * behind + pair - params.value_pairs];
}

fn result_place(row: u32, head: u32) -> u32 {
    return head * params.pass_rows + row;
}
