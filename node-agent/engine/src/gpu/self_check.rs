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

/// Rows of the passes that are compared: many, few, and one more that sees them; products have a kernel for each.
const PASSES: [usize; 3] = [prima_vulkan::FEW_ROWS + 1, 3, 1];
/// How far what a layer adds may be off. Both sides round, each in its own way, to a hundredth of it at most; a wrong kernel is off by all.
const BOUND: f32 = 0.1;

/// Rows of the output head that are compared: all go through the same kernels.
const HEAD_ROWS: usize = 256;

/// Runs made-up rows through the layer `layer` on `gpu`, which has only this one, and on the processor.
///
/// # Errors
/// [`EngineError::Gpu`] when they do not agree.
pub(super) fn check(gpu: &dyn Executor, model: &Model, layer: usize) -> Result<(), EngineError> {
    let cpu = CpuLayers::load(model, layer..layer + 1, &Residency::mapped())?;
    let compute = Compute::new(1)?;
    let rows: usize = PASSES.iter().sum();
    let layers = layer..layer + 1;
    let cache = || KvCache::new(model, slice::from_ref(&layers), rows, KvFormat::F16);
    let (mut on_cpu, mut on_gpu) = (cache(), cache());
    let mut first_position = 0;
    for rows in PASSES {
        let input = numbers(first_position, rows * model.spec().hidden);
        let pass = |executor: &dyn Executor, kv: &mut KvCache| {
            let mut activation = input.clone();
            let sequence = kv.window(layers.clone()).map(|layers| Sequence {
                context_length: PASSES.iter().sum(),
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
        let added = length(expected.iter().zip(&input).map(|(a, b)| a - b));
        let rounding = 1e-5 * length(input.iter().copied());
        agree(
            &format!("layer {layer}"),
            (&found, &expected),
            added,
            rounding,
        )?;
        first_position += rows;
    }
    Ok(())
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
        agree("the output head", (&found, &expected), all, 0.0)?;
    }
    Ok(())
}

/// That `found` is `expected`: they may differ by `rounding`, and by a small share of `of`, the length of what was computed.
fn agree(
    what: &str,
    (found, expected): (&[f32], &[f32]),
    of: f32,
    rounding: f32,
) -> Result<(), EngineError> {
    let off = length(found.iter().zip(expected).map(|(a, b)| a - b));
    // What is no number does not agree.
    match off <= BOUND * of + rounding {
        true => Ok(()),
        false => Err(error(
            "be used",
            format!(
                "{what} computed there differs from the processor's by {off} of {of}; is its driver at fault?"
            ),
        )),
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
