//! llama.cpp's routes about text and tokens: /tokenize, /detokenize and /apply-template. They compute nothing on the ring.

use axum::Json;
use axum::extract::{Request, State};
use prima_text::TokenizerError;
use serde_json::{Value, json};

use super::Gateway;
use super::chat;
use super::openai_error::ApiError;
use super::request::{Fields, token_id};

/// POST /tokenize: `content` into `tokens`; with `with_pieces`, each with its text.
pub async fn tokenize(
    State(gateway): State<Gateway>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let text = gateway.ready()?;
    let read = move |fields: &Fields<'_>| {
        let content = fields
            .string("content")?
            .ok_or_else(|| fields.missing("content"))?;
        let add_special = fields.boolean("add_special")?.unwrap_or(false);
        let parse_special = fields.boolean("parse_special")?.unwrap_or(true);
        let tokens = text
            .tokenizer
            .encode_at_most(text.context_length, content, add_special, parse_special)
            .map_err(|error| match error {
                TokenizerError::TooLong { .. } => text.context_exceeded(),
                error => ApiError::invalid("content", error.to_string()),
            })?;
        if !fields.boolean("with_pieces")?.unwrap_or(false) {
            return Ok(json!({ "tokens": tokens }));
        }
        let pieces = tokens.iter().map(|token| {
            let bytes = text.tokenizer.token_bytes(*token);
            // A part of a character is no text.
            let piece = match std::str::from_utf8(&bytes) {
                Ok("") => text.tokenizer.token_text(*token).into(),
                Ok(piece) => piece.into(),
                Err(_) => json!(bytes.to_vec()),
            };
            json!({"id": token, "piece": piece})
        });
        Ok(json!({"tokens": pieces.collect::<Vec<_>>()}))
    };
    Ok(Json(gateway.0.intake.take(request, read).await?.asked))
}

/// POST /detokenize: `tokens` into `content`.
pub async fn detokenize(
    State(gateway): State<Gateway>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let text = gateway.ready()?;
    let read = move |fields: &Fields<'_>| {
        let vocabulary = text.tokenizer.vocab_size();
        let values = fields
            .array("tokens")?
            .ok_or_else(|| fields.missing("tokens"))?;
        let token = |value: &Value| {
            token_id(value, vocabulary).ok_or_else(|| {
                let must = format!("token ids below {vocabulary} throughout");
                fields.wrong("tokens", &must, value)
            })
        };
        let tokens: Vec<u32> = values.iter().map(token).collect::<Result<_, _>>()?;
        Ok(json!({"content": text.tokenizer.decode(&tokens)}))
    };
    Ok(Json(gateway.0.intake.take(request, read).await?.asked))
}

/// POST /apply-template: the prompt of a chat, as text.
pub async fn apply_template(
    State(gateway): State<Gateway>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let text = gateway.ready()?;
    let read = move |fields: &Fields<'_>| {
        let (prompt, _) = chat::prompt(&text, fields)?;
        Ok(json!({"prompt": prompt.text}))
    };
    Ok(Json(gateway.0.intake.take(request, read).await?.asked))
}
