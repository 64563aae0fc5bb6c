//! Machines that cannot do what plans ask of them. Only a machine's own agent can tell; its word is remembered here for a while.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::ring_plan::{MemberState, RingPlan};

use crate::cluster::world::Machine;

#[derive(Clone, Default)]
pub struct Refusals {
    refused: BTreeMap<String, Refusal>,
    /// Members of a plan's generation that fail, and since when.
    failing: BTreeMap<(i64, String), Instant>,
}

#[derive(Clone)]
struct Refusal {
    why: String,
    /// When it was said last.
    at: Instant,
    /// Where the agent was that said it. A pod that was made anew may be of another version.
    host: Option<String>,
}

/// A machine that fails for longer than this, while no client is answered, counts as one that refused.
const FAILS_FOR: Duration = Duration::from_secs(120);
/// How long a machine that refused a plan is not asked again.
const REFUSED_FOR: Duration = Duration::from_secs(600);

impl Refusals {
    /// Takes in what the running plan's members say. Returns machines that refused a plan recently, or could not follow it for a long time,
    /// and why.
    pub fn note(
        &mut self,
        current: Option<&Arc<RingPlan>>,
        machines: &[Machine],
        now: Instant,
    ) -> BTreeMap<String, String> {
        let mut failing = BTreeMap::new();
        if let Some(plan) = current {
            for member in plan.status.iter().flat_map(|status| &status.members) {
                let name = &member.name;
                let fails_for = match member.state {
                    MemberState::Failed => {
                        let key = (plan.spec.generation, name.clone());
                        let since = self.failing.get(&key).copied().unwrap_or(now);
                        failing.insert(key, since);
                        now.duration_since(since)
                    }
                    _ => Duration::ZERO,
                };
                if member.state == MemberState::Refused || fails_for > FAILS_FOR {
                    let mut planned = plan.spec.members.iter();
                    let planned = planned.find(|planned| planned.name == *name);
                    let refusal = Refusal {
                        why: member.message.clone(),
                        at: now,
                        host: planned.and_then(|planned| Some(planned.host()?.to_owned())),
                    };
                    self.refused.insert(name.clone(), refusal);
                } else if member.state >= MemberState::Loaded {
                    self.refused.remove(name);
                }
            }
        }
        self.failing = failing;
        self.refused.retain(|name, refusal| {
            let machine = machines.iter().find(|machine| machine.name == *name);
            let host = machine.and_then(Machine::address);
            let same_agent = host.is_none() || host == refusal.host.as_deref();
            same_agent && now.duration_since(refusal.at) < REFUSED_FOR
        });
        let refused = self.refused.iter();
        refused
            .map(|(name, refusal)| (name.clone(), refusal.why.clone()))
            .collect()
    }
}
