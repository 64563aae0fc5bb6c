//! What documents tell people to type. Each command is run here, or `NOT_RUN` has it and says why not. Where more would take a cluster or change
//! this machine, programs only say what they would do.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use prima_tests::api_server::{ApiServer, Backend};
use prima_tests::operator::{install_chart, ring_plan};
use prima_tests::programs::program;
use prima_tests::{inputs, wait_for};
use tempfile::TempDir;

/// What commands start. Whatever is none of `OURS` and `OF_CLUSTERS` has to be in `NOT_RUN`.
const PROGRAMS: [&str; 16] = [
    "curl",
    "export",
    "helm",
    "images/release.sh",
    "install",
    "kubectl",
    "ls",
    "make",
    "mkdir",
    "prima",
    "prima-node-agent",
    "stat",
    "sudo",
    "tar",
    "target/release/prima",
    "target/release/prima-node-agent",
];
const OURS: [&str; 5] = [
    "make",
    "prima",
    "prima-node-agent",
    "target/release/prima",
    "target/release/prima-node-agent",
];
const OF_CLUSTERS: [&str; 2] = ["helm", "kubectl"];

/// What is not run here, and why, or where it is: a command, or with dots how it begins.
const NOT_RUN: [(&str, &str); 16] = [
    ("curl -sfL https://get.k3s.io ...", "it installs k3s"),
    (
        "curl http://127.0.0.1:8080/v1/chat/completions ...",
        "a ring must have that port; local_ring_answers asks rings the same",
    ),
    ("export KUBECONFIG=~/.kube/config", "it is of no use alone"),
    ("helm upgrade", "it only names what others have in full"),
    ("install -d ...", "it takes root, on a node"),
    ("kubectl get models --watch", "it does not end"),
    (
        "kubectl get nodeprofiles -o yaml | prima plan ...",
        "command_line: a_plan_is_made_of_what_kubectl_prints",
    ),
    ("kubectl logs ...", "it takes a kubelet"),
    (
        "kubectl port-forward ...",
        "it takes a kubelet, as in cluster_prima; to a Service it fails, as documents say",
    ),
    ("kubectl run ...", "it takes a kubelet"),
    ("ls /dev/dri", "it is about a node with a GPU"),
    ("mkdir -p ~/.kube", "it is of no use without k3s"),
    (
        "PLAIN_HTTP=1 images/release.sh ...",
        "images_registry has a registry",
    ),
    ("stat -c ...", "it is about a node with a GPU"),
    ("sudo ...", "it changes a machine, and mostly takes k3s"),
    (
        "tar xf gpu-check.tar.xz ...",
        "it takes a GPU, and what `make check-gpu` makes",
    ),
];

/// Of our programs' commands, those that need nothing but the repository, and so are run to their end.
const WHOLE: [&str; 2] = [
    "target/release/prima plan --model operator/samples/ ...",
    "target/release/prima-node-agent inspect --cpu",
];

/// What people put something of their own in the place of; longer ones first.
const PLACEHOLDERS: [(&str, &str); 3] = [
    ("NAME-GENERATION", "smollm2-1"),
    ("NAME", "smollm2"),
    ("NODE", "desk"),
];

/// What is run in place of the programs. clap reads arguments from left to right: before it comes to `--help`, it refuses options that it does
/// not know and values that cannot be. It does not see that an argument is missing, or that two exclude each other.
const INSTEAD: &str = r#"
set -euo pipefail
prima() { command prima "$@" --help; }
prima-node-agent() { command prima-node-agent "$@" --help; }
make() { command make --dry-run "$@"; }
kubectl() {
    case $1 in
        apply | cordon | create | delete | label | patch | uncordon) set -- "$@" --dry-run=server ;;
    esac
    command kubectl "$@"
}
helm() {
    case $1 in
        install | upgrade) set -- "$@" --dry-run=server ;;
        uninstall) set -- "$@" --dry-run ;;
    esac
    command helm "$@"
}
set -x
"#;

const SAMPLE: &str = "Say `make  help`, `a b`, or `prima`:

    node=$(kubectl get nodes -o name)    # a node's name
    helm upgrade prima charts/prima \\
      --set 'a=b #c'

and in `spec`:

    spec:
      suspend: true

    apiVersion: v1
    kind: Pod
";

#[test]
fn each_documented_command_is_run_or_listed() {
    let blocks = documented().blocks;
    let commands: Vec<String> = blocks
        .into_iter()
        .flat_map(|block| block.commands)
        .collect();
    // A rule that finds nothing because it looks at nothing is no rule.
    assert!(commands.len() > 100, "{commands:#?}");
    for command in &commands {
        assert!(
            is_listed(command) || starts(&OURS, command) || starts(&OF_CLUSTERS, command),
            "tell documented_commands.rs what to do with `{command}`"
        );
    }
    let entries = NOT_RUN.map(|(entry, _)| entry).into_iter().chain(WHOLE);
    for entry in entries {
        assert!(
            commands.iter().any(|command| fits(entry, command)),
            "no document has `{entry}` any more"
        );
    }

    let commands = |all: &[&str]| Part::Commands(all.iter().map(|one| (*one).to_owned()).collect());
    assert_eq!(
        parts_of(SAMPLE),
        [
            commands(&["make help"]),
            commands(&[
                "node=$(kubectl get nodes -o name)",
                "helm upgrade prima charts/prima \\\n  --set 'a=b #c'",
            ]),
            Part::Manifest("apiVersion: v1\nkind: Pod".to_owned()),
        ]
    );
}

#[test]
fn programs_and_make_take_documented_commands() {
    let blocks = documented().blocks;
    // make itself takes any variable.
    let makefile = fs::read_to_string(inputs::file("Makefile")).expect("the Makefile");
    let commands = blocks.iter().flat_map(|block| &block.commands);
    for command in commands.filter(|command| starts(&["make"], command)) {
        let variables = command
            .split_whitespace()
            .filter_map(|word| word.split_once('='));
        for (variable, _) in variables {
            assert!(
                makefile.contains(&format!("$({variable})")),
                "the Makefile has no {variable}: `{command}`"
            );
        }
    }
    let folder = workplace();
    let path = search_path(&["prima", "prima-node-agent"].map(inputs::program));
    run(
        &blocks,
        |command| starts(&OURS, command),
        || {
            let mut bash = Command::new("bash");
            bash.current_dir(folder.path())
                .env("PATH", &path)
                // No cluster of whoever runs the tests.
                .env("KUBECONFIG", "/dev/null")
                .env("HOME", folder.path())
                // That of `make test`.
                .env_remove("MAKEFLAGS");
            bash
        },
    );
}

#[test]
fn an_api_server_takes_documented_commands() {
    let Documented { blocks, manifests } = documented();
    let api = ApiServer::start(Backend::Etcd);
    let folder = workplace();
    let path = search_path(&["kubectl", "helm"].map(program));
    let bash = || {
        let mut bash = api.command("bash");
        bash.current_dir(folder.path())
            .env("PATH", &path)
            // It leaves what it is to edit as it is.
            .env("KUBE_EDITOR", "true");
        bash
    };
    let installs = |command: &str| command.starts_with("helm install ");
    run(&blocks, installs, bash);

    install_chart(&api);
    add_what_documents_speak_of(&api);
    for manifest in &manifests {
        api.try_out(manifest)
            .unwrap_or_else(|error| panic!("{manifest}: {error}"));
    }
    let model = manifests
        .iter()
        .find(|manifest| manifest.contains("kind: Model\n"));
    let model = model.expect("a Model");
    fs::write(folder.path().join("model.yaml"), model).expect("a file");
    api.apply(model).expect("a Model");
    let ready = r#"{"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "Ready", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}}"#;
    let patch = ["patch", "model", "smollm2", "--subresource=status"];
    api.kubectl(&[&patch[..], &["--type=merge", "-p", ready]].concat())
        .expect("a status");
    // What a definition says comes a moment after it.
    wait_for("its fields are explained", || {
        api.kubectl(&["explain", "model.spec"])
    });
    let others = |command: &str| starts(&OF_CLUSTERS, command) && !installs(command);
    run(&blocks, others, bash);
}

/// Nodes, and a Model's ring that answers; no Model.
fn add_what_documents_speak_of(api: &ApiServer) {
    api.apply(OBJECTS).expect("objects");
    api.apply(&ring_plan("smollm2-1", "smollm2"))
        .expect("a RingPlan");
    // There is no kubelet, and nobody makes pods; this one has the labels that the chart gives to agents.
    let labels = api.kubectl(&[
        "get",
        "daemonset",
        "prima-agent",
        "--namespace",
        "prima",
        "-o",
        "jsonpath={.spec.template.metadata.labels}",
    ]);
    let labels = labels.expect("labels of agents");
    api.apply(&format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: agent-desk, namespace: prima, labels: {labels}}}, spec: {{\
         nodeName: desk, serviceAccountName: prima-agent, containers: [{{name: agent, image: agent}}]}}}}"
    ))
    .expect("an agent's pod");
}

const OBJECTS: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: kids}
---
apiVersion: v1
kind: Namespace
metadata: {name: team-a}
---
apiVersion: v1
kind: Node
metadata: {name: desk}
---
apiVersion: prima.dev/v1alpha1
kind: NodeProfile
metadata: {name: desk}
spec: {}
---
apiVersion: prima.dev/v1alpha1
kind: NodeProfile
metadata: {name: laptop}
spec: {}
---
apiVersion: v1
kind: Service
metadata: {name: smollm2, namespace: default}
spec: {ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: smollm2-ipv4, namespace: default}
addressType: IPv4
endpoints: [{addresses: [10.0.0.1], nodeName: desk}]
ports: [{port: 9400}]
";

/// Runs the commands that are `wanted`, those of a block in one shell that `bash` makes. Panics with all that fail.
fn run(blocks: &[Block], wanted: impl Fn(&str) -> bool, bash: impl Fn() -> Command) {
    let (mut ran, mut failed) = (0, Vec::new());
    for block in blocks {
        let commands = block.commands.iter();
        let commands = commands.filter(|command| wanted(command) && !is_listed(command));
        let lines: Vec<String> = commands.map(|command| line_of(command)).collect();
        if lines.is_empty() {
            continue;
        }
        ran += lines.len();
        let script = lines.join("\n");
        let output = bash()
            .arg("-c")
            .arg(format!("{INSTEAD}{script}"))
            .output()
            .expect("bash");
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            failed.push(format!("{}:\n{script}\n\n{said}", block.document));
        }
    }
    assert!(ran > 0, "no command is wanted");
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// What a script has of it. A variable that stays empty is of a command that found nothing.
fn line_of(command: &str) -> String {
    let mut line = command.replace("target/release/", "");
    for (placeholder, own) in PLACEHOLDERS {
        line = line.replace(placeholder, own);
    }
    if WHOLE.iter().any(|entry| fits(entry, command)) {
        line.insert_str(0, "command ");
    }
    match command.split_once("=$(") {
        Some((variable, _)) if !variable.contains(' ') => {
            format!("{line}\ntest -n \"${variable}\"")
        }
        _ => line,
    }
}

/// A folder with what commands use of the repository's root, where they may write.
fn workplace() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for path in ["Makefile", "charts", "operator/samples"] {
        let link = folder.path().join(path);
        fs::create_dir_all(link.parent().expect("a folder")).expect("a folder");
        symlink(inputs::file(path), link).expect("a link");
    }
    folder
}

/// Where a shell finds these programs, and what this test finds.
fn search_path(programs: &[PathBuf]) -> OsString {
    let folders = programs.iter().map(|program| {
        let folder = program.parent().expect("a folder");
        folder.to_owned()
    });
    let usual = env::var_os("PATH").expect("PATH");
    env::join_paths(folders.chain(env::split_paths(&usual))).expect("a search path")
}

/// Commands that a document has in one place: the later ones use what the earlier ones set.
struct Block {
    document: String,
    commands: Vec<String>,
}

struct Documented {
    blocks: Vec<Block>,
    manifests: Vec<String>,
}

/// Of all documents for people who use prima. (The blocks of ARCHITECTURE.md show which process starts which.)
fn documented() -> Documented {
    let guides = fs::read_dir(inputs::file("charts/docs")).expect("the guides");
    let mut documents: Vec<PathBuf> = guides.map(|guide| guide.expect("a guide").path()).collect();
    documents.extend(["README.md", "charts/prima/README.md"].map(inputs::file));
    documents.sort();
    let (mut blocks, mut manifests) = (Vec::new(), Vec::new());
    for document in documents {
        let document = document.to_str().expect("a path in UTF-8").to_owned();
        let text =
            fs::read_to_string(&document).unwrap_or_else(|error| panic!("{document}: {error}"));
        for part in parts_of(&text) {
            match part {
                Part::Commands(commands) => blocks.push(Block {
                    document: document.clone(),
                    commands,
                }),
                Part::Manifest(manifest) => manifests.push(manifest),
            }
        }
    }
    Documented { blocks, manifests }
}

/// What of a document is tested.
#[derive(Debug, PartialEq)]
enum Part {
    /// Those of an indented block, or one in a sentence.
    Commands(Vec<String>),
    /// An object that an API server takes.
    Manifest(String),
}

fn parts_of(document: &str) -> Vec<Part> {
    assert!(
        !document.contains("```"),
        "indent blocks instead: {document}"
    );
    let mut parts = Vec::new();
    for paragraph in document.split("\n\n") {
        let paragraph = paragraph.trim_matches('\n');
        let indented = paragraph.lines().map(|line| line.strip_prefix("    "));
        match indented.collect::<Option<Vec<&str>>>() {
            Some(lines) => parts.extend(part_of(&lines.join("\n"))),
            None => parts.extend(commands_within(paragraph)),
        }
    }
    parts
}

/// What an indented block is; nothing where that is Python, what a command prints, or a part of a file. Panics where it cannot tell.
fn part_of(block: &str) -> Option<Part> {
    let commands = commands_of(block);
    let is_command = |text: &String| program_of(text).is_some();
    if is_command(commands.first()?) {
        let other = commands.iter().find(|command| !is_command(command));
        assert!(
            other.is_none(),
            "tell documented_commands.rs what to do with {other:?}"
        );
        return Some(Part::Commands(commands));
    }
    if block.starts_with("apiVersion: ") {
        return Some(Part::Manifest(block.to_owned()));
    }
    let line = block.lines().next()?;
    let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
    let is_yaml = word.ends_with(':');
    let is_python = ["from", "import"].contains(&word) || rest.starts_with("= ");
    // The heading of a table.
    let is_output = !line.contains(char::is_lowercase);
    assert!(
        is_yaml || is_python || is_output,
        "tell documented_commands.rs what to do with\n{block}"
    );
    None
}

/// What a sentence or a table has in backticks, if it is more than a program's name.
fn commands_within(paragraph: &str) -> Vec<Part> {
    let pieces: Vec<&str> = paragraph.split('`').collect();
    assert!(pieces.len() % 2 == 1, "a backtick is alone in\n{paragraph}");
    let code = pieces.iter().skip(1).step_by(2);
    // It may go on in the next line.
    let code = code.map(|piece| piece.split_whitespace().collect::<Vec<_>>().join(" "));
    let commands = code.filter(|piece| piece.contains(' ') && program_of(piece).is_some());
    commands
        .map(|command| Part::Commands(vec![command]))
        .collect()
}

/// The commands of a block. A line is one, and the next line goes on with it after a backslash or where a quote is open. Without comments.
fn commands_of(block: &str) -> Vec<String> {
    let mut commands = vec![String::new()];
    let (mut quote, mut escaped, mut comment) = (None, false, false);
    for letter in block.chars() {
        if letter == '\n' && quote.is_none() && !escaped {
            commands.push(String::new());
            comment = false;
            continue;
        }
        let command = commands.last_mut().expect("a command");
        let word_begins = command
            .chars()
            .next_back()
            .is_none_or(|before| before.is_whitespace());
        comment |= letter == '#' && quote.is_none() && !escaped && word_begins;
        if comment {
            continue;
        }
        command.push(letter);
        match quote {
            _ if escaped => {}
            None if letter == '\'' || letter == '"' => quote = Some(letter),
            Some(open) if open == letter => quote = None,
            _ => {}
        }
        escaped = letter == '\\' && !escaped && quote != Some('\'');
    }
    let commands = commands.iter().map(|command| command.trim().to_owned());
    commands.filter(|command| !command.is_empty()).collect()
}

/// Which of `PROGRAMS` it starts: kubectl also in `node=$(kubectl get ...)`.
fn program_of(command: &str) -> Option<&str> {
    let words = command.split_whitespace();
    let mut words = words.map(|word| word.split_once("=$(").map_or(word, |(_, inner)| inner));
    let program = words.find(|word| !word.contains('='))?;
    PROGRAMS.contains(&program).then_some(program)
}

fn starts(programs: &[&str], command: &str) -> bool {
    program_of(command).is_some_and(|program| programs.contains(&program))
}

fn is_listed(command: &str) -> bool {
    NOT_RUN.iter().any(|(entry, _)| fits(entry, command))
}

fn fits(entry: &str, command: &str) -> bool {
    match entry.strip_suffix(" ...") {
        Some(beginning) => command.starts_with(beginning),
        None => command == entry,
    }
}
