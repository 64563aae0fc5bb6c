// Blocks of 32 weights: two of them are taken for a part of four sixteens (`quants.wgsl`), of which the last one of a row may have no second.
const BLOCK = 32u;

// Of a row of the matrix, the `i`th sixteen of the `part`th part.
fn place_of(part: u32, i: u32) -> u32 {
    return 4u * part + i;
}

fn load_part_from(matrix_row: u32, part: u32, i: u32) -> Loaded {
    let blocks = params.cols / BLOCK;
    var loaded = load(block_of(matrix_row, min(2u * part + i / 2u, blocks - 1u)), i % 2u);
    if i >= 2u && 2u * part + 1u >= blocks {
        loaded.scale = 0.0;
        loaded.add = 0.0;
    }
    return loaded;
}
