//! Rank 0's loop: takes requests, has the [scheduler] decide, sends what it says round the ring, and turns logits into events. It computes
//! nothing itself and speaks no HTTP.
//!
//! It runs on the ring's thread: a token that comes home goes out again without waking another thread.
//! The loop ends when all [`Generator`](crate::generation::Generator)s are gone and nothing is left to answer.

mod choice;
mod draft_model;
mod kv_ledger;
mod pooling;
mod scheduler;
mod stop_strings;
mod tally;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::model_profile::AttentionWindow;
use prima_crds::v1alpha1::ring_plan::RingPlanSpec;
use prima_model::ModelSpec;
use prima_text::{SamplingError, Tokenizer};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};

use crate::generation::{
    Drafts, GenerationError, GenerationEvent, GenerationRequest, KvUse, Readiness, RingStatus,
    Submission, SubmitError, Usage,
};
use crate::ring::{RingClient, RingError, RingEvent};
use crate::trace::{Span, Trace};

use choice::Choice;
use draft_model::{DraftGuess, Job};
pub use draft_model::{DraftModel, DraftModelError, DraftThread};
use pooling::{Pool, PoolError, Pools};
use scheduler::{Action, Event, Read, RequestId, Sampled, Scheduler};
use tally::Tally;

/// The status of a ring that is not up yet, which the gateway starts with.
pub fn initial_status(plan: &RingPlanSpec) -> RingStatus {
    RingStatus {
        readiness: Readiness::Loading("opening the model".into()),
        fails_at: None,
        missed_by: None,
        silent: None,
        late: false,
        looked: None,
        plan_generation: plan.generation,
        rounds: plan.rounds as usize,
        members: Tally::new(plan).members,
        running_requests: 0,
        waiting_requests: 0,
        kv_bytes: 0,
        kv: KvUse::default(),
        drafts: Drafts::default(),
        expert_miss_percent: None,
    }
}

/// Settings that the caller chooses.
pub struct DecodeOptions {
    /// Whether tokens are drafted,
    pub speculate: bool,
    /// and further ones before the first is known.
    pub run_ahead: bool,
    /// How much longer than the plan expects something may take to come home, before it counts as lost. A member whose GPU hangs says so before.
    pub grace: Duration,
    /// For how long requests wait for a member that was lost; zero: they fail.
    pub outlast: Duration,
    /// A small model that guesses, too.
    pub draft_model: Option<DraftThread>,
}

impl Default for DecodeOptions {
    fn default() -> Self {
        Self {
            speculate: true,
            run_ahead: true,
            grace: Duration::from_secs(20),
            outlast: Duration::ZERO,
            draft_model: None,
        }
    }
}

/// Rank 0's requests and their state.
pub struct Decode {
    client: RingClient,
    plan: Arc<RingPlanSpec>,
    tokenizer: Tokenizer,
    /// Rows of the model's output head.
    vocabulary: usize,
    pools: Pools,
    status: watch::Sender<RingStatus>,
    scheduler: Scheduler,
    draft_model: Option<DraftThread>,
    requests: BTreeMap<RequestId, Request>,
    last_request: RequestId,
    /// Mean seconds of recent requests, to tell clients when to try again.
    request_seconds: f64,
    drafts: Drafts,
    tally: Tally,
}

struct Request {
    request: GenerationRequest,
    events: mpsc::Sender<GenerationEvent>,
    work: Work,
    completion_tokens: usize,
    cached_tokens: usize,
    drafts: Drafts,
    begun: Instant,
    first_token: Option<Instant>,
    trace: Trace,
    /// What it is at: it is queued, its prompt is computed, or it is answered.
    phase: Span,
}

/// What comes of a request's rows.
enum Work {
    Choices(Vec<Choice>),
    Pooled(Pool),
}

/// How often to check for clients that left, for overdue rounds and whether the ring is whole.
const TICK: Duration = Duration::from_millis(250);
const FIRST_GUESS_SECONDS: f64 = 5.0;

impl Decode {
    pub fn new(
        client: RingClient,
        plan: Arc<RingPlanSpec>,
        model: &ModelSpec,
        tokenizer: Tokenizer,
        status: watch::Sender<RingStatus>,
        options: DecodeOptions,
    ) -> Self {
        let vocabulary = model.vocabulary;
        let bos = tokenizer.bos();
        let warm_up = bos.filter(|&token| (token as usize) < vocabulary);
        let window = model.attention_window();
        let window = window.map(|positions| AttentionWindow { positions });
        let scheduler = Scheduler::new(
            &plan,
            window,
            warm_up.unwrap_or(0),
            scheduler::Options {
                grace: options.grace,
                outlast: options.outlast,
                speculate: options.speculate,
                run_ahead: options.run_ahead,
                draft_model: options.draft_model.is_some(),
            },
        );
        Self {
            client,
            tokenizer,
            vocabulary,
            pools: Pools::of(model),
            status,
            scheduler,
            draft_model: options.draft_model,
            requests: BTreeMap::new(),
            last_request: 0,
            request_seconds: FIRST_GUESS_SECONDS,
            drafts: Drafts::default(),
            tally: Tally::new(&plan),
            plan,
        }
    }

    /// Serves until every sender of `submissions` is gone and all requests are answered, or the ring has stopped.
    pub async fn run(mut self, mut submissions: mpsc::Receiver<Submission>) {
        if let Err(error) = self.serve(&mut submissions).await {
            tracing::info!(%error, "decoding ends");
            for request in self.requests.into_values() {
                let over = GenerationEvent::Failed(GenerationError::ShuttingDown);
                let _ = request.events.try_send(over);
            }
        }
    }

    async fn serve(
        &mut self,
        submissions: &mut mpsc::Receiver<Submission>,
    ) -> Result<(), RingError> {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut open = true;
        while open || !self.requests.is_empty() {
            let mut ticked = false;
            tokio::select! {
                biased;
                event = self.client.next() => self.hear(event.ok_or(RingError::Stopped)?).await?,
                guess = guess(&mut self.draft_model) => self.take(guess).await?,
                submission = submissions.recv(), if open => match submission {
                    Some(submission) => self.accept(submission).await?,
                    None => open = false,
                },
                _ = tick.tick() => {
                    ticked = true;
                    self.let_go_of_the_gone().await?;
                    self.tell(Event::Tick, &[]).await?;
                }
            }
            while let Some(event) = self.client.try_next() {
                self.hear(event).await?;
            }
            self.show(ticked);
        }
        Ok(())
    }

    // ---- requests coming in ----

    async fn accept(&mut self, submission: Submission) -> Result<(), RingError> {
        let Submission {
            request,
            trace,
            events,
            accepted,
        } = submission;
        let (work, read) = match self.check(&request) {
            Ok(checked) => checked,
            Err(error) => {
                // The gateway may have given up.
                let _ = accepted.send(Err(error));
                return Ok(());
            }
        };
        let _ = accepted.send(Ok(()));
        self.last_request += 1;
        let id = self.last_request;
        let submitted = Event::Submitted {
            request: id,
            prompt: request.prompt.clone(),
            choices: request.choices,
            max_tokens: match read {
                Read::Continuation => request.max_tokens,
                Read::LastState | Read::LastScores | Read::AllStates => 0,
            },
            read,
            keyspace: request.keyspace,
            client: request.client,
        };
        let request = Request {
            request,
            events,
            work,
            completion_tokens: 0,
            cached_tokens: 0,
            drafts: Drafts::default(),
            begun: Instant::now(),
            first_token: None,
            phase: trace.begin("queued"),
            trace,
        };
        self.requests.insert(id, request);
        self.tell(submitted, &[]).await
    }

    /// What comes of the request and what is read for it, or why it cannot be taken.
    fn check(&self, request: &GenerationRequest) -> Result<(Work, Read), SubmitError> {
        match self.scheduler.readiness() {
            Readiness::Ready => {}
            Readiness::Loading(reason) | Readiness::Failed(reason) => {
                return Err(SubmitError::NotReady {
                    reason: reason.clone(),
                });
            }
        }
        let invalid = |field, problem: String| Err(SubmitError::Invalid { field, problem });
        let context = self.plan.context_length as usize;
        let at_once = self.plan.max_concurrent_requests as usize;
        if request.prompt.is_empty() {
            return invalid("prompt", "it has no tokens".into());
        }
        if request.prompt.len() > context {
            return Err(SubmitError::ContextExceeded { context });
        }
        let unknown = |token: &u32| *token as usize >= self.vocabulary;
        let problem = |token: u32| {
            format!(
                "token {token} is not below {}, the size of the vocabulary",
                self.vocabulary
            )
        };
        if let Some(&token) = request.prompt.iter().find(|token| unknown(token)) {
            return invalid("prompt", problem(token));
        }
        let mut biased = request.sampling.logit_bias.iter().map(|(token, _)| *token);
        if let Some(token) = biased.find(unknown) {
            return invalid("logit_bias", problem(token));
        }
        if !(1..=at_once).contains(&request.choices) {
            return invalid(
                "n",
                format!(
                    "{} is outside 1..={at_once}, the requests that this ring runs at once",
                    request.choices
                ),
            );
        }
        if request.max_tokens == 0 && request.instead.is_none() {
            return invalid("max_tokens", "it must be at least 1".into());
        }
        let (running, waiting) = self.scheduler.requests();
        if self
            .scheduler
            .turns_away(request.client, request.prompt.len())
        {
            let seconds = self.request_seconds * (waiting + 1) as f64 / at_once as f64;
            return Err(SubmitError::Full {
                running,
                waiting,
                retry_after: Duration::from_secs_f64(seconds.clamp(1.0, 60.0)),
            });
        }
        if let Some(asked) = request.instead {
            let (pool, read) = self.pools.pool(asked).map_err(unpoolable)?;
            return Ok((Work::Pooled(pool), read));
        }
        (0..request.choices)
            .map(|index| Choice::new(index, request, &self.tokenizer, context))
            .collect::<Result<_, _>>()
            .map(|choices| (Work::Choices(choices), Read::Continuation))
            .map_err(|error| SubmitError::Invalid {
                field: match &error {
                    SamplingError::Range { parameter, .. } => parameter,
                    _ => "sampling",
                },
                problem: error.to_string(),
            })
    }

    /// Clients that have hung up.
    async fn let_go_of_the_gone(&mut self) -> Result<(), RingError> {
        let gone = |request: &Request| request.events.is_closed();
        let requests = self.requests.iter();
        let gone: Vec<RequestId> = requests
            .filter(|(_, request)| gone(request))
            .map(|(id, _)| *id)
            .collect();
        for request in gone {
            self.requests.remove(&request);
            self.tell(Event::Cancelled { request }, &[]).await?;
        }
        Ok(())
    }

    // ---- what the ring tells ----

    async fn hear(&mut self, event: RingEvent) -> Result<(), RingError> {
        let (event, rows) = match event {
            RingEvent::Answer {
                session,
                output,
                cost,
            } => {
                self.tally.add(&cost);
                let home = Event::Home {
                    session,
                    trip: cost.without_waiting(),
                    slowest: cost.slowest_machine(&self.plan),
                };
                (home, output)
            }
            RingEvent::Released { session } => (Event::Released { session }, Vec::new()),
            RingEvent::Whole { nonce } => (Event::Whole { nonce }, Vec::new()),
            RingEvent::Refused {
                session,
                rank,
                reason,
            } => {
                let refused = Event::Refused {
                    session,
                    rank,
                    reason,
                };
                (refused, Vec::new())
            }
            RingEvent::Lost {
                rank,
                missed_by,
                cause,
            } => {
                let lost = Event::Lost {
                    rank,
                    missed_by,
                    cause,
                };
                (lost, Vec::new())
            }
            RingEvent::Busy => (Event::Busy, Vec::new()),
        };
        let released = matches!(event, Event::Released { .. });
        self.tell(event, &rows).await?;
        // Only frames tell what members hold, and none may come for long.
        if released && self.scheduler.holds_nothing() {
            self.tally.all_released();
        }
        Ok(())
    }

    /// What the draft model says; `None`: it cannot guess any more.
    async fn take(&mut self, guess: Option<DraftGuess>) -> Result<(), RingError> {
        let event = match guess {
            Some(guess) => Event::Guessed {
                request: guess.request,
                choice: guess.choice,
                taken_in: guess.taken_in,
                tokens: guess.tokens,
                took: guess.took,
            },
            None => {
                self.draft_model = None;
                Event::NoMoreGuesses
            }
        };
        self.tell(event, &[]).await
    }

    /// Has the scheduler decide, and does what it says. `rows`: what came home.
    async fn tell(&mut self, event: Event, rows: &[f32]) -> Result<(), RingError> {
        let mut actions = VecDeque::from(self.scheduler.handle(event, Instant::now()));
        while let Some(action) = actions.pop_front() {
            match action {
                Action::Probe { nonce } => {
                    self.tally.all_released();
                    self.client.probe(nonce).await?;
                }
                Action::Create { session } => self.client.create(session).await?,
                Action::Fork { parent, child } => self.client.fork(parent, child).await?,
                Action::Truncate { session, positions } => {
                    self.client.truncate(session, positions).await?;
                }
                Action::Release { session } => self.client.release(session).await?,
                Action::Send {
                    request,
                    session,
                    first_position,
                    tokens,
                    wanted,
                    output,
                } => {
                    let request = request.and_then(|request| self.requests.get(&request));
                    let trace = request.map(|request| request.phase.trace());
                    let trace = trace.unwrap_or_default();
                    let sent = self.client.send_from(
                        session,
                        first_position,
                        &tokens,
                        wanted,
                        output,
                        &trace,
                    );
                    sent.await?;
                }
                Action::Begun { request, cached } => {
                    if let Some(request) = self.requests.get_mut(&request) {
                        request.begun = Instant::now();
                        request.cached_tokens = cached;
                        request.enter("prompt");
                        let prompt = request.request.prompt.len();
                        request.phase.set("prima.prompt_tokens", prompt as i64);
                        request.phase.set("prima.cached_tokens", cached as i64);
                        if let Work::Pooled(pool) = &mut request.work {
                            pool.begin();
                        }
                    }
                }
                Action::Sample {
                    request,
                    choices,
                    draft,
                } => {
                    let event = self.sample(request, choices, &draft, rows);
                    actions.extend(self.scheduler.handle(event, Instant::now()));
                }
                Action::Pool { request, last } => self.pool(request, last, rows),
                Action::Guess {
                    request,
                    choice,
                    keyspace,
                    text,
                    count,
                } => {
                    if let Some(model) = &self.draft_model {
                        model.ask(Job {
                            request,
                            choice,
                            keyspace,
                            text,
                            count,
                        });
                    }
                }
                Action::Fail { request, error } => {
                    if let Some(mut request) = self.requests.remove(&request) {
                        request.phase.failed(error.to_string());
                        tracing::warn!(%error, "a request failed");
                        let _ = request.events.try_send(GenerationEvent::Failed(error));
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes the next token of each of these choices from the first row of logits, and those that follow it in the draft from the others;
    /// and tells the client.
    fn sample(
        &mut self,
        id: RequestId,
        choices: Range<usize>,
        draft: &[u32],
        logits: &[f32],
    ) -> Event {
        let cancelled = Event::Cancelled { request: id };
        let Some(request) = self.requests.get_mut(&id) else {
            return cancelled;
        };
        let first = request.first_token.is_none();
        request.first_token.get_or_insert_with(Instant::now);
        let mut sample = request.phase.trace().begin("sample");
        let mut sampled = Vec::with_capacity(choices.len());
        let rows = || logits.chunks(self.vocabulary);
        for choice in choices {
            match request.advance(choice, rows(), draft, &self.tokenizer) {
                Ok(Some(next)) => sampled.push(next),
                Ok(None) => {
                    self.requests.remove(&id);
                    return cancelled;
                }
                Err(error) => {
                    let reason = error.to_string();
                    if error.is_of_logits() {
                        return Event::NothingFollows {
                            request: id,
                            reason,
                        };
                    }
                    request.phase.failed(reason.clone());
                    let failed = GenerationEvent::Failed(GenerationError::Logits { reason });
                    let _ = request.events.try_send(failed);
                    self.requests.remove(&id);
                    return cancelled;
                }
            }
        }
        let chosen: usize = sampled.iter().map(|next| next.tokens.len()).sum();
        sample.set("prima.tokens", chosen as i64);
        drop(sample);
        if first {
            request.enter("answer");
        }
        if let [next] = sampled.as_slice() {
            let right = scheduler::common_prefix(&next.tokens, draft);
            // If all of these rows are right, the rest of the draft is on its way.
            let judged = match right == rows().len() {
                true => right,
                false => draft.len(),
            };
            for drafts in [&mut request.drafts, &mut self.drafts] {
                drafts.drafted += judged;
                drafts.accepted += right;
            }
        }
        let Work::Choices(choices) = &request.work else {
            return cancelled;
        };
        if choices.iter().all(|choice| choice.finished) {
            request.emit_usage();
            self.over(id);
        }
        Event::Sampled {
            request: id,
            choices: sampled,
        }
    }

    /// Takes the next rows of a request that is pooled, and with the last of them tells the client.
    fn pool(&mut self, id: RequestId, last: bool, rows: &[f32]) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        let Work::Pooled(pool) = &mut request.work else {
            return;
        };
        pool.add(rows);
        if !last {
            return;
        }
        let event = pool.end().unwrap_or_else(|| {
            let reason = "its vector is no number".to_owned();
            GenerationEvent::Failed(GenerationError::Logits { reason })
        });
        let failed = matches!(event, GenerationEvent::Failed(_));
        let _ = request.events.try_send(event);
        request.first_token = Some(Instant::now());
        if !failed {
            request.emit_usage();
        }
        self.over(id);
    }

    /// A request is answered.
    fn over(&mut self, id: RequestId) {
        if let Some(request) = self.requests.remove(&id) {
            let seconds = request.begun.elapsed().as_secs_f64();
            self.request_seconds += (seconds - self.request_seconds) / 8.0;
        }
    }

    /// Tells the gateway what changed. Counters alone wait for the tick; otherwise every token would wake the gateway's
    /// thread.
    fn show(&mut self, ticked: bool) {
        let silent = self.client.silent();
        let silent = silent.and_then(|rank| self.plan.members.get(rank));
        let silent = silent.map(|member| member.name.as_str());
        let (running, waiting) = self.scheduler.requests();
        let (readiness, kv) = (self.scheduler.readiness(), self.scheduler.kv());
        let (fails_at, missed_by) = (self.scheduler.fails_at(), self.scheduler.missed_by());
        let late = self.scheduler.is_late();
        self.status.send_if_modified(|status| {
            // Who asks sees it; nobody is woken for it.
            status.looked = Some(Instant::now());
            let changed = status.readiness != *readiness
                || status.fails_at.as_deref() != fails_at
                || status.missed_by.as_deref() != missed_by
                || status.silent.as_deref() != silent
                || status.late != late
                || status.running_requests != running
                || status.waiting_requests != waiting
                || (ticked && (status.members != self.tally.members || status.kv != kv));
            if let Some(member) = silent
                && status.silent.is_none()
            {
                tracing::warn!(member, "no sign of life; the ring stands still there");
            }
            if late && !status.late && silent.is_none() {
                tracing::warn!("nothing comes home; the ring stands still somewhere");
            }
            if changed {
                status.readiness = readiness.clone();
                status.fails_at = fails_at.map(str::to_owned);
                status.missed_by = missed_by.map(str::to_owned);
                status.silent = silent.map(str::to_owned);
                status.late = late;
                status.running_requests = running;
                status.waiting_requests = waiting;
                status.members.clone_from(&self.tally.members);
                status.kv_bytes = self.tally.kv_bytes();
                status.kv = kv;
                status.drafts = self.drafts;
                status.expert_miss_percent = self.tally.expert_miss_percent();
            }
            changed
        });
    }
}

fn unpoolable(error: PoolError) -> SubmitError {
    SubmitError::Invalid {
        field: match &error {
            PoolError::Dimensions { .. } => "dimensions",
            PoolError::Kind { .. } | PoolError::NoClassifier => "model",
        },
        problem: error.to_string(),
    }
}

/// The draft model's next guess, for ever where there is none.
async fn guess(model: &mut Option<DraftThread>) -> Option<DraftGuess> {
    match model {
        Some(model) => model.next().await,
        None => std::future::pending().await,
    }
}

impl Request {
    /// How a choice goes on: the next token from the first row of logits, and for as long as tokens are the draft's, the next from the next
    /// row. `None`: the reader is gone.
    fn advance<'a>(
        &mut self,
        choice: usize,
        rows: impl Iterator<Item = &'a [f32]>,
        draft: &[u32],
        tokenizer: &Tokenizer,
    ) -> Result<Option<Sampled>, SamplingError> {
        let Self {
            work: Work::Choices(choices),
            events,
            completion_tokens,
            ..
        } = self
        else {
            return Ok(None);
        };
        let mut gone = false;
        let mut emit = |event| {
            *completion_tokens += usize::from(matches!(event, GenerationEvent::Token { .. }));
            match events.try_send(event) {
                Ok(()) => {}
                // A reader so slow that it is thousands of tokens behind counts as gone.
                Err(TrySendError::Full(_) | TrySendError::Closed(_)) => gone = true,
            }
        };
        let mut sampled = Sampled {
            choice,
            tokens: Vec::new(),
            forced: Vec::new(),
            ended: false,
        };
        for (nth, row) in rows.enumerate() {
            let Some(token) = choices[choice].advance(row, tokenizer, &mut emit)? else {
                sampled.ended = true;
                break;
            };
            sampled.tokens.push(token);
            if draft.get(nth) != Some(&token) {
                sampled.forced = choices[choice].forced();
                break;
            }
        }
        Ok((!gone).then_some(sampled))
    }

    /// Ends what it is at, and begins what follows.
    fn enter(&mut self, phase: &'static str) {
        self.phase = self.trace.begin(phase);
    }

    /// Its last word. Whatever is traced of it has ended before.
    fn emit_usage(&mut self) {
        self.phase = Span::default();
        let first = self.first_token.unwrap_or(self.begun);
        let usage = Usage {
            prompt_tokens: self.request.prompt.len(),
            cached_tokens: self.cached_tokens,
            completion_tokens: self.completion_tokens,
            reasoning_tokens: 0,
            drafts: self.drafts,
            prompt_seconds: first.duration_since(self.begun).as_secs_f64(),
            completion_seconds: first.elapsed().as_secs_f64(),
        };
        let _ = self.events.try_send(GenerationEvent::Usage(usage));
    }
}

#[cfg(test)]
mod tests {
    use prima_engine::GPU_PATIENCE;

    use super::*;

    /// Else everybody would hear that nothing comes home, and nobody that a GPU is why. It is known after an eighth more, and then has its way to
    /// rank 0.
    #[test]
    fn a_gpu_counts_as_hanging_before_a_pass_counts_as_lost() {
        let known = GPU_PATIENCE * 9 / 8;
        assert!(known + Duration::from_secs(2) < DecodeOptions::default().grace);
    }
}
