//! What the two commands read and print, as people and their shells use them.

use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use prima_tests::local_ring::{LocalRing, smollm2};
use prima_tests::{Endpoint, http, inputs, split_model};
use serde_json::{Value, json};

const PROGRAMS: [&str; 2] = ["prima", "prima-node-agent"];

/// What it wrote; panics unless it ended well.
fn printed(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(inputs::program(program))
        .args(arguments)
        .output();
    written(output.expect("start the program"))
}

fn written(output: Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// Names and descriptions of a command's subcommands, from its help.
fn subcommands(program: &str) -> Vec<(String, String)> {
    let help = printed(program, &["--help"]);
    let (_, list) = help.split_once("Commands:\n").expect("commands");
    let lines = list.lines().take_while(|line| !line.is_empty());
    let pairs = lines.filter_map(|line| line.trim().split_once(' '));
    pairs
        .map(|(name, about)| (name.to_owned(), about.trim().to_owned()))
        .collect()
}

#[test]
fn help_is_in_one_mood_and_ends_with_examples() {
    for program in PROGRAMS {
        let all = subcommands(program);
        assert!(all.len() > 5, "{all:?}");
        for (name, about) in all {
            let verb = about.split(' ').next().expect("a word");
            assert!(!verb.ends_with('s'), "{program} {name}: {about}");
        }
        let help = printed(program, &["--help"]);
        let (_, examples) = help.split_once("Examples:\n").expect("examples");
        let examples = examples.lines().filter(|line| line.contains(program));
        assert!(examples.count() >= 5, "{help}");
    }
}

#[test]
fn shells_complete_subcommands_and_options() {
    for program in PROGRAMS {
        for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
            let script = printed(program, &["completions", shell]);
            for (name, _) in subcommands(program) {
                assert!(script.contains(&name), "{shell}: {name}");
            }
        }
        // What bash itself offers after `PROGRAM ru`, by the script's function.
        let script = printed(program, &["completions", "bash"]);
        let function = script.lines().find_map(|line| line.strip_suffix("() {"));
        let function = function.expect("a function of the script").trim();
        let ask = format!(
            "COMP_WORDS=({program} ru); COMP_CWORD=1; {function} {program} ru {program}; echo \"${{COMPREPLY[@]}}\""
        );
        let mut bash = Command::new("bash");
        bash.args(["--norc", "-c", &format!("{script}\n{ask}")]);
        let offered = written(bash.output().expect("bash"));
        assert_eq!(offered.trim(), "run", "{program}");
    }
}

#[test]
fn man_pages_are_written_for_every_subcommand() {
    for program in PROGRAMS {
        let folder = tempfile::tempdir().expect("a folder");
        let pages = folder.path().join("man1");
        printed(program, &["man", pages.to_str().expect("UTF-8")]);
        for (name, about) in subcommands(program) {
            if name == "help" {
                continue;
            }
            let page = pages.join(format!("{program}-{name}.1"));
            let text = fs::read_to_string(&page)
                .unwrap_or_else(|error| panic!("{}: {error}", page.display()));
            let title = format!(".TH {program}-{name}  1 ").replace("  ", " ");
            assert!(text.contains(&title), "{title}: {text}");
            let first = about.split(' ').next().expect("a word");
            assert!(text.contains(first), "{text}");
        }
        assert!(pages.join(format!("{program}.1")).is_file());
    }
}

/// Profiles of two machines, `desk` and `laptop`, each with a link to the other.
fn two_machines() -> [Value; 2] {
    let yaml = fs::read_to_string(inputs::file("tests/assets/machine.yaml")).expect("a profile");
    let profile: Value = serde_saphyr::from_str(&yaml).expect("YAML");
    [("desk", "laptop"), ("laptop", "desk")].map(|(name, other)| {
        let mut profile = profile.clone();
        profile["metadata"]["name"] = json!(name);
        profile["status"]["links"] =
            json!([{"to": other, "latencyNanoseconds": 20_000_000, "bytesPerSecond": 110_000_000}]);
        profile
    })
}

#[test]
fn a_plan_is_made_of_what_kubectl_prints() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = smollm2();
    let machines = two_machines();
    let files = [0, 1].map(|index| {
        let file = folder.path().join(format!("{index}.yaml"));
        fs::write(&file, machines[index].to_string()).expect("a file");
        file
    });
    let plan = |profiles: &[&Path], input: &str, more: &[&str]| {
        let mut prima = Command::new(inputs::program("prima"));
        prima
            .args(["plan", "--model"])
            .arg(&model)
            .args(["-o", "json", "--profiles"])
            .args(profiles)
            .args(more);
        prima
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = prima.spawn().expect("prima");
        child
            .stdin
            .take()
            .expect("stdin")
            .write_all(input.as_bytes())
            .expect("input");
        let plan: Value =
            serde_json::from_str(&written(child.wait_with_output().expect("its end")))
                .expect("JSON");
        plan["ringPlan"]["spec"].clone()
    };
    let from_files = plan(&[&files[0], &files[1]], "", &[]);
    // With what an API server adds.
    let mut listed = machines.to_vec();
    for profile in &mut listed {
        profile["metadata"]["uid"] = json!("0");
        profile["metadata"]["ownerReferences"] =
            json!([{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "1"}]);
        profile["status"]["fieldOfALaterVersion"] = json!({"a": [1]});
    }
    let list = json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": listed});
    assert_eq!(plan(&[Path::new("-")], &list.to_string(), &[]), from_files);
    assert_eq!(from_files["members"].as_array().expect("members").len(), 1);
    let both = plan(&[Path::new("-")], &list.to_string(), &["--min-nodes", "2"]);
    assert_eq!(both["members"].as_array().expect("members").len(), 2);
}

#[test]
fn plans_count_on_the_experts_that_tokens_come_back_to() {
    let sample = |path| inputs::file(&format!("operator/samples/{path}"));
    let plan = |more: &[&str]| {
        let mut prima = Command::new(inputs::program("prima"));
        prima
            .args(["plan", "-o", "json", "--model"])
            .arg(sample("models/gpt-oss-120b.yaml"))
            .arg("--profiles")
            .arg(sample("machines/four-office-pcs.yaml"))
            .args(more);
        prima.output().expect("prima")
    };
    let report = |more: &[&str]| -> Value {
        let both: Value = serde_json::from_str(&written(plan(more))).expect("JSON");
        both["report"].clone()
    };
    let sum = |report: &Value, field: &str| -> f64 {
        let members = report["members"].as_array().expect("members");
        members
            .iter()
            .map(|member| member[field].as_f64().expect("a number"))
            .sum()
    };
    let (alike, half) = (report(&[]), report(&["--expert-misses", "50"]));
    assert_eq!(report(&["--expert-misses", "100"]), alike);
    let token = |report: &Value| report["tpotMilliseconds"].as_f64().expect("a number");
    assert!(token(&half) < token(&alike), "{half:#} {alike:#}");
    let read = |report: &Value| sum(report, "readBytesPerToken") / sum(report, "overflowBytes");
    assert!((read(&half) / read(&alike) - 0.5).abs() < 0.01);
    for refused in ["0", "101"] {
        let output = plan(&["--expert-misses", refused]);
        assert!(!output.status.success());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("--expert-misses <PERCENT>"), "{said}");
    }
}

#[test]
fn a_first_token_that_no_ring_has_in_time_is_told() {
    let sample = |path| inputs::file(&format!("operator/samples/{path}"));
    for (seconds, expected) in [
        ("0", "--first-token <SECONDS>"),
        ("1", "no ring has the first token within 1 s"),
        ("1", "the soonest takes about"),
    ] {
        let mut prima = Command::new(inputs::program("prima"));
        prima
            .args(["plan", "--first-token", seconds, "--model"])
            .arg(sample("models/qwen3-32b.yaml"))
            .arg("--profiles")
            .arg(sample("machines/four-office-pcs.yaml"));
        let output = prima.output().expect("prima");
        assert!(!output.status.success());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn beyond_this_machine_a_ring_asks_for_a_key() {
    let run = || {
        LocalRing::builder()
            .model(&smollm2())
            .arg("--host")
            .arg("0.0.0.0")
            .arg("--context")
            .arg("256")
    };
    let refused = run().run_to_end();
    assert!(!refused.status.success());
    assert!(
        refused
            .stderr
            .contains("--host 0.0.0.0: whoever reaches this machine"),
        "{}",
        refused.stderr
    );
    let nowhere = LocalRing::builder()
        .model(&smollm2())
        .arg("--host")
        .arg("192.0.2.1")
        .arg("--api-key")
        .arg("k");
    let nowhere = nowhere.run_to_end();
    assert!(
        nowhere.stderr.contains("cannot listen on 192.0.2.1"),
        "{}",
        nowhere.stderr
    );

    let ring = run().arg("--api-key").arg("secret").start();
    // All addresses of loopback are this machine's, and no other test has this one.
    let elsewhere = SocketAddr::from((Ipv4Addr::new(127, 9, 9, 9), ring.address().port()));
    assert_eq!(
        http::get(elsewhere, "/v1/models")
            .expect("an answer")
            .status,
        401
    );
    let answer = http::get_with_key(elsewhere, "/v1/models", "secret").expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.body);
    // People are shown an address that others can use.
    assert!(
        !ring.printed().contains("http://0.0.0.0"),
        "{}",
        ring.printed()
    );
    ring.stop();
}

#[test]
fn inspect_prints_the_same_in_yaml_and_json() {
    let model = smollm2();
    let model = model.to_str().expect("UTF-8");
    let yaml = printed("prima-node-agent", &["inspect", model, "-o", "yaml"]);
    let yaml: Value = serde_saphyr::from_str(&yaml).expect("YAML");
    let json = printed("prima-node-agent", &["inspect", model, "--output", "json"]);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(yaml, json);
    assert!(!printed("prima-node-agent", &["inspect", model, "--format", "table"]).is_empty());
}

#[test]
fn inspect_shows_a_model_in_several_files_as_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let first = split_model::in_three_files(&smollm2(), folder.path());
    let shown = |path: &Path| -> Value {
        let path = path.to_str().expect("UTF-8");
        let json = printed("prima-node-agent", &["inspect", path, "-o", "json"]);
        serde_json::from_str(&json).expect("JSON")
    };
    let (parts, whole) = (shown(&first), shown(&smollm2()));
    for what in ["total", "embedding", "layers"] {
        assert!(!parts[what].is_null(), "{parts}");
        assert_eq!(parts[what], whole[what]);
    }
}
