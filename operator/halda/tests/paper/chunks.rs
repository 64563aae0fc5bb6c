//! How much of a prompt goes round together where weights are copied to a GPU for each chunk: of 512 positions, 128 at a time are four copies.

use prima_crds::v1alpha1::model_profile::ModelProfile;
use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_halda::check::check;
use prima_halda::{Options, PlanError, PlanReport, PlanningInput, plan_ring};

use crate::gpus::copying;
use crate::{D1_TO_D4, model, nodes, options};

/// Machines whose GPUs get copies, and whose agents read plans that say how large chunks are.
fn told(mut cluster: Vec<NodeProfile>) -> Vec<NodeProfile> {
    for node in &mut cluster {
        node.status.as_mut().unwrap().reads_chunk_positions = true;
    }
    copying(cluster)
}

/// d3 with memory for all layers.
fn roomy() -> Vec<NodeProfile> {
    let mut cluster = nodes(&["d3"]);
    let memory = &mut cluster[0].status.as_mut().unwrap().memory;
    (memory.total_bytes, memory.available_bytes) = (64_i64 << 30, 40_i64 << 30);
    cluster
}

fn within(first_token_seconds: Option<f64>) -> Options {
    Options {
        prompt_tokens: 512,
        first_token_seconds,
        ..options()
    }
}

fn report(
    model: &ModelProfile,
    cluster: &[NodeProfile],
    options: &Options,
) -> Result<PlanReport, PlanError> {
    let plan = plan_ring(model, cluster, options)?;
    let findings = check(&plan, model, cluster, options);
    assert!(findings.is_empty(), "{findings:?}");
    Ok(plan.report)
}

/// A layer takes 42 ms to be copied, and the GPU 18 ms for each 128 positions of it. With 22 layers there and 58 copied, that is 4 x (0.4 + 2.4) s at
/// 128 at a time, and 2 x (0.8 + 2.4) s at 256. At 512 it is 80 x 0.073 s: copies are hidden behind what the GPU computes.
#[test]
fn larger_chunks_spare_copies() {
    let model = model("llama-3-70b");
    let before = report(&model, &copying(roomy()), &within(None)).unwrap();
    assert_eq!(before.chunk_positions, 128);
    assert!((11e3..12e3).contains(&before.ttft_milliseconds));
    let larger = report(&model, &told(roomy()), &within(None)).unwrap();
    assert!(larger.chunk_positions > 128, "{larger:?}");
    assert!(larger.ttft_milliseconds < 6.6e3, "{larger:?}");

    // What only the largest make possible.
    let bound = within(Some(6.2));
    let largest = report(&model, &told(roomy()), &bound).unwrap();
    assert_eq!(largest.chunk_positions, 512);
    assert!(largest.ttft_milliseconds < 6.2e3);
    let soonest = |cluster: &[NodeProfile], bound| {
        let refused = report(&model, cluster, &within(Some(bound))).unwrap_err();
        let PlanError::TooLate {
            soonest_seconds, ..
        } = refused
        else {
            panic!("{refused}");
        };
        soonest_seconds
    };
    assert!(soonest(&copying(roomy()), 6.2) > 11.0);
    assert!((5.5..6.2).contains(&soonest(&told(roomy()), 1.0)));
}

/// A short prompt is one chunk of the usual size; and where no weights are copied, nothing is spared.
#[test]
fn chunks_are_not_larger_where_that_spares_nothing() {
    let model = model("llama-3-70b");
    let short = Options {
        prompt_tokens: 128,
        ..options()
    };
    let chunk = |cluster: &[NodeProfile], options: &Options| {
        report(&model, cluster, options).unwrap().chunk_positions
    };
    assert_eq!(chunk(&told(roomy()), &short), 128);
    let mut without_copies = told(roomy());
    let gpu = &mut without_copies[0].status.as_mut().unwrap().gpus[0];
    gpu.measured.as_mut().unwrap().streams_weights = false;
    assert_eq!(chunk(&without_copies, &within(None)), 128);
}

/// A row of the model has 16 activations of 8192 numbers on the processor. On a GPU it has three, and what its matrices make of them and take: 8192
/// queries, 1024 keys, as many values, 8192 that attention found, and three times 28,672 of the feed-forward part.
#[test]
fn larger_chunks_have_memory_for_their_rows() {
    let model = model("llama-3-70b");
    let cluster = told(roomy());
    let sizes = |positions| {
        let input = PlanningInput::with_chunks_of(positions, &model, &cluster, &within(None));
        let sizes = input.unwrap().model;
        (sizes.buffer_bytes, sizes.gpu_buffer_bytes)
    };
    let (usual, usual_gpu) = sizes(128);
    let on_processor = 4.0 * 16.0 * 8192.0;
    let on_gpu = 4.0 * (3.0 * 8192.0 + 8192.0 + 2.0 * 1024.0 + 8192.0 + 3.0 * 28_672.0);
    // On a GPU there is room for two usual chunks at once, or for one that is larger.
    for (positions, more_rows) in [(256, 0.0), (512, 256.0)] {
        let (buffer, gpu_buffer) = sizes(positions);
        let more = (positions - 128) as f64 * on_processor;
        assert!((buffer - usual - more).abs() < 1.0);
        assert!((gpu_buffer - usual_gpu - more_rows * on_gpu).abs() < 1.0);
    }

    // Room for copies, 157 MB for passes of 256 rows, and no more.
    let mut small = cluster;
    let gpu = &mut small[0].status.as_mut().unwrap().gpus[0];
    gpu.measured.as_mut().unwrap().available_bytes = 450_000_000;
    let report = report(&model, &small, &within(None)).unwrap();
    assert_eq!(report.chunk_positions, 256);
    assert!(report.members[0].gpu_from_rows.is_some());
}

/// Of several members, each computes another chunk at the same time: larger ones spare copies, and have members wait.
#[test]
fn no_chunks_answer_a_request_later_than_the_usual_ones() {
    let model = model("llama-3-70b");
    let options = within(Some(10.0));
    let of = |cluster: &[NodeProfile]| report(&model, cluster, &options).unwrap();
    let request = |of: &PlanReport| {
        of.ttft_milliseconds + options.answer_tokens as f64 * of.tpot_milliseconds
    };
    let usual = of(&copying(nodes(&D1_TO_D4)));
    let best = of(&told(nodes(&D1_TO_D4)));
    for report in [&usual, &best] {
        let (first, each) = (report.ttft_milliseconds, report.tpot_milliseconds);
        let chunk = report.chunk_positions;
        println!("chunks of {chunk}: {first:.0} ms to the first token, {each:.0} ms to each other");
    }
    assert_eq!(usual.chunk_positions, 128);
    assert!(request(&best) <= 1.002 * request(&usual));
}
