//! Every family of models beside llama.cpp (PyPI xllamacpp): the log probabilities of the 20 most likely tokens at each place of a text.
//!
//! Once with trained weights of a small model, written out as each family's file with all its parts (`make_models.py`). All of them are F32,
//! so what is rounded is the KV cache, to F16, and in llama.cpp GELU, by a table of F16. And once with random weights, made up here, in the
//! kinds of formats that weights come in; llama.cpp has them written out as F32, so what is rounded beside are our activations. Of these
//! there is one for each family, and one for each part that only some files of a family have.

use std::fs;
use std::path::{Path, PathBuf};

use prima_engine::Compute;
use prima_engine::kernels::IsaLevel;
use prima_gguf::GgmlType;
use prima_test_models::options::{Variant, add_factors, experts_in_mxfp4, options};
use prima_test_models::{FAMILIES, MadeUpModel, Random, characters_as_tokens};
use prima_tests::assets;
use prima_tests::one_process::{Logprobs, OneProcess, lower_levels};
use prima_tests::oracle::{self, Request, Text, TextJob};
use prima_text::most_likely;

/// Of the engine: every part of every family is computed by two. Of llama.cpp's, two would wait for each other where other tests run beside these.
const THREADS: usize = 2;
const WINDOW: usize = 256;
const WINDOWS: usize = 2;
const TOP: usize = 20;
/// The largest difference of such a log probability.
const BOUND: f32 = 0.05;
/// Less likely tokens are never chosen.
const NEVER: f32 = -20.0;
/// The part of the places at which a quantized mixture is within the bound of other models. At the rest, rounding may have chosen another
/// expert. An error in a single expert of one layer is at more places than the rest: a token uses three of eight. Where it uses all eight, every
/// place is within the bound.
const UNDISTURBED: f64 = 0.75;

#[test]
fn llama_with_biases_computes_what_llama_cpp_does() {
    agrees("llama-biases");
}

#[test]
fn llama_with_yarn_computes_what_llama_cpp_does() {
    agrees("llama-yarn");
}

#[test]
fn qwen3_computes_what_llama_cpp_does() {
    agrees("qwen3");
}

#[test]
fn gemma2_computes_what_llama_cpp_does() {
    agrees("gemma2");
}

#[test]
fn gemma3_computes_what_llama_cpp_does() {
    agrees("gemma3");
}

#[test]
fn phi3_computes_what_llama_cpp_does() {
    agrees("phi3");
}

#[test]
fn mistral3_computes_what_llama_cpp_does() {
    agrees("mistral3");
}

#[test]
fn smollm3_computes_what_llama_cpp_does() {
    agrees("smollm3");
}

#[test]
fn olmo2_computes_what_llama_cpp_does() {
    agrees("olmo2");
}

#[test]
fn granite_computes_what_llama_cpp_does() {
    agrees("granite");
}

#[test]
fn glm4_computes_what_llama_cpp_does() {
    agrees("glm4");
}

fn agrees(family: &str) {
    let model = assets::path(&format!("models/stories15M-{family}-F32.gguf")).unwrap();
    let text = TextJob {
        path: assets::path("text/moby-dick.txt").unwrap(),
        window: WINDOW,
        windows: WINDOWS,
        top: TOP,
        of: Vec::new(),
    };
    let request = request(&model, text);
    let expected = oracle::ask(&request).unwrap().text.unwrap();
    let best = IsaLevel::detect();
    let mut engine = OneProcess::open_at_level(&model, THREADS, best).unwrap();
    let rows = logprobs(&engine, &expected);
    let decided = compare(family, BOUND, &rows, &expected);
    assert!(
        decided > rows.len() / 2,
        "{decided} of {} places are decided",
        rows.len()
    );

    // Levels have the same bits, but for those that cannot fuse a product and a sum, or do not.
    let some = &expected.tokens[..WINDOW / 4];
    for level in lower_levels() {
        engine.compute = Compute::at_level(THREADS, level).unwrap();
        let found = all_but_the_last(&engine, some);
        match level.name() {
            "scalar" | "sse4.1" => {
                compare(&format!("{family} at {level}"), BOUND, &found, &expected);
            }
            _ => assert!(
                found[..] == rows[..found.len()],
                "{family}: other logits at {level} than at {best}"
            ),
        }
    }
}

/// After each token but the last of every window.
fn logprobs(engine: &OneProcess, text: &Text) -> Vec<Logprobs> {
    let windows = text.tokens.chunks(WINDOW);
    let rows = windows.flat_map(|tokens| all_but_the_last(engine, tokens));
    rows.collect()
}

/// The log probabilities after each token but the last.
fn all_but_the_last(engine: &OneProcess, tokens: &[u32]) -> Vec<Logprobs> {
    let mut kv = engine.sequence(WINDOW);
    let places = 0..tokens.len() - 1;
    let logits = engine.logits_after(tokens, places, &mut kv).unwrap();
    let rows = logits.chunks(engine.model.spec().vocabulary);
    rows.map(Logprobs::of).collect()
}

/// Panics when a log probability differs by more than `bound`, or another token is the most likely where the gap is wide enough to decide it.
/// Returns at how many places it is.
fn compare(name: &str, bound: f32, rows: &[Logprobs], expected: &Text) -> usize {
    let mut largest = 0_f32;
    for (place, (row, top)) in rows.iter().zip(&expected.top).enumerate() {
        let (token, difference) = largest_difference(row, top);
        largest = largest.max(difference);
        assert!(
            difference <= bound,
            "{name}, place {place}: token {token} has {}, which differs by {difference} from llama.cpp's",
            row.token(token)
        );
    }
    let decided = greedy_agrees(name, 2.0 * bound, rows, expected);
    let count = rows.len();
    println!(
        "{name}: a top-{TOP} logprob differs by up to {largest}; {decided} of {count} places are decided"
    );
    decided
}

/// The token whose log probability differs most at one place, and by how much.
fn largest_difference(row: &Logprobs, top: &[(u32, f32)]) -> (u32, f32) {
    let likely = top.iter().filter(|(_, logprob)| *logprob > NEVER);
    let differences = likely.map(|&(token, logprob)| (token, (row.token(token) - logprob).abs()));
    // What is not a number is the largest.
    let largest = differences.max_by(|(_, a), (_, b)| a.total_cmp(b));
    largest.expect("a likely token")
}

#[test]
fn every_family_in_f32_computes_what_llama_cpp_does() {
    made_up(FAMILIES.map(Variant::of), GgmlType::F32, 0.01);
}

#[test]
fn every_family_in_f16_computes_what_llama_cpp_does() {
    made_up(FAMILIES.map(Variant::of), GgmlType::F16, 0.01);
}

#[test]
fn every_family_in_q8_0_is_as_near_as_llama_cpp() {
    made_up(FAMILIES.map(Variant::of), GgmlType::Q8_0, 0.2);
}

#[test]
fn every_family_in_q4_k_is_as_near_as_llama_cpp() {
    made_up(FAMILIES.map(Variant::of), GgmlType::Q4K, 1.0);
}

/// With other matrices in Q8_0, as in its files.
#[test]
fn gpt_oss_in_mxfp4_is_as_near_as_llama_cpp() {
    made_up([experts_in_mxfp4()], GgmlType::Q8_0, 0.2);
}

#[test]
fn every_option_in_f32_computes_what_llama_cpp_does() {
    made_up(options(), GgmlType::F32, 0.01);
}

#[test]
fn every_option_in_f16_computes_what_llama_cpp_does() {
    made_up(options(), GgmlType::F16, 0.01);
}

#[test]
fn every_option_in_q8_0_is_as_near_as_llama_cpp() {
    made_up(options(), GgmlType::Q8_0, 0.2);
}

#[test]
fn every_option_in_q4_k_is_as_near_as_llama_cpp() {
    made_up(options(), GgmlType::Q4K, 1.0);
}

#[test]
fn gemma_of_27b_in_f32_computes_what_llama_cpp_does() {
    made_up(gemma_of_27b(), GgmlType::F32, BOUND);
}

#[test]
fn gemma_of_27b_in_f16_computes_what_llama_cpp_does() {
    made_up(gemma_of_27b(), GgmlType::F16, BOUND);
}

#[test]
fn gemma_of_27b_quantized_is_as_near_as_llama_cpp() {
    made_up(gemma_of_27b(), GgmlType::Q8_0, 0.2);
    made_up(gemma_of_27b(), GgmlType::Q4K, 2.0);
}

/// Gemma's largest models, which are known by their number of layers, scale queries by hidden / heads, and not by the width of a head. What
/// rounding the KV cache does grows from layer to layer.
fn gemma_of_27b() -> [Variant; 2] {
    [("gemma2", 46), ("gemma3", 62)].map(|(family, layers)| Variant {
        model: MadeUpModel {
            layers,
            hidden: 256,
            heads: 4,
            kv_heads: 1,
            head_dim: Some(128),
            feed_forward: 256,
            ..MadeUpModel::of(family)
        },
        ..Variant::of(family)
    })
}

/// LongRoPE goes by the context that there is memory for, and not by how long a text is: here more than what the model was first trained
/// for, or less.
#[test]
fn longrope_goes_by_the_context_that_is_planned() {
    const ORIGINAL: u32 = 1024;
    let folder = tempfile::tempdir().unwrap();
    let text = random_text(folder.path());
    let variant = Variant {
        model: MadeUpModel {
            formats: vec![GgmlType::F32],
            context_length: 2 * ORIGINAL,
            stretched: false,
            ..MadeUpModel::of("phi3")
        },
        keys: vec![
            ("rope.scaling.type", "longrope".into()),
            ("rope.scaling.original_context_length", ORIGINAL.into()),
        ],
        change: add_factors,
        ..Variant::of("phi3")
    };
    let path = folder.path().join("phi3.gguf");
    variant.write(&path, characters_as_tokens);
    let [short, long] = [ORIGINAL / 2, 2 * ORIGINAL].map(|context| {
        let context = context as usize;
        let expected = oracle::ask(&Request {
            context,
            ..request(&path, whole(&text, TOP))
        });
        let expected = expected.unwrap().text.unwrap();
        let engine = OneProcess::open_for_context(&path, THREADS, context).unwrap();
        let rows = all_but_the_last(&engine, &expected.tokens);
        compare(&format!("planned for {context}"), 0.01, &rows, &expected);
        rows
    });
    let pairs = short.iter().zip(&long);
    let most = pairs.flat_map(|(short, long)| {
        let tokens = 0..short.logits().len() as u32;
        tokens.map(move |token| (short.token(token) - long.token(token)).abs())
    });
    assert!(
        most.fold(0.0, f32::max) > 0.1,
        "the context changes nothing"
    );
}

const LENGTH: usize = 48;

/// A file of so many random characters.
fn random_text(folder: &Path) -> PathBuf {
    let path = folder.join("text");
    let mut random = Random(1);
    let characters = (0..LENGTH).map(|_| random.within(34..126) as u8);
    fs::write(&path, characters.collect::<Vec<u8>>()).unwrap();
    path
}

/// What llama.cpp makes of a text.
fn request(model: &Path, text: TextJob) -> Request {
    Request {
        model: model.to_owned(),
        exact: false,
        quantized_kv: false,
        threads: 1,
        context: text.window,
        greedy: Vec::new(),
        text: Some(text),
    }
}

/// The random text, in one window.
fn whole(text: &Path, top: usize) -> TextJob {
    TextJob {
        path: text.to_owned(),
        window: LENGTH,
        windows: 1,
        top,
        of: Vec::new(),
    }
}

/// Random models, all matrices in one format unless a variant says otherwise; windows are of 8 positions, and the text of 48.
fn made_up(variants: impl IntoIterator<Item = Variant>, format: GgmlType, bound: f32) {
    let folder = tempfile::tempdir().unwrap();
    let text = random_text(folder.path());
    let (mut places, mut decided_places) = (0, 0);
    // Where activations are rounded, another expert may be chosen where scores are close, and then all numbers are others. So mixtures are
    // compared without a choice, too, and then as other models are.
    let rounds = format.block_len() > 1;
    let variants = variants.into_iter().flat_map(|variant| {
        let without = variant.without_choice();
        // What rounding does grows from layer to layer. Of 27 in Q4_K (deepseek2 as V2-Lite), a bound would say nothing: the root mean square
        // is 0.36, llama.cpp's 0.34.
        let says_nothing = format == GgmlType::Q4K && variant.model.layers > 20;
        let without = without.filter(|_| rounds && !says_nothing);
        [variant].into_iter().chain(without)
    });
    for variant in variants {
        let model = MadeUpModel {
            formats: vec![format],
            ..variant.model.clone()
        };
        let path = folder.path().join(format!("{}.gguf", variant.name));
        let variant = Variant { model, ..variant };
        variant.write(&path, characters_as_tokens);
        let ask = |exact, top| {
            let request = Request {
                exact,
                ..request(&path, whole(&text, top))
            };
            oracle::ask(&request).unwrap().text.unwrap()
        };
        // A file of F32 is exact.
        let exact = ask(format != GgmlType::F32, TOP);
        let engine = OneProcess::open(&path, THREADS).unwrap();
        let rows = all_but_the_last(&engine, &exact.tokens);
        let name = match variant.model.experts_per_token == variant.model.experts {
            true => format!("{} in {format}, all experts", variant.name),
            false => format!("{} in {format}", variant.name),
        };
        if !rounds {
            let decided = compare(&name, bound, &rows, &exact);
            assert!(
                decided > rows.len() / 3,
                "{name}: {decided} places are decided"
            );
            continue;
        }
        // Both round activations to eight bits. In random layers that grows, more in some families than in others.
        let all = ask(false, variant.model.vocabulary);
        let peers: Vec<Logprobs> = all
            .top
            .iter()
            .map(|top| {
                let mut row = vec![0.0; variant.model.vocabulary];
                top.iter()
                    .for_each(|&(token, logprob)| row[token as usize] = logprob);
                Logprobs::of(&row)
            })
            .collect();
        let rounds_choices = variant.chooses();
        let distance = match rounds_choices {
            true => median_distance,
            false => distance,
        };
        let [own, noise] = [&rows, &peers].map(|rows| distance(rows, &exact));
        println!("{name}: distance to the exact logprobs {own:.4}, llama.cpp's {noise:.4}");
        assert!(own <= 1.3 * noise, "{name}: {own}, llama.cpp {noise}");
        if rounds_choices {
            are_mostly_near(&name, bound, [&rows, &peers], &exact);
        } else {
            compare(&name, bound, &rows, &exact);
            places += rows.len();
            decided_places += greedy_agrees(&name, 6.0 * noise as f32, &rows, &exact);
        }
    }
    println!("{format}: {decided_places} of {places} places are decided");
    let enough = places == 0 || decided_places > places / 8;
    assert!(enough, "{decided_places} of {places} places are decided");
}

/// Panics unless the first of `both`, our rows and llama.cpp's, are within `bound` of the exact ones at [`UNDISTURBED`] of the places.
fn are_mostly_near(name: &str, bound: f32, both: [&[Logprobs]; 2], exact: &Text) {
    let [own, peers] = both.map(|rows| {
        let places = rows.iter().zip(&exact.top);
        let mut differences: Vec<f32> = places
            .map(|(row, top)| largest_difference(row, top).1)
            .collect();
        differences.sort_by(f32::total_cmp);
        differences
    });
    let near = |places: &[f32]| places.iter().filter(|place| **place <= bound).count();
    let found = format!(
        "{name}: within {bound} at {} of {} places, llama.cpp at {}",
        near(&own),
        own.len(),
        near(&peers)
    );
    println!("{found}");
    assert!(
        near(&own) as f64 >= UNDISTURBED * own.len() as f64,
        "{found}; largest differences of places: {own:.3?}, llama.cpp's: {peers:.3?}"
    );
}

/// Panics where another token is the most likely although the gap to the second is wider than `noise`. Returns at how many places it is.
fn greedy_agrees(name: &str, noise: f32, rows: &[Logprobs], exact: &Text) -> usize {
    let mut decided = 0;
    for (place, (row, top)) in rows.iter().zip(&exact.top).enumerate() {
        if top[0].1 - top[1].1 > noise {
            decided += 1;
            assert_eq!(most_likely(row.logits()), top[0].0, "{name}, place {place}");
        }
    }
    decided
}

/// Root mean square of the differences of the most likely tokens' log probabilities.
fn distance(rows: &[Logprobs], exact: &Text) -> f64 {
    let squares = distances(rows, exact).map(|place| place.powi(2));
    (squares.sum::<f64>() / rows.len() as f64).sqrt()
}

/// That of each place by itself, and of all places the median: what the places without other experts have.
fn median_distance(rows: &[Logprobs], exact: &Text) -> f64 {
    let mut places: Vec<f64> = distances(rows, exact).collect();
    places.sort_by(f64::total_cmp);
    places[places.len() / 2]
}

/// Of each place.
fn distances(rows: &[Logprobs], exact: &Text) -> impl Iterator<Item = f64> {
    let places = rows.iter().zip(&exact.top);
    places.map(|(row, top)| oracle::distance(top, |token| row.token(token)))
}
