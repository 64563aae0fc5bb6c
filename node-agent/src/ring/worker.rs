//! What a member computes: its layer windows, and on rank 0 also the embedding and the output head. Owns weights and KV
//! caches. Synchronous; it trusts that `session` has admitted its input, and knows neither frames nor neighbours.
//!
//! Every round has its own KV caches, because chunks of one prompt may be in different rounds at the same time.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use prima_crds::v1alpha1::model_profile::AttentionWindow;
use prima_crds::v1alpha1::ring_plan::{
    ActivationDtype, KvDtype, MOST_BATCH_ROWS, RingMember, RingPlanSpec,
};
use prima_engine::{
    BatchEntry, Compute, Embedding, EngineError, Gpu, KvCache, KvFormat, KvMemory, KvPositions,
    LayerDevices, LayerWindow, Model, OutputHead, Residency, ResidencyPart, StreamingSchedule,
};

use super::frame::{FrameInput, Output, SessionId};
use super::member_gpus::{MemberGpus, layer_bytes};
use super::payload::{append_numbers, payload};
use super::schedule::Schedule;

pub struct Worker {
    model: Model,
    compute: Arc<Compute>,
    residency: Residency,
    dtype: ActivationDtype,
    context_length: usize,
    kv_format: KvFormat,
    kv_memory: KvMemory,
    stages: Vec<Stage>,
    /// Only on rank 0.
    ends: Option<Ends>,
    /// If the plan has something on them.
    gpus: MemberGpus,
    /// Rows of the current batch; kept to reuse its memory.
    rows: Vec<f32>,
}

/// Consecutive positions of one session.
pub struct Work {
    pub session: SessionId,
    /// What the session holds from there on is dropped first.
    pub first_position: usize,
    pub rows: usize,
    /// How many of the last rows the result is wanted for.
    pub wanted: usize,
    /// What the output head makes of them.
    pub output: Output,
    pub input: FrameInput,
}

/// The result of one [`Work`].
pub enum WorkOutput {
    /// `wanted` rows in the plan's activation dtype.
    Rows(Bytes),
    /// What the output head made of `wanted` rows.
    Home(Vec<f32>),
}

#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error("cannot open the model's {what}")]
    Open {
        what: String,
        #[source]
        source: Box<EngineError>,
    },
    #[error("cannot compute round {round}")]
    Compute {
        round: usize,
        #[source]
        source: Box<EngineError>,
    },
    #[error("session {session} has no KV cache in round {round}")]
    NoCache { session: SessionId, round: usize },
    #[error(
        "session {session} holds {held} positions in round {round}, expected {first_position}; an earlier pass of it failed"
    )]
    Position {
        session: SessionId,
        round: usize,
        first_position: usize,
        held: usize,
    },
}

/// What came of each work of a batch, or why nothing did.
pub type WorkOutputs = Result<Vec<Result<WorkOutput, WorkerError>>, WorkerError>;

impl WorkerError {
    /// Whether later passes fail as well.
    pub fn is_lasting(&self) -> bool {
        match self {
            Self::Open { source, .. } | Self::Compute { source, .. } => source.is_lasting(),
            Self::NoCache { .. } | Self::Position { .. } => false,
        }
    }
}

/// One round: the window, unless it is empty, and its KV caches.
#[derive(Default)]
struct Stage {
    window: Option<LayerWindow>,
    caches: HashMap<SessionId, KvCache>,
}

struct Ends {
    embedding: Embedding,
    output_head: OutputHead,
}

impl Worker {
    /// Opens this member's windows; on rank 0 embedding and output head too. `plan` must fit the model. With
    /// `streaming`, weights that do not fit into memory are read ahead of their use; without it, all are left to the
    /// page cache.
    pub fn new(
        model: Model,
        compute: Arc<Compute>,
        plan: &RingPlanSpec,
        schedule: &Schedule,
        streaming: bool,
    ) -> Result<Self, WorkerError> {
        let open = |what: String| {
            move |source| WorkerError::Open {
                what,
                source: Box::new(source),
            }
        };
        let member = &plan.members[schedule.rank];
        let residency = match streaming {
            false => Residency::mapped(),
            true => {
                let streaming = StreamingSchedule {
                    rounds: schedule.rounds,
                    shared: schedule.members > 1,
                    ahead: planned_share(member),
                };
                Residency::new(&model, &parts(member, schedule.rank), streaming)
                    .map_err(open("weights".into()))?
            }
        };
        let many_rows = member.gpu_from_rows.map(|rows| rows as usize);
        let gpus = MemberGpus::open(member);
        let gpus = gpus.map_err(open("part on a GPU, which the plan wants".into()))?;
        // What the plan pays for.
        let window = model.spec().attention_window();
        let window = window.map(|positions| AttentionWindow { positions });
        let kv_positions = KvPositions {
            full: plan.kv_positions(),
            windowed: window.map_or(0, |window| plan.windowed_kv_positions(window)),
        };
        let most_rows = MOST_BATCH_ROWS.max(plan.chunk_positions as usize);
        let windows = schedule.windows.iter();
        let gpu_layers = windows.clone().map(|window| {
            let layers = window.layers();
            let first = layers.end - window.gpu_layers as usize;
            let on_gpus = first..layers.end;
            on_gpus
                .map(|layer| layer_bytes(&model, layer, kv_positions))
                .collect()
        });
        let splits = gpus.split(&gpu_layers.collect::<Vec<Vec<u64>>>());
        let stages = windows
            .zip(splits)
            .map(|(window, split)| {
                let layers = window.layers();
                let mut stage = Stage::default();
                if !layers.is_empty() {
                    let mut devices = LayerDevices::last_on_each(split)
                        .with_kv_positions(kv_positions)
                        .with_passes_of(most_rows);
                    if let (Some(gpu), Some(rows)) = (gpus.first(), many_rows) {
                        devices = devices.with_many_rows_on(gpu.clone(), rows);
                    }
                    let what = format!("layers {}..{}", layers.start, layers.end);
                    let window = LayerWindow::open(&model, layers, &devices, &residency);
                    let window = window.map_err(|error| gpus.blame(error));
                    stage.window = Some(window.map_err(open(what))?);
                }
                Ok(stage)
            })
            .collect::<Result<_, WorkerError>>()?;
        let ends = match schedule.rank {
            0 => Some(Ends {
                embedding: Embedding::open(&model, &residency).map_err(open("embedding".into()))?,
                output_head: match gpus.first().filter(|_| member.output_head_on_gpu) {
                    Some(gpu) => OutputHead::open_on(gpu, &model, &residency),
                    None => OutputHead::open(&model, &residency),
                }
                .map_err(|error| gpus.blame(error))
                .map_err(open("output head".into()))?,
            }),
            _ => None,
        };
        Ok(Self {
            compute,
            residency,
            dtype: plan.activation_dtype,
            context_length: plan.context_length as usize,
            kv_format: match plan.kv_dtype {
                KvDtype::F16 => KvFormat::F16,
                KvDtype::Q8_0 => KvFormat::Q8_0,
            },
            kv_memory: KvMemory::default(),
            stages,
            ends,
            gpus,
            rows: Vec::new(),
            model,
        })
    }

    /// The GPU that has what the plan has on a GPU beside layers, if it uses any.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.gpus.first()
    }

    /// What computes; tells how far a pass is while it runs.
    pub fn compute(&self) -> &Arc<Compute> {
        &self.compute
    }

    /// This member's weights.
    pub fn residency(&self) -> &Residency {
        &self.residency
    }

    pub fn create(&mut self, round: usize, session: SessionId) {
        if let Some(Stage {
            window: Some(window),
            caches,
        }) = self.stages.get_mut(round)
        {
            let layers = [window.layers()];
            let cache = KvCache::counted(
                &self.model,
                &layers,
                self.context_length,
                self.kv_format,
                &self.kv_memory,
            );
            caches.insert(session, cache);
        }
    }

    pub fn fork(&mut self, round: usize, session: SessionId, child: SessionId) {
        if let Some(stage) = self.stages.get_mut(round)
            && let Some(fork) = stage.caches.get(&session).map(KvCache::fork)
        {
            stage.caches.insert(child, fork);
        }
    }

    pub fn truncate(&mut self, round: usize, session: SessionId, positions: usize) {
        if let Some(cache) = self
            .stages
            .get_mut(round)
            .and_then(|stage| stage.caches.get_mut(&session))
        {
            cache.truncate(positions);
        }
    }

    pub fn release(&mut self, round: usize, session: SessionId) {
        if let Some(stage) = self.stages.get_mut(round) {
            stage.caches.remove(&session);
        }
    }

    pub fn clear(&mut self) {
        for stage in &mut self.stages {
            stage.caches.clear();
        }
    }

    /// Bytes of KV cache held, over all sessions and rounds.
    pub fn kv_bytes(&self) -> u64 {
        self.kv_memory.bytes()
    }

    /// Sessions with a KV cache in any round.
    pub fn caches(&self) -> usize {
        let mut sessions: Vec<SessionId> = self
            .stages
            .iter()
            .flat_map(|stage| stage.caches.keys().copied())
            .collect();
        sessions.sort_unstable();
        sessions.dedup();
        sessions.len()
    }

    /// Runs the window of `round` (on rank 0 in round `rounds`: the output head) over all of `batch` at once. A session
    /// occurs at most once. Results come in the order of the batch. A session that lacks what its work goes on from fails alone. After an
    /// error of all, none of them may be used.
    pub fn run(&mut self, round: usize, batch: Vec<Work>) -> WorkOutputs {
        let mut able = Vec::with_capacity(batch.len());
        let mut caches = Vec::with_capacity(batch.len());
        let mut unable = Vec::with_capacity(batch.len());
        for work in batch {
            unable.push(match self.take_cache(round, &work) {
                Ok(cache) => {
                    caches.extend(cache);
                    able.push(work);
                    None
                }
                Err(error) => Some(error),
            });
        }
        let outputs = match able.is_empty() {
            true => Ok(Vec::new()),
            false => self.run_all(round, &able, &mut caches),
        };
        if let Some(stage) = self.stages.get_mut(round) {
            let sessions = able.iter().map(|work| work.session);
            stage.caches.extend(sessions.zip(caches));
        }
        let outputs = outputs.map_err(|error| match error {
            WorkerError::Compute { round, source } => WorkerError::Compute {
                round,
                source: Box::new(self.gpus.blame(*source)),
            },
            other => other,
        });
        let mut outputs = outputs?.into_iter();
        let results = unable.into_iter().filter_map(|error| match error {
            Some(error) => Some(Err(error)),
            None => outputs.next().map(Ok),
        });
        Ok(results.collect())
    }

    /// The cache that a work goes on in, if there is one in this round, cut to where the work begins. It ends before where an earlier pass of
    /// the session has failed: the frames behind that one were on their way.
    fn take_cache(&mut self, round: usize, work: &Work) -> Result<Option<KvCache>, WorkerError> {
        let (session, first_position) = (work.session, work.first_position);
        let Some(Stage {
            window: Some(_),
            caches,
        }) = self.stages.get_mut(round)
        else {
            return Ok(None);
        };
        let cache = caches
            .get_mut(&session)
            .ok_or(WorkerError::NoCache { session, round })?;
        if first_position < cache.len() {
            cache.truncate(first_position);
        }
        match cache.len() {
            held if held == first_position => Ok(caches.remove(&session)),
            held => Err(WorkerError::Position {
                session,
                round,
                first_position,
                held,
            }),
        }
    }

    /// Runs a batch whose sessions all go on, each in its cache.
    fn run_all(
        &mut self,
        round: usize,
        batch: &[Work],
        caches: &mut [KvCache],
    ) -> Result<Vec<WorkOutput>, WorkerError> {
        let hidden = self.model.spec().hidden;
        let compute = |source| WorkerError::Compute {
            round,
            source: Box::new(source),
        };
        let is_head = round == self.stages.len();

        // Nothing to compute: the input is passed on unchanged.
        let passes = !is_head && self.stages[round].window.is_none();
        if passes
            && batch
                .iter()
                .all(|work| matches!(work.input, FrameInput::Rows(_)) && work.wanted == work.rows)
        {
            return Ok(batch
                .iter()
                .filter_map(|work| match &work.input {
                    FrameInput::Rows(payload) => Some(WorkOutput::Rows(payload.clone())),
                    FrameInput::Tokens(_) => None,
                })
                .collect());
        }

        self.rows.clear();
        for work in batch {
            match &work.input {
                FrameInput::Rows(payload) => append_numbers(self.dtype, payload, &mut self.rows),
                FrameInput::Tokens(tokens) => {
                    let start = self.rows.len();
                    self.rows.resize(start + tokens.len() * hidden, 0.0);
                    if let Some(ends) = &self.ends {
                        ends.embedding
                            .embed(tokens, &mut self.rows[start..])
                            .map_err(compute)?;
                    }
                }
            }
        }
        if is_head {
            return self.head(batch).map_err(compute);
        }
        if let Some(window) = &self.stages[round].window {
            let entries = caches.iter_mut().zip(batch);
            let mut entries: Vec<BatchEntry<'_>> = entries
                .map(|(kv, work)| BatchEntry {
                    kv,
                    first_position: work.first_position,
                    rows: work.rows,
                })
                .collect();
            window
                .forward(&self.compute, &mut self.rows, &mut entries)
                .map_err(compute)?;
        }
        let mut outputs = Vec::with_capacity(batch.len());
        let mut rest = self.rows.as_slice();
        for work in batch {
            let (own, after) = rest.split_at(work.rows * hidden);
            let wanted = &own[(work.rows - work.wanted) * hidden..];
            outputs.push(WorkOutput::Rows(payload(self.dtype, wanted)));
            rest = after;
        }
        Ok(outputs)
    }

    /// Computes the outputs of the rows that came home, which are only those that are wanted.
    fn head(&self, batch: &[Work]) -> Result<Vec<WorkOutput>, EngineError> {
        let Some(ends) = &self.ends else {
            return Ok(Vec::new());
        };
        let head = &ends.output_head;
        let (hidden, vocabulary) = (self.model.spec().hidden, self.model.spec().vocabulary);
        let mut rest = self.rows.as_slice();
        let mut for_logits = Vec::new();
        let mut outputs = Vec::with_capacity(batch.len());
        for work in batch {
            let (own, after) = rest.split_at(work.wanted * hidden);
            rest = after;
            outputs.push(match work.output {
                Output::States => head.states(&self.compute, own)?,
                Output::Scores => head.scores(&self.compute, own)?,
                Output::Logits => {
                    for_logits.extend_from_slice(own);
                    Vec::new()
                }
            });
        }
        let mut logits = Vec::new();
        if !for_logits.is_empty() {
            head.logits(&self.compute, &for_logits, &mut logits)?;
        }
        if let [
            Work {
                output: Output::Logits,
                ..
            },
        ] = batch
        {
            return Ok(vec![WorkOutput::Home(logits)]);
        }
        let mut rest = logits.as_slice();
        for (work, output) in batch.iter().zip(&mut outputs) {
            if work.output == Output::Logits {
                let (own, after) = rest.split_at(work.wanted * vocabulary);
                rest = after;
                output.extend_from_slice(own);
            }
        }
        Ok(outputs.into_iter().map(WorkOutput::Home).collect())
    }
}

/// The bytes that the plan has this member read ahead, per byte that does not fit. If memory differs from the plan, both change alike.
fn planned_share(member: &RingMember) -> f64 {
    match (member.read_bytes_per_token, member.read_ahead_bytes) {
        (Some(read), Some(ahead)) if ahead < read => ahead as f64 / (read - ahead) as f64,
        // All of it, if there are rounds for that.
        _ => 1.0,
    }
}

/// The parts that the CPU reads for every token, in order.
fn parts(member: &RingMember, rank: usize) -> Vec<ResidencyPart> {
    let windows = member.windows.iter().map(|window| {
        let layers = window.layers();
        ResidencyPart::Layers(layers.start..layers.end - window.gpu_layers as usize)
    });
    let head = (rank == 0 && !member.output_head_on_gpu).then_some(ResidencyPart::OutputHead);
    windows.chain(head).collect()
}

#[cfg(test)]
mod tests {
    use prima_test_models::MadeUpModel;

    use super::*;
    use crate::ring::test_plan::plan;

    /// The chunks behind one that failed are on their way, beside others' tokens.
    #[test]
    fn a_session_that_lacks_positions_fails_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        MadeUpModel::default().write_for_ring(&path);
        let model = Model::open(&path).unwrap();
        let plan = plan(model.spec().layers.len(), 1, 1, &[]);
        let schedule = Schedule::new(&plan, 0).unwrap();
        let compute = Arc::new(Compute::new(1).unwrap());
        let mut worker = Worker::new(model, compute, &plan, &schedule, false).unwrap();
        worker.create(0, 1);
        worker.create(0, 2);
        let work = |session, first_position| Work {
            session,
            first_position,
            rows: 2,
            wanted: 1,
            output: Output::Logits,
            input: FrameInput::Tokens(vec![1, 2]),
        };
        let batch = vec![work(1, 5), work(2, 0), work(3, 0)];
        let results = worker.run(0, batch).unwrap();
        assert!(matches!(
            results.as_slice(),
            [
                Err(WorkerError::Position { held: 0, .. }),
                Ok(WorkOutput::Rows(_)),
                Err(WorkerError::NoCache { .. })
            ]
        ));
        // Nothing but that is lost of it.
        let results = worker.run(0, vec![work(1, 0), work(2, 2)]).unwrap();
        assert!(results.iter().all(Result::is_ok));
    }

    #[test]
    fn the_planned_read_ahead_is_a_share_of_what_does_not_fit() {
        let mut member = plan(4, 2, 2, &[2]).members[0].clone();
        let mut share = |read, ahead| {
            (member.read_bytes_per_token, member.read_ahead_bytes) = (read, ahead);
            planned_share(&member)
        };
        assert_eq!(share(None, None), 1.0);
        assert_eq!(share(Some(3), Some(1)), 0.5);
        assert_eq!(share(Some(3), Some(0)), 0.0);
        assert_eq!(share(Some(0), Some(0)), 1.0);
    }
}
