//! A real API server for one test: kube-apiserver with its own store, certificates and accounts, ready in some seconds.
//!
//! It takes no root, no fixed port and no fixed path: any number of them run beside each other, each on an address of its own. What a
//! test does with it goes through [`kubectl`](ApiServer::kubectl), or any client that reads its [`kubeconfig`](ApiServer::kubeconfig). Who only
//! looks, again and again, does so with [`object`](ApiServer::object).

mod credentials;
mod site;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use serde_json::Value;
use tempfile::TempDir;

use crate::command::{CommandError, run};
use crate::programs::program;
use crate::service::Service;
use crate::{http, timeout_argument, wait_for, wait_until};
pub(crate) use credentials::Account;
use credentials::Credentials;
pub(crate) use site::{Site, free_loopback_address};

/// What keeps the API server's objects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Backend {
    Etcd,
    /// SQLite behind etcd's protocol, as k3s has it.
    Kine,
}

const PORT: u16 = 6443;
const STORE_PORT: u16 = 2379;
/// Who has an account beside the administrator and the kubelets.
const COMPONENTS: [&str; 3] = ["kube-controller-manager", "kube-scheduler", "kube-proxy"];
const SERVICE_NETWORK: &str = "10.96.0.0/16";
/// In place of a namespace: objects of all of them.
pub(crate) const ALL_NAMESPACES: &str = "";

/// A condition of an object as the API server has it; `null` where there is none yet.
pub fn condition(object: &Value, kind: &str) -> Value {
    let conditions = object["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    let found = conditions.find(|one| one["type"] == kind);
    found.cloned().unwrap_or_default()
}

/// It and what was started beside it ends on drop.
pub struct ApiServer {
    // Dropped in this order: first the clients, then the servers, last the files of all.
    components: Vec<Service>,
    server: Mutex<Option<Service>>,
    _store: Service,
    site: Site,
    credentials: Credentials,
    /// Of clients in this process.
    tls: Arc<ClientConfig>,
    kubeconfig: PathBuf,
    folder: TempDir,
}

/// Where the API server has the objects of a kind, in the singular or the plural: all of them, or those of the namespace where they have one.
fn path_of(kind: &str, namespace: &str) -> String {
    let own = "/apis/prima.dev/v1alpha1";
    let within = match namespace {
        ALL_NAMESPACES => String::new(),
        namespace => format!("/namespaces/{namespace}"),
    };
    match kind.trim_end_matches('s') {
        "namespace" => "/api/v1/namespaces".to_owned(),
        "nodeprofile" => format!("{own}/nodeprofiles"),
        "model" => format!("{own}{within}/models"),
        "ringplan" => format!("{own}{within}/ringplans"),
        "pod" => format!("/api/v1{within}/pods"),
        "service" => format!("/api/v1{within}/services"),
        "endpointslice" => format!("/apis/discovery.k8s.io/v1{within}/endpointslices"),
        "lease" => format!("/apis/coordination.k8s.io/v1{within}/leases"),
        "networkpolicy" | "networkpolicie" => {
            format!("/apis/networking.k8s.io/v1{within}/networkpolicies")
        }
        _ => panic!("nobody has looked for {kind} so far"),
    }
}

impl ApiServer {
    /// Starts an API server on loopback, and waits until it is ready. Panics with the end of a log if it does not get there.
    pub fn start(backend: Backend) -> ApiServer {
        ApiServer::start_at(Site::loopback(), backend, &[])
    }

    /// As [`start`](Self::start), on an address that this machine has where the test runs, and that others reach.
    pub fn start_on(address: Ipv4Addr, backend: Backend) -> ApiServer {
        ApiServer::start_at(Site::here(address), backend, &[])
    }

    /// As [`start`](Self::start), where `site` is, with accounts for the kubelets of `nodes`.
    pub(crate) fn start_at(site: Site, backend: Backend, nodes: &[String]) -> ApiServer {
        let folder = tempfile::Builder::new()
            .prefix("prima-api-server-")
            .tempdir();
        let folder = folder.expect("a temporary folder");
        let path = folder.path();
        let mut accounts: Vec<Account> = nodes.iter().map(|node| Account::kubelet(node)).collect();
        accounts.push(Account::admin());
        accounts.extend(COMPONENTS.map(Account::component));
        let credentials = Credentials::create(path, site.address(), &accounts);
        let store = site.enter(store_command(backend, site.address(), path));
        let server = ApiServer {
            components: Vec::new(),
            server: Mutex::default(),
            _store: Service::start("store", store, path),
            tls: Arc::new(credentials.client()),
            kubeconfig: path.join("kubeconfig"),
            site,
            credentials,
            folder,
        };
        server.write_kubeconfig(&server.kubeconfig, &Account::admin().token());
        *server.server.lock().unwrap() = Some(server.start_server());
        server
    }

    /// Stops the API server as a crash does, and starts it again where it was, on what it had stored.
    pub fn restart(&self) {
        // Held until it is ready: whoever comes meanwhile restarts it after that.
        let mut server = self.server.lock().unwrap();
        *server = None;
        // On another host it may take a moment until it is gone.
        wait_until("nobody listens there any more", || {
            let asked = self.get("/livez");
            asked.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        });
        *server = Some(self.start_server());
    }

    /// Starts kube-controller-manager beside the API server: garbage collection, service accounts, DaemonSets, lost nodes.
    pub fn start_controller_manager(&mut self) {
        let mut command = Command::new(program("kube-controller-manager"));
        command
            .arg("--use-service-account-credentials")
            .arg("--node-monitor-grace-period=20s")
            .arg(self.file_option("service-account-private-key-file", "service-accounts.key"))
            .arg(self.file_option("root-ca-file", "ca.crt"));
        self.start_component("kube-controller-manager", command);
    }

    /// Starts kube-scheduler beside the API server.
    pub fn start_scheduler(&mut self) {
        self.start_component("kube-scheduler", Command::new(program("kube-scheduler")));
    }

    /// The administrator's.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Writes to `path` the kubeconfig of whomever `token` belongs to, such as a service account.
    pub fn write_kubeconfig(&self, path: &Path, token: &str) {
        let (address, authority) = (self.site.address(), self.authority());
        let authority = authority.display();
        let text = format!(
            "apiVersion: v1
kind: Config
clusters: [{{name: test, cluster: {{server: \"https://{address}:{PORT}\", certificate-authority: \"{authority}\"}}}}]
users: [{{name: test, user: {{token: \"{token}\"}}}}]
contexts: [{{name: test, context: {{cluster: test, user: test}}}}]
current-context: test
"
        );
        fs::write(path, text)
            .unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
    }

    /// The authority's certificate: it signed the server's, and the one it shows to kubelets.
    pub(crate) fn authority(&self) -> PathBuf {
        self.credentials.path("ca.crt")
    }

    /// What kubectl prints, as the administrator, or whoever `--token` or `--as` says.
    ///
    /// # Errors
    /// What it wrote on stderr, where it fails.
    pub fn kubectl(&self, args: &[&str]) -> Result<String, CommandError> {
        self.run("kubectl", args, "")
    }

    /// An object (`model/big`), or all of a kind (`ringplans`), as kubectl has them in JSON; in the namespace, where the kind has one. It starts no
    /// process, which takes longer than all else.
    ///
    /// # Errors
    /// What the API server says where there is none, and what keeps it from being asked.
    pub fn object(&self, namespace: &str, what: &str) -> io::Result<Value> {
        let (kind, name) = what.split_once('/').unwrap_or((what, ""));
        let mut path = path_of(kind, namespace);
        if !name.is_empty() {
            path = format!("{path}/{name}");
        }
        let mut found: Value = serde_json::from_str(&self.get(&path)?)?;
        // Who wrote which field.
        let leave_out = |object: &mut Value| {
            let metadata = object.get_mut("metadata").and_then(Value::as_object_mut);
            if let Some(metadata) = metadata {
                metadata.remove("managedFields");
            }
        };
        leave_out(&mut found);
        // In lists, objects of Kubernetes' own kinds do not say their kind.
        let kind = found["kind"].as_str().unwrap_or_default();
        let kind = kind.strip_suffix("List").map(str::to_owned);
        let items = found.get_mut("items").and_then(Value::as_array_mut);
        for item in items.into_iter().flatten() {
            leave_out(item);
            item["kind"] = Value::from(kind.as_deref());
        }
        Ok(found)
    }

    /// What it answers the administrator at this path. While it has yet to read objects of this kind from its store, it answers 429. Then it is
    /// asked again, as every client does.
    fn get(&self, path: &str) -> io::Result<String> {
        let address = SocketAddr::from((self.site.address(), PORT));
        let ask = || -> io::Result<http::Response> {
            let name = ServerName::from(address.ip());
            let connection =
                ClientConnection::new(self.tls.clone(), name).map_err(io::Error::other)?;
            let stream = StreamOwned::new(connection, self.site.connect(address)?);
            http::get_over(stream, address, path, &Account::admin().token())
        };
        let answer = wait_for(path, || match ask() {
            Ok(answer) if answer.status == 429 => Err(answer.body),
            other => Ok(other),
        })?;
        match answer.status {
            200 => Ok(answer.body),
            status => Err(io::Error::other(format!(
                "{path}: {status}: {}",
                answer.body
            ))),
        }
    }

    /// `kubectl apply --server-side` of these documents.
    ///
    /// # Errors
    /// As [`kubectl`](Self::kubectl).
    pub fn apply(&self, yaml: &str) -> Result<String, CommandError> {
        self.run("kubectl", &["apply", "--server-side", "-f", "-"], yaml)
    }

    /// As [`apply`](Self::apply), but only tried out: nothing is stored, and unknown fields are refused.
    ///
    /// # Errors
    /// As [`kubectl`](Self::kubectl).
    pub fn try_out(&self, yaml: &str) -> Result<String, CommandError> {
        let args = [
            "apply",
            "--server-side",
            "--dry-run=server",
            "--validate=strict",
            "-f",
            "-",
        ];
        self.run("kubectl", &args, yaml)
    }

    /// `kubectl create` of a document; what came of it, in JSON.
    ///
    /// # Errors
    /// As [`kubectl`](Self::kubectl).
    pub fn create(&self, yaml: &str) -> Result<String, CommandError> {
        self.run("kubectl", &["create", "-o", "json", "-f", "-"], yaml)
    }

    /// Waits until all resource definitions are in force. A moment passes after they are established before they are served, and found by
    /// who looks for them.
    pub fn wait_for_definitions(&self) {
        let wait = ["wait", "--for=condition=Established", "crd", "--all"];
        self.kubectl(&[&wait[..], &[&timeout_argument()]].concat())
            .expect("definitions are established");
        let names = self.kubectl(&["get", "crd", "-o", "jsonpath={.items[*].metadata.name}"]);
        let names = names.expect("definitions").replace(' ', ",");
        wait_for("definitions are served", || {
            self.kubectl(&["get", &names, "--all-namespaces"])
        });
    }

    /// What helm prints, as the administrator.
    ///
    /// # Errors
    /// As [`kubectl`](Self::kubectl).
    pub fn helm(&self, args: &[&str]) -> Result<String, CommandError> {
        self.run("helm", args, "")
    }

    /// `program`, to be started where it reaches the API server, with the administrator's kubeconfig.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env("KUBECONFIG", &self.kubeconfig)
            // Their caches, apart from those of other tests.
            .env("HOME", self.folder.path());
        self.site.enter(command)
    }

    fn run(&self, name: &str, args: &[&str], input: &str) -> Result<String, CommandError> {
        let mut command = self.command(program(name));
        // It soon ends, and need not collect its garbage before.
        command.args(args).env("GOGC", "400");
        run(command, input)
    }

    /// Waits until it is ready.
    fn start_server(&self) -> Service {
        let address = self.site.address();
        let mut command = Command::new(program("kube-apiserver"));
        command
            // It lives for minutes: less of its time for collecting garbage.
            .env("GOGC", "400")
            .arg(format!("--etcd-servers={}", store_url(address)))
            .arg(format!("--bind-address={address}"))
            .arg(format!("--advertise-address={address}"))
            .arg(format!("--secure-port={PORT}"))
            .arg(format!("--service-cluster-ip-range={SERVICE_NETWORK}"))
            .arg("--service-account-issuer=https://kubernetes.default.svc")
            .arg("--authorization-mode=Node,RBAC")
            .arg("--enable-admission-plugins=NodeRestriction")
            .arg("--kubelet-preferred-address-types=InternalIP")
            .arg("--allow-privileged")
            .arg(self.file_option("tls-cert-file", "server.crt"))
            .arg(self.file_option("tls-private-key-file", "server.key"))
            .arg(self.file_option("token-auth-file", "tokens.csv"))
            .arg(self.file_option("kubelet-client-certificate", "kubelet-client.crt"))
            .arg(self.file_option("kubelet-client-key", "kubelet-client.key"))
            .arg(self.file_option("service-account-key-file", "service-accounts.pub"))
            .arg(self.file_option("service-account-signing-key-file", "service-accounts.key"));
        if address.is_loopback() {
            // The Service `kubernetes` cannot have a loopback endpoint, and there is no pod to ask for one.
            command.arg("--endpoint-reconciler-type=none");
        }
        let mut server = self.start_service("kube-apiserver", command);
        server.wait_until(|| self.get("/readyz").map(drop));
        server
    }

    fn start_component(&mut self, name: &str, mut command: Command) {
        let kubeconfig = self.credentials.path(&format!("{name}.kubeconfig"));
        self.write_kubeconfig(&kubeconfig, &Account::component(name).token());
        command
            .arg(format!("--bind-address={}", self.site.address()))
            .arg("--leader-elect=false")
            .arg("--kubeconfig")
            .arg(kubeconfig);
        self.components.push(self.start_service(name, command));
    }

    fn start_service(&self, name: &str, command: Command) -> Service {
        Service::start(name, self.site.enter(command), self.folder.path())
    }

    fn file_option(&self, name: &str, file: &str) -> OsString {
        let mut option = OsString::from(format!("--{name}="));
        option.push(self.credentials.path(file));
        option
    }
}

fn store_command(backend: Backend, address: Ipv4Addr, folder: &Path) -> Command {
    let url = store_url(address);
    let data = folder.join("store");
    match backend {
        Backend::Etcd => {
            let peers = format!("http://{address}:2380");
            let mut etcd = Command::new(program("etcd"));
            etcd.arg("--data-dir")
                .arg(data)
                .args([
                    "--listen-client-urls",
                    &url,
                    "--advertise-client-urls",
                    &url,
                ])
                .args([
                    "--listen-peer-urls",
                    &peers,
                    "--initial-advertise-peer-urls",
                    &peers,
                ])
                .args(["--initial-cluster", &format!("default={peers}")])
                .arg("--log-level=warn")
                // No test needs what a crash of the machine would lose.
                .arg("--unsafe-no-fsync");
            etcd
        }
        Backend::Kine => {
            let mut kine = Command::new(program("kine"));
            let options = "_journal=WAL&cache=shared&_busy_timeout=30000&_txlock=immediate";
            kine.arg(format!("--endpoint=sqlite://{}?{options}", data.display()))
                .arg(format!("--listen-address={url}"))
                .arg("--metrics-bind-address=0");
            kine
        }
    }
}

fn store_url(address: Ipv4Addr) -> String {
    format!("http://{address}:{STORE_PORT}")
}
