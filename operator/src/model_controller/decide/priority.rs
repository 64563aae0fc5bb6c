//! Priorities: for which Models rings of others end, and who is planned first.
//!
//! A Model whose ring has no room beside all others is planned as if rings of lower priority were not there. If that helps, it waits, and says
//! so in its standing; by that, the decisions about those Models end their rings. A displaced Model gets what is left. A plan has no priority:
//! its Model's counts, as it is now.
//!
//! Who waits for whom: a Model without a ring is planned after all of higher priority that may still need what there is. One whose ring is
//! broken waits for nobody's search; it only keeps away from machines where room is being made.

#[cfg(test)]
mod tests;

use std::cell::LazyCell;
use std::cmp::Reverse;
use std::ptr;

use kube::ResourceExt;
use prima_crds::v1alpha1::model::Model;
use prima_crds::v1alpha1::ring_plan::{RingMember, RingPlanSpec};

use super::{
    AwaitedRoom, Case, DecisionKind, PlannedWindows, State, is_much_faster, memory, question,
};
use crate::condition::find;
use crate::model_controller::candidates::Candidates;
use crate::model_controller::dereference::{OtherModel, World};
use crate::model_controller::standing::Standing;

/// The reason of Models that have no ring since it ended for another Model.
pub const DISPLACED: &str = "Displaced";

impl<'a> Case<'a> {
    /// The plan of a ring that takes the room of others, and the Models of lower priority whose rings are to end for it, as few as will do. None
    /// if it needs no more room than there is beside them (where `beside` would be the best ring, if there is one), or if their end would
    /// not help.
    pub fn in_place_of_others(
        &self,
        beside: Option<&PlannedWindows>,
        state: &State,
        urgent: bool,
    ) -> Result<Option<(RingPlanSpec, Vec<&'a OtherModel>)>, DecisionKind> {
        if beside.is_some_and(|windows| !windows.streams()) {
            return Ok(None);
        }
        let lower = lower(self.world);
        if lower.is_empty() {
            return Ok(None);
        }
        let without = |count: usize| self.best_without(&lower[..count], state, urgent);
        let Some(mut best) = without(lower.len())? else {
            return Ok(None);
        };
        // To read weights from disk for every token is lack of room, too, if it makes a ring much slower.
        let fastest = best.token_microseconds();
        let will_do = |windows: &PlannedWindows| {
            !windows.streams() || !is_much_faster(fastest, windows.token_microseconds())
        };
        if beside.is_some_and(will_do) {
            return Ok(None);
        }
        // The fewest that will do, in the order in which they end.
        let (mut too_few, mut enough) = (0, lower.len());
        while enough - too_few > 1 {
            let middle = usize::midpoint(too_few, enough);
            match without(middle)? {
                Some(windows) if will_do(&windows) => (enough, best) = (middle, windows),
                _ => too_few = middle,
            }
        }
        // Of these, some may be where this Model needs no room.
        let mut gone = lower[..enough].to_vec();
        for other in lower[..enough].iter().rev() {
            let stays = |one: &&OtherModel| !ptr::eq(*one, *other);
            let fewer: Vec<_> = gone.iter().copied().filter(stays).collect();
            let (less, more) = (self.machines_without(&fewer), self.machines_without(&gone));
            if memory::fits_in_less(&best.members, &less, &more, &self.resolved.profile) {
                gone = fewer;
            }
        }
        match self.spec(best, &self.world.others_without(&gone)) {
            Ok(ring) => Ok(Some((ring, gone))),
            // Its namespace may not take that much. It may still take what there is.
            Err(_) if beside.is_some() => Ok(None),
            Err(kind) => Err(kind),
        }
    }

    /// The best ring if those of these Models were gone.
    fn best_without(
        &self,
        gone: &[&OtherModel],
        state: &State,
        urgent: bool,
    ) -> Result<Option<PlannedWindows>, DecisionKind> {
        let machines = self.machines_without(gone);
        let fingerprint = question::fingerprint(&self.world.model, self.resolved, &machines);
        match self.best_of(&machines, &fingerprint, state, urgent) {
            Ok(windows) => Ok(Some(windows)),
            Err(DecisionKind::NoPlace { .. }) => Ok(None),
            Err(kind) => Err(kind),
        }
    }

    /// The machines as if the rings of these Models were gone.
    fn machines_without(&self, gone: &[&OtherModel]) -> Candidates {
        let world = self.world;
        let current = world.current();
        let machines = Candidates::beside(
            &world.others_without(gone),
            &world.model,
            self.resolved,
            world,
            self.refused,
            current.map_or(&[][..], |plan| &plan.spec.members),
        );
        Candidates {
            apart: self.candidates.apart.clone(),
            ..machines
        }
    }
}

/// Models of lower priority that have rings, in the order in which these would end: those of the lowest priority first, and of these the
/// youngest.
fn lower(world: &World) -> Vec<&OtherModel> {
    let own = world.priority();
    let models = world.models.iter();
    let mut lower: Vec<_> = models
        .filter(|other| other.priority < own && has_ring(world, other))
        .collect();
    lower.sort_by_key(|other| {
        let since = other.model.creation_timestamp();
        (other.priority, Reverse(since), other.model.uid())
    });
    lower
}

/// Other Models of higher priority that are to have rings, the highest first.
fn higher(world: &World) -> Vec<&OtherModel> {
    let own = world.priority();
    let models = world.models.iter();
    let mut higher: Vec<_> = models
        .filter(|other| other.priority > own && !other.model.spec.suspend)
        .collect();
    // In the same order each time, since people read it.
    higher.sort_by_cached_key(|other| {
        let model = &other.model;
        (Reverse(other.priority), model.namespace(), model.name_any())
    });
    higher
}

fn has_ring(world: &World, other: &OtherModel) -> bool {
    world.plans_of(other).next().is_some()
}

/// A Model of higher priority that is to be planned before this one gets a ring of these members. `urgent`: it has one that is broken.
pub fn comes_first<'a>(
    world: &'a World,
    members: &[RingMember],
    urgent: bool,
) -> Option<&'a OtherModel> {
    let room = LazyCell::new(|| world.room());
    let goes_before = |other: &&OtherModel| match &other.standing {
        Some(Standing::Displaces { machines, .. }) => {
            let mut members = members.iter();
            members.any(|member| machines.contains(&member.name))
        }
        _ if urgent => false,
        // Also one that has a ring: if that is broken, others may have ended for the next one, before this operator began.
        None | Some(Standing::Undecided) => true,
        // There may be room for it by now.
        Some(Standing::Waits(seen)) => room.may_be_more_than(seen),
        Some(Standing::NoClaim) => false,
    };
    higher(world).into_iter().find(goes_before)
}

/// The end of this Model's ring, if one of higher priority waits for that.
pub fn displaced(world: &World) -> Option<DecisionKind> {
    let uid = world.model.uid()?;
    // Without a ring, it is decided what it gets.
    world.current()?;
    let waits_for_that = |other: &&OtherModel| match &other.standing {
        Some(Standing::Displaces { models, .. }) => models.contains(&uid),
        _ => false,
    };
    let takers = higher(world).into_iter().filter(waits_for_that);
    let takers: Vec<_> = takers.collect();
    (!takers.is_empty()).then(|| DecisionKind::Released {
        reason: DISPLACED,
        message: gone_to(world, &takers),
    })
}

/// Whether that was the last thing said about the Model's plan.
pub fn is_said_to_be_displaced(model: &Model) -> bool {
    let status = model.status.as_ref();
    let planned = status.and_then(|status| find(&status.conditions, "Planned"));
    planned.is_some_and(|planned| planned.reason == DISPLACED)
}

/// What is said of a Model that was displaced and still has no place: who has or gets its memory, as long as anybody does.
pub fn as_displaced(kind: DecisionKind, world: &World, machines: &Candidates) -> DecisionKind {
    let first = match &kind {
        DecisionKind::NoPlace {
            awaits: AwaitedRoom::LeftBy(first),
            ..
        } => first.uid(),
        _ => None,
    };
    let has_it = |other: &&OtherModel| {
        let mut members = world.plans_of(other).flat_map(|plan| &plan.spec.members);
        other.model.uid() == first || members.any(|one| machines.profile(&one.name).is_some())
    };
    let takers: Vec<_> = higher(world).into_iter().filter(has_it).collect();
    match kind {
        DecisionKind::NoPlace { awaits, .. } if !takers.is_empty() => DecisionKind::NoPlace {
            reason: DISPLACED,
            message: gone_to(world, &takers),
            awaits,
        },
        kind => kind,
    }
}

fn gone_to(world: &World, takers: &[&OtherModel]) -> String {
    format!(
        "its memory goes to {}, and its own priority is {}; it is planned again when there is room",
        names(world, takers).join(", "),
        world.priority()
    )
}

/// Says that the rings of these Models are to end, for a ring of this plan.
pub fn awaits_end_of(world: &World, models: &[&OtherModel], ring: RingPlanSpec) -> DecisionKind {
    let names = names(world, models);
    let message = match names.as_slice() {
        [one] => format!("waits until {one} has ended, to take its memory"),
        several => format!(
            "waits until {} have ended, to take their memory",
            several.join(", ")
        ),
    };
    DecisionKind::NoPlace {
        reason: "AwaitingRoom",
        message,
        awaits: AwaitedRoom::Of {
            models: models.iter().map(|other| other.model.clone()).collect(),
            ring: Box::new(ring),
        },
    }
}

/// Says that this Model is planned first.
pub fn awaits_plan_of(world: &World, first: &OtherModel) -> DecisionKind {
    let names = names(world, &[first]).join(", ");
    DecisionKind::NoPlace {
        reason: "AwaitingRoom",
        message: format!("{names} is planned first"),
        awaits: AwaitedRoom::LeftBy(first.model.clone()),
    }
}

/// For people, with their priorities. What is in other namespaces is nobody's business here.
fn names(world: &World, models: &[&OtherModel]) -> Vec<String> {
    let namespace = world.model.namespace();
    let name = |other: &&OtherModel| {
        let name = match other.model.namespace() == namespace {
            true => other.model.name_any(),
            false => "a Model of another namespace".to_owned(),
        };
        format!("{name} (priority {})", other.priority)
    };
    models.iter().map(name).collect()
}
