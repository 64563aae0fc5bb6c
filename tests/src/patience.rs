//! Waiting for what must come some time, where no promise says when. A machine may be slow, and others may use it: so there is one
//! patience for all, and a bound shorter than it stands only where prima promises it.

use std::fmt::Display;
use std::thread;
use std::time::{Duration, Instant};

/// Within the 600 s after which a test is ended (`.config/nextest.toml`), and long enough for any machine on which the rest passes.
pub const PATIENCE: Duration = Duration::from_secs(300);
const PAUSE: Duration = Duration::from_millis(200);

/// The same for `kubectl wait` and all else that takes `--timeout`.
pub fn timeout_argument() -> String {
    format!("--timeout={}s", PATIENCE.as_secs())
}

/// Asks again until it holds; `what` names that in the panic after [`PATIENCE`].
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    wait_for(what, || holds().then_some(()).ok_or("not yet"));
}

/// Looks again until there is something; the panic after [`PATIENCE`] has the last error.
pub fn wait_for<T, E: Display>(what: &str, mut look: impl FnMut() -> Result<T, E>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let begun = Instant::now();
        match look() {
            Ok(found) => return found,
            Err(error) if Instant::now() > deadline => panic!("waited in vain: {what}: {error}"),
            Err(_) => pause(begun.elapsed()),
        }
    }
}

/// Between two looks, of which the last took so long. Where looking takes long (`kubectl`), pauses are twice as long: else those who wait
/// would keep the machine busy.
pub(crate) fn pause(looked: Duration) {
    thread::sleep(PAUSE.max(2 * looked));
}
