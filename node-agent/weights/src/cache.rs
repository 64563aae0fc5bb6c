//! Model files in one folder: a name for each, how much of the disk they take, and which go when they take too much.
//!
//! Decides: the least recently used file goes first, together with what broken downloads left behind. Refuses: to remove what any
//! process on this machine has open as a [`LocalFile`], and to touch files whose names are not the cache's.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::SystemTime;

use prima_gguf::{first_part, part_paths};
use sha2::{Digest, Sha256};

use crate::identity::FileIdentity;
use crate::local_file::{BLOCK_BYTES, LocalFile, LocalFileError, lock_folder, remove};
use crate::source::Source;

/// How much of a file's own name is kept, so that people recognize it.
const PREFIX_BYTES: usize = 64;
const HASH_DIGITS: usize = 16;
const SUFFIXES: [&str; 3] = ["gguf", "ledger", "ledger.new"];

/// prima's cache folder: `$PRIMA_CACHE`, or `prima` in `$XDG_CACHE_HOME` or `~/.cache`. `None` if the environment sets
/// none of these.
pub fn cache_folder() -> Option<PathBuf> {
    let set = |name| {
        let value = std::env::var_os(name).filter(|value| !value.is_empty());
        value.map(PathBuf::from)
    };
    set("PRIMA_CACHE")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("prima")))
        .or_else(|| Some(set("HOME")?.join(".cache/prima")))
}

/// A folder of model files. Clones know of each other's room.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: PathBuf,
    /// Of every [`KeptRoom`].
    kept: Arc<Mutex<Vec<Weak<Sizes>>>>,
}

/// The bytes of the disk that files will take once they are fetched.
type Sizes = BTreeMap<PathBuf, u64>;

/// Room for files that are being fetched. Others get none of it until this is dropped.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct KeptRoom {
    _sizes: Arc<Sizes>,
}

/// One model file, or what is left of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheEntry {
    /// Where the model file is, or would be.
    pub path: PathBuf,
    /// Bytes on the disk, with the ledger; less than the length for a file with holes.
    pub allocated_bytes: u64,
    pub last_used: SystemTime,
}

/// What was removed, and what could not be.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Collected {
    pub removed: Vec<PathBuf>,
    pub freed_bytes: u64,
    /// What the cache takes now; above the budget if files in use take that much.
    pub remaining_bytes: u64,
}

/// What came of making room.
#[derive(Debug, PartialEq, Eq)]
pub enum Room {
    Made {
        collected: Collected,
        kept: KeptRoom,
    },
    /// Nothing was removed.
    Short {
        /// Beside what is in use.
        lacking_bytes: u64,
        /// What files in use take, or will once they are fetched, that are not those to be fetched now. Where that is not less than what is
        /// lacking, there will be room.
        others_bytes: u64,
    },
}

/// Why the cache cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    #[error("{}: cannot {action}", path.display())]
    Io {
        path: PathBuf,
        action: &'static str,
        source: io::Error,
    },
    #[error(transparent)]
    File(#[from] LocalFileError),
}

impl Cache {
    /// The cache in `folder`, which is made where it is not there.
    ///
    /// # Errors
    /// [`CacheError::Io`] when it cannot be made.
    pub fn open(folder: &Path) -> Result<Cache, CacheError> {
        fs::create_dir_all(folder).map_err(failed(folder, "make the folder"))?;
        Ok(Cache {
            folder: folder.to_owned(),
            kept: Arc::default(),
        })
    }

    /// Whether a model's path leads to what is kept here: that of any of its parts, by links, or where the same disk is mounted a second time.
    pub fn holds(&self, path: &Path) -> bool {
        let identity = |path: &Path| {
            let metadata = fs::metadata(path).ok()?;
            Some((metadata.dev(), metadata.ino()))
        };
        let Some(folder) = identity(&self.folder) else {
            return false;
        };
        let parts = part_paths(path).into_iter();
        let mut parts = parts.filter_map(|part| part.canonicalize().ok());
        parts.any(|part| {
            part.ancestors()
                .any(|above| identity(above) == Some(folder))
        })
    }

    /// Where the files of this version of the source's model are kept.
    pub fn paths(&self, source: &Source, files: &[FileIdentity]) -> Vec<PathBuf> {
        self.paths_of(&source.place(), &source.file_name(), files)
    }

    /// Where the files of a model are kept that is found at `place`, and whose (first) file has this name.
    fn paths_of(&self, place: &str, name: &str, files: &[FileIdentity]) -> Vec<PathBuf> {
        let mut hash = Sha256::new();
        let mut add = |part: &str| {
            hash.update(part.len().to_le_bytes());
            hash.update(part);
        };
        add(place);
        for file in files {
            add(&file.size_bytes.to_string());
            let version = file.sha256.as_deref().or(file.etag.as_deref());
            add(version.unwrap_or_default());
        }
        let hash = format!("{:x}", hash.finalize());
        let prefix = match first_part(name) {
            Some((prefix, _)) if files.len() > 1 => prefix,
            _ => name.strip_suffix(".gguf").unwrap_or(name),
        };
        let kept = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let prefix: String = prefix
            .chars()
            .map(|c| if kept(c) { c } else { '_' })
            .take(PREFIX_BYTES)
            .collect();
        let prefix = prefix.trim_start_matches('.');
        let stem = format!("{prefix}-{}", &hash[..HASH_DIGITS]);
        match files.len() {
            0 | 1 => vec![self.folder.join(format!("{stem}.gguf"))],
            // As the parts of a model are called everywhere, so that whoever opens the first finds the others.
            count => part_paths(&self.folder.join(format!("{stem}-00001-of-{count:05}.gguf"))),
        }
    }

    /// Opens the files for this version of the source's model; they are in use until dropped.
    ///
    /// # Errors
    /// As [`LocalFile::open`].
    pub fn files(
        &self,
        source: &Source,
        files: &[FileIdentity],
    ) -> Result<Vec<LocalFile>, CacheError> {
        opened(self.paths(source, files), files)
    }

    /// The same, for a model that another machine sends, and whose (first) file has this name there.
    ///
    /// # Errors
    /// As [`LocalFile::open`].
    pub fn sent_files(
        &self,
        name: &str,
        files: &[FileIdentity],
    ) -> Result<Vec<LocalFile>, CacheError> {
        opened(self.paths_of("sent", name, files), files)
    }

    /// Removes those of `files` in which nothing is, unless somebody else has them open: without holes they take all of their length.
    ///
    /// # Errors
    /// [`CacheError`] when a file cannot be looked at or removed.
    pub fn give_back_empty(&self, files: Vec<LocalFile>) -> Result<(), CacheError> {
        for file in files {
            let is_empty = file.present()?.is_empty();
            let path = file.path().to_owned();
            drop(file);
            if is_empty {
                unless_open(&path, remove).map_err(failed(&path, "remove"))?;
            }
        }
        Ok(())
    }

    /// Bytes that the cache may take if so much of its file system shall stay free: `kept_free` says it, given how large that is.
    ///
    /// # Errors
    /// [`CacheError::Io`] when the file system or the folder cannot be read.
    pub fn budget_bytes(&self, kept_free: fn(u64) -> u64) -> Result<u64, CacheError> {
        let room = rustix::fs::statvfs(&self.folder).map_err(|error| {
            failed(&self.folder, "learn how large its file system is")(error.into())
        })?;
        let taken = self
            .entries()?
            .into_iter()
            .map(|entry| entry.allocated_bytes);
        let bytes = |blocks: u64| blocks.saturating_mul(room.f_frsize);
        let kept_free = kept_free(bytes(room.f_blocks));
        Ok(budget(kept_free, bytes(room.f_bavail), taken.sum()))
    }

    /// Everything in the cache, least recently used first.
    ///
    /// # Errors
    /// [`CacheError::Io`] when the folder cannot be read.
    pub fn entries(&self) -> Result<Vec<CacheEntry>, CacheError> {
        let cannot_list = || failed(&self.folder, "list the folder");
        let mut entries = BTreeMap::<PathBuf, CacheEntry>::new();
        for file in fs::read_dir(&self.folder).map_err(cannot_list())? {
            let file = file.map_err(cannot_list())?;
            let Some(path) = entry_path(&file.path()) else {
                continue;
            };
            let Some(metadata) =
                metadata(&file.path()).map_err(failed(&file.path(), "look at the file"))?
            else {
                continue;
            };
            let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            let entry = entries.entry(path.clone()).or_insert(CacheEntry {
                path,
                allocated_bytes: 0,
                last_used: modified,
            });
            entry.allocated_bytes += metadata.blocks() * BLOCK_BYTES;
            entry.last_used = entry.last_used.max(modified);
        }
        let mut entries: Vec<CacheEntry> = entries.into_values().collect();
        entries.sort_by_key(|entry| entry.last_used);
        Ok(entries)
    }

    /// Removes files, least recently used first, until the cache takes at most `budget_bytes` of the disk; never a file that any
    /// process has open.
    ///
    /// # Errors
    /// [`CacheError::Io`] when a file cannot be looked at or removed.
    pub fn collect(&self, budget_bytes: u64) -> Result<Collected, CacheError> {
        let entries = self.entries()?;
        let mut collected = Collected {
            remaining_bytes: entries.iter().map(|entry| entry.allocated_bytes).sum(),
            ..Collected::default()
        };
        for entry in entries {
            if collected.remaining_bytes <= budget_bytes {
                break;
            }
            if !unless_open(&entry.path, remove).map_err(failed(&entry.path, "remove"))? {
                continue;
            }
            collected.remaining_bytes -= entry.allocated_bytes;
            collected.freed_bytes += entry.allocated_bytes;
            collected.removed.push(entry.path);
        }
        Ok(collected)
    }

    /// Removes files as [`collect`](Self::collect) does, so that the cache takes at most `budget_bytes` with what is `to_fetch`: files, and the
    /// bytes of the disk that each will take in addition. Removes none where that cannot be reached.
    ///
    /// # Errors
    /// [`CacheError::Io`] when a file cannot be looked at or removed.
    pub fn make_room(
        &self,
        budget_bytes: u64,
        to_fetch: &[(LocalFile, u64)],
    ) -> Result<Room, CacheError> {
        let more = to_fetch.iter().map(|(_, more)| *more);
        let more_bytes = more.fold(0, u64::saturating_add);
        let own = to_fetch.iter();
        let mut own: Sizes = own
            .map(|(file, more)| (file.path().to_owned(), *more))
            .collect();
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|kept| kept.strong_count() > 0);
        let others: Vec<Arc<Sizes>> = kept.iter().filter_map(Weak::upgrade).collect();
        // Of what others fetch, some is still to come.
        let (mut own_bytes, mut others_bytes, mut coming_bytes): (u64, u64, u64) = (0, 0, 0);
        for CacheEntry {
            path,
            allocated_bytes,
            ..
        } in self.entries()?
        {
            let may_go = unless_open(&path, |_| Ok(()));
            if may_go.map_err(failed(&path, "look at the file"))? {
                continue;
            }
            if let Some(size) = own.get_mut(&path) {
                own_bytes += allocated_bytes;
                *size = size.saturating_add(allocated_bytes);
                continue;
            }
            others_bytes += allocated_bytes;
            let size = others.iter().filter_map(|kept| kept.get(&path)).max();
            coming_bytes += size.map_or(0, |size| size.saturating_sub(allocated_bytes));
        }
        let new_bytes = more_bytes.saturating_add(coming_bytes);
        let lacking_bytes = (own_bytes + others_bytes)
            .saturating_add(new_bytes)
            .saturating_sub(budget_bytes);
        if lacking_bytes > 0 {
            return Ok(Room::Short {
                lacking_bytes,
                others_bytes: others_bytes + coming_bytes,
            });
        }
        let collected = self.collect(budget_bytes - new_bytes)?;
        let own = Arc::new(own);
        kept.push(Arc::downgrade(&own));
        Ok(Room::Made {
            collected,
            kept: KeptRoom { _sizes: own },
        })
    }
}

fn budget(kept_free: u64, free: u64, taken: u64) -> u64 {
    (taken + free).saturating_sub(kept_free)
}

fn opened(paths: Vec<PathBuf>, files: &[FileIdentity]) -> Result<Vec<LocalFile>, CacheError> {
    let paths = paths.into_iter();
    paths
        .zip(files)
        .map(|(path, identity)| Ok(LocalFile::open(&path, identity)?))
        .collect()
}

/// Does `work` on the file at `path`; `false` when somebody has it open.
fn unless_open(path: &Path, work: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<bool> {
    // Files are opened under this lock, so nobody opens it from here on.
    let _folder = lock_folder(path)?;
    let held = match File::open(path) {
        Ok(file) => Some(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    match held.as_ref().map_or(Ok(()), File::try_lock) {
        Ok(()) => work(path).map(|()| true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// The model file that a file in the folder is or belongs to; `None` for files that are not the cache's.
fn entry_path(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let stem = SUFFIXES
        .iter()
        .find_map(|suffix| name.strip_suffix(suffix)?.strip_suffix('.'))?;
    let (_, hash) = without_part(stem).rsplit_once('-')?;
    let ours = hash.len() == HASH_DIGITS
        && hash
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    ours.then(|| path.with_file_name(format!("{stem}.gguf")))
}

/// `stem` without the number of a part, such as `-00002-of-00003`.
fn without_part(stem: &str) -> &str {
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let part = stem.rsplit_once("-of-").and_then(|(before, count)| {
        let (before, number) = before.rsplit_once('-')?;
        (digits(number) && digits(count)).then_some(before)
    });
    part.unwrap_or(stem)
}

fn metadata(path: &Path) -> io::Result<Option<Metadata>> {
    match fs::symlink_metadata(path) {
        Ok(metadata) => Ok(metadata.is_file().then_some(metadata)),
        // Another process removed it meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn failed(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> CacheError {
    let path = path.to_owned();
    move |source| CacheError::Io {
        path,
        action,
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_of_the_file_system_stays_free() {
        // Nothing cached, half of 1000 free: three tenths may be cached.
        assert_eq!(budget(200, 500, 0), 300);
        // As much cached as may be.
        assert_eq!(budget(200, 200, 400), 400);
        // Others have filled the disk: the cache makes room.
        assert_eq!(budget(200, 20, 400), 220);
        assert_eq!(budget(200, 0, 50), 0);
    }
}
