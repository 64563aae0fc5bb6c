//! Which operator leads, on a real API server: no clock but the watcher's own decides.

use std::thread;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use prima_tests::api_server::{ApiServer, Backend};
use prima_tests::operator::{NAMESPACE, Operator, USUAL_LEASE, install_chart};
use prima_tests::wait_until;
use serde_json::{Value, json};

const LEASE: &str = "prima-operator";

#[test]
fn a_holder_leads_whatever_year_it_thinks_it_is() {
    let api = api_server();
    let year = |second: i64| Timestamp::from_second(second).expect("a time");
    // Nobody stalls for that long between two renewals.
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": LEASE, "namespace": NAMESPACE},
        "spec": spec("board", year(0), 120),
    });
    api.apply(&lease.to_string()).expect("a Lease");
    let operator = Operator::start_with(&api, "one", &[("PRIMA_LEADER_LEASE", "15")]);
    wait_until("it waits", || operator.ready() == "waits to lead");
    let begun = Instant::now();
    for second in 1.. {
        renew(&api, "board", year(second), 120);
        assert_eq!(operator.ready(), "waits to lead", "second {second} of 1970");
        if begun.elapsed() > Duration::from_secs(15) {
            break;
        }
        thread::sleep(Duration::from_secs(1));
    }
    // One that is years ahead, and silent.
    renew(&api, "board", year(4_070_908_800), 5);
    wait_until("the silent one is replaced", || operator.ready() == "leads");
    assert_eq!(holder(&api), "one");

    // Nobody can know who leads without an API server.
    drop(api);
    assert!(!operator.wait_for_end().success());
}

#[test]
fn a_deleted_lease_is_made_again_and_a_taken_one_given_up() {
    let api = api_server();
    let operator = Operator::start_with(&api, "one", &[USUAL_LEASE]);
    wait_until("it leads", || operator.ready() == "leads");
    api.kubectl(&["delete", "lease", LEASE, "-n", NAMESPACE])
        .expect("is deleted");
    wait_until("the Lease is there again", || {
        api.object(NAMESPACE, &format!("lease/{LEASE}")).is_ok()
    });
    assert_eq!(holder(&api), "one");
    assert_eq!(operator.ready(), "leads");

    renew(&api, "another", Timestamp::now(), 120);
    assert!(!operator.wait_for_end().success());
    assert_eq!(holder(&api), "another");
}

fn api_server() -> ApiServer {
    let api = ApiServer::start(Backend::Kine);
    install_chart(&api);
    api
}

/// Makes this one the holder, which last renewed at `renewed`.
fn renew(api: &ApiServer, holder: &str, renewed: Timestamp, seconds: i32) {
    let patch = json!({"spec": spec(holder, renewed, seconds)}).to_string();
    let object = ["patch", "lease", LEASE, "-n", NAMESPACE];
    api.kubectl(&[&object[..], &["--type=merge", "-p", &patch]].concat())
        .expect("a Lease");
}

fn spec(holder: &str, renewed: Timestamp, seconds: i32) -> Value {
    // With the six digits that the API wants.
    let renewed = format!("{renewed:.6}");
    json!({"holderIdentity": holder, "leaseDurationSeconds": seconds, "renewTime": renewed})
}

fn holder(api: &ApiServer) -> String {
    let lease = api.object(NAMESPACE, &format!("lease/{LEASE}"));
    let lease = lease.expect("a Lease");
    let holder = lease["spec"]["holderIdentity"].as_str();
    holder.expect("a holder").to_owned()
}
