//! Models that tests make up: small ones of every family, with random weights in any formats, and what only some files of a family have
//! ([`options`]); one whose experts need not all fit into memory ([`mixture`]); and a plain way to run them ([`Runner`]).
//!
//! A package of its own, since millions of random weights take optimised code. A panic here is a failed test.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "this is for tests")]

pub mod mixture;
pub mod options;
mod runner;

use std::fs::File;
use std::io::BufWriter;
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use prima_gguf::GgmlType;
use prima_gguf::writer::GgufWriter;
pub use runner::{Runner, difference, greedy};

/// SmolLM2-135M-Instruct, Q4_1.
pub fn smollm2() -> PathBuf {
    let cache = std::env::var_os("PRIMA_CACHE").map_or_else(
        || {
            let home = std::env::var_os("HOME").expect("HOME is set");
            Path::new(&home).join(".cache/prima")
        },
        PathBuf::from,
    );
    let path = cache.join("models/SmolLM2-135M-Instruct-Q4_1.gguf");
    assert!(
        path.exists(),
        "{} is missing: run `make assets`",
        path.display()
    );
    path
}

/// Reproducible random numbers (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In `range`.
    pub fn within(&mut self, range: Range<usize>) -> usize {
        range.start + (self.bits() % (range.len() as u64)) as usize
    }

    /// Uniform in -1..1.
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Positions that layers with a window see, in models that have such.
pub const WINDOW: usize = 8;
/// Experts that a token uses, in models that have some and say nothing else.
pub const EXPERTS_PER_TOKEN: usize = 3;
/// Layers without experts, in models that begin with such.
const DENSE_LAYERS: usize = 2;
/// Layers with experts, in models with latents.
const EXPERT_LAYERS: usize = 3;
/// Positions that models with a stretched rotation were first trained for.
pub const ORIGINAL_CONTEXT: usize = 16;
/// Every family that there is; `mixtral` is llama with experts.
pub const FAMILIES: [&str; 19] = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "mistral3",
    "smollm3",
    "olmo2",
    "granite",
    "glm4",
    "mixtral",
    "qwen3moe",
    "olmoe",
    "qwen2moe",
    "granitemoe",
    "gpt-oss",
    "glm4moe",
    "deepseek2",
];

/// The fewest layers with which a model of this name, a family's or an option's of one, has each kind of layer: with and without a window, a
/// rotation, experts.
pub fn layers_of_each_kind(name: &str) -> usize {
    match name {
        "gemma3" => 6,
        _ if name.starts_with("smollm3") || name.starts_with("olmo2") => 4,
        _ if name.starts_with("deepseek2") => 1 + EXPERT_LAYERS,
        _ if name.starts_with("glm4moe") => DENSE_LAYERS + 1,
        // It has another period.
        _ if name.starts_with("gemma3") => 3,
        _ => 2,
    }
}

/// Numbers of latent attention, as GLM-4.7-Flash has them, but for those of queries.
const LATENT: usize = 512;
const ROTATED: usize = 64;
const UNROTATED: usize = 192;
const VALUE: usize = 256;
const QUERY_LATENT: usize = 256;

/// A made-up model: right in form, random in content.
#[derive(Clone)]
pub struct MadeUpModel {
    pub architecture: &'static str,
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// `None`: hidden / heads.
    pub head_dim: Option<usize>,
    pub feed_forward: usize,
    /// 0: it has none.
    pub experts: usize,
    pub experts_per_token: usize,
    pub vocabulary: usize,
    /// Scores that its classifier makes of a state; 0: it has none.
    pub scores: usize,
    pub context_length: u32,
    pub tied: bool,
    pub rope_factors: bool,
    /// Whether families with a stretched rotation have it.
    pub stretched: bool,
    /// Whether a family with latents has what its large models have: queries of latents, and experts chosen by sigmoids with a bias.
    pub large: bool,
    /// Whether it tells its KV heads for each layer, as Granite 4 does.
    pub by_layer: bool,
    /// Taken in turn by the matrices.
    pub formats: Vec<GgmlType>,
    pub seed: u64,
}

impl Default for MadeUpModel {
    fn default() -> Self {
        MadeUpModel {
            architecture: "llama",
            layers: 5,
            hidden: 256,
            heads: 8,
            kv_heads: 2,
            head_dim: None,
            feed_forward: 512,
            experts: 0,
            experts_per_token: EXPERTS_PER_TOKEN,
            vocabulary: 96,
            scores: 0,
            context_length: 512,
            tied: true,
            rope_factors: false,
            stretched: true,
            large: true,
            by_layer: false,
            formats: vec![GgmlType::Q4_1, GgmlType::Q8_0, GgmlType::Q4K, GgmlType::F32],
            seed: 1,
        }
    }
}

/// One tensor of a made-up model: name, format, shape in GGUF order.
pub type Tensor = (String, GgmlType, Vec<u64>);

/// Puts `first` of each layer and the `others`, which come behind it, into one tensor named `whole`, as some converters do. Names are parts of
/// names, such as `.attn_q.`. What is written stays the same, for the bytes of a tensor follow those of the one before.
pub fn fuse(tensors: Vec<Tensor>, first: &str, others: &[&str], whole: &str) -> Vec<Tensor> {
    let mut fused: Vec<Tensor> = Vec::new();
    for (name, format, shape) in tensors {
        let follows = others.iter().any(|other| name.contains(other));
        match fused.last_mut().filter(|_| follows) {
            Some((_, _, before)) => *before.last_mut().unwrap() += shape.last().unwrap(),
            None => fused.push((name.replace(first, whole), format, shape)),
        }
    }
    fused
}

impl MadeUpModel {
    pub fn qwen2() -> Self {
        Self::of("qwen2")
    }

    /// A model with all the parts of a family, and with heads of a size that the family was published with. Windows are of [`WINDOW`]
    /// positions, and stretched contexts were [`ORIGINAL_CONTEXT`].
    pub fn of(family: &'static str) -> Self {
        let (hidden, heads, kv_heads, head_dim) = match family {
            // The small models of these families; heads of the larger ones are of 128.
            "llama" | "qwen2" | "qwen2moe" => (256, 4, 2, 64),
            "smollm3" | "olmo2" | "granite" | "glm4" | "mixtral" | "granitemoe" | "glm4moe" => {
                (512, 4, 2, 128)
            }
            // Heads that are wider together than the activation.
            "qwen3" | "mistral3" | "qwen3moe" => (256, 4, 2, 128),
            "gpt-oss" => (256, 8, 2, 64),
            // In llama.cpp, all of this family's heads are of the same number.
            "olmoe" => (512, 4, 4, 128),
            "gemma2" => (256, 4, 2, 256),
            "gemma3" => (256, 4, 1, 256),
            "phi3" => (768, 8, 8, 96),
            "deepseek2" => (256, 4, 1, LATENT + ROTATED),
            other => unreachable!("{other} is not one of the families"),
        };
        let experts = match family {
            "mixtral" | "qwen3moe" | "olmoe" | "qwen2moe" | "granitemoe" | "gpt-oss"
            | "glm4moe" | "deepseek2" => 8,
            _ => 0,
        };
        MadeUpModel {
            architecture: match family {
                "mixtral" => "llama",
                other => other,
            },
            feed_forward: if experts > 0 { 256 } else { 512 },
            experts,
            // The sixth layer of gemma3 has no window.
            layers: if family == "gemma3" { 7 } else { 5 },
            hidden,
            heads,
            kv_heads,
            head_dim: (heads * head_dim != hidden).then_some(head_dim),
            tied: !matches!(
                family,
                "qwen2" | "olmo2" | "olmoe" | "qwen2moe" | "gpt-oss" | "deepseek2"
            ),
            ..Self::default()
        }
    }

    /// Layers at the end that predict further tokens.
    fn predicting(&self) -> usize {
        let has_latents = self.architecture == "deepseek2" && self.large;
        usize::from(self.experts > 0 && (self.architecture == "glm4moe" || has_latents))
    }

    /// Layers without experts, in models that begin with such.
    fn dense_layers(&self) -> usize {
        match self.architecture {
            _ if self.experts == 0 => self.layers,
            // Of many layers, few have experts: where scores are close, rounding chooses others, and then all numbers are others.
            "deepseek2" => self.layers - EXPERT_LAYERS,
            _ => DENSE_LAYERS,
        }
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden / self.heads)
    }

    pub fn metadata(&self, writer: &mut GgufWriter) {
        let family = self.architecture;
        let mut number = |key: &str, value: usize| {
            writer.metadata(&format!("{family}.{key}"), value as u32);
        };
        number("block_count", self.layers + self.predicting());
        number("embedding_length", self.hidden);
        number("attention.head_count", self.heads);
        if !self.by_layer {
            number("attention.head_count_kv", self.kv_heads);
        }
        if let Some(head_dim) = self.head_dim {
            number("attention.key_length", head_dim);
            let value = if family == "deepseek2" {
                LATENT
            } else {
                head_dim
            };
            number("attention.value_length", value);
        }
        number("context_length", self.context_length as usize);
        if self.experts > 0 {
            number("expert_count", self.experts);
            number("expert_used_count", self.experts_per_token);
        }
        match family {
            "qwen2moe" | "granitemoe" => {
                number("expert_shared_feed_forward_length", 2 * self.feed_forward);
            }
            "glm4moe" => {
                number("expert_shared_count", 2);
                number("leading_dense_block_count", self.dense_layers());
                number("nextn_predict_layers", self.predicting());
                number("expert_gating_func", 2);
            }
            "deepseek2" => {
                number("attention.kv_lora_rank", LATENT);
                number("attention.key_length_mla", UNROTATED + ROTATED);
                number("attention.value_length_mla", VALUE);
                number("rope.dimension_count", ROTATED);
                if self.large {
                    number("attention.q_lora_rank", QUERY_LATENT);
                }
                number("expert_shared_count", 2);
                number("leading_dense_block_count", self.dense_layers());
                number("nextn_predict_layers", self.predicting());
                if self.large {
                    number("expert_gating_func", 2);
                }
            }
            _ => {}
        }
        match family {
            // Its files have a width of a network for all tokens, too.
            "qwen3moe" | "qwen2moe" | "gpt-oss" | "glm4moe" | "deepseek2" => {
                number("feed_forward_length", 3 * self.feed_forward);
                number("expert_feed_forward_length", self.feed_forward);
            }
            _ => number("feed_forward_length", self.feed_forward),
        }
        if matches!(family, "gemma2" | "gemma3" | "olmo2" | "gpt-oss") {
            number("attention.sliding_window", WINDOW);
        }
        if matches!(family, "glm4" | "glm4moe") {
            number("rope.dimension_count", self.head_dim() / 2);
        }
        let stretched =
            self.stretched && matches!(family, "phi3" | "mistral3" | "olmo2" | "gpt-oss");
        if stretched {
            number("rope.scaling.original_context_length", ORIGINAL_CONTEXT);
        }
        let floats: &[(&str, f32)] = match family {
            "gemma3" => &[("rope.freq_base", 1e6)],
            "phi3" if stretched => &[("rope.scaling.attn_factor", 1.2)],
            "olmo2" | "gpt-oss" if stretched => &[("rope.scaling.factor", 4.0)],
            "mistral3" if stretched => &[
                ("rope.scaling.factor", 4.0),
                ("rope.scaling.yarn_log_multiplier", 0.5),
                ("attention.temperature_scale", 0.2),
            ],
            "glm4moe" => &[("expert_weights_scale", 1.5)],
            "deepseek2" if self.large => &[("expert_weights_scale", 1.5)],
            "granite" | "granitemoe" => &[
                ("embedding_scale", 2.0),
                ("residual_scale", 0.5),
                ("attention.scale", 0.1),
                ("logit_scale", 4.0),
            ],
            _ => &[],
        };
        for (key, value) in floats {
            writer.metadata(&format!("{family}.{key}"), *value);
        }
        let scaling = match family {
            // llama.cpp's converter names no kind for Phi-3.
            _ if !stretched || family == "phi3" => None,
            _ => Some("yarn"),
        };
        if let Some(scaling) = scaling {
            writer.metadata(&format!("{family}.rope.scaling.type"), scaling);
        }
        if family == "glm4moe" || family == "deepseek2" && self.large {
            writer.metadata(&format!("{family}.expert_weights_norm"), true);
        }
        if self.by_layer {
            let each = vec![self.kv_heads as i32; self.layers];
            writer.metadata(&format!("{family}.attention.head_count_kv"), each);
        }
        let epsilon = format!("{family}.attention.layer_norm_rms_epsilon");
        writer.metadata(&epsilon, 1e-5_f32);
        writer.metadata("general.architecture", family);
    }

    pub fn tensors(&self) -> Vec<Tensor> {
        let family = self.architecture;
        let (hidden, inner) = (self.hidden as u64, self.feed_forward as u64);
        let head_dim = self.head_dim() as u64;
        let heads = self.heads as u64;
        let queries = head_dim * heads;
        let kv = head_dim * self.kv_heads as u64;
        let vocabulary = self.vocabulary as u64;
        let mut formats = self.formats.iter().copied().cycle();
        let mut tensors = Vec::new();
        let mut tensor = |name: String, shape: &[u64]| {
            let format = match shape {
                _ if name.ends_with("ffn_gate_inp.weight") || name.ends_with(".bias") => {
                    GgmlType::F32
                }
                [cols, _] | [cols, _, _] => match formats.next().expect("a format") {
                    whole if cols.is_multiple_of(whole.block_len() as u64) => whole,
                    // What llama.cpp's quantizer takes for short rows.
                    _ => GgmlType::Q8_0,
                },
                _ => GgmlType::F32,
            };
            tensors.push((name, format, shape.to_vec()));
        };
        tensor("token_embd.weight".into(), &[hidden, vocabulary]);
        if self.rope_factors {
            tensor("rope_freqs.weight".into(), &[head_dim / 2]);
        }
        if family == "phi3" && self.stretched {
            tensor("rope_factors_short.weight".into(), &[head_dim / 2]);
            tensor("rope_factors_long.weight".into(), &[head_dim / 2]);
        }
        for layer in 0..self.layers + self.predicting() {
            let mut part = |name: &str, shape: &[u64]| tensor(format!("blk.{layer}.{name}"), shape);
            if family != "olmo2" {
                part("attn_norm.weight", &[hidden]);
            }
            match family {
                "phi3" => part("attn_qkv.weight", &[hidden, queries + 2 * kv]),
                "deepseek2" => {
                    let [rank, rotated, unrotated, value] =
                        [LATENT, ROTATED, UNROTATED, VALUE].map(|length| length as u64);
                    let queries = heads * (unrotated + rotated);
                    if self.large {
                        let rank = QUERY_LATENT as u64;
                        part("attn_q_a.weight", &[hidden, rank]);
                        part("attn_q_a_norm.weight", &[rank]);
                        part("attn_q_b.weight", &[rank, queries]);
                    } else {
                        part("attn_q.weight", &[hidden, queries]);
                    }
                    part("attn_kv_a_mqa.weight", &[hidden, rank + rotated]);
                    part("attn_kv_a_norm.weight", &[rank]);
                    part("attn_k_b.weight", &[unrotated, rank, heads]);
                    part("attn_v_b.weight", &[rank, value, heads]);
                }
                _ => {
                    part("attn_q.weight", &[hidden, queries]);
                    part("attn_k.weight", &[hidden, kv]);
                    part("attn_v.weight", &[hidden, kv]);
                }
            }
            if matches!(
                family,
                "qwen2" | "glm4" | "qwen2moe" | "gpt-oss" | "glm4moe"
            ) {
                part("attn_q.bias", &[queries]);
                part("attn_k.bias", &[kv]);
                part("attn_v.bias", &[kv]);
            }
            if matches!(family, "qwen3" | "gemma3" | "qwen3moe") {
                part("attn_q_norm.weight", &[head_dim]);
                part("attn_k_norm.weight", &[head_dim]);
            }
            if matches!(family, "olmo2" | "olmoe") {
                part("attn_q_norm.weight", &[queries]);
                part("attn_k_norm.weight", &[kv]);
            }
            let results = match family {
                "deepseek2" => heads * VALUE as u64,
                _ => queries,
            };
            part("attn_output.weight", &[results, hidden]);
            if family == "gpt-oss" {
                part("attn_output.bias", &[hidden]);
                part("attn_sinks.weight", &[self.heads as u64]);
            }
            if matches!(family, "gpt-oss" | "glm4moe") {
                part("post_attention_norm.weight", &[hidden]);
            }
            if matches!(family, "gemma2" | "gemma3" | "olmo2" | "glm4") {
                part("post_attention_norm.weight", &[hidden]);
                part("post_ffw_norm.weight", &[hidden]);
            }
            if !matches!(family, "olmo2" | "gpt-oss" | "glm4moe") {
                part("ffn_norm.weight", &[hidden]);
            }
            let has_dense = matches!(family, "glm4moe" | "deepseek2");
            let is_dense = has_dense && layer < self.dense_layers();
            let (experts, inner) = match is_dense {
                true => (0, 3 * inner),
                false => (self.experts as u64, inner),
            };
            match family {
                _ if experts > 0 => {
                    part("ffn_gate_inp.weight", &[hidden, experts]);
                    part("ffn_gate_exps.weight", &[hidden, inner, experts]);
                    part("ffn_up_exps.weight", &[hidden, inner, experts]);
                }
                "phi3" | "glm4" => part("ffn_up.weight", &[hidden, 2 * inner]),
                _ => {
                    part("ffn_gate.weight", &[hidden, inner]);
                    part("ffn_up.weight", &[hidden, inner]);
                }
            }
            match experts {
                0 => part("ffn_down.weight", &[inner, hidden]),
                _ => part("ffn_down_exps.weight", &[inner, hidden, experts]),
            }
            if family == "gpt-oss" {
                part("ffn_gate_inp.bias", &[experts]);
                part("ffn_gate_exps.bias", &[inner, experts]);
                part("ffn_up_exps.bias", &[inner, experts]);
                part("ffn_down_exps.bias", &[hidden, experts]);
            }
            let has_shared = matches!(family, "qwen2moe" | "granitemoe" | "glm4moe" | "deepseek2");
            if has_shared && experts > 0 {
                part("ffn_gate_shexp.weight", &[hidden, 2 * inner]);
                part("ffn_up_shexp.weight", &[hidden, 2 * inner]);
                part("ffn_down_shexp.weight", &[2 * inner, hidden]);
            }
            if family == "qwen2moe" {
                part("ffn_gate_inp_shexp.weight", &[hidden]);
            }
            if has_dense && experts > 0 && self.large {
                part("exp_probs_b.bias", &[experts]);
            }
            if layer >= self.layers {
                part("nextn.eh_proj.weight", &[2 * hidden, hidden]);
                part("nextn.enorm.weight", &[hidden]);
                part("nextn.hnorm.weight", &[hidden]);
            }
            if family == "mistral3" {
                part("attn_output.bias", &[hidden]);
                part("ffn_down.bias", &[hidden]);
            }
        }
        tensor("output_norm.weight".into(), &[hidden]);
        if !self.tied {
            tensor("output.weight".into(), &[hidden, vocabulary]);
        }
        if self.scores > 0 {
            tensor("cls.output.weight".into(), &[hidden, self.scores as u64]);
        }
        tensors
    }

    /// Writes the model into `directory` and returns its path.
    pub fn write(&self, directory: &Path) -> PathBuf {
        let name = format!("{}-{}-{}", self.architecture, self.experts, self.seed);
        let path = directory.join(format!("{name}.gguf"));
        self.write_with(&path, self.tensors(), |_| {});
        path
    }

    /// Writes it to `path`, for a ring to serve: its vocabulary is characters.
    pub fn write_for_ring(&self, path: &Path) {
        self.write_with(path, self.tensors(), characters_as_tokens);
    }

    /// Writes a model of these tensors, with metadata that `change` may alter.
    pub fn write_with(
        &self,
        path: &Path,
        tensors: Vec<Tensor>,
        change: impl FnOnce(&mut GgufWriter),
    ) {
        let mut writer = GgufWriter::new();
        self.metadata(&mut writer);
        change(&mut writer);
        for (name, format, shape) in &tensors {
            writer.tensor(name, *format, shape);
        }
        let file = BufWriter::new(File::create(path).expect("a model file"));
        let mut data = writer.write_header(file).expect("a header");
        let mut random = Random(self.seed);
        for (name, format, shape) in &tensors {
            let bytes = match name.as_str() {
                name if name.starts_with("rope_") => {
                    // Those for short contexts are others than those for long ones.
                    let parts = if name.contains("short") { 8.0 } else { 4.0 };
                    (0..shape[0])
                        .flat_map(|pair| (1.0 + pair as f32 / parts).to_le_bytes())
                        .collect()
                }
                name if name.ends_with("norm.weight") && *format == GgmlType::F32 => (0..shape[0])
                    .flat_map(|_| (1.0 + 0.3 * random.uniform()).to_le_bytes())
                    .collect(),
                _ => weights(&mut random, *format, shape),
            };
            data.tensor(&bytes).expect("tensor data");
        }
        data.finish().expect("a whole file");
    }
}

/// Random blocks whose weights have zero mean and a deviation that keeps activations in range.
fn weights(random: &mut Random, format: GgmlType, shape: &[u64]) -> Vec<u8> {
    let deviation = 1.0 / (shape[0] as f32).sqrt();
    let count: u64 = shape.iter().product();
    let blocks = count as usize / format.block_len();
    let mut bytes = Vec::with_capacity(blocks * format.block_bytes());
    let half = |number: f32| f16::from_f32(number).to_le_bytes();
    for _ in 0..blocks {
        let mut noise = |bytes: &mut Vec<u8>, count: usize| {
            bytes.extend((0..count).map(|_| random.bits() as u8));
        };
        match format {
            GgmlType::F32 => bytes.extend((random.uniform() * deviation * 1.7).to_le_bytes()),
            GgmlType::F16 => bytes.extend(half(random.uniform() * deviation * 1.7)),
            GgmlType::BF16 => {
                let number = bf16::from_f32(random.uniform() * deviation * 1.7);
                bytes.extend(number.to_le_bytes());
            }
            GgmlType::Q8_0 => {
                bytes.extend(half(deviation / 74.0));
                noise(&mut bytes, 32);
            }
            GgmlType::Q4_0 => {
                bytes.extend(half(deviation / 4.6));
                noise(&mut bytes, 16);
            }
            GgmlType::Q4_1 => {
                bytes.extend(half(deviation / 4.6));
                bytes.extend(half(deviation / 4.6 * -7.5));
                noise(&mut bytes, 16);
            }
            GgmlType::Q4K => {
                // Weights are d * scale * q - dmin * min, with 6-bit scales and minimums of mean 32.
                bytes.extend(half(deviation / 4.6 / 32.0));
                bytes.extend(half(deviation / 4.6 * 7.5 / 32.0));
                noise(&mut bytes, 140);
            }
            GgmlType::Q6K => {
                noise(&mut bytes, 192);
                bytes.extend([1; 16]);
                bytes.extend(half(deviation / 18.5));
            }
            GgmlType::Mxfp4 => {
                // The sixteen numbers have a mean square of 8.6.
                bytes.push((127.0 + (deviation / 2.9).log2()).round() as u8);
                noise(&mut bytes, 16);
            }
            other => noise(&mut bytes, other.block_bytes()),
        }
    }
    bytes
}

/// A vocabulary that llama.cpp takes, too: a token for each printable character, one for two of them, as there must be a merge, and one that
/// ends a text.
pub fn characters_as_tokens(writer: &mut GgufWriter) {
    let characters = (b'!'..=b'~').map(|byte| char::from(byte).to_string());
    let tokens: Vec<String> = characters
        .chain(["!!".to_owned(), "<end>".to_owned()])
        .collect();
    let types = [vec![1; 95], vec![3]].concat();
    writer
        .metadata("tokenizer.ggml.model", "gpt2")
        .metadata("tokenizer.ggml.pre", "gpt-2")
        .metadata("tokenizer.ggml.tokens", tokens)
        .metadata("tokenizer.ggml.token_type", types)
        .metadata("tokenizer.ggml.merges", vec!["! !".to_owned()])
        .metadata("tokenizer.ggml.eos_token_id", 95_u32);
}
