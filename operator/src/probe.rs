//! `prima probe`: asks addresses by HTTP and fails unless each answers 200, for `helm test` in an image that has no other
//! program. HTTP/1.0, so that an answer simply ends with the connection; no TLS, no redirects. Where nobody answers, it asks again for
//! a while: networks that enforce policies know a new pod only a moment after it has begun.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct ProbeArgs {
    /// Asked for in this order
    #[arg(required = true, value_name = "http://HOST[:PORT]/PATH")]
    urls: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error("{url}: expected http://HOST[:PORT]/PATH")]
    Url { url: String },
    #[error("{url} does not answer")]
    Connection {
        url: String,
        #[source]
        source: io::Error,
    },
    #[error("{url} answers, but not with 200:\n{answer}")]
    Status { url: String, answer: String },
}

const DEADLINE: Duration = Duration::from_secs(10);
/// How long it asks again, and how often.
const PATIENCE: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_millis(500);
/// Longer answers are cut off.
const MAX_ANSWER: u64 = 64 * 1024;

/// Returns what was answered, one line for each address.
pub fn run(args: &ProbeArgs) -> Result<String, ProbeError> {
    let mut lines = String::new();
    for url in &args.urls {
        let (host, path) = parts(url).ok_or_else(|| ProbeError::Url { url: url.clone() })?;
        let answer = patient_exchange(&host, path).map_err(|source| ProbeError::Connection {
            url: url.clone(),
            source,
        })?;
        if answer.split_whitespace().nth(1) != Some("200") {
            let url = url.clone();
            return Err(ProbeError::Status { url, answer });
        }
        let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        lines.push_str(&format!("{url}: {}\n", body.trim_end()));
    }
    Ok(lines)
}

/// `host:port` and the path.
fn parts(url: &str) -> Option<(String, &str)> {
    let rest = url.strip_prefix("http://")?;
    let (host, path) = rest.split_at(rest.find('/')?);
    if host.is_empty() {
        return None;
    }
    let port = if host.contains(':') { "" } else { ":80" };
    Some((format!("{host}{port}"), path))
}

fn patient_exchange(host: &str, path: &str) -> io::Result<String> {
    let begun = Instant::now();
    loop {
        match exchange(host, path) {
            Err(_) if begun.elapsed() < PATIENCE => thread::sleep(PAUSE),
            ended => return ended,
        }
    }
}

fn exchange(host: &str, path: &str) -> io::Result<String> {
    let address = host
        .to_socket_addrs()?
        .next()
        .ok_or(io::ErrorKind::AddrNotAvailable)?;
    let mut stream = TcpStream::connect_timeout(&address, DEADLINE)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    // In one piece: a server may answer and hang up after the first one.
    let request = format!("GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use tokio::net::TcpSocket;

    use super::*;

    #[test]
    fn reads_addresses() {
        assert_eq!(parts("http://a/"), Some(("a:80".into(), "/")));
        assert_eq!(
            parts("http://a.b:8080/v1/models"),
            Some(("a.b:8080".into(), "/v1/models"))
        );
        for other in ["https://a/", "a:80/", "http://a", "http:///"] {
            assert_eq!(parts(other), None, "{other}");
        }
    }

    #[test]
    fn tells_what_was_answered_and_fails_on_everything_but_200() {
        let url = serve_once("HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nok\n");
        let args = ProbeArgs {
            urls: vec![url.clone()],
        };
        assert_eq!(run(&args).unwrap(), format!("{url}: ok\n"));

        let args = ProbeArgs {
            urls: vec![serve_once(
                "HTTP/1.0 503 Service Unavailable\r\n\r\nLoading model",
            )],
        };
        let error = run(&args).unwrap_err();
        assert!(error.to_string().contains("Loading model"), "{error}");
    }

    #[tokio::test]
    async fn waits_for_one_that_does_not_answer_yet() {
        // Nobody else is given its port while it is bound, and it does not listen yet.
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let url = format!("http://{}/healthz", socket.local_addr().unwrap());
        let args = ProbeArgs {
            urls: vec![url.clone()],
        };
        thread::scope(|scope| {
            let told = scope.spawn(|| run(&args));
            thread::sleep(Duration::from_millis(700));
            let listener = socket.listen(1).unwrap().into_std().unwrap();
            listener.set_nonblocking(false).unwrap();
            answer_once(listener, "HTTP/1.0 200 OK\r\n\r\nok\n");
            assert_eq!(told.join().unwrap().unwrap(), format!("{url}: ok\n"));
        });
    }

    fn serve_once(answer: &'static str) -> String {
        answer_once(TcpListener::bind("127.0.0.1:0").unwrap(), answer)
    }

    fn answer_once(listener: TcpListener, answer: &'static str) -> String {
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            // Closing with unread bytes would reset the connection, and the answer would be lost.
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.extend(byte);
            }
            assert!(request.starts_with(b"GET /healthz HTTP/1.0\r\n"));
            stream.write_all(answer.as_bytes()).unwrap();
        });
        format!("http://{address}/healthz")
    }
}
