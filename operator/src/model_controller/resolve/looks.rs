//! What servers say of the files that Models name. Headers are read beside the reconciles, a few at a time and none for long: a server that
//! is slow, or sends what no model has, keeps no other Model waiting, nor does a namespace of many such Models keep another one's.
//!
//! A server that failed is asked again after pauses that grow, also by the next operator: a condition of the Model's says since when.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use prima_crds::error_chain;
use prima_crds::v1alpha1::model::{Model, ResolvedFile};
use prima_crds::v1alpha1::model_source::ModelSource;
use prima_kubernetes::HubTokens;
use prima_weights::{Client, HeaderTurns, RemoteModel, Retry, holding, model_profile};
use tokio::sync::{mpsc, oneshot};

use super::{OF_DRAFT, RESOLVE_FAILED, RESOLVED, Unknown, shown};

/// A server that is busy or away is asked again later.
pub const RETRY: Retry = Retry {
    attempts: 2,
    first_pause: Duration::from_millis(500),
    longest_pause: Duration::from_secs(5),
    longest_asked_pause: Duration::from_secs(5),
    patience: Duration::from_secs(60),
};
const FIRST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// For one model, all parts together: the largest headers come in that time at 5 Mbit/s.
const DEADLINE: Duration = Duration::from_secs(60);
/// The longest pause that a new operator takes over from the one before.
const LONGEST_FIRST_PAUSE: Duration = Duration::from_secs(30);

/// Reads headers for all Models.
pub struct HeaderReader {
    tokens: HubTokens,
    client: Client,
    turns: HeaderTurns,
    read: mpsc::UnboundedSender<ObjectRef<Model>>,
}

impl HeaderReader {
    /// Also returns the Models of which something was read.
    pub fn new(
        tokens: HubTokens,
        client: Client,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<ObjectRef<Model>>) {
        let (read, models) = mpsc::unbounded_channel();
        let reader = Self {
            tokens,
            client,
            turns: HeaderTurns::new(DEADLINE),
            read,
        };
        (Arc::new(reader), models)
    }

    /// Begins to read for `model`. Reading ends when nobody waits for it any more.
    fn begin(self: &Arc<Self>, model: &Model, source: &ModelSource) -> oneshot::Receiver<Found> {
        let (mut tell, told) = oneshot::channel();
        let (reader, model, source) = (self.clone(), ObjectRef::from(model), source.clone());
        let namespace = model.namespace.clone().unwrap_or_default();
        tokio::spawn(async move {
            tokio::select! {
                found = reader.read(&namespace, &source) => {
                    // If nobody listens any more, nobody need know.
                    let _ = tell.send(found);
                    let _ = reader.read.send(model);
                }
                () = tell.closed() => {}
            }
        });
        told
    }

    /// Version and header of a file on a server, when its turn comes. Errors are one line, for people.
    async fn read(&self, namespace: &str, source: &ModelSource) -> Found {
        let turn = self.turns.of(namespace).await;
        holding(Arc::new(turn), self.read_now(namespace, source)).await
    }

    async fn read_now(&self, namespace: &str, source: &ModelSource) -> Found {
        let fetched = self.tokens.source(namespace, source, None).await;
        let fetched = fetched.map_err(|error| error_chain(&error))?;
        let fetched = fetched.ok_or_else(|| "expected huggingFace or url".to_owned())?;
        let source = source.clone();
        // Of a large vocabulary that takes a while, and the operator has one thread.
        let profiled = move |remote: RemoteModel| -> Found {
            let profile = model_profile(&remote.files[0].shown(), &remote.gguf);
            let profile = profile.map_err(|error| error_chain(&error))?;
            Ok(ResolvedFile {
                source,
                version: remote.version,
                profile,
            })
        };
        let opened = self.turns.open(&self.client, &fetched, profiled).await;
        opened.unwrap_or_else(|error| Err(error_chain(&error)))
    }
}

type Found = Result<ResolvedFile, String>;

/// What servers said last of the files that one Model names. Another Model's namespace may have another token, so nothing is shared with it.
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
                // This operator may have just started.
                let failure = failure_before(model, source, Timestamp::now(), now);
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

/// What the operator before could not resolve is not asked for at once: it fails for as long again as it has failed, within limits.
fn failure_before(
    model: &Model,
    source: &ModelSource,
    time: Timestamp,
    now: Instant,
) -> Option<Failure> {
    let status = model.status.as_ref()?;
    let failed = status.conditions.iter().find(|one| {
        one.type_ == RESOLVED
            && one.reason == RESOLVE_FAILED
            && one.observed_generation == model.metadata.generation
    })?;
    let of_draft = failed.message.strip_prefix(OF_DRAFT);
    let message = match model.spec.draft() == Some(source) {
        true => of_draft?,
        false if of_draft.is_some() => return None,
        false => &failed.message,
    };
    let age = time.duration_since(failed.last_transition_time.0);
    let pause = Duration::try_from(age).unwrap_or_default();
    let pause = pause.clamp(FIRST_PAUSE, LONGEST_FIRST_PAUSE);
    Some(Failure {
        message: message.to_owned(),
        pause,
        next: now + pause,
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
    use prima_crds::v1alpha1::model::ModelStatus;
    use prima_weights::{Hub, PUBLIC_HUB, Reach};
    use serde_json::json;
    use tokio::io::AsyncReadExt;

    use super::*;
    use crate::model_controller::test_world::no_api_server;

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
        // No API server: what these tests name is not on the hub.
        let hub = Hub::new(PUBLIC_HUB, None).unwrap();
        HeaderReader::new(HubTokens::new(no_api_server(), hub), client)
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
    async fn a_namespace_keeps_no_other_waiting() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = silent.local_addr().unwrap();
        let (reader, _read) = reader(Reach::anywhere());
        let asks = |namespace: &str, number: usize| {
            let mut model = model(&format!("http://{address}/{namespace}-{number}.gguf"));
            model.metadata.namespace = Some(namespace.to_owned());
            let mut looks = Looks::default();
            assert!(looks.look(&model, &model.spec.source, &reader).is_err());
            looks
        };
        let mut asked = Vec::new();
        let _many: Vec<Looks> = (0..100).map(|number| asks("many", number)).collect();
        let _one = asks("one", 0);
        // None is answered, so none makes room for others.
        let mut connections = Vec::new();
        for _ in 0..=HeaderTurns::OF_AN_OWNER {
            let (mut connection, _) = silent.accept().await.unwrap();
            let mut request = [0; 9];
            connection.read_exact(&mut request).await.unwrap();
            asked.push(String::from_utf8_lossy(&request[5..]).into_owned());
            connections.push(connection);
        }
        asked.sort();
        assert_eq!(asked, ["many", "many", "one-"]);
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
        let draft = named("http://nas/draft.gguf");
        model.spec.speculation = serde_json::from_value(json!({"draft": draft})).unwrap();
        let source = model.spec.source.clone();
        assert!(failure_before(&model, &source, Timestamp::now(), now).is_none());
        let of_draft = format!("{OF_DRAFT}no");
        for (message, generation, age, expected) in [
            ("no", 3, 1, Some((&source, 5))),
            ("no", 3, 20, Some((&source, 20))),
            ("no", 3, 86_400, Some((&source, 30))),
            (&of_draft, 3, 20, Some((&draft, 20))),
            // A clock that is years behind.
            ("no", 3, -100_000_000, Some((&source, 5))),
            // It is asked for something else now.
            ("no", 2, 60, None),
        ] {
            model.status = Some(ModelStatus {
                conditions: vec![Condition {
                    type_: RESOLVED.to_owned(),
                    status: "False".to_owned(),
                    reason: RESOLVE_FAILED.to_owned(),
                    message: message.to_owned(),
                    observed_generation: Some(generation),
                    last_transition_time: Time(Timestamp::from_second(1_000_000).unwrap()),
                }],
                ..ModelStatus::default()
            });
            let time = Timestamp::from_second(1_000_000 + age).unwrap();
            for asked in [&source, &draft] {
                let failure = failure_before(&model, asked, time, now);
                let expected = expected.filter(|(failed, _)| *failed == asked);
                assert_eq!(
                    failure.map(|failure| (failure.message, failure.pause)),
                    expected.map(|(_, seconds)| ("no".to_owned(), Duration::from_secs(seconds)))
                );
            }
        }
    }
}
