// A product of rows that are grouped by expert (`group_experts.wgsl`), or by head where each has a matrix (`operations/latent.rs`): a group of
// threads has a tile of rows of one expert, whose part of the matrix they are multiplied with.

// Of each tile: its expert, its first row, and one behind its last; without rows: there is none.
@group(0) @binding(5) var<storage, read> tiles: array<vec4u>;
// Which row of x a row of the result is made of, unless x has the same rows.
@group(0) @binding(6) var<storage, read> x_rows: array<u32>;

var<private> tile: vec4u;

// Takes the group's tile. Idle are groups without one, and those whose expert is not bound. (All threads of a group find the same, so they go
// on to the same barriers; the build does not see that.)
fn is_idle(group: vec3u) -> bool {
    tile = tiles[group.y];
    return tile.y == tile.z || tile.x < params.first_expert || tile.x >= params.first_expert + params.experts;
}

fn first_row_of(group: vec3u, height: u32) -> u32 {
    return tile.y;
}

fn end_of_rows() -> u32 {
    return tile.z;
}

fn x_row(row: u32) -> u32 {
    if (params.flags & 4u) != 0u {
        return row;
    }
    return x_rows[row];
}

fn first_weights_row() -> u32 {
    return (tile.x - params.first_expert) * params.matrix_rows;
}

fn first_bias() -> u32 {
    return tile.x * params.out_columns;
}
