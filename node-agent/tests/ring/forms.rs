//! Answers that have a form, or a bound on reasoning, on rings that draft: the same answers as token by token, in fewer trips.

use prima_gguf::{Metadata, Value};
use prima_node_agent::generation::{FinishReason, GenerationRequest};
use prima_text::{
    ChatTemplate, Constraint, Grammar, GrammarReader, Reasoning, ReasoningLimit, SamplingParams,
    Tokenizer,
};
use serde_json::json;

use crate::decoding::{Served, request};
use crate::harness::{ModelFile, plan, tokens};
use prima_test_models::MadeUpModel;

fn tokenizer(file: &ModelFile) -> Tokenizer {
    Tokenizer::from_gguf(&file.model.gguf().metadata).unwrap()
}

fn constraint(file: &ModelFile, grammar: Grammar) -> Option<Constraint> {
    let reader = GrammarReader::new(&tokenizer(file)).unwrap();
    Some(reader.read(grammar).unwrap())
}

fn schema() -> Grammar {
    Grammar::JsonSchema(json!({
        "type": "object",
        "properties": {
            "always-there": {"const": "what-is-always-said"},
            "chosen": {"enum": ["ab", "abba", "b"]},
            "number": {"type": "integer"},
        },
        "required": ["always-there", "chosen", "number"],
        "additionalProperties": false,
    }))
}

/// Every way to sample, each with a form.
fn requests(file: &ModelFile) -> Vec<GenerationRequest> {
    let formed = |grammar, prompt, seed, temperature| GenerationRequest {
        constraint: constraint(file, grammar),
        sampling: SamplingParams {
            temperature,
            seed,
            ..SamplingParams::default()
        },
        ..request(&tokens(prompt), 120)
    };
    vec![
        formed(schema(), 20, 0, 0.0),
        formed(schema(), 200, 1, 1.0),
        GenerationRequest {
            choices: 3,
            logprobs: Some(2),
            ..formed(schema(), 30, 2, 1.5)
        },
        GenerationRequest {
            stop: vec!["always-said".into()],
            ..formed(schema(), 10, 3, 1.0)
        },
        formed(Grammar::Regex("(ab){4,9}(c|d{20})!".into()), 40, 4, 1.0),
        formed(
            Grammar::Gbnf(r#"root ::= "abc" [0-9]{2} root | "the-end""#.into()),
            40,
            5,
            1.0,
        ),
    ]
}

#[tokio::test]
async fn answers_with_a_form_are_those_without_drafts() {
    let file = ModelFile::made_up();
    let split = || plan(&file.path, file.layers(), 3, &[1, 2, 3, 4, 4, 5]);
    let drafting = Served::over_plan(&file, split()).await;
    let single = Served::without_drafts(&file, split()).await;
    for (number, asked) in requests(&file).into_iter().enumerate() {
        let with = drafting.generate(asked.clone()).await;
        let without = single.generate(asked).await;
        assert_eq!(with.error, None, "request {number}");
        assert_eq!(with.choices, without.choices, "request {number}");
        // What the form leaves no choice of came along with another token.
        let drafts = with.usage.unwrap().drafts;
        assert!(drafts.accepted > 0, "request {number}: {drafts:?}");
    }
    drafting.only_keeps().await;
}

#[tokio::test]
async fn what_is_forced_comes_in_few_trips() {
    let file = ModelFile::made_up();
    let split = || plan(&file.path, file.layers(), 1, &[file.layers()]);
    let served = Served::over_plan(&file, split()).await;
    let text = "always-the-same-text".repeat(3);
    let asked = GenerationRequest {
        constraint: constraint(&file, Grammar::Regex(text.clone())),
        ..request(&tokens(20), 120)
    };
    let answer = served.generate(asked).await;
    let choice = &answer.choices[0];
    assert_eq!(choice.text, text);
    assert_eq!(choice.reason, Some(FinishReason::Stop));
    let usage = answer.usage.unwrap();
    // The first token comes with the prompt; after that 32 come along with each.
    assert_eq!(usage.drafts.drafted, usage.drafts.accepted);
    assert!(
        choice.tokens.len() - usage.drafts.accepted <= 3,
        "{usage:?}"
    );
}

#[tokio::test]
async fn forms_go_with_a_draft_model() {
    let made_up = MadeUpModel::of("gemma3");
    let stranger = MadeUpModel {
        seed: 99,
        ..made_up.clone()
    };
    let (file, stranger) = (ModelFile::of(made_up), ModelFile::of(stranger));
    let split = || plan(&file.path, file.layers(), 2, &[2, file.layers()]);
    let single = Served::without_drafts(&file, split()).await;
    for draft in [&file, &stranger] {
        let drafting = Served::with_draft_model(&file, split(), draft).await;
        for (number, asked) in requests(&file).into_iter().enumerate() {
            let with = drafting.generate(asked.clone()).await;
            let without = single.generate(asked).await;
            assert_eq!(with.choices, without.choices, "request {number}");
        }
        drafting.only_keeps().await;
    }
}

/// What a family of models that think does, after a prompt that opened a thought: at most so many tokens of it.
fn limit(file: &ModelFile, tokens: usize) -> Option<ReasoningLimit> {
    let template = "{{ messages }}<think>{{ '</think>' }}";
    let key = "tokenizer.chat_template".to_owned();
    let entries = vec![(key, Value::String(template.into()))];
    let metadata = Metadata::new("test", entries).unwrap();
    let tokenizer = tokenizer(file);
    let template = ChatTemplate::from_gguf(&metadata, &tokenizer).unwrap();
    let template = template.unwrap();
    let limit = ReasoningLimit::new(tokens, template.form(), Reasoning::Open, false, &tokenizer);
    Some(limit.unwrap().expect("a family that reasons"))
}

#[tokio::test]
async fn a_bound_on_reasoning_goes_with_drafts_and_choices() {
    let file = ModelFile::made_up();
    let split = || plan(&file.path, file.layers(), 2, &[2, 5]);
    let drafting = Served::over_plan(&file, split()).await;
    let with_model = Served::with_draft_model(&file, split(), &file).await;
    let single = Served::without_drafts(&file, split()).await;
    let mut accepted = 0;
    for (budget, choices, temperature) in [(0, 1, 0.0), (7, 1, 0.0), (25, 3, 1.0), (40, 2, 0.3)] {
        let asked = GenerationRequest {
            reasoning: limit(&file, budget),
            choices,
            sampling: SamplingParams {
                temperature,
                ..SamplingParams::default()
            },
            ..request(&tokens(20).repeat(4), 80)
        };
        let without = single.generate(asked.clone()).await;
        for served in [&drafting, &with_model] {
            let with = served.generate(asked.clone()).await;
            assert_eq!(with.choices, without.choices, "{budget} {choices}");
            accepted += with.usage.unwrap().drafts.accepted;
        }
        for choice in &without.choices {
            if choice.reason == Some(FinishReason::Length) {
                let (thought, _) = choice.text.split_once("</think>").expect("it ends");
                assert!(thought.chars().count() <= budget * 2, "{thought}");
            }
        }
    }
    assert!(accepted > 0);
}
