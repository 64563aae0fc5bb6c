//! What became of a Model, in conditions. Pure but for the time of what changed.

#[cfg(test)]
mod tests;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;
use prima_crds::quantity::rounded;
use prima_crds::v1alpha1::model::{Model, ModelStatus};
use prima_crds::v1alpha1::model_profile::ModelProfileSpec;
use prima_crds::v1alpha1::model_source::ModelSource;
use prima_crds::v1alpha1::ring_plan::{MemberState, MemberStatus, RingMember, RingPlan};

use super::apply::Ring;
use super::decide::{self, Apart, Decision, DecisionKind, MACHINES_APART};
use super::dereference::World;
use super::reached::NotReady;
use super::resolve::{RESOLVE_FAILED, RESOLVED, Resolution, shown};
use crate::condition::{ConditionUpdate, condition, find};

const READY: &str = "Ready";
/// Reasons for which a Model is not [`READY`].
const NOT_REACHED: &str = "NotReached";
const MACHINE_OUT: &str = "MachineOut";

/// All of them, for what was decided and the ring that there is. `said`: what was written last.
pub fn of(
    world: &World,
    decision: &Decision,
    ring: &Ring,
    decided: &decide::State,
    said: &[Condition],
) -> Vec<Condition> {
    let model = &*world.model;
    let shown = model.status.as_ref();
    let shown = shown.map_or(&[][..], |status| &status.conditions);
    let before = latest(shown, said);
    let mut conditions = Conditions {
        before: &before,
        generation: model.metadata.generation,
        made: Vec::new(),
    };
    conditions.resolved(world);
    conditions.profiled(decision);
    conditions.planned(world, decision, ring, decided);
    match ring.newest.as_deref() {
        Some(plan) => {
            let members = Members::of(plan);
            conditions.loaded(&members);
            conditions.ready(world, decision, ring, &members);
            conditions.degraded(world, decision, ring, &members);
        }
        None => conditions.without_a_ring(world, decision),
    }
    conditions.made
}

/// Each as it was last. A watch that lags behind shows it as it was before: of what has changed since, each look would say another time, and so would
/// each look at that, once the watch shows it.
fn latest(shown: &[Condition], said: &[Condition]) -> Vec<Condition> {
    let is_newer = |said: &&Condition| {
        let shown = find(shown, &said.type_);
        shown.is_none_or(|shown| shown.last_transition_time.0 <= said.last_transition_time.0)
    };
    let newer: Vec<&Condition> = said.iter().filter(is_newer).collect();
    let is_latest = |shown: &&Condition| newer.iter().all(|said| said.type_ != shown.type_);
    let others = shown.iter().filter(is_latest);
    others.chain(newer.iter().copied()).cloned().collect()
}

/// What there is to say of a Model that says that it is ready, where only this is known: its ring does not answer.
pub struct Withdrawn {
    pub conditions: Vec<Condition>,
    pub summary: Option<String>,
}

impl Withdrawn {
    /// `plan`: the ring's, if it has not ended. `gone`: machines of the ring. `None`: the Model does not say that it is ready.
    pub fn of(
        model: &Model,
        plan: Option<&RingPlan>,
        gone: &[&str],
        unready: Option<&NotReady>,
    ) -> Option<Self> {
        let mut conditions = model.status.as_ref()?.conditions.clone();
        let ready = conditions.iter_mut().find(|one| one.type_ == READY);
        let ready = ready.filter(|ready| ready.status == "True")?;
        let (reason, message) = match (plan, gone) {
            (None, _) => ("Planning", "its ring has ended".to_owned()),
            (Some(plan), []) => Members::of(plan).why_not_ready(unready),
            (Some(_), gone) => {
                let gone = gone.join(", ");
                let message = format!("gone, or reached elsewhere now: {gone}");
                (MACHINE_OUT, message)
            }
        };
        let said = ConditionUpdate {
            kind: READY,
            is: Some(false),
            reason,
            message,
        };
        *ready = condition(&[], ready.observed_generation, said);
        Some(Self {
            summary: summary(&conditions, plan),
            conditions,
        })
    }

    /// That the Model is not ready, and why.
    pub fn ready(&self) -> Option<&Condition> {
        find(&self.conditions, READY)
    }
}

/// Whether this says that the Model is not ready.
pub fn is_not_ready(status: &ModelStatus) -> bool {
    find(&status.conditions, READY).is_some_and(|ready| ready.status == "False")
}

/// Since when it says what it says of whether the Model is ready.
pub fn ready_since(status: &ModelStatus) -> Option<Timestamp> {
    Some(find(&status.conditions, READY)?.last_transition_time.0)
}

/// Whether a Model says that its ring is not reached, or lacks a machine. Members may say otherwise.
pub fn found_silent(model: &Model) -> bool {
    let status = model.status.as_ref();
    let ready = status.and_then(|status| find(&status.conditions, READY));
    ready.is_some_and(|ready| {
        ready.status == "False" && [NOT_REACHED, MACHINE_OUT].contains(&&*ready.reason)
    })
}

/// A plan's members, and what each says of itself.
struct Members<'a> {
    plan: &'a RingPlan,
    states: Vec<(&'a RingMember, Option<&'a MemberStatus>)>,
}

impl<'a> Members<'a> {
    fn of(plan: &'a RingPlan) -> Self {
        let members = plan.spec.members.iter();
        Self {
            plan,
            states: members
                .map(|member| (member, member_status(plan, member)))
                .collect(),
        }
    }

    /// If some members have not come as far as this: a reason, the worst of theirs, and what they say.
    fn before(&self, least: MemberState) -> Option<(&'static str, String)> {
        let lack = |(_, status): &&(&RingMember, Option<&MemberStatus>)| {
            status.is_none_or(|status| status.state < least)
        };
        let lacking: Vec<_> = self.states.iter().filter(lack).collect();
        let states = || {
            lacking
                .iter()
                .filter_map(|(_, status)| Some(status.as_ref()?.state))
        };
        let reason = match states().min() {
            _ if lacking.is_empty() => return None,
            Some(MemberState::Refused | MemberState::Failed) => "MemberFailed",
            Some(MemberState::Fetching) => "Downloading",
            Some(_) => "Loading",
            None => "AgentsStart",
        };
        let said: Vec<String> = lacking
            .iter()
            .map(|(member, status)| said(member, *status))
            .collect();
        Some((reason, said.join("; ")))
    }

    /// What members say that have failed or refused.
    fn failed(&self) -> Vec<String> {
        let failed = |status: &MemberStatus| status.state <= MemberState::Failed;
        let states = self.states.iter();
        states
            .filter(|(_, status)| status.is_some_and(failed))
            .map(|(member, status)| said(member, *status))
            .collect()
    }

    /// A reason, and who says what; where no machine is out.
    fn why_not_ready(&self, unready: Option<&NotReady>) -> (&'static str, String) {
        let rank0 = match unready {
            Some(NotReady::NotReached(why)) => {
                return (NOT_REACHED, format!("rank 0 does not answer: {why}"));
            }
            // Sooner than its agent.
            Some(NotReady::Said(why)) => format!("rank 0 says: {why}"),
            None => self.rank0_says(),
        };
        let before = self.before(MemberState::Loaded);
        before.unwrap_or(("Connecting", rank0))
    }

    /// Rank 0 knows what the ring waits for.
    fn rank0_says(&self) -> String {
        let rank0 = self.states.first();
        rank0.map_or_else(String::new, |(rank0, status)| said(rank0, *status))
    }

    /// Those that cannot take part any more, and why.
    fn out(&self, decision: &Decision) -> Vec<String> {
        let is_member = |name: &str| self.states.iter().any(|(member, _)| member.name == name);
        let out = decision.out.iter().filter(|out| is_member(&out.name));
        out.map(|out| format!("{}: {}", out.name, out.why))
            .collect()
    }

    /// Why the ring is not whole though all have loaded, where two neighbours do not reach each other.
    fn apart(&self, decision: &Decision) -> Vec<String> {
        let members = &self.plan.spec.members;
        let have_loaded = self.before(MemberState::Loaded).is_none();
        let pairs = decision.apart.iter().filter(|_| have_loaded);
        pairs
            .filter(|apart| apart.are_neighbours(members))
            .map(Apart::told)
            .collect()
    }
}

struct Conditions<'a> {
    before: &'a [Condition],
    generation: Option<i64>,
    made: Vec<Condition>,
}

impl Conditions<'_> {
    fn resolved(&mut self, world: &World) {
        match &world.resolution {
            Resolution::Done(resolved) => {
                let said = |source: &ModelSource, profile: &ModelProfileSpec| {
                    let size = rounded(profile.size_bytes.unsigned_abs());
                    format!("{}: {size}, {} layers", shown(source), profile.layers)
                };
                let mut message = said(&resolved.source, &resolved.profile);
                if let Some(draft) = &resolved.draft {
                    let draft = said(&draft.source, &draft.profile);
                    message = format!("{message}; draft model {draft}");
                }
                self.add(RESOLVED, true, "Resolved", message);
            }
            Resolution::Awaited(message) => {
                self.add_status(RESOLVED, None, "Resolving", message.clone());
            }
            Resolution::Failed(message) => {
                self.add(RESOLVED, false, RESOLVE_FAILED, message.clone());
            }
        }
    }

    fn profiled(&mut self, decision: &Decision) {
        match decision.awaited.as_slice() {
            [] => {
                let message = "all machines are measured".to_owned();
                self.add("Profiled", true, "Profiled", message);
            }
            awaited => self.add("Profiled", false, "AwaitingMachines", awaited.join("; ")),
        }
    }

    fn planned(
        &mut self,
        world: &World,
        decision: &Decision,
        ring: &Ring,
        decided: &decide::State,
    ) {
        if let Some((reason, message)) = decision.kind.why_not() {
            let message = with_apart((reason, message), decision);
            return self.add("Planned", false, reason, message);
        }
        let Some(plan) = ring.newest.as_deref() else {
            return self.add("Planned", false, "Planning", "no plan yet".to_owned());
        };
        match &decided.ended_first {
            // Said until the new ring answers.
            Some((generation, why))
                if *generation == plan.spec.generation && ring.serving.is_none() =>
            {
                let message = format!(
                    "{}; the machines lack the memory for two rings, so the old one ended first ({why})",
                    line(plan)
                );
                self.add("Planned", true, "OldRingEndedFirst", message);
            }
            _ => {
                let clear = decide::in_the_clear(plan, &world.machines);
                let message = format!("{}{clear}", explained(plan, world));
                self.add("Planned", true, "Planned", message);
            }
        }
    }

    fn without_a_ring(&mut self, world: &World, decision: &Decision) {
        let released = matches!(decision.kind, DecisionKind::Released { .. });
        // If the source cannot be read, that is the real reason.
        let (reason, message) = match (&world.resolution, decision.kind.why_not()) {
            (Resolution::Failed(message), _) => (RESOLVE_FAILED, message.clone()),
            (Resolution::Awaited(message), _) if !released => ("Resolving", message.clone()),
            (_, Some((reason, message))) => (reason, message.to_owned()),
            _ => ("Planning", "no plan yet".to_owned()),
        };
        for kind in ["Downloaded", "Loaded", READY] {
            self.add(kind, false, reason, message.clone());
        }
        self.add("Degraded", false, "NoRing", "there is no ring".to_owned());
    }

    /// Downloaded, and Loaded.
    fn loaded(&mut self, members: &Members<'_>) {
        for (least, kind, message) in [
            (
                MemberState::Loading,
                "Downloaded",
                "every machine has its part of the file",
            ),
            (
                MemberState::Loaded,
                "Loaded",
                "every machine runs its layers",
            ),
        ] {
            match members.before(least) {
                None => self.add(kind, true, kind, message.to_owned()),
                Some((reason, lacking)) => self.add(kind, false, reason, lacking),
            }
        }
    }

    fn ready(&mut self, world: &World, decision: &Decision, ring: &Ring, members: &Members<'_>) {
        if let Some(serving) = &ring.serving {
            let message = format!("answers on {}", line(serving));
            return self.add(READY, true, "Ready", message);
        }
        let unready = world.unready(members.plan);
        let apart = match unready {
            Some(NotReady::NotReached(_)) => Vec::new(),
            _ => members.apart(decision),
        };
        let (reason, message) = match (&decision.kind, members.out(decision).as_slice()) {
            // Clients are sent away before it ends, and only then is the next plan written.
            (DecisionKind::New { spec, why, .. }, _)
                if spec.generation != members.plan.spec.generation =>
            {
                let message = format!(
                    "generation {} ends, since the machines lack the memory for two rings ({why})",
                    members.plan.spec.generation
                );
                ("Planning", message)
            }
            // Also where no other ring can be planned, so that all machines are out of one.
            _ if !apart.is_empty() => (MACHINES_APART, apart.join("; ")),
            (_, []) => members.why_not_ready(unready),
            (_, out) => (MACHINE_OUT, out.join("; ")),
        };
        self.add(READY, false, reason, message);
    }

    fn degraded(&mut self, world: &World, decision: &Decision, ring: &Ring, members: &Members<'_>) {
        if let Some(why) = decision.kind.why_not() {
            let message = with_apart(why, decision);
            return self.add("Degraded", true, "CannotReplan", message);
        }
        // Of two that never met, only status.nodes tells: a Wi-Fi may keep them apart for good, and every ring goes round them.
        let apart = decision.apart.iter().filter(|apart| apart.told_by_ring);
        let apart: Vec<&Apart> = apart.collect();
        let newest = members.plan.spec.generation;
        let serving = ring.serving.as_ref().map(|plan| plan.spec.generation);
        let replaced = serving.filter(|serving| *serving != newest && apart.is_empty());
        if let Some(serving) = replaced {
            let until = match world.unready(members.plan) {
                Some(_) => "answers again",
                None => "has loaded",
            };
            let message = format!("generation {serving} serves until generation {newest} {until}");
            return self.add("Degraded", true, "Replacing", message);
        }
        match members.failed().as_slice() {
            // Also while a ring goes round them: this has to be mended by hand.
            [] if !apart.is_empty() => {
                self.add("Degraded", true, MACHINES_APART, all_told(&apart));
            }
            [] if world.is_lossy(members.plan) => {
                let rank0 = members.plan.spec.members.first();
                let rank0 = rank0.map_or("rank 0", |rank0| rank0.name.as_str());
                let message = format!(
                    "packets get lost between the operator and {rank0}: look at its cable or Wi-Fi"
                );
                self.add("Degraded", true, "PacketsLost", message);
            }
            [] => {
                let message = "the ring is as planned".to_owned();
                self.add("Degraded", false, "AsPlanned", message);
            }
            failed => self.add("Degraded", true, "MemberFailed", failed.join("; ")),
        }
    }

    fn add(&mut self, kind: &str, is: bool, reason: &str, message: String) {
        self.add_status(kind, Some(is), reason, message);
    }

    /// `None`: it is not known yet.
    fn add_status(&mut self, kind: &str, is: Option<bool>, reason: &str, message: String) {
        let said = ConditionUpdate {
            kind,
            is,
            reason,
            message,
        };
        self.made
            .push(condition(self.before, self.generation, said));
    }
}

/// Why there is no plan, and which machines do not reach each other. Of two that never met only where that is why: else a ring would go round them.
fn with_apart((reason, message): (&str, &str), decision: &Decision) -> String {
    let is_told = |apart: &&Apart| apart.told_by_ring || reason == MACHINES_APART;
    let apart: Vec<&Apart> = decision.apart.iter().filter(is_told).collect();
    match apart.is_empty() {
        true => message.to_owned(),
        false => format!("{message}; {}", all_told(&apart)),
    }
}

/// Pairs of machines that are named. Where a Wi-Fi keeps many apart, all pairs of them are too many to read.
const TOLD_PAIRS: usize = 4;

fn all_told(apart: &[&Apart]) -> String {
    let told = apart.iter().take(TOLD_PAIRS).map(|apart| apart.told());
    let told = told.collect::<Vec<String>>().join("; ");
    match apart.len().saturating_sub(TOLD_PAIRS) {
        0 => told,
        more => format!("{told}; and {more} more pairs"),
    }
}

/// What a member says of its part of a plan.
pub fn member_status<'a>(plan: &'a RingPlan, member: &RingMember) -> Option<&'a MemberStatus> {
    let status = plan.status.as_ref()?;
    status.members.iter().find(|one| one.name == member.name)
}

/// What a member says of itself, for people.
fn said(member: &RingMember, status: Option<&MemberStatus>) -> String {
    let name = &member.name;
    let Some(status) = status else {
        return format!("{name}: its agent has not taken up the plan yet");
    };
    let state = format!("{:?}", status.state).to_lowercase();
    match (status.fetched_bytes, status.total_bytes) {
        (Some(done), Some(total)) if status.state == MemberState::Fetching => {
            let (done, total) = (done.unsigned_abs(), total.unsigned_abs());
            let percent = percent(done, total);
            let (done, total) = (rounded(done), rounded(total));
            format!("{name}: fetching, {done} of {total} ({percent} %)")
        }
        _ => {
            let message = match status.message.is_empty() {
                true => String::new(),
                false => format!(": {}", status.message),
            };
            let retry = status
                .retry_after_seconds
                .map_or_else(String::new, |seconds| {
                    format!(" (tried again in {seconds} s)")
                });
            format!("{name}: {state}{message}{retry}")
        }
    }
}

/// What people see of a Model at a glance: that it answers, or why not, and how far its files are fetched.
pub fn summary(conditions: &[Condition], plan: Option<&RingPlan>) -> Option<String> {
    let ready = find(conditions, READY)?;
    let degraded = find(conditions, "Degraded").filter(|degraded| degraded.status == "True");
    Some(match (ready.status.as_str(), degraded) {
        ("True", Some(degraded)) => format!("{}, {}", ready.reason, degraded.reason),
        ("True", None) => ready.reason.clone(),
        _ if ready.reason == "Downloading" => {
            let members = plan.and_then(|plan| Some(&plan.status.as_ref()?.members));
            let parts = members.into_iter().flatten();
            let (done, total) = parts
                .filter_map(|part| Some((part.fetched_bytes?, part.total_bytes?)))
                .fold((0_u64, 0_u64), |sum, (done, total)| {
                    (sum.0 + done.unsigned_abs(), sum.1 + total.unsigned_abs())
                });
            format!("{} {} %", ready.reason, percent(done, total))
        }
        _ => ready.reason.clone(),
    })
}

fn percent(done: u64, total: u64) -> u64 {
    done.saturating_mul(100) / total.max(1)
}

/// The ring in a line. Somebody who has several machines may wonder at a ring of one.
fn explained(plan: &RingPlan, world: &World) -> String {
    let line = line(plan);
    match plan.spec.members.len() {
        1 if world.machines.len() > 1 && world.model.spec.min_nodes.is_none() => format!(
            "{line}; one machine is enough, and every further one would cost time on the network (status.nodes says how much); spec.minNodes asks for more"
        ),
        _ => line,
    }
}

/// `pi4 [0, 6) -> desk [6, 30)`, with several rounds `pi4 [0, 3) [15, 18) -> ...`.
pub fn line(plan: &RingPlan) -> String {
    let members = plan.spec.members.iter().map(|member| {
        let windows: Vec<String> = member
            .windows
            .iter()
            .map(|window| format!("[{}, {})", window.first, window.last))
            .collect();
        format!("{} {}", member.name, windows.join(" "))
    });
    members.collect::<Vec<_>>().join(" -> ")
}
