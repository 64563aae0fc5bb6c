//! What a newcomer runs: rings of several sizes and splits on this machine answer real prompts through HTTP, and
//! all say the same. That the logits are bit-identical is shown elsewhere; here whole programs are compared.

use std::path::Path;

use prima_tests::local_ring::{LocalRing, LocalRingBuilder, smollm2};
use prima_tests::{Endpoint, assets, http, split_model, wait_until};

const PROMPTS: [&str; 2] = ["The capital of France is", "def fibonacci(n):\n"];
const MAX_TOKENS: usize = 16;

#[test]
fn a_ring_of_three_names_the_primary_colors() {
    let ring = LocalRing::builder().model(&smollm2()).members(3).start();
    let answer = ring.chat("Name three primary colors.", 40).to_lowercase();
    for color in ["red", "blue"] {
        assert!(answer.contains(color), "{answer:?}");
    }
    ring.stop();
}

#[test]
fn rings_of_one_two_three_and_five_members_say_the_same() {
    let one = greedy(LocalRing::builder().members(1));
    assert!(one[0].contains("Paris"), "{one:?}");
    for members in [2, 3, 5] {
        assert_eq!(
            greedy(LocalRing::builder().members(members)),
            one,
            "{members} members"
        );
    }
}

#[test]
fn rounds_uneven_and_empty_windows_change_no_answer() {
    let whole = greedy(LocalRing::builder().members(1));
    let cases: [(&[usize], usize); 7] = [
        (&[30], 3),
        (&[10, 12, 8], 1),
        (&[1, 29], 2),
        (&[7, 16, 7], 2),
        (&[10, 10, 10], 3),
        (&[0, 30], 1),
        (&[13, 0, 17, 0], 3),
    ];
    for (split, rounds) in cases {
        assert_eq!(
            greedy(LocalRing::builder().split(split).rounds(rounds)),
            whole,
            "--split {split:?} --rounds {rounds}"
        );
    }
}

/// Windows of members begin at layers that see the last positions only, and at such that see all.
#[test]
fn gemma_says_the_same_in_every_ring() {
    let gemma = assets::path("models/gemma-3-270m-Q4_K_M.gguf").expect("a model");
    // Most of its layers see 512 positions, and give back what is further away than twice as many: this has more than 1300 tokens.
    let long: String = (1..=200)
        .map(|day| format!("On day {day} it rained. "))
        .collect();
    let says = |builder: LocalRingBuilder| {
        let ring = builder.model(&gemma).start();
        let texts = [PROMPTS[0], &long].map(|prompt| ring.complete(prompt, MAX_TOKENS));
        ring.stop();
        texts
    };
    let one = says(LocalRing::builder().members(1));
    assert!(
        one[0].contains("France") && one[1].contains("day"),
        "{one:?}"
    );
    for (split, rounds) in [(&[7, 11][..], 1), (&[5, 6, 7], 1), (&[10, 4, 4], 2)] {
        let found = says(LocalRing::builder().split(split).rounds(rounds));
        assert_eq!(found, one, "--split {split:?} --rounds {rounds}");
    }
}

#[test]
fn a_model_in_several_files_says_the_same() {
    let folder = tempfile::tempdir().expect("a folder");
    let first = split_model::in_three_files(&smollm2(), folder.path());
    let greedy = |path: &Path| {
        let ring = LocalRing::builder().model(path).split(&[14, 16]).start();
        let text = ring.complete(PROMPTS[0], MAX_TOKENS);
        ring.stop();
        text
    };
    assert_eq!(greedy(&first), greedy(&smollm2()));
}

#[test]
fn no_memory_for_weights_changes_no_answer() {
    let ring = || LocalRing::builder().model(&smollm2()).split(&[14, 16]);
    let usual = ring().start();
    let answer = usual.complete(PROMPTS[0], MAX_TOKENS);
    usual.stop();
    let starved = ring()
        .arg("--reserve-memory")
        .arg("500000000000000")
        .start();
    let metric = |name| http::metric(starved.address(), name).unwrap();
    // Weights are given back a moment after the start, and what the next tokens take may still be in the buffers; members tell of both with
    // every token.
    for told in [
        "prima_member_streamed_weight_bytes",
        "prima_member_read_bytes_total",
    ] {
        wait_until(told, || {
            assert_eq!(starved.complete(PROMPTS[0], MAX_TOKENS), answer);
            metric(told) > 0.0
        });
    }
    starved.stop();
}

#[test]
fn a_draft_model_changes_no_answer() {
    let exact = assets::path("models/SmolLM2-135M-Instruct-F32.gguf").expect("a model");
    let ring = || LocalRing::builder().model(&exact).members(2);
    let alone = ring().arg("--no-speculation").start();
    let answers = PROMPTS.map(|prompt| alone.complete(prompt, 60));
    alone.stop();
    let drafting = ring().arg("--draft").arg(smollm2()).start();
    let metric = |name| http::metric(drafting.address(), name).unwrap();
    // How many tokens are drafted goes by what passes take, so a busy machine drafts few at first.
    wait_until("drafts are accepted", || {
        assert_eq!(PROMPTS.map(|prompt| drafting.complete(prompt, 60)), answers);
        metric("prima_accepted_tokens_total") > 20.0
    });
    let (drafted, accepted) = (
        metric("prima_drafted_tokens_total"),
        metric("prima_accepted_tokens_total"),
    );
    assert!(accepted > 0.5 * drafted, "{accepted} of {drafted}");
    drafting.stop();
}

#[test]
fn a_draft_model_of_another_vocabulary_is_refused() {
    let other = assets::path("models/stories15M-F32.gguf").expect("a model");
    let ended = LocalRing::builder()
        .model(&smollm2())
        .members(1)
        .arg("--draft")
        .arg(other)
        .run_to_end();
    assert!(!ended.status.success());
    assert!(
        ended.stderr.contains("expected the same vocabulary"),
        "{}",
        ended.stderr
    );
}

/// The greedy continuations of all prompts by a ring that is started for them.
fn greedy(builder: LocalRingBuilder) -> Vec<String> {
    let ring = builder.model(&smollm2()).start();
    let texts = PROMPTS
        .iter()
        .map(|prompt| ring.complete(prompt, MAX_TOKENS))
        .collect();
    ring.stop();
    texts
}
