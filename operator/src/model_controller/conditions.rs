//! What became of a Model, in conditions. Pure but for the time of what changed.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use prima_crds::v1alpha1::model_profile::ModelProfileSpec;
use prima_crds::v1alpha1::model_source::ModelSource;
use prima_crds::v1alpha1::ring_plan::{MemberState, MemberStatus, RingMember, RingPlan};

use super::apply::Ring;
use super::decide::{self, Decision, Kind};
use super::dereference::World;
use super::resolve::{Resolution, shown};

/// All of them, for what was decided and the ring that there is.
pub fn of(
    world: &World,
    decision: &Decision,
    ring: &Ring,
    decided: &decide::State,
) -> Vec<Condition> {
    let model = &*world.model;
    let before = model.status.as_ref();
    let mut conditions = Conditions {
        before: before.map_or(&[], |status| &status.conditions),
        generation: model.metadata.generation,
        made: Vec::new(),
    };
    conditions.resolved(world);
    conditions.profiled(decision);
    conditions.planned(decision, ring, decided);
    match ring.newest.as_deref() {
        Some(plan) => {
            let members = Members::of(plan);
            conditions.loaded(&members);
            conditions.ready(decision, ring, &members);
            conditions.degraded(decision, ring, &members);
        }
        None => conditions.without_a_ring(world, decision),
    }
    conditions.made
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

    /// What members say that have not come as far as this.
    fn before(&self, least: MemberState) -> Vec<String> {
        let states = self.states.iter();
        states
            .filter(|(_, status)| status.is_none_or(|status| status.state < least))
            .map(|(member, status)| said(member, *status))
            .collect()
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
                    let (bytes, layers) = (profile.size_bytes, profile.layers);
                    format!("{}: {bytes} bytes, {layers} layers", shown(source))
                };
                let mut message = said(&resolved.source, &resolved.profile);
                if let Some(draft) = &resolved.draft {
                    let draft = said(&draft.source, &draft.profile);
                    message = format!("{message}; draft model {draft}");
                }
                self.add("Resolved", true, "Resolved", message);
            }
            Resolution::Awaited(message) => {
                self.add("Resolved", false, "Resolving", message.clone());
            }
            Resolution::Failed(message) => {
                self.add("Resolved", false, "ResolveFailed", message.clone());
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

    fn planned(&mut self, decision: &Decision, ring: &Ring, decided: &decide::State) {
        if let Kind::Released { reason, message } | Kind::Impossible { reason, message } =
            &decision.kind
        {
            return self.add("Planned", false, reason, message.clone());
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
            _ => self.add("Planned", true, "Planned", line(plan)),
        }
    }

    fn without_a_ring(&mut self, world: &World, decision: &Decision) {
        let released = matches!(decision.kind, Kind::Released { .. });
        // If the source cannot be read, that is the real reason.
        let (reason, message) = match (&world.resolution, &decision.kind) {
            (Resolution::Failed(message), _) => ("ResolveFailed", message.clone()),
            (Resolution::Awaited(message), _) if !released => ("Resolving", message.clone()),
            (_, Kind::Released { reason, message } | Kind::Impossible { reason, message }) => {
                (*reason, message.clone())
            }
            _ => ("Planning", "no plan yet".to_owned()),
        };
        for kind in ["Downloaded", "Loaded", "Ready"] {
            self.add(kind, false, reason, message.clone());
        }
        self.add("Degraded", false, "NoRing", "there is no ring".to_owned());
    }

    /// Downloaded, and Loaded.
    fn loaded(&mut self, members: &Members<'_>) {
        for (least, kind, reason, message) in [
            (
                MemberState::Loading,
                "Downloaded",
                "Downloading",
                "every machine has its part of the file",
            ),
            (
                MemberState::Loaded,
                "Loaded",
                "Loading",
                "every machine runs its layers",
            ),
        ] {
            match members.before(least).as_slice() {
                [] => self.add(kind, true, kind, message.to_owned()),
                lacking => self.add(kind, false, reason, lacking.join("; ")),
            }
        }
    }

    fn ready(&mut self, decision: &Decision, ring: &Ring, members: &Members<'_>) {
        if let Some(serving) = &ring.serving {
            let message = format!("answers on {}", line(serving));
            return self.add("Ready", true, "Ready", message);
        }
        let (out, lacking) = (members.out(decision), members.before(MemberState::Loaded));
        let message = match (out.as_slice(), lacking.as_slice()) {
            ([], []) => members.rank0_says(),
            ([], lacking) => lacking.join("; "),
            (out, _) => out.join("; "),
        };
        self.add("Ready", false, "NotReady", message);
    }

    fn degraded(&mut self, decision: &Decision, ring: &Ring, members: &Members<'_>) {
        if let Kind::Impossible { message, .. } = &decision.kind {
            return self.add("Degraded", true, "CannotReplan", message.clone());
        }
        let newest = members.plan.spec.generation;
        let serving = ring.serving.as_ref().map(|plan| plan.spec.generation);
        if let Some(serving) = serving.filter(|serving| *serving != newest) {
            let message =
                format!("generation {serving} serves until generation {newest} has loaded");
            return self.add("Degraded", true, "Replacing", message);
        }
        match members.failed().as_slice() {
            [] => {
                let message = "the ring is as planned".to_owned();
                self.add("Degraded", false, "AsPlanned", message);
            }
            failed => self.add("Degraded", true, "MemberFailed", failed.join("; ")),
        }
    }

    fn add(&mut self, kind: &str, is: bool, reason: &str, message: String) {
        let status = if is { "True" } else { "False" };
        let before = self.before.iter().find(|condition| condition.type_ == kind);
        let since = before
            .filter(|before| before.status == status)
            .map(|before| before.last_transition_time.clone());
        self.made.push(Condition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            // As much as the API server takes.
            message: message.chars().take(8000).collect(),
            last_transition_time: since.unwrap_or_else(now),
            observed_generation: self.generation,
        });
    }
}

/// To the second, as the API server keeps it.
fn now() -> Time {
    let seconds = Timestamp::now().as_second();
    Time(Timestamp::from_second(seconds).unwrap_or_default())
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
            let percent = done.saturating_mul(100) / total.max(1);
            format!("{name}: fetching, {done} of {total} bytes ({percent} %)")
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use prima_crds::v1alpha1::model::NodeShare;
    use serde_json::{Value, json};

    use super::*;
    use crate::model_controller::test_world::{GIB, add_draft, ring, world};

    /// A plan of this generation for `desk` and `pi4`, and what these say of it.
    fn plan(generation: i64, states: &[Value]) -> Arc<RingPlan> {
        let mut plan = RingPlan::clone(&ring(&[(0, 2), (5, 6)], GIB, 0));
        plan.spec.generation = generation;
        let mut other = plan.spec.members[0].clone();
        other.name = "pi4".to_owned();
        other.windows.remove(1);
        plan.spec.members.push(other);
        let named = states.iter().zip(["desk", "pi4"]).map(|(state, name)| {
            let mut state = state.clone();
            state["name"] = name.into();
            state
        });
        let status = json!({"members": named.collect::<Vec<_>>()});
        plan.status = Some(serde_json::from_value(status).unwrap());
        Arc::new(plan)
    }

    fn state(name: &str) -> Value {
        json!({"state": name, "message": "so it is"})
    }

    fn keep(plan: &Arc<RingPlan>) -> Kind {
        Kind::Keep(plan.clone())
    }

    fn decision(kind: Kind) -> Decision {
        Decision {
            kind,
            out: Vec::new(),
            awaited: Vec::new(),
        }
    }

    /// Each condition as `Kind=Status Reason: message`.
    fn told(world: &World, decision: &Decision, ring: &Ring) -> Vec<String> {
        let made = of(world, decision, ring, &decide::State::default());
        let line = |one: &Condition| {
            format!(
                "{}={} {}: {}",
                one.type_, one.status, one.reason, one.message
            )
        };
        made.iter().map(line).collect()
    }

    /// With all that a ring of this plan has to say.
    fn of_plan(plan: &Arc<RingPlan>, serves: bool) -> Vec<String> {
        let ring = Ring {
            newest: Some(plan.clone()),
            serving: serves.then(|| plan.clone()),
        };
        told(&world(&[], &[]), &decision(keep(plan)), &ring)
    }

    const NO_RING: Ring = Ring {
        newest: None,
        serving: None,
    };

    #[test]
    fn a_ring_that_answers_is_all_well() {
        let plan = plan(3, &[state("Ready"), state("Loaded")]);
        assert_eq!(
            of_plan(&plan, true),
            [
                "Resolved=True Resolved: /models/m.gguf: 8589934592 bytes, 8 layers",
                "Profiled=True Profiled: all machines are measured",
                "Planned=True Planned: desk [0, 2) [5, 6) -> pi4 [0, 2)",
                "Downloaded=True Downloaded: every machine has its part of the file",
                "Loaded=True Loaded: every machine runs its layers",
                "Ready=True Ready: answers on desk [0, 2) [5, 6) -> pi4 [0, 2)",
                "Degraded=False AsPlanned: the ring is as planned",
            ]
        );
    }

    #[test]
    fn a_draft_model_is_resolved_too() {
        let mut world = world(&[], &[]);
        add_draft(&mut world, &[]);
        let all = told(&world, &decision(keep(&plan(1, &[]))), &NO_RING);
        let draft = "; draft model /models/d.gguf: 1073741824 bytes, 2 layers";
        assert!(all[0].ends_with(draft), "{}", all[0]);
    }

    #[test]
    fn members_on_their_way_say_how_far_they_are() {
        let fetching =
            json!({"state": "Fetching", "message": "", "fetchedBytes": 30, "totalBytes": 120});
        let all = of_plan(&plan(1, &[fetching]), false);
        let lacking =
            "desk: fetching, 30 of 120 bytes (25 %); pi4: its agent has not taken up the plan yet";
        assert_eq!(
            all[3..],
            [
                format!("Downloaded=False Downloading: {lacking}"),
                format!("Loaded=False Loading: {lacking}"),
                format!("Ready=False NotReady: {lacking}"),
                "Degraded=False AsPlanned: the ring is as planned".to_owned(),
            ]
        );
        let all = of_plan(&plan(1, &[state("Loading"), state("Loaded")]), false);
        assert_eq!(
            all[3..6],
            [
                "Downloaded=True Downloaded: every machine has its part of the file",
                "Loaded=False Loading: desk: loading: so it is",
                "Ready=False NotReady: desk: loading: so it is",
            ]
        );
    }

    #[test]
    fn where_all_are_there_rank_0_says_what_is_waited_for() {
        let all = of_plan(&plan(1, &[state("Loaded"), state("Loaded")]), false);
        assert_eq!(all[5], "Ready=False NotReady: desk: loaded: so it is");
    }

    #[test]
    fn a_member_that_failed_degrades_the_ring() {
        let failed = json!({"state": "Failed", "message": "no room", "retryAfterSeconds": 8});
        let all = of_plan(&plan(1, &[state("Ready"), failed]), true);
        let said = "pi4: failed: no room (tried again in 8 s)";
        assert_eq!(all[6], format!("Degraded=True MemberFailed: {said}"));
        assert!(all[5].starts_with("Ready=True"), "{}", all[5]);
    }

    #[test]
    fn a_machine_that_is_out_is_why_a_ring_is_not_ready() {
        let plan = plan(1, &[state("Loaded"), state("Loaded")]);
        let out = |name: &str| NodeShare {
            name: name.to_owned(),
            in_ring: false,
            why: "lost".to_owned(),
            fetched_bytes: None,
            total_bytes: None,
        };
        let decision = Decision {
            out: vec![out("pi4"), out("no-member")],
            ..decision(keep(&plan))
        };
        let ring = Ring {
            newest: Some(plan),
            serving: None,
        };
        let all = told(&world(&[], &[]), &decision, &ring);
        assert_eq!(all[5], "Ready=False NotReady: pi4: lost");
    }

    #[test]
    fn the_old_ring_serves_until_the_new_one_has_loaded() {
        let (old, new) = (plan(1, &[state("Ready")]), plan(2, &[]));
        let ring = Ring {
            newest: Some(new.clone()),
            serving: Some(old),
        };
        let all = told(&world(&[], &[]), &decision(keep(&new)), &ring);
        assert!(all[5].starts_with("Ready=True"), "{}", all[5]);
        let said = "generation 1 serves until generation 2 has loaded";
        assert_eq!(all[6], format!("Degraded=True Replacing: {said}"));
    }

    #[test]
    fn an_old_ring_that_ended_first_is_said_until_the_new_answers() {
        let plan = plan(4, &[]);
        let mut decided = decide::State::default();
        decided.ended_first = Some((4, "a machine is lost".to_owned()));
        let reason = |serves: bool| {
            let ring = Ring {
                newest: Some(plan.clone()),
                serving: serves.then(|| plan.clone()),
            };
            of(&world(&[], &[]), &decision(keep(&plan)), &ring, &decided)[2]
                .reason
                .clone()
        };
        assert_eq!(reason(false), "OldRingEndedFirst");
        assert_eq!(reason(true), "Planned");
    }

    #[test]
    fn without_a_ring_every_condition_says_why() {
        let impossible = || {
            decision(Kind::Impossible {
                reason: "DoesNotFit",
                message: "2 GiB short".to_owned(),
            })
        };
        let mut unresolved = world(&[], &[]);
        for (resolution, reason, message) in [
            (
                Resolution::Failed("no such file".to_owned()),
                "ResolveFailed",
                "no such file",
            ),
            (
                Resolution::Awaited("asking".to_owned()),
                "Resolving",
                "asking",
            ),
        ] {
            unresolved.resolution = resolution;
            let all = told(&unresolved, &impossible(), &NO_RING);
            assert_eq!(all[0], format!("Resolved=False {reason}: {message}"));
            assert_eq!(all[5], format!("Ready=False {reason}: {message}"));
        }
        let resolved = world(&[], &[]);
        let all = told(&resolved, &impossible(), &NO_RING);
        assert_eq!(all[2], "Planned=False DoesNotFit: 2 GiB short");
        assert_eq!(all[5], "Ready=False DoesNotFit: 2 GiB short");
        assert_eq!(all[6], "Degraded=False NoRing: there is no ring");
        // A Model that is suspended needs no file.
        let suspended = decision(Kind::Released {
            reason: "Suspended",
            message: "as the Model asks".to_owned(),
        });
        unresolved.resolution = Resolution::Awaited("asking".to_owned());
        let all = told(&unresolved, &suspended, &NO_RING);
        assert_eq!(all[5], "Ready=False Suspended: as the Model asks");
    }

    #[test]
    fn a_ring_that_cannot_be_planned_again_is_degraded() {
        let plan = plan(1, &[state("Ready"), state("Loaded")]);
        let impossible = decision(Kind::Impossible {
            reason: "NoMachines",
            message: "none is left".to_owned(),
        });
        let ring = Ring {
            newest: Some(plan.clone()),
            serving: Some(plan),
        };
        let all = told(&world(&[], &[]), &impossible, &ring);
        assert_eq!(all[6], "Degraded=True CannotReplan: none is left");
    }

    #[test]
    fn machines_that_are_waited_for_are_named() {
        let waiting = Decision {
            awaited: vec!["desk is measured".to_owned(), "so is pi4".to_owned()],
            ..decision(keep(&plan(1, &[])))
        };
        let all = told(&world(&[], &[]), &waiting, &NO_RING);
        let said = "desk is measured; so is pi4";
        assert_eq!(all[1], format!("Profiled=False AwaitingMachines: {said}"));
    }

    #[test]
    fn a_condition_keeps_its_time_while_its_status_stays() {
        let mut world = world(&[], &[]);
        let long_ago = Time(Timestamp::from_second(1000).unwrap());
        let before = |kind: &str, status: &str| Condition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: "Before".to_owned(),
            message: String::new(),
            last_transition_time: long_ago.clone(),
            observed_generation: None,
        };
        let model = Arc::get_mut(&mut world.model).unwrap();
        model.status = Some(prima_crds::v1alpha1::model::ModelStatus {
            conditions: vec![before("Resolved", "True"), before("Profiled", "False")],
            ..Default::default()
        });
        let decision = decision(keep(&plan(1, &[])));
        let made = of(&world, &decision, &NO_RING, &decide::State::default());
        assert_eq!(made[0].last_transition_time, long_ago);
        assert_ne!(made[1].last_transition_time, long_ago);
    }

    #[test]
    fn a_message_is_as_long_as_the_api_server_takes() {
        let mut world = world(&[], &[]);
        world.resolution = Resolution::Failed("é".repeat(9000));
        let decision = decision(keep(&plan(1, &[])));
        let made = of(&world, &decision, &NO_RING, &decide::State::default());
        assert_eq!(made[0].message.chars().count(), 8000);
    }
}
