//! Priorities: for which Models rings of others end, and who is planned first.
//!
//! A Model whose ring has no room beside all others is planned as if rings of lower priority were not there. If that helps, it waits, and says
//! so in its standing; by that, the decisions about those Models end their rings, and none of lower priority is planned until it is. So a
//! displaced Model gets what is left. A plan has no priority: its Model's counts, as it is now.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::ptr;

use kube::ResourceExt;
use prima_crds::v1alpha1::model::Model;

use super::{AwaitedRoom, Case, DecisionKind, PlannedWindows, State, is_much_faster, memory};
use crate::model_controller::candidates::Candidates;
use crate::model_controller::dereference::{OtherModel, World};
use crate::model_controller::standing::Standing;

/// The reason of Models that have no ring since it ended for another Model.
pub const DISPLACED: &str = "Displaced";

impl<'a> Case<'a> {
    /// Models of lower priority whose rings are to end for this one's, as few as will do. None if it needs no more room than there is beside
    /// them (where `beside` would be the best ring, if there is one), or if their end would not help.
    pub fn in_the_way(
        &self,
        beside: Option<&PlannedWindows>,
        state: &State,
        urgent: bool,
    ) -> Result<Vec<&'a OtherModel>, DecisionKind> {
        if beside.is_some_and(|windows| !windows.streams()) {
            return Ok(Vec::new());
        }
        let lower = lower(self.world);
        if lower.is_empty() {
            return Ok(Vec::new());
        }
        let without = |count: usize| self.best_without(&lower[..count], state, urgent);
        let Some(mut best) = without(lower.len())? else {
            return Ok(Vec::new());
        };
        // To read weights from disk for every token is lack of room, too, if it makes a ring much slower.
        let fastest = best.token_microseconds();
        let will_do = |windows: &PlannedWindows| {
            !windows.streams() || !is_much_faster(fastest, windows.token_microseconds())
        };
        if beside.is_some_and(will_do) {
            return Ok(Vec::new());
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
            Ok(_) => Ok(gone),
            // Its namespace may not take that much. It may still take what there is.
            Err(_) if beside.is_some() => Ok(Vec::new()),
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
        match self.best(&self.machines_without(gone), state, urgent) {
            Ok(windows) => Ok(Some(windows)),
            Err(DecisionKind::NoRoom { .. }) => Ok(None),
            Err(kind) => Err(kind),
        }
    }

    /// The machines as if the rings of these Models were gone.
    fn machines_without(&self, gone: &[&OtherModel]) -> Candidates {
        let world = self.world;
        let current = world.current();
        Candidates::beside(
            &world.others_without(gone),
            &world.model,
            self.resolved,
            world,
            self.refused,
            current.map_or(&[][..], |plan| &plan.spec.members),
        )
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

/// Other Models of higher priority that are to have rings.
fn higher(world: &World) -> impl Iterator<Item = &OtherModel> {
    let own = world.priority();
    let models = world.models.iter();
    models.filter(move |other| other.priority > own && !other.model.spec.suspend)
}

fn has_ring(world: &World, other: &OtherModel) -> bool {
    world.plans_of(other).next().is_some()
}

/// A Model that is to be planned before this one, which could else take its room.
pub fn comes_first(world: &World) -> Option<&OtherModel> {
    higher(world).find(|other| goes_before(world, other))
}

/// Whether this Model of higher priority may need what there is.
fn goes_before(world: &World, other: &OtherModel) -> bool {
    match &other.standing {
        Some(Standing::Content) => false,
        Some(Standing::Undecided) => true,
        // Room is being made for it, or may be there since it was decided that it has none.
        Some(Standing::Waits { seen, displaces }) => {
            !displaces.is_empty() || world.room().may_be_more_than(seen)
        }
        None => !has_ring(world, other),
    }
}

/// The end of this Model's ring, if one of higher priority waits for that.
pub fn displaced(world: &World) -> Option<DecisionKind> {
    let uid = world.model.uid()?;
    // Without a ring, it is decided what it gets.
    world.current()?;
    let waits_for_that = |other: &&OtherModel| match &other.standing {
        Some(Standing::Waits { displaces, .. }) => displaces.contains(&uid),
        _ => false,
    };
    let takers: Vec<_> = higher(world).filter(waits_for_that).collect();
    (!takers.is_empty()).then(|| DecisionKind::Released {
        reason: DISPLACED,
        message: gone_to(world, &takers),
    })
}

/// Whether that was the last thing said about the Model's plan.
pub fn is_said_to_be_displaced(model: &Model) -> bool {
    let mut conditions = model.status.iter().flat_map(|status| &status.conditions);
    conditions.any(|condition| condition.type_ == "Planned" && condition.reason == DISPLACED)
}

/// What is said of a Model that was displaced and still has no room: to whom it went, as long as any of them has it.
pub fn as_displaced(kind: DecisionKind, world: &World, machines: &Candidates) -> DecisionKind {
    let has_it = |other: &&OtherModel| {
        let mut members = world.plans_of(other).flat_map(|plan| &plan.spec.members);
        goes_before(world, other) || members.any(|one| machines.profile(&one.name).is_some())
    };
    let takers: Vec<_> = higher(world).filter(has_it).collect();
    match kind {
        DecisionKind::NoRoom { awaits, .. } if !takers.is_empty() => DecisionKind::NoRoom {
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

/// Says that the rings of these Models are to end.
pub fn awaits_end_of(world: &World, models: &[&OtherModel]) -> DecisionKind {
    let names = names(world, models);
    let message = match names.as_slice() {
        [one] => format!("waits until {one} has ended, to take its memory"),
        several => format!(
            "waits until {} have ended, to take their memory",
            several.join(", ")
        ),
    };
    DecisionKind::NoRoom {
        reason: "AwaitingRoom",
        message,
        awaits: AwaitedRoom::Of(models.iter().map(|other| other.model.clone()).collect()),
    }
}

/// Says that this Model is planned first.
pub fn awaits_plan_of(world: &World, first: &OtherModel) -> DecisionKind {
    let names = names(world, &[first]).join(", ");
    DecisionKind::NoRoom {
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
