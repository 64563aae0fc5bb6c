//! Files that were fetched whole and are not what their digests say. Once, a file may have been damaged on its way. Twice, the digest is wrong,
//! or the file on its server, and it is not fetched again: each try would cost all of it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use prima_weights::{DownloadError, LocalFile, Remote};

use super::WeightsError;

/// Where a file is kept, and its server's name for this version of it.
type Version = (PathBuf, Option<String>);

/// The digests that were found.
#[derive(Default)]
pub struct Mismatches(Mutex<HashMap<Version, Vec<String>>>);

const TRIES: usize = 2;

impl Mismatches {
    /// Refuses what has been tried often enough.
    pub fn check(&self, remote: &Remote, file: &LocalFile) -> Result<(), WeightsError> {
        match self.all().get(&version(remote, file)) {
            Some(found) if found.len() >= TRIES => Err(WeightsError::OtherDigest {
                file: remote.shown(),
                expected: file.identity().sha256.clone().unwrap_or_default(),
                found: found.join(", then "),
            }),
            _ => Ok(()),
        }
    }

    /// Remembers how a download ended. The last try that is worth it ends as a refusal.
    pub fn note(
        &self,
        remote: &Remote,
        file: &LocalFile,
        ended: Result<(), WeightsError>,
    ) -> Result<(), WeightsError> {
        match &ended {
            Ok(()) => {
                self.all().remove(&version(remote, file));
            }
            Err(WeightsError::Download(DownloadError::Sha256 { found, .. })) => {
                let tried = version(remote, file);
                self.all().entry(tried).or_default().push(found.clone());
                self.check(remote, file)?;
            }
            Err(_) => {}
        }
        ended
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Version, Vec<String>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn version(remote: &Remote, file: &LocalFile) -> Version {
    (file.path().to_owned(), remote.identity().etag.clone())
}
