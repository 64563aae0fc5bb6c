// Few rows of x times weights that are floats: sixteen weights are loaded once for ROWS of them. LANES threads share MATRIX_ROWS rows of
// the matrix; `main` (`sums_*.wgsl`) adds up what each of them has.

const THREADS = 128u;
const LANES = 64u;
const MATRIX_ROWS = 2u;

fn own_sums(first_row: u32, first_matrix_row: u32, lane: u32) -> array<f32, ROWS * MATRIX_ROWS> {
    let units = params.cols / 16u;
    var rows: array<u32, ROWS>;
    for (var r = 0u; r < ROWS; r++) { // unrolled
        rows[r] = x_row(min(first_row + r, end_of_rows() - 1u));
    }
    var sums: array<f32, ROWS * MATRIX_ROWS>;
    for (var unit = lane; unit < units; unit += LANES) {
        for (var m = 0u; m < MATRIX_ROWS; m++) { // unrolled
            let loaded = load_from(first_matrix_row + m, unit);
            for (var r = 0u; r < ROWS; r++) { // unrolled
                sums[r * MATRIX_ROWS + m] += product(rows[r], unit, loaded);
            }
        }
    }
    return sums;
}
