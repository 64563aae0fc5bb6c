//! Images for a cluster's nodes. The scripts that make what ships make them, too, without a registry: for this machine's processor, on its
//! own Debian, and of programs that were built for the tests.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::command::run;
use crate::image_archive::own_architecture;
use crate::inputs;
use crate::programs::folder_made_by;

/// What `cluster/images.sh` makes: root file systems, and `tools.tar`, an OCI archive of an image with busybox, which is on every node as
/// `localhost/tools`.
pub(super) fn made(name: &str) -> PathBuf {
    folder_made_by("nodes", &["tests/cluster/images.sh"]).join(name)
}

/// Images as an OCI archive in `folder`. Each has a name and a program, which lies in `folder`, on the root file system `root`, which
/// `cluster/images.sh` makes.
pub fn build_images(folder: &Path, root: &str, images: &[(String, &str)]) -> PathBuf {
    let archive = folder.join("images.tar");
    symlink(made(root), folder.join(root)).expect("a link to a root file system");
    let mut assemble = Command::new("python3");
    assemble
        .arg(inputs::file("images/assemble.py"))
        .arg("--output")
        .arg(&archive)
        .arg("--platform")
        .arg(format!("{}={}", own_architecture(), folder.display()))
        // It is read once, on this machine.
        .args(["--compression", "0"]);
    for (name, program) in images {
        assemble
            .args(["--name", name, "--program", program])
            .args(["--root", root, "--title", program]);
    }
    run(assemble, "").unwrap_or_else(|error| panic!("{error}"));
    archive
}

/// prima's own images from the programs that were built for the tests, under the names that the chart expects.
pub struct PrimaImages {
    _folder: TempDir,
    pub archive: PathBuf,
}

impl PrimaImages {
    pub fn build() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let version = app_version();
        let images = [("operator", "prima"), ("node-agent", "prima-node-agent")];
        let images = images.map(|(image, program)| {
            let mut strip = Command::new("strip");
            strip
                .arg("-o")
                .arg(folder.path().join(program))
                .arg(inputs::program(program));
            run(strip, "").unwrap_or_else(|error| panic!("{error}"));
            let name = format!("ghcr.io/prima-dev/prima-{image}:{version}");
            (name, program)
        });
        let archive = build_images(folder.path(), "root.tar", &images);
        Self {
            _folder: folder,
            archive,
        }
    }
}

/// The chart's; its images are tagged with it.
fn app_version() -> String {
    let path = inputs::file("charts/prima/Chart.yaml");
    let chart =
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let version = chart
        .lines()
        .find_map(|line| line.strip_prefix("appVersion: "));
    version.expect("an appVersion").trim_matches('"').to_owned()
}
