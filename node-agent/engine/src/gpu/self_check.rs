//! Whether a GPU computes what the processor does: drivers have faults, and a ring would answer nonsense.

use std::slice;

use prima_model::KvFormat;

use super::backend::{DeviceHead, HeadWeights, error};
use crate::batch::Sequence;
use crate::cpu::{Compute, CpuLayers};
use crate::error::EngineError;
use crate::executor::Executor;
use crate::kernels;
use crate::kv_cache::KvCache;
use crate::model::Model;
use crate::residency::Residency;

/// Rows of the passes that are compared: many, few, and one more that sees them; products have a kernel for each, those of experts by other numbers
/// ([`passes`]). The many go on in a second block of keys and values, so that the others attend in parts which are then combined.
const PASSES: [usize; 3] = [prima_vulkan::KV_POSITIONS + 6, 3, 1];
const _: () = assert!(PASSES[0] > prima_vulkan::FEW_ROWS);
/// How far what a layer adds may be off. Both sides round, each in its own way, to a hundredth of it at most; a wrong kernel is off by all.
const BOUND: f32 = 0.1;
/// With experts: how many rows there are of each kind of pass, or more. A row that both sides round differently may go to another expert, where scores
/// are close, and is then off by what that one makes. Of the rows of a kind of pass, a quarter has to agree.
const ROWS_WITH_EXPERTS: usize = 8;

/// Rows of the output head that are compared: all go through the same kernels.
const HEAD_ROWS: usize = 256;

/// Runs made-up rows through the layer `layer` on `gpu`, which has only this one, and on the processor, in passes of at most `most_rows`.
///
/// # Errors
/// [`EngineError::Gpu`] when they do not agree.
pub(super) fn check(
    gpu: &dyn Executor,
    model: &Model,
    layer: usize,
    most_rows: usize,
) -> Result<(), EngineError> {
    let cpu = CpuLayers::load(model, layer..layer + 1, &Residency::mapped())?;
    let compute = Compute::new(Compute::available_threads())?;
    let experts = model.spec().layers[layer].feed_forward.experts.as_ref();
    let passes = passes(experts.map(|one| (one.count, one.used)), most_rows);
    let rows: usize = passes.iter().map(|(rows, times)| rows * times).sum();
    let layers = layer..layer + 1;
    let cache = || KvCache::new(model, slice::from_ref(&layers), rows, KvFormat::F16);
    let (mut on_cpu, mut on_gpu) = (cache(), cache());
    let context_length = rows;
    let mut first_position = 0;
    for (rows, times) in passes {
        let mut compared = Compared::default();
        for _ in 0..times {
            let input = numbers(first_position, rows * model.spec().hidden);
            let pass = |executor: &dyn Executor, kv: &mut KvCache| {
                let mut activation = input.clone();
                let sequence = kv.window(layers.clone()).map(|layers| Sequence {
                    context_length,
                    layers,
                    first_position,
                    rows,
                });
                let mut batch: Vec<Sequence<'_>> = sequence.into_iter().collect();
                executor.forward(&compute, &mut activation, &mut batch)?;
                Ok::<_, EngineError>(activation)
            };
            let expected = pass(&cpu, &mut on_cpu)?;
            let found = pass(gpu, &mut on_gpu)?;
            // All rows together, or one by one.
            let width = match experts {
                None => input.len(),
                Some(_) => model.spec().hidden,
            };
            for at in (0..input.len()).step_by(width) {
                let own = at..at + width;
                let (input, expected) = (&input[own.clone()], &expected[own.clone()]);
                let added = length(expected.iter().zip(input).map(|(a, b)| a - b));
                let rounding = 1e-5 * length(input.iter().copied());
                compared.add((&found[own], expected), added, rounding);
            }
            first_position += rows;
        }
        compared.check(&format!("layer {layer}"))?;
    }
    Ok(())
}

/// The rows of passes, and how many passes there are of each kind. `experts`: how many a layer has, and how many of them a row goes to.
fn passes(experts: Option<(usize, usize)>, most_rows: usize) -> Vec<(usize, usize)> {
    let Some((count, used)) = experts else {
        return PASSES.map(|rows| (rows, 1)).to_vec();
    };
    // So many that those of each expert are many, and so many that they are more than one: experts' products have kernels by how many rows an expert
    // gets on average. If a ring ever has them.
    let by_expert = [prima_vulkan::FEW_ROWS, 1].map(|rows| rows * count / used + 1);
    let by_expert = by_expert.into_iter().filter(|rows| *rows <= most_rows);
    let all = by_expert.chain(PASSES);
    all.map(|rows| (rows, ROWS_WITH_EXPERTS.div_ceil(rows)))
        .collect()
}

/// The part of the output head that is compared.
pub(super) fn part_of_head(weights: HeadWeights<'_>) -> HeadWeights<'_> {
    let rows = weights.matrix.rows().min(HEAD_ROWS);
    HeadWeights {
        matrix: weights.matrix.part(0..rows),
        ..weights
    }
}

/// Runs made-up rows through `head`, which has these `weights`, and on the processor.
///
/// # Errors
/// [`EngineError::Gpu`] when they do not agree.
pub(super) fn check_head(
    head: &dyn DeviceHead,
    weights: HeadWeights<'_>,
) -> Result<(), EngineError> {
    let HeadWeights {
        norm,
        norm_epsilon,
        matrix,
    } = weights;
    let compute = Compute::new(1)?;
    let pool = compute.pool();
    for rows in PASSES {
        let input = numbers(rows, rows * matrix.cols());
        let mut normed = vec![0.0; input.len()];
        kernels::rms_norm(pool, &input, norm, norm_epsilon, &mut normed);
        let mut expected = vec![0.0; rows * matrix.rows()];
        kernels::matmul(pool, &normed, rows, &mut [(matrix, &mut expected)]);
        let mut found = vec![0.0; expected.len()];
        head.logits(&input, &mut found)?;
        let all = length(expected.iter().copied());
        let mut compared = Compared::default();
        compared.add((&found, &expected), all, 0.0);
        compared.check("the output head")?;
    }
    Ok(())
}

/// How many of some results are what they should be.
#[derive(Default)]
struct Compared {
    agree: usize,
    differ: usize,
    /// By how much one that differs is off, and of how much.
    off: (f32, f32),
}

impl Compared {
    /// `found` is `expected` if they differ by `rounding` at most, and by a small share of `of`, the length of what was computed.
    fn add(&mut self, (found, expected): (&[f32], &[f32]), of: f32, rounding: f32) {
        let off = length(found.iter().zip(expected).map(|(a, b)| a - b));
        // What is no number does not agree.
        match off <= BOUND * of + rounding {
            true => self.agree += 1,
            false => {
                self.differ += 1;
                self.off = (off, of);
            }
        }
    }

    /// That enough agree: of one, it does.
    fn check(&self, what: &str) -> Result<(), EngineError> {
        if 3 * self.agree >= self.differ && self.agree > 0 {
            return Ok(());
        }
        let (off, of) = self.off;
        Err(error(
            "be used",
            format!(
                "{what} computed there differs from the processor's by {off} of {of}; is its driver at fault?"
            ),
        ))
    }
}

fn length(numbers: impl Iterator<Item = f32>) -> f32 {
    numbers.map(|number| number * number).sum::<f32>().sqrt()
}

/// Numbers in -1..1 without a pattern (a linear congruential generator; Knuth 1997, section 3.3.4).
fn numbers(seed: usize, count: usize) -> Vec<f32> {
    let mut state = seed as u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

#[cfg(test)]
mod tests {
    use prima_gguf::GgmlType;
    use prima_vulkan::ExpertTiles;

    use super::*;

    /// Of so many results that agree and that do not, whether that is enough.
    fn enough(agree: usize, differ: usize) -> bool {
        let mut compared = Compared::default();
        for (count, found) in [(agree, 1.05), (differ, f32::NAN)] {
            for _ in 0..count {
                compared.add((&[found], &[1.0]), 1.0, 0.0);
            }
        }
        compared.check("it").is_ok()
    }

    #[test]
    fn experts_many_rows_are_compared_where_passes_have_them() {
        assert_eq!(passes(None, 256), [(70, 1), (3, 1), (1, 1)]);
        let usual = [(70, 1), (3, 3), (1, 8)];
        let few = [&[(17, 1)][..], &usual].concat();
        assert_eq!(passes(Some((128, 8)), 256), few);
        let many = [&[(257, 1)][..], &few[..]].concat();
        assert_eq!(passes(Some((128, 8)), 512), many);
        let few = [&[(33, 1)][..], &usual].concat();
        assert_eq!(passes(Some((128, 4)), 512), few);
        // Of five rows that both sides round differently, more might go elsewhere than of ten.
        let both = [&[(65, 1), (5, 2)][..], &usual].concat();
        assert_eq!(passes(Some((8, 2)), 512), both);
        assert_eq!(passes(Some((128, 1)), 128), usual);
    }

    #[test]
    fn experts_few_rows_are_compared_in_every_mixture() {
        // Mixtral's, Llama 4's, DeepSeek's, Qwen's and others.
        for (count, used) in [
            (8, 2),
            (16, 1),
            (128, 1),
            (32, 4),
            (64, 6),
            (256, 8),
            (128, 8),
            (512, 10),
            (4, 4),
        ] {
            for format in [GgmlType::Q4K, GgmlType::F16] {
                // Rows that are rounded are not for the kernel for many, and that for one has no more choices than there are experts.
                let are_few = |rows: usize| {
                    let tiles = ExpertTiles::new(rows, used, count, [format; 3]).unwrap();
                    rows * used > count && tiles.input_bytes(256) > 0
                };
                let passes = passes(Some((count, used)), 512);
                assert!(
                    passes.iter().any(|(rows, _)| are_few(*rows)),
                    "{used} of {count}, {format}: {passes:?}"
                );
            }
        }
    }

    #[test]
    fn a_quarter_has_to_agree_and_of_one_it_does() {
        assert!(enough(1, 0) && enough(1, 3) && enough(5, 12));
        assert!(!enough(0, 1) && !enough(1, 4) && !enough(0, 0));
    }
}
