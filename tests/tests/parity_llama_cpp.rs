//! The engine and the tokenizer against llama.cpp (PyPI xllamacpp): the same file, the same tokens, the same answers.
//!
//! Numeric noise is the largest difference of the gap between llama.cpp's two best logits that counts as agreement. [`Bounds`] states it
//! per model, and it is asserted. It has two scales. With F32 weights the KV cache's F16 is all that is rounded: llama.cpp differs from
//! itself (tokens one at a time, or in one batch) by up to 0.009 in stories15M and 0.02 in SmolLM2. With quantized weights both engines
//! round activations to eight bits, and a last bit can turn into a quantization step: llama.cpp differs from itself by up to 1.3 in a logit
//! of SmolLM2 Q4_1. So 0.05 for the top-20 logprobs is asked of SmolLM2's weights written out as F32; on its Q4_1 file greedy choices and
//! perplexity are compared here, and the distance to the exact logprobs in `parity_weight_formats.rs`.
//!
//! Greedy continuations: the engine is fed llama.cpp's tokens, so all 64 places are compared, whatever happens at one of them. Where
//! llama.cpp's two best logits are further apart than the noise, the engine must choose the same token. With F32 weights the top-20 logprobs
//! after the prompts are compared, too. A prompt and its continuation are one batch, which takes less time; the last tokens of the first are
//! also fed one at a time, and give the same bits.
//!
//! One thread computes, here and in llama.cpp, since two would wait for each other where other tests run beside these. For the first prompt two
//! threads give the same bits.

use std::path::PathBuf;

use prima_engine::kernels::IsaLevel;
use prima_engine::{Compute, KvFormat};
use prima_tests::assets;
use prima_tests::one_process::{OneProcess, lower_levels};
use prima_tests::oracle::{self, Answer, GreedyJob, Request, Text, TextJob};
use prima_text::{log_sum_exp, most_likely};

const THREADS: usize = 1;
const CONTINUATION: usize = 64;
const TOP: usize = 20;
/// So many tokens of the first prompt's continuation are fed one at a time. They end behind position 64, where attention begins another block of
/// the KV cache.
const ONE_BY_ONE: usize = 16;

/// Stories, facts, dialogue, lists, numbers, code, other scripts; short and long.
const PROMPTS: [&str; 20] = [
    "Once upon a time",
    "The capital of France is",
    "One day, a little girl named Lily found a needle in her room. She knew it was difficult to play with it because it was sharp.",
    "def fibonacci(n):\n    \"\"\"Returns the n-th Fibonacci number.\"\"\"\n",
    "1, 2, 3, 4, 5,",
    "Q: What is the boiling point of water?\nA:",
    "\"I do not want to go to bed,\" said Tom. His mother smiled and",
    "Ingredients:\n- 2 eggs\n- 100 g of sugar\n-",
    "The three laws of motion, as Newton stated them, are the following. First,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Der kleine Hund lief in den Wald und",
    "Il était une fois une petite fille qui",
    "#include <stdio.h>\n\nint main(void) {\n",
    "The sun rose over the hills.   The birds   began to sing,",
    "In 1969, the first people walked on the Moon. They",
    "SELECT name, age FROM people WHERE",
    "Tim had a red ball. He liked to play with his ball in the park. One day, the ball rolled into the pond. Tim was sad. Then a big dog came and",
    "Привет! Меня зовут",
    "{\"name\": \"Alice\", \"age\":",
    "Why did the chicken cross the road? Because",
];

/// What counts as agreement on one model.
struct Bounds {
    /// The largest difference of the gap between llama.cpp's two best logits, at each step.
    noise: f32,
    /// The least share of places where llama.cpp's choice is beyond the noise, so that the comparison says something.
    decided: f64,
    /// The largest difference of a top-20 logprob after a prompt.
    logprob: Option<f32>,
}

const F32_BOUNDS: Bounds = Bounds {
    noise: 0.05,
    decided: 0.95,
    logprob: Some(0.05),
};

#[test]
fn stories15m_continues_20_prompts_as_llama_cpp_does() {
    greedy_agrees("stories15M-F32", &F32_BOUNDS);
}

#[test]
fn rope_factors_continue_20_prompts_as_llama_cpp_does() {
    greedy_agrees("stories15M-llama3-rope-F32", &F32_BOUNDS);
}

#[test]
fn qwen2_with_biases_continues_20_prompts_as_llama_cpp_does() {
    greedy_agrees("stories15M-qwen2-F32", &F32_BOUNDS);
}

#[test]
fn smollm2_as_f32_continues_20_prompts_as_llama_cpp_does() {
    greedy_agrees("SmolLM2-135M-Instruct-F32", &F32_BOUNDS);
}

#[test]
fn smollm2_continues_20_prompts_as_llama_cpp_does() {
    let bounds = Bounds {
        noise: 2.0,
        decided: 0.4,
        logprob: None,
    };
    greedy_agrees("SmolLM2-135M-Instruct-Q4_1", &bounds);
}

#[test]
fn gemma3_270m_continues_20_prompts_as_llama_cpp_does() {
    let bounds = Bounds {
        noise: 2.0,
        decided: 0.2,
        logprob: None,
    };
    greedy_agrees("gemma-3-270m-Q4_K_M", &bounds);
}

#[test]
fn gemma3_270m_as_f32_continues_20_prompts_as_llama_cpp_does() {
    greedy_agrees("gemma-3-270m-F32", &F32_BOUNDS);
}

#[test]
fn stories15m_has_the_perplexity_of_llama_cpp() {
    let mut reading = Reading::of("stories15M-F32", 256, 8);
    reading.has_the_same_bits_where_levels_fuse();
    reading.agrees_where_levels_do_not_fuse();
}

#[test]
fn qwen2_with_biases_has_the_perplexity_of_llama_cpp() {
    let mut reading = Reading::of("stories15M-qwen2-F32", 256, 8);
    reading.has_the_same_bits_where_levels_fuse();
    reading.agrees_where_levels_do_not_fuse();
}

#[test]
fn smollm2_has_llama_cpps_perplexity_also_with_q8_0_kv() {
    let mut reading = Reading::of("SmolLM2-135M-Instruct-Q4_1", 512, 4);
    reading.agrees_with_q8_0_kv();
    reading.has_the_same_bits_where_levels_fuse();
    reading.agrees_where_levels_do_not_fuse();
}

/// Most of its layers see the last 512 positions, of 1,024 here. What does not fuse is slow: at its level, the prima-kernels tests compare windows
/// with the textbook formula, and `parity_weight_formats.rs` the logprobs of this file with the exact ones.
#[test]
fn gemma3_270m_has_llama_cpps_perplexity_also_with_q8_0_kv() {
    let mut reading = Reading::of("gemma-3-270m-Q4_K_M", 1024, 1);
    reading.agrees_with_q8_0_kv();
    reading.has_the_same_bits_where_levels_fuse();
}

/// No activation is rounded to eight bits, so that only the KV cache makes a difference. llama.cpp rounds queries, too, so it may be further away.
#[test]
fn smollm2_as_f32_has_nearly_its_perplexity_with_q8_0_kv() {
    let (name, window, windows) = ("SmolLM2-135M-Instruct-F32", 512, 2);
    let mut engine = open(name);
    let llama_cpp = text_of(&engine, name, window, windows, true);
    let f16 = perplexity(&logprobs_of(&engine, &llama_cpp.tokens, window, 1));
    let q8_0 = q8_0_kv_agrees(name, &mut engine, &llama_cpp.tokens, window, f16);
    let peer = perplexity(&llama_cpp.logprobs);
    assert_near(&format!("{name} with Q8_0, llama.cpp"), q8_0, peer, 0.01);
}

#[test]
fn qwen2_with_zero_biases_computes_what_llama_does() {
    let llama = open("stories15M-F32");
    let qwen2 = open("stories15M-qwen2-zero-F32");
    let tokens = llama.tokenizer.encode(PROMPTS[2], true, false).unwrap();
    let expected = llama.logits(&tokens, &mut llama.sequence(256)).unwrap();
    let found = qwen2.logits(&tokens, &mut qwen2.sequence(256)).unwrap();
    // The same sums with their terms in another order, which the KV cache's F16 may round to the other side.
    let difference = largest_difference(&expected, &found);
    assert!(
        difference <= F32_BOUNDS.noise,
        "the logits differ by up to {difference}"
    );
}

fn greedy_agrees(name: &str, bounds: &Bounds) {
    let mut engine = open(name);
    let vocabulary = engine.model.spec().vocabulary;
    let answer = ask(name, |request| {
        request.greedy = PROMPTS
            .iter()
            .map(|&prompt| GreedyJob {
                prompt: prompt.to_owned(),
                tokens: CONTINUATION,
                top: TOP,
            })
            .collect();
    });
    let (mut places, mut decided, mut agreed, mut noise) = (0, 0, 0, 0f32);
    assert_eq!(answer.greedy.len(), PROMPTS.len());
    for (prompt, expected) in PROMPTS.iter().zip(&answer.greedy) {
        let tokens = engine.tokenizer.encode(prompt, true, false).unwrap();
        assert_eq!(tokens, expected.prompt, "tokens of {prompt:?}");
        assert_eq!(expected.tokens.len(), CONTINUATION);
        assert_eq!(expected.best.len(), CONTINUATION);
        let fed = [&tokens[..], &expected.tokens[..CONTINUATION - 1]].concat();
        let logits = continued(&engine, &fed);
        assert_eq!(logits.len(), CONTINUATION * vocabulary);
        if prompt == &PROMPTS[0] {
            has_the_same_bits_otherwise(name, &mut engine, &fed, &logits);
        }
        if let Some(bound) = bounds.logprob {
            let case = format!("{name}, {prompt:?}");
            top_logprobs_agree(&case, &logits[..vocabulary], &expected.top, bound);
        }
        let steps = expected.tokens.iter().zip(&expected.best);
        let rows = logits.chunks(vocabulary);
        for (step, ((&token, best), logits)) in steps.zip(rows).enumerate() {
            let [(first, first_logit), (second, second_logit)] = *best;
            let gap = first_logit - second_logit;
            let own_gap = logits[first as usize] - logits[second as usize];
            noise = noise.max((own_gap - gap).abs());
            let chosen = most_likely(logits);
            places += 1;
            agreed += usize::from(chosen == token);
            if gap > bounds.noise {
                decided += 1;
                assert_eq!(
                    chosen, token,
                    "{name}, {prompt:?}, step {step}: llama.cpp's two best logits are {gap} apart"
                );
            }
        }
    }
    println!(
        "{name}: {agreed} of {places} places agree, {decided} decided beyond the noise; the gap of the two best logits \
         differs by up to {noise} (llama.cpp {})",
        answer.version
    );
    assert!(
        noise <= bounds.noise,
        "{name}: the gap of the two best logits differs by {noise}, stated noise {}",
        bounds.noise
    );
    assert!(
        decided as f64 >= bounds.decided * places as f64,
        "{name}: only {decided} of {places} places are beyond the noise"
    );
}

/// The logits after a prompt and after each token behind it, of a continuation without its last token: computed in one batch.
fn continued(engine: &OneProcess, tokens: &[u32]) -> Vec<f32> {
    let places = tokens.len() - CONTINUATION..tokens.len();
    let mut kv = engine.sequence(tokens.len());
    engine.logits_after(tokens, places, &mut kv).unwrap()
}

/// The last tokens fed one at a time, as a ring computes an answer; and all by two threads.
fn has_the_same_bits_otherwise(
    name: &str,
    engine: &mut OneProcess,
    tokens: &[u32],
    logits: &[f32],
) {
    let vocabulary = engine.model.spec().vocabulary;
    let (before, last) = tokens.split_at(tokens.len() - ONE_BY_ONE);
    assert!(before.len() < 64 && tokens.len() > 64, "{}", tokens.len());
    let expected = &logits[logits.len() - ONE_BY_ONE * vocabulary..];
    let mut kv = engine.sequence(tokens.len());
    engine.last_logits(before, &mut kv).unwrap();
    for (&token, expected) in last.iter().zip(expected.chunks(vocabulary)) {
        let found = engine.last_logits(&[token], &mut kv).unwrap();
        assert!(found == expected, "{name}: a batch gives other logits");
    }
    engine.compute = Compute::new(2).unwrap();
    let found = continued(engine, tokens);
    assert!(found == logits, "{name}: two threads give other logits");
    engine.compute = Compute::new(THREADS).unwrap();
}

/// Panics when the logprob of one of llama.cpp's 20 most likely tokens differs by more than `bound`, or another token is as likely.
fn top_logprobs_agree(case: &str, logits: &[f32], top: &[(u32, f32)], bound: f32) {
    assert_eq!(top.len(), TOP);
    let whole = log_sum_exp(logits);
    let differences = top.iter().map(|&(token, expected)| {
        let logprob = (f64::from(logits[token as usize]) - whole) as f32;
        (logprob - expected).abs()
    });
    // What is not a number is the largest.
    let largest = differences.max_by(f32::total_cmp).unwrap();
    println!("{case}: a top-{TOP} logprob differs by up to {largest}");
    assert!(largest <= bound, "{case}: a logprob differs by {largest}");
    let least = top[TOP - 1].1;
    let most = (f64::from(least + bound) + whole) as f32;
    for (token, &logit) in logits.iter().enumerate() {
        assert!(
            logit <= most || top.iter().any(|&(known, _)| known as usize == token),
            "{case}: token {token} has the logit {logit}; as llama.cpp's 20th has the logprob {least}, {most} is the most"
        );
    }
}

/// A text, as llama.cpp and the engine at its best level read it.
struct Reading {
    name: &'static str,
    window: usize,
    engine: OneProcess,
    llama_cpp: Text,
    /// Of each token but the first of every window.
    logprobs: Vec<f64>,
}

impl Reading {
    /// Of as many tokens. Panics unless the perplexities agree.
    fn of(name: &'static str, window: usize, windows: usize) -> Self {
        let best = IsaLevel::detect();
        let engine = OneProcess::open_at_level(&model(name), THREADS, best).unwrap();
        let llama_cpp = text_of(&engine, name, window, windows, false);
        let logprobs = logprobs_of(&engine, &llama_cpp.tokens, window, 1);
        assert_eq!(logprobs.len(), llama_cpp.logprobs.len());
        let reading = Reading {
            name,
            window,
            engine,
            llama_cpp,
            logprobs,
        };
        reading.agrees(best, &reading.logprobs, 0.005);
        reading
    }

    /// Compares as many tokens as there are logprobs. Both round activations to eight bits, and of fewer tokens less of that evens out.
    fn agrees(&self, level: IsaLevel, logprobs: &[f64], bound: f64) {
        let wanted = perplexity(&self.llama_cpp.logprobs[..logprobs.len()]);
        let what = format!("{} at {level}, llama.cpp", self.name);
        assert_near(&what, perplexity(logprobs), wanted, bound);
    }

    /// Q8_0's perplexity is near F16's, which is near llama.cpp's with F16. Of the engine, llama.cpp's with Q8_0 would say nothing more; it is
    /// compared where no activation is rounded (`smollm2_as_f32_has_nearly_its_perplexity_with_q8_0_kv`).
    fn agrees_with_q8_0_kv(&mut self) {
        let (tokens, f16) = (&self.llama_cpp.tokens, perplexity(&self.logprobs));
        q8_0_kv_agrees(self.name, &mut self.engine, tokens, self.window, f16);
    }

    /// In the first window, all of which the layers compute. Logits, most of the work in a large vocabulary, are made at every seventh place: at each
    /// of the rows that kernels take together, in turn.
    fn has_the_same_bits_where_levels_fuse(&mut self) {
        const STEP: usize = 7;
        let tokens = &self.llama_cpp.tokens[..self.window];
        let expected = self.logprobs[..self.window - 1].iter().step_by(STEP);
        let expected: Vec<f64> = expected.copied().collect();
        // Plain Rust would take minutes: `parity_weight_formats.rs` compares its logprobs over fewer tokens.
        let fuses = |level: &IsaLevel| level.fuses() && *level != IsaLevel::SCALAR;
        for level in lower_levels().filter(fuses) {
            self.engine.compute = Compute::at_level(THREADS, level).unwrap();
            let found = logprobs_of(&self.engine, tokens, self.window, STEP);
            assert!(
                found == expected,
                "{}: other logprobs at {level}",
                self.name
            );
        }
    }

    /// These have bits of their own, and are slow.
    fn agrees_where_levels_do_not_fuse(&mut self) {
        let tokens = &self.llama_cpp.tokens[..1024];
        for level in lower_levels().filter(|level| !level.fuses()) {
            self.engine.compute = Compute::at_level(THREADS, level).unwrap();
            let found = logprobs_of(&self.engine, tokens, self.window, 1);
            self.agrees(level, &found, 0.01);
        }
    }
}

/// The tokens of a text, as both cut it, and their logprobs by llama.cpp.
fn text_of(
    engine: &OneProcess,
    name: &str,
    window: usize,
    windows: usize,
    quantized_kv: bool,
) -> Text {
    let count = window * windows;
    let path = assets::path("text/moby-dick.txt").unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let expected = ask(name, |request| {
        request.context = window;
        request.quantized_kv = quantized_kv;
        request.text = Some(TextJob {
            path,
            window,
            windows,
            top: 0,
            of: Vec::new(),
        });
    })
    .text
    .unwrap();
    assert_eq!(expected.tokens.len(), count);
    let start: String = text.chars().take(16 * count).collect();
    let tokens = engine.tokenizer.encode(&start, true, false).unwrap();
    assert_eq!(tokens[..count], expected.tokens, "tokens of the text");
    assert_eq!(expected.logprobs.len(), count - windows);
    expected
}

/// What Q8_0 costs: half a percent of F16's perplexity is stated. Returns Q8_0's.
fn q8_0_kv_agrees(
    name: &str,
    engine: &mut OneProcess,
    tokens: &[u32],
    window: usize,
    f16: f64,
) -> f64 {
    engine.kv_format = KvFormat::Q8_0;
    let q8_0 = perplexity(&logprobs_of(engine, tokens, window, 1));
    engine.kv_format = KvFormat::F16;
    assert!(f16 != q8_0, "{name}: the same with both formats");
    assert_near(&format!("{name} with Q8_0, F16"), q8_0, f16, 0.005);
    q8_0
}

fn assert_near(what: &str, found: f64, wanted: f64, bound: f64) {
    println!("{what}: perplexity {found:.4} and {wanted:.4}");
    assert!(
        (found / wanted - 1.0).abs() <= bound,
        "{what}: perplexity {found} and {wanted}"
    );
}

/// Of every `step`-th token of each window, from the second on.
fn logprobs_of(engine: &OneProcess, tokens: &[u32], window: usize, step: usize) -> Vec<f64> {
    // All logits of a large vocabulary would take gigabytes.
    const AT_ONCE: usize = 64;
    let vocabulary = engine.model.spec().vocabulary;
    let mut logprobs = Vec::new();
    for part in tokens.chunks(window) {
        let mut kv = engine.sequence(window);
        for (number, chunk) in part.chunks(AT_ONCE).enumerate() {
            let first = number * AT_ONCE;
            // Behind the last token of a window stands none.
            let places: Vec<usize> = (0..chunk.len())
                .filter(|place| (first + place).is_multiple_of(step))
                .filter(|place| first + place + 1 < part.len())
                .collect();
            let logits = engine
                .logits_after(chunk, places.iter().copied(), &mut kv)
                .unwrap();
            for (row, place) in logits.chunks(vocabulary).zip(places) {
                let next = part[first + place + 1];
                logprobs.push(f64::from(row[next as usize]) - log_sum_exp(row));
            }
        }
    }
    logprobs
}

fn perplexity(logprobs: &[f64]) -> f64 {
    (-logprobs.iter().sum::<f64>() / logprobs.len() as f64).exp()
}

fn open(name: &str) -> OneProcess {
    OneProcess::open(&model(name), THREADS).unwrap()
}

fn ask(name: &str, jobs: impl FnOnce(&mut Request)) -> Answer {
    let mut request = Request {
        model: model(name),
        exact: false,
        quantized_kv: false,
        threads: THREADS,
        context: 256,
        greedy: Vec::new(),
        text: None,
    };
    jobs(&mut request);
    oracle::ask(&request).unwrap()
}

fn model(name: &str) -> PathBuf {
    assets::path(&format!("models/{name}.gguf")).unwrap()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    // A maximum passes over what is not a number.
    assert!(a.iter().chain(b).all(|x| x.is_finite()), "not a number");
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}
