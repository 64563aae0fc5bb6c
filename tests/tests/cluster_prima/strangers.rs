//! Who reaches which port, where the chart's network policies are enforced.

use std::net::{IpAddr, SocketAddr, TcpStream};

use prima_tests::cluster::TOOLS_POD;
use prima_tests::{PATIENCE, timeout_argument, wait_for};

use crate::harness::{Test, index_of};

/// A pod, POD, that nobody let in.
const STRANGER: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: strangers}
---
apiVersion: v1
kind: Pod
metadata: {name: stranger, namespace: strangers}
spec: POD
";

impl Test {
    /// Only agents reach the ports that are for agents, and only clients that the chart's values allow reach a Model; others reach metrics.
    pub fn strangers_are_kept_out(&self, model: &str) {
        let pod = STRANGER.replace("POD", TOOLS_POD);
        // Its account comes a moment after its namespace.
        wait_for("a pod", || self.cluster.apply(&pod));
        let stranger = "pod/stranger";
        let ready = ["wait", "--for=condition=Ready", stranger, "-n", "strangers"];
        self.kubectl(&[&ready[..], &[&timeout_argument()]].concat());

        let plan = self.plans(model).pop().expect("a plan");
        let last = plan["spec"]["members"].as_array().expect("members").last();
        let last = last.expect("a member").clone();
        let ring: SocketAddr = last["address"]
            .as_str()
            .and_then(|address| address.parse().ok())
            .expect("an address");
        let slice = self
            .cluster
            .json(&["get", "endpointslice", &format!("{model}-ipv4")]);
        let rank0 = slice["endpoints"][0]["addresses"][0].as_str();
        let rank0 = rank0.and_then(|address| address.parse().ok());
        let rank0: IpAddr = rank0.expect("an address");
        let api = slice["ports"][0]["port"].as_u64().expect("a port") as u16;

        let links = SocketAddr::new(ring.ip(), 9190);
        let node = index_of(last["name"].as_str().expect("a name"));
        for port in [ring, links] {
            let there = self.cluster.node(node).within(|| TcpStream::connect(port));
            there.unwrap_or_else(|error| panic!("{port}: {error}"));
            assert!(!self.connects("default", "daemonset/tools", port), "{port}");
            assert!(!self.connects("strangers", stranger, port), "{port}");
        }
        let api = SocketAddr::new(rank0, api);
        assert!(self.connects("default", "daemonset/tools", api));
        assert!(!self.connects("strangers", stranger, api));
        let metrics = SocketAddr::new(rank0, 9191);
        assert!(self.connects("strangers", stranger, metrics));
    }

    /// Whether a pod of a namespace gets a connection.
    fn connects(&self, namespace: &str, pod: &str, to: SocketAddr) -> bool {
        let url = format!("http://{to}/metrics");
        let seconds = PATIENCE.as_secs().to_string();
        let wget = ["/bin/busybox", "timeout", &seconds, "/bin/busybox", "wget"];
        let wget = [&wget[..], &["-q", "-O", "-", &url]].concat();
        let exec = ["exec", "-n", namespace, pod, "--"];
        match self.cluster.kubectl(&[&exec[..], &wget].concat()) {
            Ok(_) => true,
            Err(error) => {
                let said = error.to_string();
                // A server of another protocol than HTTP, or without this page, is there.
                assert!(said.contains("wget: "), "{said}");
                !said.contains("can't connect")
            }
        }
    }
}
