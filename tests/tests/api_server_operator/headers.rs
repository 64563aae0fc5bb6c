//! The headers of a Model's file and of its draft model's, read from a hub: by them both are taken or refused.

use std::fs;
use std::process::Command;

use prima_test_hub::TestHub;
use prima_tests::api_server::Backend;
use prima_tests::operator::Operator;
use prima_tests::refused_models::{self, Refused};
use prima_tests::{assets, inputs};
use serde_json::{Value, json};

use crate::harness::{MACHINES, Test};

/// The same sentence from `prima plan`, `prima run` and, within ten seconds, the Model. Of no file is a byte of weights fetched.
#[test]
fn models_that_are_not_run_are_refused_by_their_headers() {
    let folder = tempfile::tempdir().expect("a folder");
    let repo = folder.path().join("people/models");
    fs::create_dir_all(&repo).expect("a folder");
    let refused = refused_models::write(&repo);

    let profile = inputs::file("tests/assets/machine.yaml");
    let sentences: Vec<String> = refused
        .iter()
        .map(|Refused { path, said }| {
            let [mut plan, mut run] = [(); 2].map(|()| Command::new(inputs::program("prima")));
            plan.args(["plan", "--model"]).arg(path).arg("--profiles");
            run.arg("run").arg(path).arg("--profile");
            let [planned, ran] = [plan, run].map(|mut prima| {
                let output = prima.arg(&profile).output().expect("prima");
                assert!(!output.status.success(), "{said}");
                let found = String::from_utf8_lossy(&output.stderr);
                assert!(found.contains(said), "{said} is not in: {found}");
                without_files(&found)
            });
            assert_eq!(planned, ran);
            planned
        })
        .collect();

    let test = Test::start(Backend::Kine);
    let _machines = test.machines(&MACHINES);
    let operator = Operator::start(&test.api, "one");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let hub = runtime
        .block_on(TestHub::start(folder.path()))
        .expect("a hub");
    let name = |number: usize| format!("refused-{number}");
    for (number, (Refused { path, said, .. }, sentence)) in
        refused.iter().zip(&sentences).enumerate()
    {
        let file = path.file_name().and_then(|name| name.to_str());
        let document = json!({
            "apiVersion": "prima.dev/v1alpha1",
            "kind": "Model",
            "metadata": {"name": name(number)},
            "spec": {"source": {"huggingFace": {"repo": "people/models", "file": file, "endpoint": hub.endpoint()}}},
        });
        // The next one follows when this one is refused: the 10 s are a promise for one, not for all at once.
        test.api.apply(&document.to_string()).expect("a Model");
        let model = format!("model/{}", name(number));
        test.wait_for(&model, "Resolved", "False", &operator);
        let (_, reason, message) = test.condition(&model, "Resolved");
        assert_eq!(reason, "ResolveFailed");
        // A file that is not there is missed by the hub, which says it in its own words.
        let same = match said.ends_with(".gguf") {
            true => message.contains(said),
            false => without_files(&message).ends_with(sentence),
        };
        assert!(same, "{sentence} is not in: {message}");
        let seconds = test.seconds_until(&model, "Resolved");
        assert!(seconds <= 10, "{model} was refused after {seconds} s");
    }
    assert_eq!(test.names("ringplans"), [""; 0]);
    assert!(hub.body_bytes() > 0, "no header was read");
    for counter in hub.counters() {
        let most = u64::from(refused_models::WEIGHTS_OFFSET);
        assert!(counter.end <= most, "more than a header: {counter:?}");
    }
}

/// A refusal without the program's name and without those of files, which are paths here and addresses with a revision there.
fn without_files(message: &str) -> String {
    let words = message.split_whitespace().filter(|word| {
        let word = word.trim_end_matches([':', ',']);
        !word.contains(".gguf") && word != "prima"
    });
    words.collect::<Vec<_>>().join(" ").replace("at main: ", "")
}

/// The files are real ones, on a hub; of none is more fetched than its header.
#[test]
fn a_draft_model_is_resolved_by_its_header_or_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let repo = folder.path().join("people/models");
    fs::create_dir_all(&repo).expect("a folder");
    const MODEL: &str = "SmolLM2-135M-Instruct-Q4_1.gguf";
    const STRANGER: &str = "stories15M-F32.gguf";
    for name in [MODEL, STRANGER] {
        let file = assets::path(&format!("models/{name}")).expect("a model");
        let file = file.canonicalize().expect("an absolute path");
        std::os::unix::fs::symlink(file, repo.join(name)).expect("a link");
    }
    fs::write(repo.join("nothing.gguf"), "this is no model").expect("a file");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let hub = runtime
        .block_on(TestHub::start(folder.path()))
        .expect("a hub");
    let source = |file: &str| {
        let endpoint = hub.endpoint();
        json!({"huggingFace": {"repo": "people/models", "file": file, "endpoint": endpoint}})
    };
    let test = Test::start(Backend::Kine);
    let _machines = test.machines(&MACHINES);
    let operator = Operator::start(&test.api, "one");
    let apply = |name: &str, draft: &str| {
        let document = json!({
            "apiVersion": "prima.dev/v1alpha1",
            "kind": "Model",
            "metadata": {"name": name},
            "spec": {"source": source(MODEL), "speculation": {"draft": source(draft)}},
        });
        test.api.apply(&document.to_string()).expect("a Model");
    };
    for (name, draft, said) in [
        (
            "stranger",
            STRANGER,
            "people/models/stories15M-F32.gguf at main: expected the same vocabulary as the model's, found another; use a small model of the same family",
        ),
        ("nothing", "nothing.gguf", "not a GGUF file"),
        ("nowhere", "nowhere.gguf", "nowhere.gguf"),
    ] {
        apply(name, draft);
        let model = format!("model/{name}");
        test.wait_for(&model, "Resolved", "False", &operator);
        let (_, reason, message) = test.condition(&model, "Resolved");
        assert_eq!(reason, "ResolveFailed");
        let begins = message.starts_with("spec.speculation.draft: ");
        assert!(begins && message.contains(said), "{message}");
    }
    assert_eq!(test.names("ringplans"), [""; 0]);

    // Its own file guesses for a model, if nothing smaller does.
    apply("drafting", MODEL);
    test.wait_for("model/drafting", "Ready", "True", &operator);
    let (_, _, message) = test.condition("model/drafting", "Resolved");
    assert!(
        message.contains("; draft model people/models/SmolLM2"),
        "{message}"
    );
    let resolved = test.object("model/drafting")["status"]["resolved"].clone();
    assert_eq!(resolved["draft"]["version"], resolved["version"]);
    let draft = test.object("ringplan/drafting-1")["spec"]["draft"].clone();
    assert_eq!(
        draft["model"]["source"],
        source_with_defaults(source(MODEL))
    );
    assert_eq!(draft["model"]["version"], resolved["draft"]["version"]);
    let weights = fs::metadata(repo.join(MODEL)).expect("a file").len();
    assert!(draft["memoryBytes"].as_u64() > Some(weights), "{draft}");

    // Repaired, a Model goes on.
    test.patch(
        "model/stranger",
        &json!({"spec": {"speculation": {"draft": {"huggingFace": {"file": MODEL}}}}}).to_string(),
    );
    test.wait_for("model/stranger", "Ready", "True", &operator);
    assert!(hub.body_bytes() < weights / 2, "{:?}", hub.counters());
}

/// As the API server completes it.
fn source_with_defaults(mut source: Value) -> Value {
    source["huggingFace"]["revision"] = json!("main");
    source
}
