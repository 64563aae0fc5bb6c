//! A member's entry in `status.members` of its RingPlan, made from what the agent sees of the member, and which change is worth a write to
//! the API server.
//!
//! Decides: a change of state is written at once; a new message, progress, or a speed changed by more than a tenth
//! only some seconds after the last write. Does not know where its observations come from.

use std::time::Duration;

use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams};
use kube::{Client, Resource as _};
use prima_crds::v1alpha1::ring_plan::{MemberState, MemberStatus, RingPlan};
use prima_member_process::Health;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::api;
use super::backoff::Backoff;
use super::metrics::CountedMember;
use super::plan_key::PlanKey;
use super::weights::Share;

/// What the agent sees of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observed {
    /// It cannot be tried; why, and what would help.
    Refused(String),
    /// It went wrong.
    Failed {
        why: String,
        again_in: Duration,
    },
    /// The agent itself has just begun, and no member runs yet.
    Beginning,
    /// The agent itself ends, and the member with it.
    Ending,
    Fetching,
    /// Its process runs, but has not joined the ring.
    Started,
    /// Its process has joined the ring. On rank 0: what its HTTP endpoint says.
    Joined(Option<Health>),
}

/// Characters that the resource allows.
const MAX_MESSAGE: usize = 1000;

/// The status of the member `name`.
pub fn status(name: &str, observed: &Observed, share: Option<Share>) -> MemberStatus {
    let (state, message) = match observed {
        Observed::Refused(why) => (MemberState::Refused, why.clone()),
        Observed::Failed { why, .. } => (MemberState::Failed, why.clone()),
        Observed::Beginning => (
            MemberState::Failed,
            "the agent of this machine starts".to_owned(),
        ),
        Observed::Ending => (
            MemberState::Failed,
            "the agent of this machine ends".to_owned(),
        ),
        Observed::Fetching => (
            MemberState::Fetching,
            "fetches its part of the model".to_owned(),
        ),
        Observed::Started => (
            MemberState::Loading,
            "the weights are there, the process starts".to_owned(),
        ),
        Observed::Joined(None) => (
            MemberState::Loaded,
            "runs its layers for the ring".to_owned(),
        ),
        Observed::Joined(Some(Health::NotReady { why, .. } | Health::NoAnswer(why))) => {
            (MemberState::Loaded, format!("waits for the ring: {why}"))
        }
        Observed::Joined(Some(Health::Ready { .. })) => {
            (MemberState::Ready, "a token went round the ring".to_owned())
        }
    };
    let (measured, expert_miss_percent) = match observed {
        Observed::Joined(Some(Health::Ready {
            speed,
            expert_miss_percent,
        })) => (*speed, *expert_miss_percent),
        _ => (None, None),
    };
    // By this, the operator tells a try that failed from an agent that starts or ends.
    let retry_after_seconds = match observed {
        Observed::Failed { again_in, .. } => Some(again_in.as_secs().max(1) as i64),
        _ => None,
    };
    let (fails_at, missed_by) = match observed {
        Observed::Joined(Some(Health::NotReady {
            fails_at,
            missed_by,
            ..
        })) => (fails_at.clone(), missed_by.clone()),
        _ => (None, None),
    };
    MemberStatus {
        name: name.to_owned(),
        state,
        fails_at,
        missed_by,
        retry_after_seconds,
        message: message.chars().take(MAX_MESSAGE).collect(),
        fetched_bytes: share.map(|share| share.fetched_bytes as i64),
        total_bytes: share.map(|share| share.total_bytes as i64),
        measured,
        expert_miss_percent,
    }
}

/// When to write `now`, after `told` was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Worth {
    Nothing,
    /// Some seconds after the last write.
    Soon,
    AtOnce,
}

fn worth(told: Option<&MemberStatus>, now: &MemberStatus) -> Worth {
    let MemberStatus {
        name: _,
        state,
        message,
        fails_at,
        missed_by,
        retry_after_seconds,
        fetched_bytes,
        total_bytes,
        measured,
        expert_miss_percent,
    } = now;
    let Some(told) = told else {
        return Worth::AtOnce;
    };
    if told.state != *state || told.fails_at != *fails_at || told.missed_by != *missed_by {
        return Worth::AtOnce;
    }
    let faster_or_slower = match (told.measured, *measured) {
        (Some(told), Some(now)) => {
            tenth_apart(told.token_microseconds, now.token_microseconds)
                || tenth_apart(told.first_token_microseconds, now.first_token_microseconds)
        }
        (told, now) => told != now,
    };
    let other_experts = match (told.expert_miss_percent, *expert_miss_percent) {
        (Some(told), Some(now)) => told.abs_diff(now) >= MISSES_APART,
        (told, now) => told != now,
    };
    let further = fetched_bytes != &told.fetched_bytes || total_bytes != &told.total_bytes;
    let otherwise = told.message != *message || told.retry_after_seconds != *retry_after_seconds;
    match otherwise || further || faster_or_slower || other_experts {
        true => Worth::Soon,
        false => Worth::Nothing,
    }
}

/// Points of a percentage that would change a plan.
const MISSES_APART: u32 = 10;

fn tenth_apart(told: i64, now: i64) -> bool {
    told.abs_diff(now) > told.unsigned_abs() / 10
}

/// Between two writes in the same state.
const INTERVAL: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Where a member's entry is written.
pub struct Writer {
    plans: Api<DynamicObject>,
    plan: PlanKey,
    params: PatchParams,
    told: Option<MemberStatus>,
    counted: CountedMember,
}

impl Writer {
    pub fn new(client: Client, plan: PlanKey, node: &str, counted: CountedMember) -> Self {
        let resource = ApiResource::erase::<RingPlan>(&());
        Self {
            plans: Api::namespaced_with(client, &plan.namespace, &resource),
            plan,
            params: PatchParams::apply(&field_manager(node)).force(),
            told: None,
            counted,
        }
    }

    /// Writes what is worth it, for ever.
    pub async fn follow(&mut self, mut status: watch::Receiver<Option<MemberStatus>>) {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let mut written_at: Option<Instant> = None;
        loop {
            let now = status.borrow_and_update().clone();
            let worth = match &now {
                Some(now) => {
                    self.counted.is(now.state);
                    worth(self.told.as_ref(), now)
                }
                None => Worth::Nothing,
            };
            let wait = match worth {
                Worth::Nothing => None,
                Worth::AtOnce => Some(Duration::ZERO),
                Worth::Soon => Some(written_at.map_or(Duration::ZERO, |written| {
                    INTERVAL.saturating_sub(written.elapsed())
                })),
            };
            match wait {
                None => {
                    if status.changed().await.is_err() {
                        return;
                    }
                    continue;
                }
                Some(wait) if !wait.is_zero() => {
                    // A newer status may be worth writing sooner.
                    if let Ok(changed) = timeout(wait, status.changed()).await {
                        match changed {
                            Ok(()) => continue,
                            Err(_) => return,
                        }
                    }
                }
                Some(_) => {}
            }
            if let Some(now) = now {
                match self.write(now).await {
                    Ok(()) => {
                        backoff.reset();
                        written_at = Some(Instant::now());
                    }
                    Err(problem) => {
                        tracing::warn!(plan = %self.plan, problem, "cannot write the member's status; trying again");
                        sleep(backoff.next()).await;
                    }
                }
            }
        }
    }

    /// Writes it, whatever was written before.
    pub async fn write(&mut self, status: MemberStatus) -> Result<(), String> {
        self.counted.is(status.state);
        let patch = Patch::Apply(json!({
            "apiVersion": RingPlan::api_version(&()),
            "kind": RingPlan::kind(&()),
            // Never into another plan of the same name.
            "metadata": {"name": self.plan.name, "uid": self.plan.uid},
            "status": {"members": [status]},
        }));
        let request = self
            .plans
            .patch_status(&self.plan.name, &self.params, &patch);
        match timeout(api::DEADLINE, request).await {
            Ok(Ok(_)) => {
                self.told = Some(status);
                Ok(())
            }
            Ok(Err(error)) => Err(api::reason(&error)),
            Err(_) => Err("no answer from the API server".to_owned()),
        }
    }
}

/// One for each node: with server-side apply a manager owns what it applied last and nothing else, so agents that shared a
/// name would remove each other's entries.
fn field_manager(node: &str) -> String {
    /// The API server's limit.
    const MAX: usize = 128;
    let mut name = format!("{}-{node}", api::FIELD_MANAGER);
    // Names of nodes are ASCII.
    name.truncate(MAX);
    name
}

#[cfg(test)]
mod tests {
    use prima_crds::v1alpha1::ring_plan::Speed;

    use super::*;

    const SPEED: Speed = Speed {
        token_microseconds: 50_000,
        first_token_microseconds: 900_000,
    };

    fn ready(speed: Option<Speed>, expert_miss_percent: Option<i32>) -> Observed {
        joined(Health::Ready {
            speed,
            expert_miss_percent,
        })
    }

    fn joined(health: Health) -> Observed {
        Observed::Joined(Some(health))
    }

    fn not_ready(why: &str) -> Health {
        Health::NotReady {
            why: why.to_owned(),
            fails_at: None,
            missed_by: None,
        }
    }

    fn told(observed: &Observed) -> MemberStatus {
        status("desk", observed, None)
    }

    #[test]
    fn what_is_seen_becomes_a_state_and_a_message() {
        use MemberState as State;
        let cases = [
            (Observed::Refused("no".into()), State::Refused, "no"),
            (
                Observed::Failed {
                    why: "it broke".into(),
                    again_in: Duration::from_secs(8),
                },
                State::Failed,
                "it broke",
            ),
            (
                Observed::Beginning,
                State::Failed,
                "the agent of this machine starts",
            ),
            (
                Observed::Ending,
                State::Failed,
                "the agent of this machine ends",
            ),
            (Observed::Fetching, State::Fetching, "fetches"),
            (Observed::Started, State::Loading, "the process starts"),
            (Observed::Joined(None), State::Loaded, "runs its layers"),
            (
                joined(not_ready("Loading model")),
                State::Loaded,
                "waits for the ring: Loading model",
            ),
            (ready(None, None), State::Ready, "went round"),
        ];
        for (observed, state, message) in cases {
            let told = told(&observed);
            let retry = (state == State::Failed && message == "it broke").then_some(8);
            assert_eq!(told.retry_after_seconds, retry, "{told:?}");
            assert_eq!(told.state, state, "{observed:?}");
            assert!(told.message.contains(message), "{told:?}");
        }
    }

    #[test]
    fn bytes_are_told_always_and_speed_when_ready() {
        let share = Share {
            fetched_bytes: 3,
            total_bytes: 9,
        };
        let told = status("desk", &ready(Some(SPEED), Some(61)), Some(share));
        assert_eq!(
            (told.fetched_bytes, told.total_bytes, told.measured),
            (Some(3), Some(9), Some(SPEED))
        );
        assert_eq!(told.expert_miss_percent, Some(61));
        let told = status("desk", &Observed::Refused("ä".repeat(2000)), Some(share));
        assert_eq!(
            (told.message.chars().count(), told.fetched_bytes),
            (1000, Some(3))
        );
    }

    #[test]
    fn a_state_is_told_at_once_progress_soon_and_noise_never() {
        let answers = |token_microseconds, expert_miss_percent| {
            let speed = Speed {
                token_microseconds,
                ..SPEED
            };
            told(&ready(Some(speed), expert_miss_percent))
        };
        let silent = told(&ready(None, None));
        let ready = |microseconds| answers(microseconds, None);
        let missing = |percent| answers(50_000, Some(percent));
        let fetching = |bytes| {
            let share = Share {
                fetched_bytes: bytes,
                total_bytes: 100,
            };
            status("desk", &Observed::Fetching, Some(share))
        };
        let loaded = |why: &str| told(&joined(not_ready(why)));
        let fails_at_pi4 = |missed_by: Option<&str>| {
            told(&joined(Health::NotReady {
                why: "a".to_owned(),
                fails_at: Some("pi4".to_owned()),
                missed_by: missed_by.map(str::to_owned),
            }))
        };
        let missed = fails_at_pi4(Some("laptop"));
        let said = (missed.fails_at.as_deref(), missed.missed_by.as_deref());
        assert_eq!(said, (Some("pi4"), Some("laptop")));
        for (before, now, expected) in [
            (fetching(1), fetching(1), Worth::Nothing),
            (fetching(1), fetching(2), Worth::Soon),
            (fetching(100), told(&Observed::Started), Worth::AtOnce),
            (loaded("a"), loaded("b"), Worth::Soon),
            (loaded("a"), fails_at_pi4(None), Worth::AtOnce),
            (fails_at_pi4(None), missed, Worth::AtOnce),
            (loaded("a"), ready(50_000), Worth::AtOnce),
            (ready(50_000), loaded("a"), Worth::AtOnce),
            (ready(50_000), ready(54_000), Worth::Nothing),
            (ready(50_000), ready(46_000), Worth::Nothing),
            (ready(50_000), ready(56_000), Worth::Soon),
            (silent, ready(50_000), Worth::Soon),
            (ready(50_000), missing(60), Worth::Soon),
            (missing(60), missing(69), Worth::Nothing),
            (missing(60), missing(50), Worth::Soon),
        ] {
            assert_eq!(worth(Some(&before), &now), expected, "{before:?} {now:?}");
        }
        assert_eq!(worth(None, &fetching(0)), Worth::AtOnce);
    }

    #[test]
    fn every_node_is_a_manager_of_its_own_and_none_is_too_long() {
        assert_eq!(field_manager("desk"), "prima-node-agent-desk");
        assert_eq!(field_manager(&"n".repeat(253)).len(), 128);
    }
}
