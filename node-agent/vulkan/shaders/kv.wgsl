// Where keys and values of a position lie. A block has POSITIONS positions of one layer: keys, then values, as pairs of F16 numbers in
// words. Keys lie pair by pair, since neighbouring threads take neighbouring positions; values position by position, since
// neighbouring threads take neighbouring pairs.

const POSITIONS = 64u;

// `width`: pairs of numbers in a row of keys.
fn block_words(width: u32) -> u32 {
    return 2u * POSITIONS * width;
}

fn key_at(block: u32, width: u32, position: u32, pair: u32) -> u32 {
    return block * block_words(width) + pair * POSITIONS + position;
}

fn value_at(block: u32, width: u32, position: u32, pair: u32) -> u32 {
    return block * block_words(width) + (POSITIONS + position) * width + pair;
}
