//! The header of a model file, read from a server in pieces that grow until the whole header is there.
//!
//! Refuses: to fetch more than a few bytes of a file that is not GGUF, and headers larger than any model has.

use prima_gguf::{Gguf, GgufError};

use crate::remote::Remote;
use crate::remote_error::RemoteError;

/// Holds the header of models with a vocabulary of some 25,000 tokens.
const FIRST_READ: u64 = 1 << 20;
/// The most that is fetched: eight times the largest header of a published model.
const MAX_READ: u64 = 256 << 20;

/// Why a header could not be read.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    #[error("cannot fetch the model's header")]
    Fetch { source: RemoteError },
    #[error("the model's header cannot be used")]
    Gguf { source: GgufError },
    #[error("{url}: expected a header of at most {MAX_READ} bytes, found at least {needed}")]
    TooLarge { url: String, needed: u64 },
}

impl Remote {
    /// The file's header, parsed, and its bytes from the file's start to where tensor data begins.
    ///
    /// # Errors
    /// [`HeaderError`]: a file that is no GGUF file after its first four bytes.
    pub async fn read_header(&self) -> Result<(Gguf, Vec<u8>), HeaderError> {
        let size_bytes = self.identity().size_bytes;
        let mut header = self.first_bytes().to_vec();
        let mut next_read = FIRST_READ;
        loop {
            match Gguf::parse(&self.shown(), &header, size_bytes) {
                Ok(gguf) => {
                    // The padding before the data may still be missing, or some data may be there already.
                    if (header.len() as u64) < gguf.data_offset {
                        self.extend(&mut header, gguf.data_offset).await?;
                    }
                    header.truncate(usize::try_from(gguf.data_offset).unwrap_or(usize::MAX));
                    return Ok((gguf, header));
                }
                Err(GgufError::NeedMoreBytes { needed, .. }) => {
                    if needed > MAX_READ || header.len() as u64 >= MAX_READ {
                        return Err(HeaderError::TooLarge {
                            url: self.shown(),
                            needed,
                        });
                    }
                    let end = next_read.max(needed).min(MAX_READ).min(size_bytes);
                    self.extend(&mut header, end).await?;
                    next_read = 2 * end;
                }
                Err(source) => return Err(HeaderError::Gguf { source }),
            }
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
            if header.len() > before {
                attempts.progress();
            }
            attempts
                .failed(error)
                .await
                .map_err(|source| HeaderError::Fetch { source })?;
        }
    }

    async fn extend_once(&self, header: &mut Vec<u8>, end: u64) -> Result<(), RemoteError> {
        let mut body = self.body(header.len() as u64..end).await?;
        while let Some(chunk) = body.chunk().await? {
            header.extend_from_slice(&chunk);
        }
        Ok(())
    }
}
