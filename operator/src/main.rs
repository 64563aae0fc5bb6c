//! The `prima` command. This file decides what the command line looks like, and turns an error into text and an
//! exit status; what a subcommand does lives in its own module.

mod cluster;
mod local;
mod model_controller;
mod model_file;
mod plan;
mod probe;
mod stop_signals;

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// One machine for large language models, made of several.
#[derive(Parser)]
#[command(name = "prima", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a model on a ring of agents on this machine, without a cluster
    Run(local::RunArgs),
    /// Say which machines would run which layers of a model, how fast, and why
    Plan(plan::PlanArgs),
    /// Turn the Models of a Kubernetes cluster into rings, until told to end
    Operator(cluster::OperatorArgs),
    /// Print the definitions of Model, NodeProfile and RingPlan, for `kubectl apply -f -`
    Crds,
    /// Ask addresses by HTTP, and fail unless each answers 200
    Probe(probe::ProbeArgs),
}

/// One thread: it only waits for children, and children die with the thread that started them.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let result: Result<(), Box<dyn Error>> = match Cli::parse().command {
        Command::Run(args) => local::run(args).await.map_err(Into::into),
        Command::Plan(args) => plan::run(&args).map_err(Into::into),
        Command::Operator(args) => cluster::run(args).await.map_err(Into::into),
        Command::Crds => print_definitions().map_err(Into::into),
        Command::Probe(args) => probe::run(&args)
            .map(|text| print!("{text}"))
            .map_err(Into::into),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let text = prima_crds::error_chain(&*error);
            // Nobody may be reading any more; the exit status says it anyway.
            let _ = writeln!(io::stderr(), "prima: {text}");
            ExitCode::FAILURE
        }
    }
}

fn print_definitions() -> Result<(), serde_saphyr::ser::Error> {
    let definitions: Vec<String> = prima_crds::definitions::all()
        .iter()
        .map(prima_crds::definitions::yaml)
        .collect::<Result<_, _>>()?;
    // Whoever closed our stdout does not want to know.
    let _ = write!(io::stdout(), "{}", definitions.join("---\n"));
    Ok(())
}
