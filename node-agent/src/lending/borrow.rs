//! `prima-node-agent borrow`: what `prima run` needs of machines that are lent. `look` makes this machine known to them, asks what they can do
//! and measures the links between all; `run` is the process of one member there, for as long as its ring stands.

use std::collections::BTreeSet;
use std::error::Error as _;
use std::io::{self, Write as _};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::{OptionFuture, try_join_all};
use prima_crds::quantity::rounded;
use prima_crds::v1alpha1::document::DocumentError;
use prima_crds::v1alpha1::node_profile::{LinkProfile, NodeProfile};
use prima_member_process::{Borrowed, LentPlace, OwnPlace, Place};
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinHandle, spawn_blocking};
use tokio::time::{interval, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

use super::MAX_MESSAGE_BYTES;
use super::known::{Known, KnownError};
use super::proto::event::Event as Happened;
use super::proto::lending_client::LendingClient;
use super::proto::order::Order as Ordered;
use super::proto::{
    EnrolRequest, Event, LetInRequest, MeasureRequest, Order, ProfileRequest, Start,
};
use super::send::{self, SendError, Sending};
use super::word::Lender;
use crate::plan_source::{self, PlanSourceError};
use crate::profile::system;
use crate::ring::connection::{self, CONNECT_TIMEOUT, root_cause};
use crate::ring::{
    self, Accepted, EchoServer, Fingerprint, LinkError, NoFingerprint, OwnKey, Pins, measure_link,
};
use crate::serve::{ServeError, exit_with_parent};
use crate::stop_signal::StopSignal;

#[derive(clap::Args)]
pub struct BorrowArgs {
    #[command(subcommand)]
    command: BorrowCommand,
}

#[derive(clap::Subcommand)]
enum BorrowCommand {
    /// Find out what machines can do that are lent, and write it as JSON
    Look(LookArgs),
    /// Run a member of a ring on a machine that is lent, until this process is asked to end
    Run(RunArgs),
}

#[derive(clap::Args)]
struct LookArgs {
    /// The machines: HOST:PORT, and at the first time #WORD, as `prima agent` shows it there
    #[arg(value_name = "HOST:PORT#WORD", required = true)]
    lenders: Vec<Lender>,
    /// Leave out those that cannot be used, instead of failing; null if none is left
    #[arg(long)]
    leave_out: bool,
}

#[derive(clap::Args)]
struct RunArgs {
    /// The machine, which is known here: HOST:PORT
    #[arg(long, value_name = "HOST:PORT")]
    lender: String,
    /// The ring's plan: a RingPlan document in YAML
    #[arg(long, value_name = "FILE")]
    plan: PathBuf,
    /// Which of the plan's members runs there
    #[arg(long, value_name = "NAME")]
    member: String,
    /// End when the process with this id, which started this one, ends for any reason (on Linux)
    #[arg(long, value_name = "PID")]
    exit_with_parent: Option<i32>,
}

#[derive(Debug, thiserror::Error)]
pub enum BorrowError {
    #[error("cannot start")]
    Start(#[source] io::Error),
    #[error(transparent)]
    Parent(#[from] ServeError),
    #[error(transparent)]
    Known(#[from] KnownError),
    #[error("TLS cannot be set up")]
    Tls(#[source] rustls::Error),
    #[error(
        "{lender} is not known here: run `prima agent` on that machine, and give the word that it shows, as HOST:PORT#WORD"
    )]
    NoWord { lender: String },
    #[error("{lender} is no address")]
    Address {
        lender: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "cannot connect to {lender} ({cause}); does `prima agent` run there, and can its port be reached from here?"
    )]
    Connect { lender: String, cause: String },
    #[error(
        "{lender} has another key than {by}: look whether the address is that machine's, and give the word that `prima agent` shows there now"
    )]
    OtherKey { lender: String, by: &'static str },
    #[error(
        "{lender} does not take this machine in: start `prima agent` there again, and give the word that it shows then, as HOST:PORT#WORD"
    )]
    NotTakenIn { lender: String },
    #[error("{lender}: {problem}")]
    Refused { lender: String, problem: String },
    #[error("{lender} sent something else than a fingerprint")]
    Fingerprint {
        lender: String,
        #[source]
        source: NoFingerprint,
    },
    #[error("{lender} sent something else than a profile")]
    Profile {
        lender: String,
        #[source]
        source: DocumentError,
    },
    #[error("cannot use a port for measuring links")]
    Port(#[source] LinkError),
    #[error("no free port in {first}..{last} at {ip} for this machine's member")]
    NoPort { ip: IpAddr, first: u16, last: u16 },
    #[error(
        "{from} does not reach {to} at {address}, where the ring would: is the port closed by a firewall there? {problem}"
    )]
    Link {
        /// The far one, or the only one.
        lender: String,
        from: String,
        to: String,
        address: String,
        problem: String,
    },
    #[error(transparent)]
    Plan(#[from] PlanSourceError),
    #[error("the plan has no key for member {member}")]
    NoKey { member: String },
    #[error(transparent)]
    Send(#[from] SendError),
    #[error("{lender} does not run the member: {problem}")]
    NotRun { lender: String, problem: String },
    #[error("lost {lender}: {problem}")]
    Lost { lender: String, problem: String },
    #[error("the member on {lender} ended: {how}")]
    Ended { lender: String, how: String },
    #[error("a part of the work ended")]
    Panicked(#[from] JoinError),
    #[error("cannot write what was found as JSON")]
    Json(#[source] serde_json::Error),
}

/// Ports that are tried for this machine's own member: behind the one of its agent, if it has one.
const FIRST_PORT: u16 = 9191;
const PORTS: u16 = 100;
/// A machine that was not measured yet takes half a minute for its profile, a slow one more.
const ANSWER_LIMIT: Duration = Duration::from_secs(300);
/// Until a member on another machine has ended, when it was asked to.
const END_LIMIT: Duration = Duration::from_secs(15);
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Orders that wait for the network.
const WAITING: usize = 4;

/// # Errors
/// [`BorrowError`].
pub fn run(args: BorrowArgs) -> Result<(), BorrowError> {
    if let BorrowCommand::Run(RunArgs {
        exit_with_parent: Some(parent),
        ..
    }) = &args.command
    {
        exit_with_parent(*parent)?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(BorrowError::Start)?;
    let result = runtime.block_on(async {
        match args.command {
            BorrowCommand::Look(args) => look_and_tell(args).await,
            BorrowCommand::Run(args) => run_member(&args).await,
        }
    });
    runtime.shutdown_background();
    result
}

/// A lender that knows this machine, and whose key is known here.
struct Contact {
    lender: String,
    ip: IpAddr,
    key: Fingerprint,
    client: LendingClient<Channel>,
}

impl Contact {
    /// With whom is known already.
    async fn known(lender: &str, own: &OwnKey, key: Fingerprint) -> Result<Self, BorrowError> {
        let by = "it had when it was borrowed first";
        Ok(Self {
            ip: resolve(lender)?.ip(),
            client: connect(lender, own, key.into(), by).await?,
            lender: lender.to_owned(),
            key,
        })
    }

    /// With whom was named; whoever is not known yet is by its word.
    async fn make(lender: &Lender, own: &OwnKey, known: &Known) -> Result<Self, BorrowError> {
        let address = &lender.address;
        let key = known
            .lenders()?
            .get(address)
            .and_then(|key| key.parse().ok());
        match (key, lender.word) {
            // The machine may have another key, or have forgotten this one.
            (Some(key), Some(word)) if Fingerprint::start(&key) == word.lender => {
                let mut contact = Self::known(address, own, key).await?;
                match contact.profile().await {
                    Err(BorrowError::NotTakenIn { .. }) => Self::enrol(lender, own, known).await,
                    _ => Ok(contact),
                }
            }
            (Some(key), None) => Self::known(address, own, key).await,
            (_, Some(_)) => Self::enrol(lender, own, known).await,
            (None, None) => Err(BorrowError::NoWord {
                lender: address.clone(),
            }),
        }
    }

    /// By its word. Whom the lender knows already it does not ask for the secret.
    async fn enrol(lender: &Lender, own: &OwnKey, known: &Known) -> Result<Self, BorrowError> {
        let address = &lender.address;
        let Some(word) = lender.word else {
            return Err(BorrowError::NoWord {
                lender: address.clone(),
            });
        };
        let by = "the word says";
        let mut client = connect(address, own, word.lender.into(), by).await?;
        let request = EnrolRequest {
            secret: word.secret.to_vec().into(),
            name: system::host_name(),
        };
        let answer = client.enrol(request).await;
        let answer = answer.map_err(|status| not_taken_in(address, &status))?;
        let key = Fingerprint::from_bytes(&answer.into_inner().fingerprint);
        let key = key.map_err(|source| BorrowError::Fingerprint {
            lender: address.clone(),
            source,
        })?;
        let mut lenders = known.lenders()?;
        lenders.insert(address.clone(), key.to_string());
        known.keep_lenders(lenders)?;
        Self::known(address, own, key).await
    }

    /// What the machine can do, and where its member listens.
    async fn profile(&mut self) -> Result<(NodeProfile, SocketAddr), BorrowError> {
        let lender = self.lender.clone();
        let answer = timeout(ANSWER_LIMIT, self.client.profile(ProfileRequest {})).await;
        let answer = answer
            .unwrap_or_else(|_| Err(Status::deadline_exceeded("no profile within five minutes")))
            .map_err(|status| not_taken_in(&lender, &status))?
            .into_inner();
        let profile = NodeProfile::from_yaml(&lender, &answer.profile);
        let profile = profile.map_err(|source| BorrowError::Profile {
            lender: lender.clone(),
            source,
        })?;
        let port = u16::try_from(answer.ring_port).unwrap_or_default();
        Ok((profile, SocketAddr::new(self.ip, port)))
    }
}

/// What the first request over a connection came back with. A handshake that the lender refuses shows only there: the connection ends.
fn not_taken_in(lender: &str, status: &Status) -> BorrowError {
    let ended = status.source().is_some();
    match ended || status.code() == Code::Unauthenticated {
        true => BorrowError::NotTakenIn {
            lender: lender.to_owned(),
        },
        false => refused(lender, status),
    }
}

/// An answer that says no.
fn refused(lender: &str, status: &Status) -> BorrowError {
    let lender = lender.to_owned();
    let problem = match status.code() {
        Code::Unimplemented => "its agent is of another version: update both machines".to_owned(),
        _ => root_cause(status),
    };
    BorrowError::Refused { lender, problem }
}

fn resolve(lender: &str) -> Result<SocketAddr, BorrowError> {
    let failed = |source| BorrowError::Address {
        lender: lender.to_owned(),
        source,
    };
    let mut addresses = lender.to_socket_addrs().map_err(failed)?;
    addresses
        .next()
        .ok_or_else(|| failed(io::Error::other("the name has no address")))
}

async fn connect(
    lender: &str,
    own: &OwnKey,
    accepted: Accepted,
    by: &'static str,
) -> Result<LendingClient<Channel>, BorrowError> {
    let failed = |cause| BorrowError::Connect {
        lender: lender.to_owned(),
        cause,
    };
    let address = resolve(lender)?;
    let endpoint = connection::endpoint(&address.to_string());
    let window = connection::window_bytes(MAX_MESSAGE_BYTES);
    let endpoint = endpoint
        .map_err(|error| failed(root_cause(&error)))?
        .initial_stream_window_size(window)
        .initial_connection_window_size(window)
        .max_frame_size(connection::frame_bytes(MAX_MESSAGE_BYTES));
    let connector = ring::connector(own.clone(), accepted).map_err(BorrowError::Tls)?;
    let connecting = endpoint.connect_with_connector(connector);
    let channel = match timeout(CONNECT_TIMEOUT, connecting).await {
        Ok(connected) => connected.map_err(|error| match ring::is_other_key(&error) {
            true => BorrowError::OtherKey {
                lender: lender.to_owned(),
                by,
            },
            false => failed(root_cause(&error)),
        })?,
        Err(_) => return Err(failed("no answer".to_owned())),
    };
    Ok(LendingClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES))
}

/// Shows what is going on: on stderr, where `prima run` reads it.
fn progress(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

impl BorrowError {
    /// The machine without which it might have gone well: `HOST:PORT`.
    fn lender(&self) -> Option<&str> {
        match self {
            Self::NoWord { lender }
            | Self::Address { lender, .. }
            | Self::Connect { lender, .. }
            | Self::OtherKey { lender, .. }
            | Self::NotTakenIn { lender }
            | Self::Refused { lender, .. }
            | Self::Fingerprint { lender, .. }
            | Self::Profile { lender, .. }
            | Self::Link { lender, .. }
            | Self::NotRun { lender, .. }
            | Self::Lost { lender, .. }
            | Self::Ended { lender, .. } => Some(lender),
            _ => None,
        }
    }
}

async fn look_and_tell(args: LookArgs) -> Result<(), BorrowError> {
    let mut lenders = args.lenders;
    let mut found = None;
    while found.is_none() && !lenders.is_empty() {
        match look(&lenders).await {
            Ok(machines) => found = Some(machines),
            Err(error) => match error.lender().filter(|_| args.leave_out) {
                Some(lender) => {
                    progress(&format!(
                        "going on without {lender}: {}",
                        prima_crds::error_chain(&error)
                    ));
                    lenders.retain(|other| other.address != lender);
                }
                None => return Err(error),
            },
        }
    }
    let text = serde_json::to_string(&found).map_err(BorrowError::Json)?;
    let _ = writeln!(io::stdout(), "{text}");
    Ok(())
}

async fn look(lenders: &[Lender]) -> Result<Borrowed, BorrowError> {
    let known = Known::open()?;
    let identity = known.identity()?;
    let own_key = identity.fingerprint();
    let own = ring::fixed(identity);
    // One after the other, since each is written down.
    let mut contacts = Vec::new();
    for lender in lenders {
        progress(&format!("connecting to {}", lender.address));
        contacts.push(Contact::make(lender, &own, &known).await?);
    }
    progress("asking the other machines what they can do");
    let profiles = contacts.iter_mut().map(Contact::profile);
    let profiles = try_join_all(profiles).await?;

    let own_ip = own_address(contacts[0].ip).map_err(BorrowError::Start)?;
    let pins = Pins::default();
    pins.set(contacts.iter().map(|contact| contact.key));
    let echo = echo_server(own_ip, &own, &pins)?;
    let mut names = BTreeSet::new();
    let mut name = |wanted: &str| unique(&mut names, wanted);
    let place = |name: String, address: SocketAddr, key: Fingerprint| Place {
        name,
        address: address.to_string(),
        public_key_sha256: key.to_string(),
    };
    let own_place = place(name(&system::host_name()), echo.address(), own_key);
    let mut lent = Vec::new();
    for (contact, (mut profile, address)) in contacts.iter().zip(profiles) {
        let name = name(profile.metadata.name.as_deref().unwrap_or("member"));
        profile.metadata.name = Some(name.clone());
        if let Some(status) = &mut profile.status {
            status.links.clear();
        }
        lent.push(LentPlace {
            place: place(name, address, contact.key),
            lender: contact.lender.clone(),
            profile,
        });
    }
    let mut machines = Machines {
        contacts,
        own,
        own_key,
        own_place,
        lent,
    };
    machines.let_in().await?;
    let links = machines.measure().await?;
    Ok(Borrowed {
        own: OwnPlace {
            place: machines.own_place,
            identity: known.identity_file(),
            links,
        },
        lent: machines.lent,
    })
}

/// `wanted`, or with a number behind it if another machine is called so.
fn unique(names: &mut BTreeSet<String>, wanted: &str) -> String {
    let numbered = (2..).map(|number| format!("{wanted}-{number}"));
    let mut candidates = std::iter::once(wanted.to_owned()).chain(numbered);
    let name = candidates.find(|name| !names.contains(name));
    let name = name.unwrap_or_default();
    names.insert(name.clone());
    name
}

/// The address from which this machine reaches `other`, at which that reaches this one. Nothing is sent to find that out.
fn own_address(other: IpAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match other {
        IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect((other, 9))?;
    Ok(socket.local_addr()?.ip())
}

/// Answers at the port where this machine's member will listen.
fn echo_server(ip: IpAddr, own: &OwnKey, pins: &Pins) -> Result<EchoServer, BorrowError> {
    for port in FIRST_PORT..FIRST_PORT + PORTS {
        let keys = Some((own.clone(), pins.clone()));
        match EchoServer::start((ip, port).into(), keys) {
            Ok(server) => return Ok(server),
            Err(LinkError::Listen { source, .. }) if source.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(BorrowError::Port(error)),
        }
    }
    Err(BorrowError::NoPort {
        ip,
        first: FIRST_PORT,
        last: FIRST_PORT + PORTS,
    })
}

/// All machines of the ring to be.
struct Machines {
    contacts: Vec<Contact>,
    own: OwnKey,
    own_key: Fingerprint,
    own_place: Place,
    /// In the order of `contacts`.
    lent: Vec<LentPlace>,
}

impl Machines {
    /// Has every lender answer the measurements of all others.
    async fn let_in(&mut self) -> Result<(), BorrowError> {
        let all = self.contacts.iter().map(|contact| contact.key);
        let all = all.chain([self.own_key]);
        let fingerprints: Vec<_> = all.map(|key| key.bytes().to_vec().into()).collect();
        for contact in &mut self.contacts {
            let request = LetInRequest {
                fingerprints: fingerprints.clone(),
            };
            let answer = contact.client.let_in(request).await;
            answer.map_err(|status| refused(&contact.lender, &status))?;
        }
        Ok(())
    }

    /// Measures all links, each way, one at a time. Those from here are returned, the others go to their profiles.
    async fn measure(&mut self) -> Result<Vec<LinkProfile>, BorrowError> {
        let mut links = Vec::new();
        for other in &self.lent {
            progress(&format!("measuring the link to {}", other.place.name));
            links.push(self.measured_here(other).await?);
        }
        for from in 0..self.lent.len() {
            progress(&format!(
                "measuring the links from {}",
                self.lent[from].place.name
            ));
            let mut measured = vec![self.measured_there(from, None).await?];
            for to in (0..self.lent.len()).filter(|&to| to != from) {
                measured.push(self.measured_there(from, Some(to)).await?);
            }
            if let Some(status) = &mut self.lent[from].profile.status {
                status.links = measured;
            }
        }
        Ok(links)
    }

    async fn measured_here(&self, to: &LentPlace) -> Result<LinkProfile, BorrowError> {
        let Place {
            name,
            address,
            public_key_sha256,
        } = to.place.clone();
        let key: Fingerprint =
            public_key_sha256
                .parse()
                .map_err(|source| BorrowError::Fingerprint {
                    lender: to.lender.clone(),
                    source,
                })?;
        let connector = ring::connector(self.own.clone(), key).map_err(BorrowError::Tls)?;
        let there = address.clone();
        let measured = spawn_blocking(move || measure_link(&there, Some(connector))).await?;
        let measured = measured.map_err(|error| BorrowError::Link {
            lender: to.lender.clone(),
            from: self.own_place.name.clone(),
            to: name.clone(),
            address,
            problem: prima_crds::error_chain(&error),
        })?;
        Ok(LinkProfile {
            to: name,
            latency_nanoseconds: measured.latency.as_nanos() as i64,
            bytes_per_second: measured.bytes_per_second as i64,
        })
    }

    /// From a lender to another, or to this machine.
    async fn measured_there(
        &mut self,
        from: usize,
        to: Option<usize>,
    ) -> Result<LinkProfile, BorrowError> {
        let (place, key) = match to {
            Some(to) => (self.lent[to].place.clone(), self.contacts[to].key),
            None => (self.own_place.clone(), self.own_key),
        };
        let request = MeasureRequest {
            address: place.address.clone(),
            fingerprint: key.bytes().to_vec().into(),
        };
        let answer = self.contacts[from].client.measure(request).await;
        let answer = answer.map_err(|status| match status.code() {
            Code::Unavailable => BorrowError::Link {
                lender: self.lent[to.unwrap_or(from)].lender.clone(),
                from: self.lent[from].place.name.clone(),
                to: place.name.clone(),
                address: place.address.clone(),
                problem: root_cause(&status),
            },
            _ => refused(&self.contacts[from].lender, &status),
        })?;
        let answer = answer.into_inner();
        Ok(LinkProfile {
            to: place.name,
            latency_nanoseconds: i64::try_from(answer.latency_nanoseconds).unwrap_or(i64::MAX),
            bytes_per_second: answer.bytes_per_second as i64,
        })
    }
}

async fn run_member(args: &RunArgs) -> Result<(), BorrowError> {
    let mut stop = StopSignal::new().map_err(BorrowError::Start)?;
    let plan = plan_source::read(&args.plan, &args.member)?;
    let text = std::fs::read_to_string(&args.plan).map_err(BorrowError::Start)?;
    let key = plan.spec.members[plan.rank].public_key_sha256.as_ref();
    let key = key.and_then(|key| key.parse().ok());
    let key = key.ok_or_else(|| BorrowError::NoKey {
        member: args.member.clone(),
    })?;
    let own = ring::fixed(Known::open()?.identity()?);
    let (spec, rank) = (plan.spec.clone(), plan.rank);
    let files = spawn_blocking(move || send::part_of(&spec, rank)).await??;

    let mut contact = Contact::known(&args.lender, &own, key).await?;
    let (orders, receiver) = mpsc::channel(WAITING);
    let start = Start {
        plan: text,
        member: args.member.clone(),
        files: files.clone(),
    };
    let start = Order {
        order: Some(Ordered::Start(start)),
    };
    // There is room for the first.
    let _ = orders.send(start).await;
    let events = contact
        .client
        .run(Request::new(ReceiverStream::new(receiver)));
    let events = events
        .await
        .map_err(|status| not_taken_in(&args.lender, &status))?;
    let mut member = Remote {
        lender: &args.lender,
        orders: Some(orders),
        events: events.into_inner(),
    };
    let first = PathBuf::from(&plan.spec.model.file);
    tokio::select! {
        result = member.follow(&first, &files) => return result,
        () = stop.received() => {}
    }
    // The lender ends its member when the orders do.
    member.orders = None;
    let ended = async { while let Ok(Some(_)) = member.next().await {} };
    tokio::select! {
        _ = timeout(END_LIMIT, ended) => {}
        () = stop.received() => {}
    }
    Ok(())
}

/// A member on a machine that is lent.
struct Remote<'a> {
    lender: &'a str,
    /// Its end ends the member.
    orders: Option<mpsc::Sender<Order>>,
    events: Streaming<Event>,
}

impl Remote<'_> {
    /// Sends what is wanted, and shows what the member writes, until it ends, which it should not.
    async fn follow(
        &mut self,
        first: &std::path::Path,
        files: &[super::proto::ModelFile],
    ) -> Result<(), BorrowError> {
        let mut sending: OptionFuture<JoinHandle<Result<(), SendError>>> = None.into();
        let sent = Arc::new(AtomicU64::new(0));
        let mut total_bytes = 0;
        let mut ticks = interval(PROGRESS_INTERVAL);
        loop {
            let event = tokio::select! {
                event = self.next() => event?,
                Some(ended) = &mut sending => {
                    sending = None.into();
                    ended??;
                    show_progress(total_bytes, total_bytes);
                    continue;
                }
                _ = ticks.tick(), if total_bytes > sent.load(Ordering::Relaxed) => {
                    show_progress(sent.load(Ordering::Relaxed), total_bytes);
                    continue;
                }
            };
            match event {
                Some(Happened::Wanted(wanted)) => {
                    let wanted = Sending::new(first, files, wanted)?;
                    total_bytes = wanted.total_bytes;
                    if let (Some(orders), 1..) = (self.orders.clone(), total_bytes) {
                        let sent = sent.clone();
                        sending = Some(spawn_blocking(move || wanted.send(&orders, &sent))).into();
                    }
                }
                Some(Happened::Line(line)) => {
                    let _ = writeln!(io::stdout(), "{line}");
                }
                Some(Happened::Ended(how)) => {
                    return Err(BorrowError::Ended {
                        lender: self.lender.to_owned(),
                        how,
                    });
                }
                None => {}
            }
        }
    }

    async fn next(&mut self) -> Result<Option<Happened>, BorrowError> {
        let lender = || self.lender.to_owned();
        match self.events.message().await {
            Ok(Some(event)) => Ok(event.event),
            Ok(None) => Err(BorrowError::Lost {
                lender: lender(),
                problem: "its agent ended the stream".to_owned(),
            }),
            Err(status) => Err(match status.source() {
                Some(_) => BorrowError::Lost {
                    lender: lender(),
                    problem: root_cause(&status),
                },
                None => BorrowError::NotRun {
                    lender: lender(),
                    problem: status.message().to_owned(),
                },
            }),
        }
    }
}

fn show_progress(sent: u64, total: u64) {
    progress(&format!(
        "has {} of its {} of the model",
        rounded(sent),
        rounded(total)
    ));
}
