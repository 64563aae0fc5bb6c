//! Texts of each of which one thing is asked for: its vector, or its score.
//!
//! Each is a request of its own to the ring, a few of a batch at a time: a large batch keeps no place from others.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt, stream};
use prima_text::{SamplingParams, TokenizerError};
use tokio::time::sleep;

use crate::generation::{GenerationEvent, GenerationRequest, Instead, SubmitError, Usage};

use super::auth::Caller;
use super::in_flight;
use super::openai_error::ApiError;
use super::{Gateway, ModelText};

/// Texts of one batch that the ring has at a time.
const AT_ONCE: usize = 4;
/// How long a text waits until its key may use more; its batch is refused where that takes longer.
const WORTH_WAITING: Duration = Duration::from_secs(30);
/// How long a text that found the ring full waits before it asks again, at most: its batch's others are being computed.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// The tokens of text `number` of the field `field`, at most `limit`; `whole`: with those that begin and end a text.
pub fn encode(
    text: &ModelText,
    (field, number): (&str, usize),
    (input, whole): (&str, bool),
    limit: usize,
) -> Result<Vec<u32>, ApiError> {
    let encoded = text.tokenizer.encode_at_most(limit, input, whole, true);
    encoded.map_err(|error| match error {
        TokenizerError::TooLong { .. } => too_long(text, (field, number)),
        error => refused((field, number), &error.to_string()),
    })
}

/// Tokens that the context can hold.
pub fn within(
    text: &ModelText,
    place: (&str, usize),
    tokens: Vec<u32>,
) -> Result<Arc<[u32]>, ApiError> {
    match tokens.len() {
        0 => Err(refused(place, "it has no tokens")),
        length if length > text.context_length => Err(too_long(text, place)),
        _ => Ok(tokens.into()),
    }
}

fn too_long(text: &ModelText, place: (&str, usize)) -> ApiError {
    let context = text.context_length;
    let problem = format!("it has more than {context} tokens, which is all that the context holds");
    refused(place, &problem)
}

fn refused((field, number): (&str, usize), problem: &str) -> ApiError {
    let problem = format!("{field} number {number}, counted from 0: {problem}");
    ApiError::invalid(field, problem)
}

/// Has the ring compute what is asked of each text. The answers come in the texts' order; dropping them cancels what is under way.
pub fn answers<'a>(
    gateway: &'a Gateway,
    caller: &'a Caller,
    texts: Vec<Arc<[u32]>>,
    asked: Instead,
) -> impl Stream<Item = Result<(GenerationEvent, Usage), ApiError>> + 'a {
    let computed = texts.into_iter().enumerate().map(move |(number, text)| {
        // The first is told if the ring is full, and the whole batch with it.
        let patient = number > 0;
        answer(gateway, caller, text, asked, patient)
    });
    stream::iter(computed).buffered(AT_ONCE)
}

/// `patient`: waits where the ring is full, or has lost a member for a while.
async fn answer(
    gateway: &Gateway,
    caller: &Caller,
    prompt: Arc<[u32]>,
    asked: Instead,
    patient: bool,
) -> Result<(GenerationEvent, Usage), ApiError> {
    let (begun, account) = (Instant::now(), caller.account.as_ref());
    if let Some(account) = account {
        while let Err(error) = account.admit(Instant::now()) {
            match error {
                ApiError::KeyLimit { retry_after, .. }
                    if patient && retry_after <= WORTH_WAITING =>
                {
                    sleep(retry_after).await;
                }
                error => return Err(error),
            }
        }
    }
    let tokens = prompt.len();
    let request = GenerationRequest {
        prompt,
        sampling: SamplingParams::default(),
        max_tokens: 0,
        stop: Vec::new(),
        constraint: None,
        reasoning: None,
        shown: Vec::new(),
        logprobs: None,
        choices: 1,
        instead: Some(asked),
        keyspace: caller.keyspace,
        client: caller.client,
    };
    let mut events = loop {
        match gateway.0.generator.submit(request.clone()).await {
            Err(SubmitError::Full { retry_after, .. }) if patient => {
                sleep(retry_after.min(LONGEST_WAIT)).await;
            }
            Err(SubmitError::NotReady { .. }) if patient && begun.elapsed() < WORTH_WAITING => {
                sleep(LONGEST_WAIT).await;
            }
            submitted => break submitted?,
        }
    };
    if let Some(account) = account {
        account.prompt(tokens);
    }
    let mut answer = None;
    while let Some(event) = events.recv().await {
        match event {
            GenerationEvent::Embedding(_) | GenerationEvent::Score(_) => answer = Some(event),
            GenerationEvent::Usage(usage) => {
                let metrics = &gateway.0.metrics;
                metrics.pooled(usage.prompt_tokens);
                metrics.cached_tokens(usage.cached_tokens);
                if let Some(account) = account {
                    account.kept(usage.cached_tokens);
                    account.answered(begun.elapsed());
                }
                let answer = answer.ok_or_else(in_flight::abandoned)?;
                return Ok((answer, usage));
            }
            GenerationEvent::Failed(error) => return Err(error.into()),
            // Nothing is generated.
            GenerationEvent::Token { .. } | GenerationEvent::Finished { .. } => {}
        }
    }
    Err(in_flight::abandoned().into())
}
