//! A client of the Model's Service: it looks where the Service leads, and asks there, one request after the other.

use std::fmt::{self, Debug, Display, Formatter};
use std::io;
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

pub(super) const PROMPTS: [&str; 3] = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n",
];
pub(super) const TOKENS: usize = 8;
/// For how long a client waits for the next part of an answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(100);

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
    watches: [JoinHandle<()>; 2],
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
            watches: [runtime.spawn(of_slices), runtime.spawn(of_model)],
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

/// A request that got no answer, or not all of one.
#[derive(Debug)]
pub struct Unanswered {
    /// Why, for people.
    pub problem: String,
    /// Nothing came after this: the last part of an answer, or else when the request began.
    pub since: Instant,
}

impl Display for Unanswered {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problem)
    }
}

/// The greedy continuation of a prompt, whose next part is not waited for longer than `patience`. A ring that is slow, and goes on, is waited for.
///
/// # Errors
/// If it does not come to its end.
pub fn complete(
    patience: Duration,
    address: SocketAddr,
    model: &str,
    prompt: &str,
    tokens: usize,
) -> Result<String, Unanswered> {
    let body = json!({
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": true,
    });
    let mut since = Instant::now();
    let mut text = String::new();
    let parts = parts(patience, address, &body, |part| {
        text.push_str(part);
        since = Instant::now();
    });
    match parts {
        Ok(()) => Ok(text),
        Err(problem) => Err(Unanswered { problem, since }),
    }
}

/// Reads all parts of an answer.
fn parts(
    patience: Duration,
    address: SocketAddr,
    body: &Value,
    mut came: impl FnMut(&str),
) -> Result<(), String> {
    let problem = |error: io::Error| error.to_string();
    let events = http::post_streaming_or_give_up(patience, address, "/v1/completions", body);
    let events = events.map_err(problem)?;
    let status = events.status;
    if status != 200 {
        let body = events.body().map_err(problem)?;
        return Err(format!("{status}: {body}"));
    }
    for event in events {
        let event = event.map_err(problem)?;
        if event == "[DONE]" {
            return Ok(());
        }
        let json: Value = serde_json::from_str(&event).unwrap_or_default();
        match json["choices"][0]["text"].as_str() {
            Some(part) => came(part),
            None => return Err(event),
        }
    }
    Err("the answer broke off".to_owned())
}

/// Asks until it is told to stop.
pub(super) struct Asking<'a> {
    pub(super) view: &'a View,
    pub(super) model: &'a str,
    /// What to expect for each of [`PROMPTS`].
    pub(super) expected: &'a [String; 3],
    pub(super) begin: Instant,
    pub(super) stop: &'a AtomicBool,
    /// Answers one after the other without a failure, until now.
    pub(super) in_a_row: &'a Mutex<Vec<Instant>>,
}

impl Asking<'_> {
    /// What was seen, and answers that are wrong.
    pub(super) fn run(self) -> (Observed, Vec<String>) {
        let (mut asked, mut wrong) = (Vec::new(), Vec::new());
        for (prompt, expected) in PROMPTS.iter().zip(self.expected).cycle() {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            let at = Instant::now();
            let answer = match self.view.address() {
                (Some(address), _) => complete(PATIENCE, address, self.model, prompt, TOKENS),
                (None, true) => Err(Unanswered {
                    problem: "the Service leads nowhere".to_owned(),
                    since: at,
                }),
                (None, false) => {
                    thread::sleep(PAUSE);
                    continue;
                }
            };
            if let Ok(text) = &answer
                && text != expected
            {
                wrong.push(format!(
                    "{prompt:?} was answered by {text:?} instead of {expected:?}"
                ));
            }
            let mut in_a_row = self.in_a_row.lock().unwrap();
            match &answer {
                Ok(_) => in_a_row.push(at),
                Err(_) => in_a_row.clear(),
            }
            drop(in_a_row);
            let (at, problem) = match answer {
                Ok(_) => (at, None),
                Err(unanswered) => (unanswered.since, Some(unanswered.problem)),
            };
            asked.push(Asked {
                at: at - self.begin,
                problem,
            });
            thread::sleep(PAUSE);
        }
        let observed = Observed {
            said: self.view.said(self.begin),
            asked,
            until: self.begin.elapsed(),
        };
        (observed, wrong)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{Shutdown, TcpListener};

    use super::*;

    /// What a client makes of a server that says this and ends, and when that began to.
    fn asked(said: &'static str) -> (Result<String, Unanswered>, Instant) {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        let serving = thread::spawn(move || {
            let (mut client, _) = server.accept().unwrap();
            let begun = Instant::now();
            client.write_all(said.as_bytes()).unwrap();
            client.shutdown(Shutdown::Write).unwrap();
            // What a client has not sent yet may find nobody.
            let _ = client.read_to_end(&mut Vec::new());
            begun
        });
        let answer = complete(PATIENCE, address, "m", "p", 2);
        (answer, serving.join().unwrap())
    }

    #[test]
    fn silence_begins_after_what_came_last() {
        let (answer, _) = asked(
            "HTTP/1.0 200 OK\r\n\r\ndata: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"text\":\"b\"}]}\n\ndata: [DONE]\n\n",
        );
        assert_eq!(answer.unwrap(), "ab");
        let (broken_off, begun) =
            asked("HTTP/1.0 200 OK\r\n\r\ndata: {\"choices\":[{\"text\":\"a\"}]}\n\n");
        assert!(broken_off.unwrap_err().since >= begun);
        let (nothing, begun) = asked("HTTP/1.0 200 OK\r\n\r\n");
        assert!(nothing.unwrap_err().since <= begun);
        let (refused, begun) = asked("HTTP/1.0 503 Service Unavailable\r\n\r\nit stands still");
        let refused = refused.unwrap_err();
        assert_eq!(refused.problem, "503: it stands still");
        assert!(refused.since <= begun);
        let (failed, begun) = asked(
            "HTTP/1.0 200 OK\r\n\r\ndata: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"error\":{}}\n\n",
        );
        let failed = failed.unwrap_err();
        assert_eq!(failed.problem, r#"{"error":{}}"#);
        assert!(failed.since >= begun);
    }
}
