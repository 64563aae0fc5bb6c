//! Which machines a Model may use, with what they have left for it, and why the others are out. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use prima_crds::v1alpha1::model::{Model, ResolvedModel};
use prima_crds::v1alpha1::node_profile::{AgentProfile, NodeProfile, NodeProfileStatus};
use prima_crds::v1alpha1::ring_plan::{RingMember, RingPlan};

use super::dereference::World;
use crate::cluster::world::{AgentState, Machine};

/// How the machines look to one Model.
#[derive(Default)]
pub struct Candidates {
    /// What the planner gets; memory that other Models' plans were promised is taken off.
    pub profiles: Vec<NodeProfile>,
    /// Name and reason.
    pub out: Vec<(String, String)>,
    /// What would change this soon by itself, and is worth waiting for before the first plan.
    pub awaited: Vec<String>,
}

/// A machine measures itself and its links in seconds; one that does not come to an end is not waited for.
const PATIENCE: Duration = Duration::from_secs(180);

impl Candidates {
    /// `refused`: machines whose agent cannot honour a plan, and why. `members`: of the ring that runs.
    pub fn new(
        model: &Model,
        resolved: &ResolvedModel,
        world: &World,
        refused: &BTreeMap<String, String>,
        members: &[RingMember],
    ) -> Self {
        let mut candidates = Self::default();
        let machines = &world.machines;
        // A ring that cannot run needs nothing; else two of them would keep each other from being planned anew.
        let runs = |plan: &&Arc<RingPlan>| {
            let mut members = plan.spec.members.iter();
            members.all(|member| {
                let machine = machines.iter().find(|machine| machine.name == member.name);
                machine.is_some_and(Machine::is_alive)
            })
        };
        let others: Vec<Arc<RingPlan>> = world.others.iter().filter(runs).cloned().collect();
        for machine in machines {
            match usable(model, resolved, machine, refused) {
                Ok((profile, status)) => {
                    let mut profile = profile.clone();
                    let mut status = status.clone();
                    take_promised(&mut status, &machine.name, &others);
                    profile.status = Some(status);
                    candidates.profiles.push(profile);
                }
                Err(Out { why, awaited }) => {
                    if awaited {
                        candidates.awaited.push(format!("{}: {why}", machine.name));
                    }
                    candidates.out.push((machine.name.clone(), why));
                }
            }
        }
        candidates.without_unmeasured_links(machines, members);
        candidates
    }

    pub fn address(&self, name: &str) -> Option<&str> {
        let profile = self.profiles.iter().find(|p| p.name_any() == name)?;
        Some(&agent(profile)?.address)
    }

    pub fn profile(&self, name: &str) -> Option<&NodeProfile> {
        self.profiles.iter().find(|p| p.name_any() == name)
    }

    /// Why the machine cannot be used, if it is one that is known.
    pub fn why_out(&self, name: &str) -> Option<&str> {
        let out = self.out.iter().find(|(out, _)| out == name);
        out.map(|(_, why)| why.as_str())
    }

    /// The planner needs all links between the machines that it plans with: whoever lacks the most is left out, until none
    /// is lacking; of a ring that runs nobody is, for the sake of one who has just come.
    fn without_unmeasured_links(&mut self, machines: &[Machine], members: &[RingMember]) {
        loop {
            let names: Vec<String> = self.profiles.iter().map(ResourceExt::name_any).collect();
            let lacking = |i: usize| -> Vec<&String> {
                let others = names.iter().enumerate().filter(|&(j, _)| j != i);
                others
                    .filter(|&(j, other)| {
                        !has_link(&self.profiles[i], other)
                            || !has_link(&self.profiles[j], &names[i])
                    })
                    .map(|(_, other)| other)
                    .collect()
            };
            let runs = |i: usize| members.iter().any(|member| member.name == names[i]);
            let worst = (0..names.len())
                .filter(|&i| !lacking(i).is_empty())
                .max_by_key(|&i| (!runs(i), lacking(i).len(), std::cmp::Reverse(i)));
            let Some(worst) = worst else {
                return;
            };
            let to = lacking(worst)[0].clone();
            let name = names[worst].clone();
            let why = format!("the link between it and {to} is not measured yet");
            let settles = machines
                .iter()
                .any(|machine| machine.name == name && is_new(machine));
            if settles {
                self.awaited.push(format!("{name}: {why}"));
            }
            self.out.push((name, why));
            self.profiles.remove(worst);
        }
    }
}

struct Out {
    why: String,
    awaited: bool,
}

fn usable<'a>(
    model: &Model,
    resolved: &ResolvedModel,
    machine: &'a Machine,
    refused: &BTreeMap<String, String>,
) -> Result<(&'a NodeProfile, &'a NodeProfileStatus), Out> {
    let out = |why: String| Out {
        why,
        awaited: false,
    };
    let soon = |why: &str| Out {
        why: why.to_owned(),
        awaited: is_new(machine),
    };
    match machine.agent {
        AgentState::Alive { .. } => {}
        // How long is not said: a status that changes by itself would be written for ever.
        AgentState::Silent => return Err(out("its agent is not heard of any more".to_owned())),
        AgentState::Unknown => return Err(out("its agent does not run".to_owned())),
    }
    let Some(profile) = machine.profile.as_deref() else {
        return Err(soon("its agent measures it"));
    };
    if profile.spec.exclude {
        return Err(out(
            "its owner excludes it (NodeProfile spec.exclude)".to_owned()
        ));
    }
    let mut wanted = model.spec.node_selector.iter();
    if let Some((key, value)) = wanted.find(|&(key, value)| machine.labels.get(key) != Some(value))
    {
        return Err(out(format!(
            "its Node lacks the label {key}={value} (spec.nodeSelector)"
        )));
    }
    if let Some(problem) = &machine.unreadable {
        return Err(out(format!(
            "its agent is of a version that this operator ({}) cannot read: {problem}; update both",
            env!("CARGO_PKG_VERSION")
        )));
    }
    let Some(status) = &profile.status else {
        return Err(soon("its agent measures it"));
    };
    let Some(agent) = &status.agent else {
        return Err(soon("its agent has not said where it is reached"));
    };
    if let Err(error) = profile.validate(&machine.name) {
        return Err(out(format!("its NodeProfile cannot be used: {error}")));
    }
    if let Some(why) = refused.get(&machine.name) {
        return Err(out(format!("its agent could not follow a plan: {why}")));
    }
    let weights = resolved.profile.layer_weights.iter();
    let weights = weights.chain(&resolved.profile.output_weights);
    for format in weights.map(|weights| &weights.format) {
        if !status
            .cpu
            .throughput
            .iter()
            .any(|one| one.format == *format)
        {
            return Err(out(format!(
                "its agent does not run {format}, a weight format of the model"
            )));
        }
    }
    if let Some(path) = model.spec.source.local_path() {
        has_file(agent, &path, resolved).map_err(out)?;
    }
    Ok((profile, status))
}

fn has_file(agent: &AgentProfile, path: &str, resolved: &ResolvedModel) -> Result<(), String> {
    let Some(file) = agent.local_models.iter().find(|file| file.path == path) else {
        return Err(format!("it has no file {path}"));
    };
    if let Some(problem) = &file.problem {
        return Err(problem.clone());
    }
    let header =
        |version: &prima_crds::v1alpha1::ring_plan::FileVersion| version.header_sha256.clone();
    match file.version.as_ref().map(header) == Some(header(&resolved.version)) {
        true => Ok(()),
        false => Err(format!(
            "its {path} is another file than the other machines'"
        )),
    }
}

/// What other plans were promised is not there any more, whether they use it already or not.
fn take_promised(status: &mut NodeProfileStatus, name: &str, others: &[Arc<RingPlan>]) {
    let members = || {
        let plans = others.iter().flat_map(|plan| &plan.spec.members);
        plans.filter(|member| member.name == name)
    };
    let memory: i64 = members().filter_map(|member| member.memory_bytes).sum();
    let gpu: i64 = members().filter_map(|member| member.gpu_memory_bytes).sum();
    let left = &mut status.memory.available_bytes;
    *left = left.saturating_sub(memory).max(0);
    let measured = status
        .gpus
        .iter_mut()
        .filter_map(|gpu| gpu.measured.as_mut());
    for gpu_memory in measured {
        gpu_memory.available_bytes = gpu_memory.available_bytes.saturating_sub(gpu).max(0);
    }
}

fn is_new(machine: &Machine) -> bool {
    matches!(machine.agent, AgentState::Alive { known_for } if known_for < PATIENCE)
}

fn agent(profile: &NodeProfile) -> Option<&AgentProfile> {
    profile.status.as_ref()?.agent.as_ref()
}

fn has_link(from: &NodeProfile, to: &str) -> bool {
    let links = from.status.iter().flat_map(|status| &status.links);
    links.into_iter().any(|link| link.to == to)
}
