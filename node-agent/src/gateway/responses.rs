//! POST /v1/responses: OpenAI's newer API, said again as a chat, and answered as items. Tools that run at OpenAI's are ignored; what an
//! answer said is kept for a while, so that the next request can name it instead of sending it again.

mod answer;
mod events;
mod input;
mod tools;

use std::collections::{HashMap, HashSet};

use axum::extract::{Path, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::Value;

use super::Gateway;
use super::auth::Caller;
use super::chat;
use super::in_flight::InFlight;
use super::openai_error::ApiError;
use super::request::Fields;
use super::stream;
use answer::Answer;
use events::Events;
use input::{as_chat, reference};

pub async fn create(
    State(gateway): State<Gateway>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let text = gateway.ready()?;
    let keyspace = caller.keyspace;
    let read = {
        let (gateway, text) = (gateway.clone(), text.clone());
        move |fields: &Fields<'_>| {
            let messages = previous(&gateway, keyspace, fields)?;
            let referenced = referenced(&gateway, keyspace, fields);
            let chat = as_chat(fields, messages, referenced)?;
            let asked = chat::asked(&gateway, &text, &Fields::new(&chat.fields))?;
            Ok((asked, Answer::new(&gateway, fields, chat, keyspace)?))
        }
    };
    let (taken, mut answer) = gateway.0.intake.take(request, read).await?.apart();
    let stream = taken.asked.options.stream;
    let in_flight = InFlight::submit(&gateway, caller, taken).await?;
    if stream {
        return Ok(stream::events(in_flight, Events::new(answer)));
    }
    let (answered, usage) = in_flight.collect_one().await?;
    answer.take(answered);
    Ok(Json(answer.end(&usage)).into_response())
}

/// GET /v1/responses/{id}
pub async fn get(
    State(gateway): State<Gateway>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let kept = gateway.0.said.response(&id, caller.keyspace);
    let response = kept.ok_or(ApiError::NoSuchResponse { id })?;
    let content_type = [(header::CONTENT_TYPE, "application/json")];
    Ok((content_type, response).into_response())
}

/// The messages of the conversation that the request goes on with.
fn previous(gateway: &Gateway, keyspace: u64, fields: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let Some(id) = fields.string("previous_response_id")? else {
        return Ok(Vec::new());
    };
    let kept = gateway.0.said.messages(id, keyspace);
    kept.ok_or_else(|| {
        let gone = ApiError::NoSuchResponse { id: id.to_owned() };
        ApiError::invalid(
            "previous_response_id",
            format!("previous_response_id: {gone}"),
        )
    })
}

/// The items that the input names instead of sending them, as far as they are kept.
fn referenced(gateway: &Gateway, keyspace: u64, fields: &Fields<'_>) -> HashMap<String, Value> {
    let input = fields.get("input").and_then(Value::as_array);
    let ids: HashSet<&str> = input.into_iter().flatten().filter_map(reference).collect();
    match ids.is_empty() {
        true => HashMap::new(),
        false => gateway.0.said.items(&ids, keyspace),
    }
}
