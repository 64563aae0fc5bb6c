//! Asks rank 0 how the ring is: one GET of /health, in HTTP/1.0 so that the answer simply ends with the connection. Nothing
//! here retries.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use prima_crds::v1alpha1::ring_plan::Speed;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// What rank 0 says of the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// A token went round the ring.
    Ready {
        /// How fast answers come, if rank 0 says so.
        speed: Option<Speed>,
        /// As in [`MemberStatus`](prima_crds::v1alpha1::ring_plan::MemberStatus).
        expert_miss_percent: Option<i32>,
    },
    /// Not yet ready, or no longer.
    NotReady {
        /// In its words.
        why: String,
        /// The member at which the ring fails, if rank 0 knows.
        fails_at: Option<String>,
        /// As in [`MemberStatus`](prima_crds::v1alpha1::ring_plan::MemberStatus).
        missed_by: Option<String>,
    },
    /// Nothing that could be understood; what came instead.
    NoAnswer(String),
}

/// Whoever is sent to a rank 0 that hangs gets no answer, so that is to be known soon.
pub const HEALTH_DEADLINE: Duration = Duration::from_secs(3);
/// A health answer is a line; whoever sends more than this is not rank 0.
const MAX_ANSWER: u64 = 64 << 10;

/// `address`: where rank 0 serves HTTP.
pub async fn health(address: SocketAddr) -> Health {
    health_within(HEALTH_DEADLINE, address).await
}

/// The same, for those who wait so long.
pub async fn health_within(deadline: Duration, address: SocketAddr) -> Health {
    let problem = match timeout(deadline, exchange(address)).await {
        Ok(Ok(answer)) => return read_answer(&answer),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", deadline.as_secs_f64()),
    };
    Health::NoAnswer(format!("its HTTP endpoint at {address}: {problem}"))
}

/// How many requests rank 0 has at `address`, running or waiting; `None` if the ring is not ready or does not say.
pub async fn requests(address: SocketAddr) -> Option<u64> {
    let answer = timeout(HEALTH_DEADLINE, exchange(address))
        .await
        .ok()?
        .ok()?;
    let (status, body) = parts(&answer);
    body.get("requests")?
        .as_u64()
        .filter(|_| status == Some("200"))
}

async fn exchange(address: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream
        .write_all(format!("GET /health HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes())
        .await?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Status and body.
fn parts(answer: &str) -> (Option<&str>, Value) {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
    let body = serde_json::from_str(body).unwrap_or_default();
    (head.split_whitespace().nth(1), body)
}

fn read_answer(answer: &str) -> Health {
    let (status, body) = parts(answer);
    if status == Some("200") {
        let time = |name: &str| body.get(name)?.as_i64();
        let speed = time("tokenMicroseconds").zip(time("firstTokenMicroseconds"));
        let percent = body.get("expertMissPercent").and_then(Value::as_i64);
        return Health::Ready {
            speed: speed.map(|(token_microseconds, first_token_microseconds)| Speed {
                token_microseconds,
                first_token_microseconds,
            }),
            expert_miss_percent: percent.map(|percent| percent.clamp(1, 100) as i32),
        };
    }
    let member = |field: &str| Some(body.get(field)?.as_str()?.to_owned());
    match body.pointer("/error/message").and_then(Value::as_str) {
        Some(message) => Health::NotReady {
            why: message.to_owned(),
            fails_at: member("failsAt"),
            missed_by: member("missedBy"),
        },
        None => Health::NoAnswer(format!(
            "its HTTP endpoint answered {}",
            status.unwrap_or("nothing")
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn understands_what_rank_0_answers() {
        let ready = "HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{\"status\":\"ok\"}";
        let silent = Health::Ready {
            speed: None,
            expert_miss_percent: None,
        };
        assert_eq!(read_answer(ready), silent);
        let measured = "HTTP/1.0 200 OK\r\n\r\n{\"status\":\"ok\",\"firstTokenMicroseconds\":9,\"tokenMicroseconds\":2,\"expertMissPercent\":61}";
        let talkative = Health::Ready {
            speed: Some(Speed {
                token_microseconds: 2,
                first_token_microseconds: 9,
            }),
            expert_miss_percent: Some(61),
        };
        assert_eq!(read_answer(measured), talkative);
        let error = r#""error":{"code":503,"message":"Loading model","type":"unavailable_error"}"#;
        let both = r#","failsAt":"pi4","missedBy":"desk""#;
        for (more, fails_at, missed_by) in [
            ("", None, None),
            (r#","failsAt":"pi4""#, Some("pi4"), None),
            (both, Some("pi4"), Some("desk")),
        ] {
            let answer = format!("HTTP/1.0 503 Service Unavailable\r\n\r\n{{{error}{more}}}");
            let expected = Health::NotReady {
                why: "Loading model".into(),
                fails_at: fails_at.map(str::to_owned),
                missed_by: missed_by.map(str::to_owned),
            };
            assert_eq!(read_answer(&answer), expected);
        }
        for (stranger, said) in [
            ("", "answered nothing"),
            ("SSH-2.0-OpenSSH_9.2 hello", "answered hello"),
            ("HTTP/1.0 404 Not Found\r\n\r\n", "answered 404"),
        ] {
            let Health::NoAnswer(why) = read_answer(stranger) else {
                panic!("{stranger}");
            };
            assert!(why.ends_with(said), "{why}");
        }
    }

    #[tokio::test]
    async fn a_closed_port_does_not_answer() {
        // Nobody else is given its port while it is bound, and it does not listen.
        let closed = tokio::net::TcpSocket::new_v4().unwrap();
        closed.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = closed.local_addr().unwrap();
        let Health::NoAnswer(why) = health(address).await else {
            panic!("nobody listens");
        };
        assert!(why.contains(&address.to_string()), "{why}");
    }
}
