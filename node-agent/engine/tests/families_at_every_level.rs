//! Every family at every level of the kernels that the processor has. Run for other processors, too (QEMU, `processors_emulated`); these
//! must print the same digests.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "these are tests")]

mod support;

use prima_engine::Compute;
use prima_engine::kernels::IsaLevel;

use support::{FAMILIES, MadeUpModel, Runner, difference};

/// In units of the spread of the logits. Where products and sums are not fused, other activations round to another eighth bit.
const BOUND: f32 = 0.02;

#[test]
fn every_family_has_the_same_bits_at_every_level_that_fuses() {
    let directory = tempfile::tempdir().unwrap();
    for architecture in FAMILIES {
        let path = MadeUpModel::of(architecture).write(directory.path());
        let mut runner = Runner::new(&path, 2);
        let mut answers = IsaLevel::available().into_iter().map(|level| {
            runner.compute = Compute::at_level(2, level).unwrap();
            (level, logits(&runner))
        });
        let (_, plain) = answers.next().unwrap();
        let mut fused: Option<Vec<f32>> = None;
        for (level, found) in answers {
            let difference = difference(&found, &plain);
            assert!(
                difference < BOUND,
                "{architecture} at {level}: {difference}"
            );
            if level.fuses() {
                let first = fused.get_or_insert_with(|| found.clone());
                assert!(found == *first, "{architecture} at {level}: other bits");
            }
        }
        if let Some(logits) = fused {
            println!("{architecture}: {:016x}", digest(&logits));
        }
    }
}

/// After the last tokens of a prompt that is longer than windows and original contexts, and of some tokens one by one.
fn logits(runner: &Runner) -> Vec<f32> {
    let mut kv = runner.kv_cache();
    let prompt: Vec<u32> = (0..24).map(|token| token * 7 % 96).collect();
    let mut logits = runner.logits(&mut kv, &prompt).pop().unwrap();
    for token in 24..27 {
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
