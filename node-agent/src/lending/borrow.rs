//! `prima-node-agent borrow`: what `prima run` needs of machines that are lent. `look` makes this machine known to them, asks what they can do
//! and measures the links between all; `run` is the process of one member there, for as long as its ring stands (`remote`).

use std::collections::BTreeSet;
use std::error::Error as _;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::time::Duration;

use prima_crds::printable;
use prima_crds::v1alpha1::document::DocumentError;
use prima_crds::v1alpha1::node_profile::{LinkProfile, NodeProfile};
use prima_member_process::{Borrowed, LentPlace, OwnPlace, Place};
use tokio::net::lookup_host;
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::known::{Known, KnownError};
use super::proto::lending_client::LendingClient;
use super::proto::{EnrolRequest, LetInRequest, MeasureRequest, ProfileRequest};
use super::remote;
use super::send::SendError;
use super::word::{Lender, NoLender};
use super::{CONTENT_BYTES, MAX_MESSAGE_BYTES};
use crate::plan_source::PlanSourceError;
use crate::profile::system;
use crate::ring::connection::{self, CONNECT_TIMEOUT, root_cause};
use crate::ring::{self, Accepted, EchoServer, Fingerprint, LinkError, OwnKey, Pins, measure_link};
use crate::serve::{ServeError, exit_with_parent};

#[derive(clap::Args)]
pub struct BorrowArgs {
    #[command(subcommand)]
    command: BorrowCommand,
}

#[derive(clap::Subcommand)]
enum BorrowCommand {
    /// Find out what machines can do that are lent, and write it as JSON. Reads from stdin which ones, since words are no arguments:
    /// HOST:PORT#WORD on each line
    Look(LookArgs),
    /// Run a member of a ring on a machine that is lent, until this process is asked to end
    Run(RunArgs),
}

#[derive(clap::Args)]
struct LookArgs {
    /// Leave out those that cannot be used, instead of failing; null if none is left
    #[arg(long)]
    leave_out: bool,
}

#[derive(clap::Args)]
pub(super) struct RunArgs {
    /// The machine, which is known here: HOST:PORT
    #[arg(long, value_name = "HOST:PORT")]
    pub lender: String,
    /// The ring's plan: a RingPlan document in YAML
    #[arg(long, value_name = "FILE")]
    pub plan: PathBuf,
    /// Which of the plan's members runs there
    #[arg(long, value_name = "NAME")]
    pub member: String,
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
    #[error("cannot read from stdin which machines are meant")]
    Stdin(#[source] io::Error),
    #[error("{lender}: {problem}")]
    Argument { lender: String, problem: NoLender },
    #[error("{lender} and {other} are one machine")]
    Twice { lender: String, other: String },
    #[error("{lender} is this machine itself")]
    Own { lender: String },
    #[error("cannot find out at which address {lender} reaches this machine")]
    Route {
        lender: String,
        #[source]
        source: io::Error,
    },
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
        "{lender} does not take this machine in ({cause}): start `prima agent --enrol` there, and give the word that it shows then, as HOST:PORT#WORD"
    )]
    NotTakenIn { lender: String, cause: String },
    #[error("{lender}: {problem}")]
    Refused { lender: String, problem: String },
    #[error("{lender} sent something else than its key's fingerprint")]
    Fingerprint { lender: String },
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
        "{from} does not reach {to} at {address}, where the ring would: is the port closed by a firewall there, or is one of them behind an address translator (WSL, a VM)? {problem}"
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
    #[error("cannot turn the ring's plan into YAML")]
    Yaml(#[source] serde_saphyr::ser::Error),
    #[error("cannot write what was found as JSON")]
    Json(#[source] serde_json::Error),
}

/// Ports that are tried for this machine's own member: behind the one of its agent, if it has one.
const FIRST_PORT: u16 = 9191;
const PORTS: u16 = 100;
/// For what a lender is asked. A machine that was not measured yet takes half a minute for its profile, a slow one more, and it measures for one
/// borrower at a time. One that is gone is noticed sooner, by its connection.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(300);
/// Until a lender has noticed that a ring before is gone, and has ended its member.
const LAST_RING_LIMIT: Duration = Duration::from_secs(16);
const LAST_RING_PAUSE: Duration = Duration::from_secs(1);
/// A line for each machine of the largest ring.
const MAX_STDIN: u64 = 1 << 16;

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
            BorrowCommand::Run(args) => remote::run_member(&args).await,
        }
    });
    runtime.shutdown_background();
    result
}

/// A lender that knows this machine, and whose key is known here.
pub(super) struct Contact {
    lender: String,
    /// At which it was reached.
    ip: IpAddr,
    key: Fingerprint,
    pub client: LendingClient<Channel>,
}

impl Contact {
    /// With the lender that has this key.
    pub async fn known(lender: &str, own: &OwnKey, key: Fingerprint) -> Result<Self, BorrowError> {
        let (ip, client) = connect(lender, own, key.into(), "it had before").await?;
        Ok(Self {
            lender: lender.to_owned(),
            ip,
            key,
            client,
        })
    }

    /// With whom was named: by its key if that is known, at whatever address, else by its word. Also returns what it can do, and where its
    /// member listens.
    async fn make(
        lender: &Lender,
        own: &OwnKey,
        known: &Known,
    ) -> Result<(Self, NodeProfile, SocketAddr), BorrowError> {
        let mut contact = match (lender.word, Self::by_key(lender, own, known).await) {
            (None, contact) => contact?,
            // The lender may have forgotten this machine, which shows when it is asked.
            (Some(_), Ok(mut contact)) => match contact.profile().await {
                Ok((profile, ring)) => return Ok((contact, profile, ring)),
                Err(BorrowError::NotTakenIn { .. }) => Self::enrol(lender, own, known).await?,
                Err(error) => return Err(error),
            },
            (Some(_), Err(BorrowError::NoWord { .. } | BorrowError::OtherKey { .. })) => {
                Self::enrol(lender, own, known).await?
            }
            (Some(_), Err(error)) => return Err(error),
        };
        let (profile, ring) = contact.profile().await?;
        Ok((contact, profile, ring))
    }

    /// By the key that it had at this address, or one that a known lender had at another: addresses change.
    async fn by_key(lender: &Lender, own: &OwnKey, known: &Known) -> Result<Self, BorrowError> {
        let address = &lender.address;
        let mut lenders = known.lenders()?;
        let before = lenders.get(address).cloned();
        let mut failed = BorrowError::NoWord {
            lender: address.clone(),
        };
        let keys: BTreeSet<Fingerprint> = lenders
            .values()
            .filter_map(|key| key.parse().ok())
            .filter(|key: &Fingerprint| lender.word.is_none_or(|word| word.lender == key.start()))
            .collect();
        for key in keys {
            match Self::known(address, own, key).await {
                Ok(contact) => {
                    if before != Some(key.to_string()) {
                        lenders.insert(address.clone(), key.to_string());
                        known.keep_lenders(lenders)?;
                    }
                    return Ok(contact);
                }
                Err(error @ BorrowError::OtherKey { .. }) if before.is_some() => failed = error,
                Err(BorrowError::OtherKey { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Err(failed)
    }

    /// By its word.
    async fn enrol(lender: &Lender, own: &OwnKey, known: &Known) -> Result<Self, BorrowError> {
        let address = &lender.address;
        let Some(word) = lender.word else {
            return Err(BorrowError::NoWord {
                lender: address.clone(),
            });
        };
        let (_, mut client) = connect(address, own, word.lender.into(), "the word says").await?;
        let request = EnrolRequest {
            secret: word.secret.to_vec().into(),
            name: system::host_name(),
        };
        let answer = answered(ANSWER_LIMIT, client.enrol(request)).await;
        let answer = answer.map_err(|status| not_taken_in(address, &status))?;
        let key = Fingerprint::from_bytes(&answer.fingerprint);
        let key = key
            .ok()
            .filter(|key| key.start() == word.lender)
            .ok_or_else(|| BorrowError::Fingerprint {
                lender: address.clone(),
            })?;
        // Whoever has it proves so in this handshake.
        let contact = Self::known(address, own, key).await?;
        let mut lenders = known.lenders()?;
        lenders.insert(address.clone(), key.to_string());
        known.keep_lenders(lenders)?;
        Ok(contact)
    }

    /// What the machine can do, and where its member listens. Waits while it still ends the member of a ring before.
    async fn profile(&mut self) -> Result<(NodeProfile, SocketAddr), BorrowError> {
        let lender = self.lender.clone();
        let begun = Instant::now();
        let answer = loop {
            match answered(ANSWER_LIMIT, self.client.profile(ProfileRequest {})).await {
                Err(status)
                    if status.code() == Code::ResourceExhausted
                        && begun.elapsed() < LAST_RING_LIMIT =>
                {
                    progress(&format!("{lender}: {}", printable(status.message())));
                    sleep(LAST_RING_PAUSE).await;
                }
                answer => break answer,
            }
        };
        let answer = answer.map_err(|status| not_taken_in(&lender, &status))?;
        let profile = NodeProfile::from_yaml(&lender, &answer.profile);
        let profile = profile.map_err(|source| BorrowError::Profile {
            lender: lender.clone(),
            source,
        })?;
        let name = profile.metadata.name.as_deref();
        if let Some(Err(problem)) = name.map(system::check_name) {
            let problem = format!("its name: {problem}");
            return Err(BorrowError::Refused { lender, problem });
        }
        match u16::try_from(answer.ring_port) {
            Ok(port @ 1..) => Ok((profile, SocketAddr::new(self.ip, port))),
            _ => Err(BorrowError::Refused {
                lender,
                problem: format!("expected a port of its ring, found {}", answer.ring_port),
            }),
        }
    }
}

/// What a lender answers, if it does within `limit`.
pub(super) async fn answered<T>(
    limit: Duration,
    request: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Status> {
    match timeout(limit, request).await {
        Ok(answer) => answer.map(Response::into_inner),
        Err(_) => Err(Status::deadline_exceeded(format!(
            "no answer within {} s",
            limit.as_secs()
        ))),
    }
}

/// What the first request over a connection came back with. A handshake that the lender refuses shows only there: the connection ends.
pub(super) fn not_taken_in(lender: &str, status: &Status) -> BorrowError {
    let ended = status.source().is_some();
    match ended || status.code() == Code::Unauthenticated {
        true => BorrowError::NotTakenIn {
            lender: lender.to_owned(),
            cause: root_cause(status),
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

/// A connection to one of the lender's addresses, and which one that is.
async fn connect(
    lender: &str,
    own: &OwnKey,
    accepted: Accepted,
    by: &'static str,
) -> Result<(IpAddr, LendingClient<Channel>), BorrowError> {
    let unknown = |source| BorrowError::Address {
        lender: lender.to_owned(),
        source,
    };
    let mut failed = unknown(io::Error::other("the name has no address"));
    let mut other_key = None;
    let connector = ring::connector(own.clone(), accepted).map_err(BorrowError::Tls)?;
    for address in lookup_host(lender).await.map_err(unknown)? {
        let window = connection::window_bytes(CONTENT_BYTES);
        let endpoint = connection::endpoint(&address.to_string()).map(|endpoint| {
            endpoint
                .initial_stream_window_size(window)
                .initial_connection_window_size(window)
                .max_frame_size(connection::frame_bytes(CONTENT_BYTES))
        });
        let connecting = async { endpoint?.connect_with_connector(connector.clone()).await };
        let cause = match timeout(CONNECT_TIMEOUT, connecting).await {
            Ok(Ok(channel)) => {
                let client = LendingClient::new(channel)
                    .max_decoding_message_size(MAX_MESSAGE_BYTES)
                    .max_encoding_message_size(MAX_MESSAGE_BYTES);
                return Ok((address.ip(), client));
            }
            Ok(Err(error)) if ring::is_other_key(&error) => {
                other_key = Some(BorrowError::OtherKey {
                    lender: lender.to_owned(),
                    by,
                });
                continue;
            }
            Ok(Err(error)) => root_cause(&error),
            Err(_) => "no answer".to_owned(),
        };
        failed = BorrowError::Connect {
            lender: lender.to_owned(),
            cause: format!("{address}: {cause}"),
        };
    }
    Err(other_key.unwrap_or(failed))
}

/// Shows what is going on: on stderr, where `prima run` reads it.
pub(super) fn progress(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

impl BorrowError {
    /// The machine without which it might have gone well: `HOST:PORT`.
    fn lender(&self) -> Option<&str> {
        match self {
            Self::NoWord { lender }
            | Self::Argument { lender, .. }
            | Self::Address { lender, .. }
            | Self::Connect { lender, .. }
            | Self::OtherKey { lender, .. }
            | Self::NotTakenIn { lender, .. }
            | Self::Twice { lender, .. }
            | Self::Own { lender }
            | Self::Route { lender, .. }
            | Self::Refused { lender, .. }
            | Self::Fingerprint { lender }
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
    let text = io::read_to_string(io::stdin().take(MAX_STDIN)).map_err(BorrowError::Stdin)?;
    let lenders = text.lines().map(|line| {
        line.parse().map_err(|problem| BorrowError::Argument {
            // The rest is a secret, or was to be one.
            lender: line.split('#').next().unwrap_or_default().to_owned(),
            problem,
        })
    });
    let mut lenders: Vec<Lender> = lenders.collect::<Result<_, _>>()?;
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
    let mut contacts: Vec<Contact> = Vec::new();
    let mut profiles = Vec::new();
    for lender in lenders {
        progress(&format!("asking {} what it can do", lender.address));
        let (contact, profile, ring) = Contact::make(lender, &own, &known).await?;
        let lender = contact.lender.clone();
        if contact.key == own_key {
            return Err(BorrowError::Own { lender });
        }
        if let Some(other) = contacts.iter().find(|other| other.key == contact.key) {
            let other = other.lender.clone();
            return Err(BorrowError::Twice { lender, other });
        }
        contacts.push(contact);
        profiles.push((profile, ring));
    }
    let own_ip = own_address(contacts[0].ip).map_err(|source| BorrowError::Route {
        lender: contacts[0].lender.clone(),
        source,
    })?;
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
    for lent in &machines.lent {
        let checked = lent.profile.validate(&lent.lender);
        checked.map_err(|source| BorrowError::Profile {
            lender: lent.lender.clone(),
            source,
        })?;
    }
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
            let answer = answered(ANSWER_LIMIT, contact.client.let_in(request)).await;
            answer.map_err(|status| refused(&contact.lender, &status))?;
        }
        Ok(())
    }

    /// Measures all links, each way, one at a time. Those from here are returned, the others go to their profiles.
    async fn measure(&mut self) -> Result<Vec<LinkProfile>, BorrowError> {
        let mut links = Vec::new();
        for to in 0..self.lent.len() {
            progress(&format!(
                "measuring the link to {}",
                self.lent[to].place.name
            ));
            links.push(self.measured_here(to).await?);
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

    async fn measured_here(&self, to: usize) -> Result<LinkProfile, BorrowError> {
        let (key, place) = (self.contacts[to].key, self.lent[to].place.clone());
        let connector = ring::connector(self.own.clone(), key).map_err(BorrowError::Tls)?;
        let there = place.address.clone();
        let measured = spawn_blocking(move || measure_link(&there, Some(connector))).await?;
        let measured = measured.map_err(|error| BorrowError::Link {
            lender: self.lent[to].lender.clone(),
            from: self.own_place.name.clone(),
            to: place.name.clone(),
            address: place.address,
            problem: prima_crds::error_chain(&error),
        })?;
        Ok(LinkProfile {
            to: place.name,
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
        let client = &mut self.contacts[from].client;
        let answer = answered(ANSWER_LIMIT, client.measure(request)).await;
        let answer = answer.map_err(|status| match status.code() {
            // Said by the lender, and not because it was lost.
            Code::Unavailable if status.source().is_none() => BorrowError::Link {
                lender: self.lent[to.unwrap_or(from)].lender.clone(),
                from: self.lent[from].place.name.clone(),
                to: place.name.clone(),
                address: place.address.clone(),
                problem: root_cause(&status),
            },
            _ => refused(&self.contacts[from].lender, &status),
        })?;
        Ok(LinkProfile {
            to: place.name,
            latency_nanoseconds: i64::try_from(answer.latency_nanoseconds).unwrap_or(i64::MAX),
            bytes_per_second: answer.bytes_per_second as i64,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[tokio::test]
    async fn a_lender_that_answers_nothing_is_given_up() {
        let never = pending::<Result<Response<()>, Status>>();
        let status = answered(Duration::from_secs(1), never).await.unwrap_err();
        // And not as one to whom this machine would be a stranger.
        let error = not_taken_in("desk:9190", &status);
        assert_eq!(error.to_string(), "desk:9190: no answer within 1 s");
        let answer = ready(Ok(Response::new(7)));
        assert_eq!(answered(ANSWER_LIMIT, answer).await.unwrap(), 7);
    }
}
