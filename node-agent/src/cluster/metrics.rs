//! What the agent counts about itself, and what it waits for: the data behind /metrics and /readyz. The only label
//! values are the states of members.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use prima_crds::v1alpha1::ring_plan::MemberState;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    pub fetched_bytes: Counter,
    pub restarts: Counter,
    pub cut_answers: Counter,
    members: Family<StateLabel, Gauge>,
    /// In whatever state.
    all_members: Arc<AtomicUsize>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

impl Metrics {
    pub fn registry(&self) -> Registry {
        let Self {
            fetched_bytes,
            restarts,
            cut_answers,
            members,
            all_members: _,
        } = self.clone();
        let mut registry = Registry::default();
        registry.register(
            "prima_agent_fetched_bytes",
            "Bytes of model files fetched",
            fetched_bytes,
        );
        registry.register(
            "prima_agent_member_restarts",
            "Processes of ring members that were started again",
            restarts,
        );
        registry.register(
            "prima_agent_cut_answers",
            "Answers that had not ended when their ring had to",
            cut_answers,
        );
        registry.register(
            "prima_agent_members",
            "Ring members on this machine, by state",
            members,
        );
        registry
    }

    /// A member, to be counted in its state until it is dropped.
    pub fn member(&self) -> CountedMember {
        self.all_members.fetch_add(1, Ordering::Relaxed);
        CountedMember {
            members: self.members.clone(),
            all_members: self.all_members.clone(),
            state: None,
        }
    }

    /// Whether a member is on this machine, whatever it does.
    pub fn has_members(&self) -> bool {
        self.all_members.load(Ordering::Relaxed) > 0
    }
}

pub struct CountedMember {
    members: Family<StateLabel, Gauge>,
    all_members: Arc<AtomicUsize>,
    state: Option<MemberState>,
}

impl CountedMember {
    pub fn is(&mut self, state: MemberState) {
        self.leave();
        self.members.get_or_create(&label(state)).inc();
        self.state = Some(state);
    }

    fn leave(&mut self) {
        if let Some(state) = self.state.take() {
            self.members.get_or_create(&label(state)).dec();
        }
    }
}

impl Drop for CountedMember {
    fn drop(&mut self) {
        self.leave();
        self.all_members.fetch_sub(1, Ordering::Relaxed);
    }
}

fn label(state: MemberState) -> StateLabel {
    let state = match state {
        MemberState::Refused => "refused",
        MemberState::Failed => "failed",
        MemberState::Fetching => "fetching",
        MemberState::Loading => "loading",
        MemberState::Loaded => "loaded",
        MemberState::Ready => "ready",
    };
    StateLabel { state }
}

/// What an agent must have done before it is ready. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Established(Arc<[AtomicBool; Step::ALL.len()]>);

#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// This machine's NodeProfile was published.
    Profile,
    /// RingPlans are watched.
    Plans,
    /// Other machines' NodeProfiles are watched.
    Profiles,
    /// Models are watched.
    Models,
}

impl Step {
    /// What is missing before each, for people.
    const ALL: [(Self, &'static str); 4] = [
        (
            Self::Profile,
            "this machine's NodeProfile is not published yet",
        ),
        (Self::Plans, "RingPlans cannot be watched yet"),
        (Self::Profiles, "NodeProfiles cannot be watched yet"),
        (Self::Models, "Models cannot be watched yet"),
    ];
}

impl Established {
    pub fn done(&self, step: Step) {
        self.0[step as usize].store(true, Ordering::Relaxed);
    }

    /// For people; empty when nothing is missing.
    pub fn missing(&self) -> Vec<&'static str> {
        let missing = |step: Step| !self.0[step as usize].load(Ordering::Relaxed);
        let steps = Step::ALL.into_iter();
        let steps = steps.filter(|(step, _)| missing(*step));
        steps.map(|(_, what)| what).collect()
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn a_member_is_counted_in_one_state_until_it_is_gone() {
        let metrics = Metrics::default();
        let text = || {
            let mut text = String::new();
            encode(&mut text, &metrics.registry()).unwrap();
            text
        };
        assert!(!metrics.has_members());
        let mut member = metrics.member();
        assert!(metrics.has_members());
        member.is(MemberState::Loading);
        member.is(MemberState::Ready);
        let shown = text();
        assert!(
            shown.contains("prima_agent_members{state=\"loading\"} 0")
                && shown.contains("prima_agent_members{state=\"ready\"} 1"),
            "{shown}"
        );
        drop(member);
        assert!(!metrics.has_members());
        assert!(text().contains("prima_agent_members{state=\"ready\"} 0"));
    }

    #[test]
    fn what_is_missing_is_named_until_it_is_there() {
        let established = Established::default();
        assert_eq!(established.missing().len(), 4);
        for step in [Step::Profile, Step::Profiles, Step::Models] {
            established.done(step);
        }
        assert_eq!(established.missing(), ["RingPlans cannot be watched yet"]);
        established.done(Step::Plans);
        assert!(established.missing().is_empty());
    }
}
