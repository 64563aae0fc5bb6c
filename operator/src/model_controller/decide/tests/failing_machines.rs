//! Which machines have refused a plan or fail at it, and for how long that counts.

use prima_crds::v1alpha1::ring_plan::{MemberState, MemberStatus};
use serde_json::json;

use super::*;
use crate::cluster::world::AgentState;
use crate::model_controller::test_world::{GIB, machine, profile, ring};

/// A ring whose only member is in this state.
fn reported(state: MemberState, message: &str) -> Arc<RingPlan> {
    let mut plan = RingPlan::clone(&ring(&[(0, 8)], GIB, 0));
    let retry = (state == MemberState::Failed).then_some(8);
    let status = json!({"members": [
        {"name": "desk", "state": state, "message": message, "retryAfterSeconds": retry},
    ]});
    plan.status = Some(serde_json::from_value(status).unwrap());
    Arc::new(plan)
}

#[test]
fn a_refusal_counts_for_ten_minutes() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut refusals = Refusals::default();
    let refused = reported(MemberState::Refused, "no disk");
    let known = refusals.note(Some(&refused), &[], start);
    assert_eq!(known["desk"], "no disk");
    assert_eq!(refusals.note(None, &[], at(599)).len(), 1);
    assert!(refusals.note(None, &[], at(600)).is_empty());
    // A machine that has done what was asked is trusted again at once.
    refusals.note(Some(&refused), &[], start);
    let loading = reported(MemberState::Loading, "");
    assert_eq!(refusals.note(Some(&loading), &[], at(1)).len(), 1);
    let loaded = reported(MemberState::Loaded, "");
    assert!(refusals.note(Some(&loaded), &[], at(1)).is_empty());
    // So is one whose agent was replaced, perhaps by one of another version.
    let mut desk = machine("desk");
    refusals.note(Some(&refused), &[], start);
    assert_eq!(refusals.note(None, &[desk.clone()], at(1)).len(), 1);
    let agent = &mut profile(&mut desk).status.as_mut().unwrap().agent;
    agent.as_mut().unwrap().address = "10.0.0.9".to_owned();
    assert!(refusals.note(None, &[desk], at(1)).is_empty());
}

#[test]
fn who_fails_for_two_minutes_has_refused() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut refusals = Refusals::default();
    let failed = reported(MemberState::Failed, "it broke");
    assert!(refusals.note(Some(&failed), &[], start).is_empty());
    assert!(refusals.note(Some(&failed), &[], at(120)).is_empty());
    assert_eq!(
        refusals.note(Some(&failed), &[], at(121))["desk"],
        "it broke"
    );
    // If it recovers in between, its time begins anew.
    let mut refusals = Refusals::default();
    refusals.note(Some(&failed), &[], start);
    refusals.note(Some(&reported(MemberState::Loaded, "")), &[], at(60));
    assert!(refusals.note(Some(&failed), &[], at(121)).is_empty());
    assert!(refusals.note(Some(&failed), &[], at(241)).is_empty());
    assert_eq!(refusals.note(Some(&failed), &[], at(242)).len(), 1);
    // To be tried again is not to recover; but it may.
    let mut refusals = Refusals::default();
    refusals.note(Some(&failed), &[], start);
    let loading = reported(MemberState::Loading, "");
    assert!(refusals.note(Some(&loading), &[], at(60)).is_empty());
    assert!(refusals.note(Some(&failed), &[], at(120)).is_empty());
    assert!(refusals.note(Some(&loading), &[], at(125)).is_empty());
    assert_eq!(refusals.note(Some(&failed), &[], at(130)).len(), 1);
}

#[test]
fn a_few_failures_around_a_long_load_are_no_refusal() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let failed = reported(MemberState::Failed, "it broke");
    let loading = reported(MemberState::Loading, "");
    let mut refusals = Refusals::default();
    refusals.note(Some(&failed), &[], start);
    for seconds in [10, 100, 160] {
        assert!(refusals.note(Some(&loading), &[], at(seconds)).is_empty());
    }
    assert!(refusals.note(Some(&failed), &[], at(170)).is_empty());
    // The time between such loads adds up, and that of short ones counts, too.
    assert!(refusals.note(Some(&loading), &[], at(180)).is_empty());
    assert!(refusals.note(Some(&failed), &[], at(280)).is_empty());
    assert_eq!(refusals.note(Some(&failed), &[], at(281)).len(), 1);
}

#[test]
fn an_agent_that_starts_or_ends_has_not_failed() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut ends = RingPlan::clone(&reported(MemberState::Failed, "the agent ends"));
    ends.status.as_mut().unwrap().members[0].retry_after_seconds = None;
    let ends = Arc::new(ends);
    let failed = reported(MemberState::Failed, "it broke");
    let mut refusals = Refusals::default();
    assert!(refusals.note(Some(&ends), &[], start).is_empty());
    assert!(refusals.note(Some(&failed), &[], at(121)).is_empty());
    // Nor does it count as having got on.
    assert!(refusals.note(Some(&ends), &[], at(242)).is_empty());
    assert_eq!(refusals.note(Some(&failed), &[], at(243)).len(), 1);
}

#[test]
fn a_download_that_gets_on_is_waited_for() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let fetched = |state, bytes| {
        let mut plan = RingPlan::clone(&reported(state, "no answer"));
        plan.status.as_mut().unwrap().members[0].fetched_bytes = Some(bytes);
        Arc::new(plan)
    };
    let failed = |bytes| fetched(MemberState::Failed, bytes);
    let mut refusals = Refusals::default();
    assert!(refusals.note(Some(&failed(10)), &[], start).is_empty());
    let fetching = fetched(MemberState::Fetching, 11);
    assert!(refusals.note(Some(&fetching), &[], at(60)).is_empty());
    assert!(refusals.note(Some(&failed(12)), &[], at(130)).is_empty());
    // Also where only its failures were seen.
    assert!(refusals.note(Some(&failed(13)), &[], at(260)).is_empty());
    // What it had is no progress.
    let fetching = fetched(MemberState::Fetching, 13);
    assert!(refusals.note(Some(&fetching), &[], at(300)).is_empty());
    assert!(refusals.note(Some(&failed(13)), &[], at(380)).is_empty());
    assert_eq!(refusals.note(Some(&failed(13)), &[], at(381)).len(), 1);
}

#[test]
fn a_machine_at_which_the_ring_fails_has_refused_soon() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let in_state = |state, fails_at: Option<&str>| {
        let mut plan = RingPlan::clone(&reported(MemberState::Loaded, "waiting for pi4"));
        plan.spec.members.push(RingMember {
            name: "pi4".to_owned(),
            ..member()
        });
        let states = &mut plan.status.as_mut().unwrap().members;
        // Its own agent finds nothing wrong with it.
        states.push(MemberStatus {
            name: "pi4".to_owned(),
            state,
            ..states[0].clone()
        });
        states[0].fails_at = fails_at.map(str::to_owned);
        Arc::new(plan)
    };
    let ring = |fails_at| in_state(MemberState::Loaded, fails_at);
    let none = &[];
    let mut refusals = Refusals::default();
    let fails = ring(Some("pi4"));
    assert!(refusals.note(Some(&fails), none, start).is_empty());
    assert!(refusals.wait(start));
    assert!(refusals.note(Some(&fails), none, at(25)).is_empty());
    let refused = refusals.note(Some(&fails), none, at(26));
    let why = "the ring fails there, says desk: waiting for pi4";
    assert_eq!(refused, [("pi4".to_owned(), why.to_owned())].into());
    // As long as there is no ring without it, it may come back to this one.
    let whole = ring(None);
    assert!(refusals.note(Some(&whole), none, at(27)).is_empty());
    assert!(!refusals.wait(at(27)));
    // One that its agent starts again is waited for, and its time begins anew.
    refusals.note(Some(&fails), none, at(28));
    let starts = in_state(MemberState::Loading, Some("pi4"));
    assert!(refusals.note(Some(&starts), none, at(60)).is_empty());
    assert!(refusals.note(Some(&fails), none, at(61)).is_empty());
    assert_eq!(refusals.note(Some(&fails), none, at(87)).len(), 1);
    assert_eq!(refusals.note(None, none, at(686)).len(), 1);
    assert!(refusals.note(None, none, at(687)).is_empty());
    // It was off.
    refusals.note(Some(&fails), none, at(700));
    refusals.note(Some(&fails), none, at(726));
    let (mut off, mut another) = (machine("pi4"), machine("laptop"));
    another.agent = AgentState::Silent;
    let there = [another, off.clone()];
    assert_eq!(refusals.note(None, &there, at(727)).len(), 1);
    off.agent = AgentState::Silent;
    assert!(refusals.note(None, &[off], at(728)).is_empty());
    // So was rank 0, whose last word stands.
    refusals.note(Some(&fails), none, at(730));
    assert_eq!(refusals.note(Some(&fails), none, at(756)).len(), 1);
    let mut off = machine("desk");
    off.agent = AgentState::Silent;
    assert!(refusals.note(Some(&fails), &[off], at(757)).is_empty());
    // What others would have to fetch is waited for longer; and nobody is left out for what is not in the plan.
    let mut fetched = RingPlan::clone(&fails);
    let source = json!({"huggingFace": {"repo": "o/r", "file": "m.gguf"}});
    fetched.spec.model.source = serde_json::from_value(source).unwrap();
    let fetched = Arc::new(fetched);
    assert!(refusals.note(Some(&fetched), none, at(800)).is_empty());
    assert!(refusals.note(Some(&fetched), none, at(920)).is_empty());
    assert_eq!(refusals.note(Some(&fetched), none, at(921)).len(), 1);
    let mut refusals = Refusals::default();
    let stranger = ring(Some("laptop"));
    refusals.note(Some(&stranger), none, start);
    assert!(refusals.note(Some(&stranger), none, at(100)).is_empty());
    // The next ring has a time of its own.
    let mut refusals = Refusals::default();
    refusals.note(Some(&fails), none, start);
    let mut next = RingPlan::clone(&fails);
    next.spec.generation += 1;
    let next = Arc::new(next);
    assert!(refusals.note(Some(&next), none, at(26)).is_empty());
    assert_eq!(refusals.note(Some(&next), none, at(52)).len(), 1);
}
