//! What this user's prima remembers of other machines, in files that only the user may read: its own key, the borrowers that its agent
//! knows, and the lenders that it has borrowed from.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::ring::{Identity, IdentityError};

/// Fingerprint of each borrower's key (64 hexadecimal digits), and what it calls itself.
pub type Borrowers = BTreeMap<String, String>;

/// HOST:PORT of each lender, and the fingerprint of its key.
pub type Lenders = BTreeMap<String, String>;

#[derive(Debug, thiserror::Error)]
pub enum KnownError {
    #[error("neither XDG_DATA_HOME nor HOME says where this user's files are")]
    NoFolder,
    #[error("cannot make the folder {}", path.display())]
    Folder {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is damaged; delete it, and enrol the machines in it again", path.display())]
    Damaged {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// The folder of these files: `prima` in `$XDG_DATA_HOME` or `~/.local/share`.
pub struct Known(PathBuf);

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File<T> {
    machines: T,
}

impl Known {
    /// # Errors
    /// When there is no such folder and none can be made.
    pub fn open() -> Result<Self, KnownError> {
        let set = |name| {
            let value = std::env::var_os(name).filter(|value| !value.is_empty());
            value.map(PathBuf::from)
        };
        let folder = set("XDG_DATA_HOME")
            .or_else(|| Some(set("HOME")?.join(".local/share")))
            .ok_or(KnownError::NoFolder)?;
        Self::at(folder.join("prima"))
    }

    pub(super) fn at(path: PathBuf) -> Result<Self, KnownError> {
        match fs::create_dir_all(&path) {
            Ok(()) => Ok(Self(path)),
            Err(source) => Err(KnownError::Folder { path, source }),
        }
    }

    /// The file with this user's key.
    pub fn identity_file(&self) -> PathBuf {
        self.0.join("identity.key")
    }

    /// This user's key, made where there is none.
    ///
    /// # Errors
    /// [`IdentityError`].
    pub fn identity(&self) -> Result<Identity, KnownError> {
        Ok(Identity::load_or_create(&self.identity_file())?)
    }

    /// The file with the borrowers.
    pub fn borrowers_file(&self) -> PathBuf {
        self.0.join("borrowers.json")
    }

    /// # Errors
    /// When there is a file that cannot be used.
    pub fn borrowers(&self) -> Result<Borrowers, KnownError> {
        read(&self.borrowers_file())
    }

    /// # Errors
    /// When the file cannot be written.
    pub fn keep_borrowers(&self, borrowers: Borrowers) -> Result<(), KnownError> {
        write(&self.borrowers_file(), borrowers)
    }

    /// # Errors
    /// When there is a file that cannot be used.
    pub fn lenders(&self) -> Result<Lenders, KnownError> {
        read(&self.0.join("lenders.json"))
    }

    /// # Errors
    /// When the file cannot be written.
    pub fn keep_lenders(&self, lenders: Lenders) -> Result<(), KnownError> {
        write(&self.0.join("lenders.json"), lenders)
    }
}

fn read<T: DeserializeOwned + Default>(path: &Path) -> Result<T, KnownError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(T::default()),
        Err(source) => {
            let path = path.to_owned();
            return Err(KnownError::Read { path, source });
        }
    };
    let file: Result<File<T>, _> = serde_json::from_str(&text);
    file.map(|file| file.machines)
        .map_err(|source| KnownError::Damaged {
            path: path.to_owned(),
            source,
        })
}

/// Whole or not at all, and for this user only.
fn write<T: Serialize>(path: &Path, machines: T) -> Result<(), KnownError> {
    let written = || {
        let folder = path.parent().unwrap_or(Path::new("."));
        // Made with mode 0600.
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        serde_json::to_writer_pretty(&mut file, &File { machines })?;
        file.flush()?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    };
    written().map_err(|source: io::Error| KnownError::Write {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn what_was_kept_is_there_again_and_for_its_owner_only() {
        let folder = tempfile::tempdir().unwrap();
        let known = Known::at(folder.path().join("prima")).unwrap();
        assert!(known.borrowers().unwrap().is_empty());
        let borrowers = Borrowers::from([("ab".to_owned(), "laptop".to_owned())]);
        known.keep_borrowers(borrowers.clone()).unwrap();
        assert_eq!(known.borrowers().unwrap(), borrowers);
        assert!(known.lenders().unwrap().is_empty());
        let mode = fs::metadata(known.borrowers_file())
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
        fs::write(known.borrowers_file(), "{").unwrap();
        let error = known.borrowers().unwrap_err().to_string();
        assert!(error.contains("borrowers.json is damaged"), "{error}");
    }
}
