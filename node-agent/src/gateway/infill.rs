//! POST /infill: llama.cpp's API for editors, which send what stands before and after the cursor and pieces of other files. What does not fit
//! into the context is left out, since editors do not count tokens.

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use prima_text::AnswerPart;
use serde_json::{Value, json};

use crate::generation::{FinishReason, Usage};

use super::answer;
use super::auth::Caller;
use super::fill_in::{self, Around, FilePiece};
use super::grammar;
use super::in_flight::{AnswerProgress, AskedAnswers, InFlight};
use super::openai_error::ApiError;
use super::request::{Fields, GenerationOptions};
use super::stream::{self, Format, Message};
use super::{Gateway, ModelText};

/// Pieces of other files.
const MAX_PIECES: usize = 256;

pub async fn create(
    State(gateway): State<Gateway>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let text = gateway.ready()?;
    let read = move |fields: &Fields<'_>| asked(&text, fields);
    let taken = gateway.0.intake.take(request, read).await?;
    let stream = taken.asked.options.stream;
    let answer = Answer {
        model: gateway.0.model.name.clone(),
        stops: taken.asked.options.stop.clone(),
        reason: FinishReason::Stop,
        line_ended: false,
    };
    let in_flight = InFlight::submit(&gateway, caller, taken).await?;
    if stream {
        return Ok(stream::events(in_flight, answer));
    }
    let (answered, usage) = in_flight.collect_one().await?;
    let content = answered.content();
    let answer = Answer {
        reason: answered.reason,
        line_ended: content.contains('\n'),
        ..answer
    };
    Ok(Json(answer.last(&content, &usage)).into_response())
}

fn asked(text: &ModelText, fields: &Fields<'_>) -> Result<AskedAnswers, ApiError> {
    let given = |name| {
        let part = fields.string(name)?;
        part.ok_or_else(|| fields.missing(name))
    };
    // Some editors send the beginning of the cursor's line apart.
    let before = given("input_prefix")?.to_owned() + fields.string("prompt")?.unwrap_or("");
    let around = Around {
        before: &before,
        after: given("input_suffix")?,
        others: pieces(fields)?,
    };
    let mut same = fields.renamed(&[
        ("stream", "stream"),
        ("temperature", "temperature"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("seed", "seed"),
        ("stop", "stop"),
        ("repeat_penalty", "repeat_penalty"),
        ("presence_penalty", "presence_penalty"),
        ("frequency_penalty", "frequency_penalty"),
    ]);
    // Below 0 means without a limit.
    let limit = fields.integer("n_predict", -1..=i64::MAX)?;
    if let Some(limit) = limit.filter(|limit| *limit > 0) {
        same.insert("max_tokens".to_owned(), limit.into());
    }
    let options = GenerationOptions::parse(&Fields::new(&same), text.tokenizer.vocab_size())?;
    let constraint = match grammar::asked(fields)? {
        Some(asked) => Some(text.constraint(asked.grammar, asked.field)?),
        None => None,
    };
    let context = text.context_length;
    let answer = options.max_tokens.unwrap_or(context / 8).min(context / 2);
    let prompt = fill_in::prompt(text, &around, context - answer, "input_suffix")?;
    Ok(AskedAnswers {
        prompts: vec![prompt],
        constraint,
        reasoning: None,
        reader: None,
        shown: Vec::new(),
        max_tokens: options.max_tokens.unwrap_or(usize::MAX),
        options,
        logprobs: None,
    })
}

fn pieces<'a>(fields: &Fields<'a>) -> Result<Vec<FilePiece<'a>>, ApiError> {
    let pieces = fields.array("input_extra")?.unwrap_or_default();
    if pieces.len() > MAX_PIECES {
        let found = pieces.len();
        let problem =
            format!("input_extra must hold at most {MAX_PIECES} pieces, but holds {found}");
        return Err(ApiError::invalid("input_extra", problem));
    }
    let read = |(index, piece): (usize, &'a Value)| {
        let piece = Fields::of(piece, &format!("input_extra[{index}]"))?;
        Ok(FilePiece {
            name: piece.string("filename")?.unwrap_or("tmp"),
            text: piece.string("text")?.ok_or_else(|| piece.missing("text"))?,
        })
    };
    pieces.iter().enumerate().map(read).collect()
}

/// An answer in llama.cpp's words.
struct Answer {
    model: String,
    stops: Vec<String>,
    reason: FinishReason,
    line_ended: bool,
}

impl Answer {
    fn last(&self, content: &str, usage: &Usage) -> Value {
        let (kind, word) = match self.reason {
            FinishReason::Stop => ("eos", ""),
            FinishReason::Length => ("limit", ""),
            FinishReason::StopString(place) => {
                ("word", self.stops.get(place).map_or("", String::as_str))
            }
        };
        json!({
            "index": 0,
            "content": content,
            "stop": true,
            "model": self.model,
            "stop_type": kind,
            "stopping_word": word,
            "has_new_line": self.line_ended,
            "truncated": false,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "timings": answer::timings(usage),
        })
    }

    /// A message for each text among the parts.
    fn said(&mut self, parts: Vec<AnswerPart>) -> Vec<Message> {
        let texts = parts.into_iter().filter_map(|part| match part {
            AnswerPart::Content(text) => Some(text),
            AnswerPart::Reasoning(_) | AnswerPart::Call { .. } | AnswerPart::Arguments(_) => None,
        });
        let say = |text: String| {
            self.line_ended |= text.contains('\n');
            Message::json(&json!({"index": 0, "content": text, "stop": false}))
        };
        texts.map(say).collect()
    }
}

impl Format for Answer {
    fn begin(&mut self, _: usize) -> Vec<Message> {
        Vec::new()
    }

    fn write(&mut self, progress: AnswerProgress) -> Vec<Message> {
        match progress {
            AnswerProgress::Token { parts, .. } => self.said(parts),
            AnswerProgress::Finished { reason, parts, .. } => {
                self.reason = reason;
                self.said(parts)
            }
            AnswerProgress::Done(usage) => vec![Message::json(&self.last("", &usage))],
            AnswerProgress::Failed(error) => vec![Message::json(&ApiError::from(error).body())],
        }
    }
}
