//! Images for a cluster's nodes, built as users build theirs, but from another base and without a registry.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::image;
use crate::command::run;
use crate::inputs;

/// An image that was built from the files in `context`, as an OCI archive in there. `base` is one that `cluster/images.sh` makes.
pub fn build_image(context: &Path, containerfile: &Path, base: &str, name: &str) -> PathBuf {
    let archive = context.join("image.tar");
    let storage = context.join("storage");
    let buildah = |args: &[&str]| {
        let mut command = Command::new("buildah");
        command
            .arg("--root")
            .arg(&storage)
            .arg("--runroot")
            .arg(storage.join("run"))
            .args(["--storage-driver", "vfs"])
            .args(args)
            .current_dir(context);
        run(command, "").unwrap_or_else(|error| panic!("{error}"));
    };
    let base = format!("BASE=oci-archive:{}", image(base).display());
    let containerfile = containerfile.to_str().expect("a path in UTF-8");
    buildah(&[
        "bud",
        "--isolation",
        "chroot",
        "--build-arg",
        &base,
        "--build-arg",
        "BINARIES=prebuilt",
        "--file",
        containerfile,
        "-t",
        name,
        ".",
    ]);
    // It is read once, on this machine.
    buildah(&[
        "push",
        "--disable-compression",
        name,
        &format!("oci-archive:{}:{name}", archive.display()),
    ]);
    archive
}

/// prima's own images from the programs that were built for the tests, under the names that the chart expects.
pub struct PrimaImages {
    _folder: TempDir,
    pub archives: [PathBuf; 2],
}

impl PrimaImages {
    pub fn build() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let archives =
            [("operator", "prima"), ("node-agent", "prima-node-agent")].map(|(image, program)| {
                let context = folder.path().join(image);
                fs::create_dir(&context).expect("a folder");
                let mut strip = Command::new("strip");
                strip
                    .arg("-o")
                    .arg(context.join(program))
                    .arg(inputs::program(program));
                run(strip, "").unwrap_or_else(|error| panic!("{error}"));
                let containerfile = inputs::file(&format!("images/{image}.Containerfile"));
                let name = format!("ghcr.io/prima-dev/prima-{image}:{}", app_version());
                build_image(&context, &containerfile, "base", &name)
            });
        Self {
            _folder: folder,
            archives,
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
