//! A memory cgroup for programs under test: a limit as containers have it. Takes root and a writable hierarchy, of version 1 or 2.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

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
        // Stays when a program has not ended; it holds nothing then.
        let _ = fs::remove_dir(&self.folder);
    }
}

/// Empties the page cache: a page counts in the group that touched it first, so a measured group must touch all of its own.
///
/// # Errors
/// Without root.
pub fn drop_page_cache() -> io::Result<()> {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3")
}
