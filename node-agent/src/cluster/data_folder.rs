//! The agent's folder, which is one agent's at a time. A node may get another agent while its last one still ends: where it changes to another
//! DaemonSet, that one starts its pod at once. Two would take away each other's files and keep members of the same plans, so the second waits.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::sleep;

use super::ClusterError;

/// Locked by the agent whose folder this is, for as long as it runs. It says nothing.
const LOCK: &str = "agent.lock";
/// How often to look whether the agent before has ended.
const LOOK: Duration = Duration::from_secs(1);

pub struct DataFolder {
    path: PathBuf,
    lock: File,
}

/// Folders in the agent's data, which are no other's for as long as this is kept.
pub struct Folders {
    pub cache: PathBuf,
    pub plans: PathBuf,
    _lock: File,
}

impl DataFolder {
    /// Makes the folder where it is missing.
    pub fn open(path: &Path) -> Result<Self, ClusterError> {
        make(path)?;
        let lock = path.join(LOCK);
        match File::create(&lock) {
            Ok(lock) => Ok(Self {
                path: path.to_owned(),
                lock,
            }),
            Err(source) => Err(problem(lock, source)),
        }
    }

    /// Waits until no other agent has the folder, and makes those in it. May be dropped at any time.
    pub async fn own(self) -> Result<Folders, ClusterError> {
        let mut waits = false;
        loop {
            match self.lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(source)) => {
                    return Err(problem(self.path.join(LOCK), source));
                }
            }
            if !waits {
                tracing::info!(
                    folder = %self.path.display(),
                    "waits until another agent of this machine, which has the folder, has ended"
                );
                waits = true;
            }
            sleep(LOOK).await;
        }
        let folder = |name: &str| {
            let path = self.path.join(name);
            make(&path).map(|()| path)
        };
        folder("models")?;
        // What a killed agent has left there belongs to nobody.
        let _ = fs::remove_dir_all(self.path.join("plans"));
        Ok(Folders {
            cache: folder("cache")?,
            plans: folder("plans")?,
            _lock: self.lock,
        })
    }
}

fn make(path: &Path) -> Result<(), ClusterError> {
    fs::create_dir_all(path).map_err(|source| problem(path.to_owned(), source))
}

fn problem(path: PathBuf, source: io::Error) -> ClusterError {
    ClusterError::Folder { path, source }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_folder_is_one_agents_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        // What its agent has at once; `None`: it waits.
        let own = || {
            let opened = DataFolder::open(folder.path()).unwrap();
            opened.own().now_or_never().map(Result::unwrap)
        };
        let first = own().unwrap();
        fs::write(first.cache.join("weights"), "fetched").unwrap();
        fs::write(first.plans.join("left"), "by one that was killed").unwrap();
        assert!(own().is_none());
        assert!(first.plans.join("left").exists());
        drop(first);
        let next = own().unwrap();
        assert!(next.cache.join("weights").exists());
        assert_eq!(fs::read_dir(&next.plans).unwrap().count(), 0);
        assert!(folder.path().join("models").is_dir());
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let path = file.join("data");
        let Err(ClusterError::Folder { path: named, .. }) = DataFolder::open(&path) else {
            panic!("it was made");
        };
        assert_eq!(named, path);
    }
}
