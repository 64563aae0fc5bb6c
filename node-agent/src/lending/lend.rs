//! `prima-node-agent lend`: lends this machine to rings of `prima run` on other machines. It measures the machine, shows the word by which the
//! first borrower is known, and answers borrowers until it is asked to end.
//!
//! While no member runs, it answers measurements at the ring's port, so that a firewall that closes it shows before a ring is planned.
//!
//! All of it runs on one thread: the kernel ends a member's process with the thread that started it.

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prima_crds::quantity::Quantity;
use prima_crds::v1alpha1::node_profile::{NodeProfile, NodeProfileSpec};
use prima_engine::Compute;
use prima_member_process::reachable_address;
use prima_weights::{Cache, CacheError, cache_folder};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::{JoinError, spawn_blocking};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::MAX_MESSAGE_BYTES;
use super::door::{Door, DoorError};
use super::guest;
use super::known::{Known, KnownError};
use super::proto::lending_server::{Lending, LendingServer};
use super::proto::{
    EnrolAnswer, EnrolRequest, Event, LetInAnswer, LetInRequest, MeasureAnswer, MeasureRequest,
    Order, ProfileAnswer, ProfileRequest,
};
use super::word::Word;
use crate::profile::{self, Measuring, ProfileError, system};
use crate::ring::connection::{self, PredecessorSlot};
use crate::ring::{self, EchoServer, Fingerprint, LinkError, OwnKey, Peer, Pins, measure_link};
use crate::stop_signal::StopSignal;

#[derive(clap::Args)]
pub struct LendArgs {
    /// Where other machines reach this one; the member of a ring listens at the next port
    #[arg(long, value_name = "IP:PORT", default_value = "0.0.0.0:9190")]
    listen: SocketAddr,
    /// What this machine is called in rings [default: its host name]
    #[arg(long, value_name = "NAME", value_parser = system::check_name)]
    name: Option<String>,
    /// Compute threads of a member [default: all cores; a member that waits uses none]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Memory that stays free for other programs, such as 2Gi [default: 5 % of what is available when a ring begins]
    #[arg(long, value_name = "SIZE")]
    reserve_memory: Option<Quantity>,
}

#[derive(Debug, thiserror::Error)]
pub enum LendError {
    #[error("cannot start")]
    Start(#[source] io::Error),
    #[error(transparent)]
    Known(#[from] KnownError),
    #[error(transparent)]
    Door(#[from] DoorError),
    #[error("cannot listen on {address} (--listen); is another agent running?")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("--listen {address}: there is no port after it for the member of a ring")]
    NoRingPort { address: SocketAddr },
    #[error("cannot use the port after --listen, where the member of a ring listens")]
    RingPort(#[source] LinkError),
    #[error("TLS cannot be set up")]
    Tls(#[source] rustls::Error),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error("cannot measure this machine")]
    Profile(#[from] ProfileError),
    #[error("measuring this machine ended")]
    Measuring(#[source] JoinError),
    #[error("cannot serve borrowers")]
    Serve(#[source] tonic::transport::Error),
}

/// Who is known, and connections of others, last no longer when nothing runs over them.
const IDLE_CONNECTION: Duration = Duration::from_secs(60);
/// Orders and events that may wait for their reader.
const WAITING: usize = 4;
/// Keys that a borrower may let in at a time: members of the largest ring.
const MAX_LET_IN: usize = 256;

/// Runs until SIGTERM or SIGINT (`Ok`), or until it cannot go on.
pub fn run(args: LendArgs) -> Result<(), LendError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(LendError::Start)?;
    let result = runtime.block_on(lend(args));
    runtime.shutdown_background();
    result
}

async fn lend(args: LendArgs) -> Result<(), LendError> {
    let mut stop = StopSignal::new().map_err(LendError::Start)?;
    let known = Known::open()?;
    let borrowers_file = known.borrowers_file();
    let identity_file = known.identity_file();
    let identity = known.identity()?;
    let door = Door::new(known)?;
    let listen = args.listen;
    let listener = TcpListener::bind(listen).await;
    let listener = listener.map_err(|source| LendError::Listen {
        address: listen,
        source,
    })?;
    let listen = listener.local_addr().map_err(LendError::Start)?;
    let ring_port = listen.port().checked_add(1);
    let ring_port = ring_port.ok_or(LendError::NoRingPort { address: listen })?;
    let models = models_folder()?;
    let word = Word {
        lender: identity.fingerprint().start(),
        secret: door.secret(),
    };
    let accepted = door.accepted();
    let lender = Arc::new(Lender {
        name: args.name.unwrap_or_else(system::host_name),
        key: identity.fingerprint(),
        own: ring::fixed(identity),
        identity_file,
        door,
        ring: SocketAddr::new(listen.ip(), ring_port),
        measurers: Pins::default(),
        echo: Mutex::default(),
        threads: args.threads,
        reserve_memory: args.reserve_memory.map(Quantity::bytes),
        cache: Cache::open(&models)?,
        models,
        lent: Arc::default(),
        measuring: tokio::sync::Mutex::default(),
    });
    lender.answer_measurements().map_err(LendError::RingPort)?;
    // Now, so that the first borrower does not wait for it.
    tokio::select! {
        profile = lender.profile() => { profile?; }
        () = stop.received() => return Ok(()),
    }
    let invitation = Invitation {
        lender: &lender,
        listen,
        word,
        borrowers_file,
    };
    invitation.show();

    let config = ring::server_config(lender.own.clone(), accepted).map_err(LendError::Tls)?;
    let service = LendingServer::new(Service(lender.clone()))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let serve = connection::server(MAX_MESSAGE_BYTES)
        .max_connection_age(IDLE_CONNECTION)
        .add_service(service)
        .serve_with_incoming(ring::incoming(listener, config));
    tokio::select! {
        served = serve => served.map_err(LendError::Serve),
        // A member ends with this process; the borrower sees that its connection does.
        () = stop.received() => Ok(()),
    }
}

/// Where files that are sent are kept: in prima's cache.
fn models_folder() -> Result<PathBuf, LendError> {
    let folder = cache_folder().ok_or(ProfileError::NoModelsFolder)?;
    let folder = folder.join("sent");
    match std::fs::create_dir_all(&folder) {
        Ok(()) => Ok(folder),
        Err(source) => Err(ProfileError::ModelsFolder {
            path: folder,
            source,
        }
        .into()),
    }
}

/// What people read at the start.
struct Invitation<'a> {
    lender: &'a Lender,
    listen: SocketAddr,
    word: Word,
    borrowers_file: PathBuf,
}

impl Invitation<'_> {
    fn show(&self) {
        let address = reachable_address(self.listen);
        let known = self.lender.door.known().unwrap_or_default();
        let known = match known.is_empty() {
            true => "Nobody is known yet".to_owned(),
            false => format!(
                "{} known already, and needs none ({})",
                known.join(", ") + if known.len() == 1 { " is" } else { " are" },
                self.borrowers_file.display()
            ),
        };
        let text = format!(
            "\n{} can be borrowed. On the machine that has the model:\n\n  \
             prima run MODEL.gguf --member {address}#{}\n\n\
             The word behind # is for one machine, which is known from then on. {known}.\n\
             Other machines must reach the ports {} and {}. Ctrl-C ends lending.",
            self.lender.name,
            self.word,
            self.listen.port(),
            self.lender.ring.port(),
        );
        // Nobody may be reading.
        let _ = writeln!(io::stdout(), "{text}");
    }
}

/// The machine that is lent.
pub(super) struct Lender {
    pub name: String,
    pub key: Fingerprint,
    own: OwnKey,
    pub identity_file: PathBuf,
    door: Door,
    /// Where a member listens.
    pub ring: SocketAddr,
    /// Who may measure the link to the ring's port.
    measurers: Pins,
    echo: Mutex<Option<EchoServer>>,
    pub threads: Option<u16>,
    pub reserve_memory: Option<u64>,
    models: PathBuf,
    pub cache: Cache,
    /// Whether a member runs.
    lent: Arc<AtomicBool>,
    measuring: tokio::sync::Mutex<()>,
}

impl Lender {
    /// Answers at the ring's port.
    ///
    /// # Errors
    /// When the port is not free.
    pub fn answer_measurements(&self) -> Result<(), LinkError> {
        let mut echo = self.echo();
        if echo.is_none() {
            let keys = (self.own.clone(), self.measurers.clone());
            *echo = Some(EchoServer::start(self.ring, Some(keys))?);
        }
        Ok(())
    }

    /// Leaves the ring's port to a member.
    pub fn free_ring_port(&self) {
        self.echo().take();
    }

    fn echo(&self) -> MutexGuard<'_, Option<EchoServer>> {
        self.echo.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn profile(&self) -> Result<NodeProfile, LendError> {
        // Two at a time would measure each other.
        let _one = self.measuring.lock().await;
        let models = self.models.clone();
        let threads = self.threads;
        let name = self.name.clone();
        let status = spawn_blocking(move || {
            profile::measured(&Measuring {
                models: &models,
                threads: threads.map_or_else(Compute::available_threads, usize::from),
                cache_file: profile::cache_file(&name).as_deref(),
                fresh: false,
            })
        });
        let status = status.await.map_err(LendError::Measuring)??;
        let owner = NodeProfileSpec {
            reserved_memory_bytes: self.reserve_memory.map(|bytes| bytes as i64),
            ..NodeProfileSpec::default()
        };
        let mut profile = NodeProfile::new(&self.name, owner);
        profile.status = Some(status);
        Ok(profile)
    }
}

struct Service(Arc<Lender>);

impl Service {
    /// Who calls; refuses strangers.
    fn borrower<T>(&self, request: &Request<T>) -> Result<Peer, Status> {
        let peer = peer(request)?;
        match self.0.door.knows(&peer.key) {
            true => Ok(peer),
            false => Err(Status::unauthenticated("the caller is not known here")),
        }
    }
}

fn peer<T>(request: &Request<T>) -> Result<Peer, Status> {
    let peer = request.extensions().get::<Peer>().copied();
    peer.ok_or_else(|| Status::internal("the connection has no key"))
}

/// Two members would count on the same memory.
fn lent_already() -> Status {
    Status::resource_exhausted("it runs a member of another ring; end that one first")
}

fn failed(error: &dyn std::error::Error) -> Status {
    Status::internal(prima_crds::error_chain(error))
}

fn fingerprint(bytes: &[u8]) -> Result<Fingerprint, Status> {
    Fingerprint::from_bytes(bytes).map_err(|error| Status::invalid_argument(error.to_string()))
}

#[tonic::async_trait]
impl Lending for Service {
    type RunStream = ReceiverStream<Result<Event, Status>>;

    async fn enrol(&self, request: Request<EnrolRequest>) -> Result<Response<EnrolAnswer>, Status> {
        let peer = peer(&request)?;
        let EnrolRequest { secret, name } = request.into_inner();
        let name = system::check_name(&name).map_err(Status::invalid_argument)?;
        let taken = self.0.door.enrol(peer, &name, &secret);
        taken.map_err(|refusal| Status::permission_denied(refusal.to_string()))?;
        Ok(Response::new(EnrolAnswer {
            fingerprint: self.0.key.bytes().to_vec().into(),
        }))
    }

    async fn profile(
        &self,
        request: Request<ProfileRequest>,
    ) -> Result<Response<ProfileAnswer>, Status> {
        self.borrower(&request)?;
        if self.0.lent.load(Ordering::Acquire) {
            return Err(lent_already());
        }
        let profile = self.0.profile().await.map_err(|error| failed(&error))?;
        Ok(Response::new(ProfileAnswer {
            profile: serde_saphyr::to_string(&profile).map_err(|error| failed(&error))?,
            ring_port: self.0.ring.port().into(),
        }))
    }

    async fn let_in(
        &self,
        request: Request<LetInRequest>,
    ) -> Result<Response<LetInAnswer>, Status> {
        self.borrower(&request)?;
        let keys = request.into_inner().fingerprints;
        if keys.len() > MAX_LET_IN {
            return Err(Status::invalid_argument(format!(
                "expected at most {MAX_LET_IN} keys, found {}",
                keys.len()
            )));
        }
        let keys: Vec<Fingerprint> = keys
            .iter()
            .map(|key| fingerprint(key))
            .collect::<Result<_, _>>()?;
        self.0.measurers.set(keys);
        Ok(Response::new(LetInAnswer {}))
    }

    async fn measure(
        &self,
        request: Request<MeasureRequest>,
    ) -> Result<Response<MeasureAnswer>, Status> {
        self.borrower(&request)?;
        let MeasureRequest {
            address,
            fingerprint: key,
        } = request.into_inner();
        let connector = ring::connector(self.0.own.clone(), fingerprint(&key)?);
        let connector = connector.map_err(|error| failed(&error))?;
        let _one = self.0.measuring.lock().await;
        let measured = spawn_blocking(move || measure_link(&address, Some(connector)));
        let measured = measured.await.map_err(|error| failed(&error))?;
        let measured =
            measured.map_err(|error| Status::unavailable(prima_crds::error_chain(&error)))?;
        Ok(Response::new(MeasureAnswer {
            latency_nanoseconds: measured.latency.as_nanos() as u64,
            bytes_per_second: measured.bytes_per_second,
        }))
    }

    async fn run(
        &self,
        request: Request<Streaming<Order>>,
    ) -> Result<Response<Self::RunStream>, Status> {
        let peer = self.borrower(&request)?;
        let slot = PredecessorSlot::claim(&self.0.lent).ok_or_else(lent_already)?;
        tracing::info!(address = %peer.address, "a ring borrows this machine");
        let (events, answers) = mpsc::channel(WAITING);
        let lender = self.0.clone();
        tokio::spawn(async move {
            guest::run(&lender, request.into_inner(), events).await;
            tracing::info!("the ring has given this machine back");
            drop(slot);
        });
        Ok(Response::new(ReceiverStream::new(answers)))
    }
}
