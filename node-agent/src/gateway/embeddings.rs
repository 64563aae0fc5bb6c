//! POST /v1/embeddings: the vector of each input. What Ollama's route has in common with it is here, too.
//!
//! Vectors are held as they are and written one by one, since a batch of them as text is three times as large.

use std::convert::Infallible;
use std::iter::once;
use std::pin::pin;
use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::{StreamExt, stream};
use serde_json::json;
use tokio::sync::OwnedSemaphorePermit;

use crate::generation::{GenerationEvent, Instead};

use super::auth::Caller;
use super::batch;
use super::in_flight;
use super::intake::Taken;
use super::openai_error::ApiError;
use super::prompts::{self, GivenPrompt};
use super::request::Fields;
use super::{Gateway, ModelText};

/// OpenAI's limit.
pub const MAX_INPUTS: usize = 2048;

/// Texts whose vectors are asked for.
pub struct AskedVectors {
    pub inputs: Vec<Arc<[u32]>>,
    pub dimensions: Option<usize>,
}

pub struct Vectors {
    pub vectors: Vec<Vec<f32>>,
    pub prompt_tokens: usize,
    held: HeldPlaces,
}

/// What a batch takes from others until its answer is written.
pub struct HeldPlaces {
    _place: OwnedSemaphorePermit,
    _room: Option<OwnedSemaphorePermit>,
}

#[derive(Clone, Copy)]
enum Form {
    Float,
    Base64,
}

pub async fn create(
    State(gateway): State<Gateway>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let text = gateway.ready()?;
    let read = {
        let gateway = gateway.clone();
        move |fields: &Fields<'_>| {
            if let Some(model) = fields.string("model")? {
                gateway.0.model.check(model)?;
            }
            Ok((asked(&text, fields)?, form(fields)?))
        }
    };
    let (taken, form) = gateway.0.intake.take(request, read).await?.apart();
    let answered = vectors(&gateway, caller, taken).await?;
    let item = move |(index, vector): (usize, Vec<f32>)| {
        let vector = match form {
            Form::Float => json!(vector),
            Form::Base64 => json!(base64(&vector)),
        };
        json!({"object": "embedding", "index": index, "embedding": vector}).to_string()
    };
    let end = json!({
        "model": gateway.0.model.name,
        "object": "list",
        "usage": {"prompt_tokens": answered.prompt_tokens, "total_tokens": answered.prompt_tokens},
    });
    Ok(answered.written("data", item, &end.to_string()))
}

fn asked(text: &ModelText, fields: &Fields<'_>) -> Result<AskedVectors, ApiError> {
    let inputs = prompts::read(fields, "input", text.tokenizer.vocab_size(), MAX_INPUTS)?;
    let dimensions = fields.integer("dimensions", 1..=i64::MAX)?;
    let inputs = inputs.into_iter().enumerate().map(|(number, input)| {
        let tokens = match input {
            GivenPrompt::Tokens(tokens) => tokens,
            GivenPrompt::Text(input) => {
                batch::encode(text, ("input", number), (&input, true), text.context_length)?
            }
        };
        batch::within(text, ("input", number), tokens)
    });
    Ok(AskedVectors {
        inputs: inputs.collect::<Result<_, _>>()?,
        dimensions: dimensions.map(|asked| usize::try_from(asked).unwrap_or(usize::MAX)),
    })
}

fn form(fields: &Fields<'_>) -> Result<Form, ApiError> {
    match fields.string("encoding_format")? {
        None | Some("float") => Ok(Form::Float),
        Some("base64") => Ok(Form::Base64),
        Some(other) => Err(fields.wrong("encoding_format", "`float` or `base64`", &other.into())),
    }
}

/// Little-endian, as OpenAI's clients read it.
fn base64(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    STANDARD.encode(bytes)
}

/// Has the ring compute all. Dropping it cancels what is under way.
pub async fn vectors(
    gateway: &Gateway,
    caller: Caller,
    taken: Taken<AskedVectors>,
) -> Result<Vectors, ApiError> {
    let Taken { asked, place, room } = taken;
    let count = asked.inputs.len();
    let dimensions = asked.dimensions;
    let computed = batch::answers(
        gateway,
        &caller,
        asked.inputs,
        Instead::Embedding { dimensions },
    );
    let mut computed = pin!(computed);
    let mut answered = Vectors {
        vectors: Vec::with_capacity(count),
        prompt_tokens: 0,
        held: HeldPlaces {
            _place: place,
            _room: None,
        },
    };
    while let Some(one) = computed.next().await {
        let (GenerationEvent::Embedding(vector), usage) = one? else {
            return Err(in_flight::abandoned().into());
        };
        if answered.vectors.is_empty() && count > 1 {
            let bytes = count * size_of_val(vector.as_slice());
            answered.held._room = Some(room_for(gateway, bytes).await?);
        }
        answered.prompt_tokens += usage.prompt_tokens;
        answered.vectors.push(vector);
    }
    drop(room);
    Ok(answered)
}

/// Room for the vectors of a batch.
async fn room_for(gateway: &Gateway, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
    let intake = &gateway.0.intake;
    let all = intake.all_room();
    match u32::try_from(bytes) {
        Ok(bytes) if bytes as usize <= all => intake.room(bytes).await,
        _ => Err(ApiError::invalid(
            "input",
            format!(
                "the vectors of all inputs take {bytes} bytes, but this server has room for {all}; send fewer at a time"
            ),
        )),
    }
}

impl Vectors {
    /// The answer: an object that has `item` of each vector in the array `name`, and then the fields of the object `end`.
    pub fn written(
        self,
        name: &str,
        mut item: impl FnMut((usize, Vec<f32>)) -> String + Send + 'static,
        end: &str,
    ) -> Response {
        let head = format!("{{\"{name}\":[");
        let tail = format!("],{}", end.strip_prefix('{').unwrap_or(end));
        let held = self.held;
        let items = self.vectors.into_iter().enumerate().map(move |numbered| {
            // Until the last is written.
            let _held = &held;
            let comma = if numbered.0 > 0 { "," } else { "" };
            comma.to_owned() + &item(numbered)
        });
        let pieces = once(head).chain(items).chain(once(tail));
        let body = Body::from_stream(stream::iter(pieces.map(Ok::<_, Infallible>)));
        ([(header::CONTENT_TYPE, "application/json")], body).into_response()
    }
}
