//! What many Models on many machines cost: until all are ready, and at rest.

use std::thread;
use std::time::{Duration, Instant};

use prima_tests::api_server::Backend;
use prima_tests::operator::Operator;
use prima_tests::wait_until;

use crate::harness::{Test, model};

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
    wait_until("all are ready", || {
        operator.metric("prima_operator_ready_models") == MODELS as f64
    });
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

    // Once the last change is handled, which takes a busy machine its time, nobody asks for anything but Leases.
    let done = || {
        let begun = operator.metric("prima_operator_reconciles_total");
        let ended = operator.metric("prima_operator_reconcile_seconds_count");
        (begun == ended).then(|| (test.requests(), begun))
    };
    wait_until("the last change is handled", || {
        let before = done();
        thread::sleep(Duration::from_secs(10));
        before.is_some() && done() == before
    });
    let before = test.requests();
    let rest = Duration::from_secs(20);
    thread::sleep(rest);
    let asked = test.requests() - before;
    println!(
        "at rest: {asked} requests in {} s beside Leases and watches",
        rest.as_secs()
    );
    assert_eq!(asked, 0.0);
}
