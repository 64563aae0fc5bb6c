//! The same bits, however a pass is cut into windows, chunks and batches, and with any number of threads; and however a file cuts its
//! matrices.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]
#![allow(
    clippy::single_range_in_vec_init,
    reason = "one range of layers is meant"
)]

use prima_engine::{
    BatchEntry, Compute, KvCache, KvFormat, LayerDevices, LayerWindow, Model, OutputHead, Residency,
};
use prima_gguf::GgmlType;

use prima_test_models::{FAMILIES, MadeUpModel, Random, Runner, fuse};

#[test]
fn any_split_chunking_and_batching_gives_the_same_bits() {
    let directory = tempfile::tempdir().unwrap();
    for (family, architecture) in FAMILIES.into_iter().enumerate() {
        let made_up = MadeUpModel::of(architecture);
        let path = made_up.write(directory.path());
        let model = Model::open(&path).unwrap();
        let mut whole = Runner::new(&path, 1);
        for seed in 0..8 {
            let mut random = Random(seed * 2 + family as u64);
            whole.kv_format = [KvFormat::F16, KvFormat::Q8_0][seed as usize % 2];
            let prompts: Vec<Vec<u32>> = (0..random.within(1..5))
                .map(|_| {
                    let length = random.within(1..180);
                    (0..length).map(|_| random.within(0..96) as u32).collect()
                })
                .collect();
            let expected: Vec<Vec<f32>> = prompts
                .iter()
                .map(|prompt| whole.run(&mut [(&mut whole.kv_cache(), prompt)]))
                .collect();

            let ends = random_ends(&mut random, model.spec().layers.len());
            let threads = random.within(1..4);
            let mut split = Runner::split(&model, &ends, threads);
            split.kv_format = whole.kv_format;
            let found = run_in_random_batches(&mut random, &split, &prompts);
            assert!(
                found == expected,
                "{}, {:?}, seed {seed}: windows that end at {ends:?}, {threads} threads",
                made_up.architecture,
                whole.kv_format,
            );
        }
    }
}

fn random_ends(random: &mut Random, layers: usize) -> Vec<usize> {
    let mut ends: Vec<usize> = (1..layers).filter(|_| random.within(0..2) == 0).collect();
    ends.push(layers);
    ends
}

/// Feeds the prompts in chunks of random length; each batch has chunks of some randomly chosen prompts.
fn run_in_random_batches(
    random: &mut Random,
    runner: &Runner,
    prompts: &[Vec<u32>],
) -> Vec<Vec<f32>> {
    let hidden = runner.model.spec().hidden;
    let mut caches: Vec<KvCache> = prompts.iter().map(|_| runner.kv_cache()).collect();
    let mut results: Vec<Vec<f32>> = prompts.iter().map(|_| Vec::new()).collect();
    while caches
        .iter()
        .zip(prompts)
        .any(|(kv, prompt)| kv.len() < prompt.len())
    {
        let mut chosen = Vec::new();
        let mut batch = Vec::new();
        for (index, (kv, prompt)) in caches.iter_mut().zip(prompts).enumerate() {
            let rest = &prompt[kv.len()..];
            if rest.is_empty() || random.within(0..3) == 0 {
                continue;
            }
            let rows = match random.within(0..3) {
                0 => 1,
                1 => rest.len(),
                _ => random.within(1..rest.len() + 1),
            };
            chosen.push((index, rows));
            batch.push((kv, &rest[..rows]));
        }
        let mut activation = &runner.run(&mut batch)[..];
        for (index, rows) in chosen {
            let (own, others) = activation.split_at(rows * hidden);
            results[index].extend(own);
            activation = others;
        }
    }
    results
}

/// Some converters put queries, keys and values into one tensor, and gate and up into another, whatever the family.
#[test]
fn matrices_in_one_tensor_compute_what_they_do_apart() {
    let directory = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (0..40).map(|token| token * 7 % 96).collect();
    for family in ["llama", "qwen3", "gemma3", "smollm3"] {
        for format in [GgmlType::F32, GgmlType::Q4K] {
            let made_up = MadeUpModel {
                formats: vec![format],
                ..MadeUpModel::of(family)
            };
            let (queries, others) = (".attn_q.", [".attn_k.", ".attn_v."]);
            let tensors = fuse(made_up.tensors(), queries, &others, ".attn_qkv.");
            let tensors = fuse(tensors, ".ffn_gate.", &[".ffn_up."], ".ffn_up.");
            let [apart, together] = ["apart", "together"].map(|name| directory.path().join(name));
            made_up.write_with(&apart, made_up.tensors(), |_| {});
            made_up.write_with(&together, tensors, |_| {});
            let [expected, found] = [apart, together].map(|path| {
                let runner = Runner::new(&path, 2);
                runner.logits(&mut runner.kv_cache(), &prompt)
            });
            assert!(found == expected, "{family} in {format}");
        }
    }
}

#[test]
fn a_window_needs_only_its_own_layers_in_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let made_up = MadeUpModel {
        rope_factors: true,
        ..MadeUpModel::default()
    };
    let whole = made_up.write(directory.path());
    let with_only = |name: &str, kept: &[&str]| {
        let mut bytes = std::fs::read(&whole).unwrap();
        for tensor in &Model::open(&whole).unwrap().gguf().tensors {
            if !kept.iter().any(|kept| tensor.name.starts_with(kept)) {
                bytes[tensor.offset as usize..][..tensor.byte_len as usize].fill(0);
            }
        }
        let path = directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        Model::open(&path).unwrap()
    };
    let run = |model: &Model| {
        let window =
            LayerWindow::open(model, 2..4, &LayerDevices::cpu(), &Residency::mapped()).unwrap();
        let mut kv = KvCache::new(model, &[2..4], 16, KvFormat::F16);
        let mut activation: Vec<f32> = (0..3 * 256).map(|i| (i as f32).sin()).collect();
        let entry = BatchEntry {
            kv: &mut kv,
            first_position: 0,
            rows: 3,
        };
        let compute = Compute::new(1).unwrap();
        window
            .forward(&compute, &mut activation, &mut [entry])
            .unwrap();
        activation
    };

    let sparse = with_only("two-layers.gguf", &["blk.2.", "blk.3.", "rope_freqs"]);
    assert_eq!(run(&sparse), run(&Model::open(&whole).unwrap()));
    assert!(OutputHead::open(&sparse, &Residency::mapped()).is_err());
    for (model, tensor) in [
        (sparse, "\"blk.1.attn_norm.weight\""),
        (
            with_only("no-factors.gguf", &["blk."]),
            "\"rope_freqs.weight\"",
        ),
    ] {
        let refused = LayerWindow::open(&model, 1..4, &LayerDevices::cpu(), &Residency::mapped());
        let message = refused.err().unwrap().to_string();
        assert!(
            message.contains(tensor) && message.contains("sparse"),
            "{message}"
        );
    }
}
