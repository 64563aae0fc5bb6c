//! Asks rank 0 of every ring that clients are sent to whether it answers, as they would. An agent that is gone or stands still cannot take back what
//! it said, and its Lease runs out only after a while: until then, clients would be sent to a machine that is off, or to a ring that says itself
//! that it is not ready.
//!
//! That a ring does not answer counts only if it did here in the last minute, or if another operator found it silent just before. Where the operator cannot reach a ring, what its agent says counts
//! alone: clients may reach it. An instance that waits to lead asks, too: if the leader's machine goes, and a ring's rank 0 with it, it knows
//! already that this ring answered.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::mem::discriminant;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use prima_crds::v1alpha1::model::Model;
use prima_crds::v1alpha1::ring_plan::{MemberState, RingPlan};
use prima_member_process::{Health, health_within};
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::conditions::member_status;
use crate::cluster::world::{Stores, lock};

/// Why no client is to be sent to a ring, though its agent says that it is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotReady {
    /// Rank 0 does not answer; what came instead.
    NotReached(String),
    /// Rank 0 says so.
    Said(String),
}

/// By the uids of plans.
pub type Unready = BTreeMap<String, NotReady>;

/// Of one ring.
pub fn of<'a>(unready: &'a Unready, plan: &RingPlan) -> Option<&'a NotReady> {
    unready.get(plan.metadata.uid.as_ref()?)
}

/// What the last look has shown, and what is known of each ring, by the uids of plans.
#[derive(Default)]
pub struct Reached {
    unready: Mutex<Arc<Unready>>,
    asked: Mutex<HashMap<String, Asked>>,
}

impl Reached {
    pub fn unready(&self) -> Arc<Unready> {
        lock(&self.unready).clone()
    }

    /// Those of all rings that are to be asked now. Forgets others.
    fn due<'a>(&self, rings: &'a [Ring], now: Instant) -> Vec<&'a Ring> {
        let mut asked = lock(&self.asked);
        asked.retain(|uid, _| rings.iter().any(|ring| ring.uid == *uid));
        let is_due = |ring: &&Ring| {
            let known = asked.get(&ring.uid);
            known.is_none_or(|asked| asked.is_due(now))
        };
        rings.iter().filter(is_due).collect()
    }

    /// Another operator has found that this ring is silent, whose rank 0 says that it is ready. Until it answers here, that is believed, for as long
    /// as if it had just answered.
    pub fn believe_silent(&self, plan: &Arc<RingPlan>) {
        let Some(Ring { uid, .. }) = Ring::of(plan) else {
            return;
        };
        let now = Instant::now();
        let mut asked = lock(&self.asked);
        if asked.contains_key(&uid) {
            return;
        }
        let answered = Some(now);
        let failures = FAILURES;
        let silent = Asked {
            at: now,
            answered,
            failures,
            hearsay: true,
        };
        asked.insert(uid.clone(), silent);
        let mut unready = lock(&self.unready);
        let why = "another operator did not reach it".to_owned();
        Arc::make_mut(&mut unready).insert(uid, NotReady::NotReached(why));
    }

    /// What is known after these came; `None`: it is this machine that is cut off.
    fn note(&self, answers: Vec<(&Ring, Health)>, now: Instant) -> Option<Unready> {
        let mut asked = lock(&self.asked);
        if is_cut_off(&answers, &asked, now) {
            return None;
        }
        let mut unready = Unready::clone(&self.unready());
        for (ring, came) in answers {
            let known = asked.entry(ring.uid.clone());
            let known = known.or_insert_with(|| Asked::new(now));
            let was = unready.remove(&ring.uid);
            if let Some(is) = known.note(came, was, now) {
                unready.insert(ring.uid.clone(), is);
            }
        }
        unready.retain(|uid, _| asked.contains_key(uid));
        Some(unready)
    }
}

/// From one look to the next, unless one takes longer.
const INTERVAL: Duration = Duration::from_millis(500);
/// Longer than it takes to connect when the first packet is lost, which is sent again after a second.
const DEADLINE: Duration = Duration::from_millis(1500);
/// Who answers at all does so within that.
const AT_ONCE: Duration = Duration::from_millis(500);
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
    /// Only another operator has reached it so far.
    hearsay: bool,
}

impl Asked {
    fn new(at: Instant) -> Self {
        Self {
            at,
            answered: None,
            failures: 0,
            hearsay: false,
        }
    }

    fn is_due(&self, now: Instant) -> bool {
        let answered_lately = self.answered_within(JUDGED_FOR, now);
        answered_lately || now.duration_since(self.at) >= SELDOM
    }

    fn answered_within(&self, limit: Duration, now: Instant) -> bool {
        self.answered
            .is_some_and(|answered| now.duration_since(answered) < limit)
    }

    /// Takes in what came now, after `before` was known, and says what is known then.
    fn note(&mut self, came: Health, before: Option<NotReady>, now: Instant) -> Option<NotReady> {
        self.at = now;
        let said = match came {
            Health::NoAnswer(why) => {
                self.failures += 1;
                return match self.answered_within(JUDGED_FOR, now) {
                    true if self.failures >= FAILURES => Some(NotReady::NotReached(why)),
                    true => before,
                    false => None,
                };
            }
            Health::NotReady { why, .. } => Some(NotReady::Said(why)),
            Health::Ready { .. } => None,
        };
        (self.answered, self.failures) = (Some(now), 0);
        self.hearsay = false;
        said
    }
}

/// For ever. `changed` gets the Models whose rings are not to be sent clients any more, or again.
pub async fn keep(
    stores: &Stores,
    reached: &Reached,
    changed: &mpsc::UnboundedSender<ObjectRef<Model>>,
) {
    loop {
        let begun = Instant::now();
        let rings: Vec<Ring> = stores.plans().iter().filter_map(Ring::of).collect();
        let due = reached.due(&rings, begun);
        let answers = stream::iter(due).map(|ring| async move { (ring, ring.health().await) });
        let answers: Vec<_> = answers.buffer_unordered(CONCURRENCY).collect().await;

        let before = reached.unready();
        let Some(unready) = reached.note(answers, Instant::now()) else {
            sleep(INTERVAL).await;
            continue;
        };
        // Not for other words.
        let kind = |known: &Unready, ring: &Ring| known.get(&ring.uid).map(discriminant);
        let is_other = |ring: &&Ring| kind(&before, ring) != kind(&unready, ring);
        let models: Vec<_> = rings
            .iter()
            .filter(is_other)
            .map(|ring| ring.model.clone())
            .collect();
        *lock(&reached.unready) = Arc::new(unready);
        for model in models {
            // Whoever only waits to lead has nobody who listens.
            let _ = changed.send(model);
        }
        sleep(INTERVAL.saturating_sub(begun.elapsed())).await;
    }
}

/// Whether nobody answers of all who did lately, on several machines: then it is this one that is cut off.
fn is_cut_off(answers: &[(&Ring, Health)], asked: &HashMap<String, Asked>, now: Instant) -> bool {
    let lately = |ring: &Ring| {
        let known = asked.get(&ring.uid);
        known.is_some_and(|asked| !asked.hearsay && asked.answered_within(JUDGED_FOR, now))
    };
    let lately = answers.iter().filter(|(ring, _)| lately(ring));
    let hosts: HashSet<_> = lately.clone().map(|(ring, _)| ring.http.ip()).collect();
    let no_answer = |came: &Health| matches!(came, Health::NoAnswer(_));
    hosts.len() > 1 && lately.into_iter().all(|(_, came)| no_answer(came))
}

/// Whether rank 0 says that the ring is ready, asked once more.
pub async fn answers_now(plan: &RingPlan) -> bool {
    match http(plan) {
        Some(http) => matches!(health_within(AT_ONCE, http).await, Health::Ready { .. }),
        None => false,
    }
}

/// Where rank 0 is asked.
fn http(plan: &RingPlan) -> Option<SocketAddr> {
    let host = plan.spec.members.first()?.host()?.parse().ok()?;
    let port = plan.spec.http_port?.try_into().ok()?;
    Some(SocketAddr::new(host, port))
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
        let http = http(plan)?;
        let model = &plan.owner_references().first()?.name;
        (state == MemberState::Ready).then_some(Self {
            uid: plan.uid()?,
            model: ObjectRef::new(model).within(&plan.namespace()?),
            http,
        })
    }

    async fn health(&self) -> Health {
        health_within(DEADLINE, self.http).await
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model_controller::test_world::ring;

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
            answered,
            ..Asked::new(now)
        };
        let asked = [("a", Some(now)), ("b", Some(now)), ("never", None)];
        let asked = asked.map(|(uid, answered)| (uid.to_owned(), known(answered)));
        let asked = HashMap::from(asked);
        let is_cut_off = |problems: [bool; 3], count| {
            let came = problems.map(|problem| if problem { no_answer() } else { ready() });
            let answers: Vec<_> = rings.iter().zip(came).take(count).collect();
            super::is_cut_off(&answers, &asked, now)
        };
        assert!(is_cut_off([true, true, true], 3) && is_cut_off([true, true, false], 3));
        assert!(!is_cut_off([true, false, true], 3));
        // One ring, or one machine, may well be off.
        assert!(!is_cut_off([true, true, true], 1));
    }

    fn ready() -> Health {
        Health::Ready {
            speed: None,
            expert_miss_percent: None,
        }
    }

    fn no_answer() -> Health {
        Health::NoAnswer("refused".to_owned())
    }

    #[test]
    fn a_ring_that_says_that_it_is_not_ready_is_believed_at_once() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut ring = Asked::new(start);
        let not_ready = Health::NotReady {
            why: "it stands still".to_owned(),
            fails_at: None,
        };
        let said = Some(NotReady::Said("it stands still".to_owned()));
        assert_eq!(ring.note(not_ready, None, at(1)), said);
        // It takes more than one lost packet to know something else.
        assert_eq!(ring.note(no_answer(), said.clone(), at(2)), said);
        let not_reached = Some(NotReady::NotReached("refused".to_owned()));
        assert_eq!(ring.note(no_answer(), said, at(3)), not_reached);
        assert_eq!(ring.note(ready(), not_reached, at(4)), None);
    }

    #[test]
    fn what_another_operator_found_silent_is_so_for_a_minute() {
        let reached = Reached::default();
        let mut plan = RingPlan::clone(&ring(&[(0, 4)], 0, 0));
        let owner =
            json!({"apiVersion": "prima.dev/v1alpha1", "kind": "Model", "name": "m", "uid": "m"});
        let metadata =
            json!({"name": "m-1", "namespace": "home", "uid": "a", "ownerReferences": [owner]});
        plan.metadata = serde_json::from_value(metadata).unwrap();
        plan.spec.http_port = Some(9400);
        let rank0 = plan.spec.members[0].name.clone();
        let mut says = |state: &str| {
            let status = json!({"members": [{"name": rank0, "state": state}]});
            plan.status = Some(serde_json::from_value(status).unwrap());
            Arc::new(plan.clone())
        };
        // One that loads says so itself.
        reached.believe_silent(&says("Loading"));
        assert!(reached.unready().is_empty());
        let plan = says("Ready");
        reached.believe_silent(&plan);
        let is_silent = || of(&reached.unready(), &plan).is_some();
        assert!(is_silent());
        let start = Instant::now();
        let asked = Ring {
            uid: "a".to_owned(),
            model: ObjectRef::new("m"),
            http: "10.0.0.1:9400".parse().unwrap(),
        };
        let comes = |health, seconds| {
            let now = start + Duration::from_secs(seconds);
            let unready = reached.note(vec![(&asked, health)], now).unwrap();
            *lock(&reached.unready) = Arc::new(unready);
        };
        comes(no_answer(), 1);
        assert!(is_silent());
        comes(no_answer(), 61);
        assert!(!is_silent(), "then its agent's word counts");
        // What is known here counts more.
        reached.believe_silent(&plan);
        assert!(!is_silent());
        comes(ready(), 62);
        assert!(!is_silent());
    }

    #[test]
    fn only_who_has_answered_lately_is_not_reached() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut ring = Asked::new(start);
        let mut known = None;
        let mut is_silent = |ring: &mut Asked, came: Health, second| {
            known = ring.note(came, known.take(), at(second));
            known.is_some()
        };
        // One that never answered here is asked seldom.
        for second in 0..5 {
            assert!(!is_silent(&mut ring, no_answer(), second));
        }
        assert!(!ring.is_due(at(18)) && ring.is_due(at(19)));
        assert!(!is_silent(&mut ring, ready(), 20));
        assert!(!is_silent(&mut ring, no_answer(), 21));
        assert!(ring.is_due(at(21)));
        assert!(is_silent(&mut ring, no_answer(), 22));
        assert!(ring.is_due(at(22)));
        // Then its agent's Lease tells.
        assert!(is_silent(&mut ring, no_answer(), 79));
        assert!(!is_silent(&mut ring, no_answer(), 80));
        assert!(!ring.is_due(at(80)));
        // It is back.
        assert!(!is_silent(&mut ring, ready(), 94));
        assert!(!is_silent(&mut ring, no_answer(), 95));
    }
}
