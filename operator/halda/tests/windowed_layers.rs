//! Models in which most layers attend to a window: the KV caches that plans state and count are those of the layers that members get.

#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

use prima_crds::v1alpha1::model_profile::ModelProfile;
use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_halda::check::check;
use prima_halda::search::{Effort, search};
use prima_halda::windows::Window;
use prima_halda::{Options, Plan, PlanningInput, plan};

const MIB: i64 = 1 << 20;
const CONTEXT: usize = 16_384;
const FULL_ATTENTION: [usize; 4] = [5, 11, 17, 23];
/// KV cache of a layer that sees all positions, each of 4096 bytes, and of one with a window of 128: two windows, a chunk and a block of each
/// sequence. These machines' agents are of before, and count on four.
const FULL: i64 = 4096 * CONTEXT as i64;
const SEQUENCE: i64 = 4096 * (2 * 128 + 128 + 64);
const WINDOWED: i64 = 4 * SEQUENCE;

/// As gemma3 has it, of 24 layers every sixth sees all positions. A layer has 1 MiB of weights, so that KV caches are most of what there is.
fn model() -> ModelProfile {
    let text = include_str!("paper/llama-3-8b.yaml");
    let mut model = ModelProfile::from_yaml("llama-3-8b.yaml", text).unwrap();
    let spec = &mut model.spec;
    spec.layers = 24;
    spec.windowed_layers = 20;
    spec.attention_window = 128;
    spec.full_attention_layers = FULL_ATTENTION.map(|index| index as i32).into();
    spec.layer_weights[0].bytes = 24 * MIB;
    spec.layer_weights[0].weights = 24 * MIB * 16 / 9;
    model.validate("model").unwrap();
    model
}

/// `front` is rank 0 and reads weights at 1 GB/s, `back` is 38 times as fast. Neither has a GPU.
fn machines(back_bytes: i64) -> Vec<NodeProfile> {
    let text = include_str!("paper/d3.yaml");
    let machines = [("front", "back"), ("back", "front")].map(|(name, other)| {
        let mut node = NodeProfile::from_yaml("d3.yaml", text).unwrap();
        node.metadata.name = Some(name.to_owned());
        let status = node.status.as_mut().unwrap();
        status.gpus.clear();
        status.links.truncate(1);
        status.links[0].to = other.to_owned();
        match name {
            "front" => status.cpu.throughput[0].decode_bytes_per_second = 1_000_000_000,
            _ => status.memory.available_bytes = back_bytes,
        }
        node
    });
    machines.into()
}

fn options(rounds: usize) -> Options {
    Options {
        context_tokens: CONTEXT,
        prompt_tokens: 64,
        answer_tokens: 16,
        use_all: true,
        rank0: Some("front".to_owned()),
        rounds: Some(rounds),
        ..Options::default()
    }
}

fn planned(nodes: &[NodeProfile], rounds: usize) -> Plan {
    let (model, options) = (model(), options(rounds));
    let input = PlanningInput::new(&model, nodes, &options).unwrap();
    let plan = plan(&input).unwrap();
    assert_eq!(check(&plan, &model, nodes, &options), []);
    plan
}

fn kv_bytes(windows: &[Window], windowed: i64) -> i64 {
    let layers = windows.iter().flat_map(|window| window.first..window.last);
    let bytes = layers.map(|layer| match FULL_ATTENTION.contains(&layer) {
        true => FULL,
        false => windowed,
    });
    bytes.sum()
}

#[test]
fn a_plan_states_the_kv_caches_of_each_members_layers() {
    let mut differs = false;
    for rounds in [1, 2, 4] {
        let plan = planned(&machines(8 << 30), rounds);
        assert_eq!(plan.members.len(), 2);
        for (member, report) in plan.members.iter().zip(&plan.report.members) {
            assert_eq!(report.kv_bytes as i64, kv_bytes(&member.windows, WINDOWED));
            let mean = report.layers as i64 * (FULL + 5 * WINDOWED) / 6;
            differs |= report.kv_bytes as i64 != mean;
        }
    }
    assert!(differs, "the mean of all layers would do");
}

/// In four rounds, the windows of `back` hold all four layers that see all positions.
#[test]
fn no_member_gets_layers_whose_kv_caches_do_not_fit() {
    let (model, options) = (model(), options(4));
    let roomy = PlanningInput::new(&model, &machines(8 << 30), &options).unwrap();
    let buffers = roomy.model.buffer_bytes as i64;
    // The mean of 16 layers has 2.7 of the larger caches: one more would fit, but not all four.
    let for_kv = 16 * WINDOWED + 15 * (FULL - WINDOWED) / 4;
    let nodes = machines(buffers + for_kv);

    // Planned with the mean, and room for one layer more that sees all positions.
    let mut by_mean = PlanningInput::new(&model, &nodes, &options).unwrap();
    by_mean.model.kv_of_layers.clear();
    by_mean.model.buffer_bytes += 5.0 * (FULL - WINDOWED) as f64 / 6.0;
    let by_mean = search(&by_mean, Effort::default()).unwrap().assignment;
    let kv = kv_bytes(&by_mean.windows()[1], WINDOWED);
    assert!(kv > for_kv, "{by_mean:?}");

    let plan = planned(&nodes, 4);
    assert_eq!(plan.members[1].name, "back");
    let kv = kv_bytes(&plan.members[1].windows, WINDOWED);
    assert!(kv <= for_kv, "{kv} of {for_kv} bytes");
    assert_eq!(plan.report.members[1].kv_bytes as i64, kv);
}

#[test]
fn windows_have_room_for_all_requests_once_all_agents_know() {
    let mut nodes = machines(8 << 30);
    for (knows, sequences) in [(None, 4), (Some(0), 4), (Some(1), 16)] {
        if let Some(index) = knows {
            nodes[index]
                .status
                .as_mut()
                .unwrap()
                .reads_windowed_sequences = true;
        }
        let plan = planned(&nodes, 1);
        assert_eq!(plan.windowed_sequences, sequences);
        for (member, report) in plan.members.iter().zip(&plan.report.members) {
            let windowed = sequences as i64 * SEQUENCE;
            assert_eq!(report.kv_bytes as i64, kv_bytes(&member.windows, windowed));
        }
    }
    // Who asks for contexts has four in each.
    let options = Options {
        concurrent_requests: 3,
        kv_contexts: 3,
        ..options(1)
    };
    let input = PlanningInput::new(&model(), &nodes, &options).unwrap();
    assert_eq!(input.windowed_sequences, 4);
}

/// A profile of before says how many layers have a window, and not which.
#[test]
fn a_profile_without_a_list_is_planned_as_gemmas_are() {
    let listed = model();
    let mut earlier = listed.clone();
    earlier.spec.full_attention_layers.clear();
    let layers = |model: &ModelProfile| {
        let input = PlanningInput::new(model, &machines(8 << 30), &options(1)).unwrap();
        input.model.kv_of_layers
    };
    assert_eq!(layers(&earlier), layers(&listed));
    assert_eq!(layers(&earlier).len(), 24);
}
