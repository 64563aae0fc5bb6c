//! The program's columns and rows: who may take part, how much time and memory each device's layers take, and the ring.

use std::ops::{RangeBounds, RangeInclusive};

use highs::{Col, RowProblem};

use super::{MILLISECONDS, Program, UNIT_BYTES};
use crate::input::{Device, HopCost, MemoryRule, StreamedCost};
use crate::latency::chunks;

/// A sum of columns, each with its factor.
type Terms = Vec<(Col, f64)>;

/// Where the answer is read from, a column for each device.
pub struct Columns {
    pub takes_part: Vec<Col>,
    pub is_rank0: Vec<Col>,
    pub cpu_layers: Vec<Col>,
    pub gpu_layers: Vec<Option<Col>>,
    /// `[from][to]`, where the order is part of the program.
    pub follows: Vec<Vec<Option<Col>>>,
}

/// `cuts`: sets of devices that formed a ring of their own beside rank 0's in an earlier answer, but must not.
pub fn formulate(program: &Program<'_>, cuts: &[Vec<usize>]) -> (RowProblem, Columns) {
    let mut formulation = Formulation::new(program);
    for (index, device) in program.input.devices.iter().enumerate() {
        formulation.device(index, device);
    }
    formulation.rounds_are_filled();
    if program.ordered {
        formulation.order();
        formulation.cut(cuts);
    }
    formulation.ring();
    formulation.prompt();
    (formulation.rows, formulation.columns)
}

/// What a member costs beside its time: less than any difference that could be measured.
pub const TIE_SECONDS: f64 = 1e-6;

struct Formulation<'a> {
    program: &'a Program<'a>,
    /// k, the rounds of a token.
    rounds: f64,
    rows: RowProblem,
    columns: Columns,
    /// C, the time of a round: the sum of all members' work, stalls and hops.
    cycle: Col,
    cycle_terms: Terms,
    /// P, the slowest stage of a prompt.
    slowest: Col,
    /// For each device, its work for a chunk.
    stage_terms: Vec<Terms>,
    /// Rank 0's output head, and a guess.
    head_terms: Terms,
    layer_terms: Terms,
    /// Devices that have a layer for each round.
    round_fillers: Terms,
}

/// The variables of one device.
struct Variables {
    /// u, r, x.
    takes_part: Col,
    is_rank0: Col,
    cpu_layers: Col,
    /// n and g, where it has a GPU.
    gpu: Option<(Col, Col)>,
    /// h, where its GPU can have the output head, and the seconds that this takes less.
    gpu_head: Option<(Col, f64)>,
    /// d, where its GPU can have the draft model, and the seconds that a guess takes less there.
    gpu_draft: Option<(Col, f64)>,
    /// s and v, where its GPU can compute chunks through the layers on the CPU: whether it does, and through how many.
    streamed: Option<(Col, Col)>,
}

/// What a device's layers take, in milliseconds and units.
struct Work {
    /// For a token; a k-th of it in each round.
    token: Terms,
    /// For a chunk of a prompt.
    chunk: Terms,
    /// What stays in memory (KV cache, a draft model), and weights that need it.
    stays: Terms,
    weights: Terms,
    /// Beside these, the output head and the embedding.
    head: Terms,
    /// How much memory is lacking for all of it: above 0, it does not fit.
    lacking: Terms,
    /// Buffers and the reserve for KV cache minus memory: below 0, there is room.
    room: f64,
}

impl Variables {
    fn all_layers(&self) -> impl Iterator<Item = (Col, f64)> {
        let gpu = self.gpu.map(|(layers, _)| (layers, 1.0));
        [(self.cpu_layers, 1.0)].into_iter().chain(gpu)
    }
}

impl<'a> Formulation<'a> {
    fn new(program: &'a Program<'a>) -> Self {
        let input = program.input;
        let devices = input.devices.len();
        let rounds = program.rounds as f64;
        let mut rows = RowProblem::default();
        let cycle = rows.add_column(input.workload.answer_tokens as f64 * rounds, 0.0..);
        let slowest = rows.add_column((chunks(input) - 1.0).max(0.0), 0.0..);
        Self {
            program,
            rounds,
            rows,
            columns: Columns {
                takes_part: Vec::new(),
                is_rank0: Vec::new(),
                cpu_layers: Vec::new(),
                gpu_layers: Vec::new(),
                follows: vec![vec![None; devices]; devices],
            },
            cycle,
            cycle_terms: vec![(cycle, -1.0)],
            slowest,
            stage_terms: Vec::new(),
            head_terms: Vec::new(),
            layer_terms: Vec::new(),
            round_fillers: Vec::new(),
        }
    }

    fn device(&mut self, index: usize, device: &Device) {
        let variables = self.variables(index, device);
        self.layers(device, &variables);
        let mut work = self.work(device, &variables);
        match (device.disk_bytes_per_second, device.memory_rule) {
            (None, _) => self.row(..=0.0, work.lacking.clone()),
            (Some(disk), MemoryRule::Overflow) => {
                self.overflow(device, &variables, &mut work, disk);
            }
            (Some(disk), MemoryRule::AllOrNothing) => {
                self.all_or_nothing(&variables, &mut work, disk);
            }
        }
        self.cycle_terms
            .extend(times(&work.token, 1.0 / self.rounds));
        if !self.program.ordered {
            self.cheapest_hop(index, &variables, &mut work);
        }
        self.may_fill_rounds(&variables);
        self.stage_terms.push(work.chunk);
        self.layer_terms.extend(variables.all_layers());
        self.columns.takes_part.push(variables.takes_part);
        self.columns.is_rank0.push(variables.is_rank0);
        self.columns.cpu_layers.push(variables.cpu_layers);
        let gpu_layers = variables.gpu.map(|(layers, _)| layers);
        self.columns.gpu_layers.push(gpu_layers);
    }

    fn variables(&mut self, index: usize, device: &Device) -> Variables {
        let input = self.program.input;
        let layers = input.model.layers as f64;
        let least = if device.required { 1.0 } else { 0.0 };
        let may_lead = input.rank0.is_none_or(|rank0| rank0 == index);
        // Of two equally fast plans, the one with fewer members wins.
        let takes_part = self.whole(TIE_SECONDS * MILLISECONDS, least..=1.0);
        let is_rank0 = self.whole(
            device.head_seconds * MILLISECONDS,
            0.0..=if may_lead { 1.0 } else { 0.0 },
        );
        let cpu_layers = self.whole(0.0, 0.0..=layers);
        let gpu = device.gpu.as_ref();
        let gpu_layers = gpu.map(|_| self.whole(0.0, 0.0..=layers));
        let uses_gpu = gpu.map(|_| self.whole(0.0, 0.0..=1.0));
        let gpu_head = gpu.and_then(|gpu| gpu.head_seconds).map(|seconds| {
            let gained = device.head_seconds - seconds;
            (self.whole(-gained * MILLISECONDS, 0.0..=1.0), gained)
        });
        let gpu_draft = gpu.and_then(|gpu| gpu.guess_gained).map(|gained| {
            let column = self.whole(-gained * MILLISECONDS, 0.0..=1.0);
            (column, gained)
        });
        let head = (is_rank0, device.head_seconds * MILLISECONDS);
        let gained = gpu_head.into_iter().chain(gpu_draft);
        let gained = gained.map(|(there, gained)| (there, -gained * MILLISECONDS));
        self.head_terms.extend([head].into_iter().chain(gained));
        Variables {
            takes_part,
            is_rank0,
            cpu_layers,
            gpu: gpu_layers.zip(uses_gpu),
            gpu_head,
            gpu_draft,
            streamed: gpu.and_then(|gpu| gpu.streamed).map(|_| {
                let streams = self.whole(0.0, 0.0..=1.0);
                (streams, self.rows.add_column(0.0, 0.0..=layers))
            }),
        }
    }

    /// Only members can be rank 0 or have layers, and only a GPU that is used has layers.
    fn layers(&mut self, device: &Device, variables: &Variables) {
        let layers = self.program.input.model.layers as f64;
        let &Variables {
            takes_part,
            is_rank0,
            ..
        } = variables;
        self.row(..=0.0, [(is_rank0, 1.0), (takes_part, -1.0)]);
        let none_without = [(takes_part, -layers)];
        self.row(..=0.0, variables.all_layers().chain(none_without));
        // Every member computes something; rank 0 may take part for the output head alone.
        let must = device.required || self.program.input.fewest > 1;
        let own_layer = if must { 0.0 } else { 1.0 };
        let something = [(takes_part, -1.0), (is_rank0, own_layer)];
        self.row(0.0.., variables.all_layers().chain(something));
        if let Some((gpu_layers, uses_gpu)) = variables.gpu {
            self.row(..=0.0, [(gpu_layers, 1.0), (uses_gpu, -layers)]);
            // What is rank 0's comes to layers only, as `latency` has it.
            for (there, _) in variables.gpu_head.into_iter().chain(variables.gpu_draft) {
                self.row(..=0.0, [(there, 1.0), (gpu_layers, -1.0)]);
                self.row(..=0.0, [(there, 1.0), (is_rank0, -1.0)]);
            }
        }
        if let Some((streams, streamed)) = variables.streamed {
            self.row(..=0.0, [(streamed, 1.0), (variables.cpu_layers, -1.0)]);
            self.row(..=0.0, [(streamed, 1.0), (streams, -layers)]);
        }
    }

    fn work(&mut self, device: &Device, variables: &Variables) -> Work {
        let model = &self.program.input.model;
        let (k, ms, units) = (self.rounds, MILLISECONDS, 1.0 / UNIT_BYTES);
        let positions = self.program.input.workload.chunk_tokens as f64;
        let &Variables {
            takes_part,
            is_rank0,
            cpu_layers,
            gpu,
            gpu_head,
            gpu_draft,
            streamed,
        } = variables;
        let mut token = vec![
            (cpu_layers, device.cpu.decode_seconds * ms),
            (is_rank0, device.head_seconds * ms),
        ];
        let mut head = vec![(is_rank0, model.head_bytes * units)];
        if let Some((gpu_head, gained)) = gpu_head {
            token.push((gpu_head, -gained * ms));
            head.push((gpu_head, -model.output_bytes * units));
        }
        if let Some((gpu_draft, gained)) = gpu_draft {
            token.push((gpu_draft, -gained * ms));
        }
        let mut chunk = vec![(cpu_layers, positions * device.cpu.prefill_seconds * ms)];
        // Layers in the device's own memory, and the KV cache of each.
        let mut in_memory = vec![(cpu_layers, model.layer_kv_bytes)];
        let mut shared = Terms::new();
        if let (Some(gpu), Some((layers, uses))) = (&device.gpu, gpu) {
            token.push((layers, gpu.layer.decode_seconds * ms));
            token.push((uses, k * gpu.copy_seconds * ms));
            chunk.push((layers, positions * gpu.layer.prefill_seconds * ms));
            chunk.push((uses, k * gpu.copy_seconds * ms));
            match gpu.memory_bytes {
                None => {
                    match device.memory_rule {
                        MemoryRule::AllOrNothing => {
                            in_memory.push((layers, model.gpu_layer_kv_bytes));
                        }
                        // What was copied for a GPU cannot be read again, and its passes take memory.
                        MemoryRule::Overflow => {
                            let layer = model.layer_bytes + model.gpu_layer_kv_bytes;
                            shared.extend([(layers, layer), (uses, model.gpu_buffer_bytes)]);
                        }
                    }
                    if let Some(lent) = gpu.lent_bytes {
                        self.gpu_memory(lent, layers, uses, &[]);
                    }
                }
                Some(available) => {
                    let head = gpu_head.map(|(there, _)| (there, model.gpu_output_bytes * units));
                    let draft = gpu_draft.map(|(there, _)| (there, model.gpu_draft_bytes * units));
                    let beside: Terms = head.into_iter().chain(draft).collect();
                    self.gpu_memory(available, layers, uses, &beside);
                    if let (Some(cost), Some((streams, streamed))) = (gpu.streamed, streamed) {
                        self.streaming_memory(available, cost, layers, streams, &beside);
                        let on_cpu = positions * device.cpu.prefill_seconds;
                        chunk.push((streamed, (cost.chunk_seconds - on_cpu) * ms));
                    }
                }
            }
        }
        let mut stays = times(&in_memory, units);
        stays.extend(times(&shared, units));
        stays.push((is_rank0, model.rank0_bytes * units));
        stays.extend(gpu_draft.map(|(there, _)| (there, -model.draft_moved_bytes * units)));
        let weights = in_memory.iter();
        let weights: Terms = weights
            .map(|&(layers, _)| (layers, model.layer_bytes * units))
            .collect();
        let reserve = model.kv_reserve_bytes(device, self.program.kv_windows);
        let beside = model.buffer_bytes + device.copying_bytes() + reserve;
        let room = (beside - device.memory_bytes) * units;
        let lacking = stays.iter().chain(&weights).chain(&head).copied();
        let lacking = lacking.chain([(takes_part, room)]).collect();
        Work {
            token,
            chunk,
            stays,
            weights,
            head,
            lacking,
            room,
        }
    }

    /// A GPU's own memory, or what it is lent, must be enough for its layers and what of rank 0's is there `beside` them.
    fn gpu_memory(&mut self, available: f64, layers: Col, uses: Col, beside: &[(Col, f64)]) {
        let model = &self.program.input.model;
        let layer = (model.layer_bytes + model.gpu_layer_kv_bytes) / UNIT_BYTES;
        let reserve = model.gpu_kv_reserve_bytes(self.program.kv_windows);
        let room = (model.gpu_buffer_bytes + reserve - available) / UNIT_BYTES;
        let terms = [(layers, layer), (uses, room)].into_iter();
        self.row(..=0.0, terms.chain(beside.iter().copied()));
    }

    /// The same with room for layers that are copied there for a chunk, if they are.
    fn streaming_memory(
        &mut self,
        available: f64,
        cost: StreamedCost,
        layers: Col,
        streams: Col,
        beside: &[(Col, f64)],
    ) {
        let model = &self.program.input.model;
        let layer = (model.layer_bytes + model.gpu_layer_kv_bytes) / UNIT_BYTES;
        let room = cost.room_bytes / UNIT_BYTES;
        // Without the room, that of the layers says the same.
        let reserve = model.gpu_kv_reserve_bytes(self.program.kv_windows);
        let most = (available - model.gpu_buffer_bytes - reserve).max(0.0) / UNIT_BYTES;
        let terms = [(layers, layer), (streams, room)].into_iter();
        self.row(..=most, terms.chain(beside.iter().copied()));
    }

    /// What cannot be read from disk must fit. Of the weights, o do not fit: they are read for each token, ahead of their use as far as the
    /// buffer B allows.
    fn overflow(&mut self, device: &Device, variables: &Variables, work: &mut Work, disk: f64) {
        let expert_disk = device.expert_rate(disk) / UNIT_BYTES / MILLISECONDS;
        let disk = disk / UNIT_BYTES / MILLISECONDS;
        let (k, cycle, overlap) = (self.rounds, self.cycle, &device.overlap);
        let overflow = self.rows.add_column(0.0, 0.0..);
        let buffer = self.rows.add_column(0.0, 0.0..);
        let ahead = self.rows.add_column(0.0, 0.0..);
        let stall = self.rows.add_column(0.0, 0.0..);
        let experts = self.missing_experts(work, overflow);
        let lacking = work.lacking.iter().copied().chain([(overflow, -1.0)]);
        self.row(
            ..=0.0,
            lacking.chain(experts.map(|experts| (experts, -1.0))),
        );
        let stays = work.stays.iter().copied();
        let kept = [(buffer, 1.0), (variables.takes_part, work.room)];
        self.row(..=0.0, stays.chain(kept));
        self.row(..=0.0, [(ahead, 1.0), (buffer, -1.0)]);
        // Read ahead is at most what the disk gives while the others work.
        let expert_wait = self.program.input.model.experts.read_share() / (k * expert_disk);
        let own = times(&work.token, disk / k).into_iter();
        let own = own.chain(experts.map(|experts| (experts, disk * expert_wait)));
        self.row(
            ..=0.0,
            own.chain([(ahead, 1.0), (cycle, -disk), (stall, disk)]),
        );
        // The member waits for what was not read ahead, except for what its own work hides.
        let rest = [(ahead, 1.0), (overflow, -1.0 / k), (buffer, -1.0 / k)];
        let gained = times(&work.token, overlap.hidden * disk / k);
        let waited = [(stall, disk)].into_iter().chain(gained);
        self.row(0.0.., rest.into_iter().chain(waited));
        let slowed = times(&rest, overlap.slowdown);
        self.row(0.0.., slowed.into_iter().chain([(stall, disk)]));
        self.cycle_terms.push((stall, 1.0));
        // The same for a chunk of a prompt, for which nothing is read ahead.
        let chunk_stall = self.rows.add_column(0.0, 0.0..);
        let gained = times(&work.chunk, overlap.hidden).into_iter();
        let read = [(chunk_stall, 1.0), (overflow, -1.0 / disk)];
        self.row(0.0.., gained.chain(read));
        let slowed = [(chunk_stall, 1.0), (overflow, -overlap.slowdown / disk)];
        self.row(0.0.., slowed);
        work.chunk.push((chunk_stall, 1.0));
        // Nothing hides reading experts: which are needed is not known before.
        if let Some(experts) = experts {
            self.cycle_terms.push((experts, expert_wait));
            work.chunk.push((experts, 1.0 / expert_disk));
        }
    }

    /// Experts that are not in memory, if the model has some. Other weights are there as long as some experts are.
    fn missing_experts(&mut self, work: &Work, overflow: Col) -> Option<Col> {
        let layer_bytes = self.program.input.model.experts.layer_bytes;
        if layer_bytes == 0.0 {
            return None;
        }
        let experts = self.rows.add_column(0.0, 0.0..);
        let all_missing = self.whole(0.0, 0.0..=1.0);
        let part = layer_bytes / self.program.input.model.layer_bytes;
        let all = times(&work.weights, part);
        let all_but = all.iter().map(|&(layers, bytes)| (layers, -bytes));
        self.row(..=0.0, all_but.chain([(experts, 1.0)]));
        let most = self.most_lacking();
        self.row(..=0.0, [(overflow, 1.0), (all_missing, -most)]);
        let some = [(experts, -1.0), (all_missing, most)];
        self.row(..=most, all.into_iter().chain(some));
        Some(experts)
    }

    /// The most that memory can lack: with everything on one device.
    fn most_lacking(&self) -> f64 {
        let model = &self.program.input.model;
        let kv = model.layer_kv_bytes.max(model.gpu_layer_kv_bytes);
        let reserve = kv * model.kv_excess(self.program.kv_windows);
        let copying = self.program.input.devices.iter().map(Device::copying_bytes);
        let beside = model.head_bytes + model.rank0_bytes + model.buffer_bytes + reserve;
        let beside = beside + copying.fold(0.0, f64::max);
        (model.layers as f64 * (model.layer_bytes + kv) + beside) / UNIT_BYTES
    }

    /// y: where not everything fits, everything is read again.
    fn all_or_nothing(&mut self, variables: &Variables, work: &mut Work, disk: f64) {
        let disk = disk / UNIT_BYTES / MILLISECONDS;
        let most = self.most_lacking();
        let read_again = self.whole(0.0, 0.0..=1.0);
        let read = self.rows.add_column(0.0, 0.0..);
        let lacking = work.lacking.iter().copied();
        self.row(..=0.0, lacking.chain([(read_again, -most)]));
        let stays = work.stays.iter().copied();
        self.row(..=0.0, stays.chain([(variables.takes_part, work.room)]));
        let weights = work.weights.iter().chain(&work.head).copied();
        let all = [(read, -1.0), (read_again, most)];
        self.row(..=most, weights.chain(all));
        self.cycle_terms.push((read, 1.0 / (self.rounds * disk)));
        work.chunk.push((read, 1.0 / disk));
    }

    /// Where the order is not part of the program, each device's hop costs what its cheapest link does. One that reaches nobody takes no part.
    fn cheapest_hop(&mut self, index: usize, variables: &Variables, work: &mut Work) {
        let hops = &self.program.input.hops[index];
        let mut others = hops.iter().enumerate().filter(|(other, _)| *other != index);
        if !others.any(|(_, hop)| hop.is_way()) {
            return self.row(..=0.0, [(variables.takes_part, 1.0)]);
        }
        let cheapest = |seconds: fn(&HopCost) -> f64| {
            let others = (0..hops.len()).filter(|&other| other != index);
            others
                .map(|other| seconds(&hops[other]))
                .fold(f64::INFINITY, f64::min)
        };
        let takes_part = variables.takes_part;
        let decode = cheapest(|hop| hop.decode_seconds) * MILLISECONDS;
        self.cycle_terms.push((takes_part, decode));
        let chunk = self.rounds * cheapest(|hop| hop.chunk_seconds) * MILLISECONDS;
        work.chunk.push((takes_part, chunk));
    }

    /// If rounds could be empty: whether this device has a layer for each round.
    fn may_fill_rounds(&mut self, variables: &Variables) {
        let devices = self.program.input.devices.len() as f64;
        if self.rounds * devices > self.program.input.model.layers as f64 {
            let fills = self.whole(0.0, 0.0..=1.0);
            let enough = [(fills, -self.rounds)];
            self.row(0.0.., variables.all_layers().chain(enough));
            self.round_fillers.push((fills, 1.0));
        }
    }

    /// No round may be empty: somebody has a layer for each.
    fn rounds_are_filled(&mut self) {
        if !self.round_fillers.is_empty() {
            let fillers = std::mem::take(&mut self.round_fillers);
            self.row(1.0.., fillers);
        }
    }

    /// Who follows whom: every device that takes part has one successor and one predecessor, which it reaches.
    fn order(&mut self) {
        let devices = self.program.input.devices.len();
        let hops = &self.program.input.hops;
        for (from, hops) in hops.iter().enumerate() {
            let ways = hops.iter().enumerate();
            for (to, hop) in ways.filter(|&(to, hop)| to != from && hop.is_way()) {
                let follows = self.whole(0.0, 0.0..=1.0);
                let decode = hop.decode_seconds * MILLISECONDS;
                self.cycle_terms.push((follows, decode));
                let chunk = self.rounds * hop.chunk_seconds * MILLISECONDS;
                self.stage_terms[from].push((follows, chunk));
                self.columns.follows[from][to] = Some(follows);
            }
        }
        for device in 0..devices {
            let takes_part = [(self.columns.takes_part[device], -1.0)];
            let follows = &self.columns.follows;
            let out: Terms = ones(follows[device].iter().flatten());
            let into: Terms = ones(follows.iter().filter_map(|from| from[device].as_ref()));
            self.row(0.0..=0.0, out.into_iter().chain(takes_part));
            self.row(0.0..=0.0, into.into_iter().chain(takes_part));
        }
    }

    fn cut(&mut self, cuts: &[Vec<usize>]) {
        for cut in cuts {
            let follows = &self.columns.follows;
            let within = cut
                .iter()
                .flat_map(|&from| cut.iter().filter_map(move |&to| follows[from][to].as_ref()));
            let within = ones(within);
            self.row(..=cut.len() as f64 - 1.0, within);
        }
    }

    /// Every layer has a device, one device is rank 0, and at least two take part, or as many as are asked for.
    fn ring(&mut self) {
        let layers = self.program.input.model.layers as f64;
        let terms = std::mem::take(&mut self.layer_terms);
        self.row(layers..=layers, terms);
        let leads = ones(&self.columns.is_rank0);
        self.row(1.0..=1.0, leads);
        let members = ones(&self.columns.takes_part);
        self.row(self.program.input.fewest.max(2) as f64.., members.clone());
        if !self.program.ordered {
            self.others_between(&members);
        }
        let cycle = std::mem::take(&mut self.cycle_terms);
        self.row(0.0..=0.0, cycle);
    }

    /// Two that do not reach each other have another one on each side: a ring of both has four members at least.
    fn others_between(&mut self, members: &[(Col, f64)]) {
        let hops = &self.program.input.hops;
        for (one, hops) in hops.iter().enumerate() {
            for other in (0..one).filter(|&other| !hops[other].is_way()) {
                let pair = [one, other].map(|index| (self.columns.takes_part[index], -2.0));
                self.row(0.0.., members.iter().copied().chain(pair));
            }
        }
    }

    /// The first chunk takes the time of all stages, every further one that of the slowest. With the output head, that may be bounded.
    fn prompt(&mut self) {
        let first = self.rows.add_column(1.0, 0.0..);
        let stages = std::mem::take(&mut self.stage_terms);
        for stage in &stages {
            let slowest = [(self.slowest, -1.0)];
            self.row(..=0.0, stage.iter().copied().chain(slowest));
        }
        let all = stages.into_iter().flatten();
        self.row(0.0..=0.0, all.chain([(first, -1.0)]));
        if let Some(most) = self.program.input.first_token_seconds {
            let further = (chunks(self.program.input) - 1.0).max(0.0);
            let head = std::mem::take(&mut self.head_terms).into_iter();
            let prompt = head.chain([(first, 1.0), (self.slowest, further)]);
            self.row(..=most * MILLISECONDS, prompt);
        }
    }

    /// A column for a whole number, or any number where the program is relaxed.
    fn whole(&mut self, cost: f64, range: RangeInclusive<f64>) -> Col {
        match self.program.relaxed {
            true => self.rows.add_column(cost, range),
            false => self.rows.add_integer_column(cost, range),
        }
    }

    fn row(&mut self, bounds: impl RangeBounds<f64>, terms: impl IntoIterator<Item = (Col, f64)>) {
        self.rows.add_row(bounds, merged(terms));
    }
}

fn times(terms: &[(Col, f64)], factor: f64) -> Terms {
    let terms = terms.iter();
    terms.map(|&(col, value)| (col, value * factor)).collect()
}

fn ones<'a>(columns: impl IntoIterator<Item = &'a Col>) -> Terms {
    columns.into_iter().map(|&col| (col, 1.0)).collect()
}

/// HiGHS refuses a row that names a column twice.
fn merged(terms: impl IntoIterator<Item = (Col, f64)>) -> Terms {
    let mut sums: Terms = terms.into_iter().collect();
    sums.sort_by_key(|(col, _)| col.index());
    sums.dedup_by(|next, kept| {
        let same = next.0.index() == kept.0.index();
        if same {
            kept.1 += next.1;
        }
        same
    });
    sums
}
