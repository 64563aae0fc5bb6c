//! Plans for unit tests of the ring.

use prima_crds::v1alpha1::ring_plan::{
    ActivationDtype, PlannedModel, PlannedWindow, RingMember, RingPlanSpec,
};

/// A valid plan that cuts `layers` at `cuts` (any order; missing cuts leave empty windows at the end).
pub fn plan(layers: usize, members: usize, rounds: usize, cuts: &[usize]) -> RingPlanSpec {
    let windows = members * rounds;
    let mut ends: Vec<usize> = cuts
        .iter()
        .copied()
        .take(windows - 1)
        .map(|cut| cut.min(layers))
        .collect();
    ends.sort_unstable();
    ends.resize(windows, layers);
    let window = |index: usize| PlannedWindow {
        first: if index == 0 {
            0
        } else {
            ends[index - 1] as i32
        },
        last: ends[index] as i32,
        gpu_layers: 0,
    };
    let plan = RingPlanSpec {
        generation: 7,
        model: PlannedModel {
            name: "test".into(),
            file: "test.gguf".into(),
            size_bytes: 1,
            layers: layers as i32,
            source: None,
            version: None,
        },
        context_length: 256,
        max_concurrent_requests: 4,
        activation_dtype: ActivationDtype::F32,
        rounds: rounds as i32,
        members: (0..members)
            .map(|rank| RingMember {
                name: format!("m{rank}"),
                address: format!("127.0.0.1:{}", 7000 + rank),
                windows: (0..rounds)
                    .map(|round| window(round * members + rank))
                    .collect(),
                members_on_machine: members as i32,
                read_bytes_per_token: None,
                read_ahead_bytes: None,
                memory_bytes: None,
                gpu_memory_bytes: None,
                why: None,
            })
            .collect(),
        predicted: None,
        http_port: None,
        api_key_sha256: Vec::new(),
    };
    plan.validate().unwrap();
    plan
}
