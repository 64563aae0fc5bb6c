//! The plan of a local ring when nobody says how to split: this machine's profile, measured by the agent or read from a file, stands for
//! every member. Decides how one machine is counted as several. Members compute a token one after the other, so each has all of the
//! processors for it. They compute the chunks of a prompt at the same time, so each has a part of the processors for them. Of memory, each
//! always has a part. With one round, one member at a time reads from the disk.

use std::io;
use std::path::Path;
use std::process::Stdio;

use prima_crds::v1alpha1::document::DocumentError;
use prima_crds::v1alpha1::model_profile::ModelProfileSpec;
use prima_crds::v1alpha1::node_profile::{LinkProfile, NodeProfile};
use prima_crds::v1alpha1::ring_plan::KvDtype;
use prima_halda::{Options, Plan};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use super::agents::{self, AgentsError};
use super::screen::Screen;
use crate::model_file::ModelFile;
use crate::plan::{PlanCommandError, checked, read_profile};

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlannedError {
    #[error(transparent)]
    Agents(#[from] AgentsError),
    #[error("cannot run prima-node-agent profile")]
    Run(#[source] io::Error),
    #[error("prima-node-agent profile failed ({status}): {last_line}")]
    Profile { status: String, last_line: String },
    #[error("prima-node-agent profile wrote something else than a profile")]
    Document(#[source] DocumentError),
    #[error("{file}: status.links is empty: members on one machine need its link to itself")]
    NoLink { file: String },
    #[error(
        "--members {members}: the model has only {layers} layers, and without --split every member gets at least one"
    )]
    MoreMembersThanLayers { members: usize, layers: usize },
    #[error(transparent)]
    Plan(#[from] PlanCommandError),
}

/// What the user asked for.
pub struct Wishes<'a> {
    pub members: Option<usize>,
    pub rounds: Option<usize>,
    pub context: usize,
    pub kv_dtype: KvDtype,
    pub threads: Option<usize>,
    /// Bytes that stay free on the machine, all members together; `None`: as the profile says.
    pub reserve_memory: Option<u64>,
    pub draft: Option<&'a ModelProfileSpec>,
    pub profile: Option<&'a Path>,
}

/// A plan and what it leaves free.
pub struct Planned {
    pub plan: Plan,
    /// Bytes, all members together; `None`: the agents' default.
    pub reserve_memory: Option<u64>,
}

/// Plans a ring of members `m0`, `m1`, ...: as many as were wished for, else this machine alone.
pub async fn plan(
    model: &ModelFile,
    wishes: &Wishes<'_>,
    screen: &Screen,
) -> Result<Planned, PlannedError> {
    let members = wishes.members.unwrap_or(1);
    let layers = model.profile.spec.layers as usize;
    if members > layers {
        return Err(PlannedError::MoreMembersThanLayers { members, layers });
    }
    let mut machine = match wishes.profile {
        Some(path) => read_profile(path)?,
        None => measured(model, wishes.threads, screen).await?,
    };
    // In bytes, which can be divided among members.
    let owner = &mut machine.spec;
    let reserved = wishes.reserve_memory.map(|bytes| bytes as i64);
    (owner.reserved_memory_bytes, owner.reserved_memory) =
        (reserved.or(owner.reserved_bytes()), None);
    (owner.memory_cap_bytes, owner.memory_cap) = (owner.cap_bytes(), None);
    let options = Options {
        context_tokens: wishes.context,
        kv_dtype: wishes.kv_dtype,
        draft: wishes.draft.cloned(),
        use_all: true,
        // Members that share a disk gain nothing by rounds.
        rounds: wishes.rounds.or(Some(1)),
        ..Options::default()
    };
    Ok(Planned {
        plan: checked(&model.profile, &copies(&machine, members)?, &options)?,
        reserve_memory: machine.spec.reserved_memory_bytes.map(|bytes| bytes as u64),
    })
}

/// `count` machines that share what `machine` has.
fn copies(machine: &NodeProfile, count: usize) -> Result<Vec<NodeProfile>, PlannedError> {
    let name = |index: usize| format!("m{index}");
    let mut copies = vec![machine.clone(); count];
    for (index, copy) in copies.iter_mut().enumerate() {
        copy.metadata.name = Some(name(index));
        let Some(status) = &mut copy.status else {
            continue;
        };
        let part = |value: &mut i64| *value = (*value / count as i64).max(1);
        part(&mut status.memory.available_bytes);
        let owners = &mut copy.spec;
        for bytes in [
            &mut owners.reserved_memory_bytes,
            &mut owners.memory_cap_bytes,
        ]
        .into_iter()
        .flatten()
        {
            part(bytes);
        }
        status.memory.swappable_bytes /= count as i64;
        for one in &mut status.cpu.throughput {
            part(&mut one.prefill_flop_per_second);
        }
        let Some(link) = status.links.first().cloned() else {
            return Err(PlannedError::NoLink {
                file: machine.metadata.name.clone().unwrap_or_default(),
            });
        };
        let others = (0..count).filter(|&other| other != index);
        status.links = others
            .map(|other| LinkProfile {
                to: name(other),
                ..link.clone()
            })
            .collect();
    }
    Ok(copies)
}

/// This machine as the agent measures it, which takes seconds the first time.
async fn measured(
    model: &ModelFile,
    threads: Option<usize>,
    screen: &Screen,
) -> Result<NodeProfile, PlannedError> {
    screen.status("measuring this machine");
    let mut command = Command::new(agents::program()?);
    command
        .args(["profile", "--output", "yaml", "--models"])
        .arg(&model.path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    if let Some(threads) = threads {
        command.args(["--threads", &threads.to_string()]);
    }
    let mut child = command.spawn().map_err(PlannedError::Run)?;
    let progress = child.stderr.take();
    let told = async {
        let mut last_line = String::new();
        if let Some(progress) = progress {
            let mut lines = BufReader::new(progress).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                screen.status(&line);
                last_line = line;
            }
        }
        last_line
    };
    let (last_line, output) = tokio::join!(told, child.wait_with_output());
    let output = output.map_err(PlannedError::Run)?;
    if !output.status.success() {
        return Err(PlannedError::Profile {
            status: output.status.to_string(),
            last_line,
        });
    }
    let text = String::from_utf8_lossy(&output.stdout);
    NodeProfile::from_yaml("prima-node-agent profile", &text).map_err(PlannedError::Document)
}
