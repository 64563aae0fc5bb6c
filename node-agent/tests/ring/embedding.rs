//! Vectors of texts: what a ring makes of them is what one process makes, however the model and the text are cut.

use prima_engine::Model;
use prima_node_agent::generation::{GenerationRequest, Instead, SubmitError};

use crate::decoding::{Served, request};
use crate::harness::{ModelFile, plan, tokens};
use prima_test_models::options::Variant;
use prima_test_models::{FAMILIES, MadeUpModel, Runner};

const MEAN: u32 = 1;
const CLS: u32 = 2;
const LAST: u32 = 3;
const RANK: u32 = 4;

fn embedded(prompt: &[u32], dimensions: Option<usize>) -> GenerationRequest {
    GenerationRequest {
        instead: Some(Instead::Embedding { dimensions }),
        ..request(prompt, 0)
    }
}

async fn vector(served: &Served, prompt: &[u32], dimensions: Option<usize>) -> Vec<f32> {
    let answer = served.generate(embedded(prompt, dimensions)).await;
    assert_eq!(answer.error, None);
    let usage = answer.usage.unwrap();
    assert_eq!(
        (usage.prompt_tokens, usage.completion_tokens),
        (prompt.len(), 0)
    );
    answer.vector.unwrap()
}

async fn ring(file: &ModelFile, members: usize) -> Served {
    let ends: &[usize] = match members {
        1 => &[file.layers()],
        _ => &[1, 2, 3, 4, 4, file.layers()],
    };
    Served::over_plan(file, plan(&file.path, file.layers(), members, ends)).await
}

/// What one process makes of the text in one batch, pooled here by hand.
fn alone(file: &ModelFile, prompt: &[u32], pooling: u32) -> Vec<f64> {
    let runner = Runner::split(&file.model, &[file.layers()], 1);
    let states = runner.states(&mut runner.kv_cache(), prompt);
    let pooled: Vec<f64> = match pooling {
        MEAN => (0..states[0].len())
            .map(|nth| states.iter().map(|state| f64::from(state[nth])).sum())
            .collect(),
        _ => states
            .last()
            .unwrap()
            .iter()
            .map(|&number| number.into())
            .collect(),
    };
    let length = pooled
        .iter()
        .map(|number| number * number)
        .sum::<f64>()
        .sqrt();
    pooled.iter().map(|number| number / length).collect()
}

fn cosine(a: &[f32], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * b).sum()
}

#[tokio::test]
async fn one_member_and_three_make_the_same_vectors() {
    for pooling in [MEAN, LAST] {
        let file = ModelFile::pooled(MadeUpModel::default(), Some(pooling));
        let (one, three) = (ring(&file, 1).await, ring(&file, 3).await);
        // One to four chunks.
        for length in [1, 2, 64, 127, 129, 300, 512] {
            let prompt = tokens(length);
            let made = vector(&three, &prompt, None).await;
            assert_eq!(made, vector(&one, &prompt, None).await, "{length}");
            let expected = alone(&file, &prompt, pooling);
            assert!(cosine(&made, &expected) > 0.999_99, "{length}");
        }
    }
}

#[tokio::test]
async fn every_family_has_vectors() {
    for architecture in FAMILIES {
        for pooling in [MEAN, LAST] {
            let file = ModelFile::pooled(MadeUpModel::of(architecture), Some(pooling));
            let served = ring(&file, 3).await;
            let prompt = tokens(150);
            let made = vector(&served, &prompt, None).await;
            let near = cosine(&made, &alone(&file, &prompt, pooling));
            assert!(near > 0.999_9, "{architecture}: {near}");
        }
    }
}

#[tokio::test]
async fn a_file_that_says_nothing_has_the_last_state() {
    let prompt = tokens(40);
    for pooling in [None, Some(0)] {
        let file = ModelFile::pooled(MadeUpModel::default(), pooling);
        let served = ring(&file, 1).await;
        let made = vector(&served, &prompt, None).await;
        assert!(cosine(&made, &alone(&file, &prompt, LAST)) > 0.999_99);
    }
}

#[tokio::test]
async fn a_kept_prefix_changes_no_vector() {
    for pooling in [MEAN, LAST] {
        let file = ModelFile::pooled(MadeUpModel::default(), Some(pooling));
        let served = ring(&file, 3).await;
        let prompt = tokens(300);
        let before = vector(&served, &prompt, None).await;
        served.generate(request(&prompt[..200], 5)).await;
        let answer = served.generate(embedded(&prompt, None)).await;
        let cached = answer.usage.unwrap().cached_tokens;
        assert_eq!(cached > 0, pooling == LAST, "{cached} cached");
        let after: Vec<f64> = answer
            .vector
            .unwrap()
            .iter()
            .map(|&one| one.into())
            .collect();
        assert!(cosine(&before, &after) > 0.999_99);
        served.only_keeps().await;
    }
}

#[tokio::test]
async fn answers_and_vectors_at_once_are_those_alone() {
    let file = ModelFile::pooled(MadeUpModel::default(), Some(MEAN));
    let served = ring(&file, 3).await;
    let prompts: Vec<Vec<u32>> = [3, 200, 17, 300].map(tokens).into();
    let vectors = prompts.iter().map(|prompt| vector(&served, prompt, None));
    let answers = prompts
        .iter()
        .map(|prompt| served.generate(request(prompt, 20)));
    let (vectors, answers) = futures::join!(
        futures::future::join_all(vectors),
        futures::future::join_all(answers)
    );
    for ((prompt, made), answer) in prompts.iter().zip(vectors).zip(answers) {
        assert!(cosine(&made, &alone(&file, prompt, MEAN)) > 0.999_99);
        assert_eq!(
            answer.choices[0].tokens,
            crate::decoding::alone(&file, prompt, 20)
        );
    }
    served.only_keeps().await;
}

#[tokio::test]
async fn fewer_dimensions_are_the_first_at_length_1() {
    let file = ModelFile::pooled(MadeUpModel::default(), Some(LAST));
    let served = ring(&file, 1).await;
    let prompt = tokens(9);
    let whole = vector(&served, &prompt, Some(256)).await;
    assert_eq!(whole, vector(&served, &prompt, None).await);
    let part = vector(&served, &prompt, Some(32)).await;
    assert_eq!(part.len(), 32);
    let length: f32 = whole[..32]
        .iter()
        .map(|number| number * number)
        .sum::<f32>()
        .sqrt();
    for (part, whole) in part.iter().zip(&whole) {
        assert!((part - whole / length).abs() < 1e-6);
    }
    let refused = served.generator.submit(embedded(&prompt, Some(257))).await;
    let field = |error| match error {
        Some(SubmitError::Invalid { field, problem }) => (field, problem),
        other => panic!("{other:?}"),
    };
    let (named, problem) = field(refused.err());
    assert!(
        named == "dimensions" && problem.contains("256"),
        "{problem}"
    );
}

#[tokio::test]
async fn one_member_and_three_give_the_same_scores() {
    let made_up = MadeUpModel {
        scores: 2,
        ..MadeUpModel::of("qwen3")
    };
    let file = ModelFile::pooled(made_up, Some(RANK));
    let (one, three) = (ring(&file, 1).await, ring(&file, 3).await);
    let mut scores = Vec::new();
    for length in [1, 2, 64, 129, 300] {
        let prompt = tokens(length);
        let ranked = || GenerationRequest {
            instead: Some(Instead::Score),
            ..request(&prompt, 0)
        };
        let runner = Runner::split(&file.model, &[file.layers()], 1);
        let last = runner.scores(&mut runner.kv_cache(), &prompt).pop();
        let last = last.unwrap();
        let expected = 1.0 / (1.0 + (last[1] - last[0]).exp());
        let answer = three.generate(ranked()).await;
        assert_eq!(answer.usage.unwrap().completion_tokens, 0);
        let score = answer.score.unwrap();
        assert!((score - expected).abs() < 1e-5, "{score} {expected}");
        assert_eq!(one.generate(ranked()).await.score, Some(score));
        scores.push(score);
    }
    assert!(scores.iter().any(|score| *score != scores[0]), "{scores:?}");
    three.only_keeps().await;
}

#[tokio::test]
async fn poolings_that_need_other_models_are_refused_by_name() {
    for (pooling, name) in [(CLS, "cls"), (RANK, "rank")] {
        let file = ModelFile::pooled(MadeUpModel::default(), Some(pooling));
        let served = ring(&file, 1).await;
        match served.generator.submit(embedded(&tokens(3), None)).await {
            Err(SubmitError::Invalid { field, problem }) => {
                assert!(field == "model" && problem.contains(name), "{problem}");
            }
            other => panic!("{other:?}"),
        }
        let ranked = GenerationRequest {
            instead: Some(Instead::Score),
            ..request(&tokens(3), 0)
        };
        let refused = served.generator.submit(ranked).await;
        assert!(matches!(
            refused,
            Err(SubmitError::Invalid { field: "model", .. })
        ));
        // It generates as ever.
        assert!(
            served
                .generate(request(&tokens(3), 2))
                .await
                .error
                .is_none()
        );
    }
    let unknown = Variant {
        model: MadeUpModel::default(),
        keys: vec![("pooling_type", 5_u32.into())],
        ..Variant::of("llama")
    };
    let folder = tempfile::tempdir().unwrap();
    let error = Model::open(&ModelFile::write(&unknown, folder.path()))
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("llama.pooling_type"), "{error}");
}
