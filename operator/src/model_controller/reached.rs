//! Asks rank 0 of every ring that clients are sent to whether it answers, as they would. An agent that is gone cannot take back what it said, and
//! its Lease runs out only after a while: until then, clients would be sent to a machine that is off.
//!
//! A ring is judged only if it answered here in the last minute. Where the operator cannot reach a ring, what its agent says counts alone:
//! clients may reach it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use prima_crds::v1alpha1::model::Model;
use prima_crds::v1alpha1::ring_plan::{MemberState, RingPlan};
use prima_member_process::{Health, health_within};
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::Context;
use super::conditions::member_status;

/// By the uids of plans: why no client is to be sent there, though agents say that they are ready.
pub type Silent = BTreeMap<String, String>;

/// What the last look has shown.
#[derive(Default)]
pub struct Reached(Mutex<Arc<Silent>>);

impl Reached {
    pub fn silent(&self) -> Arc<Silent> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn set(&self, silent: Arc<Silent>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = silent;
    }
}

const INTERVAL: Duration = Duration::from_secs(1);
const DEADLINE: Duration = Duration::from_secs(2);
/// One lost packet is no silence.
const FAILURES: u32 = 2;
/// Longer than an agent's Lease lasts, which then tells more.
const JUDGED_FOR: Duration = Duration::from_secs(60);
/// Rings that have not answered here for a minute are asked more seldom.
const SELDOM: Duration = Duration::from_secs(15);
const CONCURRENCY: usize = 256;

/// What is known of one ring.
struct Asked {
    at: Instant,
    answered: Option<Instant>,
    failures: u32,
}

impl Asked {
    fn is_due(&self, now: Instant) -> bool {
        let answered_lately = self.answered_within(JUDGED_FOR, now);
        answered_lately || now.duration_since(self.at) >= SELDOM
    }

    fn answered_within(&self, limit: Duration, now: Instant) -> bool {
        self.answered
            .is_some_and(|answered| now.duration_since(answered) < limit)
    }

    /// `None`: it answered.
    fn note(&mut self, problem: Option<&str>, now: Instant) {
        self.at = now;
        match problem {
            None => (self.answered, self.failures) = (Some(now), 0),
            Some(_) => self.failures += 1,
        }
    }

    fn is_silent(&self, now: Instant) -> bool {
        self.failures >= FAILURES && self.answered_within(JUDGED_FOR, now)
    }
}

/// For ever. `changed` gets the Models whose rings fall silent, or answer again.
pub async fn keep(context: &Context, changed: mpsc::UnboundedSender<ObjectRef<Model>>) {
    let mut asked: HashMap<String, Asked> = HashMap::new();
    loop {
        let rings: Vec<Ring> = context.stores.plans().iter().filter_map(Ring::of).collect();
        asked.retain(|uid, _| rings.iter().any(|ring| ring.uid == *uid));
        let now = Instant::now();
        let due = rings.iter().filter(|ring| {
            let known = asked.get(&ring.uid);
            known.is_none_or(|asked| asked.is_due(now))
        });
        let answers = stream::iter(due).map(|ring| async move { (ring, ring.problem().await) });
        let answers: Vec<_> = answers.buffer_unordered(CONCURRENCY).collect().await;

        let now = Instant::now();
        if is_cut_off(&answers, &asked, now) {
            sleep(INTERVAL).await;
            continue;
        }
        let before = context.reached.silent();
        let mut silent = Silent::clone(&before);
        for (ring, problem) in answers {
            let known = asked.entry(ring.uid.clone()).or_insert(Asked {
                at: now,
                answered: None,
                failures: 0,
            });
            known.note(problem.as_deref(), now);
            match problem.filter(|_| known.is_silent(now)) {
                Some(problem) => silent.insert(ring.uid.clone(), problem),
                None => silent.remove(&ring.uid),
            };
        }
        silent.retain(|uid, _| asked.contains_key(uid));
        let is_other =
            |ring: &&Ring| before.contains_key(&ring.uid) != silent.contains_key(&ring.uid);
        let models: Vec<_> = rings
            .iter()
            .filter(is_other)
            .map(|ring| ring.model.clone())
            .collect();
        context.reached.set(Arc::new(silent));
        for model in models {
            // If nobody listens any more, nobody need know.
            let _ = changed.send(model);
        }
        sleep(INTERVAL.saturating_sub(now.elapsed())).await;
    }
}

/// Whether nobody answers of all who did lately, on several machines: then it is this one that is cut off.
fn is_cut_off(
    answers: &[(&Ring, Option<String>)],
    asked: &HashMap<String, Asked>,
    now: Instant,
) -> bool {
    let lately = |ring: &Ring| {
        let known = asked.get(&ring.uid);
        known.is_some_and(|asked| asked.answered_within(JUDGED_FOR, now))
    };
    let lately = answers.iter().filter(|(ring, _)| lately(ring));
    let hosts: HashSet<_> = lately.clone().map(|(ring, _)| ring.http.ip()).collect();
    hosts.len() > 1 && lately.into_iter().all(|(_, problem)| problem.is_some())
}

/// A ring whose rank 0 says that it is ready.
struct Ring {
    uid: String,
    model: ObjectRef<Model>,
    http: SocketAddr,
}

impl Ring {
    fn of(plan: &Arc<RingPlan>) -> Option<Self> {
        let rank0 = plan.spec.members.first()?;
        let state = member_status(plan, rank0)?.state;
        let host = rank0.host()?.parse().ok()?;
        let port = plan.spec.http_port?.try_into().ok()?;
        let model = &plan.owner_references().first()?.name;
        (state == MemberState::Ready).then_some(Self {
            uid: plan.uid()?,
            model: ObjectRef::new(model).within(&plan.namespace()?),
            http: SocketAddr::new(host, port),
        })
    }

    /// Why clients get no answer there, if so.
    async fn problem(&self) -> Option<String> {
        match health_within(DEADLINE, self.http).await {
            // What is wrong with a ring that says so, its agent tells.
            Health::Ready { .. } | Health::NotReady { .. } => None,
            Health::NoAnswer(why) => Some(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_judged_by_who_is_cut_off() {
        let now = Instant::now();
        let ring = |uid: &str, http: &str| Ring {
            uid: uid.to_owned(),
            model: ObjectRef::new("m"),
            http: http.parse().unwrap(),
        };
        let rings = [
            ring("a", "10.0.0.1:9400"),
            ring("b", "10.0.0.2:9400"),
            ring("never", "10.0.0.3:9400"),
        ];
        let known = |answered| Asked {
            at: now,
            answered,
            failures: 0,
        };
        let asked = [("a", Some(now)), ("b", Some(now)), ("never", None)];
        let asked = asked.map(|(uid, answered)| (uid.to_owned(), known(answered)));
        let asked = HashMap::from(asked);
        let is_cut_off = |problems: [bool; 3], count| {
            let problems = problems.map(|problem| problem.then(|| "refused".to_owned()));
            let answers: Vec<_> = rings.iter().zip(problems).take(count).collect();
            super::is_cut_off(&answers, &asked, now)
        };
        assert!(is_cut_off([true, true, true], 3) && is_cut_off([true, true, false], 3));
        assert!(!is_cut_off([true, false, true], 3));
        // One ring, or one machine, may well be off.
        assert!(!is_cut_off([true, true, true], 1));
    }

    #[test]
    fn only_who_has_answered_lately_is_silent() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut ring = Asked {
            at: start,
            answered: None,
            failures: 0,
        };
        // One that never answered here is asked seldom.
        for second in 0..5 {
            ring.note(Some("refused"), at(second));
            assert!(!ring.is_silent(at(second)));
        }
        assert!(!ring.is_due(at(18)) && ring.is_due(at(19)));
        ring.note(None, at(20));
        ring.note(Some("refused"), at(21));
        assert!(!ring.is_silent(at(21)) && ring.is_due(at(21)));
        ring.note(Some("refused"), at(22));
        assert!(ring.is_silent(at(22)) && ring.is_due(at(22)));
        // Then its agent's Lease tells.
        ring.note(Some("refused"), at(79));
        assert!(ring.is_silent(at(79)) && !ring.is_silent(at(80)));
        assert!(!ring.is_due(at(80)));
        // It is back.
        ring.note(None, at(94));
        assert!(!ring.is_silent(at(94)));
        ring.note(Some("refused"), at(95));
        assert!(!ring.is_silent(at(95)));
    }
}
