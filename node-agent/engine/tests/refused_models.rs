//! Models that the engine must not run: each refused when it is opened, by a message that names what is wrong.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

use std::error::Error;
use std::path::Path;

use prima_engine::Model;
use prima_gguf::writer::GgufWriter;
use prima_gguf::{GgmlType, Gguf, Metadata, Value};
use prima_model::ModelSpec;

use prima_test_models::{MadeUpModel, Tensor};

/// The whole chain of messages with which the model is refused.
fn refusal(
    directory: &Path,
    model: &MadeUpModel,
    tensors: Vec<Tensor>,
    change: impl FnOnce(&mut GgufWriter),
) -> String {
    let path = directory.join("refused.gguf");
    model.write_with(&path, tensors, change);
    let error = Model::open(&path).err().expect("a refusal");
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        message = format!("{message}: {cause}");
        source = cause.source();
    }
    message
}

#[test]
fn wrong_tensors_are_named_with_what_was_expected_and_found() {
    let directory = tempfile::tempdir().unwrap();
    let model = MadeUpModel::default();
    type Change = fn(&mut Vec<Tensor>);
    let cases: [(Change, &[&str]); 9] = [
        (
            |tensors| tensors.retain(|tensor| tensor.0 != "blk.3.ffn_up.weight"),
            &["\"blk.3.ffn_up.weight\" is missing", "llama"],
        ),
        (
            |tensors| find(tensors, "blk.1.attn_k.weight").2 = vec![256, 128],
            &[
                "\"blk.1.attn_k.weight\"",
                "expected shape [256, 64]",
                "found [256, 128]",
            ],
        ),
        (
            |tensors| find(tensors, "blk.4.ffn_down.weight").2 = vec![256, 512],
            &[
                "\"blk.4.ffn_down.weight\"",
                "expected shape [512, 256]",
                "found [256, 512]",
            ],
        ),
        (
            |tensors| find(tensors, "output_norm.weight").2 = vec![256, 1],
            &["\"output_norm.weight\"", "expected shape [256]"],
        ),
        (
            |tensors| find(tensors, "blk.0.attn_norm.weight").1 = GgmlType::Q8_0,
            &[
                "\"blk.0.attn_norm.weight\"",
                "expected F32, F16 or BF16",
                "found Q8_0",
            ],
        ),
        (
            |tensors| find(tensors, "blk.2.attn_q.weight").1 = GgmlType::Tq1_0,
            &["\"blk.2.attn_q.weight\"", "TQ1_0"],
        ),
        (
            |tensors| tensors.push(("blk.0.attn_sinks.weight".into(), GgmlType::F32, vec![8])),
            &[
                "\"blk.0.attn_sinks.weight\" is not one that architecture llama",
                "wrong answers",
            ],
        ),
        (
            |tensors| {
                tensors.push((
                    "blk.0.ffn_gate_inp.weight".into(),
                    GgmlType::F32,
                    vec![256, 8],
                ))
            },
            &["\"blk.0.ffn_gate_inp.weight\""],
        ),
        (
            |tensors| tensors.push(("rope_freqs.weight".into(), GgmlType::F32, vec![32])),
            &["\"rope_freqs.weight\"", "expected shape [16]", "found [32]"],
        ),
    ];
    for (change, expected) in cases {
        let mut tensors = model.tensors();
        change(&mut tensors);
        let message = refusal(directory.path(), &model, tensors, |_| {});
        for part in expected.iter().chain(&["refused.gguf"]) {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }
}

fn find<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
    tensors.iter_mut().find(|tensor| tensor.0 == name).unwrap()
}

#[test]
fn a_family_needs_the_parts_that_set_it_apart() {
    let directory = tempfile::tempdir().unwrap();
    for (model, part) in [
        (MadeUpModel::qwen2(), "blk.2.attn_v.bias"),
        (MadeUpModel::of("qwen3"), "blk.2.attn_k_norm.weight"),
        (MadeUpModel::of("gemma2"), "blk.2.post_ffw_norm.weight"),
        (MadeUpModel::of("gemma3"), "blk.2.attn_q_norm.weight"),
    ] {
        let mut tensors = model.tensors();
        tensors.retain(|tensor| tensor.0 != part);
        let message = refusal(directory.path(), &model, tensors, |_| {});
        let expected = format!("{part:?} is missing; architecture {}", model.architecture);
        assert!(message.contains(&expected), "{message}");
    }
}

#[test]
fn metadata_that_is_not_computed_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let model = MadeUpModel::default();
    type Change = fn(&mut GgufWriter);
    let cases: [(Change, &[&str]); 10] = [
        (
            |writer| {
                writer.metadata("llama.rope.scaling.type", "dynamic");
            },
            &["\"llama.rope.scaling.type\"", "longrope", "\"dynamic\""],
        ),
        (
            |writer| {
                writer.metadata("llama.expert_count", 8_u32);
            },
            &["llama.expert_used_count"],
        ),
        (
            |writer| {
                writer.metadata("llama.attention.value_length", 64_u32);
            },
            &[
                "\"llama.attention.value_length\"",
                "expected 32",
                "found 64",
            ],
        ),
        (
            |writer| {
                writer.metadata("llama.rope.dimension_count", 33_u32);
            },
            &["\"llama.rope.dimension_count\"", "even", "found 33"],
        ),
        (
            |writer| {
                writer.metadata("llama.rope.freq_base", -1.0_f32);
            },
            &["\"llama.rope.freq_base\"", "positive", "found -1"],
        ),
        (
            |writer| {
                writer.metadata("llama.rope.freq_base", f32::NAN);
            },
            &["\"llama.rope.freq_base\"", "positive", "found NaN"],
        ),
        (
            |writer| {
                writer.metadata("llama.rope.scaling.factor", 0.0_f32);
            },
            &["\"llama.rope.scaling.factor\"", "positive"],
        ),
        (
            |writer| {
                writer.metadata("llama.attention.key_length", u32::MAX);
            },
            &["\"llama.attention.key_length\"", "found 4294967295"],
        ),
        (
            |writer| {
                writer.metadata("llama.attention.causal", false);
            },
            &["\"llama.attention.causal\"", "expected true", "found false"],
        ),
        (
            |writer| {
                writer.metadata("llama.rope.dimension_sections", vec![4, 4, 4, 4]);
            },
            &["\"llama.rope.dimension_sections\"", "0 pairs in the fourth"],
        ),
    ];
    for (change, expected) in cases {
        let message = refusal(directory.path(), &model, model.tensors(), change);
        for part in expected {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }
}

#[test]
fn windows_that_rotate_other_widths_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let model = MadeUpModel::of("gemma2");
    let message = refusal(directory.path(), &model, model.tensors(), |writer| {
        writer.metadata("gemma2.rope.dimension_count_swa", 64_u32);
    });
    let expected = "\"gemma2.rope.dimension_count_swa\": expected 256, as in layers without a window, found 64";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn an_unknown_architecture_is_named_with_the_known_ones() {
    let directory = tempfile::tempdir().unwrap();
    let model = MadeUpModel {
        architecture: "mamba",
        ..MadeUpModel::default()
    };
    let message = refusal(directory.path(), &model, model.tensors(), |_| {});
    assert!(
        message.contains("\"mamba\"") && message.contains("llama, qwen2, qwen3, gemma2, gemma3"),
        "{message}"
    );
}

#[test]
fn heads_that_cannot_be_grouped_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let model = MadeUpModel {
        kv_heads: 3,
        ..MadeUpModel::default()
    };
    let message = refusal(directory.path(), &model, model.tensors(), |_| {});
    assert!(
        message.contains("\"llama.attention.head_count_kv\""),
        "{message}"
    );
    assert!(
        message.contains("a divisor of the 8 query heads, found 3"),
        "{message}"
    );
}

#[test]
fn files_that_are_no_models_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing.gguf");
    let message = Model::open(&missing).err().unwrap().to_string();
    assert!(message.contains("missing.gguf"), "{message}");

    for (name, content) in [
        ("empty.gguf", &b""[..]),
        ("text.gguf", b"not a model at all, just text"),
    ] {
        let path = directory.path().join(name);
        std::fs::write(&path, content).unwrap();
        let error = Model::open(&path).err().unwrap();
        let cause = error.source().expect("a cause").to_string();
        assert!(
            format!("{error}: {cause}").contains(name),
            "{error}: {cause}"
        );
    }

    // Cut off in the middle of the tensors.
    let path = MadeUpModel::default().write(directory.path());
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    assert!(Model::open(&path).is_err());
}

#[test]
fn experts_that_are_not_computed_are_named() {
    let directory = tempfile::tempdir().unwrap();
    type Change = fn(&mut Vec<Tensor>);
    let key = |key: &'static str, value: u32| {
        move |writer: &mut GgufWriter| {
            writer.metadata(key, value);
        }
    };
    let of = MadeUpModel::of;
    let few = MadeUpModel {
        experts: 2,
        ..of("qwen3moe")
    };
    let keys = [
        (
            of("qwen2"),
            key("qwen2.expert_count", 8),
            "\"qwen2.expert_count\": expected 0 (not a mixture of experts), found 8",
        ),
        (
            few,
            key("x", 0),
            "\"qwen3moe.expert_used_count\": expected a number from 1 to 2, found 3",
        ),
        (
            of("olmoe"),
            key("olmoe.expert_gating_func", 4),
            "\"olmoe.expert_gating_func\": expected 1 (softmax), 2 (sigmoid)",
        ),
        (
            of("mixtral"),
            key("llama.expert_group_count", 3),
            "\"llama.expert_group_count\": expected a divisor of the 8 experts, for two or more in each, found 3",
        ),
        // Then the first layer has other tensors.
        (
            of("mixtral"),
            key("llama.leading_dense_block_count", 1),
            "\"blk.0.ffn_up.weight\" is missing",
        ),
    ];
    for (model, change, expected) in keys {
        let message = refusal(directory.path(), &model, model.tensors(), change);
        assert!(message.contains(expected), "{message:?}");
    }
    let tensors: [(Change, &str); 6] = [
        (
            |tensors| {
                find(tensors, "blk.2.ffn_gate_exps.weight").0 =
                    "blk.2.ffn_gate_up_exps.weight".into()
            },
            "\"blk.2.ffn_gate_up_exps.weight\" is not one that architecture",
        ),
        (
            |tensors| find(tensors, "blk.1.ffn_gate_inp.weight").1 = GgmlType::Q8_0,
            "\"blk.1.ffn_gate_inp.weight\": expected F32, F16 or BF16, found Q8_0",
        ),
        (
            |tensors| tensors.retain(|tensor| tensor.0 != "blk.3.ffn_up_exps.weight"),
            "\"blk.3.ffn_up_exps.weight\" is missing",
        ),
        (
            |tensors| find(tensors, "blk.2.ffn_down_exps.weight").2 = vec![256, 512, 7],
            "\"blk.2.ffn_down_exps.weight\": expected shape [256, 512, 8], found [256, 512, 7]",
        ),
        (
            |tensors| {
                let name = "blk.0.ffn_gate_exps.bias".to_owned();
                tensors.push((name, GgmlType::F32, vec![256, 8]));
            },
            "\"blk.0.ffn_gate_exps.bias\" is not one that architecture llama computes with",
        ),
        (
            |tensors| {
                let name = "blk.0.ffn_up_shexp.weight".to_owned();
                tensors.push((name, GgmlType::F32, vec![512, 256]));
            },
            "\"blk.0.ffn_up_shexp.weight\" is not one that architecture llama computes with",
        ),
    ];
    let model = of("mixtral");
    for (change, expected) in tensors {
        let mut tensors = model.tensors();
        change(&mut tensors);
        let message = refusal(directory.path(), &model, tensors, |_| {});
        assert!(message.contains(expected), "{message:?}");
    }
}

#[test]
fn latents_that_are_not_computed_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let model = MadeUpModel::of("deepseek2");
    let path = model.write(directory.path());
    // What a key is instead, or that it is not there; and what is said.
    let before = "a length: the file was converted before llama.cpp cached latents (April 2025), so take a newer one, or \
                  convert the model again, found none";
    let keys = [
        ("attention.key_length_mla", None, before),
        ("attention.value_length_mla", None, before),
        (
            "attention.key_length_mla",
            Some(64),
            "more than the 64 numbers that are rotated, found 64",
        ),
        (
            "attention.kv_lora_rank",
            Some(500),
            "a multiple of 32, found 500",
        ),
        (
            "rope.dimension_count",
            Some(48),
            "a multiple of 32, found 48",
        ),
        (
            "attention.head_count_kv",
            Some(4),
            "1, as latents of 512 numbers are cached, found 4",
        ),
        (
            "attention.key_length",
            Some(192),
            "576, as latents of 512 numbers are cached, found 192",
        ),
        (
            "attention.value_length",
            Some(128),
            "512, as latents of 512 numbers are cached, found 128",
        ),
        (
            "expert_group_count",
            Some(8),
            "a divisor of the 8 experts, for two or more in each, found 8",
        ),
    ];
    for (key, value, expected) in keys {
        let message = with_keys(&path, &[(key, value)]);
        let expected = format!("\"deepseek2.{key}\": expected {expected}");
        assert!(message.contains(&expected), "{message:?}");
    }
    for used in [1, 5] {
        let groups = [
            ("expert_group_count", Some(4)),
            ("expert_group_used_count", Some(used)),
        ];
        let message = with_keys(&path, &groups);
        let expected = format!(
            "\"deepseek2.expert_group_used_count\": expected at most 4 groups, with 3 experts or more, found {used}"
        );
        assert!(message.contains(&expected), "{message:?}");
    }
    // As V2 (236B): a softmax, which is also what counts where the file does not say; or another one.
    for gating in [Some(1), None, Some(3)] {
        let groups = [
            ("expert_gating_func", gating),
            ("expert_group_count", Some(4)),
            ("expert_group_used_count", Some(2)),
        ];
        let message = with_keys(&path, &groups);
        let expected = "\"deepseek2.expert_group_count\": expected 1 where expert_gating_func is not 2 (sigmoid): ";
        assert!(message.contains(expected), "{message:?}");
        assert!(
            message.ends_with("take V2-Lite, or V3 or a newer one, found 4"),
            "{message:?}"
        );
    }
    for key in ["attention.kv_lora_rank", "rope.dimension_count"] {
        let message = with_keys(&path, &[(key, None)]);
        assert!(message.contains(&format!("deepseek2.{key}")), "{message:?}");
    }
    let message = with_keys(&path, &[("attention.q_lora_rank", None)]);
    assert!(
        message.contains("\"blk.0.attn_q.weight\" is missing"),
        "{message:?}"
    );

    type Change = fn(&mut Vec<Tensor>);
    let tensors: [(Change, &str); 4] = [
        (
            |tensors| find(tensors, "blk.1.attn_k_b.weight").0 = "blk.1.attn_kv_b.weight".into(),
            "\"blk.1.attn_k_b.weight\" is missing; architecture deepseek2 needs it",
        ),
        (
            |tensors| find(tensors, "blk.1.attn_k_b.weight").2 = vec![512, 192, 4],
            "\"blk.1.attn_k_b.weight\": expected shape [192, 512, 4], found [512, 192, 4]",
        ),
        (
            |tensors| find(tensors, "blk.2.attn_v_b.weight").2 = vec![512, 256],
            "\"blk.2.attn_v_b.weight\": expected shape [512, 256, 4], found [512, 256]",
        ),
        (
            |tensors| find(tensors, "blk.0.attn_kv_a_norm.weight").2 = vec![576],
            "\"blk.0.attn_kv_a_norm.weight\": expected shape [512], found [576]",
        ),
    ];
    for (change, expected) in tensors {
        let mut tensors = model.tensors();
        change(&mut tensors);
        let message = refusal(directory.path(), &model, tensors, |_| {});
        assert!(message.contains(expected), "{message:?}");
    }
}

/// What is said of the file at `path` with other numbers for some keys, or without them.
fn with_keys(path: &Path, keys: &[(&str, Option<u32>)]) -> String {
    let mut gguf = Gguf::open(path).unwrap();
    let is_changed = |key: &str| {
        keys.iter()
            .any(|(name, _)| key.ends_with(&format!("2.{name}")))
    };
    let kept = gguf.metadata.iter().filter(|(key, _)| !is_changed(key));
    let mut entries: Vec<(String, Value)> = kept
        .map(|(key, value)| (key.to_owned(), value.clone()))
        .collect();
    for (name, value) in keys {
        let value = value.map(|value| (format!("deepseek2.{name}"), value.into()));
        entries.extend(value);
    }
    gguf.metadata = Metadata::new("changed.gguf", entries).unwrap();
    let refused = ModelSpec::read("changed.gguf", &gguf).err();
    let mut error: &dyn Error = &refused.expect("a refusal");
    let mut message = error.to_string();
    while let Some(cause) = error.source() {
        message = format!("{message}: {cause}");
        error = cause;
    }
    message
}
