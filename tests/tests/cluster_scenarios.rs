//! The chart with the values of each file in `charts/prima/ci/`: it is installed, tested by its own test and uninstalled on a cluster of one node.
//! Images of other registries than the chart's own are pulled, from one that stands for all. What else the values name is there, or comes while
//! an installation waits for it.

use std::fs;
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::thread;
use std::time::Instant;

use prima_tests::api_server::condition;
use prima_tests::cluster::{Cluster, PrimaImages, chart};
use prima_tests::registry::Registry;
use prima_tests::{definitions, timeout_argument, wait_for, wait_until};
use serde_json::Value;

/// The agents'.
const USER: u32 = 65532;

/// What values name.
const NAMED: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: prima}
---
apiVersion: v1
kind: Namespace
metadata: {name: models}
---
apiVersion: v1
kind: Secret
metadata: {name: hugging-face, namespace: prima}
stringData: {token: hf_none}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: home-certificates, namespace: prima}
";

/// Without a storage class: nobody makes a volume for it.
const CLAIM: &str = "
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: models, namespace: prima}
spec: {accessModes: [ReadOnlyMany], storageClassName: '', resources: {requests: {storage: 1Gi}}}
";

/// A folder of the node.
const VOLUME: &str = "
apiVersion: v1
kind: PersistentVolume
metadata: {name: models}
spec:
  accessModes: [ReadOnlyMany]
  capacity: {storage: 1Gi}
  storageClassName: ''
  claimRef: {namespace: prima, name: models}
  hostPath: {path: /var/lib/prima/models}
";

#[test]
fn every_scenario_is_installed_and_tested() {
    let images = PrimaImages::build();
    let cluster = Cluster::start(1);
    cluster.import_prima(&images);
    cluster.start_tools();
    let kubectl = |args: &[&str]| {
        let said = cluster.kubectl(args);
        said.unwrap_or_else(|error| panic!("{error}"))
    };
    let helm = |args: &[&str]| {
        let said = cluster.helm(args);
        said.unwrap_or_else(|error| panic!("{error}"))
    };
    let registry = Registry::start_in(&cluster);
    let pushed = images.names.iter().map(|name| {
        let (_, there) = name.split_once('/').expect("a registry's name");
        registry.push_within(&cluster, &images.archive, name, there)
    });
    let digests: Vec<String> = pushed.collect();
    let operator = &digests[0];
    for needed in [definitions::foreign().as_str(), NAMED] {
        cluster.apply(needed).expect("is applied");
    }
    let timeout = timeout_argument();
    let established = ["wait", "--for=condition=Established", "crd", "--all"];
    kubectl(&[&established[..], &[&timeout]].concat());
    cluster.put_model_on(0);
    cluster.wait_for_daemon("tools");
    let pinned = format!("operator.image.digest={operator}");

    for file in scenarios() {
        let begun = Instant::now();
        let scenario = file.file_stem().expect("a name").to_string_lossy();
        let (level, values) = match &*scenario {
            // The only node is the one that can mount the claim.
            "claims-values" => ("privileged", vec!["agent.claimNodeLabel.value=node-0"]),
            // There is no such Model.
            "exposed-values" => ("privileged", vec!["tests.model.name="]),
            "local-models-values" => {
                // The owner prepared it. Of a node's folders only those below /var are its own.
                let data = cluster.var_of(0).join("lib/prima");
                chown(data, Some(USER), Some(USER)).expect("a folder");
                let folders = [
                    "agent.dataDir=/var/lib/prima",
                    "agent.modelDirs={/var/models}",
                ];
                ("privileged", [&folders[..], &[&pinned]].concat())
            }
            "restricted-values" => ("restricted", vec![]),
            _ => ("privileged", vec![]),
        };
        let level = format!("pod-security.kubernetes.io/enforce={level}");
        kubectl(&["label", "namespace", "prima", "--overwrite", &level]);
        let mut options = vec!["--values", file.to_str().expect("a path in UTF-8")];
        options.extend(values.iter().flat_map(|value| ["--set", *value]));
        match &*scenario {
            "claims-values" => install_for_a_claim(&cluster, &options),
            _ => cluster.install_prima(&chart(), &options),
        }
        let said = helm(&["test", "prima", "--namespace", "prima", &timeout]);
        assert!(said.contains("Succeeded"), "{said}");
        let uninstall = ["uninstall", "prima", "--namespace", "prima", "--wait"];
        helm(&[&uninstall[..], &[&timeout]].concat());
        wait_until("its pods are gone", || {
            let pods = ["get", "pods", "--all-namespaces", "-o", "name", "-l"];
            let ours = "app.kubernetes.io/component in (agent, operator)";
            kubectl(&[&pods[..], &[ours]].concat()).is_empty()
        });
        println!("{scenario}: {:.0} s", begun.elapsed().as_secs_f64());
    }
}

/// Installs the chart where the agents' claim has no volume yet: they wait, and a Model with a file in it says for what.
fn install_for_a_claim(cluster: &Cluster, options: &[&str]) {
    thread::scope(|scope| {
        // It waits until all pods are ready.
        let install = scope.spawn(|| cluster.install_prima(&chart(), options));
        wait_for("Models are known", || cluster.kubectl(&["get", "models"]));
        let source = "persistentVolumeClaim: {claimName: models, path: smollm2.gguf}";
        cluster.apply_model("claimed", source, "");
        wait_until_it_says(cluster, "claimed", "claim models in prima does not exist");
        cluster.apply(CLAIM).expect("a claim");
        wait_until_it_says(cluster, "claimed", "claim models in prima is Pending");
        wait_for("the agent waits, too", || {
            let agents = cluster.pods_of("agent")?;
            let waits = |pod: &Value| {
                condition(pod, "PodScheduled")["status"] == "False"
                    && pod["metadata"]["labels"]["prima.dev/agent-variant"] == "cpu-claims"
            };
            match &agents[..] {
                [agent] if waits(agent) => Ok(()),
                others => Err(format!("{others:?}")),
            }
        });
        cluster.apply(VOLUME).expect("a volume");
        install.join().expect("is installed");
    });
    cluster.wait_until_ready("claimed");
    cluster.first_answer_from(0, "claimed");
    // Else its agent would not end before others run it.
    cluster.delete_model("claimed");
}

/// Waits until the Model is not ready, and this is among the reasons.
fn wait_until_it_says(cluster: &Cluster, model: &str, why: &str) {
    wait_until(why, || {
        let (status, message) = cluster.condition(model, "Ready");
        status == "False" && message.contains(why)
    });
}

/// The files.
fn scenarios() -> Vec<PathBuf> {
    let files = fs::read_dir(chart().join("ci")).expect("a folder");
    let mut files: Vec<_> = files.map(|file| file.expect("a file").path()).collect();
    files.sort();
    assert!(files.len() > 1, "{files:?}");
    files
}
