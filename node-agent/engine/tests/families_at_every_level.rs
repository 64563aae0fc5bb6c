//! Every family, and every option of one, at every level of the kernels that the processor has. Run for other processors, too (QEMU,
//! `processors_kernels`); these must print the same digests.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "these are tests")]

use prima_engine::Compute;
use prima_engine::kernels::IsaLevel;

use prima_test_models::options::{Variant, experts_in_mxfp4, options};
use prima_test_models::{FAMILIES, MadeUpModel, Runner, difference, layers_of_each_kind};

/// In units of the spread of the logits. Where products and sums are not fused, other activations round to another eighth bit.
const BOUND: f32 = 0.02;
/// With experts, such a rounding may also choose another expert.
const BOUND_OF_EXPERTS: f32 = 0.1;

#[test]
fn dense_families_have_the_same_bits_where_levels_fuse() {
    have_the_same_bits(families().filter(|family| family.model.experts == 0));
}

#[test]
fn mixtures_have_the_same_bits_where_levels_fuse() {
    let mixtures = families().filter(|family| family.model.experts > 0);
    have_the_same_bits(mixtures.chain([experts_in_mxfp4()]));
}

#[test]
fn options_have_the_same_bits_where_levels_fuse() {
    have_the_same_bits(options().into_iter());
}

fn families() -> impl Iterator<Item = Variant> {
    FAMILIES.into_iter().map(Variant::of)
}

fn have_the_same_bits(variants: impl Iterator<Item = Variant>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("made-up.gguf");
    for variant in variants {
        let name = variant.name;
        let variant = Variant {
            model: MadeUpModel {
                layers: layers_of_each_kind(name),
                ..variant.model
            },
            ..variant
        };
        let bound = match variant.model.experts {
            0 => BOUND,
            _ => BOUND_OF_EXPERTS,
        };
        variant.write(&path, |_| {});
        let mut runner = Runner::new(&path, 2);
        let mut answers = IsaLevel::available().into_iter().map(|level| {
            runner.compute = Compute::at_level(2, level).unwrap();
            (level, logits(&runner))
        });
        let (_, plain) = answers.next().unwrap();
        let mut fused: Option<Vec<f32>> = None;
        for (level, found) in answers {
            let difference = difference(&found, &plain);
            assert!(difference < bound, "{name} at {level}: {difference}");
            if level.fuses() {
                let first = fused.get_or_insert_with(|| found.clone());
                assert!(found == *first, "{name} at {level}: other bits");
            }
        }
        if let Some(logits) = fused {
            println!("{name}: {:016x}", digest(&logits));
        }
    }
}

/// After the last tokens of a prompt that is longer than windows and original contexts, and of some tokens one by one.
fn logits(runner: &Runner) -> Vec<f32> {
    let mut kv = runner.kv_cache();
    let prompt: Vec<u32> = (0..18).map(|token| token * 7 % 96).collect();
    let mut logits = runner.logits(&mut kv, &prompt).pop().unwrap();
    for token in 18..20 {
        logits.extend(runner.logits(&mut kv, &[token]).concat());
    }
    logits
}

/// FNV-1a of the bits.
fn digest(logits: &[f32]) -> u64 {
    let bytes = logits.iter().flat_map(|logit| logit.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |digest, byte| {
        (digest ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}
