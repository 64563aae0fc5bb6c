//! Connections of HTTP clients: how many there are, and how long each may keep the server waiting. It answers nothing itself.
//!
//! There is room for one more, for a probe above all: if no place is free, the connection that has waited longest for its client, for
//! a request's head or body or for the next request, is closed. A client that waits for us is never cut off for another, unless limits say so: as
//! those of probes do, whose answers take no time.
//!
//! HTTP/1.1 only: in HTTP/2 one connection is many requests, and none of these limits would mean what it says.

#![forbid(unsafe_code)]

mod lasting_body;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::{Future, pending};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::ConnectInfo;
use axum::serve::Listener;
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore, watch};

pub use self::lasting_body::LastingBody;

/// How many connections there are, and what each may take.
#[derive(Clone, Debug)]
pub struct Limits {
    /// At a time. Where there are more, one is closed: that whose client has kept the server waiting longest, or, with `cut_off_waiting`, that came first.
    pub connections: usize,
    /// Time to send a request's head. A connection may be idle for as long between requests.
    pub head: Duration,
    /// Time in which a client must take in what was sent to it (Linux only).
    pub reading: Duration,
    /// Bytes that are read ahead of a connection, and so of a request's head; 8 KiB at least.
    pub read_ahead: usize,
    /// Whether a client may be cut off for another also while it waits for the server: then the one that came first is. For answers that take no
    /// time: without it, a client that never reads its answer would keep its place.
    pub cut_off_waiting: bool,
}

impl Limits {
    /// Of those who ask how a program is: kubelets, and Prometheus. Each asks for a moment, and strangers that reach the port take a megabyte at most.
    pub const PROBES: Self = Self {
        connections: 64,
        head: Duration::from_secs(10),
        reading: Duration::from_secs(30),
        read_ahead: 16 << 10,
        cut_off_waiting: true,
    };
}

/// Has `router` answer probes for as long as the process runs.
pub async fn serve_probes(listener: TcpListener, router: Router) {
    serve(listener, router, &Limits::PROBES, pending()).await;
}

/// Has `router` answer until `shutdown` completes, and then until the requests of that time are answered.
pub async fn serve(
    mut listener: TcpListener,
    router: Router,
    limits: &Limits,
    shutdown: impl Future<Output = ()>,
) {
    let places = Arc::new(Semaphore::new(limits.connections));
    let awaited = Arc::new(Awaited::default());
    let (end, _) = watch::channel(false);
    let mut shutdown = pin!(shutdown);
    loop {
        let arriving = async {
            let (stream, peer) = Listener::accept(&mut listener).await;
            if places.available_permits() == 0 {
                awaited.close_longest();
            }
            (stream, peer, places.clone().acquire_owned().await)
        };
        let (stream, peer, place) = tokio::select! {
            arrived = arriving => arrived,
            () = &mut shutdown => break,
        };
        set_up(&stream, limits);
        let client = Client::new(awaited.clone(), limits.cut_off_waiting);
        let router = router.clone();
        let connection = connection(stream, peer, router, limits, client, end.subscribe());
        tokio::spawn(async move {
            connection.await;
            drop(place);
        });
    }
    drop(listener);
    end.send_replace(true);
    let all = u32::try_from(limits.connections).unwrap_or(u32::MAX);
    // Never closed, so this only waits.
    let _ = places.acquire_many(all).await;
}

fn set_up(stream: &TcpStream, limits: &Limits) {
    // Tokens leave one by one in small packets; Nagle would hold them back.
    let set = stream.set_nodelay(true);
    let set = set.and_then(|()| set_timeouts(stream, limits.reading));
    if let Err(error) = set {
        tracing::debug!(%error, "options of a connection not set");
    }
}

/// Has the system end the connection when the client takes in nothing for so long: it is gone, or has stopped reading. And tokens that are lost on their
/// way are sent again soon, and again as soon, as between members.
#[cfg(target_os = "linux")]
fn set_timeouts(stream: &TcpStream, reading: Duration) -> io::Result<()> {
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_user_timeout(Some(reading))?;
    socket.set_tcp_thin_linear_timeouts(true)
}

#[cfg(not(target_os = "linux"))]
fn set_timeouts(_: &TcpStream, _: Duration) -> io::Result<()> {
    Ok(())
}

/// Runs one connection to its end.
fn connection(
    stream: TcpStream,
    peer: SocketAddr,
    router: Router,
    limits: &Limits,
    client: Arc<Client>,
    mut end: watch::Receiver<bool>,
) -> impl Future<Output = ()> + use<> {
    let router = TowerToHyperService::new(router);
    let close = client.close.clone();
    let answer = service_fn(move |request: hyper::Request<Incoming>| {
        let client = client.clone();
        let mut request = request.map(|body| Sending {
            body,
            client: client.clone(),
        });
        // Handlers are told who called. A layer of the router would do that, too, but copy all routes for each connection.
        request.extensions_mut().insert(ConnectInfo(peer));
        let answer = router.call(request);
        async move {
            let answer = answer.await?;
            let kept = Answered(client);
            Ok::<_, Infallible>(answer.map(|body| LastingBody::new(body, kept)))
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_buf_size(limits.read_ahead)
        .serve_connection(TokioIo::new(stream), answer);
    async move {
        let mut connection = pin!(connection);
        let mut ending = false;
        loop {
            tokio::select! {
                // What has come is answered before its connection is closed for another.
                biased;
                result = connection.as_mut() => {
                    if let Err(error) = result {
                        tracing::debug!(%error, "a connection broke off");
                    }
                    break;
                }
                () = close.notified() => break,
                _ = end.wait_for(|end| *end), if !ending => {
                    ending = true;
                    connection.as_mut().graceful_shutdown();
                }
            }
        }
    }
}

/// The connections that may be closed for another, as their clients have to send something, by since when.
#[derive(Default)]
struct Awaited(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    last: u64,
    connections: BTreeMap<u64, Arc<Notify>>,
}

impl Awaited {
    fn close_longest(&self) {
        if let Some((_, close)) = self.queue().connections.pop_first() {
            close.notify_one();
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The client of one connection: it has to send something, or waits for us.
struct Client {
    awaited: Arc<Awaited>,
    /// Its number in the queue, or 0.
    number: AtomicU64,
    close: Arc<Notify>,
    /// Stays in the queue also while it waits.
    cut_off_waiting: bool,
}

impl Client {
    fn new(awaited: Arc<Awaited>, cut_off_waiting: bool) -> Arc<Self> {
        let client = Self {
            awaited,
            number: AtomicU64::new(0),
            close: Arc::default(),
            cut_off_waiting,
        };
        client.has_to_send();
        Arc::new(client)
    }

    fn has_to_send(&self) {
        if self.number.load(Ordering::Relaxed) == 0 {
            let mut queue = self.awaited.queue();
            queue.last += 1;
            let number = queue.last;
            queue.connections.insert(number, self.close.clone());
            self.number.store(number, Ordering::Relaxed);
        }
    }

    fn waits(&self) {
        if !self.cut_off_waiting {
            self.leave();
        }
    }

    fn leave(&self) {
        let number = self.number.swap(0, Ordering::Relaxed);
        if number != 0 {
            self.awaited.queue().connections.remove(&number);
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.leave();
    }
}

/// A request's body: whenever more of it is asked for than there is, the client has to send.
struct Sending {
    body: Incoming,
    client: Arc<Client>,
}

impl HttpBody for Sending {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        match frame.is_pending() {
            true => self.client.has_to_send(),
            false => self.client.waits(),
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.client.waits();
    }
}

/// When its answer is over, the client has to send its next request.
struct Answered(Arc<Client>);

impl Drop for Answered {
    fn drop(&mut self) {
        self.0.has_to_send();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::SocketAddr;

    use axum::body::Body;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::time::timeout;

    use super::*;

    const PROBE: &str = "GET /healthz HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    /// Of a request's head.
    const HALF: &str = "GET /healthz HTTP/1.1\r\nhost: ";

    async fn serving(limits: Limits) -> SocketAddr {
        serving_also(limits, Router::new()).await
    }

    /// Beside /healthz what `router` has.
    async fn serving_also(limits: Limits, router: Router) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = router.route("/healthz", get(|| async { "ok" }));
        tokio::spawn(async move { serve(listener, router, &limits, pending()).await });
        address
    }

    /// Without a pause in which the server could run: when it sees the connection, what was sent is there, however slow the test is.
    fn connect(server: SocketAddr, sent: &str) -> TcpStream {
        let mut stream = std::net::TcpStream::connect(server).unwrap();
        stream.write_all(sent.as_bytes()).unwrap();
        stream.set_nonblocking(true).unwrap();
        TcpStream::from_std(stream).unwrap()
    }

    /// What still comes until the server ends the connection.
    async fn rest(mut stream: TcpStream) -> String {
        let mut rest = Vec::new();
        let reading = timeout(Duration::from_secs(60), stream.read_to_end(&mut rest));
        // A server that does not read what it was sent ends with a reset.
        let _ = reading.await.expect("an end");
        String::from_utf8(rest).unwrap()
    }

    #[tokio::test]
    async fn a_head_that_never_ends_is_not_waited_for() {
        let limits = Limits {
            head: Duration::from_millis(100),
            ..Limits::PROBES
        };
        let server = serving(limits).await;
        for sent in ["", HALF] {
            assert_eq!(rest(connect(server, sent)).await, "");
        }
        // So is the next request of a connection that is idle.
        let idle = connect(server, "GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n");
        assert!(rest(idle).await.ends_with("ok"));
    }

    #[tokio::test]
    async fn a_head_has_so_many_bytes_at_most() {
        let server = serving(Limits::PROBES).await;
        let (begin, end) = PROBE.split_at(PROBE.len() - 2);
        let long = |bytes| [begin, "x: ", &"x".repeat(bytes), "\r\n", end].concat();
        let answer = rest(connect(server, &long(12 << 10))).await;
        assert!(answer.ends_with("ok"), "{answer}");

        let mut stream = TcpStream::connect(server).await.unwrap();
        // Cut off in the midst of it.
        let _ = stream.write_all(long(400 << 10).as_bytes()).await;
        let answer = rest(stream).await;
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 431 "),
            "{answer}"
        );
    }

    #[tokio::test]
    async fn strangers_that_hold_all_places_keep_no_probe_out() {
        let limits = Limits {
            // Only who comes next ends their connections.
            head: Duration::from_secs(3600),
            ..Limits::PROBES
        };
        let server = serving(limits).await;
        let places = 0..Limits::PROBES.connections;
        let mut strangers: Vec<_> = places.map(|_| connect(server, HALF)).collect();
        for _ in 0..3 {
            let answer = rest(connect(server, PROBE)).await;
            assert!(answer.ends_with("ok"), "{answer}");
        }
        // Who came first had to go, and who came last is still there.
        assert_eq!(rest(strangers.remove(0)).await, "");
        let mut last = strangers.pop().unwrap();
        let other_half = "a\r\nconnection: close\r\n\r\n";
        last.write_all(other_half.as_bytes()).await.unwrap();
        let answer = rest(last).await;
        assert!(answer.ends_with("ok"), "{answer}");
    }

    /// An answer of many frames: the server has more of it for as long as the client reads.
    struct Endless;

    impl HttpBody for Endless {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[b'x'; 16 << 10])))))
        }
    }

    /// For an answer that never comes, or of which they read nothing.
    #[tokio::test]
    async fn strangers_that_wait_keep_no_probe_out() {
        const STRANGERS: usize = 4;
        let limits = Limits {
            connections: STRANGERS,
            // Nothing but the probe ends their connections.
            head: Duration::from_secs(3600),
            reading: Duration::from_secs(3600),
            ..Limits::PROBES
        };
        for path in ["/never", "/endless"] {
            let (tell, mut asked) = watch::channel(0_usize);
            let told = tell.clone();
            let never = move || {
                told.send_modify(|asked| *asked += 1);
                pending::<&'static str>()
            };
            let read_by_nobody = move || {
                tell.send_modify(|asked| *asked += 1);
                async { Body::new(Endless) }
            };
            let router = Router::new()
                .route("/never", get(never))
                .route("/endless", get(read_by_nobody));
            let server = serving_also(limits.clone(), router).await;
            let request = format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n");
            let _strangers = [(); STRANGERS].map(|()| connect(server, &request));
            let all_ask = asked.wait_for(|asked| *asked == STRANGERS);
            let all_ask = timeout(Duration::from_secs(60), all_ask).await;
            drop(all_ask.expect("all in time").expect("a server"));
            let answer = rest(connect(server, PROBE)).await;
            assert!(answer.ends_with("ok"), "{path}: {answer}");
        }
    }
}
