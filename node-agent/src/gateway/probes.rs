//! /livez (the event loop turns), /health and /readyz (a token went round, nobody is silent or stands still, and nothing is late), and /ring (what the chat
//! page shows).

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::generation::RingStatus;

use super::Gateway;
use super::openai_error::{ApiError, with_body};

/// Says nothing about the ring: a probe that restarts a loading process would never let it finish.
pub async fn live() -> &'static str {
    "ok"
}

/// `{"status": "ok"}`, how many requests run or wait, and the median times of the last answers: to the first token, and from one token to the
/// next; of a mixture, how often tokens lack experts (`RingStatus::expert_miss_percent`), if that is known. Else the error, and the member at
/// which the ring fails, if that is known, and the neighbour that does not reach it. Of a ring that stands still, too, though requests wait until it
/// goes on: who asks here has the choice.
pub async fn health(State(gateway): State<Gateway>) -> Response {
    let status = gateway.0.generator.status().borrow().clone();
    if let Err(error) = gateway.ready().and_then(|_| goes_on(&status)) {
        let mut body = error.body();
        if let Some((member, missed_by)) = fails_at(&status) {
            body["failsAt"] = json!(member);
            if let Some(neighbour) = missed_by {
                body["missedBy"] = json!(neighbour);
            }
        }
        return with_body(error.into_response(), &body);
    }
    let (first_token, token) = gateway.0.metrics.recent();
    let requests = status.running_requests + status.waiting_requests;
    let mut body = json!({"status": "ok", "requests": requests});
    for (name, time) in [
        ("firstTokenMicroseconds", first_token),
        ("tokenMicroseconds", token),
    ] {
        if let Some(time) = time {
            body[name] = json!(time.as_micros() as u64);
        }
    }
    if let Some(percent) = status.expert_miss_percent {
        body["expertMissPercent"] = json!(percent);
    }
    (StatusCode::OK, Json(body)).into_response()
}

/// The member at which the ring fails, or stands still, and the neighbour that does not reach it, as far as that is known.
fn fails_at(status: &RingStatus) -> Option<(&str, Option<&str>)> {
    if status.stands_still() {
        return Some((status.members.first()?.name.as_str(), None));
    }
    match &status.fails_at {
        Some(member) => Some((member.as_str(), status.missed_by.as_deref())),
        None => Some((status.silent.as_deref()?, None)),
    }
}

fn goes_on(status: &RingStatus) -> Result<(), ApiError> {
    match standing_still(status) {
        Some(reason) => Err(ApiError::RingFailed { reason }),
        None => Ok(()),
    }
}

/// Why the ring stands still, if it does. Not for how long: that would be other words each second, which agents write down.
fn standing_still(status: &RingStatus) -> Option<String> {
    let reason = match &status.silent {
        _ if status.stands_still() => {
            "its first member stands still: it waits for a disk, or its machine is too busy"
                .to_owned()
        }
        Some(member) => format!("no sign of life from member {member} for some seconds"),
        // At which member, nobody says.
        None if status.late => {
            "what goes round it is late: a member computes nothing, or a link loses what it carries"
                .to_owned()
        }
        None => return None,
    };
    Some(reason)
}

/// `{"model", "ring": RingStatus, "standing_still": why, or null, "tokens": {"prompt", "generated"}}`; the tokens are totals since the start.
pub async fn ring(State(gateway): State<Gateway>) -> Json<Value> {
    let status = gateway.0.generator.status().borrow().clone();
    let (prompt, generated) = gateway.0.metrics.tokens();
    Json(json!({
        "model": gateway.0.model.name,
        "ring": status,
        "standing_still": standing_still(&status),
        "tokens": {"prompt": prompt, "generated": generated},
    }))
}
