// What `attention.wgsl` attends from: rows of queries, all heads of a row together, and results lie like them.

// The largest head has 256 numbers.
const MOST_PAIRS = 128u;
// Pairs of queries that a thread loads at once: all threads have MOST_PAIRS after whole rounds.
const LOADED = 8u;
// Pairs of a value that a thread has.
const VALUES = 2u;

fn query_pair(row: u32, head: u32, pair: u32) -> vec2f {
    return queries[result_place(row, head) * params.pairs + pair];
}

// Which of all results of a pass is that of a row and head.
fn result_place(row: u32, head: u32) -> u32 {
    return row * params.heads + head;
}
