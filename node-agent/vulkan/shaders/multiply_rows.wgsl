// Few rows of x: sixteen weights are loaded once for ROWS of them. LANES threads share MATRIX_ROWS rows of the matrix.

const THREADS = 128u;
const LANES = 64u;
const MATRIX_ROWS = 2u;

var<workgroup> parts: array<array<f32, THREADS>, ROWS * MATRIX_ROWS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
    let lane = thread % LANES;
    let first_matrix_row = (group.x * (THREADS / LANES) + thread / LANES) * MATRIX_ROWS;
    let first_row = group.y * ROWS;
    let units = params.cols / 16u;

    var sums: array<f32, ROWS * MATRIX_ROWS>;
    // Two units that lie in the same bytes, if the row has a second one.
    for (var pair = lane; pair < (units + 1u) / 2u; pair += LANES) {
        let unit = pair / NEXT * 2u * NEXT + pair % NEXT;
        let second = min(unit + NEXT, units - 1u);
        let has_second = f32(unit + NEXT < units);
        for (var m = 0u; m < MATRIX_ROWS; m++) { // unrolled
            let loaded = load_from(first_matrix_row + m, unit);
            let next = load_from(first_matrix_row + m, second);
            for (var r = 0u; r < ROWS; r++) { // unrolled
                let row = min(first_row + r, params.rows - 1u);
                sums[r * MATRIX_ROWS + m] += product(row, unit, loaded) + has_second * product(row, second, next);
            }
        }
    }
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
    if lane == 0u {
        for (var i = 0u; i < ROWS * MATRIX_ROWS; i++) {
            let row = first_row + i / MATRIX_ROWS;
            let matrix_row = first_matrix_row + i % MATRIX_ROWS;
            if row < params.rows && matrix_row < params.matrix_rows {
                finish(row, matrix_row, parts[i][thread]);
            }
        }
    }
}
