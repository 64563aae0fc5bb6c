//! `prima operator`: turns Models into rings, in a cluster. This file decides what runs beside what: watches, leader election,
//! the HTTP server for probes and metrics, and the controller. What is done for a Model is `model_controller`'s to decide.

mod election;
mod machine_status;
pub mod metrics;
pub mod models;
mod probes;
mod telemetry;
mod watching;
pub mod world;

use std::future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use kube::Client;
use kube::runtime::controller::{self, Config};
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::{Controller, WatchStreamExt, reflector};
use prima_kubernetes::HubTokens;
use prima_member_process::on_all_addresses;
use prima_traces::TracesError;
use prima_weights::{AllowedServer, Hub, PUBLIC_HUB, Reach};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::model_controller::planner::Planner;
use crate::model_controller::resolve::{HeaderReader, RETRY};
use crate::model_controller::{self, Context, Question, Reached};
use crate::stop_signals::StopSignals;
use election::Election;
use metrics::Metrics;
use probes::Probes;
use telemetry::Telemetry;
use world::Stores;

#[derive(clap::Args)]
pub struct OperatorArgs {
    /// The operator's own namespace: its Lease is there
    #[arg(long, value_name = "NAMESPACE", env = "POD_NAMESPACE")]
    namespace: String,
    /// Where the agents' Leases are [default: the operator's namespace]
    #[arg(long, value_name = "NAMESPACE")]
    agent_namespace: Option<String>,
    /// Claims in the agents' namespace that agents mount: a Model with a file in one that has no volume says so
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    agent_claims: Vec<String>,
    /// Who this instance is among its replicas
    #[arg(long, value_name = "NAME", env = "POD_NAME", default_value_t = process_name())]
    identity: String,
    /// Seconds without a sign of the leading instance after which another one takes over
    #[arg(
        long,
        value_name = "SECONDS",
        env = "PRIMA_LEADER_LEASE",
        default_value_t = 30,
        value_parser = clap::value_parser!(u64).range(6..=600)
    )]
    leader_lease: u64,
    /// Address of this operator's pod, where others reach it
    #[arg(long, value_name = "IP", env = "POD_IP", default_value = "0.0.0.0")]
    pod_ip: IpAddr,
    /// Where /healthz, /readyz and /metrics are served [default: port 8080 of all addresses of the kind of --pod-ip, IPv4 or IPv6]
    #[arg(long, value_name = "IP:PORT")]
    listen: Option<SocketAddr>,
    /// The cluster's DNS domain, for the endpoints that Models show
    #[arg(long, value_name = "DOMAIN", default_value = "cluster.local")]
    cluster_domain: String,
    /// The hub of Models that name none
    #[arg(
        long,
        value_name = "URL",
        env = "HF_ENDPOINT",
        default_value = PUBLIC_HUB
    )]
    hub: String,
    /// What the hub asks for gated repositories, of namespaces without a Secret prima-hub
    #[arg(long, value_name = "TOKEN", env = "HF_TOKEN", hide_env_values = true)]
    hub_token: Option<String>,
    /// Servers of model files beside the hub that may be asked although they are not on the internet, by name or network
    #[arg(
        long,
        value_name = "SERVER,...",
        env = "PRIMA_ALLOWED_SERVERS",
        value_delimiter = ','
    )]
    allowed_servers: Vec<AllowedServer>,
}

impl OperatorArgs {
    fn http_address(&self) -> SocketAddr {
        let address = SocketAddr::new(self.pod_ip, HTTP_PORT);
        self.listen.unwrap_or_else(|| on_all_addresses(address))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    #[error(
        "cannot find the cluster's API server: neither a kubeconfig (KUBECONFIG, ~/.kube/config) nor a service account is here"
    )]
    Config(#[source] Box<kube::config::InferConfigError>),
    #[error("cannot make a client for the API server")]
    Client(#[source] Box<kube::Error>),
    #[error(transparent)]
    Traces(#[from] TracesError),
    #[error("cannot listen on {address} (--listen)")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("cannot wait for signals")]
    Signals(#[source] io::Error),
    #[error(
        "the API server does not answer with {what}; are the CRDs installed (prima crds | kubectl apply -f -) and may this account read them?"
    )]
    Watch { what: &'static str },
    #[error("cannot make a client for model servers")]
    Http(#[from] prima_weights::ClientError),
    #[error("--hub-token (HF_TOKEN) cannot be used")]
    Token(#[from] prima_weights::SourceError),
    #[error("lost the leader's Lease: another instance may lead now")]
    LostLease,
    #[error("the HTTP server of probes and metrics ended")]
    Probes,
}

const HTTP_PORT: u16 = 8080;
/// Changes that come together are handled together.
const DEBOUNCE: Duration = Duration::from_millis(200);
/// Models that are reconciled at the same time. They mostly wait: for the API server, for a search, for the lock of decisions. Whose ring breaks
/// meanwhile is not to wait behind them.
const CONCURRENCY: u16 = 64;

/// Runs until it is asked to end (`Ok`), or until it may not or cannot go on.
pub async fn run(args: OperatorArgs) -> Result<(), OperatorError> {
    // Two libraries bring a provider each; without a choice rustls refuses to choose.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let telemetry = Telemetry::start(&args.identity)?;
    let mut stop = StopSignals::install().map_err(OperatorError::Signals)?;
    let metrics = Arc::new(Metrics::new());
    let probes = Arc::new(Probes::new(metrics.clone()));
    let address = args.http_address();
    let listener = TcpListener::bind(address)
        .await
        .map_err(|source| OperatorError::Listen { address, source })?;
    let mut config = kube::Config::infer()
        .await
        .map_err(|error| OperatorError::Config(Box::new(error)))?;
    config.read_timeout = Some(prima_crds::SILENCE);
    let client =
        Client::try_from(config).map_err(|error| OperatorError::Client(Box::new(error)))?;

    let result = tokio::select! {
        result = lead(&args, client, &probes, metrics, &mut stop) => result,
        () = probes.serve(listener) => Err(OperatorError::Probes),
    };
    telemetry.flush();
    result
}

/// Becomes the leader, then controls Models for as long as it is and nobody asks it to end.
async fn lead(
    args: &OperatorArgs,
    client: Client,
    probes: &Probes,
    metrics: Arc<Metrics>,
    stop: &mut StopSignals,
) -> Result<(), OperatorError> {
    probes.set_alive();
    let lease = Duration::from_secs(args.leader_lease);
    let mut election = Election::start(client.clone(), &args.namespace, &args.identity, lease);
    // A waiting instance watches too: if the leader's machine goes, and an agent with it, it knows since when.
    let agents = args.agent_namespace.as_deref().unwrap_or(&args.namespace);
    let agents = (agents, &*args.agent_claims);
    let (stores, mut changes) = Stores::watch(&client, agents, model_controller::OURS);
    let reached = Reached::default();
    let won = tokio::select! {
        won = election.won() => won,
        () = stop.received() => false,
        () = stand_by(&client, &args.identity, &stores, &mut changes, &reached) => false,
    };
    let result = match won {
        true => {
            tracing::info!(identity = args.identity, "leads");
            tokio::select! {
                result = control(args, client, (stores, changes, reached), probes, metrics) => result,
                () = election.lost() => Err(OperatorError::LostLease),
                () = stop.received() => Ok(()),
            }
        }
        false => Ok(()),
    };
    election.resign().await;
    result
}

/// Learns which rings answer, for as long as another instance leads, and says so where that one does not.
async fn stand_by(
    client: &Client,
    identity: &str,
    stores: &Stores,
    changes: &mut world::Changes,
    reached: &Reached,
) {
    let (nobody, _) = mpsc::unbounded_channel();
    let recorder = recorder(client, identity);
    tokio::select! {
        // So that the store of plans fills. What came is looked at once this one leads.
        () = changes.plans.by_ref().for_each(|_| future::ready(())) => {}
        () = model_controller::keep_reached(stores, reached, &nobody) => {}
        () = model_controller::keep_withdrawing(client, &recorder, stores, reached) => {}
    }
}

/// Writes events, as the operator of this name.
fn recorder(client: &Client, identity: &str) -> Recorder {
    let reporter = Reporter {
        controller: "prima.dev/operator".to_owned(),
        instance: Some(identity.to_owned()),
    };
    Recorder::new(client.clone(), reporter)
}

async fn control(
    args: &OperatorArgs,
    client: Client,
    (stores, changes, reached): (Stores, world::Changes, Reached),
    probes: &Probes,
    metrics: Arc<Metrics>,
) -> Result<(), OperatorError> {
    stores
        .ready()
        .await
        .map_err(|what| OperatorError::Watch { what })?;
    let reach = Reach::internet_and(&args.hub, &args.allowed_servers);
    let hub = Hub::new(&args.hub, args.hub_token.as_deref())?;
    let tokens = HubTokens::new(client.clone(), hub);
    let (headers, read) = HeaderReader::new(tokens, prima_weights::Client::new(RETRY, reach)?);
    let (planner, planned) = Planner::new(Question::answer, metrics.clone());
    let (tell_reached, reached_or_not) = mpsc::unbounded_channel();
    let (look_again, concerned) = mpsc::unbounded_channel();
    let (models, writer) = reflector::store();
    let changed = models::all(&client).reflect(writer).applied_objects();
    let controller = Controller::for_stream(changed, models)
        .with_config(
            Config::default()
                .debounce(DEBOUNCE)
                .concurrency(CONCURRENCY),
        )
        .owns_stream(changes.plans.map(Ok))
        .owns_stream(changes.services.map(Ok))
        .owns_stream(changes.slices.map(Ok))
        .reconcile_on(UnboundedReceiverStream::new(planned))
        .reconcile_on(UnboundedReceiverStream::new(read))
        .reconcile_on(UnboundedReceiverStream::new(reached_or_not))
        .reconcile_on(UnboundedReceiverStream::new(concerned))
        .reconcile_all_on(changes.any);
    metrics.lead(controller.store(), stores.profiles());
    let context = Arc::new(Context {
        recorder: recorder(&client, &args.identity),
        client,
        stores,
        models: controller.store(),
        metrics,
        cluster_domain: args.cluster_domain.clone(),
        headers,
        states: Default::default(),
        planner,
        reached,
        standings: Default::default(),
        look_again,
        deciding: Default::default(),
    });
    probes.set_ready();
    let machines = machine_status::keep(context.client.clone(), &context.stores);
    let api_keys = model_controller::keep_api_keys(&context);
    let reached = model_controller::keep_reached(&context.stores, &context.reached, &tell_reached);
    let models = controller
        .run(
            model_controller::reconcile,
            model_controller::after_failure,
            context.clone(),
        )
        .for_each(|result| {
            // What a Model's reconciling fails with stands in its status and in the log.
            if let Err(controller::Error::QueueError(error)) = result {
                let problem = prima_crds::error_chain(&error);
                tracing::warn!(problem, "the watch of Models failed, and is tried again");
            }
            future::ready(())
        });
    tokio::select! {
        () = models => {}
        () = machines => {}
        () = api_keys => {}
        () = reached => {}
    }
    Ok(())
}

/// Unique among processes outside a cluster, on whichever machines: who has the same name takes the other's Lease for its own.
fn process_name() -> String {
    format!("prima-{:016x}", rand::random::<u64>())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct CommandLine {
        #[command(flatten)]
        args: OperatorArgs,
    }

    #[test]
    fn it_listens_where_others_reach_its_pod() {
        for (pod_ip, http) in [("10.42.0.7", "0.0.0.0:8080"), ("fd00::7", "[::]:8080")] {
            let line = ["operator", "--namespace", "prima", "--pod-ip", pod_ip];
            let args = CommandLine::parse_from(line).args;
            assert_eq!(args.http_address().to_string(), http);
        }
    }
}
