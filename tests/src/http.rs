//! The least HTTP client that the suites can do with: one request per connection, in HTTP/1.0 so that an answer ends
//! with the connection. Blocking, and every read has a deadline, so that no test hangs. It follows no redirects, and
//! retries and reuses nothing; what real clients do is for the suites with OpenAI's client.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::net::TcpSocket;
use tokio::runtime::Builder;

use crate::PATIENCE;

/// How long a test waits for a whole answer, or for the next event of a stream, so that only what hangs gets there.
pub const READ_DEADLINE: Duration = PATIENCE;

#[derive(Debug)]
pub struct Response {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Response {
    /// The body as JSON; panics with the body if it is none.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| {
            panic!(
                "expected JSON ({error}), got {}: {}",
                self.status, self.body
            )
        })
    }
}

pub fn get(address: SocketAddr, path: &str) -> io::Result<Response> {
    get_with(address, path, "")
}

/// Gets with an API key.
pub fn get_with_key(address: SocketAddr, path: &str, key: &str) -> io::Result<Response> {
    get_with(address, path, &bearer(key))
}

/// Gets what has several forms in one of them.
pub fn get_as(address: SocketAddr, path: &str, media_type: &str) -> io::Result<Response> {
    get_with(address, path, &format!("Accept: {media_type}\r\n"))
}

fn get_with(address: SocketAddr, path: &str, headers: &str) -> io::Result<Response> {
    let mut stream = connect(address)?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n{headers}\r\n");
    send_whole(&mut stream, &request)?;
    read_response(BufReader::new(stream))
}

/// Gets over a connection to `address` that was made already, with an API key.
pub(crate) fn get_over(
    mut stream: impl Read + Write,
    address: SocketAddr,
    path: &str,
    key: &str,
) -> io::Result<Response> {
    let key = bearer(key);
    let request = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n{key}\r\n");
    stream.write_all(request.as_bytes())?;
    stream.flush()?;
    read_response(BufReader::new(stream))
}

/// A metric of a ring, over all its members together.
pub fn metric(address: SocketAddr, name: &str) -> io::Result<f64> {
    Ok(metrics(address, name)?.iter().sum())
}

/// A metric of each member of a ring; of at least one.
pub fn metrics(address: SocketAddr, name: &str) -> io::Result<Vec<f64>> {
    let metrics = get(address, "/metrics")?;
    let of_member = |line: &str| {
        line.strip_prefix(name)?
            .starts_with(['{', ' '])
            .then(|| line.to_owned())
    };
    let values: Vec<f64> = metrics
        .body
        .lines()
        .filter_map(of_member)
        .filter_map(|line| line.rsplit_once(' ')?.1.parse().ok())
        .collect();
    match values.is_empty() {
        true => Err(io::Error::other(format!("no {name} in /metrics"))),
        false => Ok(values),
    }
}

pub fn post(address: SocketAddr, path: &str, body: &Value) -> io::Result<Response> {
    read_response(BufReader::new(send(address, path, "", body)?))
}

/// Posts a request whose answer may take `patience`, because others come before it.
pub fn post_within(
    patience: Duration,
    address: SocketAddr,
    path: &str,
    body: &Value,
) -> io::Result<Response> {
    let stream = send(address, path, "", body)?;
    stream.set_read_timeout(Some(patience))?;
    read_response(BufReader::new(stream))
}

/// Posts with an API key.
pub fn post_with_key(
    address: SocketAddr,
    path: &str,
    key: &str,
    body: &Value,
) -> io::Result<Response> {
    read_response(BufReader::new(send(address, path, &bearer(key), body)?))
}

/// Posts as a client does whose address is `source`, one of this machine's.
pub fn post_from(
    source: Ipv4Addr,
    address: SocketAddr,
    path: &str,
    body: &Value,
) -> io::Result<Response> {
    let runtime = Builder::new_current_thread().enable_io().build()?;
    let stream = runtime.block_on(async {
        let socket = TcpSocket::new_v4()?;
        socket.bind((source, 0).into())?;
        socket.connect(address).await?.into_std()
    })?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(READ_DEADLINE))?;
    read_response(BufReader::new(send_over(stream, address, path, "", body)?))
}

/// Posts as a part of a trace, which `traceparent` names.
pub fn post_traced(
    address: SocketAddr,
    path: &str,
    traceparent: &str,
    body: &Value,
) -> io::Result<Response> {
    let header = format!("traceparent: {traceparent}\r\n");
    read_response(BufReader::new(send(address, path, &header, body)?))
}

/// Posts and returns the answer's server-sent events as they come.
pub fn post_streaming(address: SocketAddr, path: &str, body: &Value) -> io::Result<EventStream> {
    read_events(BufReader::new(send(address, path, "", body)?))
}

/// As [`post_streaming`], from a server that may take `patience` to begin its answer, or for its next event.
pub fn post_streaming_within(
    patience: Duration,
    address: SocketAddr,
    path: &str,
    body: &Value,
) -> io::Result<EventStream> {
    events_within(patience, send(address, path, "", body)?)
}

/// As [`post_streaming`], as a client does that gives up: after `limit` if there is no connection or no answer begins, and then after as long
/// without an event. Errors say how far it came.
pub fn post_streaming_or_give_up(
    limit: Duration,
    address: SocketAddr,
    path: &str,
    body: &Value,
) -> io::Result<EventStream> {
    let at = |phase: &'static str| {
        move |error: io::Error| io::Error::new(error.kind(), format!("{phase}: {error}"))
    };
    let begun = Instant::now();
    let stream = TcpStream::connect_timeout(&address, limit).map_err(at("no connection"))?;
    let events = || -> io::Result<EventStream> {
        // A socket takes no time-out of nothing.
        let rest = limit.saturating_sub(begun.elapsed());
        let rest = rest.max(Duration::from_millis(1));
        stream.set_write_timeout(Some(rest))?;
        let mut events = events_within(rest, send_over(stream, address, path, "", body)?)?;
        events.reader.get_ref().set_read_timeout(Some(limit))?;
        events.patience = limit;
        Ok(events)
    };
    events().map_err(at("no answer begins"))
}

fn events_within(patience: Duration, stream: TcpStream) -> io::Result<EventStream> {
    stream.set_read_timeout(Some(patience))?;
    let mut events = read_events(BufReader::new(stream))?;
    events.patience = patience;
    Ok(events)
}

/// As [`post_streaming`], with an API key.
pub fn post_streaming_with_key(
    address: SocketAddr,
    path: &str,
    key: &str,
    body: &Value,
) -> io::Result<EventStream> {
    read_events(BufReader::new(send(address, path, &bearer(key), body)?))
}

fn read_events(mut reader: BufReader<TcpStream>) -> io::Result<EventStream> {
    let (status, headers) = read_head(&mut reader)?;
    Ok(EventStream {
        status,
        headers,
        patience: READ_DEADLINE,
        reader,
    })
}

/// The `data:` lines of an answer, one by one; ends where the server ends it, `Err` where the connection breaks.
pub struct EventStream {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    /// For the next event.
    patience: Duration,
    reader: BufReader<TcpStream>,
}

impl EventStream {
    /// What came instead of events.
    pub fn body(mut self) -> io::Result<String> {
        let mut body = String::new();
        self.reader.read_to_string(&mut body)?;
        Ok(body)
    }

    /// The message of the error event with which the stream ends; panics with its last event if that is none.
    pub fn error_at_end(self) -> String {
        let rest: Vec<String> = self.map(|event| event.expect("an orderly end")).collect();
        let last = rest.last().expect("a last event");
        let error: Value =
            serde_json::from_str(last).unwrap_or_else(|_| panic!("expected JSON: {last}"));
        let message = error.pointer("/error/message").and_then(Value::as_str);
        message
            .unwrap_or_else(|| panic!("expected an error event, found {last}"))
            .to_owned()
    }
}

impl Iterator for EventStream {
    type Item = io::Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        // A server that keeps the connection alive with comments but says nothing must not keep the test waiting.
        let deadline = Instant::now() + self.patience;
        while Instant::now() < deadline {
            let mut line = String::new();
            match self.reader.read_line(&mut line) {
                Ok(0) => return None,
                Ok(_) => {
                    if let Some(data) = line.trim_end().strip_prefix("data: ") {
                        return Some(Ok(data.to_owned()));
                    }
                }
                Err(error) => return Some(Err(error)),
            }
        }
        Some(Err(io::Error::from(io::ErrorKind::TimedOut)))
    }
}

pub(crate) fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, READ_DEADLINE)?;
    stream.set_read_timeout(Some(READ_DEADLINE))?;
    stream.set_write_timeout(Some(READ_DEADLINE))?;
    Ok(stream)
}

fn send(address: SocketAddr, path: &str, headers: &str, body: &Value) -> io::Result<TcpStream> {
    send_over(connect(address)?, address, path, headers, body)
}

fn send_over(
    mut stream: TcpStream,
    address: SocketAddr,
    path: &str,
    headers: &str,
    body: &Value,
) -> io::Result<TcpStream> {
    let body = body.to_string();
    let length = body.len();
    let request = format!(
        "POST {path} HTTP/1.0\r\nHost: {address}\r\nContent-Type: application/json\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
    );
    send_whole(&mut stream, &request)?;
    Ok(stream)
}

/// At once: of a request in parts, all but the first would wait until that has arrived, and so would the rest of a large one.
fn send_whole(stream: &mut TcpStream, request: &str) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.write_all(request.as_bytes())
}

fn bearer(key: &str) -> String {
    format!("Authorization: Bearer {key}\r\n")
}

fn read_response(mut reader: impl BufRead) -> io::Result<Response> {
    let (status, headers) = read_head(&mut reader)?;
    let mut body = String::new();
    reader.read_to_string(&mut body)?;
    Ok(Response {
        status,
        headers,
        body,
    })
}

fn read_head(reader: &mut impl BufRead) -> io::Result<(u16, Vec<(String, String)>)> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let status = line
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok())
        .ok_or_else(|| io::Error::other(format!("not a status line: {line:?}")))?;
    let mut headers = Vec::new();
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        let header = line.trim_end();
        if header.is_empty() {
            return Ok((status, headers));
        }
        // A value may be empty.
        let (name, value) = header
            .split_once(':')
            .ok_or_else(|| io::Error::other(format!("not a header: {header:?}")))?;
        headers.push((name.to_ascii_lowercase(), value.trim_start().to_owned()));
    }
}
