//! Third step: decides whether the running ring is still right, and if not, which ring should replace it. Pure: it is given the world, what
//! it remembers and the time, and returns a decision and what to remember. Planning is done elsewhere (by prima-halda, through `planner`):
//! if a decision needs a plan that is not known yet, the decision is to ask for it.
//!
//! A working ring is only replaced by one that is predicted to be a fifth faster, and not within ten minutes of the last change; a ring
//! that cannot work any more is replaced at once. If only its agents' addresses changed, as in an upgrade, each machine keeps its layers:
//! what it has fetched and holds in memory stays useful, and nothing is planned.
//!
//! A ring that is needed, and for which there is no room, takes that of rings of lower priority (`priority`).

mod apart;
mod going_on;
mod keys;
mod left_out;
mod memory;
mod ports;
mod priority;
mod question;
mod refusals;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::ResourceExt;
use prima_crds::v1alpha1::model::{Model, NodeShare, ResolvedModel};
use prima_crds::v1alpha1::model_profile::ModelProfileSpec;
use prima_crds::v1alpha1::model_source::ModelSource;
use prima_crds::v1alpha1::ring_plan::{
    FileVersion, PlannedDraft, PlannedModel, RingMember, RingPlan, RingPlanSpec, Speed,
};
use prima_halda::Plan;

use super::api_keys::KnownApiKeys;
use super::apply;
use super::candidates::Candidates;
use super::conditions::member_status;
use super::dereference::World;
use super::quota;
use super::resolve::Resolution;
use super::standing::Standing;
use crate::plan;
pub use apart::{Apart, MACHINES_APART};
use apart::{are_neighbours, have_tried};
use going_on::{Broken, going_on};
pub use keys::in_the_clear;
use left_out::{NO_ROOM, NOT_WORTH_IT, OTHERS_FIRST, TOO_SOON, no_machines, out_of_ring};
use priority::DISPLACED;
pub use priority::is_said_to_be_displaced;
use question::DOES_NOT_FIT;
pub use question::{Answer, NoRing, Question, plan_depends_on};
use refusals::Refusals;

/// What is remembered of one Model from one decision to the next.
#[derive(Clone, Default)]
pub struct State {
    /// What the planner said lately, the newest last: who has to end for a Model takes several questions.
    answers: Vec<Answer>,
    /// The newest generation for which the old ring had to end first, and why there is a new one.
    pub ended_first: Option<(i64, String)>,
    refusals: Refusals,
    /// Its ring ended for a Model of higher priority, and there is none since.
    displaced: bool,
    /// The generation of the ring that runs, and when this operator saw it first: its own clock may be years away from the API server's.
    seen: Option<(i64, Instant)>,
    /// Why that ring went on without the machines that the best one has, when this was decided last. While the planner is asked, it is not known anew.
    kept: Option<(i64, String)>,
    /// What rank 0 of that ring measured last, where tokens come back to the same experts. While the ring stands still, it does not say.
    measured: Option<(i64, Speed)>,
}

/// Answers that are kept: more than it takes to find one plan.
const ANSWERS: usize = 16;

impl State {
    /// Takes in what the planner says.
    pub fn learn(&mut self, answer: Answer) {
        self.answers
            .retain(|known| known.fingerprint != answer.fingerprint);
        self.answers.push(answer);
        self.keep_answers(ANSWERS);
    }

    /// Forgets all answers but this many, the newest.
    fn keep_answers(&mut self, count: usize) {
        let too_many = self.answers.len().saturating_sub(count);
        self.answers.drain(..too_many);
    }

    fn answer_to(&self, fingerprint: &str) -> Option<&Answer> {
        let mut answers = self.answers.iter();
        answers.find(|answer| answer.fingerprint == fingerprint)
    }

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
    /// Machines that do not reach each other.
    pub apart: Vec<Apart>,
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
    /// There is no place for a ring among the rings of other Models, or not yet.
    NoPlace {
        reason: &'static str,
        message: String,
        awaits: AwaitedRoom,
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

impl DecisionKind {
    /// Reason and message, where no ring is to run, or none can follow one that is broken.
    pub fn why_not(&self) -> Option<(&'static str, &str)> {
        match self {
            Self::Released { reason, message }
            | Self::Impossible { reason, message }
            | Self::NoPlace {
                reason, message, ..
            } => Some((*reason, message.as_str())),
            Self::Keep(_) | Self::Ask(_) | Self::New { .. } => None,
        }
    }
}

/// The room that a Model waits for.
pub enum AwaitedRoom {
    /// Any that there may be some time.
    Any,
    /// What rings of these Models have, which are to end for it; and the plan that it will then get.
    Of {
        models: Vec<Arc<Model>>,
        ring: Box<RingPlanSpec>,
    },
    /// What this Model leaves, which is planned first.
    LeftBy(Arc<Model>),
}

impl Decision {
    fn new(kind: DecisionKind) -> Self {
        Self {
            kind,
            out: Vec::new(),
            apart: Vec::new(),
            awaited: Vec::new(),
            fails: false,
        }
    }

    /// Whether to decide again soon, though nothing may have happened.
    pub fn awaits(&self) -> bool {
        let others = matches!(
            self.kind,
            DecisionKind::NoPlace {
                awaits: AwaitedRoom::Of { .. } | AwaitedRoom::LeftBy(_),
                ..
            }
        );
        self.fails || !self.awaited.is_empty() || others
    }

    /// Models whose rings are to end for this one's.
    pub fn displaces(&self) -> &[Arc<Model>] {
        match &self.kind {
            DecisionKind::NoPlace {
                awaits: AwaitedRoom::Of { models, .. },
                ..
            } => models,
            _ => &[],
        }
    }

    /// How the Model stands for room now.
    pub fn standing(&self, world: &World) -> Standing {
        match &self.kind {
            DecisionKind::NoPlace { awaits, .. } => match awaits {
                AwaitedRoom::Any => Standing::Waits(world.room()),
                AwaitedRoom::Of { models, ring } => Standing::Displaces {
                    models: models.iter().filter_map(|model| model.uid()).collect(),
                    machines: ring
                        .members
                        .iter()
                        .map(|member| member.name.clone())
                        .collect(),
                },
                AwaitedRoom::LeftBy(_) => Standing::Undecided,
            },
            DecisionKind::Ask(question) if question.needed => Standing::Undecided,
            // Its file is looked at, or machines are measured that it could use.
            DecisionKind::Impossible { .. }
                if matches!(world.resolution, Resolution::Awaited(_))
                    || !self.awaited.is_empty() =>
            {
                Standing::Undecided
            }
            _ => Standing::NoClaim,
        }
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
    state.displaced = match &decision.kind {
        DecisionKind::Released { reason, .. } | DecisionKind::NoPlace { reason, .. } => {
            *reason == DISPLACED
        }
        DecisionKind::New { .. } | DecisionKind::Keep(_) => false,
        DecisionKind::Impossible { .. } | DecisionKind::Ask(_) => state.displaced,
    };
    // What has to wait until an old ring has ended is decided again then.
    if matches!(
        decision.kind,
        DecisionKind::New {
            retire_first: false,
            ..
        } | DecisionKind::Keep(_)
    ) {
        // What others' end would be good for is no question any more.
        state.keep_answers(1);
    }
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
    if let Some(displaced) = priority::displaced(world) {
        return Err(displaced);
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
    // Or was, before this operator began.
    state.displaced |= current.is_none() && priority::is_said_to_be_displaced(&world.model);
    let known_for = current.map_or(Duration::ZERO, |plan| state.see(plan, now));
    let refused = state.refusals.note(current, &world.machines, now);
    let mut apart = state.refusals.apart(now);
    let mut found = among(world, resolved, state, &refused, &apart, known_for);
    // A ring that has loaded goes on when they reach each other. Where there is none that could, another one is tried: nothing else would show it.
    let shows = |plan: &Arc<RingPlan>| {
        let mut pairs = apart.iter();
        let has_both = pairs.any(|apart| apart.are_neighbours(&plan.spec.members));
        has_both && apply::may_answer(plan, &world.machines)
    };
    let goes_round_nobody = |kind: &DecisionKind| {
        let reason = kind.why_not().map(|(reason, _)| reason);
        reason == Some(MACHINES_APART)
    };
    if goes_round_nobody(&found.kind) && !current.is_some_and(shows) {
        state.refusals.forget_apart();
        apart.clear();
        found = among(world, resolved, state, &refused, &apart, known_for);
    }
    let Found {
        kind,
        candidates,
        fingerprint,
    } = found;
    let known: Vec<[String; 2]> = apart.iter().map(|apart| apart.pair.clone()).collect();
    // What is said of machines that can take no part anyway is no help, nor that others are planned where there are none.
    apart.retain(|apart| {
        let mut pair = apart.pair.iter();
        pair.all(|name| candidates.profile(name).is_some())
    });
    // Neighbours in the ring that runs have met, whatever became of what was measured; if they do not any more, rank 0 says so.
    let members = current.map_or(&[][..], |plan| &plan.spec.members);
    let mut never_met = candidates.apart.clone();
    never_met.retain(|pair| !known.contains(pair) && !are_neighbours(pair, members));
    // It is said as a fact, and owners of machines are to look after it.
    never_met.retain(|pair| have_tried(pair, &world.machines));
    apart.extend(never_met.into_iter().map(Apart::never_measured));
    let none = goes_round_nobody(&kind);
    apart.iter_mut().for_each(|apart| apart.planned &= !none);
    let kind = match current {
        None if state.displaced => priority::as_displaced(kind, world, &candidates),
        _ => kind,
    };
    let answer = state.answer_to(&fingerprint).or(state.answers.last());
    let generation = current.map(|plan| plan.spec.generation);
    let kept = match &state.kept {
        Some((of, why)) if Some(*of) == generation => why.as_str(),
        _ => NOT_WORTH_IT,
    };
    Decision {
        out: out_of_ring(&kind, kept, world, &candidates, &apart, answer),
        kind,
        apart,
        awaited: candidates.awaited,
        fails: state.refusals.wait(now),
    }
}

/// What becomes of a Model that should have a ring.
struct Found {
    kind: DecisionKind,
    candidates: Candidates,
    /// Of the question for the best ring of all candidates.
    fingerprint: String,
}

/// With what is known of machines: those that `refused`, and those that are `apart`.
fn among(
    world: &World,
    resolved: &ResolvedModel,
    state: &mut State,
    refused: &BTreeMap<String, String>,
    apart: &[Apart],
    known_for: Duration,
) -> Found {
    let current = world.current();
    let members = current.map_or(&[][..], |plan| &plan.spec.members);
    let kept_apart = apart.iter().filter(|apart| apart.planned);
    let mut candidates = Candidates::new(&world.model, resolved, world, refused, members);
    candidates.keep_apart(kept_apart.map(|apart| apart.pair.clone()));
    let fingerprint = question::fingerprint(&world.model, resolved, &candidates);
    let case = Case {
        world,
        resolved,
        refused,
        candidates: &candidates,
        fingerprint: &fingerprint,
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
        Some(current) => match going_on(
            current,
            &world.model,
            resolved,
            &case.skeleton,
            &candidates,
            apart,
        ) {
            Ok(()) => match case.faster_ring(current, state, known_for) {
                Ok(kind) => kind,
                Err(why) => {
                    state.kept = Some((current.spec.generation, why));
                    DecisionKind::Keep(current.clone())
                }
            },
            Err(broken) => case.ring_instead_of(current, &broken, state),
        },
    };
    Found {
        kind,
        candidates,
        fingerprint,
    }
}

/// A Model that should have a ring, and could.
struct Case<'a> {
    world: &'a World,
    resolved: &'a ResolvedModel,
    /// Machines that could not follow a plan, and why.
    refused: &'a BTreeMap<String, String>,
    candidates: &'a Candidates,
    /// Of the question for the best ring of all candidates.
    fingerprint: &'a str,
    /// The part of the plan that follows from the Model alone.
    skeleton: RingPlanSpec,
}

/// Who runs which layers, before anybody's address is known.
struct PlannedWindows {
    rounds: i32,
    /// For which the members' memory was planned, as for the next.
    windowed_sequences: i32,
    chunk_positions: i32,
    members: Vec<RingMember>,
    predicted: Option<Speed>,
}

impl PlannedWindows {
    fn planned(plan: &Plan) -> Self {
        Self {
            rounds: plan.rounds as i32,
            windowed_sequences: plan.windowed_sequences as i32,
            chunk_positions: plan.report.chunk_positions as i32,
            members: plan::members(plan, |_| String::new()),
            predicted: Some(plan::speed(&plan.report)),
        }
    }

    fn kept(plan: &RingPlan) -> Self {
        Self {
            rounds: plan.spec.rounds,
            windowed_sequences: plan.spec.windowed_sequences,
            chunk_positions: plan.spec.chunk_positions,
            members: plan.spec.members.clone(),
            predicted: plan.spec.predicted,
        }
    }

    /// Whether weights are read from disk for every token.
    fn streams(&self) -> bool {
        let mut members = self.members.iter();
        members.any(memory::streams)
    }

    fn token_microseconds(&self) -> i64 {
        self.predicted.map_or(0, |speed| speed.token_microseconds)
    }
}

impl Case<'_> {
    fn first_ring(&self, state: &State) -> DecisionKind {
        match self.next_plan(state, false) {
            Ok(spec) => DecisionKind::New {
                spec: Box::new(spec),
                retire_first: false,
                why: "the first plan".to_owned(),
            },
            Err(kind) => kind,
        }
    }

    /// Another ring that is so much faster that it replaces the working one, or what the planner is to be asked; else why the working one goes on
    /// without the machines that it does not have.
    fn faster_ring(
        &self,
        current: &RingPlan,
        state: &State,
        known_for: Duration,
    ) -> Result<DecisionKind, String> {
        let windows = match self.best(state, false) {
            Ok(windows) => windows,
            Err(ask @ DecisionKind::Ask(_)) => return Ok(ask),
            Err(_) => return Err(NOT_WORTH_IT.to_owned()),
        };
        let (Some(new), Some(old)) = (windows.predicted, current.spec.predicted) else {
            return Err(NOT_WORTH_IT.to_owned());
        };
        // A ring whose tokens come back to the same experts is faster than it was planned before that was known. The new prediction knows it.
        let planned = old.token_microseconds;
        let old = state.measured.map_or(planned, |(_, measured)| {
            measured.token_microseconds.min(planned)
        });
        let new = new.token_microseconds;
        if !is_much_faster(new, old) {
            return Err(NOT_WORTH_IT.to_owned());
        }
        if known_for <= SETTLE {
            return Err(TOO_SOON.to_owned());
        }
        // Nor does it take the room that is meant for another Model.
        if priority::comes_first(self.world, &windows.members, false).is_some() {
            return Err(OTHERS_FIRST.to_owned());
        }
        let spec = match self.spec(windows, &self.world.others) {
            Ok(spec) => spec,
            Err(kind) => return Err(left_out::refused(&kind)),
        };
        // A working ring does not end early to make room for a faster one.
        if !self.fits_beside(&spec) {
            return Err(NO_ROOM.to_owned());
        }
        Ok(DecisionKind::New {
            spec: Box::new(spec),
            retire_first: false,
            why: format!("a token would take {new} instead of {old} microseconds"),
        })
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
        let others = &self.world.others;
        let spec = match broken {
            Broken::Moved(_) => self.spec(PlannedWindows::kept(current), others),
            Broken::Leaving(_) => self
                .best(state, true)
                .and_then(|windows| self.spec(windows, others))
                .and_then(|ring| self.in_turn(ring, true)),
            Broken::WithoutGpu { .. } | Broken::Changed(_) => self.next_plan(state, true),
        };
        let mut spec = match spec {
            Ok(spec) => spec,
            Err(ask @ DecisionKind::Ask(_)) => return ask,
            // The agent that ends is soon followed by another, most often.
            Err(_) if only_leaves => return DecisionKind::Keep(current.clone()),
            Err(kind) => return kind,
        };
        let why = broken.why();
        if let Broken::WithoutGpu { machine, lacks } = broken {
            // Said for as long as this ring is there, and the GPU may be back before.
            let mut members = spec.members.iter_mut();
            if let Some(member) = members.find(|member| member.name == *machine) {
                let planned = member.why.as_deref().unwrap_or("it has layers");
                member.why = Some(format!(
                    "{planned}; its GPU could not be used when this was planned: {lacks}"
                ));
            }
        }
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

    /// The plan of a ring that is needed; else which room it waits for, why there is none, or what the planner is to be asked. `urgent`: a
    /// ring is broken.
    fn next_plan(&self, state: &State, urgent: bool) -> Result<RingPlanSpec, DecisionKind> {
        let world = self.world;
        let beside = match self.best(state, urgent) {
            Err(kind) if !matches!(kind, DecisionKind::NoPlace { .. }) => return Err(kind),
            beside => beside,
        };
        let in_place = self.in_place_of_others(beside.as_ref().ok(), state, urgent)?;
        let (ring, ending) = match in_place {
            Some(found) => found,
            None => (self.spec(beside?, &world.others)?, Vec::new()),
        };
        let ring = self.in_turn(ring, urgent)?;
        match ending.is_empty() {
            true => Ok(ring),
            false => Err(priority::awaits_end_of(world, &ending, ring)),
        }
    }

    /// This plan, unless a Model of higher priority is planned first.
    fn in_turn(&self, ring: RingPlanSpec, urgent: bool) -> Result<RingPlanSpec, DecisionKind> {
        match priority::comes_first(self.world, &ring.members, urgent) {
            None => Ok(ring),
            Some(first) => Err(priority::awaits_plan_of(self.world, first)),
        }
    }

    /// The best ring; else why there is none, or what the planner is to be asked.
    fn best(&self, state: &State, urgent: bool) -> Result<PlannedWindows, DecisionKind> {
        self.best_of(self.candidates, self.fingerprint, state, urgent)
    }

    /// The best ring of these machines. `fingerprint`: of the question for it.
    fn best_of(
        &self,
        candidates: &Candidates,
        fingerprint: &str,
        state: &State,
        urgent: bool,
    ) -> Result<PlannedWindows, DecisionKind> {
        let world = self.world;
        if let Some(message) = quota::priority_refusal(&world.quotas, world.model.spec.priority) {
            return Err(over_quota(message));
        }
        let none = |reason, message| DecisionKind::NoPlace {
            reason,
            message,
            awaits: AwaitedRoom::Any,
        };
        if let Some(name) = &world.model.spec.rank0
            && candidates.profile(name).is_none()
        {
            let why = candidates.why_out(name);
            let why = why.unwrap_or("there is no NodeProfile of that name");
            let message = format!("spec.rank0 is {name}, but {why}");
            return Err(none(DOES_NOT_FIT, message));
        }
        match state.answer_to(fingerprint) {
            Some(answer) => match &answer.plan {
                Ok(plan) => Ok(PlannedWindows::planned(plan)),
                Err(NoRing { reason, message }) => Err(none(*reason, message.clone())),
            },
            None => {
                let answers =
                    |plan: &Arc<RingPlan>| apply::answers(plan, &world.machines, &world.unready);
                Err(DecisionKind::Ask(Box::new(Question::new(
                    fingerprint,
                    &world.model,
                    self.resolved,
                    candidates,
                    self.skeleton.context_length,
                    urgent || world.current().is_none(),
                    // Who edits a Model whose ring answers takes no turn before rings that do not.
                    urgent && !world.plans.iter().any(answers),
                ))))
            }
        }
    }

    /// The next plan, with ports that no other has, if its namespace may take that much beside these plans of other Models.
    fn spec(
        &self,
        windows: PlannedWindows,
        others: &[Arc<RingPlan>],
    ) -> Result<RingPlanSpec, DecisionKind> {
        let PlannedWindows {
            rounds,
            windowed_sequences,
            chunk_positions,
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
            windowed_sequences,
            chunk_positions,
            rounds,
            members,
            predicted,
            http_port: Some(ports::http(slot)),
            ..self.skeleton.clone()
        };
        let world = self.world;
        let namespace = world.model.namespace().unwrap_or_default();
        match quota::refusal(&world.quotas, &namespace, &spec, others) {
            None => Ok(spec),
            Some(message) => Err(over_quota(message)),
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

/// Microseconds of a token.
fn is_much_faster(new: i64, old: i64) -> bool {
    new * 100 < old * WORTH_PERCENT
}

fn over_quota(message: String) -> DecisionKind {
    DecisionKind::Impossible {
        reason: "OverQuota",
        message,
    }
}

/// The part of a plan that follows from the Model alone.
pub(super) fn skeleton(model: &Model, resolved: &ResolvedModel) -> RingPlanSpec {
    let (version, profile) = (&resolved.version, &resolved.profile);
    let planned = planned_model(model.name_any(), &resolved.source, version, profile);
    let wishes = &model.spec;
    let default_context = plan::default_context(profile) as i32;
    let context_length = wishes.context_length.unwrap_or(default_context);
    let (max_concurrent_requests, kv_contexts) = plan::concurrency(wishes.max_concurrent_requests);
    let draft = resolved.draft.as_ref().map(|draft| {
        let (source, profile) = (&draft.source, &draft.profile);
        let name = format!("{}-draft", model.name_any());
        PlannedDraft {
            model: planned_model(name, source, &draft.version, profile),
            memory_bytes: profile.whole_bytes(i64::from(context_length) * i64::from(kv_contexts)),
        }
    });
    RingPlanSpec {
        max_concurrent_requests,
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
