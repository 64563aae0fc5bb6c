//! What many Models on many machines cost: until all are ready, and at rest.

use std::thread;
use std::time::{Duration, Instant};

use prima_tests::api_server::Backend;
use prima_tests::operator::Operator;
use prima_tests::{PATIENCE, wait_until};

use crate::harness::{Test, model};

/// Longer than the operator waits before it tries again what has failed.
const REST: Duration = Duration::from_secs(40);
/// Between two looks at what was asked for.
const LOOK: Duration = Duration::from_secs(5);

#[test]
fn fifty_models_on_two_hundred_machines_cost_nothing_at_rest() {
    const MODELS: usize = 50;
    const GROUP: usize = 4;
    let test = Test::start(Backend::Etcd);
    let names: Vec<String> = (0..MODELS * GROUP)
        .map(|index| format!("node-{index}"))
        .collect();
    let nodes: Vec<String> = names
        .iter()
        .enumerate()
        .map(|(index, name)| format!("{{apiVersion: v1, kind: Node, metadata: {{name: {name}, labels: {{group: g{}}}}}}}", index / GROUP))
        .collect();
    test.api.apply(&nodes.join("\n---\n")).expect("nodes");
    let machines: Vec<(&str, i64)> = names.iter().map(|name| (name.as_str(), 4)).collect();
    let _machines = test.machines(&machines);
    let operator = Operator::start(&test.api, "one");
    wait_until("it leads", || operator.ready() == "leads");
    let begun = Instant::now();
    let models: Vec<String> = (0..MODELS)
        .map(|index| {
            model(
                &format!("model-{index}"),
                &format!("nodeSelector: {{group: g{index}}}"),
            )
        })
        .collect();
    test.api.apply(&models.join("\n---\n")).expect("models");
    for count in 1..=MODELS {
        wait_until(&format!("{count} are ready"), || {
            operator.metric("prima_operator_ready_models") >= count as f64
        });
    }
    let took = begun.elapsed();
    let reconciles = operator.metric("prima_operator_reconciles_total");
    let seconds = operator.metric("prima_operator_reconcile_seconds_sum");
    println!(
        "{MODELS} Models on {} machines: ready after {:.1} s, {reconciles} looks of {:.0} ms on average",
        names.len(),
        took.as_secs_f64(),
        1e3 * seconds / reconciles
    );
    assert_eq!(
        operator.metric("prima_operator_reconcile_failures_total"),
        0.0
    );

    // Once the last change is handled, which takes a busy machine its time, nobody asks for anything but Leases. What is done once may come late, but
    // what is done again and again comes in each such time.
    let deadline = Instant::now() + PATIENCE;
    let mut before = test.requests();
    let mut rests_since = Instant::now();
    while rests_since.elapsed() < REST {
        thread::sleep(LOOK);
        let now = test.requests();
        let mut asked = now.clone();
        for (what, count) in &mut asked {
            *count -= before.get(what).copied().unwrap_or_default();
        }
        asked.retain(|_, count| *count != 0.0);
        if asked.is_empty() {
            continue;
        }
        println!("beside Leases and watches: {asked:?}");
        assert!(Instant::now() < deadline, "never at rest: {asked:?}");
        (before, rests_since) = (now, Instant::now());
    }
}
