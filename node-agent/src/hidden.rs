//! What a member cannot read, whatever a stranger talks it into: a folder, and other processes of its user, such as the agent. Linux does that
//! (Landlock, <https://docs.kernel.org/userspace-api/landlock.html>) for a process that asks for it, and for good.
//!
//! Only reading is bound, and moving files on the way to the folder: files that are open stay open, and what a member writes is bound by its
//! user's rights.

use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum HideError {
    #[error("cannot find {}", folder.display())]
    Folder {
        folder: PathBuf,
        #[source]
        source: io::Error,
    },
    #[cfg(target_os = "linux")]
    #[error("cannot hide {}", folder.display())]
    Rules {
        folder: PathBuf,
        #[source]
        source: landlock::RulesetError,
    },
}

/// Hides `folder` from this thread, and from those that it starts from now on. Where that cannot be (a kernel before 5.13 or without Landlock,
/// a folder on the way that this process cannot list), it says so in the log and goes on. Returns whether it is hidden.
///
/// # Errors
/// If there is no such folder, or the kernel refuses the rules.
pub fn hide(folder: &Path) -> Result<bool, HideError> {
    let found = folder.canonicalize();
    let folder = found.map_err(|source| HideError::Folder {
        folder: folder.to_owned(),
        source,
    })?;
    let hidden = rules::bind(&folder)?;
    if !hidden {
        tracing::warn!(
            "{} cannot be hidden from members (the kernel has no Landlock, or a folder above it cannot be listed)",
            folder.display()
        );
    }
    Ok(hidden)
}

#[cfg(target_os = "linux")]
mod rules {
    use std::fs;
    use std::path::Path;

    use landlock::{
        AccessFs, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr as _,
        RulesetCreatedAttr as _, RulesetError, RulesetStatus, make_bitflags,
    };

    use super::HideError;

    const READING: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | ReadDir | Refer});

    /// Rules only allow. So all is allowed that lies beside the way to `folder`; whatever comes there later is hidden, too.
    pub fn bind(folder: &Path) -> Result<bool, HideError> {
        let status = allow_all_but(folder).map_err(|source| HideError::Rules {
            folder: folder.to_owned(),
            source,
        })?;
        Ok(status != RulesetStatus::NotEnforced)
    }

    fn allow_all_but(folder: &Path) -> Result<RulesetStatus, RulesetError> {
        let mut rules = Ruleset::default().handle_access(READING)?.create()?;
        for parent in folder.ancestors().skip(1) {
            let Ok(entries) = fs::read_dir(parent) else {
                return Ok(RulesetStatus::NotEnforced);
            };
            for entry in entries.flatten() {
                let path = entry.path();
                if folder.starts_with(&path) {
                    continue;
                }
                if let Ok(beside) = PathFd::new(&path) {
                    rules = rules.add_rule(PathBeneath::new(beside, READING))?;
                }
            }
        }
        Ok(rules.restrict_self()?.ruleset)
    }
}

#[cfg(not(target_os = "linux"))]
mod rules {
    pub fn bind(_: &std::path::Path) -> Result<bool, super::HideError> {
        Ok(false)
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use std::fs;
    use std::process::{Command, Stdio};
    use std::thread;

    use super::*;

    #[test]
    fn a_folder_and_other_processes_are_hidden() {
        let folder = tempfile::tempdir().unwrap();
        let (secrets, models) = (folder.path().join("secrets"), folder.path().join("models"));
        for made in [&secrets, &models] {
            fs::create_dir(made).unwrap();
            fs::write(made.join("file"), "text").unwrap();
        }
        let mut other = Command::new("sleep")
            .arg("300")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let memory = format!("/proc/{}/mem", other.id());
        let bound = {
            let (secrets, models, memory) = (&secrets, &models, &memory);
            // Only the thread is bound.
            thread::scope(|scope| {
                let bound = scope.spawn(move || {
                    let hidden = hide(secrets).unwrap();
                    fs::write(models.join("another"), "text").unwrap();
                    let opened = [
                        fs::File::open(secrets.join("file")),
                        fs::File::open(memory),
                        fs::File::open(models.join("file")),
                        fs::File::open(models.join("another")),
                        fs::File::open("/proc/self/status"),
                    ]
                    .map(|read| read.map(|_| ()).map_err(|error| error.kind()));
                    (hidden, opened)
                });
                bound.join().unwrap()
            })
        };
        let free = [secrets.join("file"), memory.into()].map(fs::File::open);
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(free.iter().all(Result::is_ok), "{free:?}");
        let (hidden, opened) = bound;
        let read = match hidden {
            true => Err(io::ErrorKind::PermissionDenied),
            // Where the kernel cannot, it says so.
            false => Ok(()),
        };
        assert_eq!(opened, [read, read, Ok(()), Ok(()), Ok(())]);
    }

    #[test]
    fn what_is_not_there_is_named() {
        let error = hide(Path::new("/no/such/folder")).unwrap_err();
        assert_eq!(error.to_string(), "cannot find /no/such/folder");
    }
}
