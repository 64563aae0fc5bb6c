// Adds up where threads of a subgroup exchange numbers without memory. A subgroup may have fewer threads than LANES, or more. How
// many it has follows from how many there are: the size that a driver says may be another (Intel's says 32 and takes 16 or 8).

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3u,
    @builtin(local_invocation_index) thread: u32,
    @builtin(num_subgroups) subgroups: u32,
) {
    if is_idle(group) {
        return;
    }
    let lane = thread % LANES;
    var sums = own_sums(first_row_of(group, ROWS), first_matrix_row_of(group, thread), lane);
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
        put_sums(thread, sums);
    }
    workgroupBarrier();
    if lane < ROWS * MATRIX_ROWS {
        var sum = 0.0;
        for (var i = 0u; i < LANES; i += together) {
            sum += parts[lane][thread - lane + i];
        }
        finish_sum(group, thread, lane, sum);
    }
}
