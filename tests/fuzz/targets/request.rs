//! What a client sends: the first byte picks a route, the rest is the body. The gateway is the real one on a real socket; its ring says a
//! token and ends.
//!
//! Finds panics, hangs, errors that are the server's own fault, and answers that are no JSON.

#![no_main]

#[path = "../../../node-agent/tests/gateway/server.rs"]
#[allow(dead_code)]
mod server;

use std::future::pending;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use libfuzzer_sys::{Corpus, fuzz_target};
use prima_node_agent::gateway::{self, GatewayOptions, Limits};
use prima_node_agent::generation::{
    FinishReason, GenerationEvent, Generator, Instead, Readiness, Submission, TokenLogprob, Usage,
};
use server::{options, ring, text_with};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};

const ROUTES: [&str; 16] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/infill",
    "/tokenize",
    "/detokenize",
    "/apply-template",
];
/// As models have it that reason and call.
const TEMPLATE: &str = "{% if tools %}{{ tools | tojson }} <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>{% endif %}\
    {% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls or [] %}\
    <tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}";

static GATEWAY: LazyLock<SocketAddr> = LazyLock::new(|| {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    let controls = [
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
    ];
    let text = text_with(&[("tokenizer.chat_template", TEMPLATE)], &controls);
    let options = GatewayOptions {
        any_model_name: true,
        ..options()
    };
    let (submit, submissions) = mpsc::channel(8);
    let listener = runtime
        .block_on(TcpListener::bind("127.0.0.1:0"))
        .expect("a port");
    let address = listener.local_addr().expect("its address");
    std::thread::spawn(move || {
        let (_status, seen) = watch::channel(ring(Readiness::Ready));
        let (_text, known) = watch::channel(Some(Arc::new(text)));
        let generator = Generator::new(submit, seen);
        let serving = gateway::serve(
            listener,
            options,
            generator,
            known,
            Limits::default(),
            pending(),
        );
        runtime.block_on(async { tokio::join!(serving, answer(submissions)) })
    });
    address
});

/// The ring: what it is asked for, at once.
async fn answer(mut submissions: mpsc::Receiver<Submission>) {
    while let Some(submission) = submissions.recv().await {
        let Submission {
            request,
            events,
            accepted,
            ..
        } = submission;
        let _ = accepted.send(Ok(()));
        let event = |event| events.try_send(event);
        match request.instead {
            Some(Instead::Embedding { dimensions }) => {
                let _ = event(GenerationEvent::Embedding(vec![
                    0.5;
                    dimensions
                        .unwrap_or(8)
                        .min(8)
                ]));
            }
            Some(Instead::Score) => {
                let _ = event(GenerationEvent::Score(0.5));
            }
            None => {
                for choice in 0..request.choices {
                    let (token, text) = (100, "{\"a\": 1}".to_owned());
                    let logprob = request.logprobs.map(|_| TokenLogprob {
                        logprob: -1.0,
                        top: vec![(100, -1.0)],
                    });
                    let _ = event(GenerationEvent::Token {
                        choice,
                        token,
                        text,
                        logprob,
                    });
                    let (reason, text) = (FinishReason::Stop, String::new());
                    let _ = event(GenerationEvent::Finished {
                        choice,
                        reason,
                        text,
                    });
                }
            }
        }
        let prompt_tokens = request.prompt.len();
        let _ = event(GenerationEvent::Usage(Usage {
            prompt_tokens,
            ..Usage::default()
        }));
    }
}

fuzz_target!(|bytes: &[u8]| -> Corpus {
    let Some((route, body)) = bytes.split_first() else {
        return Corpus::Reject;
    };
    let route = ROUTES[usize::from(*route) % ROUTES.len()];
    let mut stream = TcpStream::connect(*GATEWAY).expect("a connection");
    let limit = Some(Duration::from_secs(20));
    stream.set_read_timeout(limit).expect("a limit");
    let head = format!(
        "POST {route} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).expect("sent");
    stream.write_all(body).expect("sent");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer in time");
    let answer = String::from_utf8(answer).expect("UTF-8");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    let status: u16 = head[9..12].parse().expect("a status");
    assert!(status < 500 || status == 503, "{route}: {answer}");
    if head.contains("application/json") {
        serde_json::from_str::<serde_json::Value>(body).expect("JSON");
    }
    Corpus::Keep
});
