// Appends the keys or values of a sequence's new rows to its blocks, as F16.

const THREADS = 64u;
const LARGEST_F16 = 65504.0;

struct Params {
    // Pairs of numbers in a row.
    width: u32,
    rows: u32,
    // Of this sequence among the rows of the pass.
    first_row: u32,
    // Of its first new row.
    first_position: u32,
    // Of its blocks, the first that it still has, and where they are listed.
    first_block: u32,
    blocks_at: u32,
    // 1: values; 0: keys.
    values: u32,
}

var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> blocks: array<u32>;
@group(0) @binding(1) var<storage, read> new_rows: array<vec2f>;
@group(0) @binding(2) var<storage, read_write> cache: array<u32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    for (var i = id.x; i < params.rows * params.width; i += groups.x * THREADS) {
        let row = i / params.width;
        let pair = i % params.width;
        let position = params.first_position + row;
        let block = blocks[params.blocks_at + position / POSITIONS - params.first_block];
        let numbers = new_rows[(params.first_row + row) * params.width + pair];
        var at = key_at(block, params.width, position % POSITIONS, pair);
        if params.values != 0u {
            at = value_at(block, params.width, position % POSITIONS, pair);
        }
        cache[at] = pack2x16float(clamp(numbers, vec2f(-LARGEST_F16), vec2f(LARGEST_F16)));
    }
}
