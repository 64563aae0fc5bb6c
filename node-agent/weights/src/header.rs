//! The header of a model file, read from a server in pieces that grow until the whole header is there.
//!
//! Refuses: to fetch more than a few bytes of a file that is not GGUF, and headers larger than any model has.

use std::time::Duration;

use prima_gguf::{Gguf, GgufError, MAX_HEADER_LEN};
use tokio::task::JoinError;

use crate::held::blocking;
use crate::remote::Remote;
use crate::remote_error::RemoteError;

/// Holds the header of models with a vocabulary of some 25,000 tokens.
const FIRST_READ: u64 = 1 << 20;

/// A header as it was read.
#[derive(Debug)]
pub struct Header {
    pub gguf: Gguf,
    /// From the file's start to where tensor data begins.
    pub bytes: Vec<u8>,
}

/// Why a header could not be read.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    #[error("cannot fetch the model's header")]
    Fetch { source: RemoteError },
    #[error("the model's header cannot be used")]
    Gguf { source: GgufError },
    #[error("{url}: expected a header of at most {limit} bytes, found at least {needed}")]
    TooLarge {
        url: String,
        limit: u64,
        needed: u64,
    },
    #[error("{url}: the header did not come within {} s", within.as_secs())]
    TooLong { url: String, within: Duration },
    #[error("reading the model's header was cut short")]
    Panicked(#[source] JoinError),
}

impl Remote {
    /// The file's header.
    ///
    /// # Errors
    /// [`HeaderError`]: a file that is no GGUF file after its first four bytes.
    pub async fn read_header(&self) -> Result<Header, HeaderError> {
        self.read_header_within(MAX_HEADER_LEN).await
    }

    /// The same, if the header has at most `limit` bytes.
    pub(crate) async fn read_header_within(&self, limit: u64) -> Result<Header, HeaderError> {
        let size_bytes = self.identity().size_bytes;
        let too_large = |needed| HeaderError::TooLarge {
            url: self.shown(),
            limit,
            needed,
        };
        let mut bytes = self.first_bytes().to_vec();
        let mut next_read = FIRST_READ;
        loop {
            // Of a hostile header that takes seconds, in which the operator's one thread has other things to do.
            let (shown, read) = (self.shown(), bytes);
            let parsing = blocking(move || (Gguf::parse(&shown, &read, size_bytes), read));
            let (parsed, read) = parsing.await.map_err(HeaderError::Panicked)?;
            bytes = read;
            let needed = match parsed {
                Ok(gguf) if gguf.data_offset > limit => return Err(too_large(gguf.data_offset)),
                Ok(gguf) => {
                    // The padding before the data may still be missing, or some data may be there already.
                    if (bytes.len() as u64) < gguf.data_offset {
                        self.extend(&mut bytes, gguf.data_offset).await?;
                    }
                    bytes.truncate(usize::try_from(gguf.data_offset).unwrap_or(usize::MAX));
                    return Ok(Header { gguf, bytes });
                }
                Err(GgufError::NeedMoreBytes { needed, .. }) => needed,
                Err(GgufError::HeaderTooLarge { .. }) => return Err(too_large(MAX_HEADER_LEN + 1)),
                Err(source) => return Err(HeaderError::Gguf { source }),
            };
            if needed > limit || bytes.len() as u64 >= limit {
                return Err(too_large(needed));
            }
            let end = next_read.max(needed).min(limit).min(size_bytes);
            self.extend(&mut bytes, end).await?;
            next_read = 2 * end;
        }
    }

    /// Fetches what follows `header`, up to `end` of the file.
    async fn extend(&self, header: &mut Vec<u8>, end: u64) -> Result<(), HeaderError> {
        let mut attempts = self.attempts();
        loop {
            let before = header.len();
            let Err(error) = self.extend_once(header, end).await else {
                return Ok(());
            };
            attempts.brought((header.len() - before) as u64);
            attempts
                .failed(error)
                .await
                .map_err(|source| HeaderError::Fetch { source })?;
        }
    }

    async fn extend_once(&self, header: &mut Vec<u8>, end: u64) -> Result<(), RemoteError> {
        let mut body = self.body(header.len() as u64..end).await?;
        // A vector that grows by itself doubles.
        header.reserve_exact(usize::try_from(end.saturating_sub(header.len() as u64)).unwrap_or(0));
        while let Some(chunk) = body.chunk().await? {
            header.extend_from_slice(&chunk);
        }
        Ok(())
    }
}
