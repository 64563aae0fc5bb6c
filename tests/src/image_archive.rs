//! Archives of images as `images/build.sh` makes them, of what a test gives for programs and root file systems, such as small files; and what is
//! in one, read without a container engine.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::command::run;
use crate::inputs;

pub const ARCHITECTURES: [&str; 2] = ["amd64", "arm64"];

/// This machine's, as images and Debian call it.
pub fn own_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "aarch64" => "arm64",
        _ => "amd64",
    }
}

/// Name, program and root file system of each image.
pub const IMAGES: [(&str, &str, &str); 3] = [
    ("ghcr.io/prima-dev/prima-operator:9.9.9", "prima", "root"),
    (
        "ghcr.io/prima-dev/prima-node-agent:9.9.9",
        "prima-node-agent",
        "root",
    ),
    (
        "ghcr.io/prima-dev/prima-node-agent-gpu:9.9.9",
        "prima-node-agent",
        "root-gpu",
    ),
];

/// Contents by path.
pub type Files = BTreeMap<String, Vec<u8>>;

/// What a build puts there for one processor: root file systems and the programs.
pub fn build(folder: &Path, architecture: &str) {
    let own = folder.join(architecture);
    for name in ["root", "root-gpu"] {
        let root = own.join(name);
        fs::create_dir_all(root.join("etc")).expect("a folder");
        fs::write(root.join("etc/root"), format!("{name} for {architecture}")).expect("a file");
        let mut tar = Command::new("tar");
        tar.args(["--sort=name", "--mtime=@0", "--owner=0", "--group=0", "-cf"])
            .arg(own.join(format!("{name}.tar")))
            .arg("-C")
            .arg(&root)
            .arg(".");
        assert!(tar.status().expect("tar").success());
    }
    for program in ["prima", "prima-node-agent"] {
        fs::write(own.join(program), format!("{program} for {architecture}")).expect("a file");
    }
}

/// Runs `images/assemble.py` on what was built in `folder`.
pub fn assemble(folder: &Path, output: &str, platforms: &[&str]) -> Output {
    let mut python = Command::new("python3");
    python
        .arg(inputs::file("images/assemble.py"))
        .arg("--output")
        .arg(folder.join(output));
    for platform in platforms {
        python.args(["--platform", platform]);
    }
    for (name, program, root) in IMAGES {
        python
            .args(["--name", name, "--program", program])
            .arg("--root")
            .arg(format!("{root}.tar"))
            .args(["--title", program]);
    }
    python.current_dir(folder);
    python.output().expect("python3")
}

/// Has `images/assemble.py` put images together for one processor, of what lies in `folder`: the root file system `root`, and for each
/// image a name and its program. Returns the archive.
pub fn assemble_for(
    architecture: &str,
    folder: &Path,
    root: &str,
    images: &[(String, &str)],
) -> PathBuf {
    let archive = folder.join("images.tar");
    let mut assemble = Command::new("python3");
    assemble
        .arg(inputs::file("images/assemble.py"))
        .arg("--output")
        .arg(&archive)
        .arg("--platform")
        .arg(format!("{architecture}={}", folder.display()))
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

pub fn unpack(archive: &Path, into: &Path) {
    fs::create_dir_all(into).expect("a folder");
    let tar = Command::new("tar")
        .arg("-xf")
        .arg(archive)
        .arg("-C")
        .arg(into)
        .status();
    assert!(tar.expect("tar").success());
}

/// All files below a folder.
pub fn files_below(top: &Path) -> Files {
    let mut files = Files::new();
    let mut folders = vec![top.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            match path.is_dir() {
                true => folders.push(path),
                false => {
                    let name = path.strip_prefix(top).expect("below").display().to_string();
                    files.insert(name, fs::read(&path).expect("a file"));
                }
            }
        }
    }
    files
}

/// An OCI image layout.
pub struct Layout(Files);

impl Layout {
    /// Unpacks the archive into a folder.
    pub fn read(archive: &Path, into: &Path) -> Self {
        unpack(archive, into);
        Self(files_below(into))
    }

    /// Descriptors of the indexes that have a name.
    pub fn names(&self) -> Vec<Value> {
        let index: Value = serde_json::from_slice(&self.0["index.json"]).expect("JSON");
        index["manifests"].as_array().expect("manifests").clone()
    }

    /// Descriptors of the images, one for each processor, that an index has.
    pub fn images(&self, index: &Value) -> Vec<Value> {
        let index = self.json(index);
        index["manifests"].as_array().expect("images").clone()
    }

    /// The content that a descriptor names; panics unless digest and size are right.
    pub fn blob(&self, descriptor: &Value) -> &[u8] {
        let digest = descriptor["digest"].as_str().expect("a digest");
        let digest = digest.strip_prefix("sha256:").expect("SHA-256");
        let content = &self.0[&format!("blobs/sha256/{digest}")];
        assert_eq!(format!("{:x}", Sha256::digest(content)), digest);
        assert_eq!(descriptor["size"], content.len());
        content
    }

    pub fn json(&self, descriptor: &Value) -> Value {
        serde_json::from_slice(self.blob(descriptor)).expect("JSON")
    }

    /// An image's files: its layers over each other, as a node unpacks them. Panics unless the digests of what they unpack to are right.
    pub fn files(&self, image: &Value, into: &Path) -> Files {
        fs::create_dir_all(into).expect("a folder");
        let manifest = self.json(image);
        let config = self.json(&manifest["config"]);
        let packed = into.with_extension("tar.gz");
        for (number, layer) in manifest["layers"]
            .as_array()
            .expect("layers")
            .iter()
            .enumerate()
        {
            fs::write(&packed, self.blob(layer)).expect("a file");
            let unpacked = Command::new("gzip").arg("-dc").arg(&packed).output();
            let unpacked = unpacked.expect("gzip").stdout;
            let digest = format!("sha256:{:x}", Sha256::digest(&unpacked));
            assert_eq!(config["rootfs"]["diff_ids"][number], digest);
            unpack(&packed, into);
        }
        files_below(into)
    }
}
