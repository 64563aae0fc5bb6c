//! A hub for tests that are not asynchronous.

use std::ops::Deref;
use std::path::Path;
use std::{fs, io, net};

use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use crate::TestHub;

/// A hub with one model, `people/models/smollm2.gguf`, and with threads and a folder of its own.
pub struct ModelHub {
    // Dropped in this order.
    hub: TestHub,
    _runtime: Runtime,
    _files: TempDir,
}

impl ModelHub {
    /// Serves a copy of `model`; redirects lead to the port of `cdn`.
    ///
    /// # Errors
    /// When the file cannot be copied, or the listeners cannot be used.
    pub fn serve(model: &Path, hub: net::TcpListener, cdn: net::TcpListener) -> io::Result<Self> {
        let files = tempfile::tempdir()?;
        let repository = files.path().join("people/models");
        fs::create_dir_all(&repository)?;
        fs::copy(model, repository.join("smollm2.gguf"))?;
        let runtime = Runtime::new()?;
        let hub = runtime.block_on(async {
            let listener = |listener: net::TcpListener| {
                listener.set_nonblocking(true)?;
                TcpListener::from_std(listener)
            };
            TestHub::serve(files.path(), listener(hub)?, listener(cdn)?)
        })?;
        Ok(Self {
            hub,
            _runtime: runtime,
            _files: files,
        })
    }
}

impl Deref for ModelHub {
    type Target = TestHub;

    fn deref(&self) -> &TestHub {
        &self.hub
    }
}
