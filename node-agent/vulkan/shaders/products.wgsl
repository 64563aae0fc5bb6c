// What all kernels of products have: out = x * weights, rows of x times rows of a matrix. Which rows, and which matrix, `all_rows.wgsl` or
// `expert_rows.wgsl` says.

struct Params {
    // Of a row of the matrix, a multiple of 16.
    cols: u32,
    // Rows of the matrix that are bound, and the column of `out` that the first is for.
    matrix_rows: u32,
    first_column: u32,
    // Rows of x, and columns of out.
    rows: u32,
    out_columns: u32,
    // 1: there is a bias; 2: the result is added to what is there; 4: rows of x are grouped by expert, too.
    flags: u32,
    // What the result is multiplied by before.
    scale: f32,
    // Of the experts that are bound, the first, and how many.
    first_expert: u32,
    experts: u32,
}

var<immediate> params: Params;

@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;

// The `unit`th sixteen weights of a row of the matrix.
fn load_from(matrix_row: u32, unit: u32) -> Loaded {
    let units = BLOCK / 16u;
    return load(block_of(matrix_row, unit / units), unit % units);
}

// Where the `block`th block of a row of the matrix begins.
fn block_of(matrix_row: u32, block: u32) -> u32 {
    let row = first_weights_row() + min(matrix_row, params.matrix_rows - 1u);
    return (row * (params.cols / BLOCK) + block) * BYTES;
}

fn finish(row: u32, matrix_row: u32, sum: f32) {
    let column = params.first_column + matrix_row;
    let at = row * params.out_columns + column;
    var result = sum;
    if (params.flags & 1u) != 0u {
        result += bias[first_bias() + column];
    }
    if (params.flags & 2u) != 0u {
        result = out[at] + params.scale * result;
    }
    out[at] = result;
}
