//! A registry of images without TLS: CNCF distribution, built from the version in `tests/registry/`.

use std::fs;
use std::net::SocketAddr;
use std::process::Command;

use tempfile::TempDir;

use crate::free_ports::free_address;
use crate::http;
use crate::programs::folder_made_by;
use crate::service::Service;

/// Everything that was pushed to it goes on drop.
pub struct Registry {
    // Dropped in this order.
    _service: Service,
    _folder: TempDir,
    address: SocketAddr,
}

impl Registry {
    pub fn start() -> Self {
        let program = folder_made_by("registry", &["tests/registry/build.sh"]).join("registry");
        let address = free_address();
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().display();
        let config = folder.path().join("config.yaml");
        let text = format!(
            "version: 0.1\nhttp: {{addr: \"{address}\"}}\nstorage: {{filesystem: {{rootdirectory: {path}/storage}}}}\n"
        );
        fs::write(&config, text).expect("a file");
        let mut command = Command::new(program);
        command.arg("serve").arg(config);
        // It would look for a collector of traces on this machine.
        command.env("OTEL_TRACES_EXPORTER", "none");
        let mut service = Service::start("registry", command, folder.path());
        service.wait_until(|| http::get(address, "/v2/").map(drop));
        Self {
            _service: service,
            _folder: folder,
            address,
        }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}
