//! What is kept of a conversation: later requests compute less, and answer the same to the bit.

use futures::future::join_all;
use prima_node_agent::generation::GenerationRequest;

use crate::decoding::{Answer, Served, request};
use crate::harness::{CONTEXT, ModelFile, plan, tokens};
use prima_test_models::{FAMILIES, MadeUpModel, Random};

/// Requests of this key space and above find nothing that is kept.
const ALONE: u64 = 1 << 32;

/// With logprobs, so that equal answers are equal to the bit.
fn exactly(prompt: &[u32], max_tokens: usize, keyspace: u64) -> GenerationRequest {
    GenerationRequest {
        logprobs: Some(2),
        keyspace,
        ..request(prompt, max_tokens)
    }
}

#[tokio::test]
async fn the_next_turn_computes_only_what_is_new_in_every_family() {
    for architecture in FAMILIES {
        let file = ModelFile::of(MadeUpModel::of(architecture));
        let layers = file.layers();
        // Two rounds.
        let ends = [1, 2, 3, 4, 5, layers];
        let served = Served::over_plan(&file, plan(&file.path, layers, 3, &ends)).await;
        let prompt = tokens(150);
        let first = served.generate(exactly(&prompt, 20, 0)).await;
        let answer = &first.choices[0].tokens;
        let turn = [&prompt[..], answer, &tokens(9)].concat();
        let second = served.generate(exactly(&turn, 10, 0)).await;
        let afresh = served.generate(exactly(&turn, 10, ALONE)).await;
        assert_eq!(second.choices, afresh.choices, "{architecture}");
        assert_eq!(afresh.usage.unwrap().cached_tokens, 0);
        let cached = second.usage.unwrap().cached_tokens;
        assert!(
            cached >= prompt.len() + answer.len() - 1,
            "{architecture}: {cached} of {}",
            turn.len()
        );
        // The first answer again: its prompt is there, and one row is computed.
        let again = served.generate(exactly(&prompt, 20, 0)).await;
        assert_eq!(again.choices, first.choices, "{architecture}");
        served.only_keeps().await;
    }
}

#[tokio::test]
async fn a_thousand_mixed_requests_answer_as_if_nothing_were_kept() {
    let file = ModelFile::made_up();
    let served = Served::start(&file).await;
    let mut random = Random(17);
    let mut texts = vec![tokens(60)];
    let (mut cached, mut total) = (0, 0);
    for round in 0..250 {
        // Four at once: beginnings of earlier texts with something new.
        let prompts: Vec<Vec<u32>> = (0..4)
            .map(|_| {
                let base = &texts[random.within(0..texts.len())];
                let cut = random.within(0..base.len().min(120) + 1);
                [&base[..cut], &tokens(random.within(1..40))].concat()
            })
            .collect();
        let ask = |keyspace: u64| {
            let served = &served;
            let prompts = prompts.iter().zip(keyspace..);
            join_all(prompts.map(move |(prompt, number)| {
                let own = if keyspace == 0 { 0 } else { number };
                served.generate(exactly(prompt, 6, own))
            }))
        };
        let kept = ask(0).await;
        let afresh = ask(ALONE + 4 * round).await;
        for (prompt, (kept, afresh)) in prompts.iter().zip(kept.iter().zip(&afresh)) {
            assert_eq!(kept.choices, afresh.choices, "{prompt:?}");
            assert_eq!(afresh.usage.unwrap().cached_tokens, 0);
            let usage = kept.usage.unwrap();
            cached += usage.cached_tokens;
            total += usage.prompt_tokens;
            texts.push([&prompt[..], &kept.choices[0].tokens].concat());
        }
        let from = texts.len().saturating_sub(12);
        texts.drain(..from);
    }
    assert!(4 * cached > total, "{cached} of {total} tokens were kept");
    served.only_keeps().await;
}

#[tokio::test]
async fn requests_that_fill_the_context_together_are_all_answered() {
    let file = ModelFile::made_up();
    let served = Served::start(&file).await;
    // Each may use the whole context, and there is memory for two.
    let prompts: Vec<Vec<u32>> = (0..8).map(|index| tokens(40 + index)).collect();
    let ask = |prompt: &Vec<u32>| served.generate(exactly(prompt, CONTEXT, 0));
    let together: Vec<Answer> = join_all(prompts.iter().map(ask)).await;
    for (prompt, answer) in prompts.iter().zip(&together) {
        assert_eq!(answer.error, None);
        let alone = served.generate(exactly(prompt, CONTEXT, ALONE)).await;
        assert_eq!(answer.choices, alone.choices);
    }
    served.only_keeps().await;
}
