//! How the operator watches: what every watch begins with.

use kube::runtime::watcher;
use prima_crds::WATCH_SECONDS;

pub fn watch() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_SECONDS)
}
