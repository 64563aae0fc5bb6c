//! What the GPUs of the paper's machines get, and what they do not.

use prima_crds::v1alpha1::model_profile::{ModelProfile, ModelProfileSpec};
use prima_crds::v1alpha1::node_profile::{GpuBackend, GpuMeasurements, NodeProfile, Throughput};
use prima_crds::v1alpha1::ring_plan::KvDtype;
use prima_halda::plan::{MemberReport, PlanReport, plan};
use prima_halda::search::{Effort, search};
use prima_halda::{Options, PlanningInput};

use crate::{CONTEXT, D1_TO_D4, model, nodes, options, planned};

const GIB: i64 = 1 << 30;

#[test]
fn a_gpu_without_kernels_for_a_format_is_left_out() {
    let model = model("llama-3-8b");
    let mut nodes = nodes(&D1_TO_D4);
    for node in &mut nodes {
        for gpu in &mut node.status.as_mut().unwrap().gpus {
            let measured = gpu.measured.as_mut().unwrap();
            let format = &model.spec.layer_weights[0].format;
            measured.throughput.retain(|one| one.format != *format);
        }
    }
    let plan = planned(&model, &nodes, &options());
    let members = &plan.report.members;
    assert!(!members.is_empty() && members.iter().all(|member| member.gpu_layers == 0));
}

#[test]
fn a_gpu_that_lacks_a_part_holds_no_layers() {
    let mut model = model("llama-3-8b");
    model.spec.parts = vec!["silu".to_owned(), "attention-sinks".to_owned()];
    let mut nodes = nodes(&["d3"]);
    let status = nodes[0].status.as_mut().unwrap();
    status.parts = model.spec.parts.clone();
    let gpu_layers = |nodes: &[NodeProfile]| {
        let plan = planned(&model, nodes, &options());
        plan.report.members[0].gpu_layers
    };
    // An agent of an earlier version does not say what its GPU computes.
    assert_eq!(gpu_layers(&nodes), 0);
    let mut with_parts = |parts: &[String]| {
        let gpu = &mut nodes[0].status.as_mut().unwrap().gpus[0];
        gpu.measured.as_mut().unwrap().parts = parts.to_vec();
        gpu_layers(&nodes)
    };
    assert_eq!(with_parts(&model.spec.parts[..1]), 0);
    assert_eq!(with_parts(&model.spec.parts), 32);
}

/// 128 MiB are 32 contexts of 1024 positions, of 4096 bytes each.
#[test]
fn a_gpu_whose_buffers_are_too_small_holds_no_layers() {
    let (model, mut cluster) = (model("llama-3-8b"), nodes(&["d3"]));
    let with = |cluster: &[NodeProfile], kv_contexts| {
        let options = Options {
            kv_contexts,
            ..options()
        };
        let plan = planned(&model, cluster, &options);
        plan.report.members[0].clone()
    };
    assert!(with(&cluster, 33).gpu_layers > 0);
    let gpu = &mut cluster[0].status.as_mut().unwrap().gpus[0];
    gpu.measured.as_mut().unwrap().most_buffer_bytes = Some(1 << 27);
    assert!(with(&cluster, 32).gpu_layers > 0);
    let beyond = with(&cluster, 33);
    assert_eq!((beyond.gpu_layers, beyond.gpu_from_rows), (0, None));
    let said = format!(
        "its GPU is not used: its driver limits the keys and values of a layer to {} positions, and {} are asked for",
        32 * CONTEXT,
        33 * CONTEXT
    );
    assert!(beyond.why.contains(&said), "{}", beyond.why);
}

/// Kernels see matrices in parts: the output head of the model has 591 MB, its largest other matrix 132 MB.
#[test]
fn a_matrix_may_be_larger_than_a_gpus_buffers() {
    let (model, mut cluster) = (model("llama-3-70b"), nodes(&["d3"]));
    let options = Options {
        prompt_tokens: 512,
        ..options()
    };
    let gpu = &mut cluster[0].status.as_mut().unwrap().gpus[0];
    let measured = gpu.measured.as_mut().unwrap();
    measured.streams_weights = true;
    measured.most_buffer_bytes = Some(100_000_000);
    let input = PlanningInput::new(&model, &cluster, &options).unwrap();
    let gpu = input.devices[0].gpu.as_ref().unwrap();
    assert!(gpu.streamed.is_some() && gpu.head_seconds.is_some());
}

#[test]
fn q8_0_counts_as_f16_on_gpus() {
    let (cluster, model) = (nodes(&["d2"]), {
        let mut model = model("llama-3-8b");
        model.spec.quantized_kv_bytes_per_position_and_layer =
            model.spec.kv_bytes_per_position_and_layer * 17 / 32;
        model
    });
    let of = |kv_dtype| {
        let options = Options {
            kv_dtype,
            ..options()
        };
        PlanningInput::new(&model, &cluster, &options)
            .unwrap()
            .model
    };
    let (f16, q8_0) = (of(KvDtype::F16), of(KvDtype::Q8_0));
    assert_eq!(f16.gpu_layer_kv_bytes, f16.layer_kv_bytes);
    assert_eq!(q8_0.gpu_layer_kv_bytes, f16.layer_kv_bytes);
    assert_eq!(q8_0.layer_kv_bytes, f16.layer_kv_bytes * 17.0 / 32.0);
}

/// On the RTX 2080 Ti of d3, which has memory for it, kernels, and copies of 12 GB/s that begin after 20 us.
#[test]
fn an_output_head_is_on_a_gpu_that_has_room_and_kernels_for_it() {
    let (mut model, mut cluster) = (model("llama-3-8b"), nodes(&["d3"]));
    let rank_0 = |model: &ModelProfile, cluster: &[NodeProfile]| {
        let plan = planned(model, cluster, &options());
        plan.report.members[0].clone()
    };
    let there = rank_0(&model, &cluster);
    assert!(there.output_head_on_gpu);
    let numbers = 4.0 * (f64::from(model.spec.vocabulary_size) + 4096.0);
    let expected = 1e3 * (295_501_824.0 / 340e9 + numbers / 12e9 + 2.0 * 20e-6);
    let found = there.head_milliseconds;
    assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");

    // Of another format, which only the processor was measured with.
    let cpu = &mut cluster[0].status.as_mut().unwrap().cpu;
    let other = Throughput {
        format: "Q6_K".to_owned(),
        ..cpu.throughput[0].clone()
    };
    cpu.throughput.push(other);
    model.spec.output_weights[0].format = "Q6_K".to_owned();
    let here = rank_0(&model, &cluster);
    assert!(!here.output_head_on_gpu && here.gpu_layers == 32);
    assert!(here.memory_bytes > there.memory_bytes + 295_000_000);
}

/// The GPU of d3 a second time.
fn with_two_gpus() -> Vec<NodeProfile> {
    let mut cluster = nodes(&["d3"]);
    let status = cluster[0].status.as_mut().unwrap();
    status.reads_gpus = true;
    let gpus = &mut status.gpus;
    gpus.push(gpus[0].clone());
    for (gpu, address) in gpus.iter_mut().zip(ADDRESSES) {
        gpu.pci_address = Some(address.to_owned());
    }
    cluster
}

const ADDRESSES: [&str; 2] = ["0000:01:00.0", "0000:02:00.0"];

fn names(member: &MemberReport) -> Vec<&str> {
    let gpus = member.gpus.iter();
    gpus.map(|gpu| gpu.name.as_str()).collect()
}

#[test]
fn two_gpus_take_more_layers_than_one() {
    let model = model("llama-3-70b");
    let rank_0 = |cluster: &[NodeProfile]| {
        let plan = planned(&model, cluster, &options());
        plan.report.members[0].clone()
    };
    let one = rank_0(&nodes(&["d3"]));
    assert!(one.gpu_layers > 10 && one.gpus.is_empty());
    let mut cluster = with_two_gpus();
    let two = rank_0(&cluster);
    assert_eq!(names(&two), ADDRESSES);
    let (of_one, of_two) = (one.gpu_layers, two.gpu_layers);
    assert!(of_two > of_one + of_one / 2 && of_two <= 2 * of_one + 2);
    assert!(two.gpu_memory_bytes > one.gpu_memory_bytes);
    assert!(two.gpu_memory_bytes <= 2 * 11_811_160_064);
    // What is no layer is on the first.
    let beside = [0, 1].map(|place: usize| two.gpus[place].beside_layers_bytes);
    assert_eq!(beside[0] > beside[1], two.output_head_on_gpu);
    // Activations go to each and back.
    let copies = two.copy_milliseconds / one.copy_milliseconds;
    assert!((copies - 2.0).abs() < 1e-9, "{copies}");

    // Both count as the slower one.
    let each = |member: &MemberReport| member.gpu_milliseconds / member.gpu_layers as f64;
    assert!((each(&two) / each(&one) - 1.0).abs() < 1e-9);
    let second = &mut cluster[0].status.as_mut().unwrap().gpus[1];
    let rates = &mut second.measured.as_mut().unwrap().throughput[0];
    rates.decode_bytes_per_second /= 2;
    let slower = rank_0(&cluster);
    assert!(each(&slower) > 1.5 * each(&one));
    // The faster one gets layers first, and what is no layer, wherever it is listed.
    assert_eq!(names(&slower), ADDRESSES);
    cluster[0].status.as_mut().unwrap().gpus.reverse();
    let reversed = rank_0(&cluster);
    assert_eq!(names(&reversed), ADDRESSES);
    assert_eq!(reversed.gpu_layers, slower.gpu_layers);
    assert_eq!(reversed.output_head_on_gpu, slower.output_head_on_gpu);
}

#[test]
fn a_gpu_that_is_too_slow_is_left_out_wherever_it_is() {
    let model = model("llama-3-70b");
    let mut cluster = with_two_gpus();
    let alone = {
        let mut cluster = cluster.clone();
        cluster[0].status.as_mut().unwrap().gpus.truncate(1);
        planned(&model, &cluster, &options()).report
    };
    let second = &mut cluster[0].status.as_mut().unwrap().gpus[1];
    let measured = second.measured.as_mut().unwrap();
    measured.read_bytes_per_second /= 20;
    measured.kv_append_bytes_per_second /= 20;
    for rates in &mut measured.throughput {
        rates.decode_bytes_per_second /= 20;
        rates.prefill_flop_per_second /= 20;
    }
    for listed in ["last", "first"] {
        let both = planned(&model, &cluster, &options()).report;
        assert_eq!(names(&both.members[0]), ADDRESSES[..1], "{listed}");
        assert!(both.tpot_milliseconds <= alone.tpot_milliseconds * 1.001);
        cluster[0].status.as_mut().unwrap().gpus.reverse();
    }
}

/// Where the first lacks a megabyte, the second helps if it has more than splitting takes: buffers, and a layer that is a quarter larger than the
/// mean, with its keys and values.
#[test]
fn a_second_gpu_gives_the_room_that_the_first_lacks() {
    const MB: i64 = 1_000_000;
    let model = model("llama-3-8b");
    let options = options_with_draft(&model);
    let device = |first: i64, second: i64| {
        let mut cluster = with_two_gpus();
        let gpus = cluster[0].status.as_mut().unwrap().gpus.iter_mut();
        for (gpu, bytes) in gpus.zip([first, second]) {
            let measured = gpu.measured.as_mut().unwrap();
            (measured.available_bytes, measured.total_bytes) = (bytes, bytes);
            measured.runs_drafts = true;
        }
        let input = PlanningInput::new(&model, &cluster, &options).unwrap();
        input.devices[0].clone()
    };
    let used = |first, second| device(first, second).gpus.len();
    let input = PlanningInput::new(&model, &with_two_gpus(), &options).unwrap();
    let sizes = &input.model;
    let beside = sizes.gpu_buffer_bytes + sizes.gpu_output_bytes + sizes.gpu_draft_bytes;
    let layers = 32.0 * (sizes.layer_bytes + sizes.gpu_layer_kv_bytes);
    let needed = (layers + beside) as i64;
    assert_eq!(used(needed + MB, 11 * GIB), 1);
    assert_eq!(used(needed - MB, 11 * GIB), 2);
    assert_eq!(used(needed - MB, 150 * MB), 1);
    // With a megabyte more than that, it has what is lacking.
    let split = sizes.gpu_buffer_bytes + 1.25 * sizes.layer_bytes + sizes.gpu_layer_kv_bytes;
    assert_eq!(used(needed - MB, split as i64 + 2 * MB), 2);
    let both = device(needed - MB, 11 * GIB).gpu.unwrap();
    let room = (needed - MB + 11 * GIB) as f64 - split;
    let found = both.memory_bytes.unwrap();
    assert!((found - room).abs() < 1.0, "{found} {room}");

    // One without room for as much as that has no layer, however fast it is. Where none has more, the first stays.
    let named = |first: i64, second: i64| device(first, second).gpus;
    assert_eq!(named(split as i64 - MB, 11 * GIB), ADDRESSES[1..]);
    assert_eq!(named(split as i64 + MB, 11 * GIB), ADDRESSES);
    assert_eq!(named(split as i64 - MB, split as i64 - MB), ADDRESSES[..1]);

    // What is no layer lies on the first, as much of it as has room.
    let on_first = |bytes: f64| {
        let first = device((sizes.gpu_buffer_bytes + bytes) as i64, 11 * GIB);
        let gpu = first.gpu.unwrap();
        (gpu.head_seconds.is_some(), gpu.guess_gained.is_some())
    };
    let (head, draft, megabyte) = (sizes.gpu_output_bytes, sizes.gpu_draft_bytes, MB as f64);
    assert_eq!(on_first(head.min(draft) - megabyte), (false, false));
    assert_eq!(on_first(head + draft - megabyte), (true, false));
    assert_eq!(on_first(head + draft + megabyte), (true, true));
}

/// A quarter of the model guesses.
fn options_with_draft(model: &ModelProfile) -> Options {
    let mut draft = model.spec.clone();
    draft.layers /= 4;
    for weights in &mut draft.layer_weights {
        (weights.weights, weights.bytes) = (weights.weights / 4, weights.bytes / 4);
    }
    draft.size_bytes /= 4;
    Options {
        draft: Some(draft),
        ..options()
    }
}

#[test]
fn an_agent_of_before_uses_its_first_gpu_alone() {
    let model = model("llama-3-70b");
    let rank_0 = |cluster: &[NodeProfile]| {
        let plan = planned(&model, cluster, &options());
        plan.report.members[0].clone()
    };
    let one = rank_0(&nodes(&["d3"]));
    let mut before = with_two_gpus();
    before[0].status.as_mut().unwrap().reads_gpus = false;
    let first = rank_0(&before);
    assert!(first.gpus.is_empty());
    assert_eq!(first.gpu_layers, one.gpu_layers);
    // It takes no other where that has failed.
    fail(&mut before, 0);
    let none = rank_0(&before);
    assert_eq!((none.gpu_layers, none.output_head_on_gpu), (0, false));
    let said = "its GPU is not used: it is not the machine's first";
    assert!(none.why.contains(said), "{}", none.why);
}

fn fail(cluster: &mut [NodeProfile], place: usize) {
    let gpu = &mut cluster[0].status.as_mut().unwrap().gpus[place];
    (gpu.measured, gpu.unusable) = (None, Some("it hangs".to_owned()));
}

/// It would refuse the whole plan.
#[test]
fn where_one_agent_is_of_before_no_plan_says_which_gpus() {
    let model = model("llama-3-8b");
    let options = Options {
        rank0: Some("d3".to_owned()),
        ..options_with_draft(&model)
    };
    let told = |reads_gpus: bool| {
        let mut cluster = with_two_gpus();
        for gpu in &mut cluster[0].status.as_mut().unwrap().gpus {
            gpu.measured.as_mut().unwrap().runs_drafts = true;
        }
        cluster.extend(nodes(&["d2"]));
        cluster[1].status.as_mut().unwrap().reads_gpus = reads_gpus;
        let plan = planned(&model, &cluster, &options);
        let mut members = plan.report.members.iter();
        let named = members.any(|member| !member.gpus.is_empty());
        let rank_0 = &plan.report.members[0];
        assert!(rank_0.gpu_layers > 0);
        (named, rank_0.draft_on_gpu)
    };
    assert_eq!(told(true), (true, true));
    assert_eq!(told(false), (false, false));
}

/// The agent would take the other one if the first vanished.
#[test]
fn a_gpu_is_named_where_another_one_is_not_used() {
    let model = model("llama-3-8b");
    let mut cluster = with_two_gpus();
    fail(&mut cluster, 1);
    let plan = planned(&model, &cluster, &options());
    assert_eq!(names(&plan.report.members[0]), ADDRESSES[..1]);
}

#[test]
fn what_is_no_layer_is_on_the_first_gpu_or_none() {
    let model = model("llama-3-8b");
    let rank_0 = |cluster: &[NodeProfile]| {
        let plan = planned(&model, cluster, &options());
        plan.report.members[0].clone()
    };
    // All has room on one.
    let mut cluster = with_two_gpus();
    let all = rank_0(&cluster);
    assert!(all.gpu_layers == 32 && all.output_head_on_gpu);
    assert_eq!(names(&all), ADDRESSES[..1]);
    // The first has no room left: another program has it.
    let first = &mut cluster[0].status.as_mut().unwrap().gpus[0];
    first.measured.as_mut().unwrap().available_bytes = 0;
    let other = rank_0(&cluster);
    assert!(other.gpu_layers == 32 && other.output_head_on_gpu);
    assert_eq!(names(&other), ADDRESSES[1..]);
    // A ring on both has it, and may have as much of the second instead.
    let beside = Options {
        split_gpus: vec!["d3".to_owned()],
        ..options()
    };
    let plan = planned(&model, &cluster, &beside);
    let both = &plan.report.members[0];
    assert!(both.gpu_layers == 32 && !both.output_head_on_gpu);
    assert_eq!(names(both), ADDRESSES);
    // It is out of the profile.
    fail(&mut cluster, 0);
    let without = rank_0(&cluster);
    assert!(without.gpu_layers == 32 && without.output_head_on_gpu);
    assert_eq!(names(&without), ADDRESSES[1..]);
}

/// A quarter of the model's layers guess. The RTX 2080 Ti of d3 has room for model, head and that; with 1 GiB it has not.
#[test]
fn a_draft_model_is_on_rank_0s_gpu_where_there_is_room() {
    let (model, mut cluster) = (model("llama-3-8b"), nodes(&["d3"]));
    let mut draft = options_with_draft(&model).draft.unwrap();
    let rank_0 = |cluster: &[NodeProfile], draft: Option<&ModelProfileSpec>| {
        let options = Options {
            draft: draft.cloned(),
            ..options()
        };
        planned(&model, cluster, &options).report.members[0].clone()
    };
    // An agent of an earlier version has it on the processor.
    let on_cpu = rank_0(&cluster, Some(&draft));
    assert!(!on_cpu.draft_on_gpu && on_cpu.gpu_layers == 32);
    let measured = |cluster: &mut [NodeProfile], change: fn(&mut GpuMeasurements)| {
        let gpu = &mut cluster[0].status.as_mut().unwrap().gpus[0];
        change(gpu.measured.as_mut().unwrap());
    };
    measured(&mut cluster, |gpu| gpu.runs_drafts = true);
    cluster[0].status.as_mut().unwrap().reads_gpus = true;
    let without = rank_0(&cluster, None);
    let there = rank_0(&cluster, Some(&draft));
    assert!(there.draft_on_gpu && there.output_head_on_gpu && there.gpu_layers == 32);
    assert!(!without.draft_on_gpu);
    let kv = draft.whole_bytes(CONTEXT as i64) - draft.size_bytes;
    let weights = draft.layer_weights[0].bytes + draft.output_weights[0].bytes;
    let taken = there.gpu_memory_bytes - without.gpu_memory_bytes;
    assert_eq!(taken, (weights + kv) as u64);
    // Of the machine's memory, a tenth of the embedding.
    let rows = draft.embedding_bytes as u64 / 10;
    assert_eq!(there.memory_bytes - without.memory_bytes, rows);
    let guess = |member: &MemberReport| member.head_milliseconds - without.head_milliseconds;
    assert!(guess(&there) > 0.0 && guess(&there) < guess(&on_cpu) / 4.0);

    measured(&mut cluster, |gpu| gpu.available_bytes = GIB);
    let no_room = rank_0(&cluster, Some(&draft));
    assert!(!no_room.draft_on_gpu && no_room.gpu_layers > 0);
    // Where its keys and values do not fit a buffer, it is not there either.
    measured(&mut cluster, |gpu| {
        gpu.available_bytes = gpu.total_bytes;
        gpu.most_buffer_bytes = Some(4096 * CONTEXT as i64);
    });
    assert!(rank_0(&cluster, Some(&draft)).draft_on_gpu);
    draft.kv_bytes_per_position_and_layer *= 2;
    assert!(!rank_0(&cluster, Some(&draft)).draft_on_gpu);
}

/// The machines of this version: agents of earlier ones do not copy weights for each pass.
pub fn copying(mut cluster: Vec<NodeProfile>) -> Vec<NodeProfile> {
    let gpus = cluster
        .iter_mut()
        .flat_map(|node| &mut node.status.as_mut().unwrap().gpus);
    for measured in gpus.filter_map(|gpu| gpu.measured.as_mut()) {
        measured.streams_weights = true;
    }
    cluster
}

/// Where no place on the PCI bus is known, plans name two by one name, and the agent takes the one that it lists first.
#[test]
fn gpus_of_one_name_stay_as_they_are_listed() {
    let model = model("llama-3-8b");
    let mut cluster = with_two_gpus();
    let gpus = &mut cluster[0].status.as_mut().unwrap().gpus;
    for gpu in gpus.iter_mut() {
        gpu.pci_address = None;
    }
    // The second is faster, and has less room.
    let second = gpus[1].measured.as_mut().unwrap();
    (second.available_bytes, second.total_bytes) = (GIB, GIB);
    second.throughput[0].decode_bytes_per_second *= 2;
    let of = |cluster: &[NodeProfile]| {
        let input = PlanningInput::new(&model, cluster, &options()).unwrap();
        let device = &input.devices[0];
        let head = device.gpu.as_ref().unwrap().head_seconds;
        (device.gpus.len(), head.is_some())
    };
    assert_eq!(of(&cluster), (1, true));
    // Nor can a plan mean the second alone where the first is full.
    let gpus = &mut cluster[0].status.as_mut().unwrap().gpus;
    gpus.reverse();
    gpus[0].measured.as_mut().unwrap().available_bytes = 0;
    assert_eq!(of(&cluster), (2, false));
    // With their places known, it is named.
    let gpus = cluster[0].status.as_mut().unwrap().gpus.iter_mut();
    for (gpu, address) in gpus.zip(ADDRESSES) {
        gpu.pci_address = Some(address.to_owned());
    }
    assert_eq!(of(&cluster), (1, true));
}

/// The first alone gets what is copied.
#[test]
fn without_layers_on_gpus_one_of_two_is_taken() {
    let model = model("llama-3-70b");
    let options = Options {
        prompt_tokens: 512,
        ..options()
    };
    let mut input = PlanningInput::new(&model, &copying(with_two_gpus()), &options).unwrap();
    let device = &mut input.devices[0];
    assert_eq!(device.gpus, ADDRESSES);
    // Too slow for tokens of answers.
    device.gpu.as_mut().unwrap().layer.decode_seconds = 1.0;
    let member = plan(&input).unwrap().report.members[0].clone();
    assert!(member.gpu_layers == 0 && member.gpu_from_rows.is_some());
    assert_eq!(names(&member), ADDRESSES[..1]);
    assert!(member.gpu_memory_bytes as i64 <= member.gpus[0].beside_layers_bytes);
}

/// Weights on the processors of d2 and d3 cross 12 GB/s to their GPUs for each chunk of a prompt. Most of what is left is the phone's, d4, which
/// has layers since the others' memory is full.
#[test]
fn gpus_shorten_the_time_to_the_first_token() {
    let (model, cluster) = (model("llama-3-70b"), nodes(&D1_TO_D4));
    let options = Options {
        prompt_tokens: 512,
        ..options()
    };
    let ttft = |cluster: &[NodeProfile]| {
        let input = PlanningInput::new(&model, cluster, &options).unwrap();
        let latency = search(&input, Effort::default()).unwrap().latency;
        let streams = latency.members.iter();
        let streams = streams.filter(|member| member.gpu_from_rows.is_some());
        (streams.count(), latency.prompt_seconds)
    };
    let (streams, before) = ttft(&cluster);
    assert!(streams == 0 && before > 45.0, "{streams} {before}");
    let (streams, after) = ttft(&copying(cluster));
    assert!(streams == 2 && after < 25.0, "{streams} {after}");
}

/// The RTX 2080 Ti of d3 gets 12 GB/s. Each of a layer's eight matrices waits for two copies of 20 us to begin, and for 2 MiB. Of a prompt of 512,
/// half is there, with 4096 bytes each position.
#[test]
fn copying_a_layer_takes_what_its_bytes_and_waits_do() {
    let (model, mut cluster) = (model("llama-3-70b"), copying(nodes(&["d3"])));
    let streamed = |cluster: &[NodeProfile], prompt_tokens| {
        let options = Options {
            prompt_tokens,
            ..options()
        };
        let input = PlanningInput::new(&model, cluster, &options).unwrap();
        let device = &input.devices[0];
        let streamed = device.gpu.as_ref().unwrap().streamed;
        streamed.map(|streamed| (streamed, device.cpu.prefill_seconds))
    };
    // A processor that takes 0.7 ms for a row.
    let prefill = |cluster: &mut [NodeProfile], flop_per_second| {
        let cpu = &mut cluster[0].status.as_mut().unwrap().cpu;
        cpu.throughput[0].prefill_flop_per_second = flop_per_second;
    };
    prefill(&mut cluster, 2_400_000_000_000);
    let (found, row) = streamed(&cluster, 512).unwrap();
    let weights = 38_503_710_720.0 / 80.0 / 12e9 + 8.0 * (2.0 * 20e-6 + 2_097_152.0 / 12e9);
    let expected = weights + 256.0 * 4096.0 / 12e9;
    let seconds = found.chunk_seconds;
    assert!(
        (seconds / expected - 1.0).abs() < 1e-6,
        "{seconds} {expected}"
    );
    // From 59 rows on the processor would take longer.
    assert_eq!(found.from_rows, 59);
    assert!((58.0..59.0).contains(&(weights / row)), "{row}");
    // A few rows stay there, however slow it is.
    prefill(&mut cluster, 6_000_000_000);
    assert_eq!(streamed(&cluster, 512).unwrap().0.from_rows, 32);
    assert!(streamed(&cluster, 31).is_none());
    let gpu = &mut cluster[0].status.as_mut().unwrap().gpus[0];
    let measured = gpu.measured.as_mut().unwrap();
    measured.to_gpu_bytes_per_second /= 10_000;
    assert!(streamed(&cluster, 512).is_none());
}

/// The phone, d4, takes 2.2 s for a chunk of 128 positions in a layer. Two layers there spare others reading from disk for each token, but with them a
/// prompt of 512 takes 23 s. Without, by hand: d1 has 5 layers of 137 ms a chunk. Of the other 75, d2 and d3 have 39 on their GPUs, 18 ms
/// each; 36 are copied there, 42 ms each, and lack 2.9 GB of memory, which take 0.95 s to read at 3 GB/s. A hop takes 85 ms, in a single round. So d4's
/// part of a chunk is 0.1 s, d1's 0.8 s, and that of d2 and d3 3.3 s together, 1.7 s each if they share it evenly. The first of four chunks takes all of
/// that, each further one 1.7 s: 9.3 s. A token then waits for those 2.9 GB, since nothing is read ahead in a single round.
#[test]
fn a_bound_on_the_first_token_has_its_price() {
    let (model, cluster) = (model("llama-3-70b"), copying(nodes(&D1_TO_D4)));
    let options = |first_token_seconds| Options {
        prompt_tokens: 512,
        first_token_seconds,
        ..options()
    };
    let report = |bound| planned(&model, &cluster, &options(bound)).report;
    let (free, bounded) = (report(None), report(Some(10.0)));
    for report in [&free, &bounded] {
        let (first, each) = (report.ttft_milliseconds, report.tpot_milliseconds);
        println!("{first:.0} ms to the first token, {each:.0} ms from one to the next");
    }
    let of_phone = |report: &PlanReport| {
        let mut members = report.members.iter();
        let phone = members.find(|member| member.name == "d4");
        phone.map_or(0, |member| member.layers)
    };
    assert!(of_phone(&free) > 0 && free.ttft_milliseconds > 20e3);
    let first = bounded.ttft_milliseconds;
    assert!((8.5e3..10.01e3).contains(&first), "{first}");
    assert_eq!((of_phone(&bounded), bounded.rounds), (0, 1));
    let price = bounded.tpot_milliseconds / free.tpot_milliseconds;
    assert!((1.5..3.0).contains(&price), "{price}");

    let input = PlanningInput::new(&model, &cluster, &options(Some(5.0))).unwrap();
    let said = plan(&input).unwrap_err().to_string();
    let beginning = "llama-3-70b: no ring has the first token within 5 s of a prompt of 512 tokens; the soonest takes about ";
    assert!(said.starts_with(beginning), "{said}");
    assert!(!said.contains("GiB"), "{said}");
}

/// Where machine and GPU share memory, they read it alike.
#[test]
fn an_output_head_is_not_on_a_gpu_that_shares_memory() {
    let input = PlanningInput::new(&model("llama-3-8b"), &nodes(&["d1"]), &options()).unwrap();
    let gpu = input.devices[0].gpu.as_ref().unwrap();
    assert!(gpu.memory_bytes.is_none() && gpu.head_seconds.is_none());
}

#[test]
fn a_gpu_that_shares_memory_is_planned_as_it_is_checked() {
    let model = model("llama-3-8b");
    // Of the machine and of its GPU: the machine's counts.
    for (available, of_gpu) in [(6 * GIB, GIB / 2), (5 * GIB, 6 * GIB)] {
        let mut cluster = nodes(&["d1"]);
        let node = &mut cluster[0];
        node.spec.disk_allowed = Some(false);
        let status = node.status.as_mut().unwrap();
        status.memory.available_bytes = available;
        let gpu = &mut status.gpus[0];
        gpu.backend = GpuBackend::Vulkan;
        let measured = gpu.measured.as_mut().unwrap();
        assert!(measured.unified_memory);
        measured.available_bytes = of_gpu;
        let input = PlanningInput::new(&model, &cluster, &options()).unwrap();
        assert_eq!(input.devices[0].memory_bytes, available as f64);
        // All that fits is found good.
        planned(&model, &cluster, &options());
    }
}

/// A driver lends its GPU half of the memory or so. What is beyond that, the processor computes: the whole model is as large as that.
#[test]
fn what_is_not_lent_to_a_gpu_is_the_processors() {
    let model = model("llama-3-8b");
    let mut cluster = nodes(&["d1"]);
    let status = cluster[0].status.as_mut().unwrap();
    status.memory.available_bytes = 8 * GIB;
    status.gpus[0].backend = GpuBackend::Vulkan;
    let with = |lent: i64| {
        let mut cluster = cluster.clone();
        let gpu = &mut cluster[0].status.as_mut().unwrap().gpus[0];
        gpu.measured.as_mut().unwrap().total_bytes = lent;
        let plan = planned(&model, &cluster, &options());
        plan.report.members[0].clone()
    };
    let all = with(8 * GIB);
    assert_eq!((all.layers, all.gpu_layers), (32, 32));
    let sizes = PlanningInput::new(&model, &cluster, &options())
        .unwrap()
        .model;
    let layer = sizes.layer_bytes + sizes.gpu_layer_kv_bytes;
    let room = |layers: f64| (layers * layer + sizes.gpu_buffer_bytes) as i64;
    for (lent, expected) in [(room(20.5), 20), (room(20.0) - 2048, 19), (room(0.5), 0)] {
        let part = with(lent);
        assert_eq!((part.layers, part.gpu_layers), (32, expected));
        assert_eq!(part.read_bytes_per_token, 0);
    }
}

/// Of 4096 bytes each, 128 positions are there: the prompt's 64, and half of the answer's 128. The RTX 2080 Ti of d3 reads 616 GB/s.
#[test]
fn every_four_heads_read_latents_on_a_gpu() {
    let (mut model, mut cluster) = (model("llama-3-8b"), nodes(&["d3"]));
    let latent = ["latent-attention".to_owned()];
    let status = cluster[0].status.as_mut().unwrap();
    status.parts = latent.to_vec();
    status.gpus[0].measured.as_mut().unwrap().parts = latent.to_vec();
    let seconds = |model: &ModelProfile| {
        let input = PlanningInput::new(model, &cluster, &options()).unwrap();
        let device = &input.devices[0];
        let gpu = device.gpu.as_ref().unwrap();
        (device.cpu.decode_seconds, gpu.layer.decode_seconds)
    };
    let (on_cpu, once) = seconds(&model);
    for (heads, reads) in [(4, 1.0), (5, 2.0), (128, 32.0)] {
        model.spec.latent_heads = heads;
        let (cpu, gpu) = seconds(&model);
        assert_eq!(cpu, on_cpu);
        let expected = once + (reads - 1.0) * 128.0 * 4096.0 / 616e9;
        assert!((gpu / expected - 1.0).abs() < 1e-9, "{gpu} {expected}");
    }

    // Where an operator of an earlier version resolved the model, it is not known how many there are.
    let known = seconds(&model);
    model.spec.latent_heads = 0;
    assert_eq!(seconds(&model), (on_cpu, once));
    model.spec.parts = latent.to_vec();
    assert_eq!(seconds(&model), known);
}
