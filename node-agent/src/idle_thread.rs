//! Threads that compute only where nobody else does.

use std::io;

/// Has the calling thread, and those that it starts, compute with what all others leave (`SCHED_IDLE`): those of its control group. The lowest nice value is not enough: such a thread still takes a whole tick (4 ms) a few times
/// in a second from one that computes a ring's layers. Where processors are never idle, it takes some 300 times as long as it computes, so it
/// must hold nothing meanwhile that others wait for. There is no way back. Elsewhere than on Linux nothing happens.
///
/// # Errors
/// A system that does not allow it.
pub fn only_when_idle() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        let priority = libc::sched_param { sched_priority: 0 };
        // SAFETY: 0 is the calling thread, and `priority` outlives the call.
        if unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const priority) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
