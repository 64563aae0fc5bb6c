//! The harness's cluster is a real one: its nodes pull an image that was built here, by its name and by its digest, and run pods from it; pods
//! reach each other, Services, the API server and a test's own server; and a node can lose its power or its link, and get them back.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use prima_tests::cluster::{Cluster, build_images};
use prima_tests::registry::Registry;
use prima_tests::{PATIENCE, http, timeout_argument, wait_for};

const NODES: usize = 3;
/// For an answer, where another try may follow: a connection may have begun too early to lead anywhere.
const TRY: Duration = Duration::from_secs(10);

/// A web server on every node that tells the node's name, as little trusted as a pod can be. NAME is its own, IMAGE its image's.
const ECHO: &str = r#"
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: NAME, namespace: default}
spec:
  selector: {matchLabels: {app: NAME}}
  template:
    metadata: {labels: {app: NAME}}
    spec:
      automountServiceAccountToken: false
      securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
      terminationGracePeriodSeconds: 0
      containers:
      - name: echo
        image: IMAGE
        args: [/www]
        env: [{name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]
        readinessProbe: {httpGet: {port: 8080, path: /}, periodSeconds: 1}
        resources: {limits: {memory: 64Mi}}
        securityContext: {readOnlyRootFilesystem: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
        volumeMounts: [{name: www, mountPath: /www}]
      volumes: [{name: www, emptyDir: {}}]
---
apiVersion: v1
kind: Service
metadata: {name: NAME, namespace: default}
spec: {selector: {app: NAME}, ports: [{port: 80, targetPort: 8080}]}
"#;

/// In the archive that it is built into.
const ECHO_IMAGE: &str = "localhost/echo:smoke";
/// The image's program.
const SERVE: &str = r#"#!/bin/busybox sh
cd "$1"
echo "$NODE" > index.html
echo "serves on $NODE as $(/bin/busybox id -u)"
exec /bin/busybox httpd -f -p 8080
"#;

#[test]
fn pods_run_on_every_node_and_reach_each_other() {
    let cluster = Cluster::start(NODES);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let registry = Registry::start_in(&cluster);
    let archive = build_echo_image(folder.path());
    let digest = registry.push_within(&cluster, &archive, ECHO_IMAGE, "tests/echo:smoke");
    let repository = format!("{}/tests/echo", registry.address());
    for (name, image) in [
        ("echo", format!("{repository}:smoke")),
        ("pinned", format!("{repository}@{digest}")),
    ] {
        let echo = ECHO.replace("NAME", name).replace("IMAGE", &image);
        cluster.apply(&echo).expect("a DaemonSet and a Service");
        cluster.wait_for_daemon(name);
    }

    let pods = pods_by_node(&cluster);
    assert_eq!(pods.len(), NODES);
    for from in &pods {
        // What a pod has said is in its log a moment later.
        let log = wait_for("a log", || {
            let log = cluster.kubectl(&["logs", &from.name]);
            let log = log.map_err(|error| error.to_string())?;
            (!log.is_empty()).then_some(log).ok_or("nothing".to_owned())
        });
        assert_eq!(log, format!("serves on {} as 65532\n", from.node));
        for to in &pods {
            let answer = get_from(&cluster, from, &format!("http://{}:8080/", to.address));
            assert_eq!(answer.expect("an answer of a pod").trim(), to.node);
        }
        // A node's kube-proxy and the name server hear of a Service a moment after it is there.
        wait_for("the Service is known", || {
            get_within(TRY, &cluster, from, "http://echo/")
        });
        // Often enough that it went to the pod of this node and to others.
        for _ in 0..5 {
            let answer = get_from(&cluster, from, "http://echo/");
            let answer = answer.expect("an answer of the Service");
            assert!(answer.starts_with("node-"), "{answer}");
        }
    }
    let refused = exec(&cluster, &pods[0], &["touch", "/bin/new"]).expect_err("a read-only root");
    assert!(refused.contains("Read-only file system"), "{refused}");

    let version = get_from(&cluster, &pods[0], "https://kubernetes.default/version");
    let version = version.expect("an answer of the API server");
    assert!(version.contains("v1.36"), "{version}");

    let forward = cluster.port_forward("default", "service/echo", 80);
    let answer = cluster.within(|| http::get(forward.address, "/"));
    let answer = answer.expect("an answer through the API server");
    assert!(answer.body.starts_with("node-"), "{}", answer.body);

    let own_server = serve_once(&cluster);
    let answer = get_from(&cluster, &pods[0], &format!("http://{own_server}/"));
    assert_eq!(answer.expect("an answer of the test"), "hello");
    let charts = cluster.helm(&["list", "--all-namespaces"]).expect("helm");
    assert!(charts.starts_with("NAME"), "{charts}");

    let (first, last) = (&pods[0], &pods[NODES - 1]);
    let url = format!("http://{}:8080/", last.address);
    cluster.node(NODES - 1).cut_link();
    let none = get_within(TRY, &cluster, first, &url);
    none.expect_err("the link is cut");
    cluster.node(NODES - 1).restore_link();
    // Neighbours that did not answer are looked for again a moment later.
    wait_for("the link is back", || {
        get_within(TRY, &cluster, first, &url)
    });

    cluster.node(1).kill();
    wait_for_condition(&cluster, "node/node-1", "Ready=Unknown");
    cluster.node(1).restart();
    wait_for_condition(&cluster, "node/node-1", "Ready");
    cluster.wait_for_daemon("echo");
    // Until its kubelet says otherwise, the pod is said to have the address of before.
    let answer = wait_for("an answer of a restarted pod", || {
        let url = format!("http://{}:8080/", pods_by_node(&cluster)[1].address);
        get_within(TRY, &cluster, first, &url)
    });
    assert_eq!(answer.trim(), "node-1");
}

struct Pod {
    name: String,
    node: String,
    address: String,
}

fn wait_for_condition(cluster: &Cluster, what: &str, condition: &str) {
    let condition = format!("--for=condition={condition}");
    let waited = cluster.kubectl(&["wait", &condition, what, &timeout_argument()]);
    waited.unwrap_or_else(|error| panic!("{error}"));
}

fn pods_by_node(cluster: &Cluster) -> Vec<Pod> {
    let pod = "{.metadata.name} {.spec.nodeName} {.status.podIP}";
    let template = format!("jsonpath={{range .items[*]}}{pod}{{\"\\n\"}}{{end}}");
    let printed = cluster.kubectl(&["get", "pods", "-l", "app=echo", "-o", &template]);
    let printed = printed.expect("pods");
    let mut pods: Vec<Pod> = printed.lines().map(pod_of).collect();
    pods.sort_by(|a, b| a.node.cmp(&b.node));
    pods
}

fn pod_of(line: &str) -> Pod {
    let mut words = line.split(' ').map(str::to_owned);
    let mut next = || words.next().expect("a column");
    Pod {
        name: next(),
        node: next(),
        address: next(),
    }
}

fn get_from(cluster: &Cluster, pod: &Pod, url: &str) -> Result<String, String> {
    get_within(PATIENCE, cluster, pod, url)
}

fn get_within(
    patience: Duration,
    cluster: &Cluster,
    pod: &Pod,
    url: &str,
) -> Result<String, String> {
    let wget = format!("/bin/busybox wget --no-check-certificate -q -O - {url}");
    let seconds = patience.as_secs().to_string();
    exec(
        cluster,
        pod,
        &["timeout", &seconds, "/bin/busybox", "sh", "-c", &wget],
    )
}

fn exec(cluster: &Cluster, pod: &Pod, command: &[&str]) -> Result<String, String> {
    let mut args = vec!["exec", &pod.name, "--", "/bin/busybox"];
    args.extend(command);
    cluster.kubectl(&args).map_err(|error| error.to_string())
}

/// Answers one request, where pods reach it.
fn serve_once(cluster: &Cluster) -> SocketAddr {
    let listener = cluster.within(|| TcpListener::bind((cluster.address(), 0)));
    let listener = listener.expect("a port in the cluster's network");
    let address = listener.local_addr().expect("its address");
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a pod");
        let mut request = [0; 1024];
        let length = stream.read(&mut request).expect("a request");
        assert!(request[..length].starts_with(b"GET / "));
        let answer = b"HTTP/1.0 200 OK\r\n\r\nhello";
        stream.write_all(answer).expect("answer a pod");
    });
    address
}

fn build_echo_image(folder: &Path) -> PathBuf {
    fs::write(folder.join("serve"), SERVE).expect("write a file");
    let image = (ECHO_IMAGE.to_owned(), "serve");
    build_images(folder, "tools-root.tar", &[image])
}
