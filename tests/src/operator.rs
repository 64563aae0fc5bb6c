//! `prima operator` as a process beside an API server, with the rights that the chart gives it and no others.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, ExitStatus};

use rustix::process::Signal;
use serde_json::json;
use tempfile::TempDir;

use crate::PATIENCE;
use crate::api_server::ApiServer;
use crate::command::run;
use crate::free_ports::free_address;
use crate::inputs;
use crate::process::send_signal;
use crate::service::Service;

/// Where the chart is installed.
pub const NAMESPACE: &str = "prima";

/// Gives the Models of the namespace a token of their own for the hub.
pub fn give_hub_token(api: &ApiServer, namespace: &str, token: &str) {
    let secret = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "prima-hub", "namespace": namespace},
        "stringData": {"token": token},
    });
    api.apply(&secret.to_string()).expect("a Secret");
}

/// A plan for `desk` and `laptop`, of a model that nobody has.
pub fn ring_plan(name: &str, model: &str) -> String {
    format!(
        "
apiVersion: prima.dev/v1alpha1
kind: RingPlan
metadata: {{name: {name}, namespace: default}}
spec:
  generation: 1
  model: {{name: {model}, file: /models/tiny.gguf, sizeBytes: 1024, layers: 2}}
  contextLength: 128
  maxConcurrentRequests: 1
  rounds: 1
  members:
  - {{name: desk, address: '10.0.0.1:9200', windows: [{{first: 0, last: 1}}]}}
  - {{name: laptop, address: '10.0.0.2:9200', windows: [{{first: 1, last: 2}}]}}
"
    )
}

/// Installs the chart: definitions, rights and policies. Its pods are not run, as there is no node.
pub fn install_chart(api: &ApiServer) {
    let chart = inputs::file("charts/prima");
    let chart = chart.to_str().expect("a path in UTF-8");
    api.helm(&[
        "install",
        "prima",
        chart,
        "--namespace",
        NAMESPACE,
        "--create-namespace",
        // The API server itself refuses fields that it does not know. Else helm asks it for the schemas of all that it has, and reads them anew
        // for each object; api_server_chart has it do so.
        "--disable-openapi-validation",
    ])
    .expect("the chart is installed");
    api.wait_for_definitions();
}

/// The chart as it was before its last change, below the same path: from the newest commit in which it differs from the one here in these
/// `parts`, pathspecs of git. `None` if git has no such commit, as in a shallow clone.
pub fn chart_before(parts: &[&str]) -> Option<TempDir> {
    let git = |arguments: &[&str], parts: &[&str]| {
        let mut command = Command::new("git");
        command
            .arg("-C")
            .arg(inputs::repository())
            .args(arguments)
            .arg("--")
            .args(parts);
        command
    };
    let commits = run(git(&["log", "--format=%H"], parts), "").ok()?;
    let differs = |commit: &&str| {
        let same = git(&["diff", "--quiet", commit], parts).status();
        !same.expect("git").success()
    };
    let commit = commits.lines().find(differs)?;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let archive = folder.path().join("chart.tar");
    let output = format!("--output={}", archive.display());
    let archived = run(git(&["archive", &output, commit], &["charts/prima"]), "");
    archived.expect("the chart of that commit");
    let mut unpack = Command::new("tar");
    unpack.args(["-xf", "chart.tar"]).current_dir(folder.path());
    run(unpack, "").expect("is unpacked");
    Some(folder)
}

/// Changes values of the chart that [`install_chart`] installed.
pub fn upgrade_chart(api: &ApiServer, values: &[&str]) {
    let chart = inputs::file("charts/prima");
    let chart = chart.to_str().expect("a path in UTF-8");
    let upgrade = ["upgrade", "prima", chart, "--namespace", NAMESPACE];
    api.helm(&[&upgrade[..], values].concat())
        .expect("the chart is upgraded");
}

/// The default, in [`Operator::start_with`]: for tests that wait until a Lease runs out.
pub const USUAL_LEASE: (&str, &str) = ("PRIMA_LEADER_LEASE", "30");

/// Killed on drop, as a pod on a node that fails.
pub struct Operator {
    service: Service,
    address: SocketAddr,
    _folder: TempDir,
}

impl Operator {
    /// Starts an operator called `identity`, and waits until it listens.
    pub fn start(api: &ApiServer, identity: &str) -> Self {
        Self::start_with(api, identity, &[])
    }

    /// The same with more environment variables.
    pub fn start_with(api: &ApiServer, identity: &str, environment: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let logs = folder.path().to_owned();
        Self::start_in(folder, &logs, api, identity, environment)
    }

    /// The same, with its log in `logs`, where it stays.
    pub fn start_logging(
        logs: &Path,
        api: &ApiServer,
        identity: &str,
        environment: &[(&str, &str)],
    ) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self::start_in(folder, logs, api, identity, environment)
    }

    fn start_in(
        folder: TempDir,
        logs: &Path,
        api: &ApiServer,
        identity: &str,
        environment: &[(&str, &str)],
    ) -> Self {
        let token = api
            .kubectl(&[
                "create",
                "token",
                "prima-operator",
                "--namespace",
                NAMESPACE,
            ])
            .expect("a token");
        let kubeconfig = folder.path().join("kubeconfig");
        api.write_kubeconfig(&kubeconfig, token.trim());
        let address = free_address();
        let mut command = Command::new(inputs::program("prima"));
        command
            .arg("operator")
            .args(["--namespace", NAMESPACE, "--identity", identity])
            .args(["--listen", &address.to_string()])
            .env("KUBECONFIG", &kubeconfig)
            // The hubs of tests.
            .env("PRIMA_ALLOWED_SERVERS", "127.0.0.1")
            // A stall of this machine must not take its Lease away.
            .env("PRIMA_LEADER_LEASE", PATIENCE.as_secs().to_string())
            .envs(environment.iter().copied());
        let mut service = Service::start("operator", command, logs);
        service.wait_until(|| crate::http::get(address, "/healthz").map(drop));
        Self {
            service,
            address,
            _folder: folder,
        }
    }

    /// Asks it to end, as a kubelet does, and waits until it has.
    pub fn terminate(self) -> ExitStatus {
        send_signal(self.service.id(), Signal::TERM);
        self.wait_for_end()
    }

    /// Waits until it ends by itself.
    pub fn wait_for_end(mut self) -> ExitStatus {
        self.service.wait_for_end()
    }

    /// Its process.
    pub fn process(&self) -> u32 {
        self.service.id()
    }

    /// Whether it has ended, by itself or as it was asked to.
    pub fn has_ended(&mut self) -> bool {
        self.service.has_ended()
    }

    /// What /readyz says.
    pub fn ready(&self) -> String {
        match crate::http::get(self.address, "/readyz") {
            Ok(response) => response.body.trim().to_owned(),
            Err(error) => error.to_string(),
        }
    }

    /// A metric of /metrics.
    pub fn metric(&self, name: &str) -> f64 {
        crate::http::metric(self.address, name).unwrap_or_else(|error| {
            panic!("no metric {name}: {error}\n{}", self.service.log_tail())
        })
    }

    /// Where it serves probes and metrics.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The text of its /metrics.
    pub fn metrics(&self) -> String {
        let answer = crate::http::get(self.address, "/metrics");
        answer.expect("metrics").body
    }

    /// The most memory that it has had so far, resident.
    pub fn peak_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.service.id()));
        let status = status.expect("a running operator");
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let peak = peak.and_then(|peak| peak.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        peak.expect("a number of kB") << 10
    }

    /// The end of its log.
    pub fn log_tail(&self) -> String {
        self.service.log_tail()
    }
}
