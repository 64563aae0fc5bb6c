//! A separate machine, as far as one machine can be several: a cgroup of memory, processors and disk that programs under test run in.
//! Takes root and writable cgroups, of version 1 or 2.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::PATIENCE;
use crate::process::under;

/// Its cgroups are removed on drop, when its programs have ended.
pub struct Machine {
    folders: Vec<PathBuf>,
}

/// What a machine has. `None`: whatever there is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// For all its programs, page cache included.
    pub memory_bytes: u64,
    pub cpus: Option<f64>,
    /// Of reading.
    pub disk_bytes_per_second: Option<u64>,
}

/// Of the limit on processor time, in microseconds; the usual one.
const PERIOD: f64 = 100_000.0;

impl Limits {
    pub fn of_memory(memory_bytes: u64) -> Limits {
        Limits {
            memory_bytes,
            cpus: None,
            disk_bytes_per_second: None,
        }
    }
}

impl Machine {
    /// A machine whose models lie on the disk of `models`.
    ///
    /// # Errors
    /// Where this process may not create one.
    pub fn new(name: &str, limits: &Limits, models: &Path) -> io::Result<Machine> {
        let root = Path::new("/sys/fs/cgroup");
        let name = format!("prima-{name}-{}", std::process::id());
        let mut machine = Machine {
            folders: Vec::new(),
        };
        let quota = limits.cpus.map(|cpus| cpus * PERIOD);
        let disk = match limits.disk_bytes_per_second {
            Some(rate) => Some((disk_of(models)?, rate)),
            None => None,
        };
        if root.join("memory/memory.limit_in_bytes").exists() {
            let memory = machine.folder(&root.join("memory"), &name)?;
            let bytes = limits.memory_bytes.to_string();
            fs::write(memory.join("memory.limit_in_bytes"), bytes)?;
            if let Some(quota) = quota {
                let cpu = machine.folder(&root.join("cpu"), &name)?;
                fs::write(cpu.join("cpu.cfs_period_us"), format!("{PERIOD}"))?;
                fs::write(cpu.join("cpu.cfs_quota_us"), format!("{quota:.0}"))?;
            }
            if let Some((disk, rate)) = disk {
                let blkio = machine.folder(&root.join("blkio"), &name)?;
                let line = format!("{disk} {rate}");
                fs::write(blkio.join("blkio.throttle.read_bps_device"), line)?;
            }
        } else {
            let mut controllers = String::from("+memory");
            controllers += if quota.is_some() { " +cpu" } else { "" };
            controllers += if disk.is_some() { " +io" } else { "" };
            fs::write(root.join("cgroup.subtree_control"), controllers)?;
            let all = machine.folder(root, &name)?;
            fs::write(all.join("memory.max"), limits.memory_bytes.to_string())?;
            if let Some(quota) = quota {
                fs::write(all.join("cpu.max"), format!("{quota:.0} {PERIOD}"))?;
            }
            if let Some((disk, rate)) = disk {
                fs::write(all.join("io.max"), format!("{disk} rbps={rate}"))?;
            }
        }
        Ok(machine)
    }

    /// Programs that the kernel has killed there because memory ran out.
    ///
    /// # Errors
    /// Where the kernel does not count them.
    pub fn killed_for_memory(&self) -> io::Result<u64> {
        let unknown = || io::Error::other("no cgroup says how many were killed");
        let counters = ["memory.oom_control", "memory.events"];
        let mut files = self
            .folders
            .iter()
            .flat_map(|folder| counters.map(|name| folder.join(name)));
        let text = files.find_map(|file| fs::read_to_string(file).ok());
        let text = text.ok_or_else(unknown)?;
        let count = text
            .lines()
            .find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok());
        count.ok_or_else(unknown)
    }

    fn folder(&mut self, parent: &Path, name: &str) -> io::Result<PathBuf> {
        let folder = parent.join(name);
        fs::create_dir(&folder)?;
        self.folders.push(folder.clone());
        Ok(folder)
    }

    /// `command`, to be started on this machine.
    pub fn enter(&self, command: Command) -> Command {
        let mut inside = Command::new("sh");
        inside
            .arg("-c")
            .arg("for group in $0; do echo $$ > $group/cgroup.procs || exit; done; exec \"$@\"")
            .arg(self.words());
        under(inside, &command)
    }

    /// Starts a program there that takes so much memory.
    ///
    /// # Errors
    /// Where it cannot be started.
    pub fn take_memory(&self, bytes: u64) -> io::Result<TakenMemory> {
        let mut python = Command::new("python3");
        let script = format!("import time; taken = b'x' * {bytes}; time.sleep(600)");
        python.args(["-c", &script]);
        let child = self.enter(python).stdin(Stdio::null()).spawn()?;
        Ok(TakenMemory(child))
    }

    /// The cgroups; their names have no spaces.
    fn words(&self) -> String {
        let folders = self.folders.iter();
        let folders: Vec<String> = folders.map(|folder| folder.display().to_string()).collect();
        folders.join(" ")
    }
}

/// Memory that a program keeps until this is dropped.
pub struct TakenMemory(Child);

impl Drop for TakenMemory {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Programs that were killed just now are in it for a moment. When one does not end, the cgroups stay.
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            self.folders
                .retain(|folder| fs::remove_dir(folder).is_err());
            if self.folders.is_empty() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The whole disk below `path`, as its major and minor number: a limit cannot be put on a partition.
fn disk_of(path: &Path) -> io::Result<String> {
    let device = rustix::fs::stat(path)?.st_dev;
    let numbers = format!(
        "{}:{}",
        rustix::fs::major(device),
        rustix::fs::minor(device)
    );
    let known = Path::new("/sys/dev/block").join(&numbers);
    if !known.exists() {
        return Err(io::Error::other(format!(
            "{} lies on no block device",
            path.display()
        )));
    }
    match known.join("partition").exists() {
        true => Ok(fs::read_to_string(known.join("../dev"))?.trim().to_owned()),
        false => Ok(numbers),
    }
}

/// Drops `file` from the page cache: a page counts in the cgroup that touched it first, so a measured machine must touch all of its own.
/// Pages that some process has mapped stay; to measure beside other programs, take a [`cold_copy`].
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
