//! Work on threads of its own, which goes on when nobody waits for it any more: a header is parsed, a name is looked up. Whoever has it begun
//! may have it hold something until it ends, such as a turn.

use std::any::Any;
use std::sync::Arc;

use tokio::task::{JoinHandle, spawn_blocking};
use tokio::task_local;

/// What is given back when nobody holds it any more.
pub type Held = Arc<dyn Any + Send + Sync>;

task_local! {
    static HELD: Held;
}

/// Does `work`. What it begins by [`blocking`] holds `held` to its end, also where `work` is given up before; and what the caller holds.
pub async fn holding<W: Future>(held: Held, work: W) -> W::Output {
    let outer = HELD.try_with(Held::clone).ok();
    HELD.scope(Arc::new((outer, held)), work).await
}

/// As [`spawn_blocking`], and holds what the caller does.
pub(crate) fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    let held = HELD.try_with(Held::clone).ok();
    spawn_blocking(move || {
        let _held = held;
        work()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use tokio::sync::oneshot;
    use tokio::time::sleep;

    use super::*;

    #[tokio::test]
    async fn what_goes_on_holds_it_though_nobody_waits() {
        let (held, inner): (Held, Held) = (Arc::new(()), Arc::new(()));
        let (begins, begun) = oneshot::channel();
        let (ends, ended) = mpsc::channel::<()>();
        let work = async move {
            let work = blocking(move || {
                let _ = begins.send(());
                let _ = ended.recv();
            });
            work.await
        };
        let work = holding(held.clone(), holding(inner.clone(), work));
        let given_up = tokio::spawn(work);
        begun.await.unwrap();
        given_up.abort();
        assert!(given_up.await.unwrap_err().is_cancelled());
        let count = || [&held, &inner].map(Arc::strong_count);
        assert_eq!(count(), [2, 2]);
        drop(ends);
        while count() != [1, 1] {
            sleep(Duration::from_millis(1)).await;
        }
    }
}
