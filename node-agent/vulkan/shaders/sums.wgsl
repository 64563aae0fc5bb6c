// What both ways to add up what threads have of rows of x times rows of the matrix share: LANES of them have parts of the same sums.

var<workgroup> parts: array<array<f32, THREADS>, ROWS * MATRIX_ROWS>;

fn first_matrix_row_of(group: vec3u, thread: u32) -> u32 {
    return (group.x * (THREADS / LANES) + thread / LANES) * MATRIX_ROWS;
}

fn put_sums(thread: u32, sums: array<f32, ROWS * MATRIX_ROWS>) {
    for (var r = 0u; r < ROWS; r++) { // unrolled
        for (var m = 0u; m < MATRIX_ROWS; m++) { // unrolled
            parts[r * MATRIX_ROWS + m][thread] = sums[r * MATRIX_ROWS + m];
        }
    }
}

// The `i`th sum.
fn finish_sum(group: vec3u, thread: u32, i: u32, sum: f32) {
    let row = first_row_of(group, ROWS) + i / MATRIX_ROWS;
    let matrix_row = first_matrix_row_of(group, thread) + i % MATRIX_ROWS;
    if row < end_of_rows() && matrix_row < params.matrix_rows {
        finish(row, matrix_row, sum);
    }
}
