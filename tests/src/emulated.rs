//! Processors that this machine does not have: QEMU's user mode runs a program as one of them would. Shows what is computed, never how
//! fast. `tests/processors/build.sh` makes the programs.

use std::path::PathBuf;
use std::process::Command;

use crate::inputs;
use crate::machine_ring::Host;

/// A processor by the names that Rust and QEMU have for it, and the pages of its system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Processor {
    architecture: &'static str,
    name: &'static str,
    page_bytes: &'static str,
}

/// Of 2008: SSE4.2, no AVX.
pub const NEHALEM: Processor = x86("Nehalem");
/// Of 2013: AVX2 and FMA.
pub const HASWELL: Processor = x86("Haswell");
/// A Raspberry Pi 4's: NEON.
pub const CORTEX_A72: Processor = arm64("cortex-a72");
/// A Raspberry Pi 5's: dot products. Its system, Raspberry Pi OS, has pages of 16 KiB.
pub const CORTEX_A76: Processor = Processor {
    page_bytes: "16384",
    ..arm64("cortex-a76")
};
/// All that QEMU knows: matrix products, too.
pub const NEWEST_ARM: Processor = arm64("max");

const fn x86(name: &'static str) -> Processor {
    Processor {
        architecture: "x86_64",
        name,
        page_bytes: "4096",
    }
}

const fn arm64(name: &'static str) -> Processor {
    Processor {
        architecture: "aarch64",
        name,
        page_bytes: "4096",
    }
}

impl Processor {
    /// `program` of `target/processors`, to be given arguments.
    pub fn run(&self, program: &str) -> Command {
        let programs = folder(self.architecture);
        let mut command = Command::new(format!("qemu-{}-static", self.architecture));
        command.args(["-cpu", self.name, "-p", self.page_bytes]);
        let libraries = programs.join("libraries");
        if libraries.exists() {
            command.arg("-L").arg(libraries);
        }
        command.arg(programs.join(program));
        command
    }
}

/// A member of a ring whose processor is emulated.
impl Host for Processor {
    fn program(&self, name: &str) -> Command {
        self.run(name)
    }
}

fn folder(architecture: &str) -> PathBuf {
    inputs::need("emulation");
    let programs = inputs::repository().join("target/processors");
    programs.join(architecture)
}
