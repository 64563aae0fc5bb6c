//! Where compute threads wake up: never on the core of the thread that wakes them. Left alone, Linux often puts them
//! there, because at that moment the other cores still run the ring neighbour whose work has just ended. It then
//! leaves both threads on one core for milliseconds: longer than a window. The system still chooses among the other
//! cores, so that the machine's owner is not in the way. Does nothing on other systems.

pub(super) use system::{Placement, this_thread};

#[cfg(target_os = "linux")]
mod system {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

    pub fn this_thread() -> Pid {
        gettid()
    }

    pub struct Placement {
        threads: Vec<Pid>,
        /// The cores that this process may use.
        allowed: CpuSet,
        /// The core that the threads were last kept off.
        kept_off: AtomicUsize,
    }

    impl Default for Placement {
        fn default() -> Self {
            Self {
                threads: Vec::new(),
                // Without an answer there is nothing to choose from.
                allowed: sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new()),
                kept_off: AtomicUsize::new(usize::MAX),
            }
        }
    }

    impl Placement {
        pub fn add(&mut self, thread: Option<Pid>) {
            self.threads.extend(thread);
        }

        /// Keeps the threads off the core on which the caller runs, if there is another one.
        pub fn keep_off_this_core(&self) {
            let core = sched_getcpu();
            if self.kept_off.swap(core, Ordering::Relaxed) == core {
                return;
            }
            let mut others = self.allowed;
            if core < CpuSet::MAX_CPU {
                others.unset(core);
            }
            if others.count() == 0 {
                return;
            }
            for &thread in &self.threads {
                // Where the system refuses, the thread wakes up wherever it likes.
                let _ = sched_setaffinity(Some(thread), &others);
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    #[derive(Default)]
    pub struct Placement;

    pub fn this_thread() {}

    impl Placement {
        pub fn add(&mut self, _: Option<()>) {}

        pub fn keep_off_this_core(&self) {}
    }
}
