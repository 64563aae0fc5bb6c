//! Whose turn it is to read the header of a model on a server. A header takes several times its bytes, and whoever names a server may name a
//! slow one, or a file with a header such as no model has.
//!
//! Decides: that small headers are read a few at a time, large ones one after another, and of one owner two at a time; and how long one may
//! take. So a server that is slow keeps others waiting for no longer than that, and an owner of many such models for twice as long at most. What cannot be
//! stopped, as a header is parsed, has its turn to its end, also if nobody waits for it any more.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prima_gguf::MAX_HEADER_LEN;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::client::Client;
use crate::header::HeaderError;
use crate::held::{Held, blocking, holding};
use crate::remote_error::{RemoteError, shown};
use crate::remote_model::{RemoteModel, RemoteModelError};
use crate::source::Source;

/// Headers of at most [`SMALL`] bytes that are read at the same time.
const AT_ONCE: usize = 8;
/// Larger ones are read one after another.
const SMALL: u64 = 2 << 20;

/// The turns of all owners.
#[derive(Debug)]
pub struct HeaderTurns {
    deadline: Duration,
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
    of_owners: Mutex<HashMap<String, Arc<Semaphore>>>,
}

impl HeaderTurns {
    /// Headers of one owner that are read at the same time.
    pub const OF_AN_OWNER: usize = 2;

    /// `deadline`: for one model, all parts together, from when its turn comes.
    pub fn new(deadline: Duration) -> Self {
        Self {
            deadline,
            small: Arc::new(Semaphore::new(AT_ONCE)),
            large: Arc::new(Semaphore::new(1)),
            of_owners: Mutex::default(),
        }
    }

    /// Waits until `owner`, such as a namespace, may have one more header read: until what is returned is dropped. Reading is to be done
    /// [`holding`] it.
    pub async fn of(&self, owner: &str) -> Option<OwnedSemaphorePermit> {
        let turns = {
            let mut all = self
                .of_owners
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            // Forgets those that nobody waits for or has.
            all.retain(|_, turns| Arc::strong_count(turns) > 1);
            let turns = all.entry(owner.to_owned());
            turns
                .or_insert_with(|| Arc::new(Semaphore::new(Self::OF_AN_OWNER)))
                .clone()
        };
        // This semaphore and the others are never closed.
        turns.acquire_owned().await.ok()
    }

    /// Opens the model at `source` when its turn comes, and returns what `take` makes of it, which may take its time. The turn ends with
    /// `take`, so no header should outlive that.
    ///
    /// # Errors
    /// [`RemoteModelError`]; [`HeaderError::TooLong`] if the deadline passes.
    pub async fn open<T: Send + 'static>(
        &self,
        client: &Client,
        source: &Source,
        take: impl FnOnce(RemoteModel) -> T + Send + 'static,
    ) -> Result<T, RemoteModelError> {
        let small = self.open_within(SMALL, &self.small, client, source).await;
        let (turn, remote) = match small {
            Err(RemoteModelError::Header(HeaderError::TooLarge { .. })) => {
                self.open_within(MAX_HEADER_LEN, &self.large, client, source)
                    .await?
            }
            opened => opened?,
        };
        let taking = async move { blocking(move || take(remote)).await };
        let taken = holding(turn, taking).await;
        taken.map_err(|error| HeaderError::Panicked(error).into())
    }

    /// If the header has at most `limit` bytes.
    async fn open_within(
        &self,
        limit: u64,
        turns: &Arc<Semaphore>,
        client: &Client,
        source: &Source,
    ) -> Result<(Held, RemoteModel), RemoteModelError> {
        let turn: Held = Arc::new(turns.clone().acquire_owned().await.ok());
        let opened = RemoteModel::open_within(client, source, limit);
        let opened = holding(turn.clone(), opened);
        match timeout(self.deadline, opened).await {
            Ok(opened) => Ok((turn, opened?)),
            Err(_) => {
                let url = source.url().map_err(RemoteError::from)?;
                let (url, within) = (shown(&url), self.deadline);
                Err(HeaderError::TooLong { url, within }.into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn an_owner_keeps_no_other_waiting_and_is_forgotten() {
        let turns = HeaderTurns::new(Duration::from_secs(60));
        let known = || turns.of_owners.lock().unwrap().len();
        let mut of_many = Vec::new();
        for _ in 0..HeaderTurns::OF_AN_OWNER {
            of_many.push(turns.of("many").await);
        }
        assert!(turns.of("many").now_or_never().is_none());
        let of_one = turns.of("one").await;
        assert_eq!(known(), 2);

        of_many.pop();
        let next = turns.of("many").now_or_never();
        of_many.push(next.expect("a turn"));
        drop((of_many, of_one));
        let _of_another = turns.of("another").await;
        assert_eq!(known(), 1);
    }
}
