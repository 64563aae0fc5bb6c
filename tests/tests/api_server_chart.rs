//! What a real API server says of the chart: it takes every document of every scenario as it stands, as kubeconform does, finds no fault in the
//! types of the admission policies' expressions, and lets an agent write what is its own and nothing else.

use std::fs;
use std::path::Path;

use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_tests::api_server::{ApiServer, Backend};
use prima_tests::operator::{chart_before, ring_plan};
use prima_tests::programs::program;
use prima_tests::{definitions, inputs, timeout_argument, wait_for, wait_until};
use serde_json::{Map, Value};
use tempfile::{NamedTempFile, TempDir};

#[test]
fn api_server_and_kubeconform_take_the_chart_and_samples() {
    let mut api = ApiServer::start(Backend::Etcd);
    api.start_controller_manager();
    for namespace in ["prima", "prima-agents", "models"] {
        api.kubectl(&["create", "namespace", namespace])
            .expect("a namespace");
        default_account_is_there(&api, namespace);
    }
    install_all_definitions(&api);
    let kubeconform = Kubeconform::of(&api);
    for scenario in files_of("charts/prima/ci") {
        let rendered = template(&api, &["--values", &scenario]);
        api.try_out(&rendered)
            .unwrap_or_else(|error| panic!("{scenario}: {error}"));
        kubeconform.finds_no_fault(&scenario, &rendered);
    }
    for sample in files_of("charts/prima/samples") {
        let text = fs::read_to_string(&sample).expect("a sample");
        api.try_out(&text)
            .unwrap_or_else(|error| panic!("{sample}: {error}"));
    }
}

/// It knows the kinds of an API server.
struct Kubeconform<'a> {
    api: &'a ApiServer,
    folder: TempDir,
}

impl<'a> Kubeconform<'a> {
    fn of(api: &'a ApiServer) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        write_schemas(api, folder.path());
        Kubeconform { api, folder }
    }

    fn finds_no_fault(&self, scenario: &str, rendered: &str) {
        let location = format!(
            "{}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json",
            self.folder.path().display()
        );
        let path = self.folder.path().join("rendered.yaml");
        fs::write(&path, rendered).expect("a file");
        let mut kubeconform = self.api.command(program("kubeconform"));
        kubeconform
            .args([
                "-strict",
                "-summary",
                "-skip",
                "CustomResourceDefinition",
                "-schema-location",
                &location,
            ])
            .arg(&path);
        let output = kubeconform.output().expect("kubeconform");
        let summary = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{scenario}: {summary}");
        let valid = summary
            .split("Valid: ")
            .nth(1)
            .and_then(|rest| rest.split(',').next());
        let valid: usize = valid
            .and_then(|count| count.trim().parse().ok())
            .expect("a count");
        assert!(valid >= 10, "{scenario}: {summary}");
    }
}

/// What the API server says of its resources, as kubeconform reads it: one file per kind, which allows nothing that it does not name.
fn write_schemas(api: &ApiServer, folder: &Path) {
    // A kind is described a moment after it is served.
    let mut openapi = wait_for("all kinds are described", || {
        let openapi = api.kubectl(&["get", "--raw", "/openapi/v2"]);
        let openapi: Value = serde_json::from_str(&openapi.expect("OpenAPI")).expect("JSON");
        let definitions = openapi["definitions"].as_object().expect("definitions");
        let names: Vec<String> = definitions.keys().map(|name| name.to_lowercase()).collect();
        let is_described = |kind: &str| names.iter().any(|name| name.ends_with(kind));
        let mut wanted = WANTED.iter();
        match wanted.find(|kind| !is_described(&format!(".{kind}"))) {
            Some(kind) => Err(format!("there is no {kind}")),
            None => Ok(openapi),
        }
    });
    let definitions = openapi["definitions"].as_object_mut().expect("definitions");
    for definition in definitions.values_mut() {
        if definition.get("properties").is_some()
            && definition.get("additionalProperties").is_none()
        {
            definition["additionalProperties"] = Value::Bool(false);
        }
    }
    let quantity = "io.k8s.apimachinery.pkg.api.resource.Quantity";
    for loose in [quantity, "io.k8s.apimachinery.pkg.util.intstr.IntOrString"] {
        definitions[loose] = serde_json::json!({"type": ["string", "integer", "number"]});
    }
    let definitions = &*definitions;
    for (name, definition) in definitions {
        let Some(kinds) = definition["x-kubernetes-group-version-kind"].as_array() else {
            continue;
        };
        for kind in kinds {
            let text = |field: &str| kind[field].as_str().unwrap_or_default().to_lowercase();
            let group = text("group");
            let group = group.split('.').next().unwrap_or_default();
            let suffix = [group, &text("version")];
            let suffix: Vec<&str> = suffix.into_iter().filter(|part| !part.is_empty()).collect();
            let path = folder.join(format!("{}-{}.json", text("kind"), suffix.join("-")));
            if WANTED.contains(&text("kind").as_str()) {
                let mut needed = Map::new();
                add_with_referred(&mut needed, definitions, name);
                let schema = serde_json::json!({"$ref": format!("{REFERENCE}{name}"), "definitions": needed});
                fs::write(path, schema.to_string()).expect("a schema");
            }
        }
    }
}

/// How a schema begins to name a definition.
const REFERENCE: &str = "#/definitions/";

/// Adds a definition, and all that it refers to: of a thousand, a kind needs some dozens, and kubeconform reads what it is given anew for each scenario.
fn add_with_referred(needed: &mut Map<String, Value>, all: &Map<String, Value>, name: &str) {
    if needed.contains_key(name) {
        return;
    }
    needed.insert(name.to_owned(), all[name].clone());
    let mut parts = vec![&all[name]];
    while let Some(part) = parts.pop() {
        let referred = part["$ref"].as_str();
        if let Some(referred) = referred.and_then(|text| text.strip_prefix(REFERENCE)) {
            add_with_referred(needed, all, referred);
        }
        match part {
            Value::Object(fields) => parts.extend(fields.values()),
            Value::Array(elements) => parts.extend(elements),
            _ => {}
        }
    }
}

/// Kinds that the chart makes.
const WANTED: [&str; 19] = [
    "clusterrole",
    "clusterrolebinding",
    "configmap",
    "daemonset",
    "deployment",
    "httproute",
    "ingress",
    "namespace",
    "networkpolicy",
    "pod",
    "poddisruptionbudget",
    "prometheusrule",
    "role",
    "rolebinding",
    "service",
    "serviceaccount",
    "servicemonitor",
    "validatingadmissionpolicy",
    "validatingadmissionpolicybinding",
];

/// From the newest commit whose chart is different.
#[test]
fn an_upgrade_from_the_chart_before_keeps_models() {
    let before = chart_before(&["charts/prima"]).expect("a commit with another chart");
    let api = ApiServer::start(Backend::Etcd);
    let chart = inputs::file("charts/prima");
    let helm = |verb: &str, chart: &Path| {
        let namespace = ["--namespace", "prima", "--create-namespace"];
        let arguments = [&[verb, "--install", "prima", text(chart)][..], &namespace].concat();
        api.helm(&arguments).expect("is installed");
        api.wait_for_definitions();
    };
    helm("upgrade", &before.path().join("charts/prima"));
    let model = "{apiVersion: prima.dev/v1alpha1, kind: Model, metadata: {name: kept, namespace: default}, spec: {source: {hostPath: {path: /m.gguf}}, suspend: true}}";
    api.apply(model).expect("a Model");
    let kept = || {
        let what = "jsonpath={.metadata.uid} {.metadata.generation} {.spec}";
        let get = ["get", "model", "kept", "-o", what];
        api.kubectl(&get).expect("the Model")
    };
    let then = kept();
    helm("upgrade", &chart);
    assert_eq!(kept(), then);
    for sample in files_of("charts/prima/samples") {
        let text = fs::read_to_string(&sample).expect("a sample");
        // An API server takes a moment to follow a definition.
        wait_for(&sample, || api.try_out(&text));
    }
}

#[test]
fn with_agents_apart_the_operator_fits_the_restricted_level() {
    let mut api = ApiServer::start(Backend::Etcd);
    api.start_controller_manager();
    api.apply(
        "{apiVersion: v1, kind: Namespace, metadata: {name: prima, labels: {pod-security.kubernetes.io/enforce: restricted}}}",
    )
    .expect("a namespace");
    api.apply(
        "{apiVersion: v1, kind: Node, metadata: {name: desk, labels: {kubernetes.io/os: linux}}}",
    )
    .expect("a node");
    let values = inputs::file("charts/prima/ci/restricted-values.yaml");
    install(&api, &["--values", text(&values)]);
    for (namespace, pods) in [("prima", 2), ("prima-agents", 1)] {
        let ready = format!("{pods} pods in {namespace}");
        wait_until(&ready, || {
            let names = api.kubectl(&["get", "pods", "-o", "name", "--namespace", namespace]);
            names.expect("pods").lines().count() == pods
        });
    }
    let test = template(
        &api,
        &[
            "--values",
            text(&values),
            "--show-only",
            "templates/tests/answers.yaml",
        ],
    );
    default_account_is_there(&api, "prima");
    api.apply(&test).expect("the test's pod");
}

/// Pods that name no account need it, such as the test's.
fn default_account_is_there(api: &ApiServer, namespace: &str) {
    let account = ["wait", "--for=create", "serviceaccount/default"];
    let timeout = timeout_argument();
    api.kubectl(&[&account[..], &["-n", namespace, &timeout]].concat())
        .expect("its account");
}

#[test]
fn an_agent_writes_only_what_is_its_own() {
    let mut api = ApiServer::start(Backend::Etcd);
    api.start_controller_manager();
    install_definitions(&api);
    install(&api, &["--set", "crds.install=false"]);
    expressions_are_well_typed(&api);
    api.apply(&ring_plan("ring", "ring")).expect("a plan");

    let desk = Agent::on(&api, "desk");
    let laptop = Agent::on(&api, "laptop");
    policies_are_in_force(&laptop);

    // Its NodeProfile, whose spec is the owner's.
    desk.apply(&profile("desk", "")).expect("its own profile");
    desk.apply(&profile("desk", ""))
        .expect("the same once more");
    let refused = desk.apply(&profile("laptop", ""));
    assert_refused(refused, "may only write the NodeProfile of that name");
    let refused = laptop.apply(&profile("laptop", "memoryCapBytes: 1"));
    assert_refused(refused, "an agent creates it empty");
    // Its key is in the status, by which others let it in.
    let yaml = include_str!("../../crds/tests/node-profile.yaml");
    let measured = NodeProfile::from_yaml("node-profile.yaml", yaml).expect("a profile");
    let with_key = |key: &str| {
        let mut status = serde_json::json!(measured.status);
        status["agent"] = serde_json::json!(
            {"address": "10.0.0.1", "publicKeySha256": key, "memory": "", "disk": ""}
        );
        serde_json::json!({
            "apiVersion": "prima.dev/v1alpha1", "kind": "NodeProfile", "metadata": {"name": "desk"}, "status": status,
        })
        .to_string()
    };
    let key = with_key(&"a".repeat(64));
    let refused = laptop.apply_status("prima-node-agent", &key);
    assert_refused(refused, "may only write the NodeProfile of that name");
    desk.apply_status("prima-node-agent", &key)
        .expect("its own key");
    let refused = desk.apply_status("prima-node-agent", &with_key("no digest"));
    assert_refused(refused, "status.agent.publicKeySha256");
    let exclude = r#"{"spec":{"exclude":true}}"#;
    assert_refused(
        desk.patch("nodeprofile/desk", exclude, &[]),
        "an agent may not change it",
    );
    api.kubectl(&["patch", "nodeprofile/desk", "--type=merge", "-p", exclude])
        .expect("its owner");
    desk.patch(
        "nodeprofile/desk",
        r#"{"metadata":{"labels":{"a":"b"}}}"#,
        &[],
    )
    .expect("beside what the owner wrote");

    // Its Lease; the operator's would make it the leader.
    desk.apply(&lease("prima-agent-desk"))
        .expect("its own Lease");
    desk.apply(&lease("prima-agent-desk")).expect("renewed");
    assert_refused(
        desk.apply(&lease("prima-agent-laptop")),
        "may only write the Lease prima-agent-desk",
    );
    assert_refused(
        desk.apply(&lease("prima-operator")),
        "may only write the Lease prima-agent-desk",
    );

    // Its entry in a ring, beside the others'.
    desk.report("{name: desk, state: Fetching}")
        .expect("its own entry");
    laptop
        .report("{name: laptop, state: Fetching}")
        .expect("its own entry");
    desk.report("{name: desk, state: Loaded}")
        .expect("its own entry again");
    let states = [
        "get",
        "ringplan/ring",
        "-o",
        "jsonpath={.status.members[*].state}",
    ];
    assert_eq!(api.kubectl(&states).expect("the plan"), "Loaded Fetching");
    let others = "may only write its own entry of status.members";
    assert_refused(
        desk.report("{name: desk, state: Loaded}, {name: laptop, state: Failed}"),
        others,
    );
    assert_refused(
        desk.report("{name: desk, state: Loaded}, {name: pi4, state: Failed}"),
        others,
    );
    // With another agent's field manager, it would remove what that agent wrote.
    let alone = "members: [{name: desk, state: Loaded}]";
    assert_refused(desk.write_status("prima-node-agent-laptop", alone), others);
    // There is nothing else in a plan's status.
    let ready = "conditions: [{type: Ready, status: 'True', reason: Answered, message: '', lastTransitionTime: '2026-01-01T00:00:00Z'}]";
    let refused = desk.write_status("prima-node-agent-desk", ready);
    assert_refused(refused, "field not declared in schema");
    desk.report("{name: desk, state: Ready}")
        .expect("its own entry");

    // The longest ring there may be, with the longest messages, is not too much for the expressions.
    let message = "m".repeat(1000);
    let crowd: Vec<_> = (0..254)
        .map(|node| format!("{{name: node-{node}, state: Failed, message: {message}}}"))
        .collect();
    let crowd = file_with(&status_of_the_plan(&format!(
        "members: [{}]",
        crowd.join(", ")
    )));
    let others = [
        "apply",
        "--server-side",
        "--subresource=status",
        "--force-conflicts",
        "--field-manager=others",
        "-f",
    ];
    api.kubectl(&[&others[..], &[text(crowd.path())]].concat())
        .expect("many members");
    desk.report("{name: desk, state: Fetching}")
        .expect("one of 256");

    // What RBAC alone refuses.
    let refused = desk.patch("ringplan/ring", r#"{"spec":{"generation":2}}"#, &[]);
    assert_refused(refused, "cannot patch resource \"ringplans\"");
    let refused = desk.kubectl(&["get", "secrets", "--namespace", "prima"]);
    assert_refused(refused, "cannot list resource \"secrets\"");

    // A token that was not made for a pod names no node.
    let token = api.kubectl(&["create", "token", "prima-agent", "--namespace", "prima"]);
    let loose = Agent {
        api: &api,
        node: "none",
        token: token.expect("a token").trim().into(),
    };
    assert_refused(
        loose.apply(&profile("desk", "")),
        "must be bound to a pod on a node",
    );
}

fn status_of_the_plan(status: &str) -> String {
    format!(
        "apiVersion: prima.dev/v1alpha1\nkind: RingPlan\nmetadata: {{name: ring, namespace: default}}\nstatus: {{{status}}}\n"
    )
}

fn profile(name: &str, spec: &str) -> String {
    format!(
        "apiVersion: prima.dev/v1alpha1\nkind: NodeProfile\nmetadata: {{name: {name}}}\nspec: {{{spec}}}\n"
    )
}

fn lease(name: &str) -> String {
    format!(
        "apiVersion: coordination.k8s.io/v1\nkind: Lease\nmetadata: {{name: {name}, namespace: prima}}\nspec: {{holderIdentity: {name}}}\n"
    )
}

/// An agent's service account, by a token that is bound to a pod on a node, as the kubelet hands it out.
struct Agent<'a> {
    api: &'a ApiServer,
    node: &'static str,
    token: String,
}

impl<'a> Agent<'a> {
    fn on(api: &'a ApiServer, node: &'static str) -> Self {
        api.apply(&format!(
            "{{apiVersion: v1, kind: Node, metadata: {{name: {node}}}}}\n---\n\
             {{apiVersion: v1, kind: Pod, metadata: {{name: agent-{node}, namespace: prima}}, spec: {{\
             nodeName: {node}, serviceAccountName: prima-agent, containers: [{{name: agent, image: agent}}]}}}}\n"
        ))
        .expect("a node and its pod");
        let pod = format!("agent-{node}");
        let token = api.kubectl(&[
            "create",
            "token",
            "prima-agent",
            "--namespace",
            "prima",
            "--bound-object-kind=Pod",
            "--bound-object-name",
            &pod,
        ]);
        Agent {
            api,
            node,
            token: token.expect("a token").trim().into(),
        }
    }

    fn apply(&self, yaml: &str) -> Result<String, String> {
        let file = file_with(yaml);
        self.kubectl(&["apply", "--server-side", "-f", text(file.path())])
    }

    /// Applies its entries of the plan's `status.members`. Each agent has a field manager of its own: what a manager
    /// applies no longer is removed.
    fn report(&self, members: &str) -> Result<String, String> {
        let manager = format!("prima-node-agent-{}", self.node);
        self.write_status(&manager, &format!("members: [{members}]"))
    }

    fn write_status(&self, manager: &str, status: &str) -> Result<String, String> {
        self.apply_status(manager, &status_of_the_plan(status))
    }

    fn apply_status(&self, manager: &str, yaml: &str) -> Result<String, String> {
        let file = file_with(yaml);
        let manager = format!("--field-manager={manager}");
        let args = [
            "apply",
            "--server-side",
            "--subresource=status",
            "--force-conflicts",
            &manager,
            "-f",
        ];
        self.kubectl(&[&args[..], &[text(file.path())]].concat())
    }

    fn patch(&self, object: &str, patch: &str, more: &[&str]) -> Result<String, String> {
        self.kubectl(&[&["patch", object, "--type=merge", "-p", patch], more].concat())
    }

    fn kubectl(&self, args: &[&str]) -> Result<String, String> {
        let token = format!("--token={}", self.token);
        let result = self.api.kubectl(&[&[&*token], args].concat());
        result.map_err(|error| error.to_string())
    }
}

fn assert_refused(result: Result<String, String>, why: &str) {
    match result {
        Ok(text) => panic!("not refused ({why}): {text}"),
        Err(error) => assert!(
            error.contains(why),
            "refused, but not because {why}: {error}"
        ),
    }
}

/// kube-controller-manager checks the expressions' types against the definitions, and says what is wrong in the status.
fn expressions_are_well_typed(api: &ApiServer) {
    for resource in ["nodeprofiles", "ringplans", "leases"] {
        let policy = format!("validatingadmissionpolicy/prima-agent-{resource}");
        api.kubectl(&[
            "wait",
            &policy,
            "--for=jsonpath={.status.observedGeneration}=1",
            &timeout_argument(),
        ])
        .expect("is checked");
        let warnings = api.kubectl(&[
            "get",
            &policy,
            "-o",
            "jsonpath={.status.typeChecking.expressionWarnings}",
        ]);
        assert_eq!(warnings.expect("a status"), "", "{policy}");
    }
}

/// The API server learns of each new policy, and of who may do what at all, a moment later.
fn policies_are_in_force(agent: &Agent) {
    let of_a_plan = status_of_the_plan("members: [{name: not-an-agents, state: Failed}]");
    for (yaml, part) in [
        (lease("not-an-agents"), &[][..]),
        (profile("not-an-agents", ""), &[]),
        (of_a_plan, &["--subresource=status"]),
    ] {
        let file = file_with(&yaml);
        let apply = ["apply", "--server-side", "--dry-run=server", "-f"];
        wait_until("the policy is in force", || {
            let tried = agent.kubectl(&[&apply[..], &[text(file.path())], part].concat());
            tried.is_err_and(|error| error.contains("may only write"))
        });
    }
}

fn install(api: &ApiServer, args: &[&str]) {
    let chart = inputs::file("charts/prima");
    let install = [
        "install",
        "prima",
        text(&chart),
        "--namespace",
        "prima",
        "--create-namespace",
    ];
    api.helm(&[&install[..], args].concat())
        .expect("is installed");
}

/// Those of other projects, too.
fn install_all_definitions(api: &ApiServer) {
    api.apply(&definitions::foreign()).expect("are valid");
    install_definitions(api);
}

fn install_definitions(api: &ApiServer) {
    for file in files_of("charts/prima/files/crds") {
        api.apply(&fs::read_to_string(&file).expect("a definition"))
            .expect("is valid");
    }
    api.wait_for_definitions();
}

fn file_with(yaml: &str) -> NamedTempFile {
    let file = NamedTempFile::new().expect("a temporary file");
    fs::write(file.path(), yaml).expect("a temporary file");
    file
}

fn template(api: &ApiServer, args: &[&str]) -> String {
    let chart = inputs::file("charts/prima");
    api.helm(
        &[
            &["template", "prima", text(&chart), "--namespace", "prima"],
            args,
        ]
        .concat(),
    )
    .expect("renders")
}

fn files_of(folder: &str) -> Vec<String> {
    let folder = inputs::file(folder);
    let entries =
        fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = entries
        .map(|entry| text(&entry.expect("an entry").path()).to_owned())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    files
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}
