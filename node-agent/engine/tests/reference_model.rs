//! The engine's pass against the textbook: every weight as a number, every sum in f64, no cache, no batching, no code shared with the
//! engine but the decoding of weight formats (which has its own tests).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

use std::path::Path;

use half::f16;
use prima_engine::{Model, kernels};
use prima_gguf::GgmlType;

use prima_test_models::{MadeUpModel, Runner, WINDOW, greedy, smollm2};

#[test]
fn made_up_models_of_float_weights_agree_to_rounding() {
    let directory = tempfile::tempdir().unwrap();
    let plain = MadeUpModel {
        formats: vec![GgmlType::F32],
        ..MadeUpModel::default()
    };
    let variants = [
        ("llama, tied", plain.clone()),
        (
            "llama, untied",
            MadeUpModel {
                tied: false,
                ..plain.clone()
            },
        ),
        (
            "llama, RoPE factors",
            MadeUpModel {
                rope_factors: true,
                ..plain.clone()
            },
        ),
        (
            "llama, no grouped heads",
            MadeUpModel {
                kv_heads: 8,
                ..plain.clone()
            },
        ),
        (
            "qwen2",
            MadeUpModel {
                formats: vec![GgmlType::F32],
                ..MadeUpModel::qwen2()
            },
        ),
        (
            "qwen3",
            MadeUpModel {
                formats: vec![GgmlType::F32],
                ..MadeUpModel::of("qwen3")
            },
        ),
        (
            "gemma2",
            MadeUpModel {
                formats: vec![GgmlType::F32],
                ..MadeUpModel::of("gemma2")
            },
        ),
        (
            "gemma3",
            MadeUpModel {
                formats: vec![GgmlType::F32],
                ..MadeUpModel::of("gemma3")
            },
        ),
    ];
    let tokens: Vec<u32> = (0..90).map(|i| i * 7 % 96).collect();
    for (index, (name, model)) in variants.into_iter().enumerate() {
        let path = MadeUpModel {
            seed: index as u64,
            ..model
        }
        .write(directory.path());
        let difference = largest_difference(&path, &tokens);
        assert!(difference < 1e-3, "{name}: logits differ by {difference}");
    }
}

#[test]
fn quantized_weights_agree_to_the_rounding_of_activations() {
    let directory = tempfile::tempdir().unwrap();
    let path = MadeUpModel::default().write(directory.path());
    let tokens: Vec<u32> = (0..40).map(|i| i * 7 % 96).collect();
    let difference = largest_difference(&path, &tokens);
    assert!(difference < 0.4, "logits differ by {difference}");
}

/// Linear scaling divides positions: a model with factor 2 sees every second position of one without.
#[test]
fn linear_rope_scaling_divides_positions() {
    let directory = tempfile::tempdir().unwrap();
    let model = MadeUpModel {
        formats: vec![GgmlType::F32],
        ..MadeUpModel::default()
    };
    let plain = model.write(directory.path());
    let scaled = directory.path().join("scaled.gguf");
    model.write_with(&scaled, model.tensors(), |writer| {
        writer.metadata("llama.rope.scaling.type", "linear");
        writer.metadata("llama.rope.scaling.factor", 2.0_f32);
    });
    let last = |path: &Path| {
        let runner = Runner::new(path, 1);
        runner
            .logits(&mut runner.kv_cache(), &[3, 1, 4, 1, 5])
            .pop()
            .unwrap()
    };
    let (plain, scaled_logits) = (last(&plain), last(&scaled));
    assert!(
        plain
            .iter()
            .zip(&scaled_logits)
            .any(|(a, b)| (a - b).abs() > 0.01)
    );
    let difference = largest_difference(&scaled, &[3, 1, 4, 1, 5]);
    assert!(difference < 1e-3, "logits differ by {difference}");
}

#[test]
fn smollm2_agrees_and_picks_the_same_tokens() {
    // "<|im_start|>user\nWhat is the capital of France?" or so, and some rarer tokens.
    let tokens = [
        1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 40000, 9906,
    ];
    let runner = Runner::new(&smollm2(), 2);
    let ours = runner.logits(&mut runner.kv_cache(), &tokens);
    let theirs = Reference::new(&runner.model).logits(&tokens);
    for (position, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        let error = deviation(ours.iter().zip(theirs).map(|(a, b)| a - b));
        let spread = deviation(theirs.iter().copied());
        println!("position {position}: logits of {spread:.2} differ by {error:.3}");
        assert!(
            error < SMOLLM2_NOISE * spread,
            "position {position}: logits of {spread} differ by {error}"
        );
        let mut sorted = theirs.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        if sorted[0] - sorted[1] > 8.0 * error {
            assert_eq!(greedy(ours), greedy(theirs), "position {position}");
        }
    }
}

/// How much this model's logits may change because activations are rounded to 8 bits before every matrix.
const SMOLLM2_NOISE: f32 = 0.1;

/// Standard deviation: a constant added to all logits means nothing.
fn deviation(numbers: impl ExactSizeIterator<Item = f32> + Clone) -> f32 {
    let count = numbers.len() as f32;
    let mean = numbers.clone().sum::<f32>() / count;
    (numbers.map(|x| (x - mean).powi(2)).sum::<f32>() / count).sqrt()
}

fn largest_difference(path: &Path, tokens: &[u32]) -> f32 {
    let runner = Runner::new(path, 2);
    let ours = runner.logits(&mut runner.kv_cache(), tokens);
    let theirs = Reference::new(&runner.model).logits(tokens);
    assert_eq!(ours.len(), theirs.len());
    ours.iter()
        .zip(&theirs)
        .map(|(a, b)| difference(a, b))
        .fold(0.0, f32::max)
}

fn difference(ours: &[f32], theirs: &[f32]) -> f32 {
    assert_eq!(ours.len(), theirs.len());
    // A maximum passes over what is not a number.
    let mut numbers = ours.iter().chain(theirs);
    assert!(numbers.all(|x| x.is_finite()), "not a number");
    ours.iter()
        .zip(theirs)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

/// The model as numbers, read through the public header.
struct Reference<'a> {
    model: &'a Model,
    file: Vec<u8>,
}

struct Dense {
    cols: usize,
    numbers: Vec<f32>,
}

impl<'a> Reference<'a> {
    fn new(model: &'a Model) -> Self {
        Reference {
            model,
            file: std::fs::read(model.path()).unwrap(),
        }
    }

    fn tensor(&self, name: &str) -> Option<Dense> {
        let info = self.model.gguf().tensor(name)?;
        let (cols, rows) = (
            info.shape[0] as usize,
            (info.weights() / info.shape[0]) as usize,
        );
        let bytes = &self.file[info.offset as usize..][..info.byte_len as usize];
        let matrix = kernels::Matrix::new(info.ggml_type, rows, cols, bytes).unwrap();
        let mut numbers = vec![0.0; rows * cols];
        for (row, out) in numbers.chunks_exact_mut(cols).enumerate() {
            kernels::dequantize_row(matrix, row, out);
        }
        Some(Dense { cols, numbers })
    }

    fn logits(&self, tokens: &[u32]) -> Vec<Vec<f32>> {
        let embedding = self.tensor("token_embd.weight").unwrap();
        let mut rows: Vec<Vec<f64>> = tokens
            .iter()
            .map(|&token| {
                let row = embedding.row(token as usize).iter();
                let scale = match self.is_gemma() {
                    true => (embedding.cols as f64).sqrt(),
                    false => 1.0,
                };
                row.map(|x| f64::from(*x) * scale).collect()
            })
            .collect();
        for layer in 0..self.model.spec().layers.len() {
            self.layer(layer, &mut rows);
        }
        let norm = self.tensor("output_norm.weight").unwrap();
        let head = self.tensor("output.weight").unwrap_or(embedding);
        rows.iter()
            .map(|row| {
                let logits = head.times(&self.norm(row, &norm));
                let logits = logits.iter().map(|x| self.capped(*x, 30.0));
                logits.map(|x| x as f32).collect()
            })
            .collect()
    }

    fn layer(&self, layer: usize, rows: &mut [Vec<f64>]) {
        let spec = &self.model.spec().layers[layer].attention;
        let part = |name: &str| self.tensor(&format!("blk.{layer}.{name}"));
        let project = |name: &str, row: &[f64]| {
            let mut out = part(&format!("attn_{name}.weight")).unwrap().times(row);
            if let Some(bias) = part(&format!("attn_{name}.bias")) {
                out.iter_mut()
                    .zip(&bias.numbers)
                    .for_each(|(out, bias)| *out += f64::from(*bias));
            }
            out
        };
        let norm = part("attn_norm.weight").unwrap();
        let (mut queries, mut keys, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for (position, row) in rows.iter().enumerate() {
            let normed = self.norm(row, &norm);
            let head = |name: &str| {
                let heads = project(name, &normed);
                let heads = match part(&format!("attn_{name}_norm.weight")) {
                    Some(norm) => heads
                        .chunks_exact(spec.head_dim)
                        .flat_map(|head| self.norm(head, &norm))
                        .collect(),
                    None => heads,
                };
                self.rotated(layer, spec.head_dim, heads, position)
            };
            queries.push(head("q"));
            keys.push(halved(head("k")));
            values.push(halved(project("v", &normed)));
        }
        let output = part("attn_output.weight").unwrap();
        let (dim, group) = (spec.head_dim, spec.heads / spec.kv_heads);
        for (position, row) in rows.iter_mut().enumerate() {
            let mut attended = Vec::new();
            for head in 0..spec.heads {
                let of = |row: &[f64], head: usize| row[head * dim..][..dim].to_vec();
                let query = of(&queries[position], head);
                let first = (position + 1).saturating_sub(self.window(layer));
                let scores: Vec<f64> = keys[first..=position]
                    .iter()
                    .map(|key| dot(&query, &of(key, head / group)) / (dim as f64).sqrt())
                    .map(|score| self.capped(score, 50.0))
                    .collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> =
                    scores.iter().map(|score| (score - largest).exp()).collect();
                let sum: f64 = weights.iter().sum();
                attended.extend((0..dim).map(|i| {
                    let weighted = weights
                        .iter()
                        .zip(&values[first..])
                        .map(|(w, v)| w * of(v, head / group)[i]);
                    weighted.sum::<f64>() / sum
                }));
            }
            let attended = self.post_normed(layer, "post_attention", output.times(&attended));
            row.iter_mut().zip(attended).for_each(|(x, y)| *x += y);
        }

        let norm = part("ffn_norm.weight").unwrap();
        let [gate, up, down] =
            ["gate", "up", "down"].map(|name| part(&format!("ffn_{name}.weight")).unwrap());
        for row in rows {
            let normed = self.norm(row, &norm);
            let inner: Vec<f64> = gate
                .times(&normed)
                .iter()
                .zip(up.times(&normed))
                .map(|(gate, up)| match self.is_gemma() {
                    true => gelu(*gate) * up,
                    false => gate / (1.0 + (-gate).exp()) * up,
                })
                .collect();
            let inner = self.post_normed(layer, "post_ffw", down.times(&inner));
            row.iter_mut().zip(inner).for_each(|(x, y)| *x += y);
        }
    }

    fn norm(&self, row: &[f64], weight: &Dense) -> Vec<f64> {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (mean + f64::from(self.model.spec().norm_epsilon)).sqrt();
        row.iter()
            .zip(&weight.numbers)
            .map(|(x, w)| x * scale * f64::from(*w))
            .collect()
    }

    fn post_normed(&self, layer: usize, name: &str, row: Vec<f64>) -> Vec<f64> {
        match self.tensor(&format!("blk.{layer}.{name}_norm.weight")) {
            Some(norm) => self.norm(&row, &norm),
            None => row,
        }
    }

    fn is_gemma(&self) -> bool {
        self.architecture().starts_with("gemma")
    }

    fn architecture(&self) -> &str {
        self.model.spec().architecture
    }

    /// How many positions a layer sees.
    fn window(&self, layer: usize) -> usize {
        match self.architecture() {
            "gemma2" if layer.is_multiple_of(2) => WINDOW,
            "gemma3" if layer % 6 != 5 => WINDOW,
            _ => usize::MAX,
        }
    }

    fn capped(&self, x: f64, cap: f64) -> f64 {
        match self.architecture() {
            "gemma2" => cap * (x / cap).tanh(),
            _ => x,
        }
    }

    fn rotated(
        &self,
        layer: usize,
        head_dim: usize,
        mut heads: Vec<f64>,
        position: usize,
    ) -> Vec<f64> {
        let rope = self.model.spec().layers[layer].attention.rope.as_ref();
        let rope = rope.unwrap();
        let factors = self.tensor("rope_freqs.weight");
        let half = rope.dimensions / 2;
        let base: f64 = match self.architecture() {
            "gemma3" if layer == 5 => 1e6,
            "gemma3" => 1e4,
            _ => rope.base.into(),
        };
        for head in heads.chunks_exact_mut(head_dim) {
            for pair in 0..half {
                let exponent = -(pair as f64) / half as f64;
                let mut angle = position as f64 * base.powf(exponent);
                angle /= f64::from(rope.factor);
                if let Some(factors) = &factors {
                    angle /= f64::from(factors.numbers[pair]);
                }
                let (i, j) = match self.architecture() {
                    "qwen2" | "qwen3" | "gemma2" | "gemma3" => (pair, pair + half),
                    _ => (2 * pair, 2 * pair + 1),
                };
                let (a, b) = (head[i], head[j]);
                head[i] = a * angle.cos() - b * angle.sin();
                head[j] = a * angle.sin() + b * angle.cos();
            }
        }
        heads
    }
}

fn gelu(x: f64) -> f64 {
    let factor = (2.0 / std::f64::consts::PI).sqrt();
    0.5 * x * (1.0 + (factor * (x + 0.044_715 * x.powi(3))).tanh())
}

impl Dense {
    fn row(&self, row: usize) -> &[f32] {
        &self.numbers[row * self.cols..][..self.cols]
    }

    fn times(&self, x: &[f64]) -> Vec<f64> {
        assert_eq!(x.len(), self.cols);
        self.numbers
            .chunks_exact(self.cols)
            .map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum())
            .collect()
    }
}

/// As the KV cache keeps them.
fn halved(row: Vec<f64>) -> Vec<f64> {
    row.into_iter().map(|x| f16::from_f64(x).to_f64()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
