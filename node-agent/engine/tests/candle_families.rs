//! The families that candle-transformers has, computed by it and by the engine: a second peer beside llama.cpp, so that a mistake of one is
//! not ours. Without what candle leaves out: scaled rotations and RoPE's divisors. Without its Gemma 3, which has SiLU where the family has
//! GELU, and windows longer by one.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

mod support;

use std::fs::File;
use std::path::Path;

use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Result, Tensor};
use candle_transformers::models::{
    quantized_glm4, quantized_llama, quantized_phi3, quantized_qwen2, quantized_qwen3,
    smol::quantized_smollm3,
};
use prima_gguf::GgmlType;

use support::{MadeUpModel, Runner, difference};

/// How far logits may differ, in units of their spread. Both keep keys and values as numbers of 16 bits or more.
const BOUND: f32 = 2e-3;

/// Candle has the output head of its SmolLM3 in Q8_0, whatever the file has.
const BOUND_WITH_ROUNDED_HEAD: f32 = 2e-2;

/// Logits of the last token of a prompt, and of some more, one at a time.
type Forward = Box<dyn FnMut(&Tensor, usize) -> Result<Tensor>>;

fn open(architecture: &str, path: &Path) -> Result<Forward> {
    let mut file = File::open(path)?;
    let content = Content::read(&mut file)?;
    let device = Device::Cpu;
    Ok(match architecture {
        "llama" => {
            let mut model = quantized_llama::ModelWeights::from_gguf(content, &mut file, &device)?;
            Box::new(move |tokens, position| model.forward(tokens, position))
        }
        "qwen2" => {
            let mut model = quantized_qwen2::ModelWeights::from_gguf(content, &mut file, &device)?;
            Box::new(move |tokens, position| model.forward(tokens, position))
        }
        "qwen3" => {
            let mut model = quantized_qwen3::ModelWeights::from_gguf(content, &mut file, &device)?;
            Box::new(move |tokens, position| model.forward(tokens, position))
        }
        "phi3" => {
            let mut model =
                quantized_phi3::ModelWeights::from_gguf(false, content, &mut file, &device)?;
            Box::new(move |tokens, position| model.forward(tokens, position))
        }
        "smollm3" => {
            let mut model =
                quantized_smollm3::QuantizedModelForCausalLM::from_gguf(path, &device, false)?;
            Box::new(move |tokens, position| model.forward(tokens, position))
        }
        _ => {
            let mut model =
                quantized_glm4::ModelWeights::from_gguf(content, &mut file, &device, DType::F32)?;
            Box::new(move |tokens, position| model.forward(tokens, position))
        }
    })
}

#[test]
fn families_compute_what_candle_does() {
    let folder = tempfile::tempdir().unwrap();
    for architecture in ["llama", "qwen2", "qwen3", "phi3", "glm4", "smollm3"] {
        let model = MadeUpModel {
            formats: vec![GgmlType::F32],
            stretched: false,
            tied: architecture == "smollm3",
            ..MadeUpModel::of(architecture)
        };
        let path = folder.path().join(format!("{architecture}.gguf"));
        model.write_with(&path, model.tensors(), |writer| {
            let mut set = |key: &str, number: u32| {
                writer.metadata(&format!("{architecture}.{key}"), number);
            };
            let head_dim = model.head_dim() as u32;
            set("vocab_size", model.vocabulary as u32);
            if architecture != "glm4" {
                set("rope.dimension_count", head_dim);
            }
            if model.head_dim.is_none() {
                set("attention.key_length", head_dim);
                set("attention.value_length", head_dim);
            }
            writer.metadata(&format!("{architecture}.rope.freq_base"), 10_000_f32);
            // Of the type of activations.
            writer.metadata("general.dtype", 0_u32);
        });
        let bound = match architecture {
            "smollm3" => BOUND_WITH_ROUNDED_HEAD,
            _ => BOUND,
        };
        let runner = Runner::new(&path, 1);
        let mut kv = runner.kv_cache();
        let mut candle = open(architecture, &path).unwrap();
        let prompt: Vec<u32> = (0..40).map(|place| place * 7 % 96).collect();
        let mut position = 0;
        for tokens in [&prompt[..], &[3], &[5]] {
            let input = Tensor::new(tokens, &Device::Cpu)
                .unwrap()
                .unsqueeze(0)
                .unwrap();
            let logits = candle(&input, position).unwrap();
            let expected = logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let found = runner.logits(&mut kv, tokens).pop().unwrap();
            position += tokens.len();
            let difference = difference(&found, &expected);
            println!("{architecture}, {position} tokens: {difference}");
            assert!(
                difference < bound,
                "{architecture}, {position} tokens: {difference}"
            );
        }
    }
}
