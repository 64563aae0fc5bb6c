//! How much memory this process may use now: for profiles, and for the limit of weights while a ring runs.
//!
//! Decides what "available" means: what the kernel could hand out without swapping, and never more than what any cgroup
//! above this process has left. There, file pages count as free (weights are such pages). Refuses to guess where the
//! system does not say.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use prima_crds::v1alpha1::node_profile::Os;

/// Bytes, now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNow {
    pub total: u64,
    pub available: u64,
    /// Android: what could be swapped out to make room. 0 elsewhere.
    pub swappable: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error(
        "cannot read {}, which tells how much memory there is (it exists on Linux and Android only)",
        path.display()
    )]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} has no line {field} with a number of kB", path.display())]
    Field { path: PathBuf, field: &'static str },
    #[error("{}: expected a number of bytes, found {found:?}", path.display())]
    Number { path: PathBuf, found: String },
}

/// Reads the files below `root` (`/`, except in tests).
///
/// # Errors
/// Files that are there but cannot be read or understood, and a missing /proc/meminfo.
pub fn read(root: &Path, os: Os) -> Result<MemoryNow, MemoryError> {
    let path = root.join("proc/meminfo");
    let meminfo = fs::read_to_string(&path).map_err(|source| MemoryError::Read {
        path: path.clone(),
        source,
    })?;
    let field = |field| {
        kilobytes(&meminfo, field).ok_or_else(|| MemoryError::Field {
            path: path.clone(),
            field,
        })
    };
    let mut now = MemoryNow {
        total: field("MemTotal")?,
        available: field("MemAvailable")?,
        swappable: match os {
            Os::Android => {
                (field("Active(anon)")? + field("Inactive(anon)")?).min(field("SwapFree")?)
            }
            Os::Linux | Os::MacOs => 0,
        },
    };
    let text = |file: &str| fs::read_to_string(root.join(file)).unwrap_or_default();
    for cgroup in cgroups(&text("proc/self/cgroup"), &text("proc/self/mountinfo")) {
        if let Some((limit, free)) = cgroup.room(root)? {
            now.total = now.total.min(limit);
            now.available = now.available.min(free);
        }
    }
    now.available = now.available.min(now.total);
    Ok(now)
}

/// The bytes of a line `field:  1234 kB` of /proc/meminfo.
fn kilobytes(meminfo: &str, field: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let number: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    number.checked_mul(1024)
}

/// A cgroup that limits the memory of this process, or might.
#[derive(Debug, PartialEq, Eq)]
struct Cgroup {
    version: CgroupVersion,
    folder: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CgroupVersion {
    V1,
    V2,
}

/// The memory cgroup of this process and all above it, by /proc/self/cgroup and /proc/self/mountinfo (cgroups(7), proc(5)).
fn cgroups(own: &str, mountinfo: &str) -> Vec<Cgroup> {
    let mut found = Vec::new();
    for line in own.lines() {
        // hierarchy:controllers:path
        let mut fields = line.splitn(3, ':');
        let (Some(hierarchy), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let version = match (hierarchy, controllers) {
            ("0", "") => CgroupVersion::V2,
            (_, controllers) if controllers.split(',').any(|one| one == "memory") => {
                CgroupVersion::V1
            }
            _ => continue,
        };
        let Some((mount_root, mount_point)) = mountinfo
            .lines()
            .find_map(|line| memory_mount(line, version))
        else {
            continue;
        };
        // In a container the mount may show only a part of the tree, and the path may be outside of it.
        let below = Path::new(path)
            .strip_prefix(mount_root)
            .ok()
            .filter(|below| !below.iter().any(|part| part == ".."))
            .unwrap_or(Path::new(""));
        let folder = Path::new(mount_point).join(below);
        let above = folder
            .ancestors()
            .take_while(|folder| folder.starts_with(mount_point));
        found.extend(above.map(|folder| Cgroup {
            version,
            folder: folder.to_owned(),
        }));
    }
    found
}

/// Root and mount point, if this line of mountinfo mounts the memory controller of that version.
fn memory_mount(line: &str, version: CgroupVersion) -> Option<(&str, &str)> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let (root, point) = (mount.next()?, mount.next()?);
    let mut kind = kind.split(' ');
    let (kind, _, options) = (kind.next()?, kind.next()?, kind.next()?);
    let is_memory = match version {
        CgroupVersion::V2 => kind == "cgroup2",
        CgroupVersion::V1 => kind == "cgroup" && options.split(',').any(|one| one == "memory"),
    };
    is_memory.then_some((root, point))
}

impl Cgroup {
    /// The limit and what is left of it, in bytes; `None` where there is no limit.
    fn room(&self, root: &Path) -> Result<Option<(u64, u64)>, MemoryError> {
        let (limit, used, prefix) = match self.version {
            CgroupVersion::V1 => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
            CgroupVersion::V2 => ("memory.max", "memory.current", ""),
        };
        let Some(limit) = self.number(root, limit)? else {
            return Ok(None);
        };
        let used = self.number(root, used)?.unwrap_or(0);
        let stat = self.text(root, "memory.stat")?.unwrap_or_default();
        let files = ["inactive_file", "active_file"]
            .iter()
            .filter_map(|field| stat_field(&stat, prefix, field))
            .fold(0_u64, u64::saturating_add);
        let free = limit.saturating_sub(used.saturating_sub(files));
        Ok(Some((limit, free)))
    }

    /// The number in a file of the cgroup; `None` where it is `max`, or where there is no such file (as in the topmost cgroup).
    fn number(&self, root: &Path, file: &str) -> Result<Option<u64>, MemoryError> {
        let Some(text) = self.text(root, file)? else {
            return Ok(None);
        };
        match text.trim() {
            "max" => Ok(None),
            number => match number.parse() {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(MemoryError::Number {
                    path: self.folder.join(file),
                    found: number.to_owned(),
                }),
            },
        }
    }

    fn text(&self, root: &Path, file: &str) -> Result<Option<String>, MemoryError> {
        let below = self.folder.strip_prefix("/").unwrap_or(&self.folder);
        let path = root.join(below).join(file);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(MemoryError::Read { path, source }),
        }
    }
}

/// The number of a line `prefix field 1234` of memory.stat, where prefix and field are one word.
fn stat_field(stat: &str, prefix: &str, field: &str) -> Option<u64> {
    stat.lines().find_map(|line| {
        line.strip_prefix(prefix)?
            .strip_prefix(field)?
            .strip_prefix(' ')?
            .trim()
            .parse()
            .ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:   12000000 kB\n\
        SwapCached:            0 kB\nActive:          900000 kB\nActive(anon):     600000 kB\n\
        Inactive(anon):   500000 kB\nSwapTotal:       4000000 kB\nSwapFree:         1000000 kB\n";
    const V2_MOUNT: &str =
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
    const KB: u64 = 1024;
    const MB: u64 = 1 << 20;

    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new(own: &str, mountinfo: &str) -> Machine {
            let machine = Machine(tempfile::tempdir().unwrap());
            machine.file("proc/meminfo", MEMINFO);
            machine.file("proc/self/cgroup", own);
            machine.file("proc/self/mountinfo", mountinfo);
            machine
        }

        fn file(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        /// The files of a cgroup of version 2; sizes in MiB.
        fn v2(&self, folder: &str, max: &str, current: u64, files: [u64; 2]) {
            let folder = format!("sys/fs/cgroup/{folder}");
            self.file(&format!("{folder}/memory.max"), max);
            self.file(
                &format!("{folder}/memory.current"),
                &format!("{}\n", current * MB),
            );
            let stat = format!(
                "anon 5\nfile 7\ninactive_file {}\nactive_file {}\nworkingset_activate_file 9\n",
                files[0] * MB,
                files[1] * MB
            );
            self.file(&format!("{folder}/memory.stat"), &stat);
        }

        fn read(&self) -> MemoryNow {
            read(self.0.path(), Os::Linux).unwrap()
        }
    }

    #[test]
    fn without_cgroups_the_kernel_tells() {
        let machine = Machine::new("", "");
        let expected = MemoryNow {
            total: 16_000_000 * KB,
            available: 12_000_000 * KB,
            swappable: 0,
        };
        assert_eq!(machine.read(), expected);
        // Anonymous pages, as far as swap has room for them.
        let android = read(machine.0.path(), Os::Android).unwrap();
        assert_eq!(android.swappable, 1_000_000 * KB);
    }

    #[test]
    fn the_tightest_cgroup_above_the_process_wins() {
        let machine = Machine::new("0::/pods/pod1/agent\n", V2_MOUNT);
        machine.v2("pods/pod1/agent", "max\n", 900, [100, 100]);
        machine.v2("pods/pod1", "2147483648\n", 1000, [300, 200]);
        machine.v2("pods", "4294967296\n", 1200, [0, 0]);
        let now = machine.read();
        assert_eq!(now.total, 2048 * MB);
        // 2048 less the 1000 in use, of which 500 are file pages.
        assert_eq!(now.available, 1548 * MB);
        machine.v2("pods", "4294967296\n", 3900, [100, 0]);
        assert_eq!(machine.read().available, 296 * MB);
        machine.v2("pods", "max\n", 9000, [0, 0]);
        machine.v2("pods/pod1", "max\n", 9000, [0, 0]);
        assert_eq!(machine.read().available, 12_000_000 * KB);
    }

    #[test]
    fn a_version_1_cgroup_in_a_container_is_found() {
        let mounts = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
            35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
            41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let machine = Machine::new("8:pids:/\n4:cpu,memory:/docker/abc/inner\n0::/\n", mounts);
        let folder = "sys/fs/cgroup/memory";
        machine.file(&format!("{folder}/memory.limit_in_bytes"), "1073741824\n");
        machine.file(&format!("{folder}/memory.usage_in_bytes"), "536870912\n");
        // `inactive_file` alone is the cgroup's own part, without that of the ones below.
        machine.file(
            &format!("{folder}/memory.stat"),
            "inactive_file 1\ntotal_inactive_file 104857600\ntotal_active_file 104857600\n",
        );
        machine.file(
            &format!("{folder}/inner/memory.limit_in_bytes"),
            "9223372036854771712\n",
        );
        let now = machine.read();
        assert_eq!((now.total, now.available), (1024 * MB, 712 * MB));
    }

    #[test]
    fn a_path_outside_of_the_mount_means_the_mount_itself() {
        for own in ["0::/../../elsewhere\n", "0::/\n"] {
            let found = cgroups(own, V2_MOUNT);
            let expected = Cgroup {
                version: CgroupVersion::V2,
                folder: "/sys/fs/cgroup".into(),
            };
            assert_eq!(found, [expected], "{own}");
        }
    }

    #[test]
    fn what_cannot_be_understood_is_named() {
        let machine = Machine::new("0::/\n", V2_MOUNT);
        machine.file("sys/fs/cgroup/memory.max", "lots");
        let error = read(machine.0.path(), Os::Linux).unwrap_err().to_string();
        assert!(
            error.contains("memory.max") && error.contains("lots"),
            "{error}"
        );
        machine.file("proc/meminfo", "MemTotal: 5 kB\n");
        let error = read(machine.0.path(), Os::Linux).unwrap_err().to_string();
        assert!(
            error.contains("meminfo") && error.contains("MemAvailable"),
            "{error}"
        );
    }

    #[test]
    fn this_machine_is_read() {
        let now = read(Path::new("/"), Os::Linux).unwrap();
        assert!(now.available > 0 && now.available <= now.total, "{now:?}");
    }
}
