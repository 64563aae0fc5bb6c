//! Images for a cluster's nodes. The scripts that make what ships make them, too, without a registry: for this machine's processor, on its
//! own Debian, and of programs that were built for the tests.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::command::run;
use crate::image_archive::{assemble_for, own_architecture};
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
    symlink(made(root), folder.join(root)).expect("a link to a root file system");
    assemble_for(own_architecture(), folder, root, images)
}

/// prima's own images from the programs that were built for the tests, under the names that the chart expects.
pub struct PrimaImages {
    _folder: TempDir,
    pub archive: PathBuf,
    /// In the order of the programs that they have.
    pub names: Vec<String>,
}

impl PrimaImages {
    /// Those of the operator and of agents.
    pub fn build() -> Self {
        let images = [("operator", "prima"), ("node-agent", "prima-node-agent")];
        Self::of("root.tar", &images)
    }

    /// That of agents on nodes with a GPU.
    pub fn for_gpus() -> Self {
        Self::of("root-gpu.tar", &[(GPU_AGENT, "prima-node-agent")])
    }

    /// Images and their programs, on this root file system.
    fn of(root: &str, images: &[(&str, &'static str)]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let images = images.iter().map(|&(image, program)| {
            let mut strip = Command::new("strip");
            strip
                .arg("-o")
                .arg(folder.path().join(program))
                .arg(inputs::program(program));
            run(strip, "").unwrap_or_else(|error| panic!("{error}"));
            (prima_image(image), program)
        });
        let images: Vec<(String, &str)> = images.collect();
        let archive = build_images(folder.path(), root, &images);
        Self {
            _folder: folder,
            archive,
            names: images.into_iter().map(|(name, _)| name).collect(),
        }
    }
}

pub(super) const GPU_AGENT: &str = "node-agent-gpu";

/// The whole name of one of prima's images, for example of `operator`.
pub(super) fn prima_image(image: &str) -> String {
    format!("ghcr.io/prima-dev/prima-{image}:{}", app_version())
}

/// The chart's; its images are tagged with it.
pub(super) fn app_version() -> String {
    let path = inputs::file("charts/prima/Chart.yaml");
    let chart =
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let version = chart
        .lines()
        .find_map(|line| line.strip_prefix("appVersion: "));
    version.expect("an appVersion").trim_matches('"').to_owned()
}
