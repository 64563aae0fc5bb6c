//! A registry of images without TLS: CNCF distribution, built from the version in `tests/registry/`.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::cluster::Cluster;
use crate::command::run;
use crate::free_ports::free_address;
use crate::http;
use crate::programs::folder_made_by;
use crate::service::Service;

/// Everything that was pushed to it goes on drop.
pub struct Registry {
    // Dropped in this order.
    _service: Service,
    folder: TempDir,
    address: SocketAddr,
}

impl Registry {
    /// On this machine.
    pub fn start() -> Self {
        let address = free_address();
        Self::start_at(address, Command::new, || http::get(address, "/v2/"))
    }

    /// In a cluster's network, where its nodes ask for images that they lack.
    pub fn start_in(cluster: &Cluster) -> Self {
        let address = cluster.registry();
        let command = |program: PathBuf| cluster.command(program);
        Self::start_at(address, command, || {
            cluster.within(|| http::get(address, "/v2/"))
        })
    }

    fn start_at(
        address: SocketAddr,
        command: impl FnOnce(PathBuf) -> Command,
        mut ask: impl FnMut() -> io::Result<http::Response>,
    ) -> Self {
        let program = folder_made_by("registry", &["tests/registry/build.sh"]).join("registry");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().display();
        let config = folder.path().join("config.yaml");
        let text = format!(
            "version: 0.1\nhttp: {{addr: \"{address}\"}}\nstorage: {{filesystem: {{rootdirectory: {path}/storage}}}}\n"
        );
        fs::write(&config, text).expect("a file");
        let mut command = command(program);
        command.arg("serve").arg(config);
        // It would look for a collector of traces on this machine.
        command.env("OTEL_TRACES_EXPORTER", "none");
        let mut service = Service::start("registry", command, folder.path());
        service.wait_until(|| ask().map(drop));
        Self {
            _service: service,
            folder,
            address,
        }
    }

    /// Pushes an image of an OCI archive, for all its processors, and returns the name by which it is pulled.
    pub fn push(&self, archive: &Path, image: &str) -> String {
        let (_, own) = image.rsplit_once('/').expect("a name with a registry");
        self.copy(Command::new("skopeo"), archive, image, own);
        format!("{}/{own}", self.address)
    }

    /// The same to a registry that is in a cluster's network, where the image is called `name`. Returns its digest.
    pub fn push_within(
        &self,
        cluster: &Cluster,
        archive: &Path,
        image: &str,
        name: &str,
    ) -> String {
        self.copy(cluster.command("skopeo"), archive, image, name)
    }

    /// Returns the digest.
    fn copy(&self, mut skopeo: Command, archive: &Path, image: &str, name: &str) -> String {
        let digest = self.folder.path().join("digest");
        skopeo
            .args(["copy", "--all", "--preserve-digests"])
            .args(["--dest-tls-verify=false", "--digestfile"])
            .arg(&digest)
            .arg(format!("oci-archive:{}:{image}", archive.display()))
            .arg(format!("docker://{}/{name}", self.address));
        run(skopeo, "").unwrap_or_else(|error| panic!("{error}"));
        let digest = fs::read_to_string(digest).expect("a digest");
        digest.trim().to_owned()
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}
