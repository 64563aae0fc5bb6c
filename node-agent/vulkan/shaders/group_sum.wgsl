// The sum of what THREADS threads each have.

var<workgroup> parts: array<f32, THREADS>;

fn group_sum(thread: u32, own: f32) -> f32 {
    parts[thread] = own;
    for (var step = THREADS / 2u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if thread < step {
            parts[thread] += parts[thread + step];
        }
    }
    workgroupBarrier();
    return parts[0];
}
