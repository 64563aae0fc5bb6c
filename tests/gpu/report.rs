//! The report as Markdown, for people: what was checked on what, what came out, what was left out.

use std::fmt;
use std::fs;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

use crate::error::CheckError;
use crate::machine::{self, Machine};
use crate::models::Model;
use crate::peer;
use crate::served::Served;
use crate::speed::{Rates, Speed, Tokens};

pub struct Report {
    software: bool,
    head: String,
    steps: Vec<String>,
    failed: usize,
    speeds: Vec<String>,
    served: Vec<String>,
    /// The plans of what was served.
    plans: Vec<String>,
    left_out: Vec<String>,
}

impl Report {
    pub fn new(machine: &Machine) -> Report {
        // Absent where it was not built from a checkout.
        let revision = fs::read_to_string(machine::beside_programs("revision"));
        let revision = revision.map_or("an unknown commit".to_owned(), |text| {
            text.trim().to_owned()
        });
        let today = Timestamp::now().to_string();
        let mut head = format!("| | |\n| --- | --- |\n| date | {} |\n", &today[..10]);
        for (name, value) in machine.rows() {
            head += &format!("| {name} | {value} |\n");
        }
        head += &format!("| built from | {revision} |\n");
        head += &format!("\n```text\n{}\n```\n", machine.inspected.trim_end());
        Report {
            software: machine.software,
            head,
            steps: Vec::new(),
            failed: 0,
            speeds: Vec::new(),
            served: Vec::new(),
            plans: Vec::new(),
            left_out: Vec::new(),
        }
    }

    /// Also prints it.
    pub fn step(&mut self, what: &str, took: Duration, told: Result<String, String>) {
        let seconds = took.as_secs_f64();
        let (verdict, told) = match told {
            Ok(told) => ("ok", told),
            Err(reason) => {
                self.failed += 1;
                ("FAILED", reason)
            }
        };
        println!("{verdict:<6} {what} ({seconds:.1} s): {told}");
        let cell = told.replace('|', "/").replace('\n', "<br>");
        let line = format!("| {what} | **{verdict}** | {cell} | {seconds:.1} s |");
        self.steps.push(line);
    }

    pub fn failed(&self) -> usize {
        self.failed
    }

    pub fn leave_out(&mut self, what: &str) {
        println!("left out: {what}");
        self.left_out.push(what.to_owned());
    }

    /// `peer`: llama.cpp's.
    pub fn speed(&mut self, model: &Model, speed: &Speed, peer: Option<&Rates>) {
        let [on_processor, on_gpu] = speed.tokens;
        let mut row = |what: &str, count: fn(&Tokens) -> usize, rate: fn(&Rates) -> f64| {
            let (processor, gpu) = (rate(&speed.processor), rate(&speed.gpu));
            let (peer, ratio) = match peer.map(rate) {
                Some(peer) => (format!("{peer:.1}"), format!("{:.2}", gpu / peer)),
                None => ("-".to_owned(), "-".to_owned()),
            };
            self.speeds.push(format!(
                "| {} | {what} | {processor:.1} ({}) | {gpu:.1} ({}) | {:.2} | {peer} | {ratio} |",
                model.name,
                count(&on_processor),
                count(&on_gpu),
                gpu / processor,
            ));
        };
        row("prompt", |tokens| tokens.prefill, |rates| rates.prefill);
        row("answer", |tokens| tokens.decode, |rates| rates.decode);
        let processor = speed.processor.prefill;
        self.speeds.push(format!(
            "| {} | prompt in pieces of 128, weights copied for each | {processor:.1} ({}) | {:.1} ({}) | {:.2} | - | - |",
            model.name,
            on_processor.prefill,
            speed.copied,
            on_gpu.prefill,
            speed.copied / processor,
        ));
    }

    pub fn served(&mut self, model: &Model, served: &Served) {
        self.served.push(format!(
            "| {} | {:.1} | {:.1} | {:.0} % |",
            model.name,
            served.predicted.median(),
            served.measured.median(),
            served.error_percent()
        ));
        self.plans.push(served.members.clone());
    }

    /// What is left out in the end.
    pub fn finish(&mut self, machine: &Machine) {
        if peer::program().is_none() {
            let variable = peer::VARIABLE;
            self.leave_out(&format!(
                "llama.cpp's own numbers: {variable} names no llama-bench"
            ));
        }
        if machine.software {
            self.leave_out("the GPU in the machine's profile, and so in the plans: a driver in software takes minutes to measure");
        }
        if machine.facts.unified_memory {
            self.leave_out(
                "filling the GPU's memory: it is the processor's, and other programs need it",
            );
        }
    }

    pub fn write(&self, file: &Path) -> Result<(), CheckError> {
        fs::write(file, self.to_string()).map_err(|source| CheckError::Write {
            path: file.to_owned(),
            source,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# What `make check-gpu` found\n\n{}", self.head)?;
        if self.software {
            writeln!(
                f,
                "The driver computes on the processor (lavapipe): answers count here, speeds mean nothing.\n"
            )?;
        }
        writeln!(f, "| step | | | took |\n| --- | --- | --- | --- |")?;
        lines(f, &self.steps)?;
        writeln!(
            f,
            "\n## The engine\n\nTokens per second (of so many tokens), all layers in one place; medians of three turns. llama.cpp has all layers on the GPU.\n"
        )?;
        writeln!(
            f,
            "| model | | processor | GPU | GPU / processor | llama.cpp | GPU / llama.cpp |\n| --- | --- | --- | --- | --- | --- | --- |"
        )?;
        lines(f, &self.speeds)?;
        writeln!(
            f,
            "\n## What users see\n\nAnswers over HTTP from `prima run`, planned from what this machine measured; tokens per second.\n"
        )?;
        writeln!(
            f,
            "| model | predicted | measured | error of the time per token |\n| --- | --- | --- | --- |"
        )?;
        lines(f, &self.served)?;
        for plan in &self.plans {
            writeln!(f, "\n```text\n{plan}\n```")?;
        }
        writeln!(f, "\n## Left out\n")?;
        self.left_out
            .iter()
            .try_for_each(|what| writeln!(f, "- {what}"))
    }
}

fn lines(f: &mut fmt::Formatter<'_>, lines: &[String]) -> fmt::Result {
    lines.iter().try_for_each(|line| writeln!(f, "{line}"))
}
