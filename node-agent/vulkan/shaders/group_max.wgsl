// The largest of what THREADS threads each have.

var<workgroup> largest_of: array<f32, THREADS>;

fn group_max(thread: u32, own: f32) -> f32 {
    largest_of[thread] = own;
    for (var step = THREADS / 2u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if thread < step {
            largest_of[thread] = max(largest_of[thread], largest_of[thread + step]);
        }
    }
    workgroupBarrier();
    return largest_of[0];
}
