//! `prima-node-agent run`: the agent of a machine in a cluster. It measures the machine and tells the cluster what the machine can do. For
//! every plan that names the machine it keeps a member process (`prima-node-agent serve`), so that a cluster and a desk run the same
//! program.
//!
//! Decides how its parts are put together, and in which order they begin and end. Refuses to run layers itself, and to decide who runs
//! which layers: the plans say that.
//!
//! All of it runs on one thread: there is little to do, and the kernel ends the members' processes with the thread that
//! started them.

mod api;
mod ask_gpu;
mod backoff;
mod data_folder;
mod gpu_clients;
mod http;
mod last_words;
mod lease;
mod links;
mod local_models;
mod lost_gpu;
mod measure_again;
mod member;
mod member_process;
mod member_status;
mod memory;
mod metrics;
mod own_key;
mod owner;
mod plan_checks;
mod plan_key;
mod plan_watch;
mod publish_profile;
mod weights;

use std::env;
use std::future::pending;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kube::Client;
use prima_crds::quantity::Quantity;
use prima_engine::Compute;
use prima_member_process::on_all_addresses;
use prima_weights::{AllowedServer, PUBLIC_HUB};
use tokio::sync::{Notify, watch};
use tokio::task::{JoinError, JoinSet, spawn_blocking};

use self::data_folder::DataFolder;
use self::links::Links;
use self::lost_gpu::GpuFailures;
use self::measure_again::MeasureAgain;
use self::member::Agent;
use self::memory::Children;
use self::metrics::{Established, Metrics};
use self::own_key::KeyFile;
use self::weights::{Weights, WeightsError, WeightsOptions};
use crate::profile::{self, Measured, Measuring, ProfileError, system};
use crate::ring::{EchoServer, IdentityError, LinkError, Pins};
use crate::stop_signal::StopSignal;

#[derive(clap::Args)]
pub struct RunArgs {
    /// The Node that this agent runs on
    #[arg(long, value_name = "NAME", env = "NODE_NAME", value_parser = system::check_name)]
    node: String,
    /// Address of this agent's pod, where the other agents reach it
    #[arg(long, value_name = "IP", env = "POD_IP")]
    pod_ip: IpAddr,
    /// Where this agent's Lease is
    #[arg(long, value_name = "NAMESPACE", env = "POD_NAMESPACE", value_parser = system::check_name)]
    namespace: String,
    /// Folder for what is fetched and measured
    #[arg(long, value_name = "DIR", default_value = "/var/lib/prima")]
    data: PathBuf,
    /// Disk space that fetched model files may take, such as 200Gi [default: what keeps a fifth of the file system free]
    #[arg(long, value_name = "SIZE")]
    cache_budget: Option<Quantity>,
    /// Where other agents measure their link to this one; the port is the same on all machines [default: port 9190 of --pod-ip]
    #[arg(long, value_name = "IP:PORT")]
    listen: Option<SocketAddr>,
    /// Where /healthz, /readyz and /metrics are [default: port 9191 of all addresses of the kind of --pod-ip, IPv4 or IPv6]
    #[arg(long, value_name = "IP:PORT")]
    http: Option<SocketAddr>,
    /// Compute threads of each member [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Servers of model files beside the hub that may be asked although they are not on the internet, by name or network
    #[arg(
        long,
        value_name = "SERVER,...",
        env = "PRIMA_ALLOWED_SERVERS",
        value_delimiter = ','
    )]
    allowed_servers: Vec<AllowedServer>,
}

impl RunArgs {
    fn links_address(&self) -> SocketAddr {
        let address = SocketAddr::new(self.pod_ip, LINKS_PORT);
        self.listen.unwrap_or(address)
    }

    fn http_address(&self) -> SocketAddr {
        let address = SocketAddr::new(self.pod_ip, HTTP_PORT);
        self.http.unwrap_or_else(|| on_all_addresses(address))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    #[error("cannot start")]
    Start(#[source] io::Error),
    #[error(
        "cannot use {}: name a folder that this user may write to with --data", path.display()
    )]
    Folder {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("this agent cannot prove who it is")]
    Identity(#[source] IdentityError),
    #[error("cannot listen on {address} (--http); is another process using it?")]
    Http {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("cannot answer the measurements of other agents (--listen)")]
    Links(#[source] LinkError),
    #[error("cannot find the cluster: neither a service account nor KUBECONFIG")]
    Config(#[source] kube::config::InferConfigError),
    #[error("cannot set up requests to the API server")]
    Client(#[source] kube::Error),
    #[error("cannot keep model files")]
    Weights(#[source] WeightsError),
    #[error("cannot measure this agent")]
    Profile(#[source] ProfileError),
    #[error("a part of the agent ended")]
    Part(#[source] JoinError),
    #[error("a part of the agent ended: {0}")]
    Ended(&'static str),
}

const LINKS_PORT: u16 = 9190;
const HTTP_PORT: u16 = 9191;

/// Runs until SIGTERM or SIGINT (`Ok`), or until it cannot go on.
pub fn run(args: RunArgs) -> Result<(), ClusterError> {
    // Fails only if a provider was chosen already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(ClusterError::Start)?;
    let result = runtime.block_on(run_agent(args));
    runtime.shutdown_background();
    result
}

async fn run_agent(args: RunArgs) -> Result<(), ClusterError> {
    let mut stop = StopSignal::new().map_err(ClusterError::Start)?;
    let (links, http) = (args.links_address(), args.http_address());
    let data_folder = DataFolder::open(&args.data)?;
    let metrics = Metrics::default();
    let established = Established::default();
    let listener = tokio::net::TcpListener::bind(http).await;
    let listener = listener.map_err(|source| ClusterError::Http {
        address: http,
        source,
    })?;
    let mut parts = Parts::default();
    // Before it waits for another agent, which may take longer than a probe.
    parts.keep_http(&metrics, listener, &established);
    let folders = tokio::select! {
        folders = data_folder.own() => folders?,
        () = stop.received() => return Ok(()),
    };
    let mut config = kube::Config::infer().await.map_err(ClusterError::Config)?;
    config.read_timeout = Some(prima_crds::SILENCE);
    let client = Client::try_from(config).map_err(ClusterError::Client)?;
    let weights = Weights::open(WeightsOptions {
        folder: folders.cache,
        budget_bytes: args.cache_budget.map(Quantity::bytes),
        hub: set("HF_ENDPOINT").unwrap_or_else(|| PUBLIC_HUB.to_owned()),
        token: set("HF_TOKEN"),
        api_server: client.clone(),
        allowed_servers: args.allowed_servers,
        fetched_bytes: metrics.fetched_bytes.clone(),
    })
    .map_err(ClusterError::Weights)?;
    let key_file = KeyFile::open(args.data.join(own_key::FILE)).map_err(ClusterError::Identity)?;
    let peers = Pins::default();
    let keys = Some((key_file.key(), peers.clone()));
    let _echo = EchoServer::start(links, keys).map_err(ClusterError::Links)?;
    let agent = Arc::new(Agent {
        client,
        node: args.node,
        address: args.pod_ip,
        key_file,
        threads: args.threads,
        plans_folder: folders.plans,
        weights,
        children: Children::default(),
        gpu_failures: GpuFailures::default(),
        metrics,
    });

    let (leave, leaving) = watch::channel(false);
    tokio::select! {
        () = last_words::take_back(&agent) => {}
        () = stop.received() => return Ok(()),
    }
    parts.keep_lease(&agent, args.namespace, leaving);
    let measured = tokio::select! {
        measured = begin(&agent, &args.data) => measured?,
        () = stop.received() => return Ok(()),
    };
    let links = (links.port(), peers);
    parts.keep_profile(&agent, measured, args.data, links, &established);

    let mut outcome = Ok(());
    let ending = async {
        outcome = tokio::select! {
            () = stop.received() => Ok(()),
            ended = parts.ended() => Err(ended),
        };
        leave.send_replace(true);
        tracing::info!(
            "the agent ends: its members run until rings do without them, and finish what runs"
        );
    };
    plan_watch::follow(agent.clone(), established, ending).await;
    outcome
}

/// The parts that run as long as the agent, each with its name.
#[derive(Default)]
struct Parts(JoinSet<&'static str>);

impl Parts {
    fn keep(&mut self, name: &'static str, part: impl Future<Output = ()> + Send + 'static) {
        self.0.spawn(async move {
            part.await;
            name
        });
    }

    /// Waits until a part ends, which none should.
    async fn ended(&mut self) -> ClusterError {
        match self.0.join_next().await {
            Some(Ok(part)) => ClusterError::Ended(part),
            Some(Err(error)) => ClusterError::Part(error),
            None => pending().await,
        }
    }

    /// Starts what tells the kubelet that the agent is there.
    fn keep_http(
        &mut self,
        metrics: &Metrics,
        listener: tokio::net::TcpListener,
        established: &Established,
    ) {
        let (metrics, there) = (metrics.clone(), established.clone());
        self.keep("its HTTP server", http::serve(listener, metrics, there));
    }

    /// Starts what tells the operator, before anything is measured.
    fn keep_lease(
        &mut self,
        agent: &Arc<Agent>,
        namespace: String,
        leaving: watch::Receiver<bool>,
    ) {
        let own = agent.clone();
        let pod = set("POD_NAME").unwrap_or_else(system::host_name);
        self.keep("the Lease", async move {
            lease::keep(own.client.clone(), &namespace, &own.node, &pod, leaving).await;
        });
    }

    /// Starts what keeps the machine's profile up to date, and its cache within its budget.
    fn keep_profile(
        &mut self,
        agent: &Arc<Agent>,
        Measured {
            status,
            others_percent,
            ..
        }: Measured,
        data: PathBuf,
        (port, pins): (u16, Pins),
        established: &Established,
    ) {
        let (profile, published) = watch::channel(status);
        let deleted = Arc::new(Notify::new());
        let (own, gone, there) = (agent.clone(), deleted.clone(), established.clone());
        self.keep("publishing the profile", async move {
            let client = own.client.clone();
            publish_profile::publish(client, &own.node, published, gone, there).await;
        });
        let children = agent.children.clone();
        self.keep(
            "following the memory",
            memory::follow(profile.clone(), children),
        );
        let children = agent.children.clone();
        self.keep(
            "following the GPU's memory",
            memory::follow_gpu(profile.clone(), children, agent.gpu_failures.clone()),
        );
        let children = agent.children.clone();
        self.keep(
            "looking after a GPU that fails",
            agent.gpu_failures.follow(profile.clone(), children),
        );
        let key = agent.key_file.clone().follow(profile.clone());
        self.keep("following the key", key);
        let threads = agent.threads;
        let again = MeasureAgain {
            others_percent,
            metrics: agent.metrics.clone(),
            file: measured_file(&data),
            measure: move || measured(&data, threads, true),
        };
        self.keep("measuring again", again.follow(profile.clone()));
        let (client, weights) = (agent.client.clone(), agent.weights.clone());
        self.keep(
            "watching Models",
            local_models::follow(client, profile.clone(), weights, established.clone()),
        );
        let links = Links {
            node: agent.node.clone(),
            port,
            own: agent.key_file.key(),
            pins,
            profile,
            deleted,
            established: established.clone(),
        };
        self.keep(
            "watching NodeProfiles",
            links::follow(agent.client.clone(), links),
        );
        let (weights, there) = (agent.weights.clone(), established.clone());
        self.keep("looking after the cache of model files", async move {
            weights.keep_to_budget(there).await;
        });
    }
}

/// What the machine can do, measured now or lately, with the links that its agent had measured before.
async fn begin(agent: &Agent, data: &Path) -> Result<Measured, ClusterError> {
    let (data, threads) = (data.to_owned(), agent.threads);
    let measuring = spawn_blocking(move || measured(&data, threads, false));
    let mut measured = measuring.await.map_err(ClusterError::Part)??;
    let status = &mut measured.status;
    let mut own = publish_profile::agent_profile(agent.address, status);
    own.public_key_sha256 = Some(agent.key_file.fingerprint());
    let client = agent.client.clone();
    match publish_profile::published_before(client, &agent.node).await {
        Ok((links, models)) => {
            status.links.extend(links);
            own.local_models = models;
        }
        Err(error) => {
            let problem = prima_crds::error_chain(&error);
            tracing::warn!(
                problem,
                "links that were measured before are measured again"
            );
        }
    }
    status.agent = Some(own);
    Ok(measured)
}

/// Where it is kept what the machine can do.
fn measured_file(data: &Path) -> PathBuf {
    data.join("profile.json")
}

/// `again`: also if it was measured lately. Whether that counts is not known yet, so it is not kept.
fn measured(data: &Path, threads: Option<u16>, again: bool) -> Result<Measured, ClusterError> {
    let models = data.canonicalize().map_err(|source| ClusterError::Folder {
        path: data.to_owned(),
        source,
    })?;
    let file = measured_file(data);
    profile::measured(&Measuring {
        models: &models,
        threads: threads.map_or_else(Compute::available_threads, usize::from),
        cache_file: (!again).then_some(&*file),
        fresh: again,
    })
    .map_err(ClusterError::Profile)
}

/// An environment variable, if it is set and not empty.
fn set(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct CommandLine {
        #[command(flatten)]
        args: RunArgs,
    }

    #[test]
    fn it_listens_where_others_reach_its_pod() {
        for (pod_ip, links, http) in [
            ("10.42.0.7", "10.42.0.7:9190", "0.0.0.0:9191"),
            ("fd00::7", "[fd00::7]:9190", "[::]:9191"),
        ] {
            let pod = ["--node", "desk", "--namespace", "prima", "--pod-ip", pod_ip];
            let args = CommandLine::parse_from([&["run"][..], &pod].concat()).args;
            assert_eq!(args.links_address().to_string(), links);
            assert_eq!(args.http_address().to_string(), http);
        }
    }
}
