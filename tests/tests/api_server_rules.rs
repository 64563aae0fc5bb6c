//! What a real API server refuses: every rule of the resources' schemas by one object that keeps it and one that breaks it, and
//! every verb on every resource that the operator's and the agents' accounts do not need.

use std::collections::BTreeSet;

use prima_tests::api_server::{ApiServer, Backend};
use prima_tests::operator::{NAMESPACE, install_chart, upgrade_chart};
use prima_tests::{wait_for, wait_until};
use serde_json::{Value, json};

/// What a rule is about: the object's change that breaks it, and a part of what the API server says.
type Case = (&'static str, fn(&mut Value), &'static str);

#[test]
fn every_rule_of_a_model_takes_the_good_and_refuses_the_bad() {
    let api = with_definitions();
    let full = json!({
        "apiVersion": "prima.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": "good", "namespace": "default"},
        "spec": {
            "source": {"huggingFace": {"repo": "Qwen/Qwen2.5-14B-Instruct-GGUF", "file": "a/qwen2.5.gguf", "revision": "refs/pr/1", "endpoint": "https://hub.example"}},
            "contextLength": 4096,
            "maxConcurrentRequests": 4,
            "nodeSelector": {"place": "office"},
            "minNodes": 2,
            "rank0": "desk",
            "activationDtype": "BF16",
            "kvDtype": "Q8_0",
            "apiKeySecretRef": {"name": "keys", "key": "prima"},
            "speculation": {"draft": {"huggingFace": {"repo": "Qwen/Qwen2.5-0.5B-Instruct-GGUF", "file": "qwen2.5-0.5b.gguf"}}},
            "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"example.com/pool": "home"}},
            "serviceType": "NodePort",
            "priority": 1000,
            "suspend": true,
        },
    });
    accepted(&api, &full);
    for source in [
        json!({"url": {"url": "https://files.example/a.gguf", "sha256": "0".repeat(64), "allowFullDownload": true}}),
        json!({"hostPath": {"path": "/srv/models/a.gguf"}}),
        json!({"persistentVolumeClaim": {"claimName": "models", "path": "a/b.gguf"}}),
    ] {
        let mut model = full.clone();
        model["spec"]["speculation"]["draft"] = source.clone();
        model["spec"]["source"] = source;
        accepted(&api, &model);
    }
    let cases: &[Case] = &[
        (
            "no source",
            |m| m["spec"]["source"] = json!({}),
            "expected exactly one of huggingFace, url, hostPath, persistentVolumeClaim",
        ),
        (
            "two sources",
            |m| m["spec"]["source"]["hostPath"] = json!({"path": "/a.gguf"}),
            "expected exactly one of",
        ),
        (
            "a name that is no Service's",
            |m| m["metadata"]["name"] = json!("qwen2.5-14b"),
            "metadata.name names a Service, too",
        ),
        (
            "a name that starts with a digit",
            |m| m["metadata"]["name"] = json!("7b"),
            "metadata.name names a Service, too",
        ),
        (
            "a long name",
            |m| m["metadata"]["name"] = json!("a".repeat(51)),
            "metadata.name names a Service, too",
        ),
        (
            "a repository without an owner",
            |m| m["spec"]["source"]["huggingFace"]["repo"] = json!("qwen"),
            "spec.source.huggingFace.repo",
        ),
        (
            "a way out of the repository",
            |m| m["spec"]["source"]["huggingFace"]["file"] = json!("../a.gguf"),
            "expected the path of a .gguf file in the repository",
        ),
        (
            "another kind of file",
            |m| m["spec"]["source"]["huggingFace"]["file"] = json!("model.safetensors"),
            "expected the path of a .gguf file in the repository",
        ),
        (
            "an endpoint that is no address",
            |m| m["spec"]["source"]["huggingFace"]["endpoint"] = json!("hub"),
            "endpoint",
        ),
        (
            "an empty revision",
            |m| m["spec"]["source"]["huggingFace"]["revision"] = json!(""),
            "revision",
        ),
        (
            "a URL of another scheme",
            |m| m["spec"]["source"] = json!({"url": {"url": "file:///etc/passwd"}}),
            "spec.source.url.url",
        ),
        (
            "a short checksum",
            |m| m["spec"]["source"] = json!({"url": {"url": "https://a/b.gguf", "sha256": "abc"}}),
            "sha256",
        ),
        (
            "a relative path",
            |m| m["spec"]["source"] = json!({"hostPath": {"path": "models/a.gguf"}}),
            "expected the absolute path of a .gguf file",
        ),
        (
            "a path that goes back",
            |m| m["spec"]["source"] = json!({"hostPath": {"path": "/models/../etc/a.gguf"}}),
            "expected the absolute path of a .gguf file",
        ),
        (
            "an absolute path in a volume",
            |m| {
                m["spec"]["source"] =
                    json!({"persistentVolumeClaim": {"claimName": "a", "path": "/a.gguf"}})
            },
            "expected the path of a .gguf file in the volume",
        ),
        (
            "a claim's name",
            |m| {
                m["spec"]["source"] =
                    json!({"persistentVolumeClaim": {"claimName": "../a", "path": "a.gguf"}})
            },
            "claimName",
        ),
        (
            "no context",
            |m| m["spec"]["contextLength"] = json!(0),
            "spec.contextLength",
        ),
        (
            "no requests",
            |m| m["spec"]["maxConcurrentRequests"] = json!(0),
            "spec.maxConcurrentRequests",
        ),
        (
            "no machine",
            |m| m["spec"]["minNodes"] = json!(0),
            "spec.minNodes",
        ),
        (
            "a number format",
            |m| m["spec"]["activationDtype"] = json!("F64"),
            "spec.activationDtype",
        ),
        (
            "a number format of the KV cache",
            |m| m["spec"]["kvDtype"] = json!("F32"),
            "spec.kvDtype",
        ),
        (
            "a draft model from nowhere",
            |m| m["spec"]["speculation"]["draft"] = json!({}),
            "spec.speculation.draft: Invalid value: expected exactly one of",
        ),
        (
            "a draft model from two places",
            |m| m["spec"]["speculation"]["draft"]["hostPath"] = json!({"path": "/a.gguf"}),
            "expected exactly one of",
        ),
        (
            "a draft model of another kind of file",
            |m| m["spec"]["speculation"]["draft"] = json!({"hostPath": {"path": "/a.bin"}}),
            "expected the absolute path of a .gguf file",
        ),
        (
            "a service's port",
            |m| m["spec"]["service"]["port"] = json!(0),
            "spec.service.port",
        ),
        (
            "a service's type",
            |m| m["spec"]["service"]["type"] = json!("ExternalName"),
            "spec.service.type",
        ),
        (
            "a service type",
            |m| m["spec"]["serviceType"] = json!("ExternalName"),
            "spec.serviceType",
        ),
        (
            "a priority that is too high",
            |m| m["spec"]["priority"] = json!(1001),
            "spec.priority",
        ),
        (
            "a priority that is too low",
            |m| m["spec"]["priority"] = json!(-1001),
            "spec.priority",
        ),
        (
            "a key's empty name",
            |m| m["spec"]["apiKeySecretRef"]["name"] = json!(""),
            "spec.apiKeySecretRef.name",
        ),
    ];
    refused(&api, &full, cases);
}

#[test]
fn rules_of_profiles_and_plans_refuse_only_the_bad() {
    let api = with_definitions();
    let profile = json!({
        "apiVersion": "prima.dev/v1alpha1",
        "kind": "NodeProfile",
        "metadata": {"name": "desk"},
        "spec": {"exclude": true, "reservedMemoryBytes": 1, "memoryCapBytes": 0, "diskAllowed": false},
    });
    accepted(&api, &profile);
    for memory in [json!("8Gi"), json!("1.5Ti"), json!("500M"), json!(8 << 30)] {
        let mut profile = profile.clone();
        profile["spec"] = json!({"reservedMemory": memory, "memoryCap": memory});
        accepted(&api, &profile);
    }
    let cases: &[Case] = &[
        (
            "a unit of another kind",
            |p| p["spec"] = json!({"reservedMemory": "8GB"}),
            "spec.reservedMemory",
        ),
        (
            "a negative quantity",
            |p| p["spec"] = json!({"memoryCap": -1}),
            "spec.memoryCap",
        ),
        (
            "a reserve twice",
            |p| p["spec"]["reservedMemory"] = json!("1Gi"),
            "reservedMemory and reservedMemoryBytes are the same",
        ),
        (
            "a cap twice",
            |p| p["spec"]["memoryCap"] = json!("1Gi"),
            "memoryCap and memoryCapBytes are the same",
        ),
        (
            "a negative reserve",
            |p| p["spec"]["reservedMemoryBytes"] = json!(-1),
            "spec.reservedMemoryBytes",
        ),
        (
            "a negative cap",
            |p| p["spec"]["memoryCapBytes"] = json!(-1),
            "spec.memoryCapBytes",
        ),
        (
            "a word for a flag",
            |p| p["spec"]["exclude"] = json!("yes"),
            "spec.exclude",
        ),
    ];
    refused(&api, &profile, cases);

    let plan = json!({
        "apiVersion": "prima.dev/v1alpha1",
        "kind": "RingPlan",
        "metadata": {"name": "ring-1", "namespace": "default"},
        "spec": {
            "generation": 1,
            "model": {"name": "ring", "file": "/a.gguf", "sizeBytes": 1, "layers": 2},
            "contextLength": 1,
            "maxConcurrentRequests": 1,
            "rounds": 1,
            "httpPort": 9400,
            "members": [{"name": "desk", "address": "10.0.0.1:9200", "windows": [{"first": 0, "last": 2}]}],
        },
    });
    accepted(&api, &plan);
    let cases: &[Case] = &[
        (
            "too many members",
            |p| p["spec"]["members"] = json!(vec![p["spec"]["members"][0].clone(); 257]),
            "spec.members",
        ),
        (
            "a port",
            |p| p["spec"]["httpPort"] = json!(65536),
            "spec.httpPort",
        ),
        (
            "a number format",
            |p| p["spec"]["activationDtype"] = json!("F64"),
            "spec.activationDtype",
        ),
        (
            "a number format of the KV cache",
            |p| p["spec"]["kvDtype"] = json!("F32"),
            "spec.kvDtype",
        ),
        (
            "a key in capitals",
            |p| p["spec"]["members"][0]["publicKeySha256"] = json!("A".repeat(64)),
            "spec.members[0].publicKeySha256",
        ),
        (
            "a digest that is too long",
            |p| p["spec"]["apiKeySha256"] = json!(["0".repeat(65)]),
            "spec.apiKeySha256",
        ),
    ];
    refused(&api, &plan, cases);

    // A plan does not change.
    api.apply(&plan.to_string()).expect("a plan");
    api.apply(&plan.to_string()).expect("the same plan");
    let mut other = plan.clone();
    other["spec"]["contextLength"] = json!(2);
    let error = api
        .apply(&other.to_string())
        .expect_err("another plan")
        .to_string();
    assert!(error.contains("a RingPlan does not change"), "{error}");
}

#[test]
fn the_accounts_have_the_verbs_that_they_need_and_no_others() {
    let api = ApiServer::start(Backend::Etcd);
    install_chart(&api);
    let expected = set(&[
        ("ringplans.prima.dev", "get list watch"),
        ("ringplans.prima.dev/status", "patch"),
        ("models.prima.dev", "get list watch"),
        ("nodeprofiles.prima.dev", "get list watch create patch"),
        ("nodeprofiles.prima.dev/status", "patch"),
        ("nodes", "get"),
        ("leases.coordination.k8s.io", "create patch"),
    ]);
    assert_eq!(allowed(&api, "prima-agent", &expected), expected);
    let mut expected = set(&[
        ("models.prima.dev", "get list watch"),
        ("models.prima.dev/status", "patch"),
        ("models.prima.dev/finalizers", "update"),
        ("ringplans.prima.dev", "get list watch create patch delete"),
        ("nodeprofiles.prima.dev", "get list watch"),
        ("nodeprofiles.prima.dev/status", "patch"),
        ("services", "get list watch create patch"),
        ("endpointslices.discovery.k8s.io", "list watch create patch"),
        ("nodes", "list watch"),
        ("resourcequotas", "list watch"),
        ("events.events.k8s.io", "create patch"),
        (
            "leases.coordination.k8s.io",
            "get list watch create update patch",
        ),
        ("secrets", "get"),
    ]);
    assert_eq!(allowed(&api, "prima-operator", &expected), expected);
    // Where agents mount claims, it tells what these lack.
    upgrade_chart(&api, &["--set", "agent.persistentVolumeClaims={models}"]);
    expected.extend(set(&[("persistentvolumeclaims", "list watch")]));
    assert_eq!(allowed(&api, "prima-operator", &expected), expected);

    // What the cluster's own roles get of the chart. Plans have digests of API keys: they have a role of their own.
    bind(&api, "prima-view", "viewer");
    let expected = set(&[
        ("models.prima.dev", "get list watch"),
        ("nodeprofiles.prima.dev", "get list watch"),
    ]);
    assert_eq!(allowed(&api, "viewer", &expected), expected);
    bind(&api, "prima-edit", "editor");
    let expected = set(&[(
        "models.prima.dev",
        "create update patch delete deletecollection",
    )]);
    assert_eq!(allowed(&api, "editor", &expected), expected);
    bind(&api, "prima-ring-plans", "reader");
    let expected = set(&[("ringplans.prima.dev", "get list watch")]);
    assert_eq!(allowed(&api, "reader", &expected), expected);
}

/// An agent that is in other hands must not open the cluster's Secrets.
#[test]
fn of_secrets_the_accounts_get_the_hubs_token_by_its_name() {
    let api = ApiServer::start(Backend::Etcd);
    install_chart(&api);
    upgrade_chart(&api, &["--set", "operator.secretAccess=false"]);
    let may = |account: &str, verb: &str, what: &str| {
        let account = format!("--as=system:serviceaccount:{NAMESPACE}:{account}");
        let may = ["auth", "can-i", verb, what, "--quiet", &account];
        let anywhere = ["--namespace", "default"];
        api.kubectl(&[&may[..], &anywhere].concat()).is_ok()
    };
    for account in ["prima-agent", "prima-operator"] {
        wait_until(account, || may(account, "get", "secrets/prima-hub"));
        // The API server hears of a role that is gone a moment later.
        wait_until(account, || !may(account, "get", "secrets/other"));
        for verb in ["list", "watch", "update", "patch", "delete"] {
            assert!(
                !may(account, verb, "secrets/prima-hub"),
                "{account}: {verb}"
            );
        }
    }
    bind(&api, "prima-edit", "editor");
    wait_until("editors write Models", || {
        may("editor", "create", "models.prima.dev")
    });
    assert!(!may("editor", "get", "secrets/prima-hub"));
}

/// Gives an account of the chart's namespace a role. (Nothing aggregates roles where only an API server runs.)
fn bind(api: &ApiServer, role: &str, account: &str) {
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": account},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}],
    });
    api.apply(&binding.to_string()).expect("a binding");
}

/// What the API server allows an account once it has heard of the roles that give these rights, which is a moment after they are made.
fn allowed(
    api: &ApiServer,
    account: &str,
    needed: &BTreeSet<(String, String)>,
) -> BTreeSet<(String, String)> {
    wait_for(account, || {
        let allowed = allowed_now(api, account);
        let missing: Vec<_> = needed.difference(&allowed).collect();
        match missing.is_empty() {
            true => Ok(allowed),
            false => Err(format!("it lacks {missing:?}")),
        }
    })
}

/// Which of these verbs on these resources the API server allows an account in the chart's namespace.
fn allowed_now(api: &ApiServer, account: &str) -> BTreeSet<(String, String)> {
    const RESOURCES: [&str; 22] = [
        "models.prima.dev",
        "models.prima.dev/status",
        "models.prima.dev/finalizers",
        "nodeprofiles.prima.dev",
        "nodeprofiles.prima.dev/status",
        "ringplans.prima.dev",
        "ringplans.prima.dev/status",
        "services",
        "endpointslices.discovery.k8s.io",
        "nodes",
        "nodes/status",
        "resourcequotas",
        "persistentvolumeclaims",
        "events.events.k8s.io",
        "leases.coordination.k8s.io",
        "secrets",
        "configmaps",
        "pods",
        "pods/exec",
        "daemonsets.apps",
        "clusterroles.rbac.authorization.k8s.io",
        "serviceaccounts/token",
    ];
    const VERBS: [&str; 9] = [
        "get",
        "list",
        "watch",
        "create",
        "update",
        "patch",
        "delete",
        "deletecollection",
        "impersonate",
    ];
    let user = format!("system:serviceaccount:{NAMESPACE}:{account}");
    let asked: Vec<(&str, &str)> = RESOURCES
        .into_iter()
        .flat_map(|resource| VERBS.map(|verb| (resource, verb)))
        .collect();
    let reviews: Vec<String> = asked
        .iter()
        .map(|(resource, verb)| {
            let (full, subresource) = resource.split_once('/').unwrap_or((resource, ""));
            let (name, group) = full.split_once('.').unwrap_or((full, ""));
            let review = json!({
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {"user": user, "resourceAttributes": {
                    "namespace": NAMESPACE, "verb": verb, "group": group, "resource": name, "subresource": subresource,
                }},
            });
            review.to_string()
        })
        .collect();
    let answers = api.create(&reviews.join("\n---\n")).expect("reviews");
    let answers: Vec<Value> = serde_json::Deserializer::from_str(&answers)
        .into_iter()
        .collect::<Result<_, _>>()
        .expect("JSON");
    // Alone or in a list.
    let answers: Vec<Value> = answers
        .into_iter()
        .flat_map(|answer| match answer["items"].as_array() {
            Some(items) => items.clone(),
            None => vec![answer],
        })
        .collect();
    assert_eq!(answers.len(), asked.len());
    asked
        .iter()
        .zip(&answers)
        .filter(|(_, answer)| answer["status"]["allowed"] == true)
        .map(|((resource, verb), answer)| {
            assert_eq!(answer["spec"]["resourceAttributes"]["verb"], *verb);
            ((*resource).to_owned(), (*verb).to_owned())
        })
        .collect()
}

fn set(rules: &[(&str, &str)]) -> BTreeSet<(String, String)> {
    let pairs = rules.iter().flat_map(|(resource, verbs)| {
        verbs
            .split(' ')
            .map(|verb| ((*resource).to_owned(), verb.to_owned()))
    });
    pairs.collect()
}

fn with_definitions() -> ApiServer {
    let api = ApiServer::start(Backend::Etcd);
    for definition in prima_crds::definitions::all() {
        let yaml = prima_crds::definitions::yaml(&definition).expect("YAML");
        api.apply(&yaml).expect("a definition");
    }
    api.wait_for_definitions();
    api
}

fn accepted(api: &ApiServer, object: &Value) {
    if let Err(error) = api.try_out(&object.to_string()) {
        panic!("{object}: {error}");
    }
}

fn refused(api: &ApiServer, good: &Value, cases: &[Case]) {
    for (what, change, said) in cases {
        let mut object = good.clone();
        change(&mut object);
        match api.try_out(&object.to_string()) {
            Ok(_) => panic!("{what} is accepted: {object}"),
            Err(error) => {
                let error = error.to_string();
                assert!(
                    error.contains(said),
                    "{what} is refused, but not with {said:?}: {error}"
                );
            }
        }
    }
}
