//! The test programs of the workspace that compare a GPU with the processor: kernel by kernel, and layers of every family of models.

use std::process::Command;

use crate::error::CheckError;
use crate::machine::{self, Machine};

pub struct Program {
    pub what: &'static str,
    file: &'static str,
    arguments: &'static [&'static str],
    /// And on a real GPU.
    on_real: &'static [&'static str],
    /// Tests that take a driver with a clock.
    with_clock: &'static [&'static str],
}

pub const PROGRAMS: [&Program; 2] = [
    &Program {
        what: "every kernel and weight format beside the processor (shaders)",
        file: "shaders",
        arguments: &[],
        on_real: &[],
        with_clock: &[
            "products::parts_of_a_pass_have_so_much_to_do",
            "hanging::a_clock_that_takes_too_long_is_read_no_more",
        ],
    },
    &Program {
        what: "every family, sessions and windows beside the processor (gpu_layers)",
        file: "gpu_layers",
        arguments: &["--skip", "smollm2_picks_the_same_tokens"],
        on_real: &["--skip", "in_software::"],
        with_clock: &[
            "many_rows::matrices_are_on_their_way_while_the_gpu_computes",
            "many_rows::weights_are_measured_on_the_way_that_they_go",
        ],
    },
];

const TOKENS: &str = "gpu_layers' test smollm2_picks_the_same_tokens: its model is too large for the bundle; the rings pick tokens instead";
const IN_SOFTWARE: &str =
    "gpu_layers' module in_software: its tests take a driver that computes on the processor";

/// What the programs leave out.
pub fn left_out(machine: &Machine) -> Vec<String> {
    let mut left_out = vec![TOKENS.to_owned()];
    if !machine.software {
        left_out.push(IN_SOFTWARE.to_owned());
    }
    for program in PROGRAMS {
        let tests = program.without(machine).iter();
        left_out.extend(tests.map(|test| {
            let file = program.file;
            format!("{file}' test {test}: it takes a driver that has a clock")
        }));
    }
    left_out
}

impl Program {
    /// The tests that this machine's driver has no clock for.
    fn without(&self, machine: &Machine) -> &'static [&'static str] {
        match machine.has_clock {
            true => &[],
            false => self.with_clock,
        }
    }
}

/// Runs a test program. Gives what it says at its end.
pub fn run(program: &Program, machine: &Machine) -> Result<String, CheckError> {
    let mut command = Command::new(machine::beside_programs(program.file));
    command.args(program.arguments);
    if !machine.software {
        command.args(program.on_real).env("PRIMA_TEST_GPU", "1");
    }
    for test in program.without(machine) {
        command.args(["--skip", *test]);
    }
    let printed = machine::output(&mut command)?;
    let result = printed
        .lines()
        .find_map(|line| line.strip_prefix("test result: ok. "));
    let counts = result.and_then(|counts| counts.split("; finished").next());
    counts.map(str::to_owned).ok_or(CheckError::NoResult {
        program: program.file,
    })
}
