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
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinError, spawn_blocking};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::door::{Door, DoorError};
use super::guest;
use super::known::{Known, KnownError};
use super::proto::lending_server::{Lending, LendingServer};
use super::proto::{
    EnrolAnswer, EnrolRequest, Event, LetInAnswer, LetInRequest, MeasureAnswer, MeasureRequest,
    Order, ProfileAnswer, ProfileRequest,
};
use super::word::Word;
use super::{CONTENT_BYTES, MAX_MESSAGE_BYTES};
use crate::profile::{self, Measuring, ProfileError, system};
use crate::ring::connection::{self, Slot};
use crate::ring::{self, EchoServer, Fingerprint, LinkError, OwnKey, Peer, Pins, measure_link};
use crate::stop_signal::StopSignal;

#[derive(clap::Args)]
pub struct LendArgs {
    /// Where other machines reach this one; the member of a ring listens at the next port
    #[arg(long, value_name = "IP:PORT", default_value = "0.0.0.0:9190")]
    listen: SocketAddr,
    /// Take in one more machine, by a word; the first is taken in without this
    #[arg(long)]
    enrol: bool,
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

/// A connection is replaced after this; what runs over it goes on.
const CONNECTION_AGE: Duration = Duration::from_secs(60);
/// Connections of strangers at a time, and how long each lasts: one is enough to enrol.
const STRANGERS: usize = 4;
const STRANGERS_TIME: Duration = Duration::from_secs(10);
/// Orders and events that may wait for their reader.
const WAITING: usize = 64;
/// Below it are ports of other services, which no member uses.
const FIRST_PORT: u16 = 1024;
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
    let door = Door::new(known, args.enrol)?;
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
    let start = identity.fingerprint().start();
    let word = door.secret().map(|secret| Word {
        lender: start,
        secret,
    });
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
        measuring: Arc::default(),
    });
    lender.answer_measurements().map_err(LendError::RingPort)?;
    // Now, so that the first borrower waits less for it.
    tokio::spawn({
        let lender = lender.clone();
        async move {
            if let Err(error) = lender.profile().await {
                let problem = prima_crds::error_chain(&error);
                tracing::error!(problem, "cannot measure this machine");
            }
        }
    });
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
    let strangers = Arc::new(Semaphore::new(STRANGERS));
    let incoming = ring::incoming(listener, config).filter_map(|connection| match connection {
        Ok(connection) if !lender.door.knows(&connection.peer().key) => {
            let place = strangers.clone().try_acquire_owned().ok()?;
            Some(Ok(connection.limited(STRANGERS_TIME, place)))
        }
        connection => Some(connection),
    });
    let serve = connection::server(CONTENT_BYTES)
        .max_connection_age(CONNECTION_AGE)
        .add_service(service)
        .serve_with_incoming(incoming);
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
    /// If another borrower is taken in.
    word: Option<Word>,
    borrowers_file: PathBuf,
}

impl Invitation<'_> {
    fn show(&self) {
        let address = match reachable_address(self.listen) {
            address if address.ip().is_unspecified() => {
                format!("{}:{}", system::host_name(), address.port())
            }
            address => address.to_string(),
        };
        let member = match self.word {
            Some(word) => format!("'{address}#{word}'"),
            None => address,
        };
        let word = match self.word {
            Some(_) => "The word behind # is for one machine, which is known from then on.\n",
            None => "To take in another machine: prima agent --enrol\n",
        };
        let known = self.lender.door.known().unwrap_or_default();
        let known = match known.is_empty() {
            true => String::new(),
            false => format!(
                "Known already, by {}: {}\n",
                self.borrowers_file.display(),
                known.join(", ")
            ),
        };
        let text = format!(
            "\n{} can be borrowed. On the machine that has the model:\n\n  \
             prima run MODEL.gguf --member {member}\n\n\
             {word}{known}\
             Other machines must reach the ports {} and {}. Parts of models are kept in {}.\n\
             Ctrl-C ends lending.\n",
            self.lender.name,
            self.listen.port(),
            self.lender.ring.port(),
            self.lender.models.display(),
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
    measuring: Arc<tokio::sync::Mutex<()>>,
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
        let models = self.models.clone();
        let threads = self.threads;
        // Not the file of `prima run` on this machine, which measures another disk.
        let cache_file = profile::cache_file(&format!("{}-lent", self.name));
        let measured = self.one_at_a_time(move || {
            profile::measured(&Measuring {
                models: &models,
                threads: threads.map_or_else(Compute::available_threads, usize::from),
                cache_file: cache_file.as_deref(),
                fresh: false,
            })
        });
        let measured = measured.await.map_err(LendError::Measuring)??;
        let owner = NodeProfileSpec {
            reserved_memory_bytes: self.reserve_memory.map(|bytes| bytes as i64),
            ..NodeProfileSpec::default()
        };
        let mut profile = NodeProfile::new(&self.name, owner);
        profile.status = Some(measured.status);
        Ok(profile)
    }
}

impl Lender {
    /// Two measurements at a time would measure each other, also when nobody waits for the first any more.
    async fn one_at_a_time<T: Send + 'static>(
        &self,
        measure: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let turn = self.measuring.clone().lock_owned().await;
        let measuring = spawn_blocking(move || {
            let _turn = turn;
            measure()
        });
        measuring.await
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
        let place: Result<SocketAddr, _> = address.parse();
        if !place.is_ok_and(|place| place.port() >= FIRST_PORT) {
            return Err(Status::invalid_argument(format!(
                "expected IP:PORT with a port from {FIRST_PORT} on, found {address:?}"
            )));
        }
        let connector = ring::connector(self.0.own.clone(), fingerprint(&key)?);
        let connector = connector.map_err(|error| failed(&error))?;
        let measured = self
            .0
            .one_at_a_time(move || measure_link(&address, Some(connector)));
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
        let slot = Slot::claim(&self.0.lent).ok_or_else(lent_already)?;
        tracing::info!(address = %peer.address, "a ring borrows this machine");
        let (events, answers) = mpsc::channel(WAITING);
        let lender = self.0.clone();
        tokio::spawn(async move {
            guest::run(lender, request.into_inner(), events).await;
            tracing::info!("the ring has given this machine back");
            drop(slot);
        });
        Ok(Response::new(ReceiverStream::new(answers)))
    }
}
