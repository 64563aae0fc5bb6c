//! Asks rank 0 of every ring that clients are sent to whether it answers, as they would. An agent that is gone or stands still cannot take back what
//! it said, and its Lease runs out only after a while: until then, clients would be sent to a machine that is off, or to a ring that says itself
//! that it is not ready.
//!
//! That a ring does not answer counts only if it did here in the last minute, or if another operator found it silent just before. Where the
//! operator cannot reach a ring, what its agent says counts alone: clients may reach it. An instance that waits to lead asks, too: if the leader's
//! machine goes, and a ring's rank 0 with it, it knows already that this ring answered. And a ring that has loaded is asked before it is ready, so
//! that it has answered by then.
//!
//! Each ring is asked on its own, twice a second, so that one that is silent does not keep others waiting. Nor does a question wait for the one
//! before: an answer that comes late tells little of now, and on a slow link none comes sooner.

#[cfg(test)]
mod tests;
mod way;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::mem::discriminant;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::{Either, select};
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
use way::Way;

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
    known.filter(|_| rank0_has_come_to(plan, MemberState::Ready))
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

    /// The plans to whose rank 0 packets get lost, by their uids.
    pub fn lossy(&self) -> BTreeSet<String> {
        let asked = lock(&self.asked);
        let lossy = asked.iter().filter(|(_, known)| known.way.loses_packets);
        lossy.map(|(uid, _)| uid.clone()).collect()
    }

    /// Which of `rings` are to be asked now, those first that were not asked for longest. `plans`: the uids of all that there are. A ring that has
    /// none is forgotten. Of one that is not in `rings`, as after a member has died, it is known when it answered last: if it is silent when it comes
    /// back, that counts. `last_asked`: of those in `rings`, when each was.
    fn due(
        &self,
        rings: Vec<Ring>,
        plans: &HashSet<String>,
        last_asked: &mut HashMap<String, Instant>,
        now: Instant,
    ) -> Vec<Ring> {
        let uids: HashSet<&str> = rings.iter().map(|ring| &*ring.uid).collect();
        last_asked.retain(|uid, _| uids.contains(&**uid));
        let mut asked = lock(&self.asked);
        asked.retain(|uid, _| plans.contains(uid));
        for (_, away) in asked.iter_mut().filter(|(uid, _)| !uids.contains(&***uid)) {
            away.is_witness = false;
            away.answers_since = None;
        }
        let mut unready = lock(&self.unready);
        if unready.keys().any(|uid| !uids.contains(&**uid)) {
            Arc::make_mut(&mut unready).retain(|uid, _| uids.contains(&**uid));
        }
        let is_due = |ring: &Ring| {
            let known = asked.get(&ring.uid);
            let pause = known.map_or(SELDOM, |known| known.pause(now));
            let last = last_asked.get(&ring.uid);
            last.is_none_or(|last| now.duration_since(*last) >= pause)
        };
        let mut due: Vec<Ring> = rings.into_iter().filter(is_due).collect();
        due.sort_by_key(|ring| last_asked.get(&ring.uid).copied());
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
        let known = known.or_insert_with(|| Asked::new(http.ip()));
        if known.answered.is_some() {
            return;
        }
        known.answered = Some(now);
        known.is_witness = false;
        let mut unready = lock(&self.unready);
        let why = "another operator did not reach it".to_owned();
        Arc::make_mut(&mut unready).insert(uid, NotReady::NotReached(why));
    }

    /// Takes in what came of a ring that was asked at `begun`, unless something newer is known; and says whether more than the wording changed.
    fn note(&self, ring: &Ring, came: Health, begun: Instant, now: Instant) -> bool {
        let mut asked = lock(&self.asked);
        let mut unready = lock(&self.unready);
        let is_silent = matches!(came, Health::NoAnswer(_));
        let is_cut_off = is_silent && is_cut_off(ring, begun, &asked, now);
        let known = asked.entry(ring.uid.clone());
        let known = known.or_insert_with(|| Asked::new(ring.http.ip()));
        if known.noted > Some(begun) {
            return false;
        }
        known.noted = Some(begun);
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

    /// Takes in that a ring was answered, by the first question or late; and says whether that changes what is known of the way there.
    fn note_way(&self, ring: &Ring, is_late: bool) -> bool {
        let mut asked = lock(&self.asked);
        let known = asked.get_mut(&ring.uid);
        known.is_some_and(|known| known.way.note(is_late))
    }
}

/// From one look at all rings to the next. A new one is asked at once: whoever was never asked cannot be found silent.
const LOOK: Duration = Duration::from_millis(100);
/// From one time that a ring is asked to the next.
const INTERVAL: Duration = Duration::from_millis(500);
/// Longer than it takes to connect when the first packet is lost, which is sent again after a second.
const DEADLINE: Duration = Duration::from_millis(1500);
/// One lost packet is no silence: who has not answered by then, or has refused, is asked once more.
const AGAIN: Duration = Duration::from_millis(500);
/// For one more question after two have failed: no time is needed for a lost packet.
pub const AT_ONCE: Duration = Duration::from_millis(500);
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
/// Questions at the same time: of a silent ring, there are four. If they were fewer than those of all rings that ports suffice for, rings that fall
/// silent together would keep each other from being asked.
const CONCURRENCY: usize = 1024;

/// What is known of one ring.
struct Asked {
    /// Rings on one host may fall silent together.
    host: IpAddr,
    /// When the newest question began of which it is known what came of it. What comes of older ones counts no more.
    noted: Option<Instant>,
    answered: Option<Instant>,
    /// Since when it had answered without a gap, when it last did.
    answers_since: Option<Instant>,
    /// Whether its silence is a sign that this machine is cut off. Not if it was judged, here or by another operator, or was not asked for a while,
    /// and has not answered since.
    is_witness: bool,
    way: Way,
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
    fn new(host: IpAddr) -> Self {
        Self {
            host,
            noted: None,
            answered: None,
            answers_since: None,
            is_witness: true,
            way: Way::default(),
        }
    }

    /// From one time that it is asked to the next.
    fn pause(&self, now: Instant) -> Duration {
        match self.answered_within(JUDGED_FOR, now) {
            true => INTERVAL,
            false => SELDOM,
        }
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
                self.is_witness = false;
                return Known::NotReady(NotReady::NotReached(why));
            }
            Health::NotReady { why, .. } => Known::NotReady(NotReady::Said(why)),
            Health::Ready { .. } => Known::NothingAgainst,
        };
        if !self.answered_within(GAP, now) {
            self.answers_since = Some(now);
        }
        self.answered = Some(now);
        self.is_witness = true;
        known
    }
}

/// Whether this ring, which was asked at `begun` and is silent, may be so because it is this machine that is cut off: on other machines there are
/// rings that answered until lately, and no ring has gone on answering. (A ring on the operator's own machine always does. With one there, the
/// operator never takes itself for cut off.)
fn is_cut_off(ring: &Ring, begun: Instant, asked: &HashMap<String, Asked>, now: Instant) -> bool {
    let others = asked.iter().filter(|(uid, other)| {
        **uid != ring.uid && other.is_witness && other.answered_within(WITNESS_FOR, now)
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
    let mut last_asked = HashMap::new();
    loop {
        tokio::select! {
            _ = looks.tick() => {
                let plans = stores.plans();
                let rings = plans.iter().filter_map(Ring::of).collect();
                let plans = plans.iter().filter_map(|plan| plan.uid()).collect();
                let begun = Instant::now();
                for ring in reached.due(rings, &plans, &mut last_asked, begun) {
                    if asking.len() < CONCURRENCY {
                        last_asked.insert(ring.uid.clone(), begun);
                        asking.push(async move { (begun, ring.health().await, ring) });
                    }
                }
            }
            Some((begun, (came, is_late), ring)) = asking.next() => {
                let is_answer = !matches!(came, Health::NoAnswer(_));
                let of_ring = reached.note(&ring, came, begun, Instant::now());
                let of_way = is_answer && reached.note_way(&ring, is_late);
                if of_ring || of_way {
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

/// Whether rank 0 says that it has come as far as this.
fn rank0_has_come_to(plan: &RingPlan, least: MemberState) -> bool {
    let rank0 = plan.spec.members.first();
    let rank0 = rank0.and_then(|rank0| member_status(plan, rank0));
    rank0.is_some_and(|rank0| rank0.state >= least)
}

/// Where rank 0 is asked.
fn http(plan: &RingPlan) -> Option<SocketAddr> {
    let host = plan.spec.members.first()?.host()?.parse().ok()?;
    let port = plan.spec.http_port?.try_into().ok()?;
    Some(SocketAddr::new(host, port))
}

/// A ring whose rank 0 says that it has loaded, and so listens.
struct Ring {
    uid: String,
    model: ObjectRef<Model>,
    http: SocketAddr,
}

impl Ring {
    fn of(plan: &Arc<RingPlan>) -> Option<Self> {
        let http = http(plan)?;
        let model = &plan.owner_references().first()?.name;
        rank0_has_come_to(plan, MemberState::Loaded).then_some(Self {
            uid: plan.uid()?,
            model: ObjectRef::new(model).within(&plan.namespace()?),
            http,
        })
    }

    /// What comes first of two questions; `NoAnswer` if both fail. And whether the second was answered while the first was not, as happens where
    /// packets get lost. (A slow link keeps both waiting.)
    async fn health(&self) -> (Health, bool) {
        let others_answered = sleep(OTHERS_ANSWERED);
        let ask = async |wait| {
            sleep(wait).await;
            health_within(DEADLINE, self.http).await
        };
        let (first, again) = (pin!(ask(Duration::ZERO)), pin!(ask(AGAIN)));
        let first_or_again = select(first, again).await;
        let is_again = matches!(first_or_again, Either::Right(_));
        let (came, other) = first_or_again.factor_first();
        let is_late = is_again && !matches!(came, Health::NoAnswer(_));
        let came = match came {
            Health::NoAnswer(_) => other.await,
            answer => answer,
        };
        if matches!(came, Health::NoAnswer(_)) {
            others_answered.await;
        }
        (came, is_late)
    }
}
