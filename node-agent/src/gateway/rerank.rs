//! POST /v1/rerank: documents by how well they answer a query, in the form of Jina's and llama.cpp's API. For models that were trained to
//! rank; others have no such score, and are told so.

use std::cmp::Reverse;
use std::pin::pin;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::{Extension, Json};
use futures::StreamExt;
use serde_json::{Value, json};

use crate::generation::{GenerationEvent, Instead};

use super::auth::Caller;
use super::batch;
use super::in_flight;
use super::openai_error::ApiError;
use super::request::Fields;
use super::{Gateway, ModelText};

const MAX_DOCUMENTS: usize = 1024;
/// Tokens of all prompts of a request together, each of which has the query: 2 MiB.
const MAX_TOKENS: usize = 512 << 10;

/// What is to be ranked.
struct AskedRanks {
    prompts: Vec<Arc<[u32]>>,
    /// The best so many are told.
    top: usize,
    /// Told again with the scores.
    documents: Option<Vec<String>>,
}

pub async fn create(
    State(gateway): State<Gateway>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let text = gateway.ready()?;
    let read = {
        let gateway = gateway.clone();
        move |fields: &Fields<'_>| {
            if let Some(model) = fields.string("model")? {
                gateway.0.model.check(model)?;
            }
            asked(&text, fields)
        }
    };
    let taken = gateway.0.intake.take(request, read).await?;
    let AskedRanks {
        prompts,
        top,
        documents,
    } = taken.asked;
    let (mut scores, mut prompt_tokens) = (Vec::with_capacity(prompts.len()), 0);
    {
        let answers = batch::answers(&gateway, &caller, prompts, Instead::Score);
        let mut answers = pin!(answers);
        while let Some(one) = answers.next().await {
            let (GenerationEvent::Score(score), usage) = one? else {
                return Err(in_flight::abandoned().into());
            };
            prompt_tokens += usage.prompt_tokens;
            scores.push(score);
        }
    }
    let mut ranked: Vec<(usize, f32)> = scores.into_iter().enumerate().collect();
    // Scores are from 0 to 1, where bits are in the order of the numbers. Equal ones stay in the documents' order.
    ranked.sort_by_key(|(_, score)| Reverse(score.to_bits()));
    ranked.truncate(top);
    let results = ranked.into_iter().map(|(index, score)| {
        let mut result = json!({"index": index, "relevance_score": score});
        let document = documents
            .as_ref()
            .and_then(|documents| documents.get(index));
        if let Some(document) = document {
            result["document"] = json!({ "text": document });
        }
        result
    });
    Ok(Json(json!({
        "model": gateway.0.model.name,
        "object": "list",
        "results": results.collect::<Vec<_>>(),
        "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
    })))
}

fn asked(text: &ModelText, fields: &Fields<'_>) -> Result<AskedRanks, ApiError> {
    let Some(template) = &text.rank_template else {
        return Err(ApiError::invalid(
            "model",
            "this model ranks no texts: its file has no template for that (tokenizer.chat_template.rerank)",
        ));
    };
    let query = fields
        .string("query")?
        .ok_or_else(|| fields.missing("query"))?;
    // One that is longer than the context is not repeated for each document.
    batch::encode(text, ("query", 0), (query, false), text.context_length)?;
    let documents = documents(fields)?;
    let top = fields.integer("top_n", 1..=i64::MAX)?;
    let mut tokens = 0;
    let mut prompts = Vec::with_capacity(documents.len());
    for (number, document) in documents.iter().enumerate() {
        let place = ("documents", number);
        let prompt = template.render(query, document);
        // The template has the tokens that begin and end a text.
        let prompt = batch::encode(text, place, (&prompt, false), text.context_length)?;
        tokens += prompt.len();
        if tokens > MAX_TOKENS {
            let problem = format!(
                "query and documents have more than {MAX_TOKENS} tokens together, the query counted for each document; send fewer documents at a time"
            );
            return Err(ApiError::invalid("documents", problem));
        }
        prompts.push(batch::within(text, place, prompt)?);
    }
    let again = fields.boolean("return_documents")?.unwrap_or(false);
    Ok(AskedRanks {
        top: top.map_or(usize::MAX, |top| usize::try_from(top).unwrap_or(usize::MAX)),
        documents: again.then_some(documents),
        prompts,
    })
}

/// Texts, or objects that have one.
fn documents(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let documents = fields
        .array("documents")?
        .ok_or_else(|| fields.missing("documents"))?;
    if !(1..=MAX_DOCUMENTS).contains(&documents.len()) {
        let found = documents.len();
        let problem = format!("documents must hold 1 to {MAX_DOCUMENTS} texts, but holds {found}");
        return Err(ApiError::invalid("documents", problem));
    }
    let read = |document: &Value| {
        let text = document.get("text").unwrap_or(document).as_str();
        text.map(String::from).ok_or_else(|| {
            let must = "an array of texts, or of objects with a `text`";
            fields.wrong("documents", must, document)
        })
    };
    documents.iter().map(read).collect()
}
