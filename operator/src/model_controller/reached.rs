//! Asks rank 0 of every ring that clients are sent to whether it answers, as they would. An agent that is gone or stands still cannot take back what
//! it said, and its Lease runs out only after a while: until then, clients would be sent to a machine that is off, or to a ring that says itself
//! that it is not ready.
//!
//! That a ring does not answer counts only if it did here in the last minute, or if another operator found it silent just before. Where the
//! operator cannot reach a ring, what its agent says counts alone: clients may reach it. An instance that waits to lead asks, too: if the leader's
//! machine goes, and a ring's rank 0 with it, it knows already that this ring answered.
//!
//! Each ring is asked on its own, twice a second, so that one that is silent does not keep others waiting.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::mem::discriminant;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::select;
use futures::stream::FuturesUnordered;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use prima_crds::v1alpha1::model::Model;
use prima_crds::v1alpha1::ring_plan::{MemberState, RingPlan};
use prima_member_process::{Health, health_within};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep};

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

/// Of one ring. Of one whose rank 0 does not say that it is ready, nothing is known here.
pub fn of<'a>(unready: &'a Unready, plan: &RingPlan) -> Option<&'a NotReady> {
    let known = unready.get(plan.metadata.uid.as_ref()?);
    known.filter(|_| says_ready(plan))
}

/// Which rings are not ready, and what is known of each, by the uids of plans.
#[derive(Default)]
pub struct Reached {
    unready: Mutex<Arc<Unready>>,
    asked: Mutex<HashMap<String, Asked>>,
}

impl Reached {
    pub fn unready(&self) -> Arc<Unready> {
        lock(&self.unready).clone()
    }

    /// Which of `rings` are to be asked now, those first that were not asked for longest. What is known of a ring that is not in `rings` is
    /// forgotten.
    fn due(&self, rings: Vec<Ring>, now: Instant) -> Vec<Ring> {
        let uids: HashSet<&str> = rings.iter().map(|ring| &*ring.uid).collect();
        let mut asked = lock(&self.asked);
        asked.retain(|uid, _| uids.contains(&**uid));
        let mut unready = lock(&self.unready);
        if unready.keys().any(|uid| !uids.contains(&**uid)) {
            Arc::make_mut(&mut unready).retain(|uid, _| uids.contains(&**uid));
        }
        let is_due = |ring: &Ring| {
            let known = asked.get(&ring.uid);
            known.is_none_or(|asked| asked.is_due(now))
        };
        let mut due: Vec<Ring> = rings.into_iter().filter(is_due).collect();
        due.sort_by_key(|ring| asked.get(&ring.uid).map(|asked| asked.at));
        due
    }

    /// Another operator has found that this ring is silent, whose rank 0 says that it is ready. If it has not answered here yet, that is believed
    /// until it does, for as long as if it had just answered.
    pub fn believe_silent(&self, plan: &Arc<RingPlan>) {
        let Some(Ring { uid, http, .. }) = Ring::of(plan) else {
            return;
        };
        let now = Instant::now();
        let mut asked = lock(&self.asked);
        let known = asked.entry(uid.clone());
        let known = known.or_insert_with(|| Asked::new(http.ip(), now));
        if known.answered.is_some() {
            return;
        }
        known.answered = Some(now);
        known.found_silent = true;
        let mut unready = lock(&self.unready);
        let why = "another operator did not reach it".to_owned();
        Arc::make_mut(&mut unready).insert(uid, NotReady::NotReached(why));
    }

    /// Takes in what came of a ring that was asked at `begun`, and says whether more than the wording changed.
    fn note(&self, ring: &Ring, came: Health, begun: Instant, now: Instant) -> bool {
        let mut asked = lock(&self.asked);
        let mut unready = lock(&self.unready);
        let is_silent = matches!(came, Health::NoAnswer(_));
        let is_cut_off = is_silent && is_cut_off(ring, begun, &asked, now);
        let known = asked.entry(ring.uid.clone());
        let known = known.or_insert_with(|| Asked::new(ring.http.ip(), begun));
        known.at = begun;
        let was = unready.get(&ring.uid);
        let is = match known.note(came, is_cut_off, now) {
            Known::NothingAgainst => None,
            Known::NotReady(why) => Some(why),
            Known::AsBefore => return false,
        };
        if is.as_ref() == was {
            return false;
        }
        let changed = is.as_ref().map(discriminant) != was.map(discriminant);
        let unready = Arc::make_mut(&mut unready);
        match is {
            Some(is) => unready.insert(ring.uid.clone(), is),
            None => unready.remove(&ring.uid),
        };
        changed
    }
}

/// From one look at all rings to the next. A new one is asked at once: whoever was never asked cannot be found silent.
const LOOK: Duration = Duration::from_millis(100);
/// From one time that a ring is asked to the next, unless its answer takes longer.
const INTERVAL: Duration = Duration::from_millis(500);
/// Longer than it takes to connect when the first packet is lost, which is sent again after a second.
const DEADLINE: Duration = Duration::from_millis(1500);
/// One lost packet is no silence: who has not answered by then, or has refused, is asked once more.
const AGAIN: Duration = Duration::from_millis(500);
/// For one more question after two have failed: no time is needed for a lost packet.
const AT_ONCE: Duration = Duration::from_millis(500);
/// Longer than an agent's Lease lasts, which then tells more.
const JUDGED_FOR: Duration = Duration::from_secs(60);
/// Longer than [`JUDGED_FOR`], by more than two questions take: so the last of those that fell silent together is not judged alone.
const WITNESS_FOR: Duration = Duration::from_secs(65);
/// The longest time between two answers of a ring that goes on answering. After one lost packet it is a second; after the link was gone, it is
/// longer.
const GAP: Duration = Duration::from_millis(1250);
/// A refusal is judged only after this: then others were asked after the second question, too, and their answers are there.
const OTHERS_ANSWERED: Duration = Duration::from_millis(1300);
/// Rings that have not answered here for a minute are asked more seldom.
const SELDOM: Duration = Duration::from_secs(5);
/// Rings that are asked at the same time.
const CONCURRENCY: usize = 256;

/// What is known of one ring.
struct Asked {
    /// Rings on one host may fall silent together.
    host: IpAddr,
    /// When it was asked what was noted last.
    at: Instant,
    answered: Option<Instant>,
    /// Since when it had answered without a gap, when it last did.
    answers_since: Option<Instant>,
    /// It was judged, here or by another operator, and has not answered since. So it is no sign of whether this machine is cut off.
    found_silent: bool,
}

/// What an answer, or none, tells of a ring.
#[derive(Debug, PartialEq, Eq)]
enum Known {
    /// Its agent's word counts.
    NothingAgainst,
    NotReady(NotReady),
    /// It cannot be judged.
    AsBefore,
}

impl Asked {
    fn new(host: IpAddr, at: Instant) -> Self {
        Self {
            host,
            at,
            answered: None,
            answers_since: None,
            found_silent: false,
        }
    }

    fn is_due(&self, now: Instant) -> bool {
        let pause = match self.answered_within(JUDGED_FOR, now) {
            true => INTERVAL,
            false => SELDOM,
        };
        now.duration_since(self.at) >= pause
    }

    fn answered_within(&self, limit: Duration, now: Instant) -> bool {
        self.answered
            .is_some_and(|answered| now.duration_since(answered) < limit)
    }

    /// Takes in what came now. `is_cut_off`: if nothing came, it may be this machine's fault.
    fn note(&mut self, came: Health, is_cut_off: bool, now: Instant) -> Known {
        let known = match came {
            Health::NoAnswer(_) if !self.answered_within(JUDGED_FOR, now) => {
                return Known::NothingAgainst;
            }
            Health::NoAnswer(_) if is_cut_off => return Known::AsBefore,
            Health::NoAnswer(why) => {
                self.found_silent = true;
                return Known::NotReady(NotReady::NotReached(why));
            }
            Health::NotReady { why, .. } => Known::NotReady(NotReady::Said(why)),
            Health::Ready { .. } => Known::NothingAgainst,
        };
        if !self.answered_within(GAP, now) {
            self.answers_since = Some(now);
        }
        self.answered = Some(now);
        self.found_silent = false;
        known
    }
}

/// Whether this ring, which was asked at `begun` and is silent, may be so because it is this machine that is cut off: on other machines there are
/// rings that answered until lately, and no ring has gone on answering. (A ring on the operator's own machine always does. With one there, the
/// operator never takes itself for cut off.)
fn is_cut_off(ring: &Ring, begun: Instant, asked: &HashMap<String, Asked>, now: Instant) -> bool {
    let others = asked.iter().filter(|(uid, other)| {
        **uid != ring.uid && !other.found_silent && other.answered_within(WITNESS_FOR, now)
    });
    // What came before the second question is no sign: the link may have gone since.
    let second = begun + AGAIN;
    let goes_on = |other: &Asked| {
        let without_gap = other.answers_since.is_some_and(|since| since <= begun);
        without_gap && other.answered >= Some(second)
    };
    let mut others = others.map(|(_, other)| other);
    let elsewhere = others.clone().any(|other| other.host != ring.http.ip());
    elsewhere && !others.any(goes_on)
}

/// For ever. `changed` gets the Models whose rings are not to be sent clients any more, or again.
pub async fn keep(
    stores: &Stores,
    reached: &Reached,
    changed: &mpsc::UnboundedSender<ObjectRef<Model>>,
) {
    let mut looks = interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut asking = FuturesUnordered::new();
    let mut being_asked = HashSet::new();
    loop {
        tokio::select! {
            _ = looks.tick() => {
                let rings = stores.plans().iter().filter_map(Ring::of).collect();
                let begun = Instant::now();
                for ring in reached.due(rings, begun) {
                    if asking.len() < CONCURRENCY && being_asked.insert(ring.uid.clone()) {
                        asking.push(async move { (begun, ring.health().await, ring) });
                    }
                }
            }
            Some((begun, came, ring)) = asking.next() => {
                being_asked.remove(&ring.uid);
                if reached.note(&ring, came, begun, Instant::now()) {
                    // Whoever only waits to lead has nobody who listens.
                    let _ = changed.send(ring.model);
                }
            }
        }
    }
}

/// Whether rank 0 says that the ring is ready, asked once more.
pub async fn answers_now(plan: &RingPlan) -> bool {
    match http(plan) {
        Some(http) => matches!(health_within(AT_ONCE, http).await, Health::Ready { .. }),
        None => false,
    }
}

fn says_ready(plan: &RingPlan) -> bool {
    let rank0 = plan.spec.members.first();
    let rank0 = rank0.and_then(|rank0| member_status(plan, rank0));
    rank0.is_some_and(|rank0| rank0.state == MemberState::Ready)
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
        let http = http(plan)?;
        let model = &plan.owner_references().first()?.name;
        says_ready(plan).then_some(Self {
            uid: plan.uid()?,
            model: ObjectRef::new(model).within(&plan.namespace()?),
            http,
        })
    }

    /// What comes first of two questions. `NoAnswer` if both fail.
    async fn health(&self) -> Health {
        let others_answered = sleep(OTHERS_ANSWERED);
        let ask = async |wait| {
            sleep(wait).await;
            health_within(DEADLINE, self.http).await
        };
        let (first, again) = (pin!(ask(Duration::ZERO)), pin!(ask(AGAIN)));
        let (came, other) = select(first, again).await.factor_first();
        let came = match came {
            Health::NoAnswer(_) => other.await,
            answer => answer,
        };
        if matches!(came, Health::NoAnswer(_)) {
            others_answered.await;
        }
        came
    }
}

#[cfg(test)]
mod tests {
    use std::future;
    use std::net::Ipv4Addr;

    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpSocket};

    use super::*;
    use crate::model_controller::test_world::ring;

    const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    #[test]
    fn nobody_is_judged_by_who_is_cut_off() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let reached = Reached::default();
        let (a, b) = (at_host("a", "10.0.0.1"), at_host("b", "10.0.0.2"));
        let neighbour = at_host("neighbour", "10.0.0.1");
        let comes = |ring: &Ring, health, begun, now| {
            let changed = reached.note(ring, health, at(begun), at(now));
            (changed, reached.unready().contains_key(&ring.uid))
        };
        // One machine may well be off.
        for ring in [&a, &neighbour] {
            assert_eq!(comes(ring, ready(), 0, 1), (false, false));
            assert_eq!(comes(ring, no_answer(), 500, 2500), (true, true));
            assert_eq!(comes(ring, ready(), 3000, 3001), (true, false));
        }
        // All fall silent at once.
        let answers = |ring: &Ring, times: &[u64]| {
            for &time in times {
                assert!(!comes(ring, ready(), time - 2, time).1);
            }
        };
        answers(&b, &[3002, 3502]);
        for ring in [&a, &b, &neighbour] {
            assert_eq!(comes(ring, no_answer(), 3500, 5500), (false, false));
        }
        // What is said when the link is back is no sign of what was asked before.
        answers(&b, &[5502, 6002]);
        assert_eq!(comes(&a, no_answer(), 5000, 7000), (false, false));
        // Nor is what was said before the second question.
        answers(&b, &[6502, 7002, 7502]);
        assert_eq!(comes(&a, no_answer(), 7004, 8004), (false, false));
        // Nor are answers with a gap, during which the link may have been gone.
        answers(&b, &[8802]);
        assert_eq!(comes(&a, no_answer(), 7504, 8804), (false, false));
        // It goes on answering, so they are silent.
        answers(&b, &[9302, 9802]);
        assert_eq!(comes(&a, no_answer(), 8802, 9804), (true, true));
        answers(&b, &[10_302, 10_802]);
        assert_eq!(comes(&neighbour, no_answer(), 8802, 10_804), (true, true));
        // Those that are known to be silent are no sign of anything.
        assert_eq!(comes(&b, no_answer(), 11_000, 13_000), (true, true));
    }

    #[test]
    fn the_last_to_fall_silent_is_not_judged_alone() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let reached = Reached::default();
        let (a, b) = (at_host("a", "10.0.0.1"), at_host("b", "10.0.0.2"));
        reached.note(&a, ready(), at(0), at(1));
        reached.note(&b, ready(), at(0), at(8));
        // One's minute is over, the other's is not.
        for ring in [&a, &b] {
            assert!(!reached.note(ring, no_answer(), at(58_003), at(60_003)));
        }
        assert!(reached.unready().is_empty());
    }

    #[test]
    fn rings_that_are_no_more_are_forgotten() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let reached = Reached::default();
        let rings = || ["a", "b", "new"].map(|uid| at_host(uid, "10.0.0.1"));
        let [a, b, _] = rings();
        reached.note(&b, ready(), at(0), at(0));
        reached.note(&a, ready(), at(1), at(1));
        reached.note(&a, no_answer(), at(2), at(4));
        let due = |rings: Vec<Ring>| {
            let due = reached.due(rings, at(5));
            due.into_iter().map(|ring| ring.uid).collect::<Vec<_>>()
        };
        assert_eq!(due(rings().into()), ["new", "b", "a"]);
        assert_eq!(reached.unready().len(), 1);
        assert_eq!(due(vec![b]), ["b"]);
        assert!(reached.unready().is_empty());
        // It is asked as a new one.
        assert!(!reached.note(&a, no_answer(), at(6), at(8)));
    }

    /// A ring whose rank 0 is on this host.
    fn at_host(uid: &str, host: &str) -> Ring {
        Ring {
            uid: uid.to_owned(),
            model: ObjectRef::new("m"),
            http: SocketAddr::new(host.parse().unwrap(), 9400),
        }
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
    fn a_ring_that_says_that_it_is_not_ready_is_believed() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut ring = Asked::new(HOST, start);
        let not_ready = Health::NotReady {
            why: "it stands still".to_owned(),
            fails_at: None,
        };
        let said = NotReady::Said("it stands still".to_owned());
        assert_eq!(ring.note(not_ready, false, at(1)), Known::NotReady(said));
        let not_reached = NotReady::NotReached("refused".to_owned());
        let is = ring.note(no_answer(), false, at(3));
        assert_eq!(is, Known::NotReady(not_reached));
        assert_eq!(ring.note(ready(), false, at(4)), Known::NothingAgainst);
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
        // This one has asked, too, while it waited to lead, but was never answered.
        reached.note(
            &at_host("a", "10.0.0.1"),
            no_answer(),
            Instant::now(),
            Instant::now(),
        );
        reached.believe_silent(&plan);
        let is_silent = || of(&reached.unready(), &plan).is_some();
        // Nothing is known of one that does not say that it is ready.
        assert!(is_silent() && of(&reached.unready(), &says("Loading")).is_none());
        let start = Instant::now();
        let asked = at_host("a", "10.0.0.1");
        let comes = |health, seconds| {
            let now = start + Duration::from_secs(seconds);
            reached.note(&asked, health, now, now);
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
        let mut ring = Asked::new(HOST, start);
        let is_silent = |ring: &mut Asked, came: Health, second| {
            ring.note(came, false, at(second)) != Known::NothingAgainst
        };
        // One that never answered here is asked seldom.
        assert!(!is_silent(&mut ring, no_answer(), 4));
        assert!(!ring.is_due(at(4)) && ring.is_due(at(5)));
        assert!(!is_silent(&mut ring, ready(), 20));
        assert!(is_silent(&mut ring, no_answer(), 21));
        ring.at = at(21);
        assert!(!ring.is_due(at(21)) && ring.is_due(at(21) + INTERVAL));
        // Then its agent's Lease tells.
        assert!(is_silent(&mut ring, no_answer(), 79));
        assert!(!is_silent(&mut ring, no_answer(), 80));
        ring.at = at(80);
        assert!(!ring.is_due(at(84)) && ring.is_due(at(85)));
        // It is back.
        assert!(!is_silent(&mut ring, ready(), 94));
        assert!(is_silent(&mut ring, no_answer(), 95));
    }

    #[tokio::test]
    async fn a_ring_is_silent_when_two_questions_fail() {
        // What comes of each question: it is closed at once, not answered, or answered.
        for (first, second, least) in [
            ("answered", "answered", Duration::ZERO),
            ("held", "answered", AGAIN),
            ("closed", "answered", AGAIN),
            ("held", "held", AGAIN + DEADLINE),
        ] {
            let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut ring = at_host("a", "127.0.0.1");
            ring.http = server.local_addr().unwrap();
            let serving = tokio::spawn(async move {
                let mut held = Vec::new();
                for comes in [first, second] {
                    let (mut client, _) = server.accept().await.unwrap();
                    if comes == "closed" {
                        continue;
                    }
                    assert!(client.read(&mut [0; 1024]).await.unwrap() > 0);
                    if comes == "answered" {
                        client
                            .write_all(b"HTTP/1.0 200 OK\r\n\r\n{}")
                            .await
                            .unwrap();
                    } else {
                        held.push(client);
                    }
                }
                future::pending::<()>().await;
            });
            let begun = Instant::now();
            let came = ring.health().await;
            let is_silent = matches!(came, Health::NoAnswer(_));
            assert_eq!(is_silent, second == "held", "{first}, {second}: {came:?}");
            assert!(begun.elapsed() >= least, "{first}, {second}");
            serving.abort();
        }
        // Nobody listens there.
        let bound = TcpSocket::new_v4().unwrap();
        bound.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut ring = at_host("a", "127.0.0.1");
        ring.http = bound.local_addr().unwrap();
        let begun = Instant::now();
        assert!(matches!(ring.health().await, Health::NoAnswer(_)));
        assert!(begun.elapsed() >= OTHERS_ANSWERED);
    }
}
