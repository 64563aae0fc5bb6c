// Adds up in shared memory.

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
    if is_idle(group) {
        return;
    }
    let lane = thread % LANES;
    put_sums(thread, own_sums(first_row_of(group, ROWS), first_matrix_row_of(group, thread), lane));
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
        finish_sum(group, thread, lane, parts[lane][thread - lane]);
    }
}
