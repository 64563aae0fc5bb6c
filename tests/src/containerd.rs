//! A containerd of a test's own, as on a node that has no image yet: it pulls, and unpacks, but runs nothing. Takes root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::command::{CommandError, run};
use crate::inputs;
use crate::service::Service;

/// Everything that it pulled goes on drop.
pub struct Containerd {
    // Dropped in this order.
    _service: Service,
    folder: TempDir,
}

/// Without the plugins that put something elsewhere on this machine.
const CONFIG: &str = r#"
version = 2
root = "FOLDER/root"
state = "FOLDER/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]
[grpc]
  address = "FOLDER/socket"
"#;
/// It copies folders, and so works on whatever file system this machine has.
const SNAPSHOTTER: &str = "native";

impl Containerd {
    pub fn start() -> Self {
        inputs::need("registry");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path();
        let config = path.join("config.toml");
        let text = CONFIG.replace("FOLDER", &path.display().to_string());
        fs::write(&config, text).expect("a file");
        // What it mounts goes with it.
        let mut command = Command::new("unshare");
        command.args(["--mount", "containerd", "--config"]);
        command.arg(config);
        let mut service = Service::start("containerd", command, path);
        let socket = socket(path);
        service.wait_until(|| {
            let mut version = Command::new("ctr");
            version.arg("--address").arg(&socket).arg("version");
            run(version, "").map(drop)
        });
        Self {
            _service: service,
            folder,
        }
    }

    /// Pulls an image, for a platform such as `linux/arm64`, from a registry without TLS, and copies its files into a folder.
    ///
    /// # Errors
    /// What ctr says, where one of both fails.
    pub fn pull(&self, reference: &str, platform: &str, into: &Path) -> Result<(), CommandError> {
        let mut pull = Command::new("ctr");
        pull.arg("--address")
            .arg(socket(self.folder.path()))
            .args(["images", "pull", "--plain-http"])
            .args(["--snapshotter", SNAPSHOTTER, "--platform", platform])
            .arg(reference);
        run(pull, "")?;
        fs::create_dir_all(into).expect("a folder");
        // The mount goes with its namespace.
        let mount = r#"
            mounted=$(mktemp --directory --tmpdir="$1")
            ctr --address "$2" images mount --snapshotter "$3" --platform "$4" "$5" "$mounted"
            cp --archive "$mounted/." "$6""#;
        let mut copy = Command::new("unshare");
        copy.args(["--mount", "sh", "-ec", mount, "sh"])
            .arg(self.folder.path())
            .arg(socket(self.folder.path()))
            .args([SNAPSHOTTER, platform, reference])
            .arg(into);
        run(copy, "").map(drop)
    }
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("socket")
}
