//! `make check-gpu`: whether layers on this machine's GPU compute what they should, and how fast. Part of a bundle (`bundle.py`) that also
//! runs where there is neither network nor compiler; the bundle's script `check` starts it.
//!
//! Decides what is checked and in which order; each step goes on after another failed. Refuses to run without a GPU. With
//! `PRIMA_GPU=software` everything is done by a driver of Vulkan in software, on less, since only the answers mean something then.
//!
//!     gpu_check --report FILE

mod engine;
mod error;
mod machine;
mod memory;
mod models;
mod peer;
mod programs;
mod report;
mod rings;
mod served;
mod speed;

use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use error::CheckError;
use machine::Machine;
use models::Models;
use prima_crds::error_chain;
use report::Report;

fn main() -> ExitCode {
    let checked = report_file().and_then(|file| Ok((check()?, file)));
    let written = checked.and_then(|(report, file)| report.write(&file).map(|()| report));
    match written {
        Ok(report) if report.failed() == 0 => ExitCode::SUCCESS,
        Ok(report) => {
            eprintln!("gpu_check: {} of the steps failed", report.failed());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("gpu_check: {}", error_chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn report_file() -> Result<PathBuf, CheckError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [option, file] if option == "--report" => Ok(file.into()),
        _ => Err(CheckError::Usage),
    }
}

fn check() -> Result<Report, CheckError> {
    let machine = Machine::inspect()?;
    println!("{machine}");
    let models = Models::find(&machine)?;
    let mut report = Report::new(&machine);
    for left_out in &models.left_out {
        report.leave_out(left_out);
    }
    for program in programs::PROGRAMS {
        step(&mut report, program.what, || {
            programs::run(program, &machine)
        });
    }
    for left_out in programs::left_out(&machine) {
        report.leave_out(&left_out);
    }
    let small = &models.small;
    let expected = step(&mut report, "a ring on the processor alone", || {
        rings::on_processor(small)
    });
    if let Some(expected) = expected {
        for ring in rings::ON_GPU {
            step(&mut report, ring.what, || ring.check(small, &expected));
        }
    }
    step(&mut report, "more memory than the GPU has", || {
        memory::check(&machine, small)
    });
    for model in &models.measured {
        let what = format!("speed of {}", model.name);
        let speed = step(&mut report, &what, || speed::measure(&machine, model));
        let peer = peer::program().and_then(|program| {
            let what = format!("llama.cpp's speed of {}", model.name);
            step(&mut report, &what, || {
                peer::measure(&program, &model.path, speed::tokens_on_gpu(&machine))
            })
        });
        if let Some(speed) = speed {
            report.speed(model, &speed, peer.as_ref());
        }
    }
    if let Some(profile) = step(&mut report, "the machine's profile", || {
        served::profile(&machine, &models)
    }) {
        for model in &models.measured {
            let what = format!("prediction for {}", model.name);
            let served = || served::measure(&machine, model, &profile);
            if let Some(served) = step(&mut report, &what, served) {
                report.served(model, &served);
            }
        }
    }
    report.finish(&machine);
    println!("\n{report}");
    Ok(report)
}

/// What is found, as people read it in a step's line.
trait Finding {
    fn told(&self) -> String;
}

impl Finding for String {
    fn told(&self) -> String {
        self.clone()
    }
}

/// Does one step and prints what became of it. The harness of rings reports by panics, which are this step's failures.
fn step<F: Finding>(
    report: &mut Report,
    what: &str,
    run: impl FnOnce() -> Result<F, CheckError>,
) -> Option<F> {
    let begun = Instant::now();
    let found = panic::catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(CheckError::Harness {
            message: text.unwrap_or_default(),
        })
    });
    let told = found
        .as_ref()
        .map(Finding::told)
        .map_err(|error| error_chain(error));
    report.step(what, begun.elapsed(), told);
    found.ok()
}
