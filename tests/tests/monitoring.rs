//! The chart's alerts fire on what real programs say when things are wrong, and the queries of its dashboard answer.

use std::fs;
use std::thread;

use prima_crds::v1alpha1::node_profile::LocalModel;
use prima_crds::v1alpha1::ring_plan::MemberState;
use prima_tests::api_server::{ApiServer, Backend};
use prima_tests::declared_machines::{DeclaredMachines, made_up};
use prima_tests::local_ring::{LocalRing, smollm2};
use prima_tests::machine::{Limits, Machine};
use prima_tests::machine_ring::API_KEY;
use prima_tests::monitoring::{Alert, Prometheus, Rules, Series, Target};
use prima_tests::node_agent::AgentMachine;
use prima_tests::operator::{NAMESPACE, Operator, install_chart};
use prima_tests::{Endpoint, http, inputs, wait_for, wait_until};
use serde_json::{Value, json};

const MB: u64 = 1 << 20;
/// What Prometheus itself writes of a scrape of the operator.
const UP: &str = r#"up{job="prima-operator",namespace="prima"}"#;

#[test]
fn alerts_tell_of_models_and_nodes_that_are_not_ready() {
    let (api, rules) = (cluster(), Rules::of_the_chart());
    let file = made_up();
    let machines = DeclaredMachines::start(&api, &[("desk", 20), ("pi4", 3)], &file);
    let operator = Operator::start(&api, "one");
    let metrics = || {
        Series::scraped(
            &operator.metrics(),
            &[("job", "prima-operator"), ("namespace", NAMESPACE)],
        )
    };
    apply(&api, "good", &file, "{contextLength: 512}");
    wait_until("it is ready", || {
        operator
            .metrics()
            .contains(r#"prima_model_ready{namespace="default",model="good"} 1"#)
    });
    wait_until("both nodes are", || {
        let metrics = operator.metrics();
        let is_ready = |node| metrics.contains(&format!("prima_node_ready{{node=\"{node}\"}} 1"));
        is_ready("desk") && is_ready("pi4")
    });
    rules
        .fire(&metrics().and(UP, 1.0), &[])
        .expect("no alert while all is well");

    // One that fits nowhere, one that somebody suspended, and a machine that goes.
    apply(&api, "large", &file, "{nodeSelector: {size: large}}");
    apply(&api, "asleep", &file, "{suspend: true}");
    machines.silence("pi4");
    wait_until("the node is lost", || {
        operator
            .metrics()
            .contains(r#"prima_node_ready{node="pi4"} 0"#)
    });
    wait_until("the Model says so", || {
        operator.metrics().contains(r#"model="large"} 0"#)
    });
    // What ran on both goes on without it.
    let ring = r#"jsonpath={.status.ringNodes} {.status.conditions[?(@.type=="Ready")].status}"#;
    wait_for("it answers on one machine", || {
        match api.kubectl(&["get", "model", "good", "-o", ring]) {
            Ok(ring) if ring == "1 True" => Ok(()),
            Ok(ring) => Err(ring),
            Err(error) => Err(error.to_string()),
        }
    });
    // And one that answers while a new plan loads.
    machines.stop_at("desk", MemberState::Loading);
    api.kubectl(&[
        "patch",
        "model",
        "good",
        "--type=merge",
        "-p",
        r#"{"spec": {"contextLength": 500}}"#,
    ])
    .expect("a patch");
    wait_until("it is degraded", || {
        operator
            .metrics()
            .contains(r#"prima_model_degraded{namespace="default",model="good"} 1"#)
    });
    let of_operator = [("job", "prima-operator"), ("namespace", NAMESPACE)];
    let node = [&[("node", "pi4")], &of_operator[..]].concat();
    let model = |name| {
        [
            ("model", name),
            ("namespace", "default"),
            ("job", "prima-operator"),
        ]
    };
    let (large, good) = (model("large"), model("good"));
    let expected = [
        Alert {
            name: "PrimaNodeNotReady",
            labels: &node,
            summary: "Nothing is heard of the prima agent on node pi4",
        },
        Alert {
            name: "PrimaModelNotReady",
            labels: &large,
            summary: "The model large has not been ready for 15 minutes",
        },
        Alert {
            name: "PrimaModelDegraded",
            labels: &good,
            summary: "The model good answers, but not as planned",
        },
    ];
    rules
        .fire(&metrics().and(UP, 1.0), &expected)
        .unwrap_or_else(|error| panic!("{error}"));

    // Without the operator, there is nothing but that.
    let down = [Alert {
        name: "PrimaOperatorDown",
        labels: &[],
        summary: "The prima operator does not answer",
    }];
    let none = Series::default().and(UP, 0.0);
    rules
        .fire(&none, &down)
        .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn requests_that_have_to_wait_raise_an_alert() {
    let rules = Rules::of_the_chart();
    let ring = LocalRing::builder()
        .model(&smollm2())
        .arg("--context")
        .arg("512")
        .start();
    let told = || http::get(ring.address(), "/metrics").unwrap().body;
    let scraped = |text: &str| {
        Series::scraped(
            text,
            &[
                ("job", "smollm2"),
                ("model", "smollm2"),
                ("namespace", "default"),
            ],
        )
        .and(UP, 1.0)
    };
    rules
        .fire(&scraped(&told()), &[])
        .expect("no alert while nobody waits");
    let waiting = thread::scope(|threads| {
        for number in 0..40 {
            let ring = &ring;
            threads.spawn(move || {
                let body = json!({"prompt": format!("Story {number}:"), "max_tokens": 200, "temperature": 0});
                // The ring ends before all have an answer.
                let _ = http::post(ring.address(), "/v1/completions", &body);
            });
        }
        let waiting = wait_for("somebody waits", || {
            let text = told();
            let waiting = metric(&text, "prima_requests_waiting");
            (waiting > 0.0).then_some(text).ok_or("nobody")
        });
        ring.interrupt();
        scraped(&waiting)
    });
    let labels = [
        ("job", "smollm2"),
        ("model", "smollm2"),
        ("namespace", "default"),
    ];
    let expected = [Alert {
        name: "PrimaRequestsWait",
        labels: &labels,
        summary: "Requests to the model smollm2 have to wait",
    }];
    rules
        .fire(&waiting, &expected)
        .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn memory_pressure_raises_an_alert() {
    let rules = Rules::of_the_chart();
    let machine = Machine::new("pressed", &Limits::of_memory(512 * MB), &smollm2()).unwrap();
    let ring = LocalRing::builder()
        .model(&smollm2())
        .members(1)
        .arg("--context")
        .arg("512")
        .start_on(&machine);
    let other = machine.take_memory(150 * MB).unwrap();
    // Members tell with every token.
    let text = wait_for("memory is short", || {
        ring.complete("Once", 4);
        let text = http::get(ring.address(), "/metrics").unwrap().body;
        let ratio = metric(&text, "prima_member_memory_pressure_ratio");
        (ratio > 0.05).then_some(text).ok_or(ratio)
    });
    drop(other);
    let series = Series::scraped(&text, &[("model", "smollm2")]).and(UP, 1.0);
    let expected = [Alert {
        name: "PrimaMemoryPressure",
        labels: &[("member", "m0"), ("model", "smollm2")],
        summary: "Node m0 has less memory than it had when the model smollm2 was loaded",
    }];
    rules
        .fire(&series, &expected)
        .unwrap_or_else(|error| panic!("{error}"));
    ring.stop();
}

#[test]
fn every_query_of_the_dashboard_answers() {
    let (api, rules) = (cluster(), Rules::of_the_chart());
    let folder = tempfile::tempdir().expect("a folder");
    let machine = AgentMachine::new("one", folder.path());
    api.apply(
        &json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "one"}}).to_string(),
    )
    .expect("a Node");
    let mut agent = machine.start_agent(&api, NAMESPACE);
    let operator = Operator::start(&api, "one");
    let ring = LocalRing::builder()
        .model(&smollm2())
        .members(2)
        .arg("--api-key")
        .arg(API_KEY)
        .start();
    let ask = |key| {
        let body = json!({"model": ring.model(), "prompt": "Once upon a time", "max_tokens": 4});
        let answer = http::post_with_key(ring.address(), "/v1/completions", key, &body);
        answer.expect("an answer").status
    };
    let model = json!({"namespace": "default", "model": "large"});
    agent.wait_until_ready();
    apply(&api, "large", &made_up(), "{}");
    // A member that is refused is one that is counted.
    let plan = json!({
        "apiVersion": "prima.dev/v1alpha1", "kind": "RingPlan", "metadata": {"name": "none-1", "namespace": "default"},
        "spec": {
            "generation": 1, "contextLength": 8, "maxConcurrentRequests": 1, "rounds": 1, "httpPort": 9400,
            "model": {"name": "none", "file": "/nowhere.gguf", "sizeBytes": 1, "layers": 1},
            "members": [{"name": "one", "address": format!("{}:9200", machine.address), "windows": [{"first": 0, "last": 1}]}],
        },
    });
    api.apply(&plan.to_string()).expect("a RingPlan");
    let target = |job, address, labels| Target {
        job,
        address,
        labels,
    };
    let prometheus = Prometheus::start(
        &[
            target(
                "prima-operator",
                operator.address(),
                json!({"namespace": NAMESPACE}),
            ),
            target(
                "prima-agent",
                agent.http(),
                json!({"namespace": NAMESPACE, "pod": "agent-one", "node": "one"}),
            ),
            target("large", ring.address(), model),
        ],
        &rules.file(),
    );
    let groups = prometheus.api("rules", &[]);
    let rules_there = groups["groups"][0]["rules"]
        .as_array()
        .expect("rules")
        .clone();
    assert_eq!(rules_there.len(), rules.alerts().len());

    let text = fs::read_to_string(inputs::file("charts/prima/files/dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        let Some(query) = variable["query"]
            .as_str()
            .and_then(|query| query.strip_prefix("label_values("))
        else {
            continue;
        };
        let (selector, label) = query
            .trim_end_matches(')')
            .rsplit_once(", ")
            .expect("a label");
        let selector = filled(selector);
        wait_until(&format!("{selector} has {label}"), || {
            let values =
                prometheus.api(&format!("label/{label}/values"), &[("match[]", &selector)]);
            values.as_array().is_some_and(|values| !values.is_empty())
        });
    }
    let mut queries = 0;
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let query = filled(target["expr"].as_str().expect("a query"));
            let answer = wait_for(&format!("{}: {query}", panel["title"]), || {
                assert_eq!(ask(API_KEY), 200);
                // What is refused is counted, too.
                assert_eq!(ask("another"), 401);
                let answer = prometheus.query(&query);
                let there = !answer.is_empty();
                there.then_some(answer).ok_or("no answer")
            });
            // What the legend names is there.
            let legend = target["legendFormat"].as_str().unwrap_or_default();
            for label in legend
                .split("{{")
                .skip(1)
                .filter_map(|part| part.split("}}").next())
            {
                assert!(
                    answer[0]["metric"][label].is_string(),
                    "{legend} of {query}: {}",
                    answer[0]
                );
            }
            queries += 1;
        }
    }
    assert!(queries > 20, "only {queries} queries");
    ring.stop();
}

/// A query as Grafana sends it, with all namespaces and models chosen.
fn filled(query: &str) -> String {
    query
        .replace("$__rate_interval", "10s")
        .replace("$namespace", ".*")
        .replace("$model", ".*")
}

fn cluster() -> ApiServer {
    let api = ApiServer::start(Backend::Kine);
    install_chart(&api);
    api
}

/// A Model of the file that declared machines have.
fn apply(api: &ApiServer, name: &str, file: &LocalModel, spec: &str) {
    let mut spec: Value = serde_saphyr::from_str(spec).expect("YAML");
    spec["source"] = json!({"hostPath": {"path": file.path}});
    let model = json!({"apiVersion": "prima.dev/v1alpha1", "kind": "Model", "metadata": {"name": name, "namespace": "default"}, "spec": spec});
    api.apply(&model.to_string()).expect("a Model");
}

/// The sum of a metric's series.
fn metric(text: &str, name: &str) -> f64 {
    let lines = text.lines().filter(|line| line.starts_with(name));
    let values = lines.map(|line| line.rsplit_once(' ').expect("a value").1);
    values
        .map(|value| value.parse::<f64>().expect("a number"))
        .sum()
}
