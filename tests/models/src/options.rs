//! What only some files of a family have, as made-up models beside those of [`FAMILIES`](super::FAMILIES).

use std::mem;
use std::path::Path;

use prima_gguf::writer::GgufWriter;
use prima_gguf::{GgmlType, Value};

use super::{MadeUpModel, ORIGINAL_CONTEXT, Tensor, fuse};

/// A made-up model with something added.
#[derive(Clone)]
pub struct Variant {
    pub name: &'static str,
    pub model: MadeUpModel,
    /// Metadata that it has beside, below the family's prefix.
    pub keys: Vec<(&'static str, Value)>,
    /// What is other about its tensors.
    pub change: fn(&mut Vec<Tensor>),
}

impl Variant {
    pub fn of(family: &'static str) -> Variant {
        Variant {
            name: family,
            model: MadeUpModel::of(family),
            keys: Vec::new(),
            change: |_| {},
        }
    }

    /// The same of a token that uses all experts, so that none is chosen. `None`: it has none, or chooses groups of them.
    pub fn without_choice(&self) -> Option<Variant> {
        let groups = self
            .keys
            .iter()
            .any(|(key, _)| *key == "expert_group_used_count");
        (self.model.experts > 0 && !groups).then(|| Variant {
            model: MadeUpModel {
                experts_per_token: self.model.experts,
                ..self.model.clone()
            },
            ..self.clone()
        })
    }

    /// Whether a token uses a part of the experts.
    pub fn chooses(&self) -> bool {
        self.model.experts > self.model.experts_per_token
    }

    /// Writes it, with metadata that `change` may alter.
    pub fn write(&self, path: &Path, change: impl FnOnce(&mut GgufWriter)) {
        let mut tensors = self.model.tensors();
        (self.change)(&mut tensors);
        self.model.write_with(path, tensors, |writer| {
            for (key, value) in &self.keys {
                let key = format!("{}.{key}", self.model.architecture);
                writer.metadata(&key, value.clone());
            }
            change(writer);
        });
    }
}

/// With numbers at which it shows.
pub fn options() -> [Variant; 20] {
    let heads_of_128 = |family| MadeUpModel {
        hidden: 512,
        head_dim: None,
        ..MadeUpModel::of(family)
    };
    [
        Variant {
            name: "llama with biases",
            change: add_biases,
            ..Variant::of("llama")
        },
        Variant {
            name: "llama with divisors, as 3.1 has them",
            model: MadeUpModel {
                rope_factors: true,
                ..heads_of_128("llama")
            },
            ..Variant::of("llama")
        },
        Variant {
            name: "llama with linear scaling",
            keys: vec![
                ("rope.scaling.type", "linear".into()),
                ("rope.scaling.factor", 4_f32.into()),
            ],
            ..Variant::of("llama")
        },
        Variant {
            name: "llama with linear scaling, as older files name it, and a factor",
            keys: vec![
                ("rope.scale_linear", 4_f32.into()),
                ("rope.scaling.attn_factor", 1.2_f32.into()),
            ],
            ..Variant::of("llama")
        },
        Variant {
            name: "llama with YaRN",
            keys: vec![
                ("rope.scaling.type", "yarn".into()),
                ("rope.scaling.factor", 4_f32.into()),
                (
                    "rope.scaling.original_context_length",
                    (ORIGINAL_CONTEXT as u32).into(),
                ),
            ],
            ..Variant::of("llama")
        },
        Variant {
            name: "qwen2 with queries, keys and values in one",
            model: heads_of_128("qwen2"),
            change: fuse_attention,
            ..Variant::of("qwen2")
        },
        Variant {
            name: "gemma2 with low caps",
            model: MadeUpModel {
                head_dim: Some(128),
                ..MadeUpModel::of("gemma2")
            },
            keys: vec![
                ("attn_logit_softcapping", 2_f32.into()),
                ("final_logit_softcapping", 3_f32.into()),
            ],
            ..Variant::of("gemma2")
        },
        Variant {
            name: "gemma3 with a period, a base, a cap and linear scaling",
            keys: vec![
                ("attention.sliding_window_pattern", 3_u32.into()),
                ("rope.freq_base_swa", 500_f32.into()),
                ("rope.scaling.factor", 4_f32.into()),
                ("rope.scaling.attn_factor", 1.2_f32.into()),
                ("final_logit_softcapping", 3_f32.into()),
            ],
            ..Variant::of("gemma3")
        },
        Variant {
            name: "olmo2 with its windows named",
            keys: vec![(
                "attention.sliding_window_pattern",
                vec![false, true, true, false, true].into(),
            )],
            ..Variant::of("olmo2")
        },
        Variant {
            name: "phi3 as Phi-4-mini, in a short context",
            model: MadeUpModel {
                heads: 4,
                kv_heads: 2,
                stretched: false,
                ..heads_of_128("phi3")
            },
            keys: vec![
                ("attention.sliding_window", 8_u32.into()),
                ("rope.dimension_count", 96_u32.into()),
                ("rope.scaling.original_context_length", 4096_u32.into()),
                ("rope.scaling.attn_factor", 1.2_f32.into()),
            ],
            change: add_factors,
        },
        Variant {
            name: "mistral3 with YaRN's bounds",
            keys: vec![
                ("rope.scaling.yarn_beta_fast", 2_f32.into()),
                ("rope.scaling.yarn_beta_slow", 0.1_f32.into()),
            ],
            ..Variant::of("mistral3")
        },
        Variant {
            name: "granite without positions",
            keys: vec![("rope.scaling.finetuned", false.into())],
            ..Variant::of("granite")
        },
        Variant {
            name: "granite as 4.0, with heads told for each layer",
            model: MadeUpModel {
                by_layer: true,
                ..MadeUpModel::of("granite")
            },
            keys: vec![("ssm.conv_kernel", 4_u32.into())],
            ..Variant::of("granite")
        },
        Variant {
            name: "glm4 with positions in parts",
            keys: vec![("rope.dimension_sections", vec![8, 12, 12, 0].into())],
            ..Variant::of("glm4")
        },
        Variant {
            name: "glm4moe with norms of heads, as 4.6 has them",
            change: add_head_norms,
            ..Variant::of("glm4moe")
        },
        Variant {
            name: "deepseek2 as V2-Lite",
            model: MadeUpModel {
                // llama.cpp knows by the number of layers that queries are made of the activation.
                layers: 27,
                large: false,
                ..MadeUpModel::of("deepseek2")
            },
            keys: vec![
                ("rope.scaling.type", "yarn".into()),
                ("rope.scaling.factor", 4_f32.into()),
                (
                    "rope.scaling.original_context_length",
                    (ORIGINAL_CONTEXT as u32).into(),
                ),
                ("rope.scaling.yarn_log_multiplier", 0.0707_f32.into()),
            ],
            ..Variant::of("deepseek2")
        },
        Variant {
            name: "deepseek2 with groups of experts, as V3",
            keys: vec![
                ("expert_group_count", 4_u32.into()),
                ("expert_group_used_count", 2_u32.into()),
            ],
            ..Variant::of("deepseek2")
        },
        Variant {
            name: "deepseek2 with YaRN and a temperature",
            keys: vec![
                ("rope.scaling.type", "yarn".into()),
                ("rope.scaling.factor", 4_f32.into()),
                ("rope.scaling.attn_factor", 0.9_f32.into()),
                (
                    "rope.scaling.original_context_length",
                    (ORIGINAL_CONTEXT as u32).into(),
                ),
                ("attention.temperature_scale", 0.2_f32.into()),
                ("attention.temperature_length", 16_u32.into()),
            ],
            ..Variant::of("deepseek2")
        },
        Variant {
            name: "deepseek2 without experts",
            model: MadeUpModel {
                experts: 0,
                ..MadeUpModel::of("deepseek2")
            },
            ..Variant::of("deepseek2")
        },
        Variant {
            name: "gpt-oss with another base in windows",
            keys: vec![("rope.freq_base_swa", 500_f32.into())],
            ..Variant::of("gpt-oss")
        },
    ]
}

/// gpt-oss as it is published: its experts are in MXFP4, whatever the formats of other matrices.
pub fn experts_in_mxfp4() -> Variant {
    Variant {
        name: "gpt-oss with experts in MXFP4",
        change: |tensors| {
            for (name, format, _) in tensors {
                if name.ends_with("_exps.weight") {
                    *format = GgmlType::Mxfp4;
                }
            }
        },
        ..Variant::of("gpt-oss")
    }
}

/// LongRoPE's, of heads of which 96 numbers are rotated.
pub fn add_factors(tensors: &mut Vec<Tensor>) {
    let names = ["rope_factors_short.weight", "rope_factors_long.weight"];
    tensors.extend(names.map(|name| (name.to_owned(), GgmlType::F32, vec![48])));
}

/// Of every projection.
fn add_biases(tensors: &mut Vec<Tensor>) {
    let biases: Vec<Tensor> = tensors
        .iter()
        .filter(|(name, _, shape)| name.starts_with("blk.") && shape.len() == 2)
        .map(|(name, _, shape)| {
            let name = name.replace(".weight", ".bias");
            (name, GgmlType::F32, vec![shape[1]])
        })
        .collect();
    tensors.extend(biases);
}

/// Of queries and keys, in every layer.
fn add_head_norms(tensors: &mut Vec<Tensor>) {
    let layers = tensors.iter().filter_map(|(name, _, _)| {
        let layer = name.strip_suffix(".attn_norm.weight")?;
        Some(["q", "k"].map(|of| format!("{layer}.attn_{of}_norm.weight")))
    });
    let norms: Vec<String> = layers.flatten().collect();
    tensors.extend(
        norms
            .into_iter()
            .map(|name| (name, GgmlType::F32, vec![128])),
    );
}

/// Weights and biases of queries, keys and values become one tensor each.
fn fuse_attention(tensors: &mut Vec<Tensor>) {
    let others = [".attn_k.", ".attn_v."];
    *tensors = fuse(mem::take(tensors), ".attn_q.", &others, ".attn_qkv.");
}
