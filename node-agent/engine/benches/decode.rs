//! Prints how fast a model decodes and prefills on this machine's CPU, or on its GPU. Says how long each step of a token takes in all.
//!
//!     cargo bench -p prima-engine --bench decode -- MODEL.gguf [threads|gpu]

use std::path::Path;
use std::time::{Duration, Instant};

use prima_engine::{BatchEntry, Compute, EngineError, Gpu, KvCache, KvFormat, Model, WholeModel};

/// As llama-bench: 128 tokens decoded, prompts of 512.
const DECODED: usize = 128;
const PROMPT: usize = 512;
const REPETITIONS: usize = 3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Cargo adds `--bench`.
    let mut arguments = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench");
    let Some(path) = arguments.next() else {
        println!("usage: decode MODEL.gguf [threads|gpu]");
        return Ok(());
    };
    let (threads, gpu) = match arguments.next().as_deref() {
        Some("gpu") => (Compute::available_threads(), Some(Gpu::open()?)),
        Some(threads) => (threads.parse()?, None),
        None => (Compute::available_threads(), None),
    };
    if let Some(gpu) = &gpu {
        println!("on {}", gpu.facts()?.name);
    }
    let bench = Bench::new(Path::new(&path), threads, gpu.as_ref())?;
    println!(
        "{path}: {threads} threads, {} kernels",
        bench.compute.level()
    );
    for repetition in 0..REPETITIONS {
        let decode = bench.decode()?;
        let prefill = bench.prefill()?;
        println!(
            "run {repetition}: decode {:.1} tok/s (layers {:.2} ms, output head {:.2} ms a token), prefill {:.1} tok/s",
            DECODED as f64 / (decode.layers + decode.head).as_secs_f64(),
            decode.layers.as_secs_f64() * 1e3 / DECODED as f64,
            decode.head.as_secs_f64() * 1e3 / DECODED as f64,
            PROMPT as f64 / prefill.as_secs_f64(),
        );
    }
    Ok(())
}

struct Bench {
    whole: WholeModel,
    compute: Compute,
}

struct DecodeTime {
    layers: Duration,
    head: Duration,
}

impl Bench {
    fn new(path: &Path, threads: usize, gpu: Option<&Gpu>) -> Result<Bench, EngineError> {
        let model = Model::open(path)?;
        Ok(Bench {
            whole: match gpu {
                Some(gpu) => WholeModel::open_on(gpu, model, 0)?,
                None => WholeModel::open(model)?,
            },
            compute: Compute::new(threads)?,
        })
    }

    fn decode(&self) -> Result<DecodeTime, EngineError> {
        let mut kv = self.whole.sequence(DECODED, KvFormat::F16);
        let mut time = DecodeTime {
            layers: Duration::ZERO,
            head: Duration::ZERO,
        };
        let mut token = 1;
        for position in 0..DECODED {
            let start = Instant::now();
            let activation = self.forward(&[token], &mut kv, position)?;
            let after_layers = Instant::now();
            let logits = self.whole.logits(&self.compute, &activation)?;
            time.layers += after_layers - start;
            time.head += after_layers.elapsed();
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
            token = best.unwrap_or(0) as u32;
        }
        Ok(time)
    }

    fn prefill(&self) -> Result<Duration, EngineError> {
        let spec = self.whole.model().spec();
        let mut kv = self.whole.sequence(PROMPT, KvFormat::F16);
        let tokens: Vec<u32> = (0..PROMPT)
            .map(|i| (i * 31 % spec.vocabulary) as u32)
            .collect();
        let start = Instant::now();
        let activation = self.forward(&tokens, &mut kv, 0)?;
        let last = &activation[(PROMPT - 1) * spec.hidden..];
        self.whole.logits(&self.compute, last)?;
        Ok(start.elapsed())
    }

    fn forward(
        &self,
        tokens: &[u32],
        kv: &mut KvCache,
        first_position: usize,
    ) -> Result<Vec<f32>, EngineError> {
        let rows = BatchEntry {
            kv,
            first_position,
            rows: tokens.len(),
        };
        self.whole.forward(&self.compute, tokens, &mut [rows])
    }
}
