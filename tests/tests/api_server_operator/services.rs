//! How a Model is reached: with keys from a Secret, by a Service, and at the addresses of its agents.

use std::collections::BTreeMap;

use prima_crds::v1alpha1::api_keys::{API_KEYS, ApiKeys};
use prima_tests::api_server::Backend;
use prima_tests::operator::{NAMESPACE, Operator, upgrade_chart};
use prima_tests::{wait_for, wait_until};
use serde_json::{Value, json};

use crate::harness::{MACHINES, Test, model};

#[test]
fn an_api_key_comes_from_a_secret_and_no_ring_runs_without_it() {
    let test = Test::start(Backend::Etcd);
    let _machines = test.machines(&MACHINES);
    let operator = Operator::start(&test.api, "one");
    let looks = std::cell::Cell::new(0);
    let look = || {
        // Whatever changes the Model makes it look again.
        looks.set(looks.get() + 1);
        let label = format!(
            r#"{{"metadata":{{"labels":{{"look":"{}"}}}}}}"#,
            looks.get()
        );
        test.patch("model/made-up", &label);
    };
    let lacks = |what: &str| {
        look();
        wait_until(what, || {
            let (status, reason, message) = test.condition("model/made-up", "Ready");
            (status.as_str(), reason.as_str()) == ("False", "NoApiKey") && message.contains(what)
        });
        assert!(test.names("ringplans").is_empty());
    };
    let secret = |data: &str| {
        let secret = format!(
            "{{apiVersion: v1, kind: Secret, metadata: {{name: keys, namespace: default}}, stringData: {{{data}}}}}"
        );
        test.api.apply(&secret).expect("a Secret");
    };
    // The only plan, and the keys that it tells.
    let told = || {
        let plans = test.object("ringplans");
        let [plan] = plans["items"].as_array().expect("plans").as_slice() else {
            panic!("not one plan: {plans}");
        };
        let keys = plan["metadata"]["annotations"][API_KEYS].as_str();
        let keys = ApiKeys::from_json(keys.expect("the keys")).expect("keys of ours");
        (plan["metadata"]["uid"].clone(), keys)
    };
    let spec = "apiKeySecretRef: {name: keys, key: key}";
    test.api.apply(&model("made-up", spec)).expect("a model");
    lacks("there is no Secret default/keys");
    secret("other: open-sesame");
    lacks("the Secret default/keys has nothing at key key");
    // Its message changes in between, which shows that it has looked.
    test.kubectl(&["delete", "secret", "keys"]);
    lacks("there is no Secret default/keys");
    secret("key: \"  \"");
    lacks("the Secret default/keys has nothing at key key");

    // White space around it is an editor's.
    secret("key: \" open-sesame\\n\"");
    look();
    test.wait_for("model/made-up", "Ready", "True", &operator);
    let (plan, keys) = told();
    let salt = keys.salt.clone();
    let listed = |keys: &[(&str, &str)]| -> BTreeMap<String, String> {
        let digest = |key: &str| ApiKeys::digest(&salt, key.as_bytes());
        let keys = keys.iter();
        keys.map(|(name, key)| (name.to_string(), digest(key)))
            .collect()
    };
    assert_eq!(keys.sha256, listed(&[("key", "open-sesame")]));
    let text = test.kubectl(&["get", "ringplans", "-o", "yaml"]);
    assert!(!text.contains("sesame"), "{text}");

    // What changes is told to the ring that runs: nobody touches the Model, and its plan stays.
    let tells = |keys: &[(&str, &str)]| {
        wait_for("the ring is told", || match told().1 {
            now if now.sha256 == listed(keys) => Ok(()),
            now => Err(format!("{now:?}, {}", operator.log_tail())),
        });
        assert_eq!(told().0, plan);
    };
    secret("key: close-sesame");
    tells(&[("key", "close-sesame")]);
    // All entries, by their names, and what each may use.
    let all =
        r#"{"spec": {"apiKeySecretRef": {"key": null}, "apiKeyLimits": {"tokensPerMinute": 600}}}"#;
    test.patch("model/made-up", all);
    secret("key: close-sesame, alice: abc, bob: \"\"");
    tells(&[("key", "close-sesame"), ("alice", "abc")]);
    assert_eq!(told().1.limits.tokens_per_minute, Some(600));
    let revoked = r#"{"data": {"key": null}, "stringData": {"bob": "abd"}}"#;
    test.patch("secret/keys", revoked);
    tells(&[("alice", "abc"), ("bob", "abd")]);
    test.kubectl(&["delete", "secret", "keys"]);
    wait_until("no ring runs without keys", || {
        test.names("ringplans").is_empty()
    });
    // The status is written after the ring has ended.
    wait_until("it says so", || {
        test.condition("model/made-up", "Ready").1 == "NoApiKey"
    });
    // It is noticed that they are there again.
    secret("key: close-sesame");
    test.wait_for("model/made-up", "Ready", "True", &operator);

    // A cluster may keep its Secrets from the operator. The API server hears of roles that are gone a moment later.
    upgrade_chart(&test.api, &["--set", "operator.secretAccess=false"]);
    let account = format!("--as=system:serviceaccount:{NAMESPACE}:prima-operator");
    wait_until("the operator may not read Secrets", || {
        let may = ["auth", "can-i", "get", "secrets", "--quiet"];
        test.api.kubectl(&[&may[..], &[&account]].concat()).is_err()
    });
    lacks("the operator may not read the Secret default/keys");
}

#[test]
fn a_service_of_somebody_else_is_left_alone() {
    let test = Test::start(Backend::Etcd);
    let _machines = test.machines(&MACHINES);
    let theirs = "{apiVersion: v1, kind: Service, metadata: {name: made-up, namespace: default}, spec: {ports: [{port: 5432}]}}";
    test.api.apply(theirs).expect("a Service");
    let operator = Operator::start(&test.api, "one");
    let spec = "serviceType: NodePort";
    test.api.apply(&model("made-up", spec)).expect("a model");
    wait_until("it says so", || {
        let events = [
            "get",
            "events.events.k8s.io",
            "-o",
            "jsonpath={.items[*].note}",
        ];
        let said = test.kubectl(&events);
        said.contains("there is a Service default/made-up of somebody else")
    });
    let service = test.object("service/made-up");
    assert_eq!(service["spec"]["ports"][0]["port"], 5432, "{service}");
    assert_eq!(service["metadata"]["ownerReferences"], Value::Null);

    test.kubectl(&["delete", "service", "made-up"]);
    test.wait_for("model/made-up", "Ready", "True", &operator);
    let service = test.object("service/made-up");
    assert_eq!(service["spec"]["type"], "NodePort");
    assert_eq!(service["spec"]["ports"][0]["port"], 80);
    assert!(service["spec"]["ports"][0]["nodePort"].as_i64() >= Some(30_000));

    // What spec.service says counts more, and goes when it is taken back.
    let wishes =
        json!({"type": "LoadBalancer", "port": 8081, "annotations": {"example.com/pool": "home"}});
    let patch = json!({"spec": {"service": wishes}}).to_string();
    test.patch("model/made-up", &patch);
    let as_wished = |port: i64, type_: &str, pool: Value| {
        let service = test.object("service/made-up");
        let found = &service["metadata"]["annotations"]["example.com/pool"];
        service["spec"]["ports"][0]["port"] == port
            && service["spec"]["type"] == type_
            && *found == pool
    };
    wait_until("the Service is as wished", || {
        as_wished(8081, "LoadBalancer", json!("home"))
    });
    wait_until("the endpoint has the port", || {
        let model = test.object("model/made-up");
        model["status"]["endpoint"] == "http://made-up.default.svc.cluster.local:8081/v1"
    });
    test.patch("model/made-up", r#"{"spec":{"service":null}}"#);
    wait_until("it is as before", || as_wished(80, "NodePort", Value::Null));
}

#[test]
fn rings_are_reached_by_ipv6_where_agents_are() {
    let test = Test::start(Backend::Etcd);
    let machines = test.machines(&[("desk", 9)]);
    let operator = Operator::start(&test.api, "one");
    let endpoints = |family: &str| {
        let slice = test.object(&format!("endpointslice/made-up-{family}"));
        assert_eq!(
            slice["addressType"]
                .as_str()
                .map(str::to_lowercase)
                .as_deref(),
            Some(family)
        );
        let endpoints = slice["endpoints"].as_array().cloned().unwrap_or_default();
        let addresses = endpoints.iter().map(|one| one["addresses"][0].clone());
        addresses.collect::<Vec<_>>()
    };
    test.api.apply(&model("made-up", "")).expect("a model");
    test.wait_for("model/made-up", "Ready", "True", &operator);
    assert_eq!(endpoints("ipv4"), ["10.1.0.1"]);

    machines.change("desk", |profile| {
        let status = profile.status.as_mut().expect("a status");
        status.agent.as_mut().expect("an agent").address = "fd00::1".to_owned();
    });
    // Until its status is written anew, the Model is ready by the plan before.
    wait_until("another plan serves", || {
        let status = test.object("model/made-up")["status"].take();
        let conditions = status["conditions"].as_array().expect("conditions");
        let is_ready = |one: &Value| one["type"] == "Ready" && one["status"] == "True";
        status["planGeneration"] == 2 && conditions.iter().any(is_ready)
    });
    assert_eq!(test.names("ringplans"), ["made-up-2"]);
    let plan = test.object("ringplan/made-up-2");
    let port = plan["spec"]["httpPort"].as_i64().expect("a port") - 200;
    assert_eq!(
        plan["spec"]["members"][0]["address"],
        format!("[fd00::1]:{port}")
    );
    assert_eq!(endpoints("ipv6"), ["fd00::1"]);
    assert!(endpoints("ipv4").is_empty());
}
