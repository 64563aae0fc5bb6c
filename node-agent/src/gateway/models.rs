//! GET /v1/models and /v1/models/{id}: the one model that this ring serves, also while it loads.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use super::Gateway;
use super::openai_error::ApiError;

/// The served model as clients see it.
pub struct ModelCard {
    pub name: String,
    /// Of its file.
    pub bytes: i64,
    /// Whether it answers to any name.
    any_name: bool,
    /// When serving began, in Unix seconds.
    created: u64,
}

impl ModelCard {
    pub fn new(name: String, bytes: i64, any_name: bool) -> Self {
        Self {
            name,
            bytes,
            any_name,
            created: unix_seconds(),
        }
    }

    /// A request may leave `model` out (llama.cpp's clients do); one that names a model must name this one, unless any name will do.
    pub fn check(&self, asked: &str) -> Result<(), ApiError> {
        if asked == self.name || self.any_name {
            return Ok(());
        }
        Err(ApiError::NoSuchModel {
            asked: asked.into(),
            served: self.name.clone(),
        })
    }

    /// When serving began.
    pub fn since(&self) -> String {
        let seconds = i64::try_from(self.created).unwrap_or_default();
        let since = jiff::Timestamp::from_second(seconds).unwrap_or_default();
        since.to_string()
    }

    fn json(&self) -> Value {
        json!({
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "prima",
            // What Anthropic's clients look for.
            "type": "model",
            "display_name": self.name,
            "created_at": self.since(),
        })
    }
}

pub async fn list(State(gateway): State<Gateway>) -> Json<Value> {
    let model = &gateway.0.model;
    Json(json!({
        "object": "list",
        "data": [model.json()],
        "first_id": model.name,
        "last_id": model.name,
        "has_more": false,
    }))
}

pub async fn get(
    State(gateway): State<Gateway>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    gateway.0.model.check(&id)?;
    Ok(Json(gateway.0.model.json()))
}

pub fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
