//! Where the models, vocabularies and texts lie that `tests/assets/fetch.py` fetches (`make assets`).
//!
//! Refuses to fetch anything: a test that lacks a file says how to get it.

use std::path::PathBuf;

/// What can go wrong when a test asks for a file.
#[derive(Debug, thiserror::Error)]
pub enum AssetError {
    #[error("{} is not there: run `make assets` (python3 tests/assets/fetch.py)", path.display())]
    Missing { path: PathBuf },
    #[error(
        "neither PRIMA_CACHE nor HOME says where the cache of models is: set PRIMA_CACHE to a folder"
    )]
    NoCache,
}

/// The file or folder `relative` of the cache, for example `models/stories15M-F32.gguf`.
///
/// # Errors
/// [`AssetError::Missing`] when it has not been fetched.
pub fn path(relative: &str) -> Result<PathBuf, AssetError> {
    let path = cache()?.join(relative);
    if path.exists() {
        Ok(path)
    } else {
        Err(AssetError::Missing { path })
    }
}

/// The cache's folder: `$PRIMA_CACHE`, or `~/.cache/prima`.
///
/// # Errors
/// [`AssetError::NoCache`] when the environment says neither.
pub fn cache() -> Result<PathBuf, AssetError> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(folder) = set("PRIMA_CACHE") {
        return Ok(folder.into());
    }
    let home = set("HOME").ok_or(AssetError::NoCache)?;
    Ok(PathBuf::from(home).join(".cache/prima"))
}
