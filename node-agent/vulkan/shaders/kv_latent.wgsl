// Where latents lie (multi-head latent attention), in place of `kv.wgsl`: a position leaves one row behind, a latent and what is rotated behind
// it. The row is the key of all heads, and its latent the value. A block has POSITIONS of them, as keys lie there.

const POSITIONS = 64u;

// `width`: pairs of numbers in a row.
fn key_at(block: u32, width: u32, position: u32, pair: u32) -> u32 {
    return (block * width + pair) * POSITIONS + position;
}

fn value_at(block: u32, width: u32, position: u32, pair: u32) -> u32 {
    return key_at(block, width, position, pair);
}
