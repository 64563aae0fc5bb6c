//! A first answer in microseconds: layers go where they are computed fastest, for as long as there is memory. The search starts from it,
//! and it is the answer if there is no time to prove a better one.
//!
//! Decides nothing by itself: [`crate::latency`] weighs each of its proposals. It fills rings of the n fastest devices, for every n and
//! some numbers of rounds: fastest GPU first, then slower ones, processors, and last what overflows to the fastest disk (the order that the
//! paper finds in its plans, section 4). Where some do not reach each other, it stands them apart, and also fills rings of devices that all do.

use std::collections::HashSet;

use crate::found::{Found, evaluate};
use crate::input::{Device, GpuCost, MemoryRule, PlanningInput};
use crate::latency::LayerShare;
use crate::order;

/// Rounds that are tried.
const ROUNDS: [usize; 5] = [1, 2, 4, 8, 16];

/// Where layers may be computed.
struct DeviceRoom {
    device: usize,
    on_gpu: bool,
    layer_seconds: f64,
    /// Layers that fit.
    room: usize,
}

/// A ring, rank 0 first and the others by their speed, and what each device gets.
type Proposal = (Vec<usize>, Vec<LayerShare>);

/// The best of the proposals. `None`: none of them is possible, which does not mean that nothing is.
pub fn first_answer(input: &PlanningInput) -> Option<Found> {
    let mut best: Option<Found> = None;
    for (ring, shares) in proposals(input) {
        let ring = match input.all_meet() {
            true => ring,
            false => order::cheapest(input, &ring, 1),
        };
        let most = shares.iter().map(|share| share.layers()).max();
        let rounds = match input.rounds {
            Some(only) => vec![only],
            None if ring.len() == 1 => vec![1],
            None => ROUNDS.to_vec(),
        };
        for rounds in rounds.into_iter().filter(|&rounds| Some(rounds) <= most) {
            let found = evaluate(input, rounds, ring.clone(), shares.clone());
            if let Some(found) = found
                && best
                    .as_ref()
                    .is_none_or(|best| found.seconds < best.seconds)
            {
                best = Some(found);
            }
        }
    }
    best
}

/// Each once. As soon as all layers have room, devices beyond those get none, and more of them make the same ring again.
fn proposals(input: &PlanningInput) -> Vec<Proposal> {
    let mut by_speed: Vec<usize> = (0..input.devices.len()).collect();
    by_speed.sort_by(|&a, &b| {
        // Devices that must take part come first, however slow.
        let key = |index: usize| {
            (
                !input.devices[index].required,
                fastest(&input.devices[index]),
            )
        };
        let (a, b) = (key(a), key(b));
        a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
    });
    let required = by_speed
        .iter()
        .filter(|&&index| input.devices[index].required);
    let fewest = required.count().max(input.fewest).max(1);
    let choices: Vec<Vec<usize>> = match who_meet(input, &by_speed) {
        None => vec![by_speed],
        Some(who_meet) => vec![by_speed, who_meet],
    };
    let choices = choices.iter().flat_map(|all| {
        let counts = fewest..=all.len();
        counts.map(move |count| &all[..count])
    });
    let mut known = HashSet::new();
    let mut proposals = Vec::new();
    for members in choices {
        for rank0 in leaders(input, members) {
            if let Some(proposal) = fill(input, members, rank0)
                && known.insert(proposal.clone())
            {
                proposals.push(proposal);
            }
        }
    }
    proposals
}

/// Of these, in their order, those that all reach each other: one that does not reach all before it is left out, but rank 0, if it is given, is not.
/// `None`: all do, or one that must take part would be left out.
fn who_meet(input: &PlanningInput, devices: &[usize]) -> Option<Vec<usize>> {
    if input.all_meet() {
        return None;
    }
    let mut chosen: Vec<usize> = input.rank0.into_iter().collect();
    for &one in devices {
        let meets = |&other: &usize| {
            let hops = &input.hops;
            other != one && hops[one][other].is_way() && hops[other][one].is_way()
        };
        if chosen.iter().all(meets) {
            chosen.push(one);
        }
    }
    let must = |index: &&usize| input.devices[**index].required;
    let have_all = devices
        .iter()
        .filter(must)
        .all(|index| chosen.contains(index));
    let chosen = devices.iter().filter(|index| chosen.contains(index));
    have_all.then(|| chosen.copied().collect())
}

/// Seconds of a layer where the device computes it fastest.
fn fastest(device: &Device) -> f64 {
    let gpu = device.gpu.as_ref().map(|gpu| gpu.layer.decode_seconds);
    gpu.unwrap_or(f64::INFINITY).min(device.cpu.decode_seconds)
}

/// Who may be rank 0: the one that must be, else the first member and the one with the fastest output head.
fn leaders(input: &PlanningInput, members: &[usize]) -> Vec<usize> {
    if let Some(only) = input.rank0 {
        return vec![only];
    }
    let head = |index: &usize| {
        let device = &input.devices[*index];
        let on_gpu = device.gpu.as_ref().and_then(|gpu| gpu.head_seconds);
        on_gpu.unwrap_or(device.head_seconds)
    };
    let fastest = members
        .iter()
        .copied()
        .min_by(|a, b| head(a).total_cmp(&head(b)));
    let mut leaders: Vec<usize> = members
        .first()
        .copied()
        .into_iter()
        .chain(fastest)
        .collect();
    leaders.dedup();
    leaders
}

/// Puts all layers on `members` with `rank0`; returns who takes part. `None` if some layers have no room.
fn fill(input: &PlanningInput, members: &[usize], rank0: usize) -> Option<Proposal> {
    let model = &input.model;
    let layer = model.layer_bytes + model.layer_kv_bytes;
    let gpu_layer = model.layer_bytes + model.gpu_layer_kv_bytes;
    let mut places = Vec::new();
    for &index in members {
        let device = &input.devices[index];
        let beside = match index == rank0 {
            true => model.head_bytes + model.rank0_bytes,
            false => 0.0,
        };
        // With one round this is enough for whatever layers these are.
        let reserve = model.kv_reserve_bytes(device, 1);
        let beside = beside + model.buffer_bytes + device.copying_bytes();
        let memory = device.memory_bytes - reserve - beside;
        let mut room = layers_in(memory, layer);
        if let Some(GpuCost {
            layer: cost,
            memory_bytes,
            lent_bytes,
            ..
        }) = &device.gpu
        {
            let on_gpu_of = |bytes: f64| {
                let beside = model.gpu_buffer_bytes + model.gpu_kv_reserve_bytes(1);
                layers_in(bytes - beside, gpu_layer)
            };
            let on_gpu = match memory_bytes {
                Some(bytes) => on_gpu_of(*bytes),
                // Unified memory: the GPU takes it all, or all that it is lent.
                None => {
                    let passes = match device.memory_rule {
                        MemoryRule::Overflow => model.gpu_buffer_bytes,
                        MemoryRule::AllOrNothing => 0.0,
                    };
                    let all = layers_in(memory - passes, gpu_layer);
                    let on_gpu = lent_bytes.map_or(all, |lent| all.min(on_gpu_of(lent)));
                    room = match (on_gpu, on_gpu == all) {
                        // It is not used.
                        (0, _) => room,
                        (_, true) => 0,
                        (_, false) => layers_in(memory - passes - on_gpu as f64 * gpu_layer, layer),
                    };
                    on_gpu
                }
            };
            places.push(DeviceRoom {
                device: index,
                on_gpu: true,
                layer_seconds: cost.decode_seconds,
                room: on_gpu,
            });
        }
        places.push(DeviceRoom {
            device: index,
            on_gpu: false,
            layer_seconds: device.cpu.decode_seconds,
            room,
        });
    }
    places.sort_by(|a, b| a.layer_seconds.total_cmp(&b.layer_seconds));
    let mut shares = vec![LayerShare::default(); input.devices.len()];
    let mut left = model.layers;
    // Devices that must take part get a layer before others are filled.
    let must = |index: usize| input.devices[index].required || input.fewest > 1;
    for &index in members.iter().filter(|&&index| must(index)) {
        let own = places.iter_mut().filter(|place| place.device == index);
        let place = own.max_by_key(|place| place.room)?;
        place.room = place.room.saturating_sub(1);
        add(&mut shares[index], place.on_gpu, 1);
        left = left.checked_sub(1)?;
    }
    for place in &places {
        let layers = place.room.min(left);
        add(&mut shares[place.device], place.on_gpu, layers);
        left -= layers;
    }
    // Layers that have no memory left are streamed where that costs least.
    let streamed = |index: &usize| {
        let device = &input.devices[*index];
        let disk = device.disk_bytes_per_second?;
        let experts = model.experts.layer_bytes;
        let read = experts * model.experts.read_share() / device.expert_rate(disk);
        Some(device.cpu.decode_seconds + (model.layer_bytes - experts) / disk + read)
    };
    let last = members
        .iter()
        .filter_map(|index| Some((streamed(index)?, *index)))
        .min_by(|a, b| a.0.total_cmp(&b.0));
    match (left, last) {
        (0, _) => {}
        (_, Some((_, index))) => shares[index].cpu_layers += left,
        (_, None) => return None,
    }
    let others = members.iter().copied();
    let others = others.filter(|&index| index != rank0 && shares[index].layers() > 0);
    Some(([rank0].into_iter().chain(others).collect(), shares))
}

fn add(share: &mut LayerShare, on_gpu: bool, layers: usize) {
    match on_gpu {
        true => share.gpu_layers += layers,
        false => share.cpu_layers += layers,
    }
}

fn layers_in(bytes: f64, layer: f64) -> usize {
    // Saturates: below 0 becomes 0.
    (bytes / layer) as usize
}

#[cfg(test)]
mod tests {
    use prima_crds::v1alpha1::model_profile::ModelProfile;
    use prima_crds::v1alpha1::node_profile::NodeProfile;

    use super::*;
    use crate::input::Options;

    /// So many equal machines of 2 GiB each, for a model of 5 GB. The first two do not reach each other.
    fn of_machines(count: usize) -> Vec<Proposal> {
        let model = include_str!("../../samples/models/qwen3-8b.yaml");
        let model = ModelProfile::from_yaml("model", model).unwrap();
        let four = include_str!("../../samples/machines/four-office-pcs.yaml");
        let four = NodeProfile::all_from_yaml("machines", four).unwrap();
        let name = |index: usize| format!("pc-{index}");
        let pc = |index: usize| {
            let mut pc = four[0].clone();
            pc.metadata.name = Some(name(index));
            let status = pc.status.as_mut().unwrap();
            status.memory.available_bytes = 2 << 30;
            let link = status.links[0].clone();
            let others = (0..count).filter(|other| *other != index);
            status.links = others
                .map(|other| {
                    let mut link = link.clone();
                    link.to = name(other);
                    link
                })
                .collect();
            pc
        };
        let nodes: Vec<NodeProfile> = (0..count).map(pc).collect();
        let options = Options {
            apart: vec![[name(0), name(1)]],
            ..Options::default()
        };
        let input = PlanningInput::new(&model, &nodes, &options).unwrap();
        assert!(first_answer(&input).is_some());
        proposals(&input)
    }

    #[test]
    fn machines_that_get_no_layers_make_no_more_proposals() {
        let (few, many) = (of_machines(8), of_machines(60));
        assert!(few.len() > 2, "{few:?}");
        assert_eq!(many.len(), few.len());
        let rings = |proposals: &[Proposal]| -> Vec<Vec<usize>> {
            let rings = proposals.iter().map(|(ring, _)| ring.clone());
            rings.collect()
        };
        assert_eq!(rings(&many), rings(&few));
    }

    /// What passes take on a GPU that shares the machine's memory leaves no room for the layer there.
    #[test]
    fn a_layer_without_room_on_a_shared_gpu_is_the_processors() {
        let model = include_str!("../../samples/models/qwen3-8b.yaml");
        let model = ModelProfile::from_yaml("model", model).unwrap();
        let machines = include_str!("../../samples/machines/gaming-pc-and-laptop.yaml");
        let mut machines = NodeProfile::all_from_yaml("machines", machines).unwrap();
        machines.truncate(1);
        let gpu = &mut machines[0].status.as_mut().unwrap().gpus[0];
        gpu.measured.as_mut().unwrap().unified_memory = true;
        let mut input = PlanningInput::new(&model, &machines, &Options::default()).unwrap();
        input.model.layers = 1;
        let (sizes, device) = (&input.model, &mut input.devices[0]);
        let gpu = device.gpu.as_ref().unwrap();
        assert!(gpu.memory_bytes.is_none());
        let layer = sizes.layer_bytes + sizes.layer_kv_bytes;
        let beside = sizes.head_bytes + sizes.rank0_bytes + sizes.buffer_bytes;
        device.memory_bytes = beside + layer + sizes.gpu_buffer_bytes / 2.0;
        device.disk_bytes_per_second = None;
        let (_, shares) = fill(&input, &[0], 0).unwrap();
        assert_eq!((shares[0].cpu_layers, shares[0].gpu_layers), (1, 0));
    }
}
