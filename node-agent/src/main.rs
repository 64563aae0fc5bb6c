//! The `prima-node-agent` command: reads arguments, sets up logging to stderr, and turns errors into exit codes. The
//! library does the work of its subcommands.

use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use prima_node_agent::cluster::{self, RunArgs};
use prima_node_agent::inspect::{OutputFormat, inspect};
use prima_node_agent::inspect_cpu::inspect_cpu;
use prima_node_agent::profile::{self, ProfileArgs};
use prima_node_agent::serve::{self, ServeArgs};
use tracing_subscriber::EnvFilter;

/// One member of a ring that runs a large language model together.
#[derive(Parser)]
#[command(name = "prima-node-agent", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// In a cluster: measures this machine and runs its member of every ring planned with this machine
    Run(RunArgs),
    /// Runs one member of a ring: its layers, and on rank 0 the HTTP endpoint
    Serve(ServeArgs),
    /// Measures this machine, for the planner: processor, memory, disk, GPUs, links
    Profile(ProfileArgs),
    /// Shows a model's layers, formats and sizes, or which kernels this processor gets
    Inspect {
        /// The model, a GGUF file
        #[arg(value_name = "MODEL.gguf", required_unless_present = "cpu")]
        model: Option<PathBuf>,
        /// Instead of a model: which kernels this processor gets, and why
        #[arg(long, conflicts_with_all = ["model", "format"])]
        cpu: bool,
        /// For people or for programs
        #[arg(long, value_enum, default_value = "table")]
        format: OutputFormat,
    },
    /// Gives a folder, but not its contents, to a user; for clusters, where the kubelet creates it for root
    Chown {
        #[arg(long, value_name = "ID")]
        uid: u32,
        #[arg(long, value_name = "ID")]
        gid: u32,
        folder: PathBuf,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_env_filter(
            EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info")),
        )
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
    let result = match cli.command {
        Command::Run(args) => cluster::run(args).map_err(|error| prima_crds::error_chain(&error)),
        Command::Serve(args) => serve::run(args).map_err(|error| prima_crds::error_chain(&error)),
        Command::Profile(args) => profile::run(args)
            .map_err(|error| prima_crds::error_chain(&error))
            .map(|text| print(&text)),
        Command::Inspect { model, cpu, format } => match model {
            Some(model) if !cpu => {
                inspect(&model, format).map_err(|error| prima_crds::error_chain(&error))
            }
            _ => inspect_cpu().map_err(|error| prima_crds::error_chain(&error)),
        }
        .map(|text| print(&text)),
        Command::Chown { uid, gid, folder } => {
            std::os::unix::fs::chown(&folder, Some(uid), Some(gid))
                .map_err(|error| format!("cannot give {} to user {uid}: {error}", folder.display()))
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn print(text: &str) {
    // A reader that closes the pipe early has seen enough.
    let _ = std::io::stdout().write_all(text.as_bytes());
}
