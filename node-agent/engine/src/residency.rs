//! Weights under a memory budget: which stay in memory, which are read again for every token, and products with both kinds.
//!
//! Does not decide the budget: the part that watches the machine sets it, at any time, and results are the same to the bit under every
//! budget. What stays lies in the page cache, in this process's map. There are two kinds of weights. Those that every token uses have the
//! budget first; of them, those that do not stay pass through a few buffers (`reader`) in the order of the cycle (`plan`). Experts, of which
//! a token uses a few, share what is left (`experts`). The whole map stays valid, so when in doubt a weight is simply read there.

mod expert_reader;
mod experts;
mod plan;
mod reader;
mod rows;
mod source;
mod threads;

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::error::EngineError;
use crate::kernels::{self, Matrix, RowsProduct, ThreadPool};
use crate::layer::Experts;
use crate::mapped_weights::{MappedModel, MappedTensor};
use crate::model::Model;

use experts::{ExpertCache, LayerExperts};
use plan::{ResidencyPlan, Tensor, WeightCycle, WeightPiece};
use reader::Reader;

pub use expert_reader::expert_reading_rate;
pub use plan::StreamingSchedule;

/// The weights of one member. Clones share everything.
#[derive(Clone)]
pub struct Residency {
    /// `None`: all weights are in the map, and left to the page cache.
    streams: Option<Arc<Streams>>,
}

/// Weights that a member computes with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResidencyPart {
    /// These layers, on the CPU.
    Layers(Range<usize>),
    OutputHead,
}

/// An expert whose weights can be computed with.
pub(crate) struct ResidentExpert<'a> {
    /// Its place among those that were asked for.
    pub index: usize,
    /// Its number in the layer.
    pub number: u32,
    pub gate: Matrix<'a>,
    pub up: Matrix<'a>,
    pub down: Matrix<'a>,
}

/// The experts that the rows of a pass chose in one layer, each once, in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertUse {
    /// Its number in the model.
    pub layer: usize,
    pub experts: Vec<u32>,
}

/// As in a trace: the layer's number, and those of the experts.
impl fmt::Display for ExpertUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.layer)?;
        self.experts
            .iter()
            .try_for_each(|expert| write!(f, " {expert}"))
    }
}

/// What is where, and what was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidencyStatus {
    /// Weights that are kept in memory, or may be; below, the others: those that are read for every token, and experts.
    pub resident_bytes: u64,
    pub streamed_bytes: u64,
    /// Memory that reading takes.
    pub buffer_bytes: u64,
    /// Memory of this process that buffers have now; weights that stay are in the page cache.
    pub own_bytes: u64,
    /// Read since the start.
    pub read_bytes: u64,
    /// How long computing waited for reading, since the start.
    pub waited: Duration,
    /// How often experts that were needed were in memory, and how often they were not, since the start. Not counted while all are.
    pub expert_hits: u64,
    pub expert_misses: u64,
    /// Of all experts, those for which there is no room, in millionths.
    pub missing_experts_ppm: u64,
}

struct Streams {
    cycle: WeightCycle,
    schedule: StreamingSchedule,
    reader: Reader,
    /// `None`: the model has none.
    experts: Option<ExpertCache>,
    /// Whom to tell of every choice of experts.
    uses: OnceLock<SyncSender<ExpertUse>>,
    map: MappedModel,
    /// Locked while the plan changes.
    warmed: Mutex<Warmed>,
}

/// What `warm` has done.
#[derive(Default)]
struct Warmed {
    /// How many pieces of the cycle it has visited since the plan changed.
    pieces: usize,
    /// Whether experts are tidied since the budget changed.
    experts: bool,
}

/// Long enough for a disk to reach its full rate with two reads at a time, short enough to need little memory for buffers. With the rest
/// of its first and last page, a piece fits in 4 MiB.
const PIECE_BYTES: usize = (4 << 20) - 8192;
/// The most choices of experts that wait for whoever watches them.
const WATCHED: usize = 1024;

impl Residency {
    /// All weights in the map, left to the page cache.
    pub fn mapped() -> Residency {
        Residency { streams: None }
    }

    /// The weights of `parts`, which a token uses in this order. Nothing is streamed until a [`budget`](Self::set_budget) asks for
    /// it.
    ///
    /// # Errors
    /// [`EngineError::ReadAhead`] when the file cannot be opened again or the system refuses a thread, [`EngineError::Advise`] when it
    /// does not take advice.
    pub fn new(
        model: &Model,
        parts: &[ResidencyPart],
        schedule: StreamingSchedule,
    ) -> Result<Residency, EngineError> {
        Residency::in_pieces(model, parts, schedule, PIECE_BYTES)
    }

    /// As [`new`](Self::new), with pieces of about `piece_bytes`.
    ///
    /// # Errors
    /// As there.
    pub fn in_pieces(
        model: &Model,
        parts: &[ResidencyPart],
        schedule: StreamingSchedule,
        piece_bytes: usize,
    ) -> Result<Residency, EngineError> {
        let spec = model.spec();
        let (mut tensors, mut experts) = (Vec::new(), Vec::new());
        for part in parts {
            match part {
                ResidencyPart::OutputHead => tensors.push(model.matrix(&spec.output_head)?),
                ResidencyPart::Layers(layers) => {
                    for (number, layer) in layers.clone().zip(&spec.layers[layers.clone()]) {
                        for matrix in layer.matrices() {
                            tensors.push(model.matrix(matrix)?);
                        }
                        let own = layer.feed_forward.experts.as_ref();
                        experts.extend(own.map(|own| LayerExperts::of(number, own)));
                    }
                }
            }
        }
        let tensors: Vec<Tensor> = tensors.iter().map(Tensor::of).collect();
        if !spec.is_tied() {
            // A token needs one row; what the system reads around it would displace weights that should stay.
            let embedding = spec.embedding.bytes.clone();
            model.map().expect_random_reads(embedding)?;
        }
        let residency = Residency {
            streams: Some(Arc::new(Streams {
                cycle: WeightCycle::new(&tensors, piece_bytes),
                schedule,
                reader: Reader::start(model.map().paths())?,
                experts: match experts.is_empty() {
                    true => None,
                    false => Some(ExpertCache::start(model.map().clone(), experts)?),
                },
                uses: OnceLock::new(),
                map: model.map().clone(),
                warmed: Mutex::default(),
            })),
        };
        residency.set_budget(u64::MAX);
        Ok(residency)
    }

    /// Bytes of all weights, whether they stay or not; 0 where all are left to the page cache.
    pub fn weight_bytes(&self) -> u64 {
        self.streams
            .as_ref()
            .map_or(0, |streams| streams.weight_bytes())
    }

    /// From now on, weights and buffers together may take `bytes` of memory. Weights that no longer stay are released before this
    /// returns, as far as no pass computes with them; weights that stay from now on come into memory when they are used, or by [`warm`](Self::warm).
    pub fn set_budget(&self, bytes: u64) {
        if let Some(streams) = &self.streams {
            streams.set_budget(bytes);
        }
    }

    /// If some weights are streamed, reads the weights that stay into memory. The system reads ahead beyond them; weights that do not stay and that
    /// it read are released again. Ends soon after `limit`; returns whether there is more to do.
    pub fn warm(&self, limit: Duration) -> bool {
        let streams = self.streams.as_ref();
        streams.is_some_and(|streams| streams.warm(limit))
    }

    /// From now on, every choice of experts; passes wait where they are taken too slowly. `None` where there are no experts, all weights are left
    /// to the page cache, or somebody has them already.
    pub fn watch_experts(&self) -> Option<Receiver<ExpertUse>> {
        let streams = self.streams.as_ref()?;
        streams.experts.as_ref()?;
        let (sender, receiver) = mpsc::sync_channel(WATCHED);
        streams.uses.set(sender).ok()?;
        Some(receiver)
    }

    /// Weights that were to stay have been taken by the system: at the next [`warm`](Self::warm), experts of which that is so are forgotten, and read
    /// when they are needed.
    pub fn were_taken(&self) {
        if let Some(streams) = &self.streams {
            lock(&streams.warmed).experts = false;
        }
    }

    pub fn status(&self) -> ResidencyStatus {
        let Some(streams) = &self.streams else {
            return ResidencyStatus::default();
        };
        let plan = streams.reader.plan();
        let readings = streams.reader.readings();
        let buffer_bytes = plan.memory_bytes() - plan.resident_bytes;
        let dense = ResidencyStatus {
            resident_bytes: plan.resident_bytes,
            streamed_bytes: plan.streamed_bytes,
            buffer_bytes,
            own_bytes: buffer_bytes,
            read_bytes: readings.bytes,
            waited: readings.waited,
            expert_hits: 0,
            expert_misses: 0,
            missing_experts_ppm: 0,
        };
        let Some(experts) = &streams.experts else {
            return dense;
        };
        let (held, readings) = (experts.memory(), experts.readings());
        ResidencyStatus {
            resident_bytes: dense.resident_bytes + held.resident_bytes,
            streamed_bytes: dense.streamed_bytes + experts.bytes() - held.resident_bytes,
            buffer_bytes: dense.buffer_bytes + held.buffer_bytes,
            own_bytes: dense.own_bytes + held.own_bytes,
            read_bytes: dense.read_bytes + readings.bytes,
            waited: dense.waited + readings.waited,
            expert_hits: readings.hits,
            expert_misses: readings.misses,
            missing_experts_ppm: held.missing_ppm,
        }
    }

    /// [`kernels::matmul`] with weights wherever they are.
    ///
    /// # Errors
    /// [`EngineError::ReadWeights`] when streamed weights cannot be read, [`EngineError::Damaged`] when those in the map cannot.
    pub(crate) fn matmul<const N: usize>(
        &self,
        pool: &ThreadPool,
        x: &[f32],
        n: usize,
        outputs: [(&MappedTensor, &mut [f32]); N],
    ) -> Result<(), EngineError> {
        let tensors = outputs.each_ref().map(|(tensor, _)| *tensor);
        let Some((streams, plan)) = self.streaming(tensors) else {
            let mut outputs = outputs.map(|(tensor, out)| (tensor.matrix(), out));
            kernels::matmul(pool, x, n, &mut outputs);
            return tensors.iter().try_for_each(|tensor| tensor.check());
        };
        for (tensor, out) in outputs {
            let all = tensor.matrix().rows();
            streams.each_run(&plan, tensor, |first, run| {
                multiply_part(pool, x, n, run, first, all, out);
            })?;
        }
        Ok(())
    }
}

impl Residency {
    /// The products of matrices that lie one after the other in `tensor`, as many as there are `heads`, each with `n` rows of `x` of its own.
    /// `x` and `out` have these rows head after head.
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul).
    pub(crate) fn matmul_heads(
        &self,
        pool: &ThreadPool,
        x: &[f32],
        n: usize,
        heads: usize,
        tensor: &MappedTensor,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        let matrix = tensor.matrix();
        let rows = matrix.rows() / heads;
        if let Some((streams, plan)) = self.streaming([tensor]) {
            return streams.each_run(&plan, tensor, |first, run| {
                // A run may begin and end inside of a head.
                let end = first + run.rows();
                for head in first / rows..end.div_ceil(rows) {
                    let own = (head * rows).max(first)..((head + 1) * rows).min(end);
                    let part = run.part(own.start - first..own.end - first);
                    let x = &x[head * n * matrix.cols()..][..n * matrix.cols()];
                    let out = &mut out[head * n * rows..][..n * rows];
                    multiply_part(pool, x, n, part, own.start - head * rows, rows, out);
                }
            });
        }
        let outs = out.chunks_exact_mut((n * rows).max(1));
        let mut products: Vec<RowsProduct<'_>> = outs
            .enumerate()
            .map(|(head, out)| RowsProduct {
                matrix: matrix.part(head * rows..(head + 1) * rows),
                rows: head * n..(head + 1) * n,
                out,
            })
            .collect();
        kernels::matmul_rows(pool, x, heads * n, &mut products);
        tensor.check()
    }

    /// Calls `work` with all rows of a matrix wherever they are, in order: with the number of the first and the rows, some at a time.
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul).
    pub(crate) fn each_run(
        &self,
        tensor: &MappedTensor,
        mut work: impl FnMut(usize, Matrix<'_>),
    ) -> Result<(), EngineError> {
        match self.streaming([tensor]) {
            Some((streams, plan)) => streams.each_run(&plan, tensor, work),
            None => {
                work(0, tensor.matrix());
                tensor.check()
            }
        }
    }

    /// What streams, if some of these tensors do, and how.
    fn streaming<const N: usize>(
        &self,
        tensors: [&MappedTensor; N],
    ) -> Option<(&Streams, Arc<ResidencyPlan>)> {
        let streams = self.streams.as_deref()?;
        let plan = streams.reader.plan();
        let mut tensors = tensors.into_iter();
        let are = tensors.any(|tensor| !plan.of(tensor.offset()).is_empty());
        are.then_some((streams, plan))
    }

    /// Calls `work` with all experts of a layer, as [`each_expert`](Self::each_expert) does, whether rows chose them or not. Nobody is told.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn all_experts(
        &self,
        experts: &Experts,
        work: impl FnMut(&[ResidentExpert<'_>]),
    ) -> Result<(), EngineError> {
        let all: Vec<u32> = (0..experts.router.width() as u32).collect();
        self.experts(experts, &all, work)
    }

    /// Calls `work` with the experts of a layer that `needed` names (by number, in order), several at a time, until it had each once. Those
    /// that are in memory come first.
    ///
    /// # Errors
    /// [`EngineError::ReadWeights`] when experts cannot be read, [`EngineError::Damaged`] when those in the map cannot.
    pub(crate) fn each_expert(
        &self,
        experts: &Experts,
        needed: &[u32],
        work: impl FnMut(&[ResidentExpert<'_>]),
    ) -> Result<(), EngineError> {
        if let Some(streams) = self.streams.as_deref()
            && let Some((cache, sender)) = streams.experts.as_ref().zip(streams.uses.get())
            && let Some(layer) = cache.layer_at(experts.gate.weight.offset())
        {
            let experts = needed.to_vec();
            // Nobody may want them any more.
            let _ = sender.send(ExpertUse { layer, experts });
        }
        self.experts(experts, needed, work)
    }

    fn experts(
        &self,
        experts: &Experts,
        needed: &[u32],
        mut work: impl FnMut(&[ResidentExpert<'_>]),
    ) -> Result<(), EngineError> {
        let tensors = [&experts.gate, &experts.up, &experts.down];
        let matrices = tensors.map(|projection| projection.weight.matrix());
        let count = experts.router.width();
        let mapped = |index: usize| {
            let number = needed[index];
            let [gate, up, down] = matrices.map(|all| of_expert(all, number, count));
            ResidentExpert {
                index,
                number,
                gate,
                up,
                down,
            }
        };
        let streams = self.streams.as_deref();
        let cache = streams.and_then(|streams| Some((streams, streams.experts.as_ref()?)));
        let called = match cache {
            None => false,
            Some((streams, cache)) => {
                let offset = experts.gate.weight.offset();
                let called = cache.each(offset, needed, |layer, some| {
                    let ready: Vec<_> = some
                        .iter()
                        .map(|(index, passing)| {
                            let expert = mapped(*index);
                            let Some(passing) = passing else {
                                return expert;
                            };
                            let [gate, up, down] = passing.parts(layer, expert.number);
                            ResidentExpert {
                                gate: expert.gate.at(gate),
                                up: expert.up.at(up),
                                down: expert.down.at(down),
                                ..expert
                            }
                        })
                        .collect();
                    work(&ready);
                });
                called.map_err(|(offset, source)| EngineError::ReadWeights {
                    path: streams.map.file_at(offset).path().to_owned(),
                    offset,
                    source,
                })?
            }
        };
        if !called {
            let ready: Vec<_> = (0..needed.len()).map(mapped).collect();
            work(&ready);
        }
        let mut tensors = tensors.iter();
        tensors.try_for_each(|projection| projection.weight.check())
    }
}

/// The rows of one of `count` experts.
fn of_expert(all: Matrix<'_>, expert: u32, count: usize) -> Matrix<'_> {
    let (rows, expert) = (all.rows() / count, expert as usize);
    all.part(expert * rows..(expert + 1) * rows)
}

/// The rate, in bytes a second, of streaming `part` of the file at `path` as weights are streamed, without computing. The clock starts, and
/// `started` is called, once the buffers exist and the disk is at work. Before, ways of reading are compared by another part, `trial`: what it
/// read might come from caches below the file system.
///
/// # Errors
/// [`EngineError::ReadAhead`] when the file cannot be opened or the system refuses a thread, [`EngineError::ReadWeights`] when it
/// cannot be read.
pub fn streaming_rate(
    path: &Path,
    trial: Range<u64>,
    part: Range<u64>,
    mut started: impl FnMut(),
) -> Result<f64, EngineError> {
    const ROW_BYTES: usize = 1 << 10;
    let plan_of = |part: Range<u64>| {
        let part = Tensor {
            offset: part.start,
            rows: (part.end - part.start) as usize / ROW_BYTES,
            row_bytes: ROW_BYTES,
        };
        ResidencyPlan::of_all(&WeightCycle::new(&[part], PIECE_BYTES))
    };
    let reader = Reader::start([(0, path)])?;
    reader.compare(&plan_of(trial));
    let plan = Arc::new(plan_of(part));
    let untimed = plan.slots.min(plan.streamed.len() / 2);
    let (mut begun, mut timed) = (Instant::now(), 0);
    reader.follow(plan.clone());
    for (index, piece) in plan.streamed.iter().enumerate() {
        if index == untimed {
            begun = Instant::now();
            started();
        }
        let loaded = reader.load(&plan, index);
        drop(loaded.map_err(|source| unreadable(path, piece, source))?);
        if index >= untimed {
            timed += piece.bytes;
        }
    }
    Ok(timed as f64 / begun.elapsed().as_secs_f64().max(1e-9))
}

fn unreadable(path: &Path, piece: &WeightPiece, source: io::Error) -> EngineError {
    EngineError::ReadWeights {
        path: path.to_owned(),
        offset: piece.offset,
        source,
    }
}

impl Streams {
    fn weight_bytes(&self) -> u64 {
        self.cycle.bytes() + self.experts.as_ref().map_or(0, ExpertCache::bytes)
    }

    fn set_budget(&self, bytes: u64) {
        let mut warmed = lock(&self.warmed);
        let plan = match &self.experts {
            Some(experts) if bytes < self.weight_bytes() => {
                // What every token uses comes first.
                let bytes = bytes.saturating_sub(experts.buffer_bytes());
                let plan = self.cycle.plan(bytes, self.schedule);
                if experts.holds_all() {
                    warmed.pieces = 0;
                }
                warmed.experts = false;
                experts.hold(bytes.saturating_sub(plan.memory_bytes()));
                plan
            }
            Some(experts) => {
                experts.hold_all();
                self.cycle.plan(bytes, self.schedule)
            }
            None => self.cycle.plan(bytes, self.schedule),
        };
        let before = self.reader.plan();
        if plan == *before {
            return;
        }
        let plan = Arc::new(plan);
        self.reader.follow(plan.clone());
        let leaving = plan.streamed.iter();
        leaving
            .filter(|piece| !before.streams(piece))
            .for_each(|piece| self.release(piece));
        warmed.pieces = 0;
    }

    /// Whether memory has room for all weights.
    fn all_stay(&self) -> bool {
        self.reader.plan().streamed.is_empty()
            && self.experts.as_ref().is_none_or(ExpertCache::holds_all)
    }

    fn warm(&self, limit: Duration) -> bool {
        let begun = Instant::now();
        let mut warmed = lock(&self.warmed);
        let plan = self.reader.plan();
        let pieces = match self.all_stay() {
            true => &[],
            false => self.cycle.pieces(),
        };
        for piece in pieces.iter().skip(warmed.pieces) {
            match plan.streams(piece) {
                true => self.release(piece),
                // What cannot be read now fails again, and is reported, when it is computed with.
                false => drop(self.map.populate(piece.range())),
            }
            warmed.pieces += 1;
            if begun.elapsed() >= limit {
                return true;
            }
        }
        if let Some(experts) = self.experts.as_ref().filter(|_| !warmed.experts) {
            warmed.experts = experts.tidy();
        }
        false
    }

    fn release(&self, piece: &WeightPiece) {
        // If these calls fail, the system takes the pages back when it needs them.
        let _ = self.map.unmap_pages(piece.range());
        let _ = self.reader.drop_pages(piece);
    }

    /// Calls `work` with runs of rows, resident or streamed, in order, and the number of the first.
    fn each_run(
        &self,
        plan: &Arc<ResidencyPlan>,
        tensor: &MappedTensor,
        mut work: impl FnMut(usize, Matrix<'_>),
    ) -> Result<(), EngineError> {
        let matrix = tensor.matrix();
        let mut next = 0;
        for index in plan.of(tensor.offset()) {
            let piece = &plan.streamed[index];
            if next < piece.rows.start {
                work(next, matrix.part(next..piece.rows.start));
            }
            next = piece.rows.end;
            let loaded = self.reader.load(plan, index);
            let loaded = loaded.map_err(|source| {
                unreadable(self.map.file_at(piece.offset).path(), piece, source)
            })?;
            let rows = matrix.part(piece.rows.clone());
            let rows = match &loaded {
                Some(loaded) => rows.at(loaded.bytes()),
                None => rows,
            };
            work(piece.rows.start, rows);
        }
        if next < matrix.rows() {
            work(next, matrix.part(next..matrix.rows()));
        }
        tensor.check()
    }
}

impl Tensor {
    fn of(tensor: &MappedTensor) -> Tensor {
        let matrix = tensor.matrix();
        Tensor {
            offset: tensor.offset(),
            rows: matrix.rows(),
            row_bytes: matrix.row_bytes(),
        }
    }
}

/// Writes the product with `part` to its place in `out` (`n` rows of `all`). `part` begins at row `first` of a matrix of `all` rows.
fn multiply_part(
    pool: &ThreadPool,
    x: &[f32],
    n: usize,
    part: Matrix<'_>,
    first: usize,
    all: usize,
    out: &mut [f32],
) {
    let columns = first..first + part.rows();
    if n == 1 {
        kernels::matmul(pool, x, n, &mut [(part, &mut out[columns])]);
        return;
    }
    let mut product = vec![0.0; n * part.rows()];
    kernels::matmul(pool, x, n, &mut [(part, &mut product)]);
    for (row, product) in out
        .chunks_exact_mut(all)
        .zip(product.chunks_exact(part.rows()))
    {
        row[columns.clone()].copy_from_slice(product);
    }
}

fn lock(mutex: &Mutex<Warmed>) -> MutexGuard<'_, Warmed> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
