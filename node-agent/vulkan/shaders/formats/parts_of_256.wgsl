// Blocks of 256 weights: four parts of four sixteens each (`quants.wgsl`).
const BLOCK = 256u;

// The place in the block of the `i`th sixteen of a part.
fn unit_of(part: u32, i: u32) -> u32 {
    if APART == 1u {
        return 4u * part + i;
    }
    return 8u * (part / 2u) + part % 2u + 2u * i;
}

fn load(block: u32, unit: u32) -> Loaded {
    if APART == 1u {
        return load_part(block, unit / 4u, unit % 4u);
    }
    return load_part(block, 2u * (unit / 8u) + unit % 2u, unit / 2u % 4u);
}

// Of a row of the matrix, the `i`th sixteen of the `part`th part.
fn place_of(part: u32, i: u32) -> u32 {
    return 16u * (part / 4u) + unit_of(part % 4u, i);
}

fn load_part_from(matrix_row: u32, part: u32, i: u32) -> Loaded {
    return load_part(block_of(matrix_row, part / 4u), part % 4u, i);
}
