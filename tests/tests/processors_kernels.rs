//! The kernels of processors that this machine is not: each program takes the highest that its processor has, and these compute what plain Rust
//! computes, in every family of models.

use std::process::Command;

use prima_engine::kernels::IsaLevel;
use prima_tests::emulated::{
    CORTEX_A72, CORTEX_A76, HASWELL, NEHALEM, NEWEST_ARM, Processor, RASPBERRY_PI_5, natively,
    output,
};

/// Tests that take long under QEMU. It runs a part of each of the first three, under other names; the last computes nothing that depends on
/// the processor. (`tests/run` says so.)
const SLOW: [&str; 4] = [
    "a_row_has_the_same_bits_in_every_batch",
    "a_row_has_the_same_bits_however_a_prefill_is_cut",
    "products_are_exact_but_for_quantized_activations",
    "formats_without_a_codebook_dequantize_to_their_formulas",
];

#[test]
fn kernels_of_nehalem() {
    kernels(NEHALEM, &["sse4.1"]);
}

/// Most machines have AVX2, and ran them without an emulator (`prima-kernels`): there only their choice is left to see.
#[test]
fn kernels_of_haswell() {
    let levels = ["sse4.1", "avx2"];
    if IsaLevel::by_name("avx2").is_ok() {
        chosen(HASWELL, &levels);
    } else {
        kernels(HASWELL, &levels);
    }
}

#[test]
fn kernels_of_a_raspberry_pi_4() {
    kernels(CORTEX_A72, &["neon"]);
}

#[test]
fn kernels_of_a_raspberry_pi_5() {
    kernels(CORTEX_A76, &["neon", "neon-dotprod"]);
}

#[test]
fn kernels_of_the_newest_arm64() {
    kernels(NEWEST_ARM, &["neon", "neon-dotprod", "neon-i8mm"]);
}

/// `levels` are those that the processor has beside plain Rust.
fn chosen(processor: Processor, levels: &[&str]) {
    let printed = output(
        processor
            .run("kernels")
            .args(["--nocapture", "levels_are_named"]),
    );
    let named = format!("levels: scalar {}\n", levels.join(" "));
    assert!(printed.contains(&named), "{named}: {printed}");
}

/// The kernels' tests at the highest of `levels`. Each lower one is the highest of another processor.
fn kernels(processor: Processor, levels: &[&str]) {
    chosen(processor, levels);
    let mut command = processor.run("kernels");
    command.env("PRIMA_TEST_LEVELS", "highest");
    for slow in SLOW {
        command.args(["--skip", slow]);
    }
    let printed = output(&mut command);
    let products = "products_have_the_same_bits_at_every_level_that_fuses ... ok";
    assert!(printed.contains(products), "{printed}");
}

/// Each level computes what plain Rust does, within a bound; and those that fuse products with sums have the same bits on all processors.
/// This machine stands for x86-64, if it has such levels: emulated, that takes a minute more. (In parts, as each takes long.)
#[test]
fn dense_families_have_the_same_bits_on_every_processor() {
    families("dense_families", 11);
}

#[test]
fn mixtures_have_the_same_bits_on_every_processor() {
    families("mixtures", 9);
}

#[test]
fn options_have_the_same_bits_on_every_processor() {
    families("options", 20);
}

/// The tests whose names begin with `tests` print the digests of so many models.
fn families(tests: &str, count: usize) {
    const PROGRAM: &str = "families_at_every_level";
    let digests = |mut program: Command| {
        let printed = output(program.args([tests, "--nocapture"]));
        let digest = |line: &str| {
            line.split_once(": ")
                .is_some_and(|(_, digest)| digest.len() == 16)
        };
        let lines: Vec<String> = printed
            .lines()
            .filter(|line| digest(line))
            .map(str::to_owned)
            .collect();
        assert!(lines.len() == count, "{printed}");
        lines
    };
    // Both go through all levels that older ones have.
    let x86 = match IsaLevel::detect().fuses() {
        true => natively(PROGRAM),
        false => HASWELL.run(PROGRAM),
    };
    assert_eq!(digests(NEWEST_ARM.run(PROGRAM)), digests(x86));
}

/// Pages of its system are larger than the blocks in which weights are read. (Not those of experts: what the page cache has is asked with mincore,
/// for which QEMU 7.2 writes a byte for each of this machine's smaller pages, more than there is room for.)
#[test]
fn weights_stream_on_a_raspberry_pi_5() {
    let printed = output(&mut RASPBERRY_PI_5.run("streamed_weights"));
    assert!(
        printed.contains("every_budget_gives_the_same_bits ... ok"),
        "{printed}"
    );
}
