//! What an assignment costs: the latency model that plans are made with, one function per term. Seconds and bytes.
//!
//! It is the paper's (equations 11 to 20): a sum over the members, because one member at a time computes a token. It differs in these
//! points, which are settled here and nowhere else:
//!
//! - The KV cache is never read from disk: it is memory of the process, so it must fit. Only weights overflow. It is counted of the very layers
//!   that a member holds, because layers with windows have smaller ones than others.
//! - Reading from disk overlaps with work: entirely with other members' work, and with the member's own as far as the machine was measured
//!   to do both at once ([`Overlap`]: a second of own work gains h seconds of reading, and loses l seconds for each second that is read
//!   during it). A member has D bytes for weights, of which B are a read-ahead buffer. If it is short of o bytes, it streams S = o + B
//!   bytes per token, S/k in each of k rounds. Of a round's share it can read at most B bytes ahead, and no more than the disk gives while
//!   the others work. The rest, q seconds of reading, goes on during its own work and stalls it by z = max(q - h busy/k, l q). The best B
//!   leaves
//!
//!   ```text
//!       z(C) = max(0, q - h busy/k, l q,                with q = (o - (k-1) D) / (k s), what there is no room for,
//!                     r - h busy, l r / (k - l (k-1)))  with r = o/s - (k-1) (C - busy/k), what there is no time for
//!   ```
//!
//!   seconds of stall per round, where s is the disk, C the time of a round and busy the member's own work for a token. With
//!   one round, h = 0 and l = 1 this is equation 15: z = o/s. C = sum of (busy/k + z(C) + hop) over the members has one
//!   solution, because z falls as C grows, and a token takes k C.
//! - Experts that memory lacks are read at a rate of their own, and nothing hides that: which are needed is not known before. Meanwhile nothing else
//!   is read ahead.
//! - A prompt is computed in chunks, one behind the other: the first takes as long as all members together, and every further one as long
//!   as the slowest member. A member reads its overflow once per chunk, overlapped with its own work in the same way. How large chunks are is no
//!   part of an assignment: rings are searched for with each size ([`plan_ring`](crate::plan::plan_ring)).
//! - A hop costs latency and payload, for every member in every round, unless the ring has one member.
//! - Rank 0's output head and draft model are on its GPU where its layers leave room ([`MemberLatency::output_head_on_gpu`],
//!   [`MemberLatency::draft_on_gpu`]).
//! - A GPU that shares the machine's memory has no more of it than its driver lends: its layers, their KV caches and its passes have to fit that, too.
//! - Where a GPU has room for two matrices more, and for the keys and values of two layers, it computes a prompt's chunks through the layers on
//!   the CPU, too ([`MemberLatency::gpu_from_rows`]). A layer takes as long as its weights take to get there, or as the GPU computes, if that
//!   is longer. A last chunk that is part full costs a whole copy, which is not counted. Copies pass through some of the machine's memory.

use std::ops::Range;

use crate::input::{Device, GpuCost, MemoryRule, ModelSizes, Overlap, PlanningInput, StreamedCost};
use crate::windows::{Window, windows};

/// Who runs what. `shares` has one entry per device of the input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    pub rounds: usize,
    /// Devices in ring order, rank 0 first.
    pub ring: Vec<usize>,
    pub shares: Vec<LayerShare>,
}

impl Assignment {
    /// Of each member, in ring order, one per round.
    pub fn windows(&self) -> Vec<Vec<Window>> {
        let shares = self.ring.iter().map(|&index| self.shares[index]);
        windows(&shares.collect::<Vec<_>>(), self.rounds)
    }
}

/// Layers of one device in all rounds together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LayerShare {
    pub cpu_layers: usize,
    pub gpu_layers: usize,
}

impl LayerShare {
    pub fn layers(self) -> usize {
        self.cpu_layers + self.gpu_layers
    }
}

/// What is predicted of an assignment.
#[derive(Clone, Debug)]
pub struct Latency {
    /// From one token to the next (TPOT).
    pub token_seconds: f64,
    /// From the request to the first token (TTFT), with no other request before it.
    pub prompt_seconds: f64,
    /// In ring order.
    pub members: Vec<MemberLatency>,
}

/// Seconds of one member for one token, all rounds together, and its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemberLatency {
    pub cpu_seconds: f64,
    pub gpu_seconds: f64,
    /// Between CPU and GPU.
    pub copy_seconds: f64,
    /// Output head and embedding, and a draft model's guess, on rank 0.
    pub head_seconds: f64,
    /// Waiting for the disk.
    pub disk_seconds: f64,
    /// To the successor.
    pub hop_seconds: f64,
    /// For one chunk of a prompt, all rounds together.
    pub chunk_seconds: f64,
    /// Memory that is left for weights (D).
    pub weight_room_bytes: f64,
    /// Of the weights on the CPU, what is read again for every token (o). Where there are experts, these give way first.
    pub overflow_bytes: f64,
    /// Experts that are not in memory, and what a token reads of them: nothing hides that, since it is not known before.
    pub missing_expert_bytes: f64,
    pub expert_read_bytes: f64,
    /// Read in each round while others work (B).
    pub read_ahead_bytes: f64,
    /// Weights on the CPU, KV cache and buffers, and a draft model.
    pub memory_bytes: f64,
    pub gpu_memory_bytes: f64,
    /// Of both, for KV caches.
    pub kv_bytes: f64,
    pub output_head_on_gpu: bool,
    pub draft_on_gpu: bool,
    /// From so many rows of a pass on, layers on the CPU are computed on the GPU. `None`: they never are.
    pub gpu_from_rows: Option<usize>,
}

impl MemberLatency {
    /// Bytes read from disk for each token (S): the overflow, what the read-ahead buffer displaces, and experts.
    pub fn read_bytes(&self) -> f64 {
        self.overflow_bytes + self.read_ahead_bytes + self.expert_read_bytes
    }

    /// Weights that do not fit.
    pub fn lacking_bytes(&self) -> f64 {
        self.overflow_bytes + self.missing_expert_bytes
    }

    /// Work of its own: everything but waiting for disk and network.
    pub fn busy_seconds(&self) -> f64 {
        self.cpu_seconds + self.gpu_seconds + self.copy_seconds + self.head_seconds
    }
}

/// Why an assignment is impossible: which device lacks how much.
#[derive(Clone, Debug, PartialEq)]
pub enum Violation {
    NoGpu {
        device: usize,
    },
    GpuMemory {
        device: usize,
        missing_bytes: f64,
    },
    /// KV cache, buffers, a draft model, and what a GPU that shares the memory has there, which are not read from disk.
    Memory {
        device: usize,
        missing_bytes: f64,
    },
    /// Weights, on a device whose disk is too slow or not allowed.
    Disk {
        device: usize,
        missing_bytes: f64,
    },
    /// The first token comes later than it may.
    FirstToken {
        excess_seconds: f64,
    },
    /// Two neighbours do not reach each other.
    NoWay {
        from: usize,
        to: usize,
    },
}

/// The seconds that a request takes: its prompt and all tokens of its answer. Plans make them as few as possible.
pub fn request_seconds(input: &PlanningInput, latency: &Latency) -> f64 {
    latency.prompt_seconds + input.workload.answer_tokens as f64 * latency.token_seconds
}

/// Predicts `assignment`, whose shares must cover all layers and whose ring holds each device with layers once.
pub fn predict(input: &PlanningInput, assignment: &Assignment) -> Result<Latency, Violation> {
    type Predicted = Result<Latency, Violation>;
    let better = |one: Predicted, other: Predicted| match (one, other) {
        (Ok(one), Ok(other)) => {
            let is_faster = request_seconds(input, &other) < request_seconds(input, &one);
            Ok(if is_faster { other } else { one })
        }
        (Err(_), Ok(other)) => Ok(other),
        (one, Err(_)) => one,
    };
    let first = predict_with(input, assignment, &ORDERS[0]);
    let others = other_orders(&input.devices[assignment.ring[0]]).iter();
    others
        .map(|order| predict_with(input, assignment, order))
        .fold(first, better)
}

/// What a GPU does beside its layers, where these leave room.
enum GpuExtra {
    /// Layers on the CPU that are copied there for passes of many rows.
    Streamed,
    /// Rank 0's output head.
    Head,
    /// Rank 0's draft model.
    Draft,
}

/// What comes first, and what comes where that leaves room, too.
type Order = [GpuExtra; 3];

static ORDERS: [Order; 6] = {
    use GpuExtra::{Draft, Head, Streamed};
    [
        [Streamed, Head, Draft],
        [Head, Streamed, Draft],
        [Streamed, Draft, Head],
        [Head, Draft, Streamed],
        [Draft, Streamed, Head],
        [Draft, Head, Streamed],
    ]
};

/// Those that may come to something else than the first on rank 0's GPU.
fn other_orders(rank0: &Device) -> &'static [Order] {
    let Some(gpu) = &rank0.gpu else {
        return &[];
    };
    let (streams, head) = (gpu.streamed.is_some(), gpu.head_seconds.is_some());
    match gpu.guess_gained {
        Some(_) if streams || head => &ORDERS[1..],
        None if streams && head => &ORDERS[1..2],
        _ => &[],
    }
}

fn predict_with(
    input: &PlanningInput,
    assignment: &Assignment,
    order: &Order,
) -> Result<Latency, Violation> {
    let rounds = assignment.rounds as f64;
    let mut members = Vec::with_capacity(assignment.ring.len());
    let caches = kv_bytes(&input.model, assignment);
    for (rank, (&index, kv)) in assignment.ring.iter().zip(caches).enumerate() {
        let next = assignment.ring[(rank + 1) % assignment.ring.len()];
        let share = assignment.shares[index];
        let device = &input.devices[index];
        let extras = gpu_extras(&input.model, device, share, kv, rank == 0, order);
        let mut member = work(input, index, share, rank == 0, rounds, extras);
        memory(input, index, share, kv, rank == 0, &mut member)?;
        if assignment.ring.len() > 1 {
            let hop = input.hops[index][next];
            if !hop.is_way() {
                return Err(Violation::NoWay {
                    from: index,
                    to: next,
                });
            }
            member.hop_seconds = rounds * hop.decode_seconds;
            member.chunk_seconds += rounds * hop.chunk_seconds;
        }
        members.push(member);
    }
    let stalls = stalls(input, assignment, &members);
    for (member, stall) in members.iter_mut().zip(stalls) {
        member.disk_seconds = stall;
    }
    let token_seconds = members
        .iter()
        .map(|member| member.busy_seconds() + member.disk_seconds + member.hop_seconds)
        .sum();
    for (member, &index) in members.iter_mut().zip(&assignment.ring) {
        member.read_ahead_bytes = read_ahead(
            &input.devices[index],
            member,
            rounds,
            token_seconds / rounds,
        );
    }
    let slowest = members
        .iter()
        .map(|member| member.chunk_seconds)
        .fold(0.0, f64::max);
    let traversal: f64 = members.iter().map(|member| member.chunk_seconds).sum();
    let prompt_seconds = traversal + (chunks(input) - 1.0) * slowest + members[0].head_seconds;
    if let Some(most) = input.first_token_seconds
        && prompt_seconds > most * ROUNDED_UP
    {
        return Err(Violation::FirstToken {
            excess_seconds: prompt_seconds - most,
        });
    }
    Ok(Latency {
        token_seconds,
        prompt_seconds,
        members,
    })
}

/// A solver keeps to a bound up to rounding.
const ROUNDED_UP: f64 = 1.0 + 1e-5;

/// What the KV caches of a member's layers take.
#[derive(Clone, Copy)]
struct KvBytes {
    on_cpu: f64,
    on_gpu: f64,
}

/// Of each member, in ring order.
fn kv_bytes(model: &ModelSizes, assignment: &Assignment) -> Vec<KvBytes> {
    let bytes = |on_cpu: f64, on_gpu: f64| KvBytes {
        on_cpu: on_cpu * model.layer_kv_bytes,
        on_gpu: on_gpu * model.gpu_layer_kv_bytes,
    };
    if model.kv_of_layers.is_empty() {
        let shares = assignment
            .ring
            .iter()
            .map(|&index| assignment.shares[index]);
        return shares
            .map(|share| bytes(share.cpu_layers as f64, share.gpu_layers as f64))
            .collect();
    }
    let sum = |layers: Range<usize>| model.kv_of_layers[layers].iter().sum::<f64>();
    let of_member = |windows: &Vec<Window>| {
        let on_cpu = windows.iter().map(|w| sum(w.first..w.last - w.gpu_layers));
        let on_gpu = windows.iter().map(|w| sum(w.last - w.gpu_layers..w.last));
        bytes(on_cpu.sum(), on_gpu.sum())
    };
    assignment.windows().iter().map(of_member).collect()
}

/// Chunks of a prompt; a last one that is part full counts as that part.
pub fn chunks(input: &PlanningInput) -> f64 {
    let workload = &input.workload;
    (workload.prompt_tokens as f64 / workload.chunk_tokens as f64).max(1.0)
}

/// Computing and copying, for a token and for a chunk.
fn work(
    input: &PlanningInput,
    index: usize,
    share: LayerShare,
    is_rank0: bool,
    rounds: f64,
    extras: Extras,
) -> MemberLatency {
    let device = &input.devices[index];
    let chunk = input.workload.chunk_tokens as f64;
    let (cpu_layers, gpu_layers) = (share.cpu_layers as f64, share.gpu_layers as f64);
    let mut member = MemberLatency {
        cpu_seconds: cpu_layers * device.cpu.decode_seconds,
        head_seconds: match is_rank0 {
            false => 0.0,
            true => {
                let head = extras.head_seconds.unwrap_or(device.head_seconds);
                head - extras.guess_gained.unwrap_or(0.0)
            }
        },
        output_head_on_gpu: extras.head_seconds.is_some(),
        draft_on_gpu: extras.guess_gained.is_some(),
        gpu_from_rows: extras.streamed.map(|streamed| streamed.from_rows),
        chunk_seconds: match extras.streamed {
            Some(streamed) => cpu_layers * streamed.chunk_seconds,
            None => chunk * cpu_layers * device.cpu.prefill_seconds,
        },
        ..MemberLatency::default()
    };
    if let Some(gpu) = device.gpu.as_ref().filter(|_| share.gpu_layers > 0) {
        member.gpu_seconds = gpu_layers * gpu.layer.decode_seconds;
        member.copy_seconds = rounds * gpu.copy_seconds;
        member.chunk_seconds +=
            chunk * gpu_layers * gpu.layer.prefill_seconds + member.copy_seconds;
    }
    member
}

/// What a GPU does beside its layers. All of it follows from the layers, so that searches choose layers only: where these leave room, it is faster
/// there, and head and draft model take no memory of the machine. A layer that gives way to the head loses what the head gains, byte by byte.
#[derive(Clone, Copy, Default)]
struct Extras {
    /// What a chunk takes of layers on the CPU that are copied there for it.
    streamed: Option<StreamedCost>,
    /// What a token takes of rank 0's output head (and of a guess on the CPU).
    head_seconds: Option<f64>,
    /// What a guess takes less.
    guess_gained: Option<f64>,
}

fn gpu_extras(
    model: &ModelSizes,
    device: &Device,
    share: LayerShare,
    kv: KvBytes,
    is_rank0: bool,
    order: &Order,
) -> Extras {
    let mut extras = Extras::default();
    let Some((gpu, available)) = device
        .gpu
        .as_ref()
        .and_then(|gpu| Some((gpu, gpu.memory_bytes?)))
    else {
        return extras;
    };
    let mut room = available - gpu_layers_bytes(model, share, kv);
    let comes = is_rank0 && share.gpu_layers > 0;
    for extra in order {
        let taken = match extra {
            GpuExtra::Streamed => {
                let wanted = gpu.streamed.filter(|_| share.cpu_layers > 0);
                extras.streamed = wanted.filter(|streamed| streamed.room_bytes <= room);
                extras.streamed.map(|streamed| streamed.room_bytes)
            }
            GpuExtra::Head => {
                let wanted = gpu.head_seconds.filter(|_| comes);
                extras.head_seconds = wanted.filter(|_| model.gpu_output_bytes <= room);
                extras.head_seconds.map(|_| model.gpu_output_bytes)
            }
            GpuExtra::Draft => {
                let wanted = gpu.guess_gained.filter(|_| comes);
                extras.guess_gained = wanted.filter(|_| model.gpu_draft_bytes <= room);
                extras.guess_gained.map(|_| model.gpu_draft_bytes)
            }
        };
        room -= taken.unwrap_or(0.0);
    }
    extras
}

/// What layers take of a GPU's own memory, or of what it is lent.
fn gpu_layers_bytes(model: &ModelSizes, share: LayerShare, kv: KvBytes) -> f64 {
    share.gpu_layers as f64 * model.layer_bytes + kv.on_gpu + model.gpu_buffer_bytes
}

/// Bytes, the overflow, and what reading it adds to a chunk.
fn memory(
    input: &PlanningInput,
    index: usize,
    share: LayerShare,
    kv: KvBytes,
    is_rank0: bool,
    member: &mut MemberLatency,
) -> Result<(), Violation> {
    let device = &input.devices[index];
    let model = &input.model;
    let missing = |bytes: f64| (bytes > SLACK_BYTES).then_some(bytes);
    let mut layers = share.cpu_layers as f64;
    let mut kv_here = kv.on_cpu;
    let mut shared = 0.0;
    member.kv_bytes = kv.on_cpu + kv.on_gpu;
    if share.gpu_layers > 0 {
        let gpu_layers = share.gpu_layers as f64;
        match &device.gpu {
            None => return Err(Violation::NoGpu { device: index }),
            Some(GpuCost {
                memory_bytes: None,
                lent_bytes,
                ..
            }) => {
                let lent = lent_bytes.unwrap_or(f64::INFINITY);
                if let Some(missing_bytes) = missing(gpu_layers_bytes(model, share, kv) - lent) {
                    return Err(Violation::GpuMemory {
                        device: index,
                        missing_bytes,
                    });
                }
                kv_here += kv.on_gpu;
                match device.memory_rule {
                    MemoryRule::AllOrNothing => layers += gpu_layers,
                    // What was copied for a GPU cannot be read again, and its passes take memory.
                    MemoryRule::Overflow => {
                        shared = gpu_layers * model.layer_bytes + model.gpu_buffer_bytes;
                    }
                }
            }
            Some(GpuCost {
                memory_bytes: Some(available),
                ..
            }) => {
                member.gpu_memory_bytes = gpu_layers_bytes(model, share, kv);
                if member.output_head_on_gpu {
                    member.gpu_memory_bytes += model.gpu_output_bytes;
                }
                if member.draft_on_gpu {
                    member.gpu_memory_bytes += model.gpu_draft_bytes;
                }
                if let Some(missing_bytes) = missing(member.gpu_memory_bytes - available) {
                    return Err(Violation::GpuMemory {
                        device: index,
                        missing_bytes,
                    });
                }
            }
        }
    }
    if member.gpu_from_rows.is_some()
        && let Some(streamed) = device.gpu.as_ref().and_then(|gpu| gpu.streamed)
    {
        if share.gpu_layers == 0 {
            member.gpu_memory_bytes = model.gpu_buffer_bytes;
        }
        member.gpu_memory_bytes += streamed.room_bytes;
    }
    let (mut head, mut stays) = match is_rank0 {
        true => (model.head_bytes, model.rank0_bytes),
        false => (0.0, 0.0),
    };
    if member.output_head_on_gpu {
        head -= model.output_bytes;
    }
    if member.draft_on_gpu {
        stays -= model.draft_moved_bytes;
    }
    let weights = layers * model.layer_bytes + head;
    let fixed = kv_here + shared + stays + model.buffer_bytes + device.copying_bytes();
    member.memory_bytes = weights + fixed;
    if let Some(missing_bytes) = missing(fixed - device.memory_bytes) {
        return Err(Violation::Memory {
            device: index,
            missing_bytes,
        });
    }
    member.weight_room_bytes = (device.memory_bytes - fixed).max(0.0);
    let Some(overflow) = missing(weights - member.weight_room_bytes) else {
        return Ok(());
    };
    let Some(disk) = device.disk_bytes_per_second else {
        return Err(Violation::Disk {
            device: index,
            missing_bytes: overflow,
        });
    };
    match device.memory_rule {
        MemoryRule::Overflow => {
            let missing = overflow.min(layers * model.experts.layer_bytes);
            member.missing_expert_bytes = missing;
            member.expert_read_bytes = missing * model.experts.read_share();
            member.overflow_bytes = overflow - missing;
            let reading = member.overflow_bytes / disk;
            // The rows of a chunk need nearly all experts.
            member.chunk_seconds += device.overlap.stall(member.chunk_seconds, reading)
                + missing / device.expert_rate(disk);
        }
        MemoryRule::AllOrNothing => {
            member.overflow_bytes = weights;
            member.chunk_seconds += weights / disk;
        }
    }
    Ok(())
}

/// If a second of reading slows computing by fewer seconds than this, reading counts as free: a larger buffer, which has to be read too, is
/// not worth it.
const FREE: f64 = 0.05;
/// Less than this is rounding, not memory.
pub const SLACK_BYTES: f64 = 1024.0;

/// Seconds that each member waits for its disk, per token: where C = sum of (busy/k + z(C) + hop/k).
fn stalls(input: &PlanningInput, assignment: &Assignment, members: &[MemberLatency]) -> Vec<f64> {
    let rounds = assignment.rounds as f64;
    let working: f64 = members
        .iter()
        .map(|member| (member.busy_seconds() + member.hop_seconds) / rounds)
        .sum();
    let at = |cycle: f64| -> Vec<f64> {
        let devices = assignment.ring.iter().map(|&index| &input.devices[index]);
        devices
            .zip(members)
            .map(|(device, member)| stall(device, member, rounds, cycle))
            .collect()
    };
    // z falls as C grows, so the stalls of the shortest round bound the longest round.
    let (mut low, mut high) = (working, working + at(working).iter().sum::<f64>());
    while high - low > 1e-13 * high {
        let middle = low + (high - low) / 2.0;
        if working + at(middle).iter().sum::<f64>() > middle {
            low = middle;
        } else {
            high = middle;
        }
    }
    at(high).into_iter().map(|stall| stall * rounds).collect()
}

/// B: what is worth reading ahead, as far as a round of `cycle` seconds has time and room for it. Where reading hardly slows computing,
/// what own work hides need not be read ahead.
fn read_ahead(device: &Device, member: &MemberLatency, rounds: f64, cycle: f64) -> f64 {
    match (device.memory_rule, device.disk_bytes_per_second) {
        (MemoryRule::Overflow, Some(disk)) if rounds > 1.0 => {
            let own = (member.busy_seconds() + member.disk_seconds) / rounds;
            let behind = match device.overlap.slowdown < FREE {
                true => disk * device.overlap.hidden * member.busy_seconds(),
                false => 0.0,
            };
            ((member.overflow_bytes - behind).max(0.0) / (rounds - 1.0))
                .min(disk * (cycle - own).max(0.0))
                .min(member.weight_room_bytes)
        }
        _ => 0.0,
    }
}

/// z(C): seconds that a member waits for its disk in a round of `cycle` seconds.
fn stall(device: &Device, member: &MemberLatency, rounds: f64, cycle: f64) -> f64 {
    let overflow = member.overflow_bytes;
    let reads = member.lacking_bytes() > 0.0;
    let Some(disk) = device.disk_bytes_per_second.filter(|_| reads) else {
        return 0.0;
    };
    match device.memory_rule {
        MemoryRule::AllOrNothing => overflow / (rounds * disk),
        MemoryRule::Overflow => {
            let busy = member.busy_seconds();
            let experts = member.expert_read_bytes / (rounds * device.expert_rate(disk));
            let later = rounds - 1.0;
            let no_room = (overflow - later * member.weight_room_bytes) / (rounds * disk);
            let by_room = device.overlap.stall(busy / rounds, no_room);
            let no_time = overflow / disk - later * (cycle - busy / rounds - experts);
            let Overlap { hidden, slowdown } = device.overlap;
            let by_time =
                (no_time - hidden * busy).max(slowdown * no_time / (rounds - slowdown * later));
            by_room.max(by_time).max(0.0) + experts
        }
    }
}
