//! The contract between the gateway (what a client asked for) and `decode` (what the ring does): plain types and
//! one channel. Nothing here computes, tokenizes or speaks HTTP.

use std::sync::Arc;
use std::time::{Duration, Instant};

use prima_text::{Constraint, ReasoningLimit, SamplingParams};
use tokio::sync::{mpsc, oneshot, watch};

use crate::ring::{HOP_METRICS, HopTiming, SILENT_FOR};
use crate::trace::Trace;

/// One prompt to continue, `choices` times; or to have the vector or the score of.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    /// Token ids of the prompt, special tokens included. Not empty.
    pub prompt: Arc<[u32]>,
    /// Choice i samples with `sampling.seed + i`.
    pub sampling: SamplingParams,
    /// Tokens to generate at most, per choice; the context length bounds it anyway.
    pub max_tokens: usize,
    /// Generation ends before the first occurrence of any of these in the text.
    pub stop: Vec<String>,
    /// What the answer has to look like.
    pub constraint: Option<Constraint>,
    /// How long it may reason.
    pub reasoning: Option<ReasoningLimit>,
    /// Control tokens whose names are part of the text.
    pub shown: Vec<u32>,
    /// `Some(n)`: every token carries its logprob and the n most likely alternatives.
    pub logprobs: Option<usize>,
    /// Independent continuations of the same prompt (OpenAI's `n`).
    pub choices: usize,
    /// Nothing is generated: one event brings what is asked for instead. Of the fields above only the prompt counts.
    pub instead: Option<Instead>,
    /// Whose it is: what one has computed is never used for another, who could tell by the time it takes.
    pub keyspace: u64,
    /// Who asks: clients take turns.
    pub client: u64,
}

/// What of a prompt is asked for instead of a continuation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instead {
    /// [`GenerationEvent::Embedding`]. With `dimensions`, only the first so many numbers; its length is 1 again.
    Embedding { dimensions: Option<usize> },
    /// [`GenerationEvent::Score`].
    Score,
}

/// What comes back, in order per choice.
#[derive(Clone, Debug, PartialEq)]
pub enum GenerationEvent {
    /// One token. `text` holds only complete characters and no part of a possible stop string, so it may be
    /// empty, and may hold the text of earlier tokens too.
    Token {
        choice: usize,
        token: u32,
        text: String,
        logprob: Option<TokenLogprob>,
    },
    /// The last event of a choice. `text` is what was held back and turned out to be no stop string.
    Finished {
        choice: usize,
        reason: FinishReason,
        text: String,
    },
    /// The vector of the prompt, of length 1.
    Embedding(Vec<f32>),
    /// How well what the prompt compares goes together, from 0 to 1.
    Score(f32),
    /// The last event of the whole request after every choice has finished.
    Usage(Usage),
    /// The last event of a request that failed. Nothing follows.
    Failed(GenerationError),
}

/// Log-probabilities (natural log, of the model's own distribution).
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    pub logprob: f32,
    /// Most likely first: token id and its logprob.
    pub top: Vec<(u32, f32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-generation token.
    Stop,
    /// This one of the stop strings.
    StopString(usize),
    /// `max_tokens` or the end of the context.
    Length,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    pub prompt_tokens: usize,
    /// Tokens of the prompt that had been computed for an earlier request.
    pub cached_tokens: usize,
    pub completion_tokens: usize,
    /// Of these, reasoning. The gateway counts them, which takes answers apart.
    pub reasoning_tokens: usize,
    pub drafts: Drafts,
    /// Prefill: from the start of computing to the first token.
    pub prompt_seconds: f64,
    /// Decode: from the first to the last token.
    pub completion_seconds: f64,
}

/// Tokens that were sent round the ring before they were known, in guesses how the text goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Drafts {
    pub drafted: usize,
    /// Those of them that the model said, too.
    pub accepted: usize,
}

/// Why a request that had been accepted could not be finished.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GenerationError {
    #[error("ring member {member} was lost: {cause}")]
    MemberLost { member: String, cause: String },
    #[error("no answer from the ring within {seconds} s")]
    Deadline { seconds: u64 },
    #[error("the ring refused the request: {reason}")]
    Refused { reason: String },
    #[error("the model produced no usable logits: {reason}")]
    Logits { reason: String },
    #[error("the ring is shutting down")]
    ShuttingDown,
}

/// Why a request was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    #[error(
        "{running} requests are running and {waiting} waiting, which is the limit; try again later"
    )]
    Full {
        running: usize,
        waiting: usize,
        retry_after: Duration,
    },
    /// In words that clients look for, since many look at nothing else.
    #[error(
        "this model's maximum context length is {context} tokens, and the prompt has more; shorten it"
    )]
    ContextExceeded { context: usize },
    #[error("the ring is not ready: {reason}")]
    NotReady { reason: String },
    #[error("{field}: {problem}")]
    Invalid {
        field: &'static str,
        problem: String,
    },
}

/// What the gateway hands to `decode`.
pub struct Submission {
    pub request: GenerationRequest,
    /// Of whoever submits it.
    pub trace: Trace,
    /// Where events go. When the receiver is dropped, the request is cancelled and its KV freed on every member.
    pub events: mpsc::Sender<GenerationEvent>,
    /// Answered at once: accepted, or why not.
    pub accepted: oneshot::Sender<Result<(), SubmitError>>,
}

/// The gateway's handle on the ring. Cheap to clone.
#[derive(Clone)]
pub struct Generator {
    submissions: mpsc::Sender<Submission>,
    status: watch::Receiver<RingStatus>,
}

/// Events kept for a client that reads slowly, before `decode` counts it as gone.
const EVENT_BUFFER: usize = 4096;

impl Generator {
    pub fn new(submissions: mpsc::Sender<Submission>, status: watch::Receiver<RingStatus>) -> Self {
        Self {
            submissions,
            status,
        }
    }

    /// Hands a request to the ring. Dropping the receiver cancels it.
    pub async fn submit(
        &self,
        request: GenerationRequest,
    ) -> Result<mpsc::Receiver<GenerationEvent>, SubmitError> {
        let stopped = || SubmitError::NotReady {
            reason: "it is shutting down".into(),
        };
        let (events, receiver) = mpsc::channel(EVENT_BUFFER);
        let (accepted, answer) = oneshot::channel();
        let submission = Submission {
            request,
            trace: Trace::current(),
            events,
            accepted,
        };
        self.submissions
            .send(submission)
            .await
            .map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())??;
        Ok(receiver)
    }

    /// The ring's state now; `watch::Receiver::changed` tells of changes.
    pub fn status(&self) -> watch::Receiver<RingStatus> {
        self.status.clone()
    }
}

/// The state of the ring as rank 0 sees it: for /health, /metrics and the chat page.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct RingStatus {
    pub readiness: Readiness,
    /// The member at which a ring fails that is not ready: it is not reached, or cannot compute.
    pub fails_at: Option<String>,
    /// The neighbour that does not reach that member, if it is the only one that says so: both may be there, and the way between them is not.
    pub missed_by: Option<String>,
    /// The first member of which nothing was heard for a while. The ring may go on yet, so requests still wait for it; but nobody should be sent here.
    pub silent: Option<String>,
    /// What went round the ring does not come home, though all members may be heard of: one computes nothing, or its frames do not arrive. As for
    /// [`Self::silent`], it may go on yet.
    pub late: bool,
    /// When rank 0 last looked for what there is to do, which it does four times a second whatever happens; `None` where nobody decodes yet.
    #[serde(skip)]
    pub looked: Option<Instant>,
    pub plan_generation: i64,
    pub rounds: usize,
    pub members: Vec<MemberTotals>,
    pub running_requests: usize,
    pub waiting_requests: usize,
    pub kv_bytes: u64,
    pub kv: KvUse,
    pub drafts: Drafts,
    /// Of the experts that tokens would lack if they chose all alike, those that they do lack, in percent. `None`: nothing is known.
    pub expert_miss_percent: Option<i32>,
}

impl RingStatus {
    /// Whether rank 0 itself stands still, for as long as makes others silent: all else that is said here is of before. It waits for nothing but a
    /// disk, or a system that gives it no time. On a busy machine it comes to its turn some tenths of a second late.
    pub fn stands_still(&self) -> bool {
        let waits = self.looked.map(|looked| looked.elapsed());
        waits.is_some_and(|waits| waits > SILENT_FOR)
    }
}

/// The positions that the KV caches of every member hold, in whole blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct KvUse {
    /// What the plan pays for.
    pub planned_positions: usize,
    pub used_positions: usize,
    /// Those of them that no request uses; they give way.
    pub kept_positions: usize,
    /// Sessions that hold them.
    pub sessions: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase", tag = "state", content = "reason")]
pub enum Readiness {
    /// What is awaited, for people.
    Loading(String),
    /// A token went round.
    Ready,
    /// Why the ring cannot serve.
    Failed(String),
}

/// One member, and what its windows cost over all frames so far (totals only grow, as Prometheus counters do).
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct MemberTotals {
    pub name: String,
    pub address: String,
    /// `[first, last)` per round.
    pub windows: Vec<(usize, usize)>,
    pub frames: u64,
    /// Time that frames took between members. It is known of all of them together only; this is an equal share.
    pub network_seconds: f64,
    /// Its metrics: sums over all frames, and gauges as of the last.
    #[serde(flatten, serialize_with = "by_name")]
    pub timing: HopTiming,
    /// What the plan expects to be read for every token, if it says so.
    pub planned_read_bytes: Option<u64>,
    /// What the plan counts on for its KV cache, if it says so.
    pub planned_kv_bytes: Option<u64>,
}

/// Each metric in its unit.
fn by_name<S: serde::Serializer>(timing: &HopTiming, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(
        HOP_METRICS
            .iter()
            .map(|metric| (metric.name, metric.of(timing))),
    )
}
