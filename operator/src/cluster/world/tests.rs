//! What is read of other versions, who counts as gone, and how often changes come.

use k8s_openapi::api::coordination::v1::LeaseSpec;
use k8s_openapi::api::core::v1::PersistentVolumeClaimStatus;
use k8s_openapi::jiff::Timestamp;
use serde_json::json;

use super::*;

fn lease(renewed: i64) -> Lease {
    let now = Timestamp::now().as_second();
    let renewed = Timestamp::from_second(now + renewed).unwrap();
    let mut lease = Lease {
        spec: Some(LeaseSpec {
            renew_time: Some(MicroTime(renewed)),
            ..LeaseSpec::default()
        }),
        ..Lease::default()
    };
    lease.metadata.name = Some("prima-agent-pi4".to_owned());
    lease
}

/// An object as it comes from the API server.
fn object<K: serde::Serialize>(of: &K) -> DynamicObject {
    serde_json::from_value(serde_json::to_value(of).unwrap()).unwrap()
}

/// Gives every object in there a field that no version has yet.
fn add_fields(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.values_mut().for_each(add_fields);
            fields.insert("fieldOfTheNextVersion".into(), json!({"a": [1]}));
        }
        Value::Array(items) => items.iter_mut().for_each(add_fields),
        _ => {}
    }
}

fn profile() -> NodeProfile {
    let yaml = include_str!("../../../../crds/tests/node-profile.yaml");
    let mut profile = NodeProfile::from_yaml("node-profile.yaml", yaml).unwrap();
    profile.spec.memory_cap_bytes = Some(5);
    profile
}

#[test]
fn fields_of_the_next_version_are_left_out() {
    let known = profile();
    let mut newer = object(&known);
    add_fields(&mut newer.data["status"]);
    add_fields(&mut newer.data["spec"]);
    assert_ne!(newer, object(&known));
    let (found, problem) = read_profile(newer);
    assert_eq!((object(&found), problem), (object(&known), None));
}

#[test]
fn a_profile_that_cannot_be_read_keeps_its_owners_wishes() {
    let mut newer = object(&profile());
    newer.data["status"]["system"]["os"] = json!("Plan9");
    let (found, problem) = read_profile(newer);
    assert_eq!((found.spec, found.status), (profile().spec, None));
    assert_eq!(found.metadata, profile().metadata);
    let problem = problem.unwrap();
    assert!(problem.contains("Plan9"), "{problem}");
}

#[test]
fn a_plan_of_the_next_version_is_read_without_what_is_new() {
    let plan = json!({
        "apiVersion": "prima.dev/v1alpha1",
        "kind": "RingPlan",
        "metadata": {"name": "m-1", "uid": "u"},
        "spec": {
            "generation": 1,
            "model": {"name": "m", "file": "m.gguf", "sizeBytes": 1, "layers": 8},
            "contextLength": 512,
            "maxConcurrentRequests": 1,
            "rounds": 1,
            "members": [{"name": "desk", "address": "10.0.0.1:9200", "windows": [{"first": 0, "last": 8}]}],
        },
        "status": {"members": [{"name": "desk", "state": "Ready"}, {"name": "pi4", "state": "Loaded"}]},
    });
    let read = |plan: &Value| read_plan(serde_json::from_value(plan.clone()).unwrap());
    let known = read(&plan).unwrap();
    let members = known.status.as_ref().unwrap().members.clone();
    assert_eq!(members.len(), 2);
    let mut newer = plan.clone();
    add_fields(&mut newer["spec"]);
    add_fields(&mut newer["status"]);
    assert_eq!(object(&read(&newer).unwrap()), object(&known));

    newer["status"]["members"][0]["state"] = json!("Draining");
    let found = read(&newer).unwrap();
    assert_eq!(found.spec, known.spec);
    assert_eq!(found.status.unwrap().members, members[1..]);
    newer["status"]["members"] = json!("all of them");
    let found = read(&newer).unwrap();
    assert_eq!(
        (found.spec, found.status.unwrap().members),
        (known.spec, Vec::new())
    );

    newer["spec"]["rounds"] = json!("as many as it takes");
    assert!(read(&newer).is_none());
}

#[tokio::test]
async fn one_that_cannot_be_read_does_not_end_the_watch() {
    let named = |name: &str| {
        let mut object = object(&profile());
        object.metadata.name = Some(name.to_owned());
        object
    };
    let events = [
        Ok(Event::Init),
        Ok(Event::InitApply(named("old"))),
        Ok(Event::InitApply(named("new"))),
        Ok(Event::InitDone),
    ];
    let read = |object: DynamicObject| (object.name_any() != "new").then(|| object.name_any());
    let read = read_each(futures::stream::iter(events), read);
    let read: Vec<Event<String>> = read.map(Result::unwrap).collect().await;
    assert!(
        matches!(&read[..], [Event::Init, Event::InitApply(name), Event::InitDone] if name == "old"),
        "{read:?}"
    );
}

#[test]
fn what_an_operator_says_of_a_machine_concerns_no_model() {
    let mut news = ProfileNews::default();
    let mut concerns = |event: Event<NodeProfile>, problem: Option<&str>| {
        news.take_in(&event, |_| problem.map(str::to_owned))
    };
    let mut now = profile();
    assert!(!concerns(Event::Init, None));
    assert!(concerns(Event::InitApply(now.clone()), None));
    assert!(concerns(Event::InitDone, None));

    let ready = json!({"type": "Ready", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
    now.status.as_mut().unwrap().conditions = vec![serde_json::from_value(ready).unwrap()];
    now.metadata.resource_version = Some("2".to_owned());
    assert!(!concerns(Event::Apply(now.clone()), None));
    // What its owner says does, and its agent, and why neither can be read.
    now.spec.exclude = true;
    assert!(concerns(Event::Apply(now.clone()), None));
    now.status.as_mut().unwrap().memory.available_bytes -= 1;
    assert!(concerns(Event::Apply(now.clone()), None));
    assert!(concerns(Event::Apply(now.clone()), Some("a newer version")));
    assert!(!concerns(
        Event::Apply(now.clone()),
        Some("a newer version")
    ));
    // It goes, and comes back as it was; and so it may in a list that comes anew.
    assert!(concerns(Event::Delete(now.clone()), None));
    assert!(concerns(Event::Apply(now.clone()), None));
    assert!(!concerns(Event::Init, None));
    assert!(concerns(Event::InitApply(now), None));
}

#[tokio::test]
async fn changes_of_many_machines_leave_models_a_moment() {
    let (sender, changes) = mpsc::channel(1);
    let mut changes = calm(changes);
    let begun = Instant::now();
    for _ in 0..2 {
        sender.try_send(()).unwrap();
        // One that waits is as good as many.
        assert!(sender.try_send(()).is_err());
        assert_eq!(changes.next().await, Some(()));
    }
    assert!(begun.elapsed() >= CALM);
}

#[test]
fn an_agent_is_gone_40_s_after_its_lease_changed() {
    let start = Instant::now();
    let mut agents = Agents::new(start);
    let at = |seconds| start + Duration::from_secs(seconds);
    assert!(agents.hear(&lease(5), start), "a change: there is one");
    let renewed = lease(15);
    assert!(!agents.hear(&renewed, at(10)), "no change: it lives on");
    assert!(
        !agents.hear(&renewed, at(45)),
        "a Lease that is only listed again"
    );
    assert_eq!(agents.heard("pi4"), Some(at(10)));
    assert!(!agents.look(at(50)));
    assert!(agents.look(at(51)), "a change: it is gone");
    assert!(!agents.look(at(52)), "which is said once");
    assert_eq!(agents.state("pi4", at(60)), AgentState::Silent);
    assert!(agents.hear(&lease(70), at(70)), "a change: it is back");
    let known_for = Duration::from_secs(5);
    assert_eq!(agents.state("pi4", at(75)), AgentState::Alive { known_for });
}

#[test]
fn while_leases_cannot_be_watched_nobody_is_gone() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut agents = Agents::new(start);
    agents.hear(&lease(0), start);
    agents.see(false, at(10));
    assert!(!agents.look(at(100)));
    agents.see(true, at(100));
    assert_eq!(agents.heard("pi4"), Some(start));
    assert!(!agents.look(at(130)), "it has time to be heard of again");
    assert!(agents.look(at(141)));
}

#[test]
fn a_lease_says_how_long_it_counts_within_bounds() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    for (said, counts) in [(8, 8), (i32::MIN, 5), (0, 5), (i32::MAX, 600)] {
        let mut agents = Agents::new(start);
        let mut lease = lease(0);
        lease.spec.as_mut().unwrap().lease_duration_seconds = Some(said);
        agents.hear(&lease, start);
        assert!(!agents.look(at(counts)), "{said} s");
        assert!(agents.look(at(counts + 1)), "{said} s");
    }
}

#[test]
fn a_clock_that_is_years_wrong_changes_nothing() {
    const YEARS: i64 = 100_000_000;
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    for wrong in [-YEARS, YEARS] {
        let mut agents = Agents::new(start);
        assert!(agents.hear(&lease(wrong), start));
        assert!(!agents.hear(&lease(wrong + 10), at(10)), "it lives on");
        assert!(!agents.look(at(50)));
        assert!(agents.look(at(51)), "it is gone");
        // It was set right meanwhile.
        assert!(agents.hear(&lease(60), at(60)), "it is back");
    }
}

#[test]
fn other_leases_are_no_agents() {
    let start = Instant::now();
    let mut agents = Agents::new(start);
    let mut other = lease(5);
    other.metadata.name = Some("prima-operator".to_owned());
    assert!(!agents.hear(&other, start));
}

#[test]
fn an_operator_that_has_just_started_takes_nobody_for_gone() {
    let start = Instant::now();
    let agents = Agents::new(start);
    let at = |seconds| start + Duration::from_secs(seconds);
    assert!(matches!(
        agents.state("pi4", at(40)),
        AgentState::Alive { .. }
    ));
    assert_eq!(agents.state("pi4", at(41)), AgentState::Unknown);
}

#[test]
fn of_a_claim_is_said_that_it_has_no_volume() {
    assert_eq!(unbound(None).as_deref(), Some("does not exist"));
    for (phase, said) in [
        (None, Some("is Pending")),
        (Some("Pending"), Some("is Pending")),
        (Some("Lost"), Some("is Lost")),
        (Some("Bound"), None),
    ] {
        let claim = PersistentVolumeClaim {
            status: Some(PersistentVolumeClaimStatus {
                phase: phase.map(str::to_owned),
                ..PersistentVolumeClaimStatus::default()
            }),
            ..PersistentVolumeClaim::default()
        };
        assert_eq!(unbound(Some(&claim)).as_deref(), said);
    }
}
