//! A member at work: admits frames, runs those that wait for the same window as one batch, and sends them on.
//!
//! A member does everything on one thread, in one loop, so that a hop wakes nobody but its successor. Only long batches, and all where a GPU
//! computes, are computed outside this thread, so that large activations flow, pings are answered and signs of life pass meanwhile. Control operations
//! (create, fork, truncate, release, reset) keep their order among the activations of their round (`queue`).
//!
//! Decides what becomes of a frame: computed and sent on, refused, or failed. The last two are reported to rank 0 and
//! end one request, never the ring. Losing a neighbour ends all sessions. A member whose later passes would fail, too, says why and ends.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prima_engine::{Compute, ResidencyStatus};
use tokio::sync::mpsc;
use tonic::Status;

use crate::memory_watch::Pressure;
use crate::trace::Trace;

use super::frame::{
    Activation, Frame, FrameInput, HopEvent, MemberEvent, Operation, Output, Reset, SessionId,
};
use super::held::Held;
use super::hop_timing::HopTiming;
use super::proto;
use super::queue::{Queue, Queued};
use super::schedule::Schedule;
use super::session::SessionTable;
use super::transport::Inbound;
use super::wire::{self, FrameLimits};
use super::worker::{Work, WorkOutput, WorkOutputs, Worker, WorkerError};

/// One member's loop.
pub struct Hop {
    schedule: Schedule,
    limits: FrameLimits,
    table: SessionTable,
    /// Shared with a batch that is computed outside this thread; its lock is never waited for.
    worker: Arc<Mutex<Worker>>,
    /// The worker's, which tells how far it is.
    compute: Arc<Compute>,
    /// Whether it uses a GPU, which may hang.
    on_gpu: bool,
    queue: Queue,
    /// Rank 0 only: frames on the ring of whose rows something else than logits is made, by session and sequence.
    outputs: BTreeMap<(SessionId, u64), Output>,
    successor: Successor,
    /// Events for the predecessor, while it is connected.
    predecessor: Option<mpsc::Sender<Result<proto::HopEvent, Status>>>,
    /// Rank 0 only: what comes home.
    home: Option<mpsc::UnboundedSender<Reply>>,
    /// What a row cost in the last batch of each stage, and when that was.
    row_cost: Vec<Option<(Duration, Instant)>>,
    held: Arc<Held>,
    pressure: Pressure,
    /// Bytes read and time waited up to the last batch. What is read ahead between batches counts for the next one.
    told: ResidencyStatus,
    /// The same of what was copied to the GPU.
    told_copied: u64,
}

/// What a [`Hop`] is made of.
pub struct HopParts {
    pub schedule: Schedule,
    pub limits: FrameLimits,
    pub table: SessionTable,
    pub worker: Worker,
    /// Given on rank 0 only.
    pub home: Option<mpsc::UnboundedSender<Reply>>,
    pub held: Arc<Held>,
    pub pressure: Pressure,
}

/// What a round brings back to rank 0.
#[derive(Debug)]
pub enum Reply {
    /// An activation: what was made of its output rows, and what it cost on the way.
    Answer {
        session: SessionId,
        sequence: u64,
        output: Vec<f32>,
        timings: Vec<HopTiming>,
    },
    /// A release: no member holds the session any more.
    Released { session: SessionId },
    /// A probe: the ring is whole.
    Whole { nonce: u64 },
    /// Something went wrong on the way.
    Event(HopEvent),
}

#[derive(Debug, thiserror::Error)]
pub enum HopError {
    #[error("computing a batch ended in a panic")]
    Panicked(#[source] tokio::task::JoinError),
    /// Whoever starts the member again opens the file and the GPU anew.
    #[error("nothing can be computed any more")]
    Lasting(#[source] WorkerError),
}

/// A frame of a batch, without its input.
struct Unpacked {
    frame: Frame,
    arrived: Instant,
    rows: usize,
}

/// What computing a batch took, and how the weights are after it.
struct Pass {
    /// Of all frames that were computed.
    rows: usize,
    spent: Duration,
    kv_bytes: u64,
    weights: ResidencyStatus,
    copied_bytes: u64,
}

enum Successor {
    /// A ring of one.
    Itself,
    Connected(mpsc::Sender<proto::Frame>),
    Missing(String),
}

/// A batch that probably takes less than this is computed on this thread: handing it to another and back costs two
/// wake-ups, 0.05 ms, or 0.2 ms after a long sleep. This thread does nothing else meanwhile, so the limit is also how
/// long the sending of a large activation may stop. Where a GPU computes, no batch is: one that hangs must not keep this thread from saying so, nor
/// rank 0 from decoding.
const INLINE_LIMIT: Duration = Duration::from_millis(20);
/// After a pause this long the cost of a batch is unknown: its weights may have left the page cache.
const COST_LIFETIME: Duration = Duration::from_secs(1);
/// How often rank 0 hears that a long pass gets on: more often than it takes a pass for late (`decode::scheduler`). Members of the version before say it
/// every 5 s. A pass of theirs that takes more than four times what was expected, and 2.5 s, counts as late until they say it next; nothing breaks off.
const BUSY_INTERVAL: Duration = Duration::from_secs(1);
/// For what a member says before it ends to leave it.
const LAST_WORD: Duration = Duration::from_millis(200);

impl Hop {
    pub fn new(parts: HopParts) -> Self {
        let HopParts {
            schedule,
            limits,
            table,
            worker,
            home,
            held,
            pressure,
        } = parts;
        let successor = match schedule.members {
            1 => Successor::Itself,
            _ => Successor::Missing("not connected yet".into()),
        };
        Self {
            row_cost: vec![None; schedule.stages()],
            schedule,
            limits,
            table,
            compute: worker.compute().clone(),
            on_gpu: worker.gpu().is_some(),
            worker: Arc::new(Mutex::new(worker)),
            queue: Queue::default(),
            outputs: BTreeMap::new(),
            successor,
            predecessor: None,
            home,
            held,
            pressure,
            told: ResidencyStatus::default(),
            told_copied: 0,
        }
    }

    /// Works until all senders of `inbox` are gone.
    pub async fn run(mut self, mut inbox: mpsc::Receiver<Inbound>) -> Result<(), HopError> {
        loop {
            if self.queue.is_empty() {
                match inbox.recv().await {
                    Some(inbound) => self.take(inbound),
                    None => return Ok(()),
                }
            }
            while let Ok(inbound) = inbox.try_recv() {
                self.take(inbound);
            }
            self.work().await?;
            if !self.queue.is_empty() {
                // Lets what was sent reach the socket before the next batch takes the thread.
                tokio::task::yield_now().await;
            }
        }
    }

    fn take(&mut self, inbound: Inbound) {
        match inbound {
            Inbound::Frame { frame, arrived } => {
                let (session, sequence) = (frame.session, frame.sequence);
                match wire::frame_from_proto(frame, &self.limits) {
                    Ok(frame) => self.admit(frame, arrived),
                    Err(refusal) => self.report(MemberEvent::Refused {
                        session,
                        sequence,
                        refusal,
                    }),
                }
            }
            Inbound::Begin {
                frame,
                output,
                begun,
            } => {
                if output != Output::Logits {
                    let id = (frame.session, frame.sequence);
                    self.outputs.insert(id, output);
                }
                self.admit(frame, begun);
            }
            Inbound::Event(event) => self.pass_back(event),
            Inbound::PredecessorConnected { events } => {
                tracing::info!(
                    rank = self.schedule.predecessor(),
                    "the predecessor is connected"
                );
                self.predecessor = Some(events);
            }
            Inbound::PredecessorLost { cause } => {
                let rank = self.schedule.predecessor();
                tracing::warn!(rank, cause, "lost the predecessor; its sessions end");
                self.predecessor = None;
                self.forget_all();
                if self.schedule.rank == 0 {
                    self.report(MemberEvent::Unreachable { rank, cause });
                } else {
                    // The members after this one hold the same sessions, and rank 0 also hears of it this way.
                    let operation = Operation::Reset(Reset::Lost { rank, cause });
                    self.queue.push(sessionless(operation), Instant::now());
                }
            }
            Inbound::SuccessorConnected { frames } => self.successor = Successor::Connected(frames),
            Inbound::SuccessorLost { cause } => {
                if let Successor::Connected(_) = self.successor {
                    self.forget_all();
                    self.report(MemberEvent::Unreachable {
                        rank: self.schedule.successor(),
                        cause: cause.clone(),
                    });
                }
                self.successor = Successor::Missing(cause);
            }
        }
    }

    fn admit(&mut self, frame: Frame, arrived: Instant) {
        if self.schedule.rank == 0
            && frame.round > 0
            && let Operation::Reset(reset) = frame.operation
        {
            match reset {
                // Sessions begun since the probe was sent stay.
                Reset::Probe { nonce } => self.reply(Reply::Whole { nonce }),
                Reset::Lost { rank, cause } => {
                    self.forget_all();
                    // It is told by the one that has lost its predecessor.
                    self.pass_back(HopEvent {
                        rank: self.schedule.behind(rank),
                        event: MemberEvent::Unreachable { rank, cause },
                    });
                }
            }
            return;
        }
        match self.table.admit(&frame) {
            Ok(()) => self.queue.push(frame, arrived),
            Err(refusal) => {
                tracing::debug!(session = frame.session, traceparent = frame.traceparent, %refusal, "refused a frame");
                self.report(MemberEvent::Refused {
                    session: frame.session,
                    sequence: frame.sequence,
                    refusal,
                });
            }
        }
    }

    /// Runs what is next in the queue, and all that can be batched with it.
    async fn work(&mut self) -> Result<(), HopError> {
        let Some(first) = self.queue.front() else {
            return Ok(());
        };
        if let Operation::Activation(_) = first.operation {
            let round = self.queue.next_round(self.schedule.rounds);
            let batch = self.queue.take_batch(round);
            let (refuted, batch): (Vec<_>, Vec<_>) = batch
                .into_iter()
                .partition(|queued| self.is_refuted(&queued.frame));
            for queued in refuted {
                self.pass_on(queued).await;
            }
            if batch.is_empty() {
                return Ok(());
            }
            self.held.pass_begins();
            let computed = self.compute(round, batch).await;
            self.held.pass_ended();
            return computed;
        }
        let Some(Queued { frame, arrived }) = self.queue.pop_front() else {
            return Ok(());
        };
        self.control(&frame);
        self.hand_on(frame, arrived).await;
        Ok(())
    }

    /// Whether computing a frame would be in vain. Rank 0 knows also of those that no member saw overtaken.
    fn is_refuted(&self, frame: &Frame) -> bool {
        match &frame.operation {
            Operation::Activation(activation) => {
                let home = frame.round == self.schedule.rounds;
                activation.refuted || (home && self.table.takes_back(frame))
            }
            _ => false,
        }
    }

    /// Hands on a refuted frame as it is, with as many rows as its receiver expects, which may not know of such frames.
    async fn pass_on(&mut self, queued: Queued) {
        let Queued { mut frame, arrived } = queued;
        if frame.round == self.schedule.rounds {
            self.outputs.remove(&(frame.session, frame.sequence));
            return self.reply(Reply::Answer {
                session: frame.session,
                sequence: frame.sequence,
                output: Vec::new(),
                timings: frame.timings,
            });
        }
        if let Operation::Activation(activation) = &mut frame.operation {
            let rows = match self.schedule.is_last_hop(frame.round) {
                true => 0,
                false => activation.rows,
            };
            let bytes = rows * self.limits.hidden * self.limits.dtype.bytes();
            activation.output_rows = 0;
            activation.input = FrameInput::Rows(vec![0; bytes].into());
        }
        self.hand_on(frame, arrived).await;
    }

    fn control(&mut self, frame: &Frame) {
        let (round, session) = (frame.round, frame.session);
        match &frame.operation {
            Operation::Create => self.worker().create(round, session),
            Operation::Truncate { positions } => self.worker().truncate(round, session, *positions),
            Operation::Fork { child } => self.worker().fork(round, session, *child),
            Operation::Release => self.worker().release(round, session),
            Operation::Reset(_) => self.worker().clear(),
            Operation::Activation(_) => {}
        }
        self.count();
    }

    async fn compute(&mut self, round: usize, batch: Vec<Queued>) -> Result<(), HopError> {
        let (frames, work) = self.unpack(round, batch);
        let rows = work.iter().map(|work| work.rows).sum();
        let started = Instant::now();
        let outputs = self.produce(round, work, rows).await?;
        let spent = started.elapsed();
        let outputs = match outputs {
            Ok(outputs) => outputs,
            Err(error) if error.is_lasting() => {
                self.report_ending(round, &frames, &error);
                tokio::time::sleep(LAST_WORD).await;
                return Err(HopError::Lasting(error));
            }
            Err(error) => {
                self.report_failed(round, &frames, &error);
                return Ok(());
            }
        };
        let computed = frames.iter().zip(&outputs);
        let computed = computed.filter(|(_, output)| output.is_ok());
        let rows: usize = computed.map(|(unpacked, _)| unpacked.rows).sum();
        if rows > 0 {
            self.row_cost[round] = Some((spent / rows as u32, Instant::now()));
        }
        let pass = {
            let worker = self.worker();
            Pass {
                rows,
                spent,
                kv_bytes: worker.kv_bytes(),
                weights: worker.residency().status(),
                copied_bytes: worker.compute().copied_bytes(),
            }
        };
        let mut before = 0;
        for (unpacked, output) in frames.into_iter().zip(outputs) {
            let output = match output {
                Ok(output) => output,
                Err(error) => {
                    self.report_failed(round, std::slice::from_ref(&unpacked), &error);
                    continue;
                }
            };
            let timing = self.timing(&pass, &unpacked, before);
            before += unpacked.rows;
            let Unpacked {
                mut frame, rows, ..
            } = unpacked;
            let compute = Duration::from_nanos(timing.compute_ns);
            self.trace(&frame.traceparent, (round, rows), started, &pass, &timing);
            tracing::debug!(
                frame.session,
                frame.sequence,
                round,
                rows,
                ?compute,
                frame.traceparent,
                "computed"
            );
            frame.add_timing(timing);
            self.deliver(frame, output).await;
        }
        self.told = pass.weights;
        self.told_copied = pass.copied_bytes;
        Ok(())
    }

    /// The frames of a batch without their input, and what the worker is to do for each.
    fn unpack(&mut self, round: usize, batch: Vec<Queued>) -> (Vec<Unpacked>, Vec<Work>) {
        let home = round == self.schedule.rounds;
        let narrowed = home || self.schedule.is_last_hop(round);
        let mut frames = Vec::with_capacity(batch.len());
        let mut work = Vec::with_capacity(batch.len());
        for Queued { mut frame, arrived } in batch {
            let Operation::Activation(activation) = &mut frame.operation else {
                continue;
            };
            let Activation {
                first_position,
                rows,
                output_rows,
                input,
                ..
            } = activation;
            let rows = *rows;
            let output = match home {
                true => self.outputs.remove(&(frame.session, frame.sequence)),
                false => None,
            };
            work.push(Work {
                session: frame.session,
                first_position: *first_position,
                rows,
                wanted: if narrowed { *output_rows } else { rows },
                output: output.unwrap_or(Output::Logits),
                input: std::mem::replace(input, FrameInput::Tokens(Vec::new())),
            });
            frames.push(Unpacked {
                frame,
                arrived,
                rows,
            });
        }
        (frames, work)
    }

    /// Requests may go on when this member has been started again. Of rank 0 they end, and are told why.
    fn report_ending(&mut self, round: usize, frames: &[Unpacked], error: &WorkerError) {
        let rank = self.schedule.rank;
        if rank == 0 {
            return self.report_failed(round, frames, error);
        }
        let cause = prima_crds::error_chain(error);
        tracing::error!(round, cause, "nothing can be computed any more");
        self.report(MemberEvent::Unreachable { rank, cause });
    }

    fn report_failed(&mut self, round: usize, frames: &[Unpacked], error: &WorkerError) {
        let cause = prima_crds::error_chain(error);
        tracing::error!(round, cause, "computing a batch failed");
        for Unpacked { frame, .. } in frames {
            self.report(MemberEvent::Failed {
                session: frame.session,
                sequence: frame.sequence,
                cause: cause.clone(),
            });
        }
    }

    /// A frame's compute time is its rows' share of the batch; the time for other frames' rows is waiting. `before`: rows of the frames before it
    /// in the batch.
    fn timing(&self, pass: &Pass, unpacked: &Unpacked, before: usize) -> HopTiming {
        let all = pass.rows.max(1);
        let share = unpacked.rows as f64 / all as f64;
        let compute = pass.spent.mul_f64(share);
        // Whole numbers that add up: one expert that four frames miss is missed by one of them.
        let since = |now: u64, told: u64| {
            let of_first =
                |rows: usize| u128::from(now.saturating_sub(told)) * rows as u128 / all as u128;
            (of_first(before + unpacked.rows) - of_first(before)) as u64
        };
        let (now, told) = (&pass.weights, &self.told);
        let waited = now.waited.saturating_sub(told.waited);
        HopTiming {
            rank: self.schedule.rank as u32,
            compute_ns: nanoseconds(compute),
            wait_ns: nanoseconds(unpacked.arrived.elapsed().saturating_sub(compute)),
            disk_ns: nanoseconds(waited.mul_f64(share)),
            read_bytes: since(now.read_bytes, told.read_bytes),
            kv_bytes: pass.kv_bytes,
            resident_bytes: now.resident_bytes,
            streamed_bytes: now.streamed_bytes,
            memory_pressure_ppm: self.pressure.ppm(),
            expert_hits: since(now.expert_hits, told.expert_hits),
            expert_misses: since(now.expert_misses, told.expert_misses),
            gpu_copied_bytes: since(pass.copied_bytes, self.told_copied),
            missing_experts_ppm: now.missing_experts_ppm,
        }
    }

    /// Tells of a frame's pass in its request's trace, if it has one.
    fn trace(
        &self,
        traceparent: &str,
        (round, rows): (usize, usize),
        started: Instant,
        pass: &Pass,
        timing: &HopTiming,
    ) {
        Trace::parse(traceparent).record("window", started, pass.spent, |span| {
            let layers = match self.schedule.windows.get(round) {
                Some(window) => format!("{}..{}", window.first, window.last),
                None => "output head".to_owned(),
            };
            let seconds = |nanoseconds: u64| nanoseconds as f64 * 1e-9;
            span.set("prima.rank", self.schedule.rank as i64);
            span.set("prima.round", round as i64);
            span.set("prima.layers", layers);
            span.set("prima.rows", rows as i64);
            span.set("prima.rows_of_all", pass.rows as i64);
            span.set("prima.wait_seconds", seconds(timing.wait_ns));
            span.set("prima.disk_seconds", seconds(timing.disk_ns));
            span.set("prima.read_bytes", timing.read_bytes as i64);
        });
    }

    async fn deliver(&mut self, mut frame: Frame, output: WorkOutput) {
        match output {
            WorkOutput::Rows(payload) => {
                if let Operation::Activation(activation) = &mut frame.operation {
                    activation.input = FrameInput::Rows(payload);
                }
                self.hand_on(frame, Instant::now()).await;
            }
            WorkOutput::Home(output) => self.reply(Reply::Answer {
                session: frame.session,
                sequence: frame.sequence,
                output,
                timings: frame.timings,
            }),
        }
    }

    /// Runs the worker, on this thread or beside it.
    async fn produce(
        &mut self,
        round: usize,
        work: Vec<Work>,
        rows: usize,
    ) -> Result<WorkOutputs, HopError> {
        let quick = self.row_cost[round].is_some_and(|(cost, measured)| {
            measured.elapsed() < COST_LIFETIME && cost * (rows as u32) < INLINE_LIMIT
        });
        if quick && !self.on_gpu {
            return Ok(self.worker().run(round, work));
        }
        let worker = self.worker.clone();
        let mut pass = tokio::task::spawn_blocking(move || lock(&worker).run(round, work));
        let mut computed = self.compute.parts();
        loop {
            match tokio::time::timeout(BUSY_INTERVAL, &mut pass).await {
                Ok(outputs) => return outputs.map_err(HopError::Panicked),
                Err(_) if self.compute.parts() > computed => self.report(MemberEvent::Busy),
                Err(_) => {}
            }
            computed = self.compute.parts();
        }
    }

    fn worker(&self) -> MutexGuard<'_, Worker> {
        lock(&self.worker)
    }

    /// Sends a finished frame to where it goes next.
    async fn hand_on(&mut self, mut frame: Frame, now: Instant) {
        if self.schedule.rank == 0 && frame.round == self.schedule.rounds {
            if let Operation::Release = frame.operation {
                // Of frames that were refused on the way.
                self.outputs
                    .retain(|(session, _), _| *session != frame.session);
                self.reply(Reply::Released {
                    session: frame.session,
                });
            }
            return;
        }
        frame.round = self.schedule.next_round(frame.round);
        match &self.successor {
            Successor::Itself => self.admit(frame, now),
            Successor::Connected(frames) => {
                if let Some(frame) = wire::frame_to_proto(frame, &self.limits) {
                    // Fails if the stream has just ended; the inbox reports that next.
                    let _ = frames.send(frame).await;
                }
            }
            Successor::Missing(cause) => {
                let cause = cause.clone();
                self.report(MemberEvent::Unreachable {
                    rank: self.schedule.successor(),
                    cause,
                });
            }
        }
    }

    fn report(&mut self, event: MemberEvent) {
        self.pass_back(HopEvent {
            rank: self.schedule.rank,
            event,
        });
    }

    /// An event's next step towards rank 0.
    fn pass_back(&mut self, event: HopEvent) {
        if self.home.is_some() {
            return self.reply(Reply::Event(event));
        }
        if let Some(predecessor) = &self.predecessor
            && predecessor
                .try_send(Ok(wire::event_to_proto(event)))
                .is_err()
        {
            tracing::warn!("the predecessor takes no more events; one was dropped");
        }
    }

    fn reply(&self, reply: Reply) {
        if let Some(home) = &self.home {
            // Fails only when decode has ended, and the process with it.
            let _ = home.send(reply);
        }
    }

    fn forget_all(&mut self) {
        self.queue.clear();
        self.outputs.clear();
        self.table.clear();
        self.worker().clear();
        self.count();
    }

    fn count(&self) {
        self.held.set_sessions(self.worker().caches());
    }
}

/// A panic while it was held ends the member anyway (see [`HopError::Panicked`]).
fn lock(worker: &Mutex<Worker>) -> MutexGuard<'_, Worker> {
    worker.lock().unwrap_or_else(PoisonError::into_inner)
}

fn sessionless(operation: Operation) -> Frame {
    Frame {
        session: 0,
        sequence: 0,
        round: 0,
        traceparent: String::new(),
        timings: Vec::new(),
        operation,
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
