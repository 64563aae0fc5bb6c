//! Asks rank 0 how it is: one GET of /health on loopback, in HTTP/1.0 so that the answer simply ends with the
//! connection. Not a client for anything else, and nothing here retries.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

#[derive(Debug, PartialEq, Eq)]
pub enum Health {
    /// A token went round.
    Ready,
    /// It listens, but cannot serve yet; what it says about that.
    Loading(String),
    /// Nothing that could be understood.
    NoAnswer,
}

const DEADLINE: Duration = Duration::from_secs(2);
/// A health answer is a line; whoever sends more is not rank 0.
const MAX_ANSWER: u64 = 64 * 1024;

pub async fn get(address: SocketAddr) -> Health {
    match timeout(DEADLINE, exchange(address)).await {
        Ok(Ok(answer)) => read_answer(&answer),
        Ok(Err(_)) | Err(_) => Health::NoAnswer,
    }
}

async fn exchange(address: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream
        .write_all(format!("GET /health HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes())
        .await?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

fn read_answer(answer: &str) -> Health {
    let Some((head, body)) = answer.split_once("\r\n\r\n") else {
        return Health::NoAnswer;
    };
    match head.split_whitespace().nth(1) {
        Some("200") => Health::Ready,
        Some("503") => {
            let message = serde_json::from_str::<serde_json::Value>(body)
                .ok()
                .and_then(|body| body.pointer("/error/message")?.as_str().map(str::to_owned));
            message.map_or(Health::NoAnswer, Health::Loading)
        }
        _ => Health::NoAnswer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn understands_what_rank_0_answers() {
        assert_eq!(
            read_answer("HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}"),
            Health::Ready
        );
        let loading =
            r#"{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}"#;
        assert_eq!(
            read_answer(&format!(
                "HTTP/1.0 503 Service Unavailable\r\n\r\n{loading}"
            )),
            Health::Loading("Loading model".into())
        );
        assert_eq!(read_answer("SSH-2.0-OpenSSH_9.2"), Health::NoAnswer);
        assert_eq!(
            read_answer("HTTP/1.0 404 Not Found\r\n\r\n"),
            Health::NoAnswer
        );
    }

    #[tokio::test]
    async fn a_closed_port_is_no_answer() {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = closed.local_addr().unwrap();
        drop(closed);
        assert_eq!(get(address).await, Health::NoAnswer);
    }
}
