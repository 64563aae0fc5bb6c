//! Which machines a Model may use, with what they have left for it, and why the others are out. Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use prima_crds::v1alpha1::model::{Model, ResolvedModel};
use prima_crds::v1alpha1::model_profile::FormatWeights;
use prima_crds::v1alpha1::node_profile::{AgentProfile, NodeProfile, NodeProfileStatus};
use prima_crds::v1alpha1::ring_plan::{FileVersion, RingMember, RingPlan};

use super::dereference::World;
use crate::cluster::world::{AgentState, Machine};
use crate::plan::RING_PORT;

/// How the machines look to one Model.
#[derive(Default)]
pub struct Candidates {
    /// What the planner gets, without the memory that is promised to other Models' plans.
    pub profiles: Vec<NodeProfile>,
    /// How many bytes of a machine's memory that is.
    pub promised: BTreeMap<String, i64>,
    /// Machines on which a ring of another Model is on several GPUs.
    pub split_gpus: Vec<String>,
    /// Name and reason.
    pub out: Vec<(String, String)>,
    /// Those of them whose agents end, and still run their members.
    pub leaving: Vec<String>,
    /// What will soon change by itself, and is worth waiting for before the first plan.
    pub awaited: Vec<String>,
    /// Pairs that do not reach each other, and must not be neighbours, in the order of their names. Of some, no link was ever measured.
    pub apart: Vec<[String; 2]>,
}

/// A machine measures itself and its links in seconds; one that takes longer than this is not waited for.
const PATIENCE: Duration = Duration::from_secs(180);

impl Candidates {
    /// `refused`: machines that could not follow a plan, or at which a ring failed, and why. `members`: of the ring that runs.
    pub fn new(
        model: &Model,
        resolved: &ResolvedModel,
        world: &World,
        refused: &BTreeMap<String, String>,
        members: &[RingMember],
    ) -> Self {
        Self::beside(&world.others, model, resolved, world, refused, members)
    }

    /// The same as if `others` were all the plans of other Models.
    pub fn beside(
        others: &[Arc<RingPlan>],
        model: &Model,
        resolved: &ResolvedModel,
        world: &World,
        refused: &BTreeMap<String, String>,
        members: &[RingMember],
    ) -> Self {
        let mut candidates = Self::default();
        let machines = &world.machines;
        // A ring that cannot run needs no memory; else two such rings would keep each other from being planned again.
        let runs = |plan: &&Arc<RingPlan>| {
            let mut members = plan.spec.members.iter();
            members.all(|member| {
                let machine = machines.iter().find(|machine| machine.name == member.name);
                machine.is_some_and(Machine::is_alive)
            })
        };
        let others: Vec<Arc<RingPlan>> = others.iter().filter(runs).cloned().collect();
        for machine in machines {
            match usable(model, resolved, machine, refused) {
                Ok((profile, status)) => {
                    let mut profile = profile.clone();
                    let mut status = status.clone();
                    let on_several = |plan: &Arc<RingPlan>| {
                        let mut members = plan.spec.members.iter();
                        members.any(|member| member.name == machine.name && member.gpus.len() > 1)
                    };
                    if others.iter().any(on_several) {
                        candidates.split_gpus.push(machine.name.clone());
                    }
                    let promised = take_promised(&mut status, &machine.name, &others);
                    take_lent(&mut status, &machine.name, &others);
                    candidates.promised.insert(machine.name.clone(), promised);
                    profile.status = Some(status);
                    candidates.profiles.push(profile);
                }
                Err(Out { why, awaited }) => {
                    if awaited {
                        candidates.awaited.push(format!("{}: {why}", machine.name));
                    }
                    candidates.out.push((machine.name.clone(), why));
                    if machine.leaving && machine.is_alive() {
                        candidates.leaving.push(machine.name.clone());
                    }
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

    /// The key by which members know this machine's agent; none of an agent of an earlier version.
    pub fn public_key(&self, name: &str) -> Option<&String> {
        agent(self.profile(name)?)?.public_key_sha256.as_ref()
    }

    pub fn profile(&self, name: &str) -> Option<&NodeProfile> {
        self.profiles.iter().find(|p| p.name_any() == name)
    }

    /// Whether the machine can be used no more, and still does what it did for a while.
    pub fn is_leaving(&self, name: &str) -> bool {
        self.leaving.iter().any(|leaving| leaving == name)
    }

    /// Whether that is so of all machines of a ring.
    pub fn all_leave(&self, plan: &RingPlan) -> bool {
        let mut members = plan.spec.members.iter();
        members.all(|member| self.is_leaving(&member.name))
    }

    /// Why the machine cannot be used, if it is one that is known.
    pub fn why_out(&self, name: &str) -> Option<&str> {
        let out = self.out.iter().find(|(out, _)| out == name);
        out.map(|(_, why)| why.as_str())
    }

    /// Pairs that do not reach each other, as is known from elsewhere.
    pub fn keep_apart(&mut self, pairs: impl Iterator<Item = [String; 2]>) {
        self.apart.extend(pairs);
        self.apart.sort();
        self.apart.dedup();
    }

    /// The planner needs the link between every two machines that may be neighbours. Two whose link nobody measures though there was time for it,
    /// and both of which others reach, stay apart. Else the machine that lacks the most links is left out, again and again, until no link is
    /// missing; of two that lack as many, one that has just come. No member of the running ring is left out because of a machine that has just come,
    /// or because this operator has.
    fn without_unmeasured_links(&mut self, machines: &[Machine], members: &[RingMember]) {
        let end = |profile: &NodeProfile| {
            let name = profile.name_any();
            let mut same = machines.iter().filter(|machine| machine.name == name);
            let links = profile.status.iter().flat_map(|status| &status.links);
            End {
                to: links.map(|link| link.to.clone()).collect(),
                is_new: same.any(is_new),
                runs: members.iter().any(|member| member.name == name),
                name,
            }
        };
        let mut ends: Vec<End> = self.profiles.iter().map(end).collect();
        loop {
            let reaches_any = |one: &End| ends.iter().any(|other| one.meets(other));
            let reaches_any: Vec<bool> = ends.iter().map(reaches_any).collect();
            let stay_apart = |i: usize, j: usize| {
                let (one, other) = (&ends[i], &ends[j]);
                let settled = !one.is_new && !other.is_new;
                reaches_any[i] && reaches_any[j] && (settled || (one.runs && other.runs))
            };
            let lacking = |i: usize| -> Vec<usize> {
                let others = (0..ends.len()).filter(|&j| j != i);
                others
                    .filter(|&j| !ends[i].meets(&ends[j]) && !stay_apart(i, j))
                    .collect()
            };
            let worst = (0..ends.len())
                .map(|i| (i, lacking(i)))
                .filter(|(_, lacking)| !lacking.is_empty())
                .max_by_key(|(i, lacking)| {
                    let end = &ends[*i];
                    (!end.runs, lacking.len(), end.is_new, Reverse(*i))
                });
            let Some((worst, lacking)) = worst else {
                break;
            };
            let name = ends[worst].name.clone();
            let out_of_reach = match ends[worst].is_new {
                true => None,
                false => lacking.iter().find(|&&other| !ends[other].is_new),
            };
            let why = match out_of_reach {
                Some(_) if lacking.len() + 1 == ends.len() => never_measured("any other machine"),
                Some(&other) => never_measured(&ends[other].name),
                None => {
                    let to = &ends[lacking[0]].name;
                    let why = format!("the link between it and {to} is not measured yet");
                    self.awaited.push(format!("{name}: {why}"));
                    why
                }
            };
            self.out.push((name, why));
            self.profiles.remove(worst);
            ends.remove(worst);
        }
        for (i, one) in ends.iter().enumerate() {
            let apart = ends[i + 1..].iter().filter(|other| !one.meets(other));
            for other in apart {
                let mut pair = [&one.name, &other.name].map(String::clone);
                pair.sort();
                self.apart.push(pair);
            }
        }
    }
}

/// Why a machine is out with which no link could be measured.
fn never_measured(other: &str) -> String {
    format!(
        "no link between it and {other} could be measured, though its agent is heard of: look at its cable or Wi-Fi, at firewalls (agents measure each \
         other at port {RING_PORT}), and whether the Wi-Fi keeps its clients apart"
    )
}

/// A machine, as the end of links.
struct End {
    name: String,
    /// Machines to which it has measured its link.
    to: HashSet<String>,
    is_new: bool,
    /// Whether it is a member of the running ring.
    runs: bool,
}

impl End {
    /// Whether both have measured their link.
    fn meets(&self, other: &Self) -> bool {
        self.to.contains(&other.name) && other.to.contains(&self.name)
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
        // Does not say for how long: a status that changes by itself would be written for ever.
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
    if machine.cordoned {
        return Err(out("its Node is cordoned (kubectl uncordon)".to_owned()));
    }
    if machine.leaving {
        return Err(out("its agent was asked to end".to_owned()));
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
        return Err(out(format!("it could not follow a plan: {why}")));
    }
    // Only rank 0 needs the draft model, but any machine may have to be rank 0.
    let draft = resolved.draft.as_ref();
    let draft = draft.map(|draft| ("draft model", &draft.source, &draft.version, &draft.profile));
    let files = [(
        "model",
        &resolved.source,
        &resolved.version,
        &resolved.profile,
    )];
    for (what, source, version, file) in files.into_iter().chain(draft) {
        if let Some(why) = status.lacks(what, file) {
            return Err(out(why));
        }
        let mut weights = file.layer_weights.iter().chain(&file.output_weights);
        let runs = |format: &str| {
            let mut throughput = status.cpu.throughput.iter();
            throughput.any(|one| one.format == format)
        };
        if let Some(FormatWeights { format, .. }) = weights.find(|one| !runs(&one.format)) {
            return Err(out(format!(
                "its agent does not run {format}, a weight format of the {what}"
            )));
        }
        if let Some(path) = source.local_path() {
            has_file(agent, &path, version).map_err(out)?;
        }
    }
    Ok((profile, status))
}

fn has_file(agent: &AgentProfile, path: &str, version: &FileVersion) -> Result<(), String> {
    let Some(file) = agent.local_models.iter().find(|file| file.path == path) else {
        return Err(format!("it has no file {path}"));
    };
    if let Some(problem) = &file.problem {
        return Err(problem.clone());
    }
    match &file.version {
        Some(own) if own.header_sha256 == version.header_sha256 => Ok(()),
        _ => Err(format!(
            "its {path} is another file than the other machines'"
        )),
    }
}

/// Takes off the memory promised to other plans, whether they use it already or not. Returns how much of it is the machine's.
fn take_promised(status: &mut NodeProfileStatus, name: &str, others: &[Arc<RingPlan>]) -> i64 {
    let plans = others.iter().flat_map(|plan| &plan.spec.members);
    let mut members: Vec<&RingMember> = plans.filter(|member| member.name == name).collect();
    members.sort_by_key(|member| member.gpus.len());
    let mut taken = 0;
    for member in members {
        let memory = member.memory_bytes.unwrap_or(0);
        let on_gpus = member.gpu_memory_bytes.unwrap_or(0);
        status.take_promised(memory, on_gpus, &member.gpus);
        taken += memory;
    }
    taken
}

/// The same of what is lent to a GPU that shares the machine's memory. How much a member has there is not known: at most all that it has of that memory.
fn take_lent(status: &mut NodeProfileStatus, name: &str, others: &[Arc<RingPlan>]) {
    let members = others.iter().flat_map(|plan| &plan.spec.members);
    let on_lent = |member: &&RingMember| {
        let on_own = member.gpu_memory_bytes.unwrap_or(0) > 0;
        member.name == name && member.uses_gpu() && !on_own
    };
    for member in members.filter(on_lent) {
        for gpu in &mut status.gpus {
            gpu.take_lent(member.memory_bytes.unwrap_or(0));
        }
    }
}

fn is_new(machine: &Machine) -> bool {
    matches!(machine.agent, AgentState::Alive { known_for } if known_for < PATIENCE)
}

fn agent(profile: &NodeProfile) -> Option<&AgentProfile> {
    profile.status.as_ref()?.agent.as_ref()
}

#[cfg(test)]
mod tests {
    use std::slice;

    use prima_crds::v1alpha1::node_profile::{GpuBackend, GpuProfile};
    use prima_crds::v1alpha1::ring_plan::PlannedGpu;

    use super::*;
    use crate::model_controller::resolve::Resolution;
    use crate::model_controller::test_world::{
        GIB, add_draft, gpu, known_for, machine, model, profile, ring, world,
    };

    /// Candidates of this world, with no refusals and no running ring.
    fn candidates(world: &World) -> Candidates {
        let resolved = world.resolution.done().unwrap();
        Candidates::new(&world.model, resolved, world, &BTreeMap::new(), &[])
    }

    fn names(candidates: &Candidates) -> Vec<String> {
        candidates
            .profiles
            .iter()
            .map(ResourceExt::name_any)
            .collect()
    }

    /// Why the only machine is out, after `change`; and whether that is waited for.
    fn why(change: impl FnOnce(&mut Machine)) -> (String, bool) {
        let mut desk = machine("desk");
        change(&mut desk);
        let candidates = candidates(&world(&[desk], &[]));
        assert!(candidates.profiles.is_empty());
        assert_eq!(
            candidates.why_out("desk"),
            Some(candidates.out[0].1.as_str())
        );
        assert_eq!(candidates.why_out("pi4"), None);
        (candidates.out[0].1.clone(), !candidates.awaited.is_empty())
    }

    fn agent_of(machine: &mut Machine) -> &mut AgentProfile {
        let status = profile(machine).status.as_mut().unwrap();
        status.agent.as_mut().unwrap()
    }

    #[test]
    fn each_reason_to_be_out_is_told() {
        let told = |change: fn(&mut Machine)| why(change).0;
        assert!(told(|desk| desk.agent = AgentState::Silent).contains("not heard of"));
        assert!(told(|desk| desk.agent = AgentState::Unknown).contains("does not run"));
        assert!(
            told(|desk| agent_of(desk).local_models.clear()).contains("no file /models/m.gguf")
        );
        let problem = told(|desk| {
            agent_of(desk).local_models[0].problem = Some("cut off".to_owned());
        });
        assert_eq!(problem, "cut off");
        let another = told(|desk| {
            let version = agent_of(desk).local_models[0].version.as_mut();
            version.unwrap().header_sha256 = "1".to_owned();
        });
        assert!(another.contains("another file"), "{another}");
        let format = told(|desk| {
            let status = profile(desk).status.as_mut().unwrap();
            status.cpu.throughput.retain(|one| one.format != "Q4_K");
        });
        assert!(format.contains("does not run Q4_K"), "{format}");
        let unusable = told(|desk| {
            profile(desk)
                .status
                .as_mut()
                .unwrap()
                .memory
                .available_bytes = -1;
        });
        assert!(unusable.contains("availableBytes"), "{unusable}");
    }

    #[test]
    fn who_cannot_run_the_draft_model_is_out() {
        let mut there = world(&[machine("desk"), machine("pi4")], &[]);
        add_draft(&mut there, &["desk"]);
        let found = candidates(&there);
        assert_eq!(names(&found), ["desk"]);
        assert_eq!(found.why_out("pi4"), Some("it has no file /models/d.gguf"));
        let Resolution::Done(resolved) = &mut there.resolution else {
            panic!("not resolved");
        };
        let draft = &mut resolved.draft.as_mut().unwrap().profile;
        draft.output_weights[0].format = "Q9".to_owned();
        let found = candidates(&there);
        let why = "its agent does not run Q9, a weight format of the draft model";
        assert_eq!(found.why_out("desk"), Some(why));
    }

    #[test]
    fn an_agent_that_lacks_a_part_is_out_and_to_be_updated() {
        let mut newer = machine("laptop");
        let status = profile(&mut newer).status.as_mut().unwrap();
        status.parts = ["silu", "attention-sinks"].map(str::to_owned).to_vec();
        let mut there = world(&[machine("desk"), newer], &[]);
        let Resolution::Done(resolved) = &mut there.resolution else {
            panic!("not resolved");
        };
        resolved.profile.parts = vec!["attention-sinks".to_owned()];
        let found = candidates(&there);
        assert_eq!(names(&found), ["laptop"]);
        let why =
            "its agent (0.1.0) cannot compute attention-sinks, a part of the model: update it";
        assert_eq!(found.why_out("desk"), Some(why));
        assert!(found.awaited.is_empty());
    }

    #[test]
    fn only_what_a_new_agent_will_say_is_waited_for() {
        let silent = |desk: &mut Machine| profile(desk).status.as_mut().unwrap().agent = None;
        let (told, waits) = why(silent);
        assert!(told.contains("where it is reached") && !waits, "{told}");
        let (_, waits) = why(|desk| {
            silent(desk);
            desk.agent = known_for(179);
        });
        assert!(waits);
        let (_, waits) = why(|desk| {
            agent_of(desk).local_models.clear();
            desk.agent = known_for(1);
        });
        assert!(!waits);
    }

    #[test]
    fn a_node_selector_takes_nodes_with_all_its_labels() {
        let mut there = world(&[machine("desk"), machine("pi4")], &[]);
        let labels = [("room", "attic"), ("fast", "yes")];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
        Arc::get_mut(&mut there.model).unwrap().spec.node_selector = labels.clone().into();
        there.machines[0].labels = labels.into();
        there.machines[1].labels = [("room".to_owned(), "attic".to_owned())].into();
        let found = candidates(&there);
        assert_eq!(names(&found), ["desk"]);
        assert_eq!(
            found.why_out("pi4"),
            Some("its Node lacks the label fast=yes (spec.nodeSelector)")
        );
    }

    #[test]
    fn who_refused_is_out() {
        let there = world(&[machine("desk")], &[]);
        let refused = [("desk".to_owned(), "no disk".to_owned())].into();
        let (model, resolved) = model();
        let found = Candidates::new(&model, &resolved, &there, &refused, &[]);
        assert!(found.why_out("desk").unwrap().ends_with("no disk"));
    }

    #[test]
    fn memory_of_rings_that_can_run_is_not_promised_again() {
        let mut there = world(&[machine("desk"), machine("pi4")], &[]);
        let left = |there: &World, name: &str| {
            let found = candidates(there);
            let status = found.profile(name).unwrap().status.as_ref();
            status.unwrap().memory.available_bytes
        };
        there.others = vec![ring(&[(0, 4)], 3 * GIB, 0), ring(&[(0, 4)], 4 * GIB, 0)];
        assert_eq!(left(&there, "desk"), 5 * GIB);
        assert_eq!(left(&there, "pi4"), 12 * GIB);
        there.others.push(ring(&[(0, 8)], 30 * GIB, 0));
        assert_eq!(left(&there, "desk"), 0);
        // A plan with a machine that is not there takes nothing.
        let mut lost = RingPlan::clone(&there.others[2]);
        let mut member = lost.spec.members[0].clone();
        member.name = "laptop".to_owned();
        lost.spec.members.push(member);
        there.others[2] = Arc::new(lost);
        assert_eq!(left(&there, "desk"), 5 * GIB);
    }

    #[test]
    fn memory_of_a_gpu_is_promised_once_too() {
        let mut desk = machine("desk");
        profile(&mut desk).status.as_mut().unwrap().gpus = vec![gpu(6 * GIB)];
        let mut there = world(&[desk], &[]);
        there.others = vec![ring(&[(0, 4)], 0, GIB)];
        let found = candidates(&there);
        assert!(found.out.is_empty(), "{:?}", found.out);
        let gpus = &found.profile("desk").unwrap().status.as_ref().unwrap().gpus;
        assert_eq!(gpus[0].measured.as_ref().unwrap().available_bytes, 5 * GIB);
    }

    #[test]
    fn memory_is_promised_of_the_gpus_that_plans_name() {
        let addresses = ["0000:01:00.0", "0000:02:00.0"];
        let mut desk = machine("desk");
        let gpus = addresses.map(|address| GpuProfile {
            pci_address: Some(address.to_owned()),
            ..gpu(6 * GIB)
        });
        profile(&mut desk).status.as_mut().unwrap().gpus = gpus.to_vec();
        let on = |bytes: i64, names: &[&str]| {
            let mut plan = ring(&[(0, 4)], 0, bytes);
            let planned = names.iter().map(|name| PlannedGpu {
                name: (*name).to_owned(),
                beside_layers_bytes: 0,
            });
            Arc::make_mut(&mut plan).spec.members[0].gpus = planned.collect();
            plan
        };
        let left = |desk: &Machine, others: &[Arc<RingPlan>]| {
            let mut there = world(slice::from_ref(desk), &[]);
            there.others = others.to_vec();
            let found = candidates(&there);
            let status = found.profile("desk").unwrap().status.as_ref().unwrap();
            let gpus = status.gpus.iter().filter_map(|gpu| gpu.measured.as_ref());
            gpus.map(|gpu| gpu.available_bytes / GIB)
                .collect::<Vec<i64>>()
        };
        let [first, second] = addresses;
        let apart = [on(GIB, &[first]), on(2 * GIB, &[second])];
        assert_eq!(left(&desk, &apart), [5, 4]);
        // Of two on a GPU, one is on the other, too, as far as this one is full.
        let shared = [on(8 * GIB, &addresses), on(2 * GIB, &[first])];
        assert_eq!(left(&desk, &shared), [0, 2]);
        // How much of it is on which is not known.
        let split = |others: &[Arc<RingPlan>]| {
            let mut there = world(slice::from_ref(&desk), &[]);
            there.others = others.to_vec();
            candidates(&there).split_gpus
        };
        assert_eq!(split(&shared), ["desk"]);
        assert!(split(&apart).is_empty());
        // One that does not compute the ring's model, before the one that does.
        let other = &mut profile(&mut desk).status.as_mut().unwrap().gpus[0];
        other.measured.as_mut().unwrap().throughput[0].format = "Q8_0".to_owned();
        assert_eq!(left(&desk, &apart[1..]), [6, 4]);
    }

    #[test]
    fn memory_that_a_gpu_shares_is_promised_once_too() {
        let mut desk = machine("desk");
        let mut integrated = gpu(12 * GIB);
        integrated.backend = GpuBackend::Vulkan;
        integrated.measured.as_mut().unwrap().unified_memory = true;
        profile(&mut desk).status.as_mut().unwrap().gpus = vec![integrated];
        let mut there = world(&[desk], &[]);
        let model = there.resolution.done().unwrap().profile.clone();
        let left = |there: &World| {
            let found = candidates(there);
            let status = found.profile("desk").unwrap().status.as_ref().unwrap();
            assert!(status.gpu_for(&model).is_some());
            status.available_bytes(&model)
        };
        assert_eq!(left(&there), 12 * GIB);
        there.others = vec![ring(&[(0, 4)], 5 * GIB, 0)];
        assert_eq!(left(&there), 7 * GIB);
    }

    #[test]
    fn what_is_lent_to_a_gpu_is_lent_to_one_ring() {
        let mut desk = machine("desk");
        let mut integrated = gpu(6 * GIB);
        integrated.backend = GpuBackend::Vulkan;
        integrated.measured.as_mut().unwrap().unified_memory = true;
        profile(&mut desk).status.as_mut().unwrap().gpus = vec![integrated];
        let mut there = world(&[desk], &[]);
        let left = |there: &World| {
            let found = candidates(there);
            let status = found.profile("desk").unwrap().status.as_ref().unwrap();
            status.gpus[0].lent_bytes()
        };
        // All of it is the processor's.
        there.others = vec![ring(&[(0, 4)], 5 * GIB, 0)];
        assert_eq!(left(&there), Some(6 * GIB));
        let mut other = RingPlan::clone(&there.others[0]);
        other.spec.members[0].windows[0].gpu_layers = 4;
        there.others = vec![Arc::new(other.clone())];
        assert_eq!(left(&there), Some(GIB));
        // On a GPU with memory of its own.
        other.spec.members[0].gpu_memory_bytes = Some(GIB);
        there.others = vec![Arc::new(other)];
        assert_eq!(left(&there), Some(6 * GIB));
    }

    #[test]
    fn whoever_lacks_most_links_is_left_out() {
        let without = |machine: &mut Machine, other: &str| {
            let status = profile(machine).status.as_mut().unwrap();
            status.links.retain(|link| link.to != other);
        };
        let (mut desk, mut pi4) = (machine("desk"), machine("pi4"));
        let mut laptop = machine("laptop");
        assert_eq!(
            names(&candidates(&world(
                &[desk.clone(), pi4.clone(), laptop.clone()],
                &[]
            ))),
            ["desk", "pi4", "laptop"]
        );
        // A link counts when both ends have measured it.
        without(&mut desk, "pi4");
        without(&mut pi4, "laptop");
        let there = [desk.clone(), pi4.clone(), laptop.clone()];
        let found = candidates(&world(&there, &[]));
        assert_eq!(names(&found), ["desk", "laptop"]);
        let why = found.why_out("pi4").unwrap();
        let said = "no link between it and any other machine could be measured, though its agent is heard of: look at ";
        assert!(why.starts_with(said), "{why}");
        assert!(why.contains("9190") && why.ends_with("whether the Wi-Fi keeps its clients apart"));
        assert!(found.awaited.is_empty(), "it has been there for long");
        assert!(found.apart.is_empty(), "{:?}", found.apart);

        // If two lack the same links, one that was there before stays, and else the last one; but a member stays before all others.
        let mut new = machine("pi4");
        new.agent = known_for(1);
        let there = world(&[desk.clone(), new.clone(), laptop.clone()], &[]);
        let found = candidates(&there);
        assert_eq!(names(&found), ["desk", "laptop"]);
        let awaited = "pi4: the link between it and desk is not measured yet";
        assert_eq!(found.awaited, [awaited]);
        desk.agent = known_for(1);
        let there = world(&[desk, new, laptop.clone()], &[]);
        let found = candidates(&there);
        assert_eq!(names(&found), ["pi4", "laptop"]);
        let awaited = "desk: the link between it and pi4 is not measured yet";
        assert_eq!(found.awaited, [awaited]);
        let resolved = there.resolution.done().unwrap();
        let members = &ring(&[(0, 8)], 0, 0).spec.members;
        let found = Candidates::new(&there.model, resolved, &there, &BTreeMap::new(), members);
        assert_eq!(names(&found), ["desk", "laptop"]);

        // A machine that has just come will have its links soon.
        laptop.agent = known_for(1);
        profile(&mut laptop).status.as_mut().unwrap().links.clear();
        let found = candidates(&world(&[machine("desk"), machine("pi4"), laptop], &[]));
        assert_eq!(names(&found), ["desk", "pi4"]);
        assert_eq!(
            found.awaited,
            ["laptop: the link between it and desk is not measured yet"]
        );
    }

    #[test]
    fn two_whose_link_is_never_measured_stay_apart() {
        let mut three = ["desk", "pi4", "laptop"].map(machine);
        // The Wi-Fi keeps these two apart. One measured the link before.
        let status = profile(&mut three[2]).status.as_mut().unwrap();
        status.links.retain(|link| link.to != "pi4");
        let pair = ["laptop", "pi4"].map(str::to_owned);
        let found = candidates(&world(&three, &[]));
        assert_eq!(names(&found), ["desk", "pi4", "laptop"]);
        assert_eq!(found.apart, slice::from_ref(&pair));
        assert!(found.out.is_empty() && found.awaited.is_empty());

        // While one is new, it may yet be measured.
        for (place, stays) in [(1, "laptop"), (2, "pi4")] {
            let mut three = three.clone();
            three[place].agent = known_for(179);
            let found = candidates(&world(&three, &[]));
            assert_eq!(names(&found), ["desk", stays]);
            assert!(found.apart.is_empty());
            let new = &three[place].name;
            let awaited = format!("{new}: the link between it and {stays} is not measured yet");
            assert_eq!(found.awaited, [awaited]);
        }
        // To an operator that has just begun, all are; but members of the ring that runs stay.
        let mut new = three.clone();
        new.iter_mut().for_each(|one| one.agent = known_for(1));
        let there = world(&new, &[]);
        let resolved = there.resolution.done().unwrap();
        let among = |names: &[&str]| {
            let one = &ring(&[(0, 8)], 0, 0).spec.members[0];
            let members = names.iter().map(|name| RingMember {
                name: (*name).to_owned(),
                ..one.clone()
            });
            let members: Vec<RingMember> = members.collect();
            Candidates::new(&there.model, resolved, &there, &BTreeMap::new(), &members)
        };
        let found = among(&["laptop", "desk", "pi4"]);
        assert_eq!(names(&found), ["desk", "pi4", "laptop"]);
        assert_eq!(found.apart, [pair]);
        let found = among(&["desk", "pi4"]);
        assert_eq!(names(&found), ["desk", "pi4"]);

        // Of two, nobody else reaches either.
        let found = candidates(&world(&three[1..], &[]));
        assert_eq!(names(&found), ["laptop"]);
        assert!(found.apart.is_empty() && found.awaited.is_empty());
    }
}
