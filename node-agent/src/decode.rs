//! Rank 0's loop: takes requests, sends their prompts round the ring in chunks and their tokens one by one, and turns
//! logits into events. Decides which request computes when (prompts take turns by chunk, every running choice has one
//! token in flight) and when a request is refused, finished or failed. It computes nothing itself and speaks no HTTP.
//!
//! It runs on the ring's thread: a token that comes home goes out again without waking another thread.
//! The loop ends when all [`Generator`](crate::generation::Generator)s are gone and nothing is left to answer.

mod choice;
mod stop_strings;
mod tally;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::ring_plan::RingPlanSpec;
use prima_text::{SamplingError, Tokenizer};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};

use crate::generation::{
    GenerationError, GenerationEvent, GenerationRequest, Readiness, RingStatus, Submission,
    SubmitError, Usage,
};
use crate::ring::{MAX_FRAME_ROWS, RingClient, RingError, RingEvent, SessionId};

use choice::Choice;
use tally::Tally;

/// The status of a ring that is not up yet, which the gateway starts with.
pub fn initial_status(plan: &RingPlanSpec) -> RingStatus {
    RingStatus {
        readiness: Readiness::Loading("opening the model".into()),
        plan_generation: plan.generation,
        rounds: plan.rounds as usize,
        members: Tally::new(plan).members,
        running_requests: 0,
        waiting_requests: 0,
        kv_bytes: 0,
    }
}

/// Rank 0's requests and their state.
pub struct Decode {
    client: RingClient,
    plan: Arc<RingPlanSpec>,
    tokenizer: Tokenizer,
    vocabulary: usize,
    status: watch::Sender<RingStatus>,
    phase: Phase,
    readiness: Readiness,
    waiting: VecDeque<Waiting>,
    running: HashMap<RequestId, Running>,
    /// Requests whose prompt is not fully sent, in turn.
    prefilling: VecDeque<RequestId>,
    last_request: RequestId,
    /// Request and choice of each session.
    sessions: HashMap<SessionId, (RequestId, usize)>,
    /// Sessions that are being released, and since when.
    releasing: HashMap<SessionId, Instant>,
    /// Sessions that may still be opened.
    free_sessions: usize,
    /// Mean seconds of recent requests, to tell clients when to try again.
    request_seconds: f64,
    tally: Tally,
}

type RequestId = u64;

enum Phase {
    /// Asking whether the ring is whole.
    Probing {
        nonce: u64,
        asked: Instant,
    },
    /// The ring is whole; one token goes round.
    WarmingUp {
        session: SessionId,
    },
    Ready,
    /// The warm-up failed: the model cannot be computed.
    Failed,
}

struct Waiting {
    request: GenerationRequest,
    events: mpsc::Sender<GenerationEvent>,
    choices: Vec<Choice>,
}

struct Running {
    request: GenerationRequest,
    events: mpsc::Sender<GenerationEvent>,
    choices: Vec<Choice>,
    /// Tokens of the prompt that were sent.
    sent: usize,
    /// Chunks of the prompt in flight.
    chunks: usize,
    completion_tokens: usize,
    /// Sessions set aside for choices that have not opened theirs.
    reserved: usize,
    started: Instant,
    first_token: Option<Instant>,
    /// The client has gone.
    gone: bool,
}

/// How often to check for clients that left, for overdue rounds and whether the ring is whole.
const TICK: Duration = Duration::from_millis(250);
const PROBE_INTERVAL: Duration = Duration::from_millis(200);
/// Requests that may wait, per session that the ring holds.
const WAITING_PER_SESSION: usize = 4;
const FIRST_GUESS_SECONDS: f64 = 5.0;

impl Decode {
    /// `vocabulary`: rows of the model's output head.
    pub fn new(
        client: RingClient,
        plan: Arc<RingPlanSpec>,
        tokenizer: Tokenizer,
        vocabulary: usize,
        status: watch::Sender<RingStatus>,
    ) -> Self {
        Self {
            client,
            tokenizer,
            vocabulary,
            status,
            phase: Phase::Probing {
                nonce: 0,
                asked: Instant::now(),
            },
            readiness: Readiness::Loading("waiting for the ring's members".into()),
            waiting: VecDeque::new(),
            running: HashMap::new(),
            prefilling: VecDeque::new(),
            last_request: 0,
            sessions: HashMap::new(),
            releasing: HashMap::new(),
            free_sessions: plan.max_concurrent_requests as usize,
            request_seconds: FIRST_GUESS_SECONDS,
            tally: Tally::new(&plan),
            plan,
        }
    }

    /// Serves until every sender of `submissions` is gone and all requests are answered, or the ring has stopped.
    pub async fn run(mut self, mut submissions: mpsc::Receiver<Submission>) {
        if let Err(error) = self.serve(&mut submissions).await {
            tracing::info!(%error, "decoding ends");
            for (_, running) in self.running.drain() {
                let _ = running
                    .events
                    .try_send(GenerationEvent::Failed(GenerationError::ShuttingDown));
            }
            for waiting in self.waiting.drain(..) {
                let _ = waiting
                    .events
                    .try_send(GenerationEvent::Failed(GenerationError::ShuttingDown));
            }
        }
    }

    async fn serve(
        &mut self,
        submissions: &mut mpsc::Receiver<Submission>,
    ) -> Result<(), RingError> {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        self.probe().await?;
        let mut open = true;
        while open || !self.running.is_empty() || !self.waiting.is_empty() {
            let mut ticked = false;
            tokio::select! {
                biased;
                event = self.client.next() => self.hear(event.ok_or(RingError::Stopped)?).await?,
                submission = submissions.recv(), if open => match submission {
                    Some(submission) => self.accept(submission),
                    None => open = false,
                },
                _ = tick.tick() => {
                    ticked = true;
                    self.look_around().await?;
                }
            }
            while let Some(event) = self.client.try_next() {
                self.hear(event).await?;
            }
            self.begin_what_fits().await?;
            self.show(ticked);
        }
        Ok(())
    }

    // ---- requests coming in ----

    fn accept(&mut self, submission: Submission) {
        let Submission {
            request,
            events,
            accepted,
        } = submission;
        let answer = self.check(&request).map(|choices| {
            self.waiting.push_back(Waiting {
                request,
                events,
                choices,
            });
        });
        // The gateway may have given up; then the events' receiver is gone as well.
        let _ = accepted.send(answer);
    }

    /// The request's choices, or why it cannot be taken.
    fn check(&mut self, request: &GenerationRequest) -> Result<Vec<Choice>, SubmitError> {
        match &self.readiness {
            Readiness::Ready => {}
            Readiness::Loading(reason) | Readiness::Failed(reason) => {
                return Err(SubmitError::NotReady {
                    reason: reason.clone(),
                });
            }
        }
        let invalid = |field, problem: String| Err(SubmitError::Invalid { field, problem });
        let context = self.plan.context_length as usize;
        let sessions = self.plan.max_concurrent_requests as usize;
        if request.prompt.is_empty() {
            return invalid("prompt", "it has no tokens".into());
        }
        if request.prompt.len() > context {
            return Err(SubmitError::ContextExceeded {
                prompt: request.prompt.len(),
                context,
            });
        }
        if let Some(token) = request
            .prompt
            .iter()
            .find(|&&token| token as usize >= self.vocabulary)
        {
            return invalid(
                "prompt",
                format!(
                    "token {token} is not below {}, the size of the vocabulary",
                    self.vocabulary
                ),
            );
        }
        if let Some((token, _)) = request
            .sampling
            .logit_bias
            .iter()
            .find(|(token, _)| *token as usize >= self.vocabulary)
        {
            return invalid(
                "logit_bias",
                format!(
                    "token {token} is not below {}, the size of the vocabulary",
                    self.vocabulary
                ),
            );
        }
        if !(1..=sessions).contains(&request.choices) {
            return invalid(
                "n",
                format!(
                    "{} is outside 1..={sessions}, the requests that this ring runs at once",
                    request.choices
                ),
            );
        }
        if request.max_tokens == 0 {
            return invalid("max_tokens", "it must be at least 1".into());
        }
        self.waiting.retain(|waiting| !waiting.events.is_closed());
        if self.waiting.len() >= WAITING_PER_SESSION * sessions {
            let seconds = self.request_seconds * (self.waiting.len() + 1) as f64 / sessions as f64;
            return Err(SubmitError::Full {
                running: self.running.len(),
                waiting: self.waiting.len(),
                retry_after: Duration::from_secs_f64(seconds.clamp(1.0, 60.0)),
            });
        }
        (0..request.choices)
            .map(|index| Choice::new(index, request, &self.tokenizer, context))
            .collect::<Result<_, _>>()
            .map_err(|error| SubmitError::Invalid {
                field: match &error {
                    SamplingError::Range { parameter, .. } => parameter,
                    _ => "sampling",
                },
                problem: error.to_string(),
            })
    }

    // ---- work going out ----

    /// Starts waiting requests while there are sessions for them, and keeps prompts flowing.
    async fn begin_what_fits(&mut self) -> Result<(), RingError> {
        while let Phase::Ready = self.phase
            && let Some(next) = self.waiting.front()
        {
            let choices = next.choices.len();
            if choices > self.free_sessions && !next.events.is_closed() {
                break;
            }
            let Some(Waiting {
                request,
                events,
                mut choices,
            }) = self
                .waiting
                .pop_front()
                .filter(|next| !next.events.is_closed())
            else {
                continue;
            };
            let reserved = choices.len() - 1;
            self.free_sessions -= choices.len();
            self.last_request += 1;
            let id = self.last_request;
            let session = self.client.create().await?;
            choices[0].session = Some(session);
            self.sessions.insert(session, (id, 0));
            self.prefilling.push_back(id);
            self.running.insert(
                id,
                Running {
                    request,
                    events,
                    choices,
                    sent: 0,
                    chunks: 0,
                    completion_tokens: 0,
                    reserved,
                    started: Instant::now(),
                    first_token: None,
                    gone: false,
                },
            );
        }
        // One chunk more than there are members keeps them all busy, and a token waits for no more than these.
        let mut chunks: usize = self.running.values().map(|running| running.chunks).sum();
        while chunks <= self.plan.members.len()
            && let Some(id) = self.prefilling.pop_front()
        {
            let Some(running) = self.running.get_mut(&id) else {
                continue;
            };
            let Some(session) = running.choices[0].session else {
                continue;
            };
            let prompt = running.request.prompt.clone();
            let end = prompt.len().min(running.sent + MAX_FRAME_ROWS);
            let last = end == prompt.len();
            self.client
                .send(session, &prompt[running.sent..end], usize::from(last))
                .await?;
            running.sent = end;
            running.chunks += 1;
            chunks += 1;
            if !last {
                self.prefilling.push_back(id);
            }
        }
        Ok(())
    }

    // ---- what the ring tells ----

    async fn hear(&mut self, event: RingEvent) -> Result<(), RingError> {
        match event {
            RingEvent::Answer {
                session,
                logits,
                cost,
            } => {
                self.tally.add(&cost);
                self.answer(session, &logits).await
            }
            RingEvent::Released { session } => {
                if self.releasing.remove(&session).is_some() {
                    self.free_sessions += 1;
                }
                if self.releasing.is_empty() && self.sessions.is_empty() {
                    self.tally.all_released();
                }
                Ok(())
            }
            RingEvent::Whole { nonce } => {
                if matches!(self.phase, Phase::Probing { nonce: asked, .. } if asked == nonce) {
                    let session = self.client.create().await?;
                    let token = self
                        .tokenizer
                        .bos()
                        .filter(|&token| (token as usize) < self.vocabulary);
                    self.client.send(session, &[token.unwrap_or(0)], 1).await?;
                    self.phase = Phase::WarmingUp { session };
                    self.readiness =
                        Readiness::Loading("the first token goes round the ring".into());
                }
                Ok(())
            }
            RingEvent::Refused { session, reason } => {
                if matches!(self.phase, Phase::WarmingUp { session: warm } if warm == session) {
                    tracing::error!(reason, "the ring cannot compute the model");
                    self.phase = Phase::Failed;
                    self.readiness = Readiness::Failed(reason);
                    return Ok(());
                }
                match self.sessions.get(&session) {
                    Some(&(id, _)) => self.fail(id, GenerationError::Refused { reason }).await,
                    None => Ok(()),
                }
            }
            RingEvent::Lost { rank, cause } => {
                let member = match self.plan.members.get(rank) {
                    Some(member) => member.name.clone(),
                    None => format!("of rank {rank}"),
                };
                self.break_off(
                    format!("waiting for member {member}: {cause}"),
                    GenerationError::MemberLost { member, cause },
                );
                Ok(())
            }
        }
    }

    async fn answer(&mut self, session: SessionId, logits: &[f32]) -> Result<(), RingError> {
        if matches!(self.phase, Phase::WarmingUp { session: warm } if warm == session) {
            self.phase = Phase::Ready;
            self.readiness = Readiness::Ready;
            self.releasing.insert(session, Instant::now());
            self.free_sessions -= 1;
            tracing::info!("a token went round the ring; it is ready");
            return self.client.release(session).await;
        }
        let Some(&(id, choice)) = self.sessions.get(&session) else {
            return Ok(());
        };
        // Taken out of the map while it is worked on, and put back unless it is done.
        let Some(mut running) = self.running.remove(&id) else {
            return Ok(());
        };
        let stepped = if running.first_token.is_some() {
            self.step(&mut running, choice, logits).await?
        } else {
            running.chunks = running.chunks.saturating_sub(1);
            if logits.is_empty() {
                Ok(())
            } else {
                self.first_step(id, &mut running, logits).await?
            }
        };
        if let Err(error) = stepped {
            let reason = error.to_string();
            let _ = running
                .events
                .try_send(GenerationEvent::Failed(GenerationError::Logits { reason }));
            return self.let_go(running).await;
        }
        if running.gone {
            return self.let_go(running).await;
        }
        if running.choices.iter().all(|choice| choice.finished) {
            running.emit_usage();
            self.request_seconds +=
                (running.started.elapsed().as_secs_f64() - self.request_seconds) / 8.0;
            return self.let_go(running).await;
        }
        self.running.insert(id, running);
        Ok(())
    }

    /// The logits after the prompt: every choice takes its first token from them and continues in its own session.
    async fn first_step(
        &mut self,
        id: RequestId,
        running: &mut Running,
        logits: &[f32],
    ) -> Result<Result<(), SamplingError>, RingError> {
        running.first_token = Some(Instant::now());
        let Some(prompt) = running.choices[0].session else {
            return Ok(Ok(()));
        };
        let mut next = Vec::with_capacity(running.choices.len());
        for choice in 0..running.choices.len() {
            match running.advance(choice, logits, &self.tokenizer) {
                Ok(token) => next.push(token),
                Err(error) => return Ok(Err(error)),
            }
        }
        // Forks first: they must see the prompt only.
        for (index, _) in next
            .iter()
            .enumerate()
            .skip(1)
            .filter(|(_, token)| token.is_some())
        {
            let session = self.client.fork(prompt).await?;
            running.reserved -= 1;
            running.choices[index].session = Some(session);
            self.sessions.insert(session, (id, index));
        }
        for (index, token) in next.into_iter().enumerate() {
            let choice = &mut running.choices[index];
            match (token, choice.session) {
                (Some(token), Some(session)) => self.client.send(session, &[token], 1).await?,
                (None, Some(session)) => {
                    choice.session = None;
                    self.release(session).await?;
                }
                // Finished before it needed a session.
                (_, None) => {}
            }
        }
        Ok(Ok(()))
    }

    async fn step(
        &mut self,
        running: &mut Running,
        choice: usize,
        logits: &[f32],
    ) -> Result<Result<(), SamplingError>, RingError> {
        let token = match running.advance(choice, logits, &self.tokenizer) {
            Ok(token) => token,
            Err(error) => return Ok(Err(error)),
        };
        match (token, running.choices[choice].session) {
            (Some(token), Some(session)) => self.client.send(session, &[token], 1).await?,
            (None, Some(session)) => {
                running.choices[choice].session = None;
                self.release(session).await?;
            }
            (_, None) => {}
        }
        Ok(Ok(()))
    }

    // ---- requests going away ----

    async fn fail(&mut self, id: RequestId, error: GenerationError) -> Result<(), RingError> {
        match self.running.remove(&id) {
            Some(running) => {
                tracing::warn!(%error, "a request failed");
                let _ = running.events.try_send(GenerationEvent::Failed(error));
                self.let_go(running).await
            }
            None => Ok(()),
        }
    }

    /// Frees the sessions of a request that no longer runs.
    async fn let_go(&mut self, running: Running) -> Result<(), RingError> {
        self.free_sessions += running.reserved;
        for session in running.choices.iter().filter_map(|choice| choice.session) {
            self.release(session).await?;
        }
        Ok(())
    }

    async fn release(&mut self, session: SessionId) -> Result<(), RingError> {
        self.sessions.remove(&session);
        self.releasing.insert(session, Instant::now());
        self.client.release(session).await
    }

    /// The ring is broken: nothing that was under way can be finished.
    fn break_off(&mut self, reason: String, error: GenerationError) {
        if !matches!(self.phase, Phase::Probing { .. }) {
            tracing::warn!(%error, running = self.running.len(), waiting = self.waiting.len(), "the ring is broken");
        }
        for (_, running) in self.running.drain() {
            let _ = running
                .events
                .try_send(GenerationEvent::Failed(error.clone()));
        }
        for waiting in self.waiting.drain(..) {
            let _ = waiting
                .events
                .try_send(GenerationEvent::Failed(error.clone()));
        }
        self.prefilling.clear();
        self.sessions.clear();
        self.releasing.clear();
        self.free_sessions = self.plan.max_concurrent_requests as usize;
        self.tally.all_released();
        self.readiness = Readiness::Loading(reason);
        if !matches!(self.phase, Phase::Probing { .. }) {
            self.phase = Phase::Probing {
                nonce: 0,
                asked: Instant::now(),
            };
        }
    }

    async fn look_around(&mut self) -> Result<(), RingError> {
        let now = Instant::now();
        if matches!(self.phase, Phase::Probing { asked, .. } if now.duration_since(asked) >= PROBE_INTERVAL)
        {
            self.probe().await?;
        }
        self.waiting.retain(|waiting| !waiting.events.is_closed());
        let gone: Vec<RequestId> = self
            .running
            .iter()
            .filter(|(_, running)| running.events.is_closed())
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            if let Some(running) = self.running.remove(&id) {
                self.let_go(running).await?;
            }
        }
        let limit = self.client.round_deadline();
        let deadline = GenerationError::Deadline {
            seconds: limit.as_secs(),
        };
        let stuck = self
            .releasing
            .values()
            .any(|since| now.duration_since(*since) > limit);
        match self.client.overdue(now) {
            Some(session) => match self.sessions.get(&session) {
                Some(&(id, _)) => self.fail(id, deadline).await?,
                None => self.break_off("a token got lost on the ring".into(), deadline),
            },
            None if stuck => self.break_off("a session got lost on the ring".into(), deadline),
            None => {}
        }
        Ok(())
    }

    async fn probe(&mut self) -> Result<(), RingError> {
        self.phase = Phase::Probing {
            nonce: self.client.probe().await?,
            asked: Instant::now(),
        };
        Ok(())
    }

    /// Tells the gateway what changed. Counters alone wait for the tick; otherwise every token would wake the gateway's
    /// thread.
    fn show(&self, ticked: bool) {
        self.status.send_if_modified(|status| {
            let changed = status.readiness != self.readiness
                || status.running_requests != self.running.len()
                || status.waiting_requests != self.waiting.len()
                || (ticked && status.members != self.tally.members);
            if changed {
                status.readiness = self.readiness.clone();
                status.running_requests = self.running.len();
                status.waiting_requests = self.waiting.len();
                status.members.clone_from(&self.tally.members);
                status.kv_bytes = self.tally.kv_bytes();
            }
            changed
        });
    }
}

impl Running {
    fn advance(
        &mut self,
        choice: usize,
        logits: &[f32],
        tokenizer: &Tokenizer,
    ) -> Result<Option<u32>, SamplingError> {
        let Self {
            choices,
            events,
            gone,
            completion_tokens,
            ..
        } = self;
        choices[choice].advance(logits, tokenizer, |event| {
            *completion_tokens += usize::from(matches!(event, GenerationEvent::Token { .. }));
            match events.try_send(event) {
                Ok(()) => {}
                // A reader so slow that it is thousands of tokens behind counts as gone.
                Err(TrySendError::Full(_) | TrySendError::Closed(_)) => *gone = true,
            }
        })
    }

    fn emit_usage(&self) {
        let first = self.first_token.unwrap_or(self.started);
        let usage = Usage {
            prompt_tokens: self.request.prompt.len(),
            completion_tokens: self.completion_tokens,
            prompt_seconds: first.duration_since(self.started).as_secs_f64(),
            completion_seconds: first.elapsed().as_secs_f64(),
        };
        let _ = self.events.try_send(GenerationEvent::Usage(usage));
    }
}
