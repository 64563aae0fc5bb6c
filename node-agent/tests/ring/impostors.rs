//! Who is not a member's predecessor is not let in, however it tries, and the real members go on undisturbed; over real sockets.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use prima_node_agent::ring::{
    self, Connector, GENERATION_KEY, Identity, MemberError, MemberOptions, RANK_KEY, RING_VERSION,
    UID_KEY, VERSION_KEY, proto,
};
use proto::ring_client::RingClient as Stub;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};

use crate::harness::{
    GENERATION, ModelFile, Planned, Ring, UID, bits, in_time, keyed_member, named_in_time, open,
    plan, tokens,
};
use prima_test_models::Random;

/// How somebody tries to be the predecessor of rank 1, which is rank 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Impostor {
    /// A key of its own, and everything said as rank 0 would.
    OtherKey,
    /// The key of another member of the ring.
    OtherMember,
    /// Rank 0's machine, as a member of another Model's plan.
    OtherPlan,
    OldGeneration,
    OtherRank,
    OtherVersion,
    /// As members of the first version do, but over TLS.
    NoVersion,
    /// What rank 0 sent when it connected, byte for byte.
    Replay,
    /// The beginning of that, and then nothing more.
    HalfWay,
    /// The right greeting without TLS.
    Plain,
    Noise,
}

const ALL: [Impostor; 11] = [
    Impostor::OtherKey,
    Impostor::OtherMember,
    Impostor::OtherPlan,
    Impostor::OldGeneration,
    Impostor::OtherRank,
    Impostor::OtherVersion,
    Impostor::NoVersion,
    Impostor::Replay,
    Impostor::HalfWay,
    Impostor::Plain,
    Impostor::Noise,
];

/// In both attacks together, if the variable `IMPOSTORS` names no other number. More find the same.
const IMPOSTORS: usize = 2200;
const ATTACKS: usize = 2;
/// At the same time.
const CROWD: usize = 16;

/// What an impostor may know.
struct Knowledge {
    address: SocketAddr,
    /// Of ranks 0, 1 and 2.
    identities: Vec<Identity>,
    stranger: Identity,
    /// Of an accepted connection.
    recorded: Vec<u8>,
}

impl Impostor {
    /// Tries once. Returns how it was refused; panics if it was not.
    async fn try_it(self, known: &Knowledge, random: &mut Random) -> String {
        match self {
            Self::Replay => {
                let bytes = &known.recorded;
                cut_off(known.address, bytes).await
            }
            Self::HalfWay => {
                let length = random.within(1..known.recorded.len());
                half_way(known.address, &known.recorded[..length]).await
            }
            Self::Noise => {
                let noise: Vec<u8> = (0..random.within(1..4096))
                    .map(|_| random.within(0..256) as u8)
                    .collect();
                half_way(known.address, &noise).await
            }
            Self::Plain => {
                let plain = Endpoint::from_shared(format!("http://{}", known.address)).unwrap();
                match plain.connect().await {
                    Ok(channel) => self.greet(channel).await,
                    Err(error) => error.to_string(),
                }
            }
            _ => {
                let own = match self {
                    Self::OtherKey => &known.stranger,
                    Self::OtherMember => &known.identities[2],
                    _ => &known.identities[0],
                };
                match connect(known, own).await {
                    Ok(channel) => self.greet(channel).await,
                    Err(error) => error,
                }
            }
        }
    }

    async fn greet(self, channel: Channel) -> String {
        match hop(channel, self).await {
            Ok(_) => panic!("{self:?} was let in"),
            Err(status) => status.message().to_owned(),
        }
    }
}

/// Opens a stream as this impostor does.
async fn hop(
    channel: Channel,
    who: Impostor,
) -> Result<(mpsc::Sender<proto::Frame>, Streaming<proto::HopEvent>), Status> {
    let (frames, received) = mpsc::channel(1);
    let mut request = Request::new(ReceiverStream::new(received));
    let metadata = request.metadata_mut();
    let version = RING_VERSION + i64::from(who == Impostor::OtherVersion);
    if who != Impostor::NoVersion {
        metadata.insert(VERSION_KEY, version.into());
    }
    let uid = match who {
        Impostor::OtherPlan => "1c4e2f0a-other",
        _ => UID,
    };
    metadata.insert(UID_KEY, uid.parse().unwrap());
    let generation = GENERATION - i64::from(who == Impostor::OldGeneration);
    metadata.insert(GENERATION_KEY, generation.into());
    let rank = 2 * usize::from(who == Impostor::OtherRank);
    metadata.insert(RANK_KEY, rank.into());
    let events = Stub::new(channel).hop(request).await?;
    Ok((frames, events.into_inner()))
}

fn connector(own: &Identity, server: &Identity) -> Connector {
    ring::connector(ring::fixed(own.clone()), server.fingerprint()).unwrap()
}

async fn connect(known: &Knowledge, own: &Identity) -> Result<Channel, String> {
    connect_to(known.address, connector(own, &known.identities[1])).await
}

async fn connect_to(address: SocketAddr, connector: Connector) -> Result<Channel, String> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let connected = endpoint.connect_with_connector(connector).await;
    connected.map_err(|error| prima_crds::error_chain(&error))
}

/// Sends all of it; the member must close.
async fn cut_off(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // It may close before it has all.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    "closed".to_owned()
}

/// Sends it, and goes away a little later.
async fn half_way(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let _ = stream.write_all(bytes).await;
    let mut answer = [0; 64];
    let _ = tokio::time::timeout(Duration::from_millis(5), stream.read(&mut answer)).await;
    "left".to_owned()
}

/// All kinds, in turns, as many of each. Returns what each was told.
///
/// All are on one thread, as a member's own connections are. Where one thread hands a request to a connection while another ends it, the HTTP/2
/// client (hyper 1.12) may lose that request: it enters a queue (tokio's mpsc) that was just emptied for the last time, and whoever waits for its
/// answer waits for ever. Those whose keys are refused greet just when their connection ends.
async fn attack(known: Arc<Knowledge>) -> BTreeMap<Impostor, Vec<String>> {
    let impostors = std::env::var("IMPOSTORS").map_or(IMPOSTORS, |impostors| {
        impostors.parse().expect("IMPOSTORS: a number")
    });
    let of_each = impostors.div_ceil(ATTACKS * ALL.len());
    let mut crowd = tokio::task::JoinSet::new();
    for member in 0..CROWD {
        let known = known.clone();
        crowd.spawn(async move {
            let mut told = Vec::new();
            let mut random = Random(member as u64 + 1);
            for turn in (member..of_each * ALL.len()).step_by(CROWD) {
                let who = ALL[turn % ALL.len()];
                let refused = named_in_time(who, who.try_it(&known, &mut random)).await;
                told.push((who, refused));
            }
            told
        });
    }
    let mut told: BTreeMap<Impostor, Vec<String>> = BTreeMap::new();
    while let Some(one) = crowd.join_next().await {
        for (who, words) in one.unwrap() {
            told.entry(who).or_default().push(words);
        }
    }
    for who in ALL {
        assert_eq!(told[&who].len(), of_each, "{who:?}");
    }
    told
}

/// The bytes of rank 0 while it connects, and whether it was let in.
async fn record(known: &Knowledge) -> (Vec<u8>, Result<(), Status>) {
    let relay = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let through = relay.local_addr().unwrap();
    let member = known.address;
    let relaying = tokio::spawn(async move {
        let (mut client, _) = relay.accept().await.unwrap();
        let mut server = TcpStream::connect(member).await.unwrap();
        let mut recorded = Recorded(Vec::new(), &mut client);
        let _ = copy_bidirectional(&mut recorded, &mut server).await;
        recorded.0
    });
    let connector = connector(&known.identities[0], &known.identities[1]);
    let channel = in_time(connect_to(through, connector)).await.unwrap();
    let let_in = in_time(hop(channel, Impostor::Replay)).await.map(drop);
    (in_time(relaying).await.unwrap(), let_in)
}

/// Keeps what is read.
struct Recorded<'a>(Vec<u8>, &'a mut TcpStream);

impl tokio::io::AsyncRead for Recorded<'_> {
    fn poll_read(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
        buffer: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        let this = &mut *self;
        let read = std::pin::Pin::new(&mut *this.1).poll_read(context, buffer);
        this.0.extend_from_slice(&buffer.filled()[before..]);
        read
    }
}

impl tokio::io::AsyncWrite for Recorded<'_> {
    fn poll_write(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
        bytes: &[u8],
    ) -> std::task::Poll<std::io::Result<usize>> {
        std::pin::Pin::new(&mut *self.1).poll_write(context, bytes)
    }

    fn poll_flush(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut *self.1).poll_flush(context)
    }

    fn poll_shutdown(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut *self.1).poll_shutdown(context)
    }
}

/// A plan of three with keys, and what there is to know of its rank 1.
fn planned(file: &ModelFile) -> (Planned, Knowledge) {
    let mut planned = plan(&file.path, file.layers(), 3, &[2, 4, 5]);
    let identities = planned.give_keys();
    let known = Knowledge {
        address: planned.listeners[1].local_addr().unwrap(),
        identities,
        stranger: Identity::generate().unwrap().0,
        recorded: Vec::new(),
    };
    (planned, known)
}

#[tokio::test]
async fn impostors_never_take_the_free_place() {
    let file = ModelFile::made_up();
    let (mut planned, mut known) = planned(&file);
    let plan = Arc::new(planned.plan.clone());
    let listener = planned.listeners.remove(1);
    let _member = keyed_member(&file.model, &plan, 1, listener, &known.identities[1]);
    let (recorded, let_in) = record(&known).await;
    let_in.unwrap();
    known.recorded = recorded;

    let known = Arc::new(known);
    let told = attack(known.clone()).await;
    for who in [
        Impostor::OtherPlan,
        Impostor::OldGeneration,
        Impostor::OtherRank,
    ] {
        let words = "the caller is not this member's predecessor in its plan";
        assert!(told[&who].iter().all(|told| told == words), "{who:?}");
    }
    for who in [Impostor::OtherVersion, Impostor::NoVersion] {
        assert!(
            told[&who].iter().all(|told| told.contains("version 1")),
            "{who:?}"
        );
    }
    // What comes from TLS says nothing of the plan.
    for words in [Impostor::OtherKey, Impostor::OtherMember].map(|who| &told[&who]) {
        let own = known
            .identities
            .iter()
            .map(|own| own.fingerprint().to_string());
        let secrets: Vec<String> = own.chain([UID.to_owned()]).collect();
        let telling = words
            .iter()
            .find(|words| secrets.iter().any(|secret| words.contains(secret)));
        assert_eq!(telling, None);
    }
    // Had one of them been let in, the place would be taken.
    let connecting = connect(&known, &known.identities[0]);
    let channel = in_time(connecting).await.unwrap();
    in_time(hop(channel, Impostor::Replay)).await.unwrap();
}

#[tokio::test]
async fn impostors_do_not_disturb_a_running_ring() {
    let file = ModelFile::made_up();
    let (planned, mut known) = planned(&file);
    let identities = known.identities.clone();
    let (_ring, mut client) = Ring::start_each(planned, |plan, rank, listener| {
        keyed_member(&file.model, plan, rank, listener, &identities[rank])
    });
    in_time(client.ready()).await.unwrap();
    let (recorded, refused) = record(&known).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.message(), "the predecessor is connected already");
    known.recorded = recorded;

    let text = tokens(400);
    let expected = file.logits(&text);
    let session = open(&mut client).await;
    let mut tokens_sent = 0;
    let attacking = tokio::spawn(attack(Arc::new(known)));
    // Its only session would be lost with any connection of a member.
    let mut over = false;
    while !over {
        // Once more when all have tried.
        over = attacking.is_finished();
        let at = tokens_sent % text.len();
        client.truncate(session, at).await.unwrap();
        let logits = in_time(client.forward(session, &text[at..=at])).await;
        assert!(
            bits(&logits.unwrap()) == bits(&expected[at]),
            "position {at}"
        );
        tokens_sent += 1;
    }
    attacking.await.unwrap();
}

#[tokio::test]
async fn an_encrypted_ring_computes_the_same_bits() {
    let file = ModelFile::made_up();
    let text = tokens(300);
    let expected = file.logits(&text);
    for (members, ends) in [(1, &[5][..]), (2, &[1, 2, 4, 5]), (3, &[1, 1, 2, 3, 5, 5])] {
        let planned = plan(&file.path, file.layers(), members, ends);
        let (_ring, mut client) = Ring::start_encrypted(&file.model, planned);
        in_time(client.ready()).await.unwrap();
        let session = open(&mut client).await;
        let logits = client.forward(session, &text[..299]).await.unwrap();
        assert!(bits(&logits) == bits(&expected[298]), "{members} members");
        let logits = client.forward(session, &text[299..]).await.unwrap();
        assert!(bits(&logits) == bits(&expected[299]), "{members} members");
    }
}

#[test]
fn a_member_without_its_planned_key_does_not_start() {
    let file = ModelFile::made_up();
    let refused = |uid: Option<&str>, own: fn(&Knowledge) -> Option<&Identity>| {
        let (mut planned, known) = planned(&file);
        let options = MemberOptions {
            uid: uid.map(str::to_owned),
            identity: own(&known).cloned(),
            plan: Arc::new(planned.plan),
            rank: 1,
            model: file.model.clone(),
            threads: 1,
            listener: planned.listeners.remove(1),
            memory: Default::default(),
            streaming: false,
            routing_trace: None,
        };
        match prima_node_agent::ring::Member::start(options) {
            Err(MemberError::Keys { lacking }) => lacking,
            Err(other) => panic!("{other}"),
            Ok(_) => "nothing",
        }
    };
    let own: fn(&Knowledge) -> Option<&Identity> = |known| known.identities.get(1);
    assert_eq!(refused(Some(UID), own), "nothing");
    assert!(refused(None, own).contains("no uid"));
    assert!(refused(Some(UID), |_| None).contains("has not the key"));
    assert!(refused(Some(UID), |known| known.identities.first()).contains("has not the key"));
}
