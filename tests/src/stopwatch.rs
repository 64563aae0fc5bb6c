//! Time as a busy machine leaves it to prima: while its programs are ready to run and others have the processors, the clock stands. What is promised
//! within seconds is promised of a machine that runs it, and tests run beside many others. The kernel counts that time of each thread (schedstat); on a
//! machine with nothing else to do there is hardly any.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::iter::successors;
use std::process;
use std::time::{Duration, Instant};

/// Whose work is waited for, by their names in /proc, which are cut off; and this process. Python takes memory ([`crate::machine`]).
const PROGRAMS: [&str; 6] = [
    "prima",
    "prima-node-agen",
    "kube-apiserver",
    "etcd",
    "kine",
    "python3",
];

/// How long threads have waited for a processor, by process and thread.
type Waits = BTreeMap<(u32, u32), Duration>;

pub struct Stopwatch {
    started: Instant,
    before: Waits,
}

impl Stopwatch {
    pub fn start() -> Self {
        Self {
            before: waits(),
            started: Instant::now(),
        }
    }

    /// Since its start, [without](without_waits) what was [waited](Self::waited).
    pub fn elapsed(&self) -> Duration {
        without_waits(self.started.elapsed(), self.waited())
    }

    /// For how long programs that this process started have waited for a processor since then, one after the other: of each, the thread that waited
    /// longest.
    pub fn waited(&self) -> Duration {
        let mut of_each: BTreeMap<u32, Duration> = BTreeMap::new();
        for (thread, waited) in waits() {
            let before = self.before.get(&thread).copied().unwrap_or_default();
            let longest = of_each.entry(thread.0).or_default();
            *longest = (*longest).max(waited.saturating_sub(before));
        }
        of_each.values().sum()
    }
}

/// What counts of a time in which programs [waited](Stopwatch::waited) so long: a sixth at least. On a busy machine many wait at the same time, and of
/// each the thread that waits longest counts; so together they may wait for longer than has passed, and nothing would ever come too late.
pub fn without_waits(elapsed: Duration, waited: Duration) -> Duration {
    elapsed.saturating_sub(waited).max(elapsed / 6)
}

/// Of programs that run now.
fn waits() -> Waits {
    let own = process::id();
    let processes = numbers_in("/proc").into_iter();
    let parents: HashMap<u32, u32> = processes
        .filter_map(|process| Some((process, parent(process)?)))
        .collect();
    let is_ours = |process: u32| {
        let mut line = successors(Some(process), |process| parents.get(process).copied());
        line.any(|ancestor| ancestor == own)
    };
    let counts = |process: u32| {
        let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
        process == own || PROGRAMS.contains(&name.trim_end())
    };
    let all = parents.keys().copied();
    let counted = all.filter(|process| is_ours(*process) && counts(*process));
    let threads = counted.flat_map(|process| {
        let threads = numbers_in(&format!("/proc/{process}/task"));
        threads.into_iter().map(move |thread| (process, thread))
    });
    threads
        .filter_map(|thread| Some((thread, waited(thread)?)))
        .collect()
}

/// `None`: it has ended.
fn waited((process, thread): (u32, u32)) -> Option<Duration> {
    let counts = fs::read_to_string(format!("/proc/{process}/task/{thread}/schedstat"));
    let nanoseconds = counts.ok()?.split_whitespace().nth(1)?.parse().ok()?;
    Some(Duration::from_nanos(nanoseconds))
}

/// `None`: it has ended.
fn parent(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // A name may have anything in it.
    let (_, behind_the_name) = stat.rsplit_once(')')?;
    behind_the_name.split_whitespace().nth(1)?.parse().ok()
}

/// Entries of a folder that are numbers; none of one that has gone.
fn numbers_in(folder: &str) -> Vec<u32> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| name.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::hint::spin_loop;
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    #[test]
    fn it_stands_while_somebody_waits_for_a_processor() {
        let busy = 4 * thread::available_parallelism().unwrap().get();
        let barrier = Barrier::new(busy + 1);
        let watch = Stopwatch::start();
        let (waited, elapsed, real) = thread::scope(|scope| {
            for _ in 0..busy {
                scope.spawn(|| {
                    let begun = Instant::now();
                    while begun.elapsed() < Duration::from_millis(300) {
                        spin_loop();
                    }
                    // What is counted of a thread goes with it.
                    barrier.wait();
                    barrier.wait();
                });
            }
            barrier.wait();
            let found = (watch.waited(), watch.elapsed(), watch.started.elapsed());
            barrier.wait();
            found
        });
        // A quarter of the time each of them has a processor.
        assert!(waited > Duration::from_millis(100), "{waited:?}");
        // Before the watch was read, less had been waited, and after it more time had passed.
        let most = real.saturating_sub(waited).max(real / 6);
        assert!(elapsed <= most, "{elapsed:?} of {real:?}");
    }

    #[test]
    fn who_waits_all_the_time_is_late_at_last() {
        let counts = |elapsed: u64, waited: u64| {
            let [elapsed, waited] = [elapsed, waited].map(Duration::from_secs);
            without_waits(elapsed, waited).as_secs()
        };
        assert_eq!(counts(60, 0), 60);
        assert_eq!(counts(60, 45), 15);
        assert_eq!(counts(60, 55), 10);
        assert_eq!(counts(60, 500), 10);
    }
}
