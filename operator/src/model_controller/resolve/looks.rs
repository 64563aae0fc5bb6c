//! What servers say of the files that Models name. Headers are read beside the reconciles, a few at a time and none for long: a server that
//! is slow, or sends what no model has, keeps no other Model waiting.
//!
//! A server that failed is asked again after pauses that grow, also by the next operator: a condition of the Model's says since when.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use prima_crds::error_chain;
use prima_crds::v1alpha1::model::{Model, ResolvedFile};
use prima_crds::v1alpha1::model_source::ModelSource;
use prima_weights::{Client, Hub, RemoteModel, Retry, model_profile};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::timeout;

use super::{RESOLVE_FAILED, RESOLVED, Unknown, shown};

/// A server that is busy or away is asked again later.
pub const RETRY: Retry = Retry {
    attempts: 2,
    first_pause: Duration::from_millis(500),
    longest_pause: Duration::from_secs(5),
    longest_asked_pause: Duration::from_secs(5),
};
const FIRST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// Headers that are read at the same time.
const AT_ONCE: usize = 4;
/// For one model, all parts together: the largest headers come in that time at 5 Mbit/s.
const DEADLINE: Duration = Duration::from_secs(60);

/// Reads headers for all Models.
pub struct HeaderReader {
    hub: Hub,
    client: Client,
    turns: Semaphore,
    read: mpsc::UnboundedSender<ObjectRef<Model>>,
}

impl HeaderReader {
    /// Also returns the Models of which something was read.
    pub fn new(hub: Hub, client: Client) -> (Arc<Self>, mpsc::UnboundedReceiver<ObjectRef<Model>>) {
        let (read, models) = mpsc::unbounded_channel();
        let reader = Self {
            hub,
            client: client.with_large_headers_in_turn(),
            turns: Semaphore::new(AT_ONCE),
            read,
        };
        (Arc::new(reader), models)
    }

    /// Begins to read for `model`. Reading ends when nobody waits for it any more.
    fn begin(self: &Arc<Self>, model: &Model, source: &ModelSource) -> oneshot::Receiver<Found> {
        let (mut tell, told) = oneshot::channel();
        let (reader, model, source) = (self.clone(), ObjectRef::from(model), source.clone());
        tokio::spawn(async move {
            tokio::select! {
                found = reader.read(&source) => {
                    // If nobody listens any more, nobody need know.
                    let _ = tell.send(found);
                    let _ = reader.read.send(model);
                }
                () = tell.closed() => {}
            }
        });
        told
    }

    /// Version and header of a file on a server. Errors are one line, for people.
    async fn read(&self, source: &ModelSource) -> Found {
        // The semaphore is never closed.
        let _turn = self.turns.acquire().await;
        match timeout(DEADLINE, self.read_at_once(source)).await {
            Ok(found) => found,
            Err(_) => Err(format!(
                "{}: the header did not come within {} s",
                shown(source),
                DEADLINE.as_secs()
            )),
        }
    }

    async fn read_at_once(&self, source: &ModelSource) -> Found {
        let fetched = self.hub.source(source, None);
        let fetched = fetched.ok_or("expected huggingFace or url")?;
        let remote = RemoteModel::open(&self.client, &fetched)
            .await
            .map_err(|error| error_chain(&error))?;
        let name = remote.files[0].shown();
        let profile = model_profile(&name, &remote.gguf).map_err(|error| error_chain(&error))?;
        Ok(ResolvedFile {
            source: source.clone(),
            version: remote.version,
            profile,
        })
    }
}

type Found = Result<ResolvedFile, String>;

/// What servers said last of the files that one Model names.
#[derive(Default)]
pub struct Looks(Vec<Look>);

struct Look {
    source: ModelSource,
    state: LookState,
    /// The last one, if the server was asked in vain.
    failure: Option<Failure>,
}

enum LookState {
    /// Nobody asks the server now.
    Idle,
    Reading(oneshot::Receiver<Found>),
    Done(Box<ResolvedFile>),
}

struct Failure {
    message: String,
    pause: Duration,
    /// When the server is asked again.
    next: Instant,
}

impl Looks {
    /// Forgets all other sources.
    pub fn keep(&mut self, mut used: impl FnMut(&ModelSource) -> bool) {
        self.0.retain(|look| used(&look.source));
    }

    /// What the server of `source` says, as far as it is known.
    pub fn look(
        &mut self,
        model: &Model,
        source: &ModelSource,
        reader: &Arc<HeaderReader>,
    ) -> Result<ResolvedFile, Unknown> {
        let now = Instant::now();
        let at = match self.0.iter().position(|look| look.source == *source) {
            Some(at) => at,
            None => {
                // Nothing is known: this operator has just started, or the source is new.
                let failure = match self.0.is_empty() {
                    true => failure_before(model, Timestamp::now(), now),
                    false => None,
                };
                self.0.push(Look {
                    source: source.clone(),
                    state: LookState::Idle,
                    failure,
                });
                self.0.len() - 1
            }
        };
        let look = &mut self.0[at];
        look.take_in(now);
        let waits = look
            .failure
            .as_ref()
            .is_some_and(|failure| now < failure.next);
        if matches!(look.state, LookState::Idle) && !waits {
            look.state = LookState::Reading(reader.begin(model, source));
        }
        match (&look.state, &look.failure) {
            (LookState::Done(file), _) => Ok((**file).clone()),
            // Said also while the server is asked again.
            (_, Some(failure)) => Err(Unknown::Failed(failure.message.clone())),
            (_, None) => Err(Unknown::Awaited(format!(
                "reads the header of {}",
                shown(source)
            ))),
        }
    }
}

impl Look {
    /// Takes in what was read meanwhile.
    fn take_in(&mut self, now: Instant) {
        let LookState::Reading(told) = &mut self.state else {
            return;
        };
        let found = match told.try_recv() {
            Ok(found) => found,
            Err(oneshot::error::TryRecvError::Empty) => return,
            Err(oneshot::error::TryRecvError::Closed) => {
                Err("reading its header failed".to_owned())
            }
        };
        self.state = match found {
            Ok(file) => LookState::Done(Box::new(file)),
            Err(message) => {
                let before = self.failure.as_ref().map(|failure| failure.pause);
                let pause = before.map_or(FIRST_PAUSE, |pause| (2 * pause).min(LONGEST_PAUSE));
                self.failure = Some(Failure {
                    message,
                    pause,
                    next: now + pause,
                });
                LookState::Idle
            }
        };
    }
}

/// What the operator before could not resolve is not asked for at once: it fails for as long again as it has failed, within the pauses.
fn failure_before(model: &Model, time: Timestamp, now: Instant) -> Option<Failure> {
    let status = model.status.as_ref()?;
    let failed = status.conditions.iter().find(|one| {
        one.type_ == RESOLVED
            && one.reason == RESOLVE_FAILED
            && one.observed_generation == model.metadata.generation
    })?;
    let age = time.duration_since(failed.last_transition_time.0);
    let pause = Duration::try_from(age)
        .unwrap_or_default()
        .clamp(FIRST_PAUSE, LONGEST_PAUSE);
    Some(Failure {
        message: failed.message.clone(),
        pause,
        next: now + pause,
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
    use prima_crds::v1alpha1::model::ModelStatus;
    use prima_weights::{PUBLIC_HUB, Reach};
    use serde_json::json;
    use tokio::io::AsyncReadExt;

    use super::*;

    fn named(url: &str) -> ModelSource {
        serde_json::from_value(json!({"url": {"url": url}})).unwrap()
    }

    fn model(url: &str) -> Model {
        Model::new(
            "m",
            serde_json::from_value(json!({"source": named(url)})).unwrap(),
        )
    }

    fn reader(reach: Reach) -> (Arc<HeaderReader>, mpsc::UnboundedReceiver<ObjectRef<Model>>) {
        let client = Client::new(RETRY, reach).unwrap();
        HeaderReader::new(Hub::new(PUBLIC_HUB, None).unwrap(), client)
    }

    #[tokio::test]
    async fn a_silent_server_is_not_waited_for() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/m.gguf", silent.local_addr().unwrap());
        let (reader, mut read) = reader(Reach::anywhere());
        let mut looks = Looks::default();
        for _ in 0..3 {
            let looked = looks.look(&model(&url), &named(&url), &reader);
            let Err(Unknown::Awaited(message)) = looked else {
                panic!("it is known");
            };
            assert_eq!(message, format!("reads the header of {url}"));
        }
        let (mut connection, _) = silent.accept().await.unwrap();
        let mut request = [0; 11];
        connection.read_exact(&mut request).await.unwrap();
        assert_eq!(&request, b"GET /m.gguf");
        // Once the source is another one, the request is given up.
        looks.keep(|_| false);
        connection.read_to_end(&mut Vec::new()).await.unwrap();
        assert!(read.try_recv().is_err());
    }

    #[tokio::test]
    async fn pauses_between_failures_grow() {
        let url = "http://192.168.1.7/m.gguf";
        let (reader, mut read) = reader(Reach::internet_and(PUBLIC_HUB, &[]));
        let mut looks = Looks::default();
        for seconds in [5, 10, 20, 40, 80, 160, 300, 300] {
            assert!(looks.look(&model(url), &named(url), &reader).is_err());
            assert_eq!(read.recv().await.unwrap().name, "m");
            let Err(Unknown::Failed(message)) = looks.look(&model(url), &named(url), &reader)
            else {
                panic!("it does not fail");
            };
            assert!(message.contains("not on the internet"), "{message}");
            let failure = looks.0[0].failure.as_mut().unwrap();
            assert_eq!(failure.pause, Duration::from_secs(seconds));
            assert!(
                matches!(looks.0[0].state, LookState::Idle),
                "it asks at once"
            );
            looks.0[0].failure.as_mut().unwrap().next = Instant::now();
        }
    }

    #[test]
    fn the_next_operator_waits_as_long_as_it_failed() {
        let mut model = model("http://nas/m.gguf");
        model.metadata.generation = Some(3);
        let now = Instant::now();
        assert!(failure_before(&model, Timestamp::now(), now).is_none());
        for (generation, age, expected) in [
            (3, 1, Some(5)),
            (3, 60, Some(60)),
            (3, 86_400, Some(300)),
            // A clock that is years behind.
            (3, -100_000_000, Some(5)),
            // It is asked for something else now.
            (2, 60, None),
        ] {
            model.status = Some(ModelStatus {
                conditions: vec![Condition {
                    type_: RESOLVED.to_owned(),
                    status: "False".to_owned(),
                    reason: RESOLVE_FAILED.to_owned(),
                    message: "no".to_owned(),
                    observed_generation: Some(generation),
                    last_transition_time: Time(Timestamp::from_second(1_000_000).unwrap()),
                }],
                ..ModelStatus::default()
            });
            let time = Timestamp::from_second(1_000_000 + age).unwrap();
            let failure = failure_before(&model, time, now);
            assert_eq!(
                failure.map(|failure| (failure.message, failure.pause)),
                expected.map(|seconds| ("no".to_owned(), Duration::from_secs(seconds)))
            );
        }
    }
}
