//! Clients of the Model's Service: they look where the Service leads, and ask there. One does so all the time, one request after the other; others
//! while nobody hears anything, so that it shows within a second whether the Model is silent or one client has no luck.

use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource};
use prima_crds::v1alpha1::model::Model;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use super::observed::{Asked, Observed};
use crate::http;
use crate::stopwatch::Stopwatch;

pub(super) const PROMPTS: [&str; 3] = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n",
];
pub(super) const TOKENS: usize = 8;
/// For how long a client waits until an answer begins, and for each next part of it.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(100);
/// If nobody hears anything for so long, another client asks, and the next one after as long again. No part of a second: bursts come every second, and
/// a first packet that is lost is sent again after a second, so that all clients would meet the same.
const ANOTHER_AFTER: Duration = Duration::from_millis(700);
/// Enough for one to be free whenever another is to ask, while those before wait in vain.
const STANDING_BY: usize = 7;
/// Between two notes of how long programs have waited for a processor.
const NOTE_PAUSE: Duration = Duration::from_millis(500);

/// Notes each object of a watch, for ever.
async fn follow<K>(
    objects: Api<K>,
    which: watcher::Config,
    told: Arc<Mutex<Told>>,
    note: fn(&mut Told, &K),
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let changes = watcher(objects, which).default_backoff().applied_objects();
    let mut changes = pin!(changes);
    while let Some(object) = changes.next().await {
        if let Ok(object) = object {
            told.lock().unwrap().change(|told| note(told, &object));
        }
    }
}

/// What the cluster says of a Model, followed until it is dropped.
pub(super) struct View {
    told: Arc<Mutex<Told>>,
    watches: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Told {
    /// Where the Service leads.
    address: Option<SocketAddr>,
    /// The condition.
    ready: bool,
    /// When either of them began to say that the Model answers, or both ceased.
    said: Vec<(Instant, bool)>,
}

impl Told {
    fn change(&mut self, change: impl FnOnce(&mut Told)) {
        change(self);
        let says = self.ready || self.address.is_some();
        if self.said.last().is_none_or(|(_, said)| *said != says) {
            self.said.push((Instant::now(), says));
        }
    }
}

impl View {
    pub(super) fn of(model: &str, client: &Client, runtime: &Runtime) -> View {
        let told: Arc<Mutex<Told>> = Arc::default();
        let of_service = format!("kubernetes.io/service-name={model}");
        let of_slices = follow(
            Api::<EndpointSlice>::default_namespaced(client.clone()),
            watcher::Config::default().labels(&of_service),
            told.clone(),
            |told, slice| told.address = address(slice),
        );
        let of_model = follow(
            Api::<Model>::default_namespaced(client.clone()),
            watcher::Config::default().fields(&format!("metadata.name={model}")),
            told.clone(),
            |told, model| told.ready = is_ready(model),
        );
        View {
            told,
            watches: vec![runtime.spawn(of_slices), runtime.spawn(of_model)],
        }
    }

    /// Where the Service leads, if the Model says that it is ready.
    pub(super) fn ready(&self) -> Option<SocketAddr> {
        let told = self.told.lock().unwrap();
        told.address.filter(|_| told.ready)
    }

    /// Where it leads; `None`: nowhere, whatever the Model says.
    fn address(&self) -> (Option<SocketAddr>, bool) {
        let told = self.told.lock().unwrap();
        (told.address, told.ready)
    }

    /// What was said since `begin`.
    fn said(&self, begin: Instant) -> Vec<(Duration, bool)> {
        let told = self.told.lock().unwrap();
        let since = |(at, said): &(Instant, bool)| (at.saturating_duration_since(begin), *said);
        told.said.iter().map(since).collect()
    }
}

impl Drop for View {
    fn drop(&mut self) {
        for watch in &self.watches {
            watch.abort();
        }
    }
}

fn address(slice: &EndpointSlice) -> Option<SocketAddr> {
    let endpoint = slice.endpoints.first()?;
    let conditions = endpoint.conditions.as_ref();
    let ready = conditions.and_then(|conditions| conditions.ready);
    let host: IpAddr = endpoint.addresses.first()?.parse().ok()?;
    let port = slice.ports.as_ref()?.first()?.port?;
    Some(SocketAddr::new(host, u16::try_from(port).ok()?)).filter(|_| ready != Some(false))
}

fn is_ready(model: &Model) -> bool {
    let conditions = model.status.iter().flat_map(|status| &status.conditions);
    let mut ready = conditions.filter(|condition| condition.type_ == "Ready");
    ready.any(|condition| condition.status == "True")
}

/// The greedy continuation of a prompt, which is waited for no longer than `patience` until it begins, and for each next part of it. A ring that is
/// slow, and goes on, is waited for.
///
/// # Errors
/// Why it did not come to its end, for people.
pub fn complete(
    patience: Duration,
    address: SocketAddr,
    model: &str,
    prompt: &str,
    tokens: usize,
) -> Result<String, String> {
    follow_answer(patience, address, model, prompt, tokens, || {})
}

/// The same; says when something came: each part, and the end.
fn follow_answer(
    patience: Duration,
    address: SocketAddr,
    model: &str,
    prompt: &str,
    tokens: usize,
    mut came: impl FnMut(),
) -> Result<String, String> {
    let body = json!({
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": true,
    });
    let events = http::post_streaming_or_give_up(patience, address, "/v1/completions", &body);
    let events = events.map_err(|error| error.to_string())?;
    let status = events.status;
    if status != 200 {
        let body = events.body();
        let body = body.map_err(|error| format!("{status}, and no body: {error}"))?;
        return Err(format!("{status}: {body}"));
    }
    let (mut text, mut parts) = (String::new(), 0);
    for event in events {
        let event = event.map_err(|error| format!("after {parts} parts: {error}"))?;
        if event == "[DONE]" {
            came();
            return Ok(text);
        }
        let json: Value = serde_json::from_str(&event).unwrap_or_default();
        let Some(part) = json["choices"][0]["text"].as_str() else {
            return Err(event);
        };
        text.push_str(part);
        parts += 1;
        came();
    }
    Err(format!("the answer broke off after {parts} parts"))
}

/// Ends what goes on until this is true, also where a thread that is waited for panics.
pub(super) struct SetOnDrop<'a>(pub(super) &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Asks until it is told to stop.
pub(super) struct Asking<'a> {
    pub(super) view: &'a View,
    pub(super) model: &'a str,
    /// What to expect for each of [`PROMPTS`].
    pub(super) expected: &'a [String; 3],
    pub(super) begin: Instant,
    pub(super) stop: &'a AtomicBool,
    /// Answers to the client that always asks, one after the other without a failure, until now.
    pub(super) in_a_row: &'a Mutex<Vec<Instant>>,
}

/// Of all clients.
struct Notes {
    /// When somebody heard something, or began to ask.
    lately: Instant,
    asked: Vec<Asked>,
    /// Answers.
    wrong: Vec<String>,
}

impl Notes {
    /// Whether nobody hears anything, so that whoever looks is to ask; the next one only after a while.
    fn is_another_to_ask(&mut self) -> bool {
        let is_silent = self.lately.elapsed() >= ANOTHER_AFTER;
        if is_silent {
            self.lately = Instant::now();
        }
        is_silent
    }
}

impl Asking<'_> {
    /// What was seen, and answers that are wrong.
    pub(super) fn run(&self) -> (Observed, Vec<String>) {
        let notes = Mutex::new(Notes {
            lately: self.begin,
            asked: Vec::new(),
            wrong: Vec::new(),
        });
        let over = AtomicBool::new(false);
        let (until, waited) = thread::scope(|threads| {
            let end = SetOnDrop(&over);
            for _ in 0..STANDING_BY {
                threads.spawn(|| self.stand_by(&notes, &over));
            }
            let waited = threads.spawn(|| self.note_waits(&over));
            self.keep_asking(&notes);
            drop(end);
            let until = self.begin.elapsed();
            (until, waited.join().expect("notes"))
        });
        let Notes { asked, wrong, .. } = notes.into_inner().unwrap();
        let observed = Observed {
            said: self.view.said(self.begin),
            asked,
            until,
            waited,
        };
        (observed, wrong)
    }

    /// When programs had waited for a processor for how long, until it is over.
    fn note_waits(&self, over: &AtomicBool) -> Vec<(Duration, Duration)> {
        let clock = Stopwatch::start();
        let mut waited = Vec::new();
        loop {
            // One more note is made when it is over.
            let is_last = over.load(Ordering::Relaxed);
            waited.push((self.begin.elapsed(), clock.waited()));
            if is_last {
                return waited;
            }
            thread::sleep(NOTE_PAUSE);
        }
    }

    /// One request after the other.
    fn keep_asking(&self, notes: &Mutex<Notes>) {
        for (prompt, expected) in PROMPTS.iter().zip(self.expected).cycle() {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            let at = Instant::now();
            let answered = self.ask(prompt, expected, notes);
            let mut in_a_row = self.in_a_row.lock().unwrap();
            match answered {
                Some(true) => in_a_row.push(at),
                Some(false) => in_a_row.clear(),
                None => {}
            }
            drop(in_a_row);
            thread::sleep(PAUSE);
        }
    }

    /// A request whenever nobody hears anything.
    fn stand_by(&self, notes: &Mutex<Notes>, over: &AtomicBool) {
        for (prompt, expected) in PROMPTS.iter().zip(self.expected).cycle() {
            thread::sleep(PAUSE);
            if over.load(Ordering::Relaxed) {
                break;
            }
            let is_another = notes.lock().unwrap().is_another_to_ask();
            if is_another {
                self.ask(prompt, expected, notes);
            }
        }
    }

    /// Asks once, and notes what came of it. Whether there was an answer; `None`: nobody says that there would be one.
    fn ask(&self, prompt: &str, expected: &str, notes: &Mutex<Notes>) -> Option<bool> {
        let (address, ready) = self.view.address();
        let at = Instant::now();
        let mut came = Vec::new();
        let answer = match address {
            Some(address) => {
                notes.lock().unwrap().lately = at;
                follow_answer(PATIENCE, address, self.model, prompt, TOKENS, || {
                    let now = Instant::now();
                    came.push(now - self.begin);
                    notes.lock().unwrap().lately = now;
                })
            }
            None if ready => Err("the Service leads nowhere".to_owned()),
            None => return None,
        };
        let mut notes = notes.lock().unwrap();
        if let Ok(text) = &answer
            && text != expected
        {
            notes.wrong.push(format!(
                "{prompt:?} was answered by {text:?} instead of {expected:?}"
            ));
        }
        let answered = answer.is_ok();
        let given_up = answer.err().map(|why| (self.begin.elapsed(), why));
        notes.asked.push(Asked {
            at: at - self.begin,
            came,
            given_up,
        });
        Some(answered)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{Shutdown, TcpListener, TcpStream};

    use super::*;

    const ANSWER: &str = "HTTP/1.0 200 OK\r\n\r\ndata: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"text\":\"b\"}]}\n\ndata: [DONE]\n\n";

    fn say(mut client: TcpStream, said: &str) {
        client.write_all(said.as_bytes()).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        // What a client has not sent yet may find nobody.
        let _ = client.read_to_end(&mut Vec::new());
    }

    /// What a client makes of a server that says this and ends, and how often something came.
    fn asked(said: &'static str) -> (Result<String, String>, usize) {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        let serving = thread::spawn(move || say(server.accept().unwrap().0, said));
        let mut came = 0;
        let answer = follow_answer(PATIENCE, address, "m", "p", 2, || came += 1);
        serving.join().unwrap();
        (answer, came)
    }

    #[test]
    fn what_comes_is_told_and_what_does_not_is_named() {
        assert_eq!(asked(ANSWER), (Ok("ab".to_owned()), 3));
        let failed = |said| {
            let (answer, came) = asked(said);
            (answer.unwrap_err(), came)
        };
        let one = "HTTP/1.0 200 OK\r\n\r\ndata: {\"choices\":[{\"text\":\"a\"}]}\n\n";
        let broken_off = "the answer broke off after 1 parts".to_owned();
        assert_eq!(failed(one), (broken_off, 1));
        let nothing = "the answer broke off after 0 parts".to_owned();
        assert_eq!(failed("HTTP/1.0 200 OK\r\n\r\n"), (nothing, 0));
        assert_eq!(
            failed("HTTP/1.0 503 Service Unavailable\r\n\r\nit stands still"),
            ("503: it stands still".to_owned(), 0)
        );
        assert_eq!(
            failed(
                "HTTP/1.0 200 OK\r\n\r\ndata: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"error\":{}}\n\n"
            ),
            (r#"{"error":{}}"#.to_owned(), 1)
        );
        let (no_head, came) = failed("");
        assert!(no_head.starts_with("no answer begins: "), "{no_head}");
        assert_eq!(came, 0);
    }

    /// What clients see of a server that says that it answers, until it has answered so often. `swallows`: whether it is silent to a request, by its
    /// number and the time since the first.
    fn seen(answers: usize, swallows: impl Fn(usize, Duration) -> bool + Sync) -> Observed {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        let mut told = Told::default();
        told.change(|told| told.address = Some(address));
        let view = View {
            told: Arc::new(Mutex::new(told)),
            watches: Vec::new(),
        };
        let expected = ["ab"; 3].map(str::to_owned);
        let (stop, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let asking = Asking {
            view: &view,
            model: "m",
            expected: &expected,
            begin: Instant::now(),
            stop: &stop,
            in_a_row: &Mutex::default(),
        };
        let serve = || {
            let (mut swallowed, mut answered, mut first) = (Vec::new(), 0, None);
            for nth in 1.. {
                let (client, _) = server.accept().unwrap();
                if over.load(Ordering::Relaxed) {
                    break;
                }
                let first = *first.get_or_insert_with(Instant::now);
                if swallows(nth, first.elapsed()) {
                    swallowed.push(client);
                    continue;
                }
                say(client, ANSWER);
                answered += 1;
                if answered == answers {
                    stop.store(true, Ordering::Relaxed);
                }
            }
        };
        thread::scope(|threads| {
            threads.spawn(serve);
            let (observed, wrong) = asking.run();
            over.store(true, Ordering::Relaxed);
            // So that it sees that it is over.
            TcpStream::connect(address).unwrap();
            assert!(wrong.is_empty(), "{wrong:?}");
            observed
        })
    }

    /// One client alone would see a silence of at least [`PATIENCE`].
    #[test]
    fn one_without_luck_makes_no_silence() {
        let observed = seen(5, |nth, _| nth.is_multiple_of(3));
        assert!(observed.failed() > 0);
        let (_, longest) = observed.longest_false_ready();
        assert!(longest < PATIENCE, "{longest:?}: {observed:?}");
    }

    #[test]
    fn silence_to_all_is_counted_whole() {
        const SILENT: Duration = Duration::from_secs(6);
        let mut observed = seen(1, |_, since_first| since_first < SILENT);
        // The server waited by a clock that does not stand while it has no processor.
        observed.waited.clear();
        let (_, longest) = observed.longest_false_ready();
        assert!(longest >= SILENT, "{longest:?}: {observed:?}");
    }
}
