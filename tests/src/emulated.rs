//! Processors that this machine does not have: QEMU's user mode runs a program as one of them would. Shows what is computed, never how
//! fast. `tests/processors/build.sh` makes the programs; `make test` has it do that beside other suites, and those of processors wait for it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::inputs;
use crate::machine_ring::Host;

/// A processor by the names that Rust and QEMU have for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Processor {
    architecture: &'static str,
    name: &'static str,
    /// Of its system's memory; `None`: as this machine's.
    page_bytes: Option<&'static str>,
}

/// Of 2008: SSE4.2, no AVX.
pub const NEHALEM: Processor = x86("Nehalem");
/// Of 2013: AVX2 and FMA.
pub const HASWELL: Processor = x86("Haswell");
/// A Raspberry Pi 4's: NEON.
pub const CORTEX_A72: Processor = arm64("cortex-a72");
/// A Raspberry Pi 5's: dot products.
pub const CORTEX_A76: Processor = arm64("cortex-a76");
/// The same with the pages of Raspberry Pi OS: 16 KiB. QEMU takes that before its version 9 only (`large-pages` in tests/run/machine.py).
pub const RASPBERRY_PI_5: Processor = Processor {
    page_bytes: Some("16384"),
    ..CORTEX_A76
};
/// All that QEMU knows: matrix products, too.
pub const NEWEST_ARM: Processor = arm64("max");

const fn x86(name: &'static str) -> Processor {
    Processor {
        architecture: "x86_64",
        name,
        page_bytes: None,
    }
}

const fn arm64(name: &'static str) -> Processor {
    Processor {
        architecture: "aarch64",
        name,
        page_bytes: None,
    }
}

impl Processor {
    /// `program` of `target/processors`, to be given arguments.
    pub fn run(&self, program: &str) -> Command {
        let programs = folder(self.architecture);
        let libraries = programs.join("libraries");
        let libraries = libraries.exists().then_some(libraries);
        self.emulate(libraries.as_deref(), &programs.join(program))
    }

    /// `program` of an image whose files lie in `root`, to be given arguments. It has the image's libraries, and finds files of this machine
    /// where the image has none of such a name.
    pub fn run_image(&self, root: &Path, program: &str) -> Command {
        self.emulate(Some(root), &root.join("usr/local/bin").join(program))
    }

    fn emulate(&self, libraries: Option<&Path>, program: &Path) -> Command {
        let mut command = Command::new(format!("qemu-{}-static", self.architecture));
        command.args(["-cpu", self.name]);
        if let Some(bytes) = self.page_bytes {
            command.args(["-p", bytes]);
        }
        if let Some(libraries) = libraries {
            command.arg("-L").arg(libraries);
        }
        command.arg(program);
        command
    }
}

/// `program` of `target/processors` for arm64: a file, for an image.
pub fn arm64_program(program: &str) -> PathBuf {
    folder("aarch64").join(program)
}

/// The root file system of images with such programs, as an archive.
pub fn arm64_root() -> PathBuf {
    folder("aarch64").join("libraries/root.tar")
}

/// `program` of `target/processors` on this machine's own processor.
pub fn natively(program: &str) -> Command {
    Command::new(folder(std::env::consts::ARCH).join(program))
}

/// A member of a ring whose processor is emulated.
impl Host for Processor {
    fn program(&self, name: &str) -> Command {
        self.run(name)
    }
}

/// What `command` prints. Panics with all that it wrote where it fails.
pub fn output(command: &mut Command) -> String {
    let output = command.output().expect("start a program");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{}: {printed}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    printed
}

fn folder(architecture: &str) -> PathBuf {
    inputs::need("emulation");
    let programs = inputs::repository().join("target/processors");
    expect_built(&programs);
    programs.join(architecture)
}

/// Waits while the programs are built, and panics with the log if they could not be.
fn expect_built(programs: &Path) {
    // Locked by `tests/run` and what it starts to build them. Whoever builds them by hand needs no lock.
    if let Ok(lock) = File::open(programs.join("lock")) {
        lock.lock_shared().expect("wait for a lock");
    }
    assert!(
        programs.join("built").exists(),
        "tests/processors/build.sh did not build the programs for other processors:\n{}",
        fs::read_to_string(programs.join("log")).unwrap_or_default()
    );
}
