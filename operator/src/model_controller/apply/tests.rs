//! What is written, and when.

use prima_crds::v1alpha1::ring_plan::RingPlanStatus;
use serde_json::json;

use super::*;
use crate::cluster::world::AgentState;
use crate::model_controller::test_world::{
    self, api_server, context, decision, machine, ring, serving,
};

#[test]
fn clients_have_a_moment_to_go_where_the_service_leads() {
    let (start, none) = (Instant::now(), Duration::ZERO);
    let mut led = Led::default();
    assert_eq!(led.moving(Some(1), start), MOVING);
    assert_eq!(led.moving(Some(1), start + MOVING / 2), MOVING / 2);
    assert_eq!(led.moving(Some(1), start + 2 * MOVING), none);
    assert_eq!(led.moving(None, start + 2 * MOVING), MOVING);
    assert_eq!(led.moving(None, start + 3 * MOVING), none);
}

/// A plan of this generation whose ring answers on [`machine`]s.
fn answering(generation: i64) -> Arc<RingPlan> {
    let mut plan = RingPlan::clone(&serving("m", 9400));
    plan.metadata.name = Some(format!("m-{generation}"));
    plan.spec.generation = generation;
    plan.spec.members[0].address = "10.0.0.1:9200".to_owned();
    Arc::new(plan)
}

/// Of the Model `home/m`, with these plans.
fn at_home(plans: &[Arc<RingPlan>]) -> World {
    let mut world = test_world::world(&[machine("desk")], plans);
    let model = Arc::get_mut(&mut world.model).unwrap();
    model.metadata.namespace = Some("home".to_owned());
    world
}

/// By a look of its own.
async fn applied(
    world: &World,
    decision: &Decision,
    context: &Context,
    written: &mut Written,
    led: &mut Led,
) -> (Ring, Option<Duration>) {
    let deciding = context.deciding.lock().await;
    let applied = apply(world, decision, context, written, led, deciding);
    applied.await.unwrap()
}

#[tokio::test]
async fn no_look_waits_until_clients_have_left_an_old_ring() {
    let (client, writes) = api_server().await;
    let plans = [1, 2].map(answering);
    let context = context(client, &plans[1]);
    let world = at_home(&plans);
    let decision = decision(DecisionKind::Keep(plans[1].clone()));
    let (mut written, mut led) = (Written::new(), Led::default());
    let long_ago = Instant::now().checked_sub(MOVING).unwrap();
    for (since, look_after) in [(None, Some(MOVING)), (Some((Some(2), long_ago)), None)] {
        led.0 = since;
        let (ring, after) = applied(&world, &decision, &context, &mut written, &mut led).await;
        assert_eq!(ring.serving.unwrap().spec.generation, 2);
        assert_eq!(after, look_after);
        let writes = writes.lock().unwrap();
        let ended = writes.iter().filter(|(what, _)| what.starts_with("DELETE"));
        let ended: Vec<_> = ended.map(|(what, _)| what.ends_with("/m-1")).collect();
        let expected: &[bool] = match look_after {
            Some(_) => &[],
            None => &[true],
        };
        assert_eq!(ended, expected);
    }
}

#[tokio::test]
async fn clients_leave_a_ring_that_has_to_end_first() {
    let (client, writes) = api_server().await;
    let old = answering(1);
    let context = context(client, &old);
    let world = at_home(std::slice::from_ref(&old));
    let decision = decision(DecisionKind::New {
        spec: Box::new(answering(2).spec.clone()),
        retire_first: true,
        why: "the Model was changed".to_owned(),
    });
    let (mut written, mut led) = (Written::new(), Led::default());
    let long_ago = Instant::now().checked_sub(MOVING).unwrap();
    for (since, newest, look_after) in [(None, 1, Some(MOVING)), (Some((None, long_ago)), 2, None)]
    {
        led.0 = since;
        let (ring, after) = applied(&world, &decision, &context, &mut written, &mut led).await;
        assert!(ring.serving.is_none());
        assert_eq!(ring.newest.unwrap().spec.generation, newest);
        assert_eq!(after, look_after);
        let writes = writes.lock().unwrap();
        let of_plans = writes.iter().filter(|(to, _)| to.contains("/ringplans/"));
        let of_plans: Vec<_> = of_plans
            .map(|(to, _)| to.split_once('/').unwrap().0)
            .collect();
        let expected: &[&str] = match look_after {
            Some(_) => &[],
            None => &["DELETE ", "PATCH "],
        };
        assert_eq!(of_plans, expected);
    }
}

#[test]
fn members_that_run_their_layers_and_are_there_count() {
    let mut plan = RingPlan::clone(&ring(&[(0, 4)], 0, 0));
    let mut other = plan.spec.members[0].clone();
    other.name = "pi4".to_owned();
    plan.spec.members.push(other);
    let machines = [machine("desk"), machine("pi4")];
    assert_eq!(loaded(&plan, &machines), 0);
    let mut say = |states: [MemberState; 2]| {
        let members = ["desk", "pi4"].into_iter().zip(states);
        let members = members.map(|(name, state)| json!({"name": name, "state": state}));
        let status = json!({"members": members.collect::<Vec<_>>()});
        plan.status = Some(serde_json::from_value::<RingPlanStatus>(status).unwrap());
        plan.clone()
    };
    let half = say([MemberState::Loading, MemberState::Loaded]);
    assert_eq!(loaded(&half, &machines), 1);
    let all = say([MemberState::Ready, MemberState::Loaded]);
    assert_eq!(loaded(&all, &machines), 2);
    let mut silent = machines.clone();
    silent[0].agent = AgentState::Silent;
    assert_eq!(loaded(&all, &silent), 1);
    assert_eq!(loaded(&all, &machines[1..]), 1);
}
