//! With whose token the operator asks a hub for a Model's file: that of the Secret in the Model's namespace, or else the one that all share.
//! What it has read with the token of one namespace opens nothing to another.

use std::fs;

use prima_test_hub::TestHub;
use prima_tests::api_server::{ApiServer, Backend};
use prima_tests::operator::{Operator, give_hub_token, install_chart};
use prima_tests::{assets, wait_for};
use serde_json::json;

const REPO: &str = "people/models";
const FILE: &str = "SmolLM2-135M-Instruct-Q4_1.gguf";
const TOKEN: &str = "hf_of_people";

#[test]
fn a_namespaces_models_are_read_with_its_own_token() {
    let folder = tempfile::tempdir().expect("a folder");
    let repo = folder.path().join(REPO);
    fs::create_dir_all(&repo).expect("a folder");
    let file = assets::path(&format!("models/{FILE}")).expect("a model");
    let file = file.canonicalize().expect("an absolute path");
    std::os::unix::fs::symlink(file, repo.join(FILE)).expect("a link");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let hub = runtime.block_on(TestHub::start(folder.path()));
    let hub = hub.expect("a hub");
    hub.control(|control| {
        control.token = Some(TOKEN.to_owned());
        control.gated = vec![REPO.to_owned()];
    });
    let api = ApiServer::start(Backend::Etcd);
    install_chart(&api);
    let endpoint = hub.endpoint();
    let of_the_chart = ("HF_ENDPOINT", &*endpoint);

    // Nothing is shared.
    let operator = Operator::start_with(&api, "one", &[of_the_chart]);
    apply_model(&api, "alice", Some(TOKEN));
    wait_for_reason(&api, "alice", "Resolved", &operator);
    apply_model(&api, "bob", None);
    let message = wait_for_reason(&api, "bob", "ResolveFailed", &operator);
    assert!(message.contains("is gated"), "{message}");
    apply_model(&api, "carol", Some("two words"));
    let message = wait_for_reason(&api, "carol", "ResolveFailed", &operator);
    let said = "the Secret carol/prima-hub: token: expected visible ASCII characters";
    assert!(message.contains(said), "{message}");
    // Nobody touches the Model.
    give_hub_token(&api, "bob", TOKEN);
    wait_for_reason(&api, "bob", "Resolved", &operator);
    drop(operator);

    // What all share is for those who have nothing of their own.
    let shared = ("HF_TOKEN", TOKEN);
    let operator = Operator::start_with(&api, "one", &[of_the_chart, shared]);
    apply_model(&api, "dave", None);
    wait_for_reason(&api, "dave", "Resolved", &operator);
    apply_model(&api, "erin", Some(""));
    let message = wait_for_reason(&api, "erin", "ResolveFailed", &operator);
    assert!(message.contains("is gated"), "{message}");
}

/// A Model in a namespace of its own, which has this token.
fn apply_model(api: &ApiServer, namespace: &str, token: Option<&str>) {
    api.kubectl(&["create", "namespace", namespace])
        .expect("a namespace");
    if let Some(token) = token {
        give_hub_token(api, namespace, token);
    }
    let model = json!({
        "apiVersion": "prima.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": "gated", "namespace": namespace},
        "spec": {"source": {"huggingFace": {"repo": REPO, "file": FILE}}},
    });
    api.apply(&model.to_string()).expect("a Model");
}

/// Waits until the Model's condition Resolved has this reason, and returns its message.
fn wait_for_reason(api: &ApiServer, namespace: &str, reason: &str, operator: &Operator) -> String {
    wait_for(&format!("{namespace}: {reason}"), || {
        let model = api.object(namespace, "model/gated");
        let model = model.map_err(|error| error.to_string())?;
        let conditions = model["status"]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        let resolved = conditions.find(|one| one["type"] == "Resolved");
        match resolved {
            Some(resolved) if resolved["reason"] == reason => {
                Ok(resolved["message"].as_str().unwrap_or_default().to_owned())
            }
            _ => Err(format!("{}\n{}", model["status"], operator.log_tail())),
        }
    })
}
