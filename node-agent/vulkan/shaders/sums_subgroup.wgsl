// As `sums_shared.wgsl`, where threads of a subgroup exchange numbers without memory. A subgroup may have fewer threads than LANES, or more. How
// many it has follows from how many there are: the size that a driver says may be another (Intel's says 32 and takes 16 or 8).

var<workgroup> parts: array<array<f32, THREADS>, ROWS * MATRIX_ROWS>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3u,
    @builtin(local_invocation_index) thread: u32,
    @builtin(num_subgroups) subgroups: u32,
) {
    let lane = thread % LANES;
    let first_matrix_row = (group.x * (THREADS / LANES) + thread / LANES) * MATRIX_ROWS;
    let first_row = group.y * ROWS;
    var sums = own_sums(first_row, first_matrix_row, lane);
    // So many neighbours add up theirs.
    let together = min(THREADS / subgroups, LANES);
    for (var step = together / 2u; step > 0u; step /= 2u) {
        for (var r = 0u; r < ROWS; r++) { // unrolled
            for (var m = 0u; m < MATRIX_ROWS; m++) { // unrolled
                sums[r * MATRIX_ROWS + m] += subgroupShuffleXor(sums[r * MATRIX_ROWS + m], step);
            }
        }
    }
    if lane % together == 0u {
        for (var r = 0u; r < ROWS; r++) { // unrolled
            for (var m = 0u; m < MATRIX_ROWS; m++) { // unrolled
                parts[r * MATRIX_ROWS + m][thread] = sums[r * MATRIX_ROWS + m];
            }
        }
    }
    workgroupBarrier();
    if lane < ROWS * MATRIX_ROWS {
        var sum = 0.0;
        for (var i = 0u; i < LANES; i += together) {
            sum += parts[lane][thread - lane + i];
        }
        let row = first_row + lane / MATRIX_ROWS;
        let matrix_row = first_matrix_row + lane % MATRIX_ROWS;
        if row < params.rows && matrix_row < params.matrix_rows {
            finish(row, matrix_row, sum);
        }
    }
}
