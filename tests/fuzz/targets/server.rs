//! What a model server answers: each connection gets the bytes up to the next mark, and is closed. A client that reads a model's header there
//! must not trust a word of it.
//!
//! Finds panics, hangs, and memory for what a server only claims.

#![no_main]

use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use libfuzzer_sys::{Corpus, fuzz_target};
use prima_weights::{Client, Location, Reach, RemoteModel, Retry, Source};
use tokio::runtime::Runtime;

const MARK: &[u8] = b"\n===\n";

static ANSWERS: Mutex<VecDeque<Vec<u8>>> = Mutex::new(VecDeque::new());

static SERVER: LazyLock<SocketAddr> = LazyLock::new(|| {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            let answer = ANSWERS.lock().expect("answers").pop_front();
            // The request first: a connection that is closed with something unread is reset.
            let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
            let mut asked = [0; 4096];
            let _ = stream.read(&mut asked);
            let _ = stream.write_all(&answer.unwrap_or_default());
        }
    });
    address
});

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().build().expect("a runtime")
});

static CLIENT: LazyLock<Client> = LazyLock::new(|| {
    let at_once = Retry {
        attempts: 2,
        first_pause: Duration::ZERO,
        longest_pause: Duration::ZERO,
        longest_asked_pause: Duration::ZERO,
        ..Retry::default()
    };
    Client::new(at_once, Reach::anywhere()).expect("a client")
});

fuzz_target!(|bytes: &[u8]| -> Corpus {
    // Nobody else is to be asked.
    let text = String::from_utf8_lossy(bytes).to_ascii_lowercase();
    if ["//", "\\", "http:", "https:"]
        .iter()
        .any(|elsewhere| text.contains(elsewhere))
    {
        return Corpus::Reject;
    }
    let mut answers = VecDeque::new();
    let mut rest = bytes;
    while let Some(at) = rest.windows(MARK.len()).position(|window| window == MARK) {
        answers.push_back(rest[..at].to_vec());
        rest = &rest[at + MARK.len()..];
    }
    answers.push_back(rest.to_vec());
    *ANSWERS.lock().expect("answers") = answers;
    let source = Source {
        location: Location::Url {
            url: format!("http://{}/model.gguf", *SERVER),
            sha256: None,
        },
        token: None,
    };
    match RUNTIME.block_on(RemoteModel::open(&CLIENT, &source)) {
        Ok(model) => assert!(model.gguf.data_offset <= model.gguf.file_len),
        Err(error) => assert!(error.to_string().len() < 4000),
    }
    Corpus::Keep
});
