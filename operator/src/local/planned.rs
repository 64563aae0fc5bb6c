//! The plan of a local ring when nobody says how to split: this machine's profile, measured by the agent or read from a file, stands for
//! every member, or for this machine's beside those that are lent. Decides how one machine is counted as several. Members compute a token one after
//! the other, so each has all of the processors for it, and of a GPU. They compute the chunks of a prompt at the same time, so each has a part of both
//! for them, and of the way on which weights cross to a GPU. Of memory, each always has a part. With one round, one member at a time reads from the disk.

use std::io;
use std::path::Path;
use std::process::Stdio;

use prima_crds::v1alpha1::document::DocumentError;
use prima_crds::v1alpha1::model_profile::ModelProfileSpec;
use prima_crds::v1alpha1::node_profile::{LinkProfile, NodeProfile};
use prima_crds::v1alpha1::ring_plan::KvDtype;
use prima_halda::{Options, Plan};
use prima_member_process::Borrowed;
use tokio::process::Command;

use super::agents::{self, AgentsError};
use super::lent;
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
    #[error("prima-node-agent profile failed ({status}): {said}")]
    Profile { status: String, said: String },
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
    /// The machines that are lent, all of which take part.
    pub borrowed: Option<&'a Borrowed>,
}

/// A plan and what it leaves free.
pub struct Planned {
    pub plan: Plan,
    /// Bytes on this machine, all of its members together; `None`: the agents' default.
    pub reserve_memory: Option<u64>,
    /// If it would be faster without the machines that are lent: tokens per second then.
    pub faster_alone: Option<f64>,
}

/// Plans a ring: of this machine and those that are lent, or of members `m0`, `m1`, ... on this machine, as many as were wished for, else one.
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
        rounds: wishes.rounds,
        ..Options::default()
    };
    let reserve_memory = machine.spec.reserved_memory_bytes.map(|bytes| bytes as u64);
    let Some(borrowed) = wishes.borrowed else {
        let options = Options {
            // Members that share a disk gain nothing by rounds.
            rounds: wishes.rounds.or(Some(1)),
            ..options
        };
        return Ok(Planned {
            plan: checked(&model.profile, &copies(&machine, members)?, &options)?,
            reserve_memory,
            faster_alone: None,
        });
    };
    let options = Options {
        // Clients come to this machine.
        rank0: Some(borrowed.own.place.name.clone()),
        ..options
    };
    let machines = lent::profiles(borrowed, machine);
    let plan = checked(&model.profile, &machines, &options)?;
    // A model that this machine cannot run alone has no such plan.
    let alone = checked(&model.profile, &machines[..1], &options).ok();
    let rate = |plan: &Plan| 1e3 / plan.report.tpot_milliseconds;
    let faster_alone = alone.map(|alone| rate(&alone));
    Ok(Planned {
        faster_alone: faster_alone.filter(|&alone| alone > rate(&plan)),
        plan,
        reserve_memory,
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
        let gpus = status.gpus.iter_mut();
        for gpu in gpus.filter_map(|gpu| gpu.measured.as_mut()) {
            gpu.available_bytes /= count as i64;
            // What a driver lends a GPU that shares memory is lent once.
            gpu.total_bytes /= count as i64;
            part(&mut gpu.to_gpu_bytes_per_second);
            for one in &mut gpu.throughput {
                part(&mut one.prefill_flop_per_second);
            }
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
    let (said, output) = agents::followed(command, String::new(), screen)
        .await
        .map_err(PlannedError::Run)?;
    if !output.status.success() {
        return Err(PlannedError::Profile {
            status: output.status.to_string(),
            said,
        });
    }
    let text = String::from_utf8_lossy(&output.stdout);
    NodeProfile::from_yaml("prima-node-agent profile", &text).map_err(PlannedError::Document)
}

#[cfg(test)]
mod tests {
    use prima_crds::v1alpha1::model_profile::ModelProfile;
    use prima_crds::v1alpha1::node_profile::{GpuMeasurements, Throughput};

    use super::*;

    /// A PC with a GPU of 12 GiB.
    fn pc() -> NodeProfile {
        let machines = include_str!("../../samples/machines/gaming-pc-and-laptop.yaml");
        let mut machines = NodeProfile::all_from_yaml("machines", machines).unwrap();
        machines.retain(|machine| !machine.status.as_ref().unwrap().gpus.is_empty());
        machines.remove(0)
    }

    fn of_gpu(machine: &NodeProfile) -> &GpuMeasurements {
        let gpu = &machine.status.as_ref().unwrap().gpus[0];
        gpu.measured.as_ref().unwrap()
    }

    #[test]
    fn members_on_a_machine_share_its_gpu() {
        let pc = pc();
        let whole = of_gpu(&pc);
        for count in [1, 2, 3] {
            let members = copies(&pc, count as usize).unwrap();
            assert_eq!(members.len(), count as usize);
            for own in members.iter().map(of_gpu) {
                assert_eq!(own.available_bytes, whole.available_bytes / count);
                assert_eq!(own.total_bytes, whole.total_bytes / count);
                let rates = |gpu: &GpuMeasurements| {
                    let Throughput {
                        decode_bytes_per_second: decode,
                        prefill_flop_per_second: prefill,
                        ..
                    } = gpu.throughput[0];
                    (decode, prefill, gpu.to_gpu_bytes_per_second)
                };
                let (decode, prefill, to_gpu) = rates(whole);
                // A token is with one of them at a time.
                assert_eq!(rates(own), (decode, prefill / count, to_gpu / count));
            }
        }
    }

    #[test]
    fn two_members_are_planned_no_more_than_the_gpu_has() {
        let model = include_str!("../../samples/models/qwen3-32b.yaml");
        let model = ModelProfile::from_yaml("model", model).unwrap();
        let pc = pc();
        let available = of_gpu(&pc).available_bytes as u64;
        assert!(model.spec.size_bytes as u64 > available);
        let options = Options {
            use_all: true,
            rounds: Some(1),
            ..Options::default()
        };
        let plan = checked(&model, &copies(&pc, 2).unwrap(), &options).unwrap();
        let members = plan.report.members.iter();
        let taken: Vec<u64> = members.map(|member| member.gpu_memory_bytes).collect();
        assert!(taken.len() == 2 && taken.iter().all(|bytes| *bytes > 0));
        assert!(taken.iter().sum::<u64>() <= available, "{taken:?}");
    }
}
