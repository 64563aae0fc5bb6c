//! The `prima-node-agent` command: reads arguments, sets up logging to stderr, and turns errors into exit codes. The
//! library does the work of its subcommands.

use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use prima_node_agent::cluster::{self, RunArgs};
use prima_node_agent::inspect::{OutputFormat, inspect};
use prima_node_agent::inspect_cpu::inspect_cpu;
use prima_node_agent::inspect_gpu::inspect_gpu;
use prima_node_agent::lending::borrow::{self, BorrowArgs};
use prima_node_agent::lending::lend::{self, LendArgs};
use prima_node_agent::profile::{self, ProfileArgs};
use prima_node_agent::serve::{self, ServeArgs};
use prima_text::TemplateAllocator;
use tracing_subscriber::EnvFilter;

#[global_allocator]
static ALLOCATOR: TemplateAllocator = TemplateAllocator;

/// One member of a ring that runs a large language model together.
#[derive(Parser)]
#[command(name = "prima-node-agent", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the agent of a node in a cluster: measure it, and run its member of every ring planned with it
    Run(RunArgs),
    /// Run one member of a ring: its layers, and on rank 0 the HTTP endpoint
    Serve(ServeArgs),
    /// Lend this machine to rings of `prima run` on other machines (`prima agent` starts it)
    Lend(LendArgs),
    /// Ask lent machines for what `prima run` needs
    Borrow(BorrowArgs),
    /// Measure this machine, for the planner: processor, memory, disk, GPUs, links
    Profile(ProfileArgs),
    /// Show a model's layers, formats and sizes, or which kernels this processor gets, or which GPUs are used
    Inspect {
        /// The model, a GGUF file
        #[arg(value_name = "MODEL.gguf", required_unless_present_any = ["cpu", "gpu"])]
        model: Option<PathBuf>,
        /// Instead of a model: which kernels this processor gets, and why
        #[arg(long, conflicts_with = "model")]
        cpu: bool,
        /// Instead of a model: which GPUs layers would run on, and why no other
        #[arg(long, conflicts_with_all = ["model", "cpu"])]
        gpu: bool,
        /// For people or for programs
        #[arg(short, long, alias = "format", value_enum, default_value = "table")]
        output: OutputFormat,
    },
    /// Give a folder, but not its contents, to a user; for clusters, where the kubelet creates it for root
    Chown {
        #[arg(long, value_name = "ID")]
        uid: u32,
        #[arg(long, value_name = "ID")]
        gid: u32,
        folder: PathBuf,
    },
    /// Print completions of this command for a shell
    Completions {
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Write man pages of this command and its subcommands into a folder
    Man { folder: PathBuf },
}

const NAME: &str = "prima-node-agent";
const EXAMPLES: &str = "\
Examples:
  prima-node-agent inspect model.gguf
  prima-node-agent inspect model.gguf -o yaml
  prima-node-agent inspect --cpu
  prima-node-agent inspect --gpu
  prima-node-agent profile -o yaml > desk.yaml";

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
        Command::Lend(args) => lend::run(args).map_err(|error| prima_crds::error_chain(&error)),
        Command::Borrow(args) => borrow::run(args).map_err(|error| prima_crds::error_chain(&error)),
        Command::Profile(args) => profile::run(args)
            .map_err(|error| prima_crds::error_chain(&error))
            .map(|text| print(&text)),
        Command::Inspect {
            model, gpu, output, ..
        } => match model {
            Some(model) => inspect(&model, output),
            None if gpu => inspect_gpu(output),
            None => inspect_cpu(output),
        }
        .map_err(|error| prima_crds::error_chain(&error))
        .map(|text| print(&text)),
        Command::Chown { uid, gid, folder } => {
            std::os::unix::fs::chown(&folder, Some(uid), Some(gid))
                .map_err(|error| format!("cannot give {} to user {uid}: {error}", folder.display()))
        }
        Command::Completions { shell } => {
            let stdout = &mut std::io::stdout();
            clap_complete::generate(shell, &mut Cli::command(), NAME, stdout);
            Ok(())
        }
        Command::Man { folder } => std::fs::create_dir_all(&folder)
            .and_then(|()| clap_mangen::generate_to(Cli::command(), &folder))
            .map_err(|error| format!("cannot write man pages to {}: {error}", folder.display())),
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
