//! Candle's models in floats, with sizes, options and weights from a GGUF file. Candle has them as they are published, so what a converter
//! does is undone here: halves of heads turn together, and Gemma's norms lack 1.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::smol::smollm3;
use candle_transformers::models::{
    deepseek2, gemma2, gemma3, granitemoehybrid, olmo2, qwen2_moe, qwen3_moe,
};
use serde_json::json;

/// Logits of the last token of some, of which the first has this position.
pub type Forward = Box<dyn FnMut(&Tensor, usize) -> Result<Tensor>>;

/// What files call a part, and what candle does.
type Names = &'static [(&'static str, &'static str)];

const NAMES: Names = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];
/// Beside those, of families whose norms are as Llama's.
const LLAMA_NAMES: Names = &[("ffn_norm", "post_attention_layernorm")];
const OLMO_NAMES: Names = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];
const GEMMA_NAMES: Names = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];
const GRANITE_NAMES: Names = &[
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate_up", "shared_mlp.input_linear"),
    ("ffn_down", "shared_mlp.output_linear"),
];
const QWEN_NAMES: Names = &[
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
];

const DEEPSEEK_NAMES: Names = &[
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];

/// Candle's Gemma 2 has a window in all layers or in none.
pub fn gemma2(path: &Path, window: Option<usize>) -> Result<Forward> {
    let model = Gguf::open(path)?;
    let config = gemma2::Config {
        attention_bias: false,
        head_dim: model.head_dim(),
        hidden_activation: Activation::GeluPytorchTanh,
        hidden_size: model.size("embedding_length"),
        intermediate_size: model.size("feed_forward_length"),
        num_attention_heads: model.size("attention.head_count"),
        num_hidden_layers: model.size("block_count"),
        num_key_value_heads: model.size("attention.head_count_kv"),
        rms_norm_eps: model.epsilon(),
        rope_theta: model.number("rope.freq_base").unwrap_or(10_000.0),
        vocab_size: model.vocabulary(),
        final_logit_softcapping: model.number("final_logit_softcapping").or(Some(30.0)),
        attn_logit_softcapping: model.number("attn_logit_softcapping").or(Some(50.0)),
        // It computes as if this were the size of a head.
        query_pre_attn_scalar: model.head_dim(),
        sliding_window: window,
        max_position_embeddings: model.size("context_length"),
    };
    let weights = model.published(GEMMA_NAMES, without_one)?;
    let mut model = gemma2::Model::new(false, &config, weights)?;
    Ok(Box::new(move |tokens, position| {
        model.forward(tokens, position)
    }))
}

pub fn gemma3(path: &Path) -> Result<Forward> {
    let model = Gguf::open(path)?;
    let pattern = model.number("attention.sliding_window_pattern");
    let config = gemma3::Config {
        attention_bias: false,
        head_dim: model.head_dim(),
        hidden_activation: Activation::GeluPytorchTanh,
        hidden_size: model.size("embedding_length"),
        intermediate_size: model.size("feed_forward_length"),
        num_attention_heads: model.size("attention.head_count"),
        num_hidden_layers: model.size("block_count"),
        num_key_value_heads: model.size("attention.head_count_kv"),
        rms_norm_eps: model.epsilon(),
        rope_theta: model.number("rope.freq_base").unwrap_or(1e6),
        rope_local_base_freq: model.number("rope.freq_base_swa").unwrap_or(10_000.0),
        vocab_size: model.vocabulary(),
        final_logit_softcapping: model.number("final_logit_softcapping"),
        attn_logit_softcapping: None,
        // It computes as if this were the size of a head.
        query_pre_attn_scalar: model.head_dim(),
        sliding_window: model.size("attention.sliding_window"),
        sliding_window_pattern: pattern.map_or(6, |period| period as usize),
        max_position_embeddings: model.size("context_length"),
    };
    let weights = model.published(GEMMA_NAMES, without_one)?;
    let mut model = gemma3::Model::new(false, &config, weights)?;
    Ok(Box::new(move |tokens, position| {
        model.forward(tokens, position)
    }))
}

/// Candle's OLMo 2 has no windows, and no rotation that is scaled.
pub fn olmo2(path: &Path) -> Result<Forward> {
    let model = Gguf::open(path)?;
    let config = olmo2::Config {
        vocab_size: model.vocabulary(),
        hidden_size: model.size("embedding_length"),
        intermediate_size: model.size("feed_forward_length"),
        attention_bias: false,
        num_hidden_layers: model.size("block_count"),
        num_attention_heads: model.size("attention.head_count"),
        num_key_value_heads: model.size("attention.head_count_kv"),
        rms_norm_eps: model.epsilon(),
        hidden_act: Activation::Silu,
        max_position_embeddings: model.size("context_length"),
        rope_theta: model.number("rope.freq_base").unwrap_or(10_000.0),
        tie_word_embeddings: model.is_tied(),
        clip_qkv: None,
    };
    let weights = model.published(OLMO_NAMES, |_, tensor| Ok(tensor))?;
    let mut model = olmo2::Model::new(&config, weights)?;
    Ok(Box::new(move |tokens, position| {
        model.forward(tokens, position)
    }))
}

/// Granite 4's layers without experts, which are those of Granite 3: candle's Granite 3 lacks the family's factors.
pub fn granite(path: &Path) -> Result<Forward> {
    let mut model = Gguf::open(path)?;
    let factor = |key| model.number(key).unwrap_or(1.0) as f32;
    let layers = model.size("block_count");
    let attends = granitemoehybrid::GraniteMoeHybridLayerType::Attention;
    let config = granitemoehybrid::GraniteMoeHybridInternalConfig {
        hidden_size: model.size("embedding_length"),
        intermediate_size: model.size("feed_forward_length"),
        vocab_size: model.vocabulary(),
        num_hidden_layers: layers,
        num_attention_heads: model.size("attention.head_count"),
        num_key_value_heads: model.size("attention.head_count_kv"),
        use_flash_attn: false,
        rms_norm_eps: model.epsilon(),
        rope_theta: model.number("rope.freq_base").unwrap_or(10_000.0) as f32,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: model.size("context_length"),
        layer_types: vec![attends; layers],
        attention_multiplier: factor("attention.scale"),
        embedding_multiplier: factor("embedding_scale"),
        residual_multiplier: factor("residual_scale"),
        logits_scaling: factor("logit_scale"),
        shared_intermediate_size: model.size("feed_forward_length"),
    };
    for layer in 0..layers {
        model.fuse_gate_and_up(layer)?;
    }
    let weights = model.published(GRANITE_NAMES, model.with_halves())?;
    let device = Device::Cpu;
    let mut cache =
        granitemoehybrid::GraniteMoeHybridCache::new(true, DType::F32, &config, &device)?;
    let model = granitemoehybrid::GraniteMoeHybrid::load(weights, &config)?;
    Ok(Box::new(move |tokens, position| {
        model.forward(tokens, position, &mut cache)
    }))
}

pub fn smollm3(path: &Path) -> Result<Forward> {
    let model = Gguf::open(path)?;
    let config = smollm3::Config {
        vocab_size: model.vocabulary(),
        hidden_size: model.size("embedding_length"),
        intermediate_size: model.size("feed_forward_length"),
        num_hidden_layers: model.size("block_count"),
        num_attention_heads: model.size("attention.head_count"),
        num_key_value_heads: model.size("attention.head_count_kv"),
        max_position_embeddings: model.size("context_length"),
        tie_word_embeddings: model.is_tied(),
        rope_theta: model.number("rope.freq_base").unwrap_or(10_000.0),
        rms_norm_eps: model.epsilon(),
        hidden_act: Activation::Silu,
        attention_bias: None,
        attention_dropout: None,
        mlp_bias: None,
        sliding_window: None,
        use_sliding_window: None,
        rope_scaling: None,
        bos_token_id: None,
        eos_token_id: None,
        pad_token_id: None,
        max_window_layers: None,
        no_rope_layers: None,
        no_rope_layer_interval: Some(4),
    };
    let weights = model.published(LLAMA_NAMES, model.with_halves())?;
    let mut model = smollm3::ModelForCausalLM::new(&config, weights)?;
    Ok(Box::new(move |tokens, position| {
        model.forward(tokens, position)
    }))
}

pub fn qwen2moe(path: &Path) -> Result<Forward> {
    let mut model = Gguf::open(path)?;
    let config = qwen2_moe::Config {
        vocab_size: model.vocabulary(),
        hidden_size: model.size("embedding_length"),
        intermediate_size: model.size("feed_forward_length"),
        num_hidden_layers: model.size("block_count"),
        num_attention_heads: model.size("attention.head_count"),
        num_key_value_heads: model.size("attention.head_count_kv"),
        max_position_embeddings: model.size("context_length"),
        // It would have one in all layers, whatever else it is told.
        sliding_window: model.size("context_length"),
        max_window_layers: 0,
        tie_word_embeddings: model.is_tied(),
        rope_theta: model.number("rope.freq_base").unwrap_or(10_000.0),
        rms_norm_eps: model.epsilon(),
        use_sliding_window: false,
        hidden_act: Activation::Silu,
        decoder_sparse_step: 1,
        moe_intermediate_size: model.size("expert_feed_forward_length"),
        shared_expert_intermediate_size: model.size("expert_shared_feed_forward_length"),
        num_experts_per_tok: model.size("expert_used_count"),
        num_experts: model.size("expert_count"),
        norm_topk_prob: false,
    };
    model.split_experts()?;
    let weights = model.published(QWEN_NAMES, |name, tensor| match name {
        name if name.ends_with("ffn_gate_inp_shexp.weight") => tensor.unsqueeze(0),
        _ => Ok(tensor),
    })?;
    let mut model = qwen2_moe::Model::new(&config, weights)?;
    Ok(Box::new(move |tokens, position| {
        model.forward(tokens, position)
    }))
}

pub fn qwen3moe(path: &Path) -> Result<Forward> {
    let mut model = Gguf::open(path)?;
    let config = qwen3_moe::Config {
        vocab_size: model.vocabulary(),
        hidden_size: model.size("embedding_length"),
        intermediate_size: model.size("feed_forward_length"),
        num_hidden_layers: model.size("block_count"),
        num_attention_heads: model.size("attention.head_count"),
        head_dim: model.head_dim(),
        attention_bias: false,
        num_key_value_heads: model.size("attention.head_count_kv"),
        max_position_embeddings: model.size("context_length"),
        sliding_window: None,
        max_window_layers: 0,
        tie_word_embeddings: model.is_tied(),
        rope_theta: model.number("rope.freq_base").unwrap_or(10_000.0),
        rms_norm_eps: model.epsilon(),
        use_sliding_window: false,
        hidden_act: Activation::Silu,
        decoder_sparse_step: 1,
        moe_intermediate_size: model.size("expert_feed_forward_length"),
        num_experts_per_tok: model.size("expert_used_count"),
        num_experts: model.size("expert_count"),
        norm_topk_prob: true,
    };
    model.split_experts()?;
    let weights = model.published(QWEN_NAMES, |_, tensor| Ok(tensor))?;
    let mut model = qwen3_moe::ModelForCausalLM::new(&config, weights)?;
    Ok(Box::new(move |tokens, position| {
        model.forward(tokens, position)
    }))
}

/// Candle's DeepSeek-V2 makes keys and values of each head, and caches these. It has no groups and no sigmoids.
pub fn deepseek2(path: &Path) -> Result<Forward> {
    let mut model = Gguf::open(path)?;
    let number = |key| model.number(key).unwrap();
    let (head, rotated) = (
        number("attention.key_length_mla"),
        number("rope.dimension_count"),
    );
    let size = |key| model.size(key);
    let multiplier = 10.0 * number("rope.scaling.yarn_log_multiplier");
    let config = json!({
        "vocab_size": model.vocabulary(),
        "hidden_size": size("embedding_length"),
        "intermediate_size": size("feed_forward_length"),
        "moe_intermediate_size": size("expert_feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": size("attention.head_count"),
        "n_shared_experts": size("expert_shared_count"),
        "n_routed_experts": size("expert_count"),
        "num_experts_per_tok": size("expert_used_count"),
        "first_k_dense_replace": size("leading_dense_block_count"),
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": model.epsilon(),
        "rope_theta": model.number("rope.freq_base").unwrap_or(10_000.0),
        "rope_scaling": {
            "type": "yarn",
            "factor": number("rope.scaling.factor"),
            "original_max_position_embeddings": size("rope.scaling.original_context_length"),
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": multiplier,
            "mscale_all_dim": multiplier,
        },
        "attention_bias": false,
        "q_lora_rank": null,
        "qk_rope_head_dim": rotated as usize,
        "kv_lora_rank": size("attention.kv_lora_rank"),
        "v_head_dim": size("attention.value_length_mla"),
        "qk_nope_head_dim": (head - rotated) as usize,
        "n_group": 1,
        "topk_group": 1,
    });
    let config: deepseek2::DeepSeekV2Config = serde_json::from_value(config).unwrap();
    model.join_keys_and_values()?;
    model.split_experts()?;
    let weights = model.published(DEEPSEEK_NAMES, |_, tensor| Ok(tensor))?;
    let mut model = deepseek2::DeepSeekV2::new(&config, weights)?;
    Ok(Box::new(move |tokens, position| {
        model.forward(tokens, position)
    }))
}

/// A file, read whole.
struct Gguf {
    architecture: String,
    metadata: HashMap<String, Value>,
    tensors: HashMap<String, Tensor>,
}

impl Gguf {
    fn open(path: &Path) -> Result<Gguf> {
        let mut file = File::open(path)?;
        let content = Content::read(&mut file)?;
        let names = content.tensor_infos.keys();
        let tensors = names.map(|name| {
            let tensor = content.tensor(&mut file, name, &Device::Cpu)?;
            Ok((name.clone(), tensor.dequantize(&Device::Cpu)?))
        });
        Ok(Gguf {
            architecture: content.metadata["general.architecture"]
                .to_string()?
                .clone(),
            tensors: tensors.collect::<Result<_>>()?,
            metadata: content.metadata,
        })
    }

    fn number(&self, key: &str) -> Option<f64> {
        let value = self.metadata.get(&format!("{}.{key}", self.architecture))?;
        let whole = value.to_u32().map(f64::from);
        whole.or_else(|_| value.to_f32().map(f64::from)).ok()
    }

    fn size(&self, key: &str) -> usize {
        self.number(key).unwrap_or_else(|| panic!("no {key}")) as usize
    }

    fn head_dim(&self) -> usize {
        let own = self.number("attention.key_length");
        let share = self.size("embedding_length") / self.size("attention.head_count");
        own.map_or(share, |size| size as usize)
    }

    fn epsilon(&self) -> f64 {
        self.number("attention.layer_norm_rms_epsilon").unwrap()
    }

    fn vocabulary(&self) -> usize {
        self.tensors["token_embd.weight"].dims()[0]
    }

    fn is_tied(&self) -> bool {
        !self.tensors.contains_key("output.weight")
    }

    fn fuse_gate_and_up(&mut self, layer: usize) -> Result<()> {
        let names = ["ffn_gate", "ffn_up"].map(|part| format!("blk.{layer}.{part}.weight"));
        let parts = names.map(|name| self.tensors.remove(&name).unwrap());
        let fused = format!("blk.{layer}.ffn_gate_up.weight");
        self.tensors.insert(fused, Tensor::cat(&parts, 0)?);
        Ok(())
    }

    /// Of latents, what makes keys of heads, and what makes values, become one matrix: for each head the rows of its keys, then of its values.
    fn join_keys_and_values(&mut self) -> Result<()> {
        let names = self.tensors.keys().filter(|name| name.contains("attn_k_b"));
        for name in names.cloned().collect::<Vec<_>>() {
            let keys = self.tensors.remove(&name).unwrap().transpose(1, 2)?;
            let values = self.tensors.remove(&name.replace("_k_b", "_v_b")).unwrap();
            let both = Tensor::cat(&[keys, values], 1)?.flatten(0, 1)?;
            self.tensors.insert(name.replace("_k_b", "_kv_b"), both);
        }
        Ok(())
    }

    /// The matrices of all experts in one tensor become one for each.
    fn split_experts(&mut self) -> Result<()> {
        let names = self.tensors.keys().filter(|name| name.contains("_exps."));
        for name in names.cloned().collect::<Vec<_>>() {
            let all = self.tensors.remove(&name).unwrap();
            for expert in 0..all.dims()[0] {
                let name = name.replace("_exps.", &format!(".{expert}."));
                self.tensors.insert(name, all.get(expert)?);
            }
        }
        Ok(())
    }

    /// The tensors by the names that candle has for them, each `changed`.
    fn published(
        &self,
        own_names: Names,
        changed: impl Fn(&str, Tensor) -> Result<Tensor>,
    ) -> Result<VarBuilder<'static>> {
        let tensors = self.tensors.iter().map(|(name, tensor)| {
            let published = published_name(name, own_names);
            Ok((published, changed(name, tensor.clone())?))
        });
        let tensors = tensors.collect::<Result<_>>()?;
        Ok(VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu))
    }

    /// Of rows that turn with their neighbours, those that turn with the ones half a head on.
    fn with_halves(&self) -> impl Fn(&str, Tensor) -> Result<Tensor> {
        let queries = self.size("attention.head_count");
        let keys = self.size("attention.head_count_kv");
        move |name, tensor| {
            let heads = match name.rsplit('.').nth(1) {
                Some("attn_q") => queries,
                Some("attn_k") => keys,
                _ => return Ok(tensor),
            };
            let (rows, columns) = tensor.dims2()?;
            let pairs = tensor.reshape((heads, rows / heads / 2, 2, columns))?;
            pairs.transpose(1, 2)?.reshape((rows, columns))
        }
    }
}

/// Gemma's norms multiply by 1 more than their weights; files have that 1 added.
fn without_one(name: &str, tensor: Tensor) -> Result<Tensor> {
    match name.ends_with("norm.weight") {
        true => tensor - 1.0,
        false => Ok(tensor),
    }
}

/// `own_names` come first.
fn published_name(name: &str, own_names: Names) -> String {
    let of = |part: &str| {
        let mut names = own_names.iter().chain(NAMES);
        let found = names.find(|(file, _)| *file == part);
        found.unwrap_or_else(|| panic!("{part} of {name}")).1
    };
    let (stem, kind) = name.rsplit_once('.').unwrap();
    match stem.split('.').collect::<Vec<_>>()[..] {
        [part] => format!("{}.{kind}", of(part)),
        ["blk", layer, part] => format!("model.layers.{layer}.{}.{kind}", of(part)),
        ["blk", layer, part, expert] => {
            let part = of(part).replace("mlp.", &format!("mlp.experts.{expert}."));
            format!("model.layers.{layer}.{part}.{kind}")
        }
        _ => panic!("{name}"),
    }
}
