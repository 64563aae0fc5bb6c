//! `prima agent`: lends this machine to rings that `prima run` makes on other machines. `prima-node-agent lend` does all of it; this is where
//! people find it.

use std::io;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use prima_crds::quantity::Quantity;

use crate::local::{AgentsError, program};

#[derive(clap::Args)]
pub struct AgentArgs {
    /// Where other machines reach this one; the member of a ring listens at the next port
    #[arg(long, value_name = "IP:PORT", default_value = "0.0.0.0:9190")]
    listen: SocketAddr,
    /// Take in one more machine, by a word; the first is taken in without this
    #[arg(long)]
    enrol: bool,
    /// What this machine is called in rings [default: its host name]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Compute threads of a member [default: all cores; a member that waits uses none]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Memory that stays free for other programs, such as 2Gi [default: 5 % of what is available when a ring begins]
    #[arg(long, value_name = "SIZE")]
    reserve_memory: Option<Quantity>,
}

#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error(transparent)]
    Program(#[from] AgentsError),
    #[error("cannot run prima-node-agent lend")]
    Run(#[source] io::Error),
}

/// Becomes that program; returns only if it cannot.
pub fn run(args: &AgentArgs) -> Result<(), AgentError> {
    let mut command = Command::new(program()?);
    command.args(["lend", "--listen", &args.listen.to_string()]);
    command.args(args.enrol.then_some("--enrol"));
    for (flag, value) in [
        ("--name", args.name.clone()),
        ("--threads", args.threads.map(|count| count.to_string())),
        (
            "--reserve-memory",
            args.reserve_memory.map(|size| size.bytes().to_string()),
        ),
    ] {
        if let Some(value) = value {
            command.args([flag, &value]);
        }
    }
    Err(AgentError::Run(command.exec()))
}
