//! Third step: decides whether the running ring is still right, and if not, which ring should replace it. Pure: it is given the world, what
//! it remembers and the time, and returns a decision and what to remember. Planning is done elsewhere (by prima-halda, through `planner`):
//! if a decision needs a plan that is not known yet, the decision is to ask for it.
//!
//! A working ring is only replaced by one that is predicted to be a fifth faster, and not within ten minutes of the last change; a ring
//! that cannot work any more is replaced at once. If only its agents' addresses changed, as in an upgrade, each machine keeps its layers:
//! what it has fetched and holds in memory stays useful, and nothing is planned.

mod going_on;
mod keys;
mod memory;
mod ports;
mod question;
mod refusals;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::ResourceExt;
use prima_crds::v1alpha1::model::{Model, NodeShare, ResolvedModel};
use prima_crds::v1alpha1::model_profile::ModelProfileSpec;
use prima_crds::v1alpha1::model_source::ModelSource;
use prima_crds::v1alpha1::ring_plan::{
    DEFAULT_CONCURRENT_REQUESTS, FileVersion, PlannedDraft, PlannedModel, RingMember, RingPlan,
    RingPlanSpec, Speed,
};
use prima_halda::Plan;

use super::api_keys::KnownApiKeys;
use super::candidates::Candidates;
use super::conditions::member_status;
use super::dereference::World;
use super::quota;
use crate::plan;
use going_on::{Broken, going_on};
pub use keys::in_the_clear;
pub use question::{Answer, Question};
use refusals::Refusals;

/// What is remembered of one Model from one decision to the next.
#[derive(Clone, Default)]
pub struct State {
    /// What the planner said last.
    pub answer: Option<Answer>,
    /// The newest generation for which the old ring had to end first, and why there is a new one.
    pub ended_first: Option<(i64, String)>,
    refusals: Refusals,
    /// The generation of the ring that runs, and when this operator saw it first: its own clock may be years away from the API server's.
    seen: Option<(i64, Instant)>,
    /// What rank 0 of that ring measured last, where tokens come back to the same experts. While the ring stands still, it does not say.
    measured: Option<(i64, Speed)>,
}

impl State {
    /// How long the ring that runs has been known. Takes in what it measured.
    fn see(&mut self, current: &RingPlan, now: Instant) -> Duration {
        let generation = current.spec.generation;
        let since = match self.seen {
            Some((seen, since)) if seen == generation => since,
            _ => now,
        };
        self.seen = Some((generation, since));
        let rank0 = current.spec.members.first();
        let rank0 = rank0.and_then(|rank0| member_status(current, rank0));
        let measured = rank0
            .filter(|rank0| rank0.expert_miss_percent.is_some())
            .and_then(|rank0| rank0.measured);
        let before = self.measured.filter(|(of, _)| *of == generation);
        self.measured = measured.map(|speed| (generation, speed)).or(before);
        now.duration_since(since)
    }
}

/// What should be.
pub struct Decision {
    pub kind: DecisionKind,
    /// Machines that are not in the ring, and why.
    pub out: Vec<NodeShare>,
    /// What is waited for, in words; empty if nothing.
    pub awaited: Vec<String>,
    /// A ring fails, for a while.
    pub fails: bool,
}

pub enum DecisionKind {
    /// No ring may run: machines are released.
    Released {
        reason: &'static str,
        message: String,
    },
    /// No ring can be planned, now or at all.
    Impossible {
        reason: &'static str,
        message: String,
    },
    /// This plan goes on.
    Keep(Arc<RingPlan>),
    /// The decision depends on the best plan: ask the planner, then decide again. Until then, the running ring goes on.
    Ask(Box<Question>),
    /// A new plan. If it does not fit beside the running ring, that ring must end first.
    New {
        spec: Box<RingPlanSpec>,
        retire_first: bool,
        why: String,
    },
}

impl Decision {
    fn new(kind: DecisionKind) -> Self {
        Self {
            kind,
            out: Vec::new(),
            awaited: Vec::new(),
            fails: false,
        }
    }

    /// Whether to decide again soon, though nothing may have happened.
    pub fn awaits(&self) -> bool {
        self.fails || !self.awaited.is_empty()
    }
}

/// A new plan's predicted time per token must be at most this share of the old plan's, in percent.
const WORTH_PERCENT: i64 = 80;
const SETTLE: Duration = Duration::from_secs(600);

/// `now`: by the monotonic clock.
pub fn decide(world: &World, state: &State, now: Instant) -> (Decision, State) {
    let mut state = state.clone();
    let decision = match wanted(world) {
        Ok(resolved) => with_machines(world, resolved, &mut state, now),
        Err(kind) => Decision::new(kind),
    };
    (decision, state)
}

/// The file of a ring that should run; else what becomes of the Model.
fn wanted(world: &World) -> Result<&ResolvedModel, DecisionKind> {
    if world.model.spec.suspend {
        return Err(DecisionKind::Released {
            reason: "Suspended",
            message: "spec.suspend is true; set it to false to load the model again".to_owned(),
        });
    }
    if let KnownApiKeys::Missing(message) = &world.api_keys {
        return Err(DecisionKind::Released {
            reason: "NoApiKey",
            message: message.clone(),
        });
    }
    match world.resolution.done() {
        Some(resolved) => Ok(resolved),
        // A running ring does not end because its source cannot be seen; an edited source is another model.
        None => Err(match world.current() {
            Some(plan) if same_file(plan, &world.model) => DecisionKind::Keep(plan.clone()),
            _ => DecisionKind::Impossible {
                reason: "NotResolved",
                message: "the model file is not known yet".to_owned(),
            },
        }),
    }
}

fn with_machines(
    world: &World,
    resolved: &ResolvedModel,
    state: &mut State,
    now: Instant,
) -> Decision {
    let current = world.current();
    let known_for = current.map_or(Duration::ZERO, |plan| state.see(plan, now));
    let refused = state.refusals.note(current, &world.machines, now);
    let members = current.map_or(&[][..], |plan| &plan.spec.members);
    let candidates = Candidates::new(&world.model, resolved, world, &refused, members);
    let case = Case {
        world,
        resolved,
        candidates: &candidates,
        skeleton: skeleton(&world.model, resolved),
    };
    let kind = match current {
        // Their agents end, and are most often followed by others.
        Some(current) if candidates.profiles.is_empty() && candidates.all_leave(current) => {
            DecisionKind::Keep(current.clone())
        }
        _ if candidates.profiles.is_empty() => DecisionKind::Impossible {
            reason: "NoMachines",
            message: no_machines(&candidates),
        },
        // A first plan can wait for a machine that is being measured; a broken ring cannot.
        None if !candidates.awaited.is_empty() => DecisionKind::Impossible {
            reason: "AwaitingMachines",
            message: format!("waiting for {}", candidates.awaited.join("; ")),
        },
        None => case.first_ring(state),
        Some(current) => {
            match going_on(current, &world.model, resolved, &case.skeleton, &candidates) {
                Ok(()) => case.faster_ring(current, state, known_for),
                Err(broken) => case.ring_instead_of(current, &broken, state),
            }
        }
    };
    Decision {
        out: out_of_ring(&kind, world, &candidates, state),
        kind,
        awaited: candidates.awaited,
        fails: state.refusals.wait(now),
    }
}

/// A Model that should have a ring, and could.
struct Case<'a> {
    world: &'a World,
    resolved: &'a ResolvedModel,
    candidates: &'a Candidates,
    /// The part of the plan that follows from the Model alone.
    skeleton: RingPlanSpec,
}

/// Who runs which layers, before anybody's address is known.
struct PlannedWindows {
    rounds: i32,
    members: Vec<RingMember>,
    predicted: Option<Speed>,
}

impl PlannedWindows {
    fn planned(plan: &Plan) -> Self {
        Self {
            rounds: plan.rounds as i32,
            members: plan::members(plan, |_| String::new()),
            predicted: Some(plan::speed(&plan.report)),
        }
    }

    fn kept(plan: &RingPlan) -> Self {
        Self {
            rounds: plan.spec.rounds,
            members: plan.spec.members.clone(),
            predicted: plan.spec.predicted,
        }
    }
}

impl Case<'_> {
    fn first_ring(&self, state: &State) -> DecisionKind {
        let spec = self
            .best(state, false)
            .and_then(|windows| self.spec(windows));
        match spec {
            Ok(spec) => DecisionKind::New {
                spec: Box::new(spec),
                retire_first: false,
                why: "the first plan".to_owned(),
            },
            Err(kind) => kind,
        }
    }

    /// Whether another ring is so much faster that it replaces the working one.
    fn faster_ring(
        &self,
        current: &Arc<RingPlan>,
        state: &State,
        known_for: Duration,
    ) -> DecisionKind {
        let kept = DecisionKind::Keep(current.clone());
        let windows = match self.best(state, false) {
            Ok(windows) => windows,
            Err(ask @ DecisionKind::Ask(_)) => return ask,
            Err(_) => return kept,
        };
        let (Some(new), Some(old)) = (windows.predicted, current.spec.predicted) else {
            return kept;
        };
        // A ring whose tokens come back to the same experts is faster than it was planned before that was known. The new prediction knows it.
        let planned = old.token_microseconds;
        let old = state.measured.map_or(planned, |(_, measured)| {
            measured.token_microseconds.min(planned)
        });
        let new = new.token_microseconds;
        let faster = new * 100 < old * WORTH_PERCENT;
        if !faster || known_for <= SETTLE {
            return kept;
        }
        match self.spec(windows) {
            // A working ring does not end early to make room for a faster one.
            Ok(spec) if self.fits_beside(&spec) => DecisionKind::New {
                spec: Box::new(spec),
                retire_first: false,
                why: format!("a token would take {new} instead of {old} microseconds"),
            },
            _ => kept,
        }
    }

    /// Another ring at once, even if the old one has to end first; but not where a member only leaves, and may come back.
    fn ring_instead_of(
        &self,
        current: &Arc<RingPlan>,
        broken: &Broken,
        state: &mut State,
    ) -> DecisionKind {
        let only_leaves = matches!(broken, Broken::Leaving(_));
        // The next agent is soon there with all its layers. To fetch them elsewhere would take longer.
        if only_leaves && self.resolved.source.local_path().is_none() {
            return DecisionKind::Keep(current.clone());
        }
        let windows = match broken {
            Broken::Moved(_) => Ok(PlannedWindows::kept(current)),
            Broken::Changed(_) | Broken::Leaving(_) => self.best(state, true),
        };
        let spec = match windows.and_then(|windows| self.spec(windows)) {
            Ok(spec) => spec,
            Err(ask @ DecisionKind::Ask(_)) => return ask,
            // The agent that ends is soon followed by another, most often.
            Err(_) if only_leaves => return DecisionKind::Keep(current.clone()),
            Err(kind) => return kind,
        };
        let why = broken.why().to_owned();
        let retire_first = !self.fits_beside(&spec);
        if retire_first && only_leaves {
            return DecisionKind::Keep(current.clone());
        }
        if retire_first {
            state.ended_first = Some((spec.generation, why.clone()));
        }
        DecisionKind::New {
            spec: Box::new(spec),
            retire_first,
            why,
        }
    }

    /// The best ring now; else why there is none, or what the planner is to be asked.
    fn best(&self, state: &State, urgent: bool) -> Result<PlannedWindows, DecisionKind> {
        let does_not_fit = |message| DecisionKind::Impossible {
            reason: "DoesNotFit",
            message,
        };
        if let Some(name) = &self.world.model.spec.rank0
            && self.candidates.profile(name).is_none()
        {
            let why = self.candidates.why_out(name);
            let why = why.unwrap_or("there is no NodeProfile of that name");
            return Err(does_not_fit(format!("spec.rank0 is {name}, but {why}")));
        }
        let context_length = self.skeleton.context_length;
        let question = Question::new(
            &self.world.model,
            self.resolved,
            self.candidates,
            context_length,
            urgent,
        );
        match &state.answer {
            Some(answer) if answer.fingerprint == question.fingerprint => match &answer.plan {
                Ok(plan) => Ok(PlannedWindows::planned(plan)),
                Err(message) => Err(does_not_fit(message.clone())),
            },
            _ => Err(DecisionKind::Ask(Box::new(question))),
        }
    }

    /// The next plan, with ports that no other has, if its namespace may take that much.
    fn spec(&self, windows: PlannedWindows) -> Result<RingPlanSpec, DecisionKind> {
        let PlannedWindows {
            rounds,
            mut members,
            predicted,
        } = windows;
        let Some(slot) = ports::free_slot(self.world) else {
            return Err(DecisionKind::Impossible {
                reason: "NoPorts",
                message: ports::none_left(),
            });
        };
        let keys = keys::of_members(&members, self.candidates);
        for (member, key) in members.iter_mut().zip(keys) {
            let host = self.candidates.address(&member.name).unwrap_or_default();
            member.address = ports::ring_address(host, slot);
            member.public_key_sha256 = key;
        }
        let status = self.world.model.status.as_ref();
        let written = status.and_then(|status| status.plan_generation);
        let known = self.world.current().map(|plan| plan.spec.generation);
        let generation = written.max(known).unwrap_or(0);
        let spec = RingPlanSpec {
            generation: generation + 1,
            rounds,
            members,
            predicted,
            http_port: Some(ports::http(slot)),
            ..self.skeleton.clone()
        };
        let world = self.world;
        let namespace = world.model.namespace().unwrap_or_default();
        match quota::refusal(&world.quotas, &namespace, &spec, &world.others) {
            None => Ok(spec),
            Some(message) => Err(DecisionKind::Impossible {
                reason: "OverQuota",
                message,
            }),
        }
    }

    fn fits_beside(&self, spec: &RingPlanSpec) -> bool {
        memory::fits_beside(
            spec,
            &self.world.plans,
            self.candidates,
            &self.resolved.profile,
        )
    }
}

/// The part of a plan that follows from the Model alone.
pub(super) fn skeleton(model: &Model, resolved: &ResolvedModel) -> RingPlanSpec {
    let (version, profile) = (&resolved.version, &resolved.profile);
    let planned = planned_model(model.name_any(), &resolved.source, version, profile);
    let wishes = &model.spec;
    let default_context = plan::default_context(profile) as i32;
    let context_length = wishes.context_length.unwrap_or(default_context);
    let concurrent = wishes.max_concurrent_requests;
    let kv_contexts = concurrent.unwrap_or(1);
    let draft = resolved.draft.as_ref().map(|draft| {
        let (source, profile) = (&draft.source, &draft.profile);
        let name = format!("{}-draft", model.name_any());
        PlannedDraft {
            model: planned_model(name, source, &draft.version, profile),
            memory_bytes: profile.whole_bytes(i64::from(context_length) * i64::from(kv_contexts)),
        }
    });
    RingPlanSpec {
        max_concurrent_requests: concurrent.unwrap_or(DEFAULT_CONCURRENT_REQUESTS),
        kv_contexts,
        activation_dtype: wishes.activation_dtype,
        draft,
        kv_dtype: wishes.kv_dtype,
        api_key_required: wishes.api_key_secret_ref.is_some(),
        ..RingPlanSpec::new(planned, context_length, Vec::new())
    }
}

fn planned_model(
    name: String,
    source: &ModelSource,
    version: &FileVersion,
    profile: &ModelProfileSpec,
) -> PlannedModel {
    let local = source.local_path();
    let fetched = local.is_none().then(|| source.clone());
    let file = local.unwrap_or_else(|| source.file_name().to_owned());
    PlannedModel {
        source: fetched,
        version: Some(version.clone()),
        ..PlannedModel::new(name, file, profile.size_bytes, profile.layers)
    }
}

fn same_file(plan: &RingPlan, model: &Model) -> bool {
    let planned = &plan.spec.model;
    let source = &model.spec.source;
    match source.local_path() {
        Some(path) => planned.source.is_none() && planned.file == path,
        None => planned.source.as_ref() == Some(source),
    }
}

fn no_machines(candidates: &Candidates) -> String {
    match candidates.out.as_slice() {
        [] => "no agent has been heard of; is the DaemonSet of agents running (kubectl get pods -A -l app.kubernetes.io/component=agent)?".to_owned(),
        out => {
            let out: Vec<_> = out.iter().map(|(name, why)| format!("{name}: {why}")).collect();
            format!("no machine can take part: {}", out.join("; "))
        }
    }
}

/// Machines that are neither in the running ring nor in the next, and why.
fn out_of_ring(
    kind: &DecisionKind,
    world: &World,
    candidates: &Candidates,
    state: &State,
) -> Vec<NodeShare> {
    let current = world.current().map(|plan| &plan.spec.members[..]);
    let (members, runs) = match kind {
        DecisionKind::Keep(plan) => (&plan.spec.members[..], true),
        DecisionKind::Ask(_) => (current.unwrap_or_default(), current.is_some()),
        DecisionKind::New { spec, .. } => (&spec.members[..], false),
        DecisionKind::Released { .. } | DecisionKind::Impossible { .. } => (&[][..], false),
    };
    let answer = state.answer.as_ref();
    let planned = answer.and_then(|answer| answer.plan.as_ref().ok());
    let idle = candidates.profiles.iter().map(|profile| {
        let name = profile.name_any();
        let left_out = planned
            .and_then(|plan| plan.report.left_out.iter().find(|out| out.name == name))
            .map(|out| out.why.clone());
        let why = left_out.unwrap_or_else(|| {
            match runs {
                true => {
                    "a ring with it would not be so much faster that it is worth an interruption"
                }
                false => "it could take part",
            }
            .to_owned()
        });
        (name, why)
    });
    candidates
        .out
        .iter()
        .cloned()
        .chain(idle)
        .filter(|(name, _)| members.iter().all(|member| member.name != *name))
        .map(|(name, why)| NodeShare {
            name,
            in_ring: false,
            why,
            fetched_bytes: None,
            total_bytes: None,
        })
        .collect()
}
