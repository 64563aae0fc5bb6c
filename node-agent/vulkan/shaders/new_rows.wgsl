// What kernels share in which a sequence's new rows become ready to attend (`heads.wgsl`, `latent_heads.wgsl`). A group has numbers of one row, which
// are turned by the angles of that row (rotary position embedding, Su et al. 2021), or appended to the sequence's blocks, as F16.

const THREADS = 64u;
const LARGEST_F16 = 65504.0;

struct NewRows {
    // The sequence's first among the rows of the pass, and its position.
    first_row: u32,
    first_position: u32,
    // Of its blocks, the first that it still has, and where they are listed.
    first_block: u32,
    blocks_at: u32,
    // Pairs that are turned; other numbers stay.
    turned: u32,
    // 1: a pair is two neighbours; 0: its second number lies `turned` behind its first.
    neighbours: u32,
}

@group(0) @binding(0) var<storage, read> blocks: array<u32>;
@group(0) @binding(1) var<storage, read_write> cache: array<u32>;
// For each row of the pass the cosines of its pairs, then their sines.
@group(0) @binding(2) var<storage, read> angles: array<f32>;

var<workgroup> numbers: array<f32, MOST_WIDTH>;

// Turns those from `start` on.
fn turn(thread: u32, row: u32, start: u32) {
    let turned = params.rows.turned;
    let neighbours = params.rows.neighbours != 0u;
    for (var pair = thread; pair < turned; pair += THREADS) {
        let cosine = angles[row * 2u * turned + pair];
        let sine = angles[(row * 2u + 1u) * turned + pair];
        let at = start + select(pair, 2u * pair, neighbours);
        let other = start + select(pair + turned, 2u * pair + 1u, neighbours);
        let a = numbers[at];
        let b = numbers[other];
        numbers[at] = a * cosine - b * sine;
        numbers[other] = a * sine + b * cosine;
    }
}

// The block of a position.
fn block_of(position: u32) -> u32 {
    return blocks[params.rows.blocks_at + position / POSITIONS - params.rows.first_block];
}

// A pair of neighbours, as it is kept.
fn in_f16(pair: u32) -> u32 {
    let own = vec2f(numbers[2u * pair], numbers[2u * pair + 1u]);
    return pack2x16float(clamp(own, vec2f(-LARGEST_F16), vec2f(LARGEST_F16)));
}
