//! Clients that want too much of a ring: bodies as large as may be, of which nothing can come, and connections on which hardly anything does.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::{Endpoint, http};

const MIB: usize = 1 << 20;
const BODIES: usize = 200;
const SLOW: usize = 1000;
/// From the answer to a probe to the next probe. Without a pause, they would be a load of their own.
const PROBE_PAUSE: Duration = Duration::from_millis(50);
/// What streams go on meanwhile, and for so many tokens.
const PROMPTS: [&str; 3] = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n",
];
const TOKENS: usize = 150;

/// The answers to a few prompts, which are streamed at once, and what `meanwhile` returns, which begins when each has begun.
pub fn streams<T>(ring: &impl Endpoint, meanwhile: impl FnOnce() -> T) -> (Vec<String>, T) {
    let begun = PROMPTS.map(|prompt| {
        let body = json!({
            "model": ring.model(),
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": true,
        });
        let mut events = http::post_streaming(ring.address(), "/v1/completions", &body).unwrap();
        assert_eq!(events.status, 200);
        let first = events.next();
        first.into_iter().chain(events)
    });
    thread::scope(|threads| {
        let reading: Vec<_> = begun
            .into_iter()
            .map(|events| threads.spawn(|| text_of(events)))
            .collect();
        let meanwhile = meanwhile();
        let read = reading.into_iter().map(|one| one.join().unwrap());
        (read.collect(), meanwhile)
    })
}

fn text_of(events: impl Iterator<Item = io::Result<String>>) -> String {
    let events: Vec<String> = events.map(Result::unwrap).collect();
    let (done, chunks) = events.split_last().expect("events");
    assert_eq!(done, "[DONE]");
    let text = |chunk: &String| {
        let chunk: Value = serde_json::from_str(chunk).unwrap();
        chunk["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    chunks.iter().map(text).collect()
}

/// Large bodies and slow connections at once, while probes are answered. Returns how the bodies were answered, and the connections.
pub fn siege(
    address: SocketAddr,
    bodies: &[(&'static str, String)],
) -> (Vec<Option<u16>>, Vec<TcpStream>) {
    let over = AtomicBool::new(false);
    thread::scope(|threads| {
        threads.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                assert_eq!(http::get(address, "/livez").unwrap().status, 200);
                thread::sleep(PROBE_PAUSE);
            }
        });
        let bodies = bodies.iter().cycle().take(BODIES);
        let sending: Vec<_> = bodies
            .map(|(path, body)| threads.spawn(move || status_of(address, path, body)))
            .collect();
        let slow = (0..SLOW).map(|number| slow_connection(address, number));
        let slow = slow.collect();
        let answers = sending.into_iter().map(|one| one.join().unwrap());
        let answers = answers.collect();
        over.store(true, Ordering::Relaxed);
        (answers, slow)
    })
}

/// Bodies of 4 MiB, and where they go: one letter, words, special tokens, token ids, values in values, and as many messages as there may be.
pub fn hostile_bodies() -> Vec<(&'static str, String)> {
    let filled = |begin: &str, unit: &str, end: &str| {
        let units = (4 * MIB - begin.len() - end.len()) / unit.len();
        [begin, &unit.repeat(units), end].concat()
    };
    let completion = |begin, unit, end| ("/v1/completions", filled(begin, unit, end));
    let message = |separator| format!(r#"{{"role": "user", "content": "{:50}"}}{separator}"#, "");
    let messages = filled(r#"{"messages": ["#, &message(","), &message("]}"));
    vec![
        completion(r#"{"prompt": ""#, "x", r#""}"#),
        completion(r#"{"prompt": ""#, "word ", r#""}"#),
        completion(r#"{"prompt": ""#, "<|im_start|>", r#""}"#),
        completion(r#"{"prompt": ["#, "0,", "0]}"),
        completion(r#"{"prompt": "a", "stop": "#, "[", ""),
        completion(r#"{"prompt": "a", "logit_bias": ["#, r#"{"a":0},"#, "{}]}"),
        ("/v1/chat/completions", messages),
    ]
}

/// Sends a body, and returns the status of the answer; `None`: cut off.
pub fn status_of(address: SocketAddr, path: &str, body: &str) -> Option<u16> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(http::READ_DEADLINE)).ok()?;
    let head = format!(
        "POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    // The answer may come before the body is sent.
    let _ = stream.write_all(head.as_bytes());
    let _ = stream.write_all(body.as_bytes());
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    line.split(' ').nth(1)?.parse().ok()
}

/// A client that sends nothing, a part of a head, or a part of a body, and then nothing more.
fn slow_connection(address: SocketAddr, number: usize) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("a connection");
    let sent = match number % 3 {
        0 => "",
        1 => "POST /v1/completions HTTP/1.1\r\nHost: ",
        _ => {
            "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 4194304\r\n\r\n{"
        }
    };
    // It may be cut off already.
    let _ = stream.write_all(sent.as_bytes());
    stream
}

/// For this process.
pub fn allow_open_files(count: u64) {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.current.map(|current| current.max(count));
    setrlimit(Resource::Nofile, limit).expect("more open files");
}
