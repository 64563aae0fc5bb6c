//! A memory cgroup for programs under test: a limit as containers have it. Takes root and a writable hierarchy, of version 1 or 2.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

/// Removed on drop, when its programs have ended.
pub struct MemoryGroup {
    folder: PathBuf,
}

impl MemoryGroup {
    /// A group whose programs have `limit_bytes` of memory together, page cache included.
    ///
    /// # Errors
    /// Where this process may not create one.
    pub fn new(name: &str, limit_bytes: u64) -> io::Result<MemoryGroup> {
        let v1 = Path::new("/sys/fs/cgroup/memory");
        let (parent, limit) = match v1.join("memory.limit_in_bytes").exists() {
            true => (v1, "memory.limit_in_bytes"),
            false => {
                let root = Path::new("/sys/fs/cgroup");
                fs::write(root.join("cgroup.subtree_control"), "+memory")?;
                (root, "memory.max")
            }
        };
        let folder = parent.join(format!("prima-{name}-{}", std::process::id()));
        fs::create_dir(&folder)?;
        let group = MemoryGroup { folder };
        fs::write(group.folder.join(limit), limit_bytes.to_string())?;
        Ok(group)
    }

    /// `command`, to be started inside of the group.
    pub fn enter(&self, command: Command) -> Command {
        let mut inside = Command::new("sh");
        inside
            .arg("-c")
            .arg("echo $$ > \"$0\" && exec \"$@\"")
            .arg(self.folder.join("cgroup.procs"))
            .arg(command.get_program())
            .args(command.get_args());
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(key, value),
                None => inside.env_remove(key),
            };
        }
        inside
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // Programs that were killed just now are in it for a moment. When one does not end, the group stays.
        for _ in 0..100 {
            if fs::remove_dir(&self.folder).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Drops `file` from the page cache: a page counts in the group that touched it first, so a measured group must touch all of its
/// own. Pages that some process has mapped stay; who measures beside strangers takes a [`cold_copy`].
///
/// # Errors
/// A file that cannot be opened.
pub fn drop_cached(file: &Path) -> io::Result<()> {
    let file = fs::File::open(file)?;
    // What is not written yet cannot be dropped.
    file.sync_all()?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

/// A copy of `file` in `folder` of which nothing is in the page cache.
///
/// # Errors
/// A file that cannot be copied.
pub fn cold_copy(file: &Path, folder: &Path) -> io::Result<PathBuf> {
    let name = file.file_name().unwrap_or_default();
    let copy = folder.join(name);
    fs::copy(file, &copy)?;
    drop_cached(&copy)?;
    Ok(copy)
}
