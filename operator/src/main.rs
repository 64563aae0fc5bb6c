//! The `prima` command. This file decides what the command line looks like, and turns an error into text and an
//! exit status; what a subcommand does lives in its own module.

mod agent;
mod cluster;
mod condition;
mod local;
mod model_controller;
mod model_file;
mod plan;
mod probe;
mod stop_signals;

use std::error::Error;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

/// One machine for large language models, made of several.
#[derive(Parser)]
#[command(name = "prima", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a model on a ring of agents without a cluster, on this machine and on those that are lent to it
    Run(local::RunArgs),
    /// Lend this machine to rings that `prima run` makes on other machines
    Agent(agent::AgentArgs),
    /// Say which machines would run which layers of a model, how fast, and why
    Plan(plan::PlanArgs),
    /// Run the controller of a Kubernetes cluster, which turns Models into rings
    Operator(cluster::OperatorArgs),
    /// Print the definitions of Model, NodeProfile and RingPlan, for `kubectl apply -f -`
    Crds,
    /// Ask addresses by HTTP, and fail unless each answers 200
    Probe(probe::ProbeArgs),
    /// Print completions of this command for a shell
    Completions {
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Write man pages of this command and its subcommands into a folder
    Man { folder: PathBuf },
}

const EXAMPLES: &str = "\
Examples:
  prima run model.gguf
  prima run model.gguf --members 3 --port 9000
  prima agent                                             (on another machine, which shows a word)
  prima run model.gguf --member 192.168.1.7:9190#WORD
  PRIMA_API_KEY=secret prima run model.gguf --host 0.0.0.0
  prima plan --model model.gguf --profiles desk.yaml
  kubectl get nodeprofiles -o yaml | prima plan --model model.gguf --profiles -
  prima completions bash > ~/.local/share/bash-completion/completions/prima";

/// One thread: it only waits for children, and children die with the thread that started them.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let result: Result<(), Box<dyn Error>> = match Cli::parse().command {
        Command::Run(args) => local::run(args).await.map_err(Into::into),
        Command::Agent(args) => agent::run(&args).map_err(Into::into),
        Command::Plan(args) => plan::run(&args).map_err(Into::into),
        Command::Operator(args) => cluster::run(args).await.map_err(Into::into),
        Command::Crds => print_definitions().map_err(Into::into),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "prima", &mut io::stdout());
            Ok(())
        }
        Command::Man { folder } => std::fs::create_dir_all(&folder)
            .and_then(|()| clap_mangen::generate_to(Cli::command(), &folder))
            .map_err(|error| {
                format!("cannot write man pages to {}: {error}", folder.display()).into()
            }),
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
