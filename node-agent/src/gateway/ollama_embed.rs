//! Ollama's POST /api/embed, and the older /api/embeddings, said again as OpenAI's embeddings. A text that is too long is cut unless the
//! request says otherwise.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use axum::{Extension, Json};
use serde_json::{Map, Value, json};

use super::auth::Caller;
use super::batch;
use super::embeddings::{self, AskedVectors, MAX_INPUTS, Vectors};
use super::ollama::{check_model, refusal};
use super::openai_error::ApiError;
use super::request::Fields;
use super::{Gateway, ModelText};

/// Bytes of a text for each token of the context that are looked at where it may be cut: hardly a text has longer tokens, and then less
/// of it counts.
const BYTES_PER_TOKEN: usize = 64;

pub async fn create(
    State(gateway): State<Gateway>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Response {
    let answered = async {
        let begun = Instant::now();
        let answered = vectors(&gateway, caller, request, asked).await?;
        let end = json!({
            "model": gateway.0.model.name,
            "total_duration": u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX),
            "load_duration": 0,
            "prompt_eval_count": answered.prompt_tokens,
        });
        let item = |(_, vector): (usize, Vec<f32>)| json!(vector).to_string();
        Ok(answered.written("embeddings", item, &end.to_string()))
    };
    answered.await.unwrap_or_else(refusal)
}

/// POST /api/embeddings, the older route, for one text.
pub async fn create_one(
    State(gateway): State<Gateway>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Response {
    let answered = async {
        let answered = vectors(&gateway, caller, request, |text, fields| {
            let prompt = fields.string("prompt")?.unwrap_or_default();
            let input = Map::from_iter([("input".to_owned(), prompt.into())]);
            asked(text, &Fields::new(&input))
        })
        .await?;
        let vector = answered.vectors.into_iter().next();
        Ok(Json(json!({"embedding": vector.unwrap_or_default()})).into_response())
    };
    answered.await.unwrap_or_else(refusal)
}

/// The vectors that `asked` reads a request to be for.
async fn vectors(
    gateway: &Gateway,
    caller: Caller,
    request: Request,
    asked: fn(&ModelText, &Fields<'_>) -> Result<AskedVectors, ApiError>,
) -> Result<Vectors, ApiError> {
    let (own, text) = (gateway.clone(), gateway.ready()?);
    let read = move |fields: &Fields<'_>| {
        check_model(&own, fields)?;
        asked(&text, fields)
    };
    let taken = gateway.0.intake.take(request, read).await?;
    embeddings::vectors(gateway, caller, taken).await
}

/// No input asks Ollama to load the model, and has no vectors.
fn asked(text: &ModelText, fields: &Fields<'_>) -> Result<AskedVectors, ApiError> {
    let must = "a string or an array of strings";
    let inputs = match fields.get("input") {
        None => Vec::new(),
        Some(Value::String(input)) if input.is_empty() => Vec::new(),
        Some(Value::String(input)) => vec![input.as_str()],
        Some(value @ Value::Array(inputs)) => inputs
            .iter()
            .map(|input| {
                input
                    .as_str()
                    .ok_or_else(|| fields.wrong("input", must, value))
            })
            .collect::<Result<_, _>>()?,
        Some(other) => return Err(fields.wrong("input", must, other)),
    };
    if inputs.len() > MAX_INPUTS {
        let problem = format!("input must hold at most {MAX_INPUTS} texts");
        return Err(ApiError::invalid("input", problem));
    }
    let cut = fields.boolean("truncate")?.unwrap_or(true);
    let inputs = inputs.into_iter().enumerate().map(|(number, input)| {
        let tokens = match cut {
            true => beginning(text, number, input)?,
            false => batch::encode(text, ("input", number), (input, true), text.context_length)?,
        };
        batch::within(text, ("input", number), tokens)
    });
    let inputs: Vec<Arc<[u32]>> = inputs.collect::<Result<_, _>>()?;
    // 0 is as good as none.
    let dimensions = fields.integer("dimensions", 0..=i64::MAX)?;
    let dimensions = dimensions.filter(|asked| *asked > 0);
    Ok(AskedVectors {
        inputs,
        dimensions: dimensions.map(|asked| usize::try_from(asked).unwrap_or(usize::MAX)),
    })
}

/// As many tokens of a text as the context holds. The token that ends a text stays: a vector may be that of this token.
fn beginning(text: &ModelText, number: usize, input: &str) -> Result<Vec<u32>, ApiError> {
    let context = text.context_length;
    let looked_at = input.floor_char_boundary(context.saturating_mul(BYTES_PER_TOKEN));
    let input = &input[..looked_at];
    // A token has at least a byte, but for those that begin and end a text, and a space before it.
    let mut tokens = batch::encode(text, ("input", number), (input, true), input.len() + 3)?;
    if tokens.len() > context {
        let around = batch::encode(text, ("input", number), ("", true), context)?;
        let begins = usize::from(
            around
                .first()
                .is_some_and(|&token| text.tokenizer.bos() == Some(token)),
        );
        let end = around.get(begins).copied();
        tokens.truncate(context - usize::from(end.is_some()));
        tokens.extend(end);
    }
    Ok(tokens)
}
