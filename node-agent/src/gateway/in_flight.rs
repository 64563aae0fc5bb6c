//! One HTTP request's generations: submitted, merged into one stream of events, metered, and cancelled when dropped. A
//! completions request may bring several prompts; from here on they are only numbered choices.

use std::sync::Arc;
use std::time::Instant;

use futures::StreamExt;
use futures::stream::{BoxStream, SelectAll, unfold};
use prima_text::{AnswerPart, AnswerReader, Constraint, ReasoningLimit};
use serde_json::Value;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::Receiver;

use crate::generation::{
    FinishReason, GenerationError, GenerationEvent, GenerationRequest, TokenLogprob, Usage,
};

use super::Gateway;
use super::auth::Caller;
use super::intake::Taken;
use super::key_account::KeyAccount;
use super::metrics::ChoiceOutcome;
use super::openai_error::ApiError;
use super::request::GenerationOptions;

/// What happens to an HTTP request's choices, numbered prompt by prompt.
pub enum AnswerProgress {
    Token {
        choice: usize,
        token: u32,
        parts: Vec<AnswerPart>,
        logprob: Option<TokenLogprob>,
    },
    Finished {
        choice: usize,
        reason: FinishReason,
        parts: Vec<AnswerPart>,
        /// A stop string ended it in the middle of a call, which is none then.
        in_call: bool,
    },
    /// The last event: token counts summed over the prompts, which ran side by side.
    Done(Usage),
    /// The last one.
    Failed(GenerationError),
}

/// A whole answer.
pub struct AnsweredChoice {
    /// What it says, in the order in which it came.
    pub blocks: Vec<Block>,
    /// Filled when logprobs were asked for.
    pub tokens: Vec<(u32, TokenLogprob)>,
    pub reason: FinishReason,
    /// A stop string ended it in the middle of a call, which is left out.
    pub in_call: bool,
}

/// Parts of an answer that follow one another and are of one kind, as one.
pub enum Block {
    Content(String),
    Reasoning(String),
    Call { name: String, arguments: String },
}

/// What an HTTP request asks for.
pub struct AskedAnswers {
    pub prompts: Vec<Arc<[u32]>>,
    pub options: GenerationOptions,
    /// What the answers have to look like.
    pub constraint: Option<Constraint>,
    /// How long they may reason.
    pub reasoning: Option<ReasoningLimit>,
    /// Takes an answer apart; without it, all is content.
    pub reader: Option<AnswerReader>,
    /// Control tokens that the reader needs to see.
    pub shown: Vec<u32>,
    /// Alternatives for each token, if logprobs are asked for.
    pub logprobs: Option<usize>,
    pub max_tokens: usize,
}

/// Dropping it cancels what has not finished.
pub struct InFlight {
    events: SelectAll<BoxStream<'static, (usize, GenerationEvent)>>,
    choices_per_prompt: usize,
    prompts: Vec<Prompt>,
    /// Of each choice, until it has ended.
    readers: Vec<Option<AnswerReader>>,
    usage: Usage,
    /// Prompts whose usage has come.
    ended: usize,
    started: Instant,
    gateway: Gateway,
    account: Option<Arc<KeyAccount>>,
    _place: OwnedSemaphorePermit,
}

impl InFlight {
    /// Hands every prompt to the ring; if it refuses one, or the caller's key has used what it may, none runs.
    pub async fn submit(
        gateway: &Gateway,
        caller: Caller,
        taken: Taken<AskedAnswers>,
    ) -> Result<Self, ApiError> {
        let Taken { asked, place, room } = taken;
        if let Some(account) = &caller.account {
            account.admit(Instant::now())?;
        }
        let AskedAnswers {
            prompts,
            options,
            constraint,
            reasoning,
            reader,
            shown,
            logprobs,
            max_tokens,
        } = asked;
        let readers = vec![reader; prompts.len() * options.choices];
        let mut in_flight = Self {
            events: SelectAll::new(),
            choices_per_prompt: options.choices,
            prompts: Vec::with_capacity(prompts.len()),
            readers,
            usage: Usage::default(),
            ended: 0,
            started: Instant::now(),
            gateway: gateway.clone(),
            account: caller.account,
            _place: place,
        };
        for prompt in prompts {
            let prompt_tokens = prompt.len();
            let request = GenerationRequest {
                prompt,
                sampling: options.sampling.clone(),
                max_tokens,
                stop: options.stop.clone(),
                constraint: constraint.clone(),
                reasoning: reasoning.clone(),
                shown: shown.clone(),
                logprobs,
                choices: options.choices,
                instead: None,
                keyspace: caller.keyspace,
                client: caller.client,
            };
            let events = gateway.0.generator.submit(request).await?;
            if let Some(account) = &in_flight.account {
                account.prompt(prompt_tokens);
            }
            let number = in_flight.prompts.len();
            in_flight.prompts.push(Prompt {
                tokens: prompt_tokens,
                computed: false,
                choices: vec![ChoiceClock::default(); options.choices],
            });
            in_flight.events.push(
                until_the_end(events)
                    .map(move |event| (number, event))
                    .boxed(),
            );
        }
        drop(room);
        Ok(in_flight)
    }

    pub fn choices(&self) -> usize {
        self.prompts.len() * self.choices_per_prompt
    }

    /// `None` after [`AnswerProgress::Done`] or [`AnswerProgress::Failed`].
    pub async fn next(&mut self) -> Option<AnswerProgress> {
        while let Some((prompt, event)) = self.events.next().await {
            let offset = prompt * self.choices_per_prompt;
            match event {
                GenerationEvent::Token {
                    choice,
                    token,
                    text,
                    logprob,
                } => {
                    self.note_token(prompt, choice);
                    let choice = offset + choice;
                    return Some(AnswerProgress::Token {
                        choice,
                        token,
                        parts: self.read(choice, text),
                        logprob,
                    });
                }
                GenerationEvent::Finished {
                    choice,
                    reason,
                    text,
                } => {
                    self.note_finished(prompt, choice, reason);
                    let choice = offset + choice;
                    let reader = self.readers.get_mut(choice).and_then(Option::take);
                    let mut in_call = false;
                    let parts = match reader {
                        Some(mut reader) => {
                            let mut parts = reader.push(&text);
                            let stopped = matches!(reason, FinishReason::StopString(_));
                            in_call = stopped && reader.in_call();
                            parts.extend(match reason {
                                FinishReason::Length => reader.cut_off(),
                                FinishReason::StopString(_) if in_call => reader.cut_off(),
                                FinishReason::Stop | FinishReason::StopString(_) => reader.finish(),
                            });
                            parts
                        }
                        None => self.read(choice, text),
                    };
                    return Some(AnswerProgress::Finished {
                        choice,
                        reason,
                        parts,
                        in_call,
                    });
                }
                // Nobody asks for these here.
                GenerationEvent::Embedding(_) | GenerationEvent::Score(_) => {}
                GenerationEvent::Usage(usage) => {
                    self.usage.prompt_tokens += usage.prompt_tokens;
                    self.usage.cached_tokens += usage.cached_tokens;
                    self.gateway.0.metrics.cached_tokens(usage.cached_tokens);
                    if let Some(account) = &self.account {
                        account.kept(usage.cached_tokens);
                    }
                    self.usage.completion_tokens += usage.completion_tokens;
                    self.usage.drafts.drafted += usage.drafts.drafted;
                    self.usage.drafts.accepted += usage.drafts.accepted;
                    self.usage.prompt_seconds = self.usage.prompt_seconds.max(usage.prompt_seconds);
                    self.usage.completion_seconds =
                        self.usage.completion_seconds.max(usage.completion_seconds);
                    self.ended += 1;
                    if self.ended == self.prompts.len() {
                        return Some(AnswerProgress::Done(self.usage));
                    }
                }
                GenerationEvent::Failed(error) => {
                    tracing::warn!(%error, "a generation failed");
                    self.note_open_choices(ChoiceOutcome::Failed);
                    self.events.clear();
                    return Some(AnswerProgress::Failed(error));
                }
            }
        }
        None
    }

    /// Waits for the answer of a request for one.
    pub async fn collect_one(self) -> Result<(AnsweredChoice, Usage), ApiError> {
        let (mut choices, usage) = self.collect().await?;
        let answered = choices.pop().ok_or(ApiError::Internal {
            action: "reading the answer",
        })?;
        Ok((answered, usage))
    }

    /// Waits for everything.
    pub async fn collect(mut self) -> Result<(Vec<AnsweredChoice>, Usage), GenerationError> {
        let empty = || AnsweredChoice {
            blocks: Vec::new(),
            tokens: Vec::new(),
            reason: FinishReason::Stop,
            in_call: false,
        };
        let mut choices: Vec<AnsweredChoice> =
            std::iter::repeat_with(empty).take(self.choices()).collect();
        while let Some(progress) = self.next().await {
            match progress {
                AnswerProgress::Token {
                    choice,
                    token,
                    parts,
                    logprob,
                } => {
                    if let Some(choice) = choices.get_mut(choice) {
                        choice.add(parts);
                        choice
                            .tokens
                            .extend(logprob.map(|logprob| (token, logprob)));
                    }
                }
                AnswerProgress::Finished {
                    choice,
                    reason,
                    parts,
                    in_call,
                } => {
                    if let Some(choice) = choices.get_mut(choice) {
                        choice.add(parts);
                        choice.reason = reason;
                        choice.in_call = in_call;
                        if in_call {
                            choice.leave_out_broken_call();
                        }
                    }
                }
                AnswerProgress::Done(usage) => return Ok((choices, usage)),
                AnswerProgress::Failed(error) => return Err(error),
            }
        }
        Err(abandoned())
    }

    /// What a piece of a choice's text is.
    fn read(&mut self, choice: usize, text: String) -> Vec<AnswerPart> {
        match self.readers.get_mut(choice) {
            Some(Some(reader)) => {
                let reasoned = reader.reasons();
                let parts = reader.push(&text);
                // Neither mark is reasoning.
                self.usage.reasoning_tokens += usize::from(reasoned && reader.reasons());
                parts
            }
            _ if text.is_empty() => Vec::new(),
            _ => vec![AnswerPart::Content(text)],
        }
    }

    fn note_token(&mut self, prompt: usize, choice: usize) {
        let now = Instant::now();
        let metrics = &self.gateway.0.metrics;
        let Some(prompt) = self.prompts.get_mut(prompt) else {
            return;
        };
        if !prompt.computed {
            prompt.computed = true;
            metrics.first_token(prompt.tokens, now - self.started);
        }
        metrics.token();
        if let Some(account) = &self.account {
            account.token();
        }
        if let Some(clock) = prompt.choices.get_mut(choice) {
            clock.tokens += 1;
            let (_, last) = clock.first_and_last.get_or_insert((now, now));
            *last = now;
        }
    }

    fn note_finished(&mut self, prompt: usize, choice: usize, reason: FinishReason) {
        let metrics = &self.gateway.0.metrics;
        let clock = self
            .prompts
            .get_mut(prompt)
            .and_then(|prompt| prompt.choices.get_mut(choice));
        if let Some(clock) = clock {
            clock.over = true;
            if let (Some((first, last)), 2..) = (clock.first_and_last, clock.tokens) {
                metrics.time_per_token((last - first) / (clock.tokens - 1));
            }
        }
        metrics.finished(match reason {
            FinishReason::Stop | FinishReason::StopString(_) => ChoiceOutcome::Stop,
            FinishReason::Length => ChoiceOutcome::Length,
        });
    }

    fn note_open_choices(&mut self, outcome: ChoiceOutcome) {
        let choices = self
            .prompts
            .iter_mut()
            .flat_map(|prompt| &mut prompt.choices);
        for choice in choices.filter(|choice| !choice.over) {
            choice.over = true;
            self.gateway.0.metrics.finished(outcome);
        }
    }
}

impl AnsweredChoice {
    /// All of its content.
    pub fn content(&self) -> String {
        let content = self.blocks.iter().filter_map(|block| match block {
            Block::Content(text) => Some(text.as_str()),
            _ => None,
        });
        content.collect()
    }

    /// All of its reasoning.
    pub fn reasoning(&self) -> String {
        let reasoning = self.blocks.iter().filter_map(|block| match block {
            Block::Reasoning(text) => Some(text.as_str()),
            _ => None,
        });
        reasoning.collect()
    }

    /// Names and arguments of its calls.
    pub fn calls(&self) -> impl Iterator<Item = (&str, &str)> {
        self.blocks.iter().filter_map(|block| match block {
            Block::Call { name, arguments } => Some((name.as_str(), arguments.as_str())),
            _ => None,
        })
    }

    /// Agents would carry it out. The one before it is whole.
    fn leave_out_broken_call(&mut self) {
        if let Some(Block::Call { arguments, .. }) = self.blocks.last()
            && serde_json::from_str::<Value>(arguments).is_err()
        {
            self.blocks.pop();
        }
    }

    fn add(&mut self, parts: Vec<AnswerPart>) {
        for part in parts {
            match (self.blocks.last_mut(), part) {
                (Some(Block::Content(text)), AnswerPart::Content(more))
                | (Some(Block::Reasoning(text)), AnswerPart::Reasoning(more))
                | (
                    Some(Block::Call {
                        arguments: text, ..
                    }),
                    AnswerPart::Arguments(more),
                ) => *text += &more,
                (_, AnswerPart::Content(text)) => self.blocks.push(Block::Content(text)),
                (_, AnswerPart::Reasoning(text)) => self.blocks.push(Block::Reasoning(text)),
                (_, AnswerPart::Call { name }) => self.blocks.push(Block::Call {
                    name,
                    arguments: String::new(),
                }),
                // Arguments follow their call.
                (_, AnswerPart::Arguments(_)) => {}
            }
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.note_open_choices(ChoiceOutcome::Cancelled);
        if let Some(account) = &self.account {
            account.answered(self.started.elapsed());
        }
    }
}

struct Prompt {
    tokens: usize,
    /// Its first token has come.
    computed: bool,
    choices: Vec<ChoiceClock>,
}

#[derive(Clone, Default)]
struct ChoiceClock {
    first_and_last: Option<(Instant, Instant)>,
    tokens: u32,
    over: bool,
}

/// A prompt's events up to and including the last one; a channel that closes early counts as failed.
fn until_the_end(
    events: Receiver<GenerationEvent>,
) -> impl futures::Stream<Item = GenerationEvent> + Send + 'static {
    unfold(Some(events), |open| async move {
        let mut events = open?;
        match events.recv().await {
            Some(last @ (GenerationEvent::Usage(_) | GenerationEvent::Failed(_))) => {
                Some((last, None))
            }
            Some(event) => Some((event, Some(events))),
            None => Some((GenerationEvent::Failed(abandoned()), None)),
        }
    })
}

/// Nothing more comes of a request.
pub fn abandoned() -> GenerationError {
    GenerationError::Refused {
        reason: "it ended without an answer".into(),
    }
}
