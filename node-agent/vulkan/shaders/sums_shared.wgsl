// Adds up in shared memory what LANES threads each have of rows of x times rows of the matrix.

var<workgroup> parts: array<array<f32, THREADS>, ROWS * MATRIX_ROWS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
    let lane = thread % LANES;
    let first_matrix_row = (group.x * (THREADS / LANES) + thread / LANES) * MATRIX_ROWS;
    let first_row = group.y * ROWS;
    let sums = own_sums(first_row, first_matrix_row, lane);
    for (var r = 0u; r < ROWS; r++) { // unrolled
        for (var m = 0u; m < MATRIX_ROWS; m++) { // unrolled
            parts[r * MATRIX_ROWS + m][thread] = sums[r * MATRIX_ROWS + m];
        }
    }
    for (var step = LANES / 2u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if lane < step {
            for (var i = 0u; i < ROWS * MATRIX_ROWS; i++) {
                parts[i][thread] += parts[i][thread + step];
            }
        }
    }
    workgroupBarrier();
    if lane < ROWS * MATRIX_ROWS {
        let row = first_row + lane / MATRIX_ROWS;
        let matrix_row = first_matrix_row + lane % MATRIX_ROWS;
        if row < params.rows && matrix_row < params.matrix_rows {
            finish(row, matrix_row, parts[lane][thread - lane]);
        }
    }
}
