//! Measures the link to another machine over the ring's own transport: a stream on which every payload comes back.
//! Every member serves it beside its ring.
//!
//! Decides what latency and rate mean (half a round trip, so a difference between the two directions is averaged), and how much a stranger
//! may ask for: one stream at a time, payloads of bounded size, no long silences. It knows nothing of rings: no plan, no session. A member
//! that is computing answers later than an idle one. In a cluster it goes over TLS, as the ring's streams do.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::runtime;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request, Response, Status, Streaming};

use super::connection::{self, Slot};
use super::proto;
use super::proto::link_client::LinkClient;
use super::proto::link_server::{Link, LinkServer};
use super::tls::{self, Connector, OwnKey, Pins};

/// The cost of one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkMeasurement {
    /// Of a message without payload.
    pub latency: Duration,
    /// Of a payload's bytes, in addition to the latency.
    pub bytes_per_second: f64,
}

#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("cannot start measuring")]
    Start(#[source] io::Error),
    #[error("cannot listen on {address}, where other agents measure their link to this one")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("TLS cannot be set up")]
    Tls(#[source] rustls::Error),
    #[error("{address} is not HOST:PORT")]
    Address {
        address: String,
        #[source]
        source: tonic::transport::Error,
    },
    #[error(
        "cannot connect to {address} ({cause}); is an agent serving there, and reachable from here?"
    )]
    Connect { address: String, cause: String },
    #[error("the agent at {address} does not let its link be measured: {}", .status.message())]
    Refused { address: String, status: Status },
    #[error("the agent at {address} stopped answering: {cause}")]
    Lost { address: String, cause: String },
    #[error("the agent at {address} sent back {found} bytes of {expected}")]
    Echo {
        address: String,
        expected: usize,
        found: usize,
    },
}

impl LinkError {
    /// Whether the agent there is reached, and measures with another one.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Refused { status, .. } if status.code() == Code::ResourceExhausted)
    }
}

/// The largest payload, and the one whose rate is measured: about a chunk of a prompt in a small model.
pub const MAX_PAYLOAD_BYTES: usize = 256 << 10;
/// Bytes of the message around a payload.
const OVERHEAD_BYTES: usize = 64;

/// A stream that is silent for this long is ended, on both sides.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);

/// Measures the link to the agent that serves a ring (or an [`EchoServer`]) at `address`, HOST:PORT; over TLS if there is a connector. Takes
/// about a second on a fast link; on a slow one as long as a dozen round trips of a payload.
///
/// # Errors
/// When `address` is not an address, when nobody listens or answers there, when the agent is busy, when another program answers, and when
/// what comes back is not what was sent.
pub fn measure_link(
    address: &str,
    connector: Option<Connector>,
) -> Result<LinkMeasurement, LinkError> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(LinkError::Start)?;
    runtime.block_on(async {
        let mut echo = Echoes::connect(address, connector).await?;
        let empty = echo.half_round_trip(Bytes::new(), 20, 200).await?;
        let payload = Bytes::from(vec![0x5a; MAX_PAYLOAD_BYTES]);
        let full = echo.half_round_trip(payload, 2, 40).await?;
        // On a link whose latency exceeds the transfer, the difference would be mostly noise.
        let transfer = full.saturating_sub(empty).max(full / 10);
        Ok(LinkMeasurement {
            latency: empty,
            bytes_per_second: MAX_PAYLOAD_BYTES as f64 / transfer.as_secs_f64(),
        })
    })
}

/// A server that only answers measurements, on its own thread until it is dropped.
pub struct EchoServer {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl EchoServer {
    /// Listens at `address`. If there is a key, over TLS, and only those are let in whose keys are pinned.
    ///
    /// # Errors
    /// [`LinkError::Listen`] when the system refuses the address, [`LinkError::Start`] when it refuses a thread.
    pub fn start(
        address: SocketAddr,
        keys: Option<(OwnKey, Pins)>,
    ) -> Result<EchoServer, LinkError> {
        let config = keys.map(|(own, pins)| tls::server_config(own, pins));
        let config = config.transpose().map_err(LinkError::Tls)?;
        let listener =
            TcpListener::bind(address).map_err(|source| LinkError::Listen { address, source })?;
        let address = listener.local_addr().map_err(LinkError::Start)?;
        listener.set_nonblocking(true).map_err(LinkError::Start)?;
        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(LinkError::Start)?;
        let (stop, stopped) = oneshot::channel();
        let work = async move {
            let listener = match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => listener,
                Err(error) => return tracing::warn!(%error, "cannot listen for a measurement"),
            };
            let server =
                connection::server(MAX_PAYLOAD_BYTES + OVERHEAD_BYTES).add_service(service());
            let serve = async {
                match config {
                    Some(config) => {
                        let incoming = tls::incoming(listener, config);
                        server.serve_with_incoming(incoming).await
                    }
                    None => {
                        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
                        server.serve_with_incoming(incoming).await
                    }
                }
            };
            tokio::select! {
                result = serve => if let Err(error) = result {
                    tracing::warn!(%error, "the server of a measurement ended");
                },
                _ = stopped => {}
            }
        };
        let thread = thread::Builder::new()
            .name("echo".into())
            .spawn(move || runtime.block_on(work))
            .map_err(LinkError::Start)?;
        Ok(EchoServer {
            address,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for EchoServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic in it has been printed.
            let _ = thread.join();
        }
    }
}

/// The service that answers measurements.
pub(super) fn service() -> LinkServer<Echo> {
    LinkServer::new(Echo {
        occupied: Arc::default(),
    })
    .max_decoding_message_size(MAX_PAYLOAD_BYTES + OVERHEAD_BYTES)
}

pub(super) struct Echo {
    occupied: Arc<AtomicBool>,
}

#[tonic::async_trait]
impl Link for Echo {
    type MeasureStream = Pin<Box<dyn Stream<Item = Result<proto::Payload, Status>> + Send>>;

    async fn measure(
        &self,
        request: Request<Streaming<proto::Payload>>,
    ) -> Result<Response<Self::MeasureStream>, Status> {
        let slot = Slot::claim(&self.occupied)
            .ok_or_else(|| Status::resource_exhausted("another machine measures; try again"))?;
        let payloads = request.into_inner().timeout(SILENCE_LIMIT);
        let answers = payloads.map(move |payload| {
            // Free again when the stream is dropped.
            let _ = &slot;
            payload.unwrap_or_else(|_| Err(Status::deadline_exceeded("no payload came")))
        });
        Ok(Response::new(Box::pin(answers)))
    }
}

/// The measuring side of a stream.
struct Echoes {
    address: String,
    payloads: mpsc::Sender<proto::Payload>,
    answers: Streaming<proto::Payload>,
}

impl Echoes {
    async fn connect(address: &str, connector: Option<Connector>) -> Result<Echoes, LinkError> {
        let endpoint = connection::endpoint(address).map_err(|source| LinkError::Address {
            address: address.to_owned(),
            source,
        })?;
        let connect = |cause| LinkError::Connect {
            address: address.to_owned(),
            cause,
        };
        // The same as a ring's server, so that both directions are alike.
        let window = connection::window_bytes(MAX_PAYLOAD_BYTES + OVERHEAD_BYTES);
        let endpoint = endpoint
            .initial_stream_window_size(window)
            .initial_connection_window_size(window)
            .max_frame_size(connection::frame_bytes(MAX_PAYLOAD_BYTES + OVERHEAD_BYTES));
        let channel = match connector {
            Some(connector) => endpoint.connect_with_connector(connector).await,
            None => endpoint.connect().await,
        };
        let channel = channel.map_err(|error| connect(connection::root_cause(&error)))?;
        let (payloads, receiver) = mpsc::channel(1);
        let mut client =
            LinkClient::new(channel).max_decoding_message_size(MAX_PAYLOAD_BYTES + OVERHEAD_BYTES);
        let opening = client.measure(Request::new(ReceiverStream::new(receiver)));
        match tokio::time::timeout(connection::CONNECT_TIMEOUT, opening).await {
            Ok(Ok(answers)) => Ok(Echoes {
                address: address.to_owned(),
                payloads,
                answers: answers.into_inner(),
            }),
            Ok(Err(status)) => Err(LinkError::Refused {
                address: address.to_owned(),
                status,
            }),
            Err(_) => Err(connect(format!(
                "no answer within {} s",
                connection::CONNECT_TIMEOUT.as_secs()
            ))),
        }
    }

    /// Half the median of up to `samples` round trips; fewer if they take more than a second, but at least three.
    async fn half_round_trip(
        &mut self,
        payload: Bytes,
        warm_up: usize,
        samples: usize,
    ) -> Result<Duration, LinkError> {
        let begun = Instant::now();
        for _ in 0..warm_up {
            self.round_trip(&payload).await?;
            if begun.elapsed() > Duration::from_secs(1) {
                break;
            }
        }
        let begun = Instant::now();
        let mut times = Vec::with_capacity(samples);
        while times.len() < 3 || (times.len() < samples && begun.elapsed() < Duration::from_secs(1))
        {
            times.push(self.round_trip(&payload).await?);
        }
        times.sort_unstable();
        Ok((times[times.len() / 2] / 2).max(Duration::from_nanos(1)))
    }

    async fn round_trip(&mut self, payload: &Bytes) -> Result<Duration, LinkError> {
        let Self {
            address,
            payloads,
            answers,
        } = self;
        let lost = |cause| LinkError::Lost {
            address: address.clone(),
            cause,
        };
        let start = Instant::now();
        let sent = proto::Payload {
            data: payload.clone(),
        };
        // Sending waits, too, where the other side answers and takes nothing.
        let trip = async {
            match payloads.send(sent).await {
                Ok(()) => answers.message().await,
                Err(_) => Ok(None),
            }
        };
        let answer = match tokio::time::timeout(SILENCE_LIMIT, trip).await {
            Ok(Ok(Some(answer))) => answer,
            Ok(Ok(None)) => return Err(lost("it closed the stream".to_owned())),
            Ok(Err(status)) => return Err(lost(connection::root_cause(&status))),
            Err(_) => {
                return Err(lost(format!(
                    "no answer within {} s",
                    SILENCE_LIMIT.as_secs()
                )));
            }
        };
        let time = start.elapsed();
        if answer.data.len() != payload.len() {
            return Err(LinkError::Echo {
                address: address.clone(),
                expected: payload.len(),
                found: answer.data.len(),
            });
        }
        Ok(time)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use tokio::net::TcpSocket;

    use super::*;
    use crate::ring::Identity;

    const ANY_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

    #[test]
    fn the_way_to_this_machine_is_measured() {
        let server = EchoServer::start(ANY_PORT, None).unwrap();
        let measured = measure_link(&server.address().to_string(), None).unwrap();
        assert!(measured.latency > Duration::ZERO, "{measured:?}");
        // A payload takes no less than an empty message, so its rate is finite and not the latency's.
        assert!(
            (1e6..1e12).contains(&measured.bytes_per_second),
            "{measured:?}"
        );
    }

    #[test]
    fn an_address_where_nobody_listens_is_named() {
        // Nobody else is given its port while it is bound, and it does not listen.
        let silent = TcpSocket::new_v4().unwrap();
        silent.bind(ANY_PORT).unwrap();
        let address = silent.local_addr().unwrap().to_string();
        let error = measure_link(&address, None).unwrap_err();
        assert!(
            matches!(error, LinkError::Connect { .. }) && error.to_string().contains(&address),
            "{error}"
        );
        let error = measure_link("not an address", None).unwrap_err();
        assert!(matches!(error, LinkError::Address { .. }), "{error}");
    }

    #[test]
    fn over_tls_only_pinned_keys_measure_or_are_measured() {
        let [own, known, stranger] = [(); 3].map(|()| Identity::generate().unwrap().0);
        let pins = Pins::default();
        let keys = (tls::fixed(own.clone()), pins.clone());
        let server = EchoServer::start(ANY_PORT, Some(keys)).unwrap();
        let address = server.address().to_string();
        let measure = |who: &Identity, server: &Identity| {
            let connector = tls::connector(tls::fixed(who.clone()), server.fingerprint());
            measure_link(&address, Some(connector.unwrap()))
        };
        assert!(measure(&known, &own).is_err(), "nobody is pinned yet");
        pins.set([known.fingerprint()]);
        let measured = measure(&known, &own).unwrap();
        assert!(measured.bytes_per_second > 1e5, "{measured:?}");

        for refused in [
            measure(&stranger, &own),
            measure(&own, &own),
            measure(&known, &stranger),
            measure_link(&address, None),
        ] {
            let refused = refused.unwrap_err();
            assert!(!matches!(refused, LinkError::Lost { .. }), "{refused}");
            assert!(!refused.is_busy(), "{refused}");
        }
        // Nor does one with a key speak to a server without TLS.
        let plain = EchoServer::start(ANY_PORT, None).unwrap();
        let connector = tls::connector(tls::fixed(known.clone()), own.fingerprint()).unwrap();
        assert!(measure_link(&plain.address().to_string(), Some(connector)).is_err());
        pins.set([]);
        assert!(measure(&known, &own).is_err(), "it is not pinned any more");
    }

    #[tokio::test]
    async fn a_payload_that_nobody_takes_is_given_up() {
        let server = EchoServer::start(ANY_PORT, None).unwrap();
        let address = server.address().to_string();
        let mut echo = Echoes::connect(&address, None).await.unwrap();
        let (full, _unread) = mpsc::channel(1);
        full.try_send(proto::Payload::default()).unwrap();
        echo.payloads = full;
        let error = echo.round_trip(&Bytes::new()).await.unwrap_err();
        assert!(error.to_string().contains("no answer within"), "{error}");
    }

    #[tokio::test]
    async fn one_stream_at_a_time_and_no_payload_above_the_limit() {
        let server = EchoServer::start(ANY_PORT, None).unwrap();
        let address = server.address().to_string();
        let mut first = Echoes::connect(&address, None).await.unwrap();
        first.round_trip(&Bytes::from_static(b"x")).await.unwrap();
        let refused = Echoes::connect(&address, None).await.err().unwrap();
        assert!(matches!(refused, LinkError::Refused { .. }), "{refused}");
        assert!(refused.is_busy(), "{refused}");

        let large = Bytes::from(vec![0; MAX_PAYLOAD_BYTES + OVERHEAD_BYTES]);
        let error = first.round_trip(&large).await.unwrap_err();
        assert!(matches!(error, LinkError::Lost { .. }), "{error}");
        drop(first);
        // The slot is free again, as soon as the server has heard of the end.
        let deadline = Instant::now() + Duration::from_secs(300);
        while let Err(error) = Echoes::connect(&address, None).await {
            assert!(Instant::now() < deadline, "{error}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
