//! What a ring keeps of conversations changes no answer, to the last digit. Many requests of one API key share beginnings, and each is then
//! asked again with a key of its own: keys share nothing, so that answer is computed from the first token on.

use std::io;
use std::net::SocketAddr;
use std::thread;

use proptest::prelude::RngExt;
use proptest::test_runner::{RngAlgorithm, TestRng};
use serde_json::{Value, json};

use prima_tests::local_ring::smollm2;
use prima_tests::machine_ring::{MachineRing, cut};
use prima_tests::{Endpoint, assets, http};

const REQUESTS: usize = 60;
/// Requests that are asked together.
const AT_ONCE: usize = 4;
const CONTEXT: i32 = 1024;
/// Words of a prompt; conversations that get longer begin anew.
const MOST_WORDS: usize = 400;
/// Events after which a client hangs up.
const EVENTS: usize = 4;
/// Tokens of an answer that may have no text, as control tokens have none. All others have a byte or more.
const SILENT_TOKENS: usize = 16;

/// A body without a model, and whether its client hangs up in the middle of the answer.
struct Request {
    body: Value,
    hangs_up: bool,
}

/// What came of a request.
struct Heard {
    choices: Value,
    prompt_tokens: u64,
    cached_tokens: u64,
}

#[test]
fn kept_prefixes_change_no_answer_to_the_last_digit() {
    let keys: Vec<String> = (0..=REQUESTS).map(|n| format!("key-{n}")).collect();
    let arguments: Vec<&str> = keys.iter().flat_map(|key| ["--api-key", key]).collect();
    let ring = MachineRing::start_here(cut(&smollm2(), CONTEXT, 2, 2), &arguments);
    let address = ring.address();

    let mut mix = Mix::new();
    let mut answered = Vec::new();
    for _ in 0..REQUESTS / AT_ONCE {
        let requests: Vec<Request> = (0..AT_ONCE).map(|_| mix.next()).collect();
        let heard: Vec<Heard> = thread::scope(|scope| {
            let clients: Vec<_> = requests
                .iter()
                .map(|request| scope.spawn(|| ask(address, &keys[0], request)))
                .collect();
            let heard = clients.into_iter().map(|client| client.join().unwrap());
            heard.collect()
        });
        for (request, heard) in requests.into_iter().zip(heard) {
            mix.remember(&request, &heard);
            answered.push((request, heard));
        }
    }
    let sum = |of: fn(&Heard) -> u64| answered.iter().map(|(_, heard)| of(heard)).sum::<u64>();
    let (prompt, cached) = (
        sum(|heard| heard.prompt_tokens),
        sum(|heard| heard.cached_tokens),
    );
    assert!(cached > prompt / 4, "{cached} of {prompt} tokens were kept");

    for ((request, heard), key) in answered.iter().zip(&keys[1..]) {
        let mut alone = Request {
            body: request.body.clone(),
            hangs_up: false,
        };
        if request.hangs_up {
            // Nothing is compared beyond what the client heard.
            let heard_bytes = text_of(&heard.choices).len();
            alone.body["max_tokens"] = json!(heard_bytes + SILENT_TOKENS);
        }
        let fresh = ask(address, key, &alone);
        let body = &alone.body;
        assert_eq!(fresh.cached_tokens, 0, "{body}");
        if request.hangs_up {
            let (begun, whole) = (text_of(&heard.choices), text_of(&fresh.choices));
            assert!(
                whole.starts_with(begun),
                "{body}: {begun:?}, then {whole:?}"
            );
        } else {
            assert_eq!(heard.choices, fresh.choices, "{body}");
        }
    }
}

/// Requests as clients have them: new ones, next turns, edited ones, and such with a beginning in common.
struct Mix {
    rng: TestRng,
    words: Vec<String>,
    /// Prompts and what was answered.
    past: Vec<(String, String)>,
}

impl Mix {
    fn new() -> Mix {
        let text = assets::path("text/moby-dick.txt").expect("a text");
        let text = std::fs::read_to_string(text).expect("a text");
        Mix {
            // Always the same, so that a failure repeats.
            rng: TestRng::deterministic_rng(RngAlgorithm::ChaCha),
            words: text.split_whitespace().map(str::to_owned).collect(),
            past: Vec::new(),
        }
    }

    fn next(&mut self) -> Request {
        let prompt = self.prompt();
        let seed: u32 = self.rng.random_range(0..1000);
        let mut body = json!({
            "prompt": prompt,
            "max_tokens": self.rng.random_range(2..24),
            "temperature": self.rng.random_range(0..2),
            "seed": seed,
        });
        let hangs_up = self.rng.random_range(0..6) == 0;
        if hangs_up {
            body["max_tokens"] = json!(200);
        } else {
            body["n"] = json!(self.rng.random_range(1..3));
            body["logprobs"] = match self.rng.random_range(0..2) {
                0 => Value::Null,
                _ => json!(5),
            };
        }
        Request { body, hangs_up }
    }

    fn prompt(&mut self) -> String {
        let usable = |(prompt, _): &&(String, String)| prompt.split(' ').count() < MOST_WORDS;
        let past: Vec<(String, String)> = self.past.iter().filter(usable).cloned().collect();
        if past.is_empty() {
            return self.passage(100);
        }
        let (prompt, answer) = &past[self.rng.random_range(0..past.len())];
        match self.rng.random_range(0..8) {
            0 => self.passage(100),
            // The same again.
            1 => prompt.clone(),
            // Another end, or another word in the middle.
            2 | 3 => {
                let mut words: Vec<String> = prompt.split(' ').map(str::to_owned).collect();
                let at = self.rng.random_range(0..words.len());
                match self.rng.random_range(0..2) {
                    0 => words[at] = self.passage(1),
                    _ => words.truncate(at + 1),
                }
                words.join(" ")
            }
            _ => format!("{prompt}{answer} {}", self.passage(40)),
        }
    }

    /// At most `words` of the text, from anywhere.
    fn passage(&mut self, words: usize) -> String {
        let first = self.rng.random_range(0..self.words.len() - words);
        let count = self.rng.random_range(0..words) + 1;
        self.words[first..first + count].join(" ")
    }

    fn remember(&mut self, request: &Request, heard: &Heard) {
        let prompt = request.body["prompt"].as_str().expect("a prompt");
        let answer = text_of(&heard.choices);
        self.past.push((prompt.to_owned(), answer.to_owned()));
    }
}

/// Of the first choice.
fn text_of(choices: &Value) -> &str {
    choices[0]["text"].as_str().expect("a text")
}

fn ask(address: SocketAddr, key: &str, request: &Request) -> Heard {
    if request.hangs_up {
        return hang_up(address, key, &request.body).expect("some events");
    }
    let response = http::post_with_key(address, "/v1/completions", key, &request.body);
    let response = response.expect("an answer");
    assert_eq!(response.status, 200, "{}", response.body);
    let mut answer = response.json();
    let tokens = |at: &str| answer.pointer(at).and_then(Value::as_u64).expect(at);
    Heard {
        prompt_tokens: tokens("/usage/prompt_tokens"),
        cached_tokens: tokens("/usage/prompt_tokens_details/cached_tokens"),
        choices: answer["choices"].take(),
    }
}

/// What was answered until the client left.
fn hang_up(address: SocketAddr, key: &str, body: &Value) -> io::Result<Heard> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let mut text = String::new();
    for event in http::post_streaming_with_key(address, "/v1/completions", key, &body)?.take(EVENTS)
    {
        let event: Value = serde_json::from_str(&event?)?;
        text += event["choices"][0]["text"].as_str().unwrap_or_default();
    }
    Ok(Heard {
        choices: json!([{"text": text}]),
        prompt_tokens: 0,
        cached_tokens: 0,
    })
}
