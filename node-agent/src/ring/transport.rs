//! Streams between neighbours: accepts the predecessor's, keeps one open to the successor, and reports what happens
//! to both. It decides who may be a neighbour and when a neighbour is lost; it never looks into a frame.
//!
//! There is one predecessor at a time, identified by its key (where the plan has keys) and its greeting: a second one is refused while the
//! first lives, so that a stray client cannot disturb a ring. A killed neighbour is noticed at once by its broken connection, one
//! without power or network by the silence of its system, and a stopped process by unanswered HTTP/2 pings. Signs of life pass here, beside
//! the hop task, which takes nothing in while it computes.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request, Response, Status, Streaming};

use super::connection::{CONNECT_TIMEOUT, Slot, endpoint, root_cause, server};
use super::frame::{Frame, HopEvent, MemberEvent, Output};
use super::greeting::Greeting;
use super::identity::Fingerprint;
use super::link;
use super::proto;
use super::proto::ring_client::RingClient;
use super::proto::ring_server::{Ring, RingServer};
use super::signs_of_life::SignsOfLife;
use super::tls::{self, OwnKey};
use super::wire::{self, MAX_EVENT_BYTES};

/// What a member's hop task receives.
#[derive(Debug)]
pub enum Inbound {
    /// The predecessor's stream is open; events for it go here.
    PredecessorConnected {
        events: mpsc::Sender<Result<proto::HopEvent, Status>>,
    },
    PredecessorLost {
        cause: String,
    },
    /// Not yet checked.
    Frame {
        frame: proto::Frame,
        arrived: Instant,
    },
    /// The stream to the successor is open; frames for it go here.
    SuccessorConnected {
        frames: mpsc::Sender<proto::Frame>,
    },
    /// Sent also when an attempt to connect failed.
    SuccessorLost {
        cause: String,
    },
    /// From the successor, on its way to rank 0. Never a sign of life.
    Event(HopEvent),
    /// Rank 0 begins a round, whose rows it reads as this.
    Begin {
        frame: Frame,
        output: Output,
        begun: Instant,
    },
}

/// What both directions agree on.
#[derive(Clone, Debug)]
pub struct LinkOptions {
    /// What this member says of itself to its successor.
    pub own: Greeting,
    /// What the only one says that may be the predecessor.
    pub predecessor: Greeting,
    /// If there are none, connections are plain.
    pub keys: Option<NeighbourKeys>,
    /// The largest message that may arrive.
    pub max_message_bytes: usize,
    /// Frames that may wait for a neighbour.
    pub buffered_frames: usize,
}

/// By whose keys this member and its neighbours know each other.
#[derive(Clone, Debug)]
pub struct NeighbourKeys {
    pub own: OwnKey,
    pub predecessor: Fingerprint,
    pub successor: Fingerprint,
}

#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    #[error("the ring service stopped")]
    Serve(#[source] tonic::transport::Error),
    #[error("the ring's listener cannot be used")]
    Listener(#[source] std::io::Error),
    #[error("TLS cannot be set up")]
    Tls(#[source] rustls::Error),
}

const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(2);
/// A member that waits for its successor logs it this often.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Events are rare and small; more than this unread means that the predecessor is stuck.
const BUFFERED_EVENTS: usize = 256;

/// Serves the predecessor on `listener` until the future is dropped.
pub async fn serve(
    listener: std::net::TcpListener,
    options: LinkOptions,
    inbox: mpsc::Sender<Inbound>,
    signs: Arc<SignsOfLife>,
) -> Result<(), TransportError> {
    listener
        .set_nonblocking(true)
        .map_err(TransportError::Listener)?;
    let listener = tokio::net::TcpListener::from_std(listener).map_err(TransportError::Listener)?;
    let max_message_bytes = options.max_message_bytes;
    let keys = options.keys.clone();
    let service = RingServer::new(Acceptor {
        predecessor: options.predecessor,
        encrypted: keys.is_some(),
        inbox,
        signs,
        occupied: Arc::new(AtomicBool::new(false)),
    })
    .max_decoding_message_size(max_message_bytes);
    let server = server(max_message_bytes).add_service(service);
    let served = match keys {
        Some(keys) => {
            let config = tls::server_config(keys.own, keys.predecessor);
            let config = config.map_err(TransportError::Tls)?;
            let incoming = tls::incoming(listener, config);
            server.serve_with_incoming(incoming).await
        }
        None => {
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            let server = server.add_service(link::service());
            server.serve_with_incoming(incoming).await
        }
    };
    served.map_err(TransportError::Serve)
}

/// Keeps a stream open to the successor until the inbox is closed or the future dropped. `name` is for logs.
pub async fn connect(
    name: &str,
    address: &str,
    options: LinkOptions,
    inbox: mpsc::Sender<Inbound>,
    signs: &SignsOfLife,
) {
    let mut retry = FIRST_RETRY;
    let mut waiting_since = Instant::now();
    let mut progress_told = waiting_since;
    loop {
        let cause = match open(address, &options).await {
            Ok((frames, mut events)) => {
                tracing::info!(successor = name, address, "connected to the successor");
                retry = FIRST_RETRY;
                if inbox
                    .send(Inbound::SuccessorConnected { frames })
                    .await
                    .is_err()
                {
                    return;
                }
                let cause = loop {
                    match events.next().await {
                        Some(Ok(event)) => {
                            let Some(event) = wire::event_from_proto(event) else {
                                continue;
                            };
                            if matches!(event.event, MemberEvent::Alive) {
                                signs.hand_on(event.rank);
                            } else if inbox.send(Inbound::Event(event)).await.is_err() {
                                return;
                            }
                        }
                        Some(Err(status)) => break root_cause(&status),
                        None => break "it closed the stream".to_owned(),
                    }
                };
                tracing::warn!(successor = name, address, cause, "lost the successor");
                waiting_since = Instant::now();
                progress_told = waiting_since;
                cause
            }
            Err(cause) => {
                if progress_told.elapsed() >= PROGRESS_INTERVAL {
                    progress_told = Instant::now();
                    let seconds = waiting_since.elapsed().as_secs();
                    tracing::info!(
                        successor = name,
                        address,
                        cause,
                        "still waiting for the successor after {seconds} s"
                    );
                }
                cause
            }
        };
        if inbox.send(Inbound::SuccessorLost { cause }).await.is_err() {
            return;
        }
        tokio::time::sleep(retry).await;
        retry = (retry * 2).min(LAST_RETRY);
    }
}

struct Acceptor {
    predecessor: Greeting,
    encrypted: bool,
    inbox: mpsc::Sender<Inbound>,
    signs: Arc<SignsOfLife>,
    occupied: Arc<AtomicBool>,
}

#[tonic::async_trait]
impl Ring for Acceptor {
    type HopStream = ReceiverStream<Result<proto::HopEvent, Status>>;

    async fn hop(
        &self,
        request: Request<Streaming<proto::Frame>>,
    ) -> Result<Response<Self::HopStream>, Status> {
        let checked = self.predecessor.check(request.metadata(), self.encrypted);
        checked.inspect_err(|refusal| {
            let (found, expected) = (request.metadata(), &self.predecessor);
            tracing::debug!(%refusal, ?found, ?expected, "refused a greeting");
        })?;
        let slot = Slot::claim(&self.occupied)
            .ok_or_else(|| Status::already_exists("the predecessor is connected already"))?;
        let (events, receiver) = mpsc::channel(BUFFERED_EVENTS);
        self.signs.connected(&events);
        tokio::spawn(read(request.into_inner(), events, self.inbox.clone(), slot));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

/// Reads the predecessor's frames until its stream ends.
async fn read(
    mut frames: Streaming<proto::Frame>,
    events: mpsc::Sender<Result<proto::HopEvent, Status>>,
    inbox: mpsc::Sender<Inbound>,
    slot: Slot,
) {
    if inbox
        .send(Inbound::PredecessorConnected { events })
        .await
        .is_err()
    {
        return;
    }
    let cause = loop {
        match frames.message().await {
            Ok(Some(frame)) => {
                let arrived = Instant::now();
                if inbox.send(Inbound::Frame { frame, arrived }).await.is_err() {
                    return;
                }
            }
            Ok(None) => break "it closed the stream".to_owned(),
            Err(status) => break root_cause(&status),
        }
    };
    // Sent before the slot is free, so that the next predecessor is told of after it.
    let _ = inbox.send(Inbound::PredecessorLost { cause }).await;
    drop(slot);
}

async fn open(
    address: &str,
    options: &LinkOptions,
) -> Result<(mpsc::Sender<proto::Frame>, Streaming<proto::HopEvent>), String> {
    let endpoint = endpoint(address).map_err(|error| root_cause(&error))?;
    let connected = match &options.keys {
        Some(keys) => {
            let connector = tls::connector(keys.own.clone(), keys.successor);
            let connector = connector.map_err(|error| error.to_string())?;
            endpoint.connect_with_connector(connector).await
        }
        None => endpoint.connect().await,
    };
    let channel = connected.map_err(|error| root_cause(&error))?;
    let (frames, receiver) = mpsc::channel(options.buffered_frames);
    let mut request = Request::new(ReceiverStream::new(receiver));
    options.own.write(request.metadata_mut());
    let mut client = RingClient::new(channel).max_decoding_message_size(MAX_EVENT_BYTES);
    match tokio::time::timeout(CONNECT_TIMEOUT, client.hop(request)).await {
        Ok(Ok(response)) => Ok((frames, response.into_inner())),
        Ok(Err(status)) if status.code() == Code::FailedPrecondition => {
            tracing::error!(
                address,
                reason = status.message(),
                "the successor does not follow this plan"
            );
            Err(root_cause(&status))
        }
        Ok(Err(status)) => Err(root_cause(&status)),
        Err(_) => Err(format!("no answer within {} s", CONNECT_TIMEOUT.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of one who greets as this rank, and takes rank 0 for its predecessor.
    fn as_rank(rank: usize) -> LinkOptions {
        between(rank, 0)
    }

    fn between(rank: usize, predecessor: usize) -> LinkOptions {
        let greeting = |rank| Greeting {
            uid: None,
            generation: 7,
            rank,
        };
        LinkOptions {
            own: greeting(rank),
            predecessor: greeting(predecessor),
            keys: None,
            max_message_bytes: 4096,
            buffered_frames: 8,
        }
    }

    /// A listening member of rank 1 whose predecessor is rank 0.
    async fn member() -> (String, mpsc::Receiver<Inbound>) {
        let (inbox, received) = mpsc::channel(8);
        (listen(as_rank(1), inbox, signs(1)), received)
    }

    fn listen(
        options: LinkOptions,
        inbox: mpsc::Sender<Inbound>,
        signs: Arc<SignsOfLife>,
    ) -> String {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(serve(listener, options, inbox, signs));
        address
    }

    fn signs(rank: usize) -> Arc<SignsOfLife> {
        Arc::new(SignsOfLife::new(rank, None))
    }

    #[tokio::test]
    async fn only_the_plans_predecessor_is_let_in_once() {
        let (address, mut received) = member().await;
        let mut stale = as_rank(0);
        stale.own.generation = 6;
        for other in [stale, as_rank(2)] {
            let refusal = open(&address, &other).await.err().unwrap();
            let words = "the caller is not this member's predecessor in its plan";
            assert_eq!(refusal, words);
        }

        let (frames, _events) = open(&address, &as_rank(0)).await.unwrap();
        assert!(matches!(
            received.recv().await,
            Some(Inbound::PredecessorConnected { .. })
        ));
        let refusal = open(&address, &as_rank(0)).await.err().unwrap();
        assert_eq!(refusal, "the predecessor is connected already");

        frames
            .send(proto::Frame {
                session: 5,
                ..Default::default()
            })
            .await
            .unwrap();
        assert!(
            matches!(received.recv().await, Some(Inbound::Frame { frame, .. }) if frame.session == 5)
        );
        drop(frames);
        assert!(matches!(
            received.recv().await,
            Some(Inbound::PredecessorLost { .. })
        ));
        // Its slot is free again.
        let again = open(&address, &as_rank(0)).await;
        assert!(again.is_ok());
    }

    #[tokio::test]
    async fn strangers_leave_the_predecessors_place_free() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

        let (address, mut received) = member().await;
        let mut stranger = tokio::net::TcpStream::connect(&address).await.unwrap();
        stranger.write_all(&[0xff; 4096]).await.unwrap();
        let mut answer = Vec::new();
        // Closed by the member (an error counts as closed); this read does not hang.
        let _ = stranger.read_to_end(&mut answer).await;

        let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}"))
            .unwrap()
            .connect()
            .await
            .unwrap();
        let status = RingClient::new(channel)
            .hop(tokio_stream::iter([proto::Frame::default()]))
            .await
            .unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        let _open = open(&address, &as_rank(0)).await.unwrap();
        assert!(matches!(
            received.recv().await,
            Some(Inbound::PredecessorConnected { .. })
        ));
    }

    #[tokio::test]
    async fn a_message_above_the_limit_ends_the_stream_unread() {
        let (address, mut received) = member().await;
        let (frames, mut events) = open(&address, &as_rank(0)).await.unwrap();
        assert!(matches!(
            received.recv().await,
            Some(Inbound::PredecessorConnected { .. })
        ));
        let large = proto::Frame {
            traceparent: "x".repeat(5000),
            ..Default::default()
        };
        frames.send(large).await.unwrap();
        let Some(Inbound::PredecessorLost { cause }) = received.recv().await else {
            panic!("the frame must not arrive");
        };
        assert!(cause.contains("4096"), "{cause}");
        drop(received);
        // But for a sign of life, nothing comes back.
        while let Some(Ok(event)) = events.next().await {
            let event = wire::event_from_proto(event).map(|event| event.event);
            assert_eq!(event, Some(MemberEvent::Alive));
        }
    }

    /// It takes nothing from its inbox while it computes.
    #[tokio::test]
    async fn signs_of_life_pass_a_member_that_is_busy() {
        let (inbox, mut received) = mpsc::channel(8);
        let last_signs = signs(2);
        let last = listen(between(2, 1), inbox, last_signs.clone());
        // Its inbox is full when both neighbours are connected.
        let (inbox, _unread) = mpsc::channel(2);
        let busy_signs = signs(1);
        let busy = listen(as_rank(1), inbox.clone(), busy_signs.clone());
        let (_frames, mut events) = open(&busy, &as_rank(0)).await.unwrap();
        let to_last = inbox.clone();
        tokio::spawn(async move { connect("last", &last, as_rank(1), to_last, &busy_signs).await });
        let connected = received.recv().await;
        assert!(matches!(
            connected,
            Some(Inbound::PredecessorConnected { .. })
        ));
        last_signs.hand_on(2);
        loop {
            let event = wire::event_from_proto(events.next().await.unwrap().unwrap()).unwrap();
            assert_eq!(event.event, MemberEvent::Alive);
            if event.rank == 2 {
                break;
            }
        }
        assert_eq!(inbox.capacity(), 0);
    }
}
