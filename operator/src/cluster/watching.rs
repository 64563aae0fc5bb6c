//! How the operator watches: what every watch begins with.

use kube::runtime::watcher;

/// Seconds after which a watch is asked for anew, from where it was. A server whose machine has gone says nothing more, not even that.
const WATCH_SECONDS: u32 = 60;

pub fn watch() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_SECONDS)
}
