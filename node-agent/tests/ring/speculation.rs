//! Drafts change how many trips an answer takes, and nothing else. How many tokens are drafted depends on what passes take, so bounds on
//! that are wide.

use prima_text::SamplingParams;

use crate::decoding::{Served, request};
use crate::harness::{ModelFile, plan, tokens};
use prima_node_agent::generation::GenerationRequest;
use prima_test_models::{FAMILIES, MadeUpModel};

/// Every way to sample, over prompts that repeat, so that there is something to guess.
fn requests() -> Vec<GenerationRequest> {
    let greedy = |count| request(&tokens(count).repeat(4), 60);
    let sampled = |seed, temperature| GenerationRequest {
        sampling: SamplingParams {
            temperature,
            seed,
            ..SamplingParams::default()
        },
        ..greedy(20)
    };
    vec![
        greedy(5),
        greedy(33),
        sampled(1, 0.3),
        sampled(2, 1.0),
        GenerationRequest {
            logprobs: Some(3),
            ..greedy(20)
        },
        GenerationRequest {
            choices: 3,
            ..sampled(3, 0.2)
        },
        GenerationRequest {
            sampling: SamplingParams {
                temperature: 0.0,
                repetition_penalty: 1.2,
                frequency_penalty: 0.3,
                ..SamplingParams::default()
            },
            ..greedy(20)
        },
        // Ends at the last position of the context.
        request(&tokens(100).repeat(4), 1000),
    ]
}

#[tokio::test]
async fn answers_with_drafts_are_those_without() {
    let file = ModelFile::made_up();
    let split = || plan(&file.path, file.layers(), 3, &[1, 2, 3, 4, 4, 5]);
    let drafting = Served::over_plan(&file, split()).await;
    let single = Served::without_drafts(&file, split()).await;
    for (number, asked) in requests().into_iter().enumerate() {
        let with = drafting.generate(asked.clone()).await;
        let without = single.generate(asked).await;
        assert_eq!(with.choices, without.choices, "request {number}");
    }
    assert_eq!(single.generator.status().borrow().drafts.drafted, 0);
    drafting.only_keeps().await;
    let drafts = drafting.generator.status().borrow().drafts;
    assert!(
        0 < drafts.accepted && drafts.accepted < drafts.drafted,
        "{drafts:?}"
    );
}

#[tokio::test]
async fn drafts_of_many_at_once_do_not_touch_one_another() {
    let file = ModelFile::made_up();
    let split = || plan(&file.path, file.layers(), 2, &[1, 2, 4, 5]);
    let drafting = Served::over_plan(&file, split()).await;
    let single = Served::without_drafts(&file, split()).await;
    let all = |served| {
        futures::future::join_all(
            requests()
                .into_iter()
                .map(|one| Served::generate(served, one)),
        )
    };
    let (with, without) = (all(&drafting).await, all(&single).await);
    for (number, (with, without)) in with.iter().zip(&without).enumerate() {
        assert_eq!(with.choices, without.choices, "request {number}");
    }
    drafting.only_keeps().await;
}

#[tokio::test]
async fn every_family_takes_its_drafts_back() {
    let (mut right, mut wrong) = (0, 0);
    for architecture in FAMILIES {
        let file = ModelFile::of(MadeUpModel::of(architecture));
        let layers = file.layers();
        let split = || plan(&file.path, layers, 2, &[2, layers]);
        let drafting = Served::over_plan(&file, split()).await;
        let single = Served::without_drafts(&file, split()).await;
        let asked = request(&tokens(12).repeat(5), 80);
        let with = drafting.generate(asked.clone()).await;
        let without = single.generate(asked).await;
        assert_eq!(with.choices, without.choices, "{architecture}");
        let drafts = with.usage.unwrap().drafts;
        right += drafts.accepted;
        wrong += drafts.drafted - drafts.accepted;
    }
    assert!(right > 0 && wrong > 0, "{right} right, {wrong} wrong");
}

#[tokio::test]
async fn a_draft_model_right_or_wrong_changes_no_answer() {
    for architecture in ["llama", "gemma3"] {
        let file = ModelFile::of(MadeUpModel::of(architecture));
        let stranger = ModelFile::of(MadeUpModel {
            seed: 99,
            ..MadeUpModel::of(architecture)
        });
        let split = || plan(&file.path, file.layers(), 2, &[2, file.layers()]);
        let single = Served::without_drafts(&file, split()).await;
        // Texts that repeat are guessed without any model, too.
        for (draft, least) in [(&file, 1), (&stranger, 0)] {
            let drafting = Served::with_draft_model(&file, split(), draft).await;
            for number in 0..2 {
                // The second is the next turn of the first.
                let asked = request(&tokens(40 + 20 * number), 50);
                let with = drafting.generate(asked.clone()).await;
                let without = single.generate(asked).await;
                assert_eq!(with.choices, without.choices, "{architecture}");
            }
            drafting.only_keeps().await;
            let drafts = drafting.generator.status().borrow().drafts;
            assert!(drafts.drafted > 0, "{architecture}: {drafts:?}");
            assert!(drafts.accepted >= least, "{architecture}: {drafts:?}");
        }
    }
}
