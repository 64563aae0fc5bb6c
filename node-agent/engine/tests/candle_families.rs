//! The families that candle-transformers has, computed by it and by the engine: a second peer beside llama.cpp, so that a mistake of one is
//! not ours. Candle reads some families from the same file. Others it has in floats only, and gets their weights as they are published
//! (`candle_float`). Without what candle leaves out: scaled rotations, RoPE's divisors, and scores that are scaled by another width than that
//! of a head. Without its Gemma 3 that reads files, which has SiLU where the family has GELU.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

mod candle_float;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Result, Tensor};
use candle_transformers::models::{
    quantized_glm4, quantized_llama, quantized_phi3, quantized_qwen2, quantized_qwen3,
    smol::quantized_smollm3,
};
use prima_gguf::{GgmlType, Value};

use candle_float::Forward;
use prima_test_models::options::Variant;
use prima_test_models::{MadeUpModel, Runner, WINDOW, difference};

/// How far logits may differ, in units of their spread: prima keeps keys and values as F16, candle as F32. Up to 6e-4 are measured.
const BOUND: f32 = 1e-3;

/// Candle has the output head of its SmolLM3 in Q8_0, whatever the file has.
const BOUND_WITH_ROUNDED_HEAD: f32 = 2e-2;

/// Where no layer attends, nothing is rounded to F16, and sums of F32 differ in their order. 7e-7 are measured; with GELU by erf, 1e-4.
const BOUND_WITHOUT_ATTENTION: f32 = 5e-6;

/// In floats: a prompt, and two tokens that follow it one by one.
const TOKENS: usize = 42;
const PROMPT: usize = 40;

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
            let expected = logits(&mut candle, tokens, position);
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

#[test]
fn gemma2_computes_what_candle_does_in_floats() {
    let low_caps = || {
        vec![
            ("attn_logit_softcapping", 2_f32.into()),
            ("final_logit_softcapping", 3_f32.into()),
        ]
    };
    // Candle has a window in all layers, or in none.
    let without_windows: Candle = |path| candle_float::gemma2(path, None);
    compare(Case {
        silent: &[0, 2, 4],
        ..Case::of("gemma2", "where all is seen", without_windows, low_caps())
    });
    // Its windows are longer by one, and it forgets them after a prompt.
    let with_windows: Candle = |path| candle_float::gemma2(path, Some(WINDOW - 1));
    compare(Case {
        silent: &[1, 3],
        steps: &[PROMPT],
        ..Case::of("gemma2", "in windows", with_windows, low_caps())
    });
    // With the caps that the family has where a file does not say.
    compare(Case {
        silent: &[0, 2, 4],
        queries_scaled: 4.0,
        ..Case::of("gemma2", "with strong scores", without_windows, vec![])
    });
    compare(Case {
        silent: &[0, 1, 2, 3, 4],
        bound: BOUND_WITHOUT_ATTENTION,
        ..Case::of("gemma2", "without attention", without_windows, vec![])
    });
}

#[test]
fn gemma3_computes_what_candle_does_in_floats() {
    let case = |name, keys| Case {
        // In a prompt, candle's windows are longer by one.
        steps: &[1; TOKENS],
        ..Case::of("gemma3", name, candle_float::gemma3, keys)
    };
    compare(case("as most files", vec![]));
    let options = vec![
        ("attention.sliding_window_pattern", 3_u32.into()),
        ("rope.freq_base_swa", 500_f32.into()),
        ("final_logit_softcapping", 3_f32.into()),
    ];
    compare(case("with a period, a base and a cap", options));
    // Candle scales no rotation; the family scales that of the sixth layer.
    let scaled = vec![("rope.scaling.factor", 4_f32.into())];
    compare(Case {
        silent: &[5],
        ..case("in windows, with scaling", scaled)
    });
    compare(Case {
        silent: &[0, 1, 2, 3, 4, 5, 6],
        bound: BOUND_WITHOUT_ATTENTION,
        ..case("without attention", vec![])
    });
}

#[test]
fn olmo2_computes_what_candle_does_in_floats() {
    let case = |name, keys| Case::of("olmo2", name, candle_float::olmo2, keys);
    // Candle has no windows.
    let pattern = vec![false; 5];
    let no_windows = vec![("attention.sliding_window_pattern", pattern.into())];
    compare(case("without windows", no_windows));
    compare(Case {
        silent: &[0, 1, 2, 4],
        ..case("where all is seen", vec![])
    });
    // Candle scales no rotation; the family scales that of the fourth layer. So few tokens are all in the window.
    let mut in_windows = case("in windows, with scaling", vec![]);
    in_windows.variant.model.stretched = true;
    compare(Case {
        silent: &[3],
        steps: &[WINDOW],
        ..in_windows
    });
}

#[test]
fn granite_computes_what_candle_does_in_floats() {
    let base = vec![("rope.freq_base", 50_000_f32.into())];
    compare(Case::of(
        "granite",
        "with a base",
        candle_float::granite,
        base,
    ));
}

#[test]
fn smollm3_computes_what_candle_does_in_floats() {
    let base = vec![("rope.freq_base", 50_000_f32.into())];
    compare(Case::of(
        "smollm3",
        "with a base",
        candle_float::smollm3,
        base,
    ));
}

#[test]
fn mixtures_compute_what_candle_does_in_floats() {
    compare(Case::of(
        "qwen2moe",
        "with a shared expert",
        candle_float::qwen2moe,
        vec![],
    ));
    compare(Case::of(
        "qwen3moe",
        "with experts",
        candle_float::qwen3moe,
        vec![],
    ));
}

/// As V2-Lite: candle makes keys and values of latents, where the engine makes latents of queries.
#[test]
fn deepseek2_computes_what_candle_does_in_floats() {
    let stretched = vec![
        ("rope.scaling.type", "yarn".into()),
        ("rope.scaling.factor", 4_f32.into()),
        ("rope.scaling.original_context_length", 16_u32.into()),
        ("rope.scaling.yarn_log_multiplier", 0.0707_f32.into()),
    ];
    let mut case = Case::of("deepseek2", "with YaRN", candle_float::deepseek2, stretched);
    case.variant.model.large = false;
    compare(case);
}

/// Candle's model with what is in a file.
type Candle = fn(&Path) -> Result<Forward>;

/// A made-up model in floats, and what candle makes of it.
struct Case {
    variant: Variant,
    /// Layers whose attention adds nothing, where candle has other layers than the family.
    silent: &'static [usize],
    /// So that scores are as large as it takes.
    queries_scaled: f32,
    candle: Candle,
    /// How many tokens candle is given at once.
    steps: &'static [usize],
    bound: f32,
}

impl Case {
    fn of(
        family: &'static str,
        name: &'static str,
        candle: Candle,
        keys: Vec<(&'static str, Value)>,
    ) -> Case {
        Case {
            variant: Variant {
                name,
                model: MadeUpModel {
                    formats: vec![GgmlType::F32],
                    stretched: false,
                    ..MadeUpModel::of(family)
                },
                keys,
                ..Variant::of(family)
            },
            silent: &[],
            queries_scaled: 1.0,
            candle,
            steps: &[PROMPT, 1, 1],
            bound: BOUND,
        }
    }
}

fn compare(case: Case) {
    let name = format!("{}, {}", case.variant.model.architecture, case.variant.name);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("made-up.gguf");
    case.variant.write(&path, |_| {});
    for layer in case.silent {
        scale(&path, &format!("blk.{layer}.attn_output.weight"), 0.0);
    }
    for layer in 0..case.variant.model.layers {
        let queries = format!("blk.{layer}.attn_q.weight");
        scale(&path, &queries, case.queries_scaled);
    }
    let tokens: Vec<u32> = (0..TOKENS as u32).map(|place| place * 7 % 96).collect();
    let runner = Runner::new(&path, 1);
    let mut kv = runner.kv_cache();
    let mut found = runner.logits(&mut kv, &tokens[..PROMPT]);
    for token in &tokens[PROMPT..] {
        found.extend(runner.logits(&mut kv, &[*token]));
    }
    let mut candle = (case.candle)(&path).unwrap();
    let mut position = 0;
    let mut largest = 0_f32;
    for step in case.steps {
        let end = position + step;
        let expected = logits(&mut candle, &tokens[position..end], position);
        largest = largest.max(difference(&found[end - 1], &expected));
        position = end;
    }
    println!("{name}: {largest}");
    assert!(largest < case.bound, "{name}: {largest}");
}

/// Logits of the last of some tokens, of which the first has this position.
fn logits(candle: &mut Forward, tokens: &[u32], position: usize) -> Vec<f32> {
    let input = Tensor::new(tokens, &Device::Cpu).unwrap();
    let logits = candle(&input.unsqueeze(0).unwrap(), position).unwrap();
    logits.flatten_all().unwrap().to_vec1().unwrap()
}

/// Multiplies a tensor of floats in a file.
fn scale(path: &Path, tensor: &str, factor: f32) {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let content = Content::read(&mut file).unwrap();
    let numbers = content.tensor(&mut file, tensor, &Device::Cpu).unwrap();
    let numbers = numbers.dequantize(&Device::Cpu).unwrap();
    let numbers: Vec<f32> = numbers.flatten_all().unwrap().to_vec1().unwrap();
    let scaled = numbers.iter().map(|number| number * factor);
    let bytes: Vec<u8> = scaled.flat_map(f32::to_le_bytes).collect();
    let start = content.tensor_data_offset + content.tensor_infos[tensor].offset;
    file.seek(SeekFrom::Start(start)).unwrap();
    file.write_all(&bytes).unwrap();
}
