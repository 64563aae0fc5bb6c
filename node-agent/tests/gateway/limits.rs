//! What clients may take before anything is computed for them. Limits are as short as waiting for them is bearable: no test asks how long
//! something took, only what it led to.

use std::io::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use prima_node_agent::gateway::{GatewayOptions, Limits};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::client::{Reply, get, post, post_bytes};
use crate::server::{Accepted, CONTEXT, Server, options, soon, text};

const COMPLETIONS: &str = "/v1/completions";
const SHORT: Duration = Duration::from_millis(300);

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
    // A server that does not read what it was sent ends with a reset.
    let _ = soon(stream.read_to_end(&mut rest)).await;
    String::from_utf8(rest).unwrap()
}

fn head(length: usize) -> String {
    format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
}

fn prompt(bytes: usize) -> Value {
    json!({"prompt": "x".repeat(bytes)})
}

#[tokio::test]
async fn a_head_that_never_ends_is_not_waited_for() {
    let server = Server::limited(Limits {
        head: SHORT,
        ..Limits::default()
    })
    .await;
    for sent in ["", "GET /livez HTTP/1.1\r\nhost: loc"] {
        assert_eq!(rest(connect(server.address, sent)).await, "");
    }
    // So is the next request of a connection that is idle.
    let idle = connect(
        server.address,
        "GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n",
    );
    assert!(rest(idle).await.ends_with("ok"));
}

#[tokio::test]
async fn a_body_that_never_ends_is_not_waited_for() {
    let mut server = Server::limited(Limits {
        body: SHORT,
        ..Limits::default()
    })
    .await;
    let stream = connect(server.address, &(head(20) + "{\"prompt\""));
    let answer = rest(stream).await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert!(answer.contains("body_timeout"), "{answer}");
    assert!(server.nothing_submitted());
}

#[tokio::test]
async fn a_body_that_is_announced_too_large_is_not_read() {
    let server = Server::start().await;
    let answer = rest(connect(server.address, &head((4 << 20) + 1))).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(answer.contains("body_too_large"), "{answer}");
}

/// Else a client would send its next request on a connection that ends.
#[tokio::test]
async fn who_is_refused_before_the_body_is_told_of_the_end() {
    let keyed = GatewayOptions {
        api_keys: vec!["a-key".into()],
        ..options()
    };
    let server = Server::start_with(keyed, Some(text(None))).await;
    let stream = connect(
        server.address,
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n",
    );
    let answer = rest(stream).await.to_lowercase();
    assert!(answer.starts_with("http/1.1 401 "), "{answer}");
    assert!(answer.contains("connection: close"), "{answer}");
}

#[tokio::test]
async fn heads_are_bounded() {
    let server = Server::start().await;
    let endless = format!("GET / HTTP/1.1\r\nhost: {}", "x".repeat(1 << 20));
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    // Cut off in the midst of it.
    let _ = stream.write_all(endless.as_bytes()).await;
    let answer = rest(stream).await;
    assert!(
        answer.is_empty() || answer.starts_with("HTTP/1.1 431 "),
        "{answer}"
    );
}

/// Of what the server has sent, a reader may leave as much as fits into a few buffers.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_reader_that_stops_reading_is_let_go() {
    let mut server = Server::limited(Limits {
        reading: SHORT,
        ..Limits::default()
    })
    .await;
    let body = json!({"prompt": "a", "stream": true}).to_string();
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(server.address).await.unwrap();
    let request = head(body.len()) + &body;
    stream.write_all(request.as_bytes()).await.unwrap();
    let accepted = server.accept().await;
    accepted.flood(&"x".repeat(1024)).await;
    drop(stream);
}

#[tokio::test]
async fn with_all_connections_taken_probes_are_answered() {
    let limits = Limits {
        connections: 4,
        ..Limits::default()
    };
    let mut server = Server::limited(limits).await;
    // One waits for an answer, one sends a body, and the others nothing.
    let (stream, answering) = streaming(&mut server).await;
    let body = connect(server.address, &head(100));
    let mut silent = Vec::new();
    for _ in 0..8 {
        silent.push(connect(server.address, ""));
        assert_eq!(soon(get("/livez").send(server.address)).await.status, 200);
    }
    // Those that had been silent for longest had to go, and never the one that is being answered.
    assert_eq!(rest(body).await, "");
    assert_eq!(rest(silent.remove(0)).await, "");
    answering.token(0, "still here").await;
    drop(answering);
    assert!(rest(stream).await.contains("still here"));
}

#[tokio::test]
async fn more_requests_than_allowed_are_asked_to_come_again() {
    let limits = Limits {
        requests: 1,
        ..Limits::default()
    };
    let mut server = Server::limited(limits).await;
    let address = server.address;
    let (stream, answering) = streaming(&mut server).await;
    let reply = soon(post(COMPLETIONS, &prompt(1)).send(address)).await;
    assert_busy(reply).await;
    assert_eq!(get("/health").send(address).await.status, 200);
    drop(stream);
    answering.cancelled().await;
    // A moment later its place is free.
    loop {
        tokio::select! {
            _ = server.accept() => break,
            reply = post(COMPLETIONS, &prompt(1)).send(address) => assert_busy(reply).await,
        }
    }
}

#[tokio::test]
async fn large_bodies_share_their_memory() {
    let limits = Limits {
        body_bytes: 1 << 20,
        waiting: SHORT,
        ..Limits::default()
    };
    let mut server = Server::limited(limits).await;
    let address = server.address;
    let sent = |bytes| post(COMPLETIONS, &prompt(bytes)).send(address);
    // One that is only announced takes nothing, and one that has begun takes all.
    let mut large = connect(address, &head(1 << 20));
    assert_too_long(sent(100 << 10).await).await;
    large.write_all(&[b' '; 100 << 10]).await.unwrap();
    let busy = async {
        loop {
            let reply = sent(100 << 10).await;
            if reply.status == 429 {
                break reply;
            }
        }
    };
    assert_busy(soon(busy).await).await;
    // A usual request needs none of it.
    assert_too_long(sent(60_000).await).await;
    drop(large);
    let free = async {
        loop {
            let reply = sent(100 << 10).await;
            if reply.status != 429 {
                break reply;
            }
        }
    };
    assert_too_long(soon(free).await).await;
    assert!(server.nothing_submitted());
}

#[tokio::test]
async fn a_prompt_longer_than_the_context_is_not_submitted() {
    let mut server = Server::start().await;
    let chat = |content: String| json!({"messages": [{"role": "user", "content": content}]});
    let long = "x".repeat(3 << 20);
    let special = "<s>".repeat(1 << 20);
    for text in [long, special, "x ".repeat(CONTEXT)] {
        let reply = post(COMPLETIONS, &json!({"prompt": text}))
            .send(server.address)
            .await;
        assert_too_long(reply).await;
        let reply = post("/v1/chat/completions", &chat(text))
            .send(server.address)
            .await;
        assert_too_long(reply).await;
    }
    assert!(server.nothing_submitted());
    // One that just fits: the beginning-of-sequence token is the last.
    let fits = tokio::spawn(post(COMPLETIONS, &prompt(CONTEXT - 1)).send(server.address));
    assert_eq!(server.accept().await.request.prompt.len(), CONTEXT);
    fits.abort();
    let reply = post(COMPLETIONS, &prompt(CONTEXT))
        .send(server.address)
        .await;
    assert_too_long(reply).await;
}

#[tokio::test]
async fn bodies_of_countless_values_are_refused() {
    let mut server = Server::start().await;
    for unit in ["0,", "[],", "{\"a\":0},", "\"\","] {
        let many = unit.repeat((3 << 20) / unit.len());
        let body = format!("{{\"prompt\": [{many}0]}}");
        let json = post_bytes(COMPLETIONS, body).header("content-type", "application/json");
        let reply = soon(json.send(server.address)).await;
        assert_eq!(reply.status, 413, "{unit}");
        let answer = reply.text().await;
        assert!(answer.contains("JSON values"), "{answer}");
    }
    assert!(server.nothing_submitted());
}

async fn assert_busy(reply: Reply) {
    assert_eq!(
        (reply.status, reply.header("retry-after")),
        (429, Some("5"))
    );
    let error = &reply.json().await["error"];
    assert_eq!(
        (&error["type"], &error["code"]),
        (&json!("rate_limit_error"), &json!("rate_limit_exceeded"))
    );
}

async fn assert_too_long(reply: Reply) {
    assert_eq!(reply.status, 400);
    assert_eq!(
        reply.json().await["error"]["code"],
        "context_length_exceeded"
    );
}

/// A client that is being answered.
async fn streaming(server: &mut Server) -> (TcpStream, Accepted) {
    let body = json!({"prompt": "a", "stream": true}).to_string();
    let stream = connect(server.address, &(head(body.len()) + &body));
    (stream, server.accept().await)
}
