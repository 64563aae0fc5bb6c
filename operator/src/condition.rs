//! A condition of a resource, as the API conventions have it: its time changes only with its status.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

/// What is said of one kind of condition.
pub struct ConditionUpdate<'a> {
    pub kind: &'a str,
    /// `None`: it is not known yet.
    pub is: Option<bool>,
    pub reason: &'a str,
    pub message: String,
}

/// Characters that the API server takes, somewhat less than its limit.
const MAX_MESSAGE: usize = 8000;

/// `before`: the conditions so far. `generation`: of the object that this is said of.
pub fn condition(
    before: &[Condition],
    generation: Option<i64>,
    said: ConditionUpdate<'_>,
) -> Condition {
    let status = match said.is {
        Some(true) => "True",
        Some(false) => "False",
        None => "Unknown",
    };
    let same = |one: &&Condition| one.type_ == said.kind && one.status == status;
    let since = before.iter().find(same);
    Condition {
        type_: said.kind.to_owned(),
        status: status.to_owned(),
        reason: said.reason.to_owned(),
        message: said.message.chars().take(MAX_MESSAGE).collect(),
        last_transition_time: since.map_or_else(now, |since| since.last_transition_time.clone()),
        observed_generation: generation,
    }
}

/// What is said of this kind, if anything is.
pub fn find<'a>(conditions: &'a [Condition], kind: &str) -> Option<&'a Condition> {
    conditions.iter().find(|condition| condition.type_ == kind)
}

/// To the second, as the API server keeps it.
fn now() -> Time {
    let seconds = Timestamp::now().as_second();
    Time(Timestamp::from_second(seconds).unwrap_or_default())
}
