//! Algorithm 1 of the paper as published: window sizes by memory, then in turn the sets M1 to M4 and, for every number of
//! rounds that divides the layers, an integer program with these sets fixed. Kept to compare with; plans are made by
//! `search`.
//!
//! It takes the ring in the order of the input's devices, the first as rank 0, gives every device a layer, and credits no
//! prefetch. macOS without Metal (M1) has no GPU layers and otherwise the rules of Linux and Android (M3), so both are one
//! case here; swap (Android) is part of a device's memory already.

use highs::{HighsModelStatus, RowProblem, Sense};

use crate::input::{Device, MemoryRule, PlanningInput};

/// Windows of one round and the objective, equation 6.
#[derive(Clone, Debug, PartialEq)]
pub struct ReferencePlan {
    pub rounds: usize,
    /// w and n of each device.
    pub windows: Vec<(usize, usize)>,
    pub seconds: f64,
}

/// Where a device's weights are: the sets of section 3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Regime {
    /// M1 and M3: memory is short, the overflow is read again.
    Overflow,
    /// M2: memory is short, everything is read again.
    ReloadAll,
    /// M4: memory suffices, or the disk is too slow to be relied on.
    Fits,
}

/// `None`: no division of the layers satisfies the constraints.
pub fn halda(input: &PlanningInput) -> Option<ReferencePlan> {
    let devices = &input.devices;
    let layers = input.model.layers;
    let budget: f64 = devices.iter().map(|device| device.memory_bytes).sum();
    let share = |device: &Device| (layers as f64 * device.memory_bytes / budget.max(1.0)).round();
    let mut windows: Vec<(usize, usize)> = devices
        .iter()
        .map(|device| (share(device).max(1.0) as usize, 0))
        .collect();
    let mut forced = vec![false; devices.len()];
    let mut before: Option<Vec<Regime>> = None;
    let mut best: Option<ReferencePlan> = None;
    // Sets may alternate without end when memory is just enough; this many turns see all that matter.
    for _ in 0..2 * devices.len() + 8 {
        let round: usize = windows.iter().map(|window| window.0).sum();
        let rounds = layers as f64 / round as f64;
        let regimes: Vec<Regime> = (0..devices.len())
            .map(|index| regime(input, index, windows[index], rounds, forced[index]))
            .collect();
        if before.as_ref() == Some(&regimes) {
            break;
        }
        let solved = (1..layers)
            .filter(|rounds| layers.is_multiple_of(*rounds))
            .chain((layers == 1).then_some(1))
            .filter_map(|rounds| integer_program(input, &regimes, rounds))
            .min_by(|a, b| a.seconds.total_cmp(&b.seconds));
        before = Some(regimes.clone());
        let Some(solved) = solved else {
            // The sets cannot be kept: the next device with a slow disk must fit.
            if !force_slowest(input, &regimes, &mut forced) {
                break;
            }
            continue;
        };
        windows.clone_from(&solved.windows);
        let idle_gpu = (0..devices.len()).any(|index| has_free_gpu_memory(input, index, &solved));
        let overloaded = regimes.iter().any(|regime| *regime != Regime::Fits);
        best = Some(solved);
        if idle_gpu && overloaded && !force_slowest(input, &regimes, &mut forced) {
            break;
        }
    }
    best
}

/// The set of a device, given what it runs.
pub fn regime(
    input: &PlanningInput,
    index: usize,
    (window, gpu): (usize, usize),
    rounds: f64,
    forced: bool,
) -> Regime {
    let device = &input.devices[index];
    if forced || device.disk_bytes_per_second.is_none() {
        return Regime::Fits;
    }
    let model = &input.model;
    let on_cpu = match device.memory_rule {
        MemoryRule::Overflow => window - gpu,
        MemoryRule::AllOrNothing => window,
    };
    let need = rounds * on_cpu as f64 * (model.layer_bytes + model.layer_kv_bytes)
        + constant_bytes(input, index);
    match (need > device.memory_bytes, device.memory_rule) {
        (false, _) => Regime::Fits,
        (true, MemoryRule::Overflow) => Regime::Overflow,
        (true, MemoryRule::AllOrNothing) => Regime::ReloadAll,
    }
}

/// b_cio: what a device holds beside its layers.
fn constant_bytes(input: &PlanningInput, index: usize) -> f64 {
    let head = if index == 0 {
        input.model.head_bytes
    } else {
        0.0
    };
    head + input.model.buffer_bytes
}

fn has_free_gpu_memory(input: &PlanningInput, index: usize, plan: &ReferencePlan) -> bool {
    let (window, gpu) = plan.windows[index];
    let layer = input.model.layer_bytes + input.model.gpu_layer_kv_bytes;
    let used = (plan.rounds * gpu) as f64 * layer;
    let device = &input.devices[index];
    let room = device.gpu.as_ref().and_then(|gpu| gpu.memory_bytes);
    gpu == window && room.is_some_and(|room| room - used > plan.rounds as f64 * layer)
}

/// The device of M1, M2 or M3 with the slowest disk must fit from now on.
fn force_slowest(input: &PlanningInput, regimes: &[Regime], forced: &mut [bool]) -> bool {
    let speed = |index: usize| {
        input.devices[index]
            .disk_bytes_per_second
            .unwrap_or(f64::INFINITY)
    };
    let slowest = (0..regimes.len())
        .filter(|&index| regimes[index] != Regime::Fits)
        .min_by(|&a, &b| speed(a).total_cmp(&speed(b)));
    slowest.is_some_and(|index| {
        forced[index] = true;
        true
    })
}

/// Equations 6 to 10 for fixed sets and rounds.
pub fn integer_program(
    input: &PlanningInput,
    regimes: &[Regime],
    rounds: usize,
) -> Option<ReferencePlan> {
    let model = &input.model;
    let devices = &input.devices;
    let (k, layers) = (rounds as f64, model.layers as f64);
    let round = layers / k;
    let with_kv = model.layer_bytes + model.layer_kv_bytes;
    let gpu_with_kv = model.layer_bytes + model.gpu_layer_kv_bytes;
    let mut rows = RowProblem::default();
    let mut columns = Vec::new();
    let mut constant = 0.0;
    for (index, (device, regime)) in devices.iter().zip(regimes).enumerate() {
        let disk = device.disk_bytes_per_second.unwrap_or(f64::INFINITY);
        let gpu = device.gpu.as_ref();
        let alpha = device.cpu.decode_seconds;
        let beta = gpu.map_or(0.0, |gpu| gpu.layer.decode_seconds - alpha);
        let (a, b) = match regime {
            Regime::Overflow => (alpha + with_kv / disk, beta - with_kv / disk),
            Regime::ReloadAll => (alpha + model.layer_bytes / disk, beta),
            Regime::Fits => (alpha, beta),
        };
        let next = (index + 1) % devices.len();
        // Without GPU layers nothing is copied, but the paper charges a copy to every device that has a GPU.
        constant += k * gpu.map_or(0.0, |gpu| gpu.copy_seconds);
        if devices.len() > 1 {
            constant += k * input.hops[index][next].decode_seconds;
        }
        if index == 0 {
            constant += device.head_seconds;
            if *regime != Regime::Fits {
                constant += model.head_bytes / disk;
            }
        }
        if *regime == Regime::Overflow {
            constant += (model.buffer_bytes - device.memory_bytes) / disk;
        }
        let w = rows.add_integer_column(k * a, 1.0..=round);
        let most = if gpu.is_some() { round } else { 0.0 };
        let n = rows.add_integer_column(k * b, 0.0..=most);
        rows.add_row(..=0.0, [(n, 1.0), (w, -1.0)]);
        // W/(L b') (d - b_cio): layers of a round that fit into memory.
        let fitting = (device.memory_bytes - constant_bytes(input, index)) / (k * with_kv);
        let on_cpu = match device.memory_rule {
            MemoryRule::Overflow => vec![(w, 1.0), (n, -1.0)],
            MemoryRule::AllOrNothing => vec![(w, 1.0)],
        };
        match regime {
            Regime::Fits => rows.add_row(..=fitting, on_cpu),
            _ => rows.add_row(fitting.max(0.0).., on_cpu),
        };
        if let Some(room) = gpu.and_then(|gpu| gpu.memory_bytes) {
            let room = room - model.gpu_buffer_bytes;
            rows.add_row(..=room / (k * gpu_with_kv), [(n, 1.0)]);
        }
        columns.push((w, n));
    }
    rows.add_row(round..=round, columns.iter().map(|(w, _)| (*w, 1.0)));
    let mut problem = rows.try_optimise(Sense::Minimise).ok()?;
    problem.make_quiet();
    problem.set_option("threads", 1);
    problem.set_option("mip_rel_gap", 0.0);
    let solved = problem.try_solve().ok()?;
    if solved.status() != HighsModelStatus::Optimal {
        return None;
    }
    let values = solved.get_solution();
    let value = |col: highs::Col| values.columns()[col.index()].round() as usize;
    Some(ReferencePlan {
        rounds,
        windows: columns.iter().map(|&(w, n)| (value(w), value(n))).collect(),
        seconds: solved.objective_value() + constant,
    })
}
