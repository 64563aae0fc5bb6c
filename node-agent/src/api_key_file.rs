//! The API keys of a ring that runs, as the machine's agent writes them into a file: they come and go while the ring runs.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use prima_crds::v1alpha1::api_keys::{ApiKeys, ApiKeysError};
use tokio::sync::watch;
use tokio::time::interval;

#[derive(Debug, thiserror::Error)]
pub enum ApiKeyFileError {
    #[error("cannot read the API keys in {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} is larger than {MAX_BYTES} bytes, which no list of API keys is", path.display())]
    Size { path: PathBuf },
    #[error("{} has no list of API keys that this version can read", path.display())]
    Keys {
        path: PathBuf,
        #[source]
        source: ApiKeysError,
    },
}

const MAX_BYTES: u64 = 1 << 20;
/// How often the file is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// What the file says, now and for as long as somebody has the receiver. A file that cannot be read any more lets nobody in.
///
/// # Errors
/// [`ApiKeyFileError`], if it cannot be read now.
pub fn follow(path: PathBuf) -> Result<watch::Receiver<ApiKeys>, ApiKeyFileError> {
    follow_by(path, LOOK)
}

fn follow_by(path: PathBuf, look: Duration) -> Result<watch::Receiver<ApiKeys>, ApiKeyFileError> {
    let (tell, told) = watch::channel(read(&path)?);
    tokio::spawn(async move {
        let mut looks = interval(look);
        while !tell.is_closed() {
            looks.tick().await;
            let (keys, problem) = match read(&path) {
                Ok(keys) => (keys, None),
                Err(error) => (ApiKeys::default(), Some(prima_crds::error_chain(&error))),
            };
            let changed = tell.send_if_modified(|known| {
                let changed = *known != keys;
                *known = keys;
                changed
            });
            match problem {
                Some(problem) if changed => tracing::error!(problem, "nobody is let in"),
                None if changed => tracing::info!("other API keys count from now on"),
                _ => {}
            }
        }
    });
    Ok(told)
}

fn read(path: &Path) -> Result<ApiKeys, ApiKeyFileError> {
    let failed = |source| ApiKeyFileError::Read {
        path: path.to_owned(),
        source,
    };
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    let read = file.take(MAX_BYTES + 1).read_to_string(&mut text);
    if read.map_err(failed)? as u64 > MAX_BYTES {
        return Err(ApiKeyFileError::Size {
            path: path.to_owned(),
        });
    }
    ApiKeys::from_json(&text).map_err(|source| ApiKeyFileError::Keys {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn keys(names: &[&str]) -> ApiKeys {
        let digest = |name: &&str| (name.to_string(), ApiKeys::digest("salt", name.as_bytes()));
        ApiKeys {
            salt: "salt".into(),
            sha256: names.iter().map(digest).collect(),
            ..ApiKeys::default()
        }
    }

    #[tokio::test]
    async fn what_the_file_says_counts_and_a_broken_one_lets_nobody_in() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.json");
        fs::write(&path, keys(&["alice", "bob"]).to_json()).unwrap();
        let look = Duration::from_millis(5);
        let mut told = follow_by(path.clone(), look).unwrap();
        assert_eq!(*told.borrow(), keys(&["alice", "bob"]));

        fs::write(&path, keys(&["bob"]).to_json()).unwrap();
        told.changed().await.unwrap();
        assert_eq!(*told.borrow_and_update(), keys(&["bob"]));

        for broken in ["", "{", r#"{"salt": "s", "sha256": {"alice": "1"}}"#] {
            fs::write(&path, broken).unwrap();
            told.wait_for(|keys| keys.sha256.is_empty()).await.unwrap();
            fs::write(&path, keys(&["bob"]).to_json()).unwrap();
            told.wait_for(|now| *now == keys(&["bob"])).await.unwrap();
        }
        fs::remove_file(&path).unwrap();
        told.wait_for(|keys| keys.sha256.is_empty()).await.unwrap();
    }

    #[tokio::test]
    async fn a_file_without_keys_is_told_at_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.json");
        let error = || follow(path.clone()).unwrap_err();
        assert!(matches!(error(), ApiKeyFileError::Read { .. }));
        fs::write(&path, "[]").unwrap();
        assert!(matches!(error(), ApiKeyFileError::Keys { .. }));
        fs::write(&path, vec![b' '; MAX_BYTES as usize + 1]).unwrap();
        assert!(matches!(error(), ApiKeyFileError::Size { .. }));
    }
}
