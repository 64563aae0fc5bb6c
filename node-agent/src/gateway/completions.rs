//! POST /v1/completions: prompts as text or as token ids, continued as they are, without a chat template.

use std::iter::repeat_n;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use prima_text::{AnswerPart, TokenizerError};
use serde_json::{Value, json};

use crate::generation::{FinishReason, TokenLogprob};

use super::answer::{self, Envelope};
use super::auth::Caller;
use super::chunks::{self, ChunkFormat, choice};
use super::fill_in::{self, Around};
use super::grammar;
use super::in_flight::{AnsweredChoice, AskedAnswers};
use super::logprobs::completion_tokens;
use super::openai_error::ApiError;
use super::prompts::{self, GivenPrompt};
use super::request::{Fields, GenerationOptions, MAX_TOP_LOGPROBS};
use super::{Gateway, ModelText};

/// Each runs as a request of its own.
const MAX_PROMPTS: usize = 16;
/// OpenAI's default for this route, where chat completions have none.
const DEFAULT_MAX_TOKENS: usize = 16;

pub async fn create(
    State(gateway): State<Gateway>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let text = gateway.ready()?;
    let read = {
        let (gateway, text) = (gateway.clone(), text.clone());
        move |fields: &Fields<'_>| Ok((asked(&gateway, &text, fields)?, echo(fields)?))
    };
    let (taken, echo) = gateway.0.intake.take(request, read).await?.apart();
    let asked = &taken.asked;
    let said = |prompt: &Arc<[u32]>| text.tokenizer.decode(prompt);
    let format = CompletionChunks {
        envelope: Envelope::new("cmpl", &gateway.0.model.name),
        logprobs: asked.logprobs.is_some(),
        offsets: vec![0; asked.prompts.len() * asked.options.choices],
        prompts: match echo {
            true => {
                let prompts = asked.prompts.iter().map(said);
                let times = asked.options.choices;
                prompts.flat_map(|prompt| repeat_n(prompt, times)).collect()
            }
            false => Vec::new(),
        },
        text,
    };
    chunks::respond(&gateway, caller, taken, format).await
}

/// Reads the fields of OpenAI's completions.
pub fn asked(
    gateway: &Gateway,
    text: &ModelText,
    fields: &Fields<'_>,
) -> Result<AskedAnswers, ApiError> {
    if let Some(model) = fields.string("model")? {
        gateway.0.model.check(model)?;
    }
    let options = GenerationOptions::parse(fields, text.tokenizer.vocab_size())?;
    refuse_unsupported(fields, &options)?;
    let constraint = match grammar::asked(fields)? {
        Some(asked) => Some(text.constraint(asked.grammar, asked.field)?),
        None => None,
    };
    let logprobs = fields.integer("logprobs", 0..=MAX_TOP_LOGPROBS as i64)?;
    let suffix = fields.string("suffix")?.filter(|suffix| !suffix.is_empty());
    let prompts = prompts::read(fields, "prompt", text.tokenizer.vocab_size(), MAX_PROMPTS)?;
    let prompts = prompts
        .into_iter()
        .map(|prompt| encode(text, prompt, suffix));
    Ok(AskedAnswers {
        prompts: prompts.collect::<Result<_, _>>()?,
        constraint,
        reasoning: None,
        reader: None,
        shown: Vec::new(),
        max_tokens: options.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS),
        options,
        logprobs: logprobs.map(|top| top as usize),
    })
}

struct CompletionChunks {
    text: Arc<ModelText>,
    envelope: Envelope,
    /// Whether they are asked for.
    logprobs: bool,
    /// Characters of each choice's text so far, by its tokens.
    offsets: Vec<usize>,
    /// What each choice says first; none where nothing is echoed.
    prompts: Vec<String>,
}

impl ChunkFormat for CompletionChunks {
    fn whole(&self, index: usize, answered: AnsweredChoice) -> Value {
        let logprobs = match self.logprobs {
            true => completion_tokens(&self.text.tokenizer, &answered.tokens, &mut 0),
            false => Value::Null,
        };
        let reason = answer::finish_reason(answered.reason).into();
        let prompt = self.prompts.get(index).map_or("", String::as_str);
        let said = format!("{prompt}{}", answered.content());
        choice(index, ("text", said.into()), logprobs, reason)
    }

    fn answer(&self, choices: Vec<Value>) -> Value {
        self.envelope.around("text_completion", choices)
    }

    fn opening(&self, index: usize) -> Option<Value> {
        let prompt = self
            .prompts
            .get(index)
            .filter(|prompt| !prompt.is_empty())?;
        let said = ("text", json!(prompt));
        Some(choice(index, said, Value::Null, Value::Null))
    }

    fn delta(
        &mut self,
        index: usize,
        part: AnswerPart,
        token: Option<(u32, TokenLogprob)>,
    ) -> Value {
        let AnswerPart::Content(text) = part else {
            return Value::Null;
        };
        let logprobs = match (&token, self.offsets.get_mut(index)) {
            (Some(token), Some(offset)) => completion_tokens(&self.text.tokenizer, [token], offset),
            _ => Value::Null,
        };
        choice(index, ("text", text.into()), logprobs, Value::Null)
    }

    fn finish(&self, index: usize, reason: FinishReason, _: bool) -> Value {
        let reason = answer::finish_reason(reason).into();
        choice(index, ("text", json!("")), Value::Null, reason)
    }

    fn chunk(&self, choices: Vec<Value>) -> Value {
        self.envelope.around("text_completion", choices)
    }
}

fn refuse_unsupported(fields: &Fields<'_>, options: &GenerationOptions) -> Result<(), ApiError> {
    if echo(fields)? && fields.get("logprobs").is_some() {
        return Err(ApiError::not_supported(
            "echo",
            "echo is supported without logprobs only: a prompt's own are not computed",
        ));
    }
    let best_of = fields.integer("best_of", 1..=i64::MAX)?;
    if best_of.is_some_and(|best_of| best_of != options.choices as i64) {
        return Err(ApiError::not_supported(
            "best_of",
            "best_of other than n is not supported by this server",
        ));
    }
    Ok(())
}

/// The prompt's tokens. With a suffix, what the model writes is to stand between the two.
fn encode(
    text: &ModelText,
    prompt: GivenPrompt,
    suffix: Option<&str>,
) -> Result<Arc<[u32]>, ApiError> {
    let context = text.context_length;
    match (prompt, suffix) {
        (GivenPrompt::Tokens(tokens), None) => some(tokens),
        (GivenPrompt::Text(prompt), None) => {
            let tokens = text.tokenizer.encode_at_most(context, &prompt, true, true);
            some(tokens.map_err(|error| match error {
                TokenizerError::TooLong { .. } => text.context_exceeded(),
                error => ApiError::invalid("prompt", error.to_string()),
            })?)
        }
        (GivenPrompt::Tokens(_), Some(_)) => Err(ApiError::invalid(
            "suffix",
            "suffix needs a prompt that is text, not token ids",
        )),
        (GivenPrompt::Text(prompt), Some(suffix)) => {
            let around = Around {
                before: &prompt,
                after: suffix,
                ..Around::default()
            };
            // One more, since nothing may be left out here.
            let tokens = fill_in::prompt(text, &around, context + 1, "suffix")?;
            match tokens.len() > context {
                true => Err(text.context_exceeded()),
                false => Ok(tokens),
            }
        }
    }
}

fn some(tokens: Vec<u32>) -> Result<Arc<[u32]>, ApiError> {
    match tokens.is_empty() {
        true => Err(ApiError::invalid("prompt", "the prompt has no tokens")),
        false => Ok(tokens.into()),
    }
}

fn echo(fields: &Fields<'_>) -> Result<bool, ApiError> {
    Ok(fields.boolean("echo")?.unwrap_or(false))
}
