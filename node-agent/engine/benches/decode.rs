//! Prints how fast a model decodes and prefills on this machine's CPU, and how long each step of a token takes in all.
//!
//!     cargo bench -p prima-engine --bench decode -- MODEL.gguf [threads]

use std::path::Path;
use std::time::{Duration, Instant};

use prima_engine::{
    BatchEntry, Compute, Embedding, EngineError, KvCache, KvFormat, LayerDevices, LayerWindow,
    Model, OutputHead, Residency,
};

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
        println!("usage: decode MODEL.gguf [threads]");
        return Ok(());
    };
    let threads = match arguments.next() {
        Some(threads) => threads.parse()?,
        None => Compute::available_threads(),
    };
    let bench = Bench::new(Path::new(&path), threads)?;
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
    model: Model,
    embedding: Embedding,
    window: LayerWindow,
    head: OutputHead,
    compute: Compute,
}

struct DecodeTime {
    layers: Duration,
    head: Duration,
}

impl Bench {
    fn new(path: &Path, threads: usize) -> Result<Bench, EngineError> {
        let model = Model::open(path)?;
        Ok(Bench {
            embedding: Embedding::open(&model)?,
            window: LayerWindow::open(
                &model,
                0..model.spec().layers.len(),
                &LayerDevices::cpu(),
                &Residency::mapped(),
            )?,
            head: OutputHead::open(&model, &Residency::mapped())?,
            compute: Compute::new(threads)?,
            model,
        })
    }

    fn decode(&self) -> Result<DecodeTime, EngineError> {
        let spec = self.model.spec();
        let mut kv = KvCache::new(&self.model, &[self.window.layers()], DECODED, KvFormat::F16);
        let mut activation = vec![0.0; spec.hidden];
        let mut logits = Vec::new();
        let mut time = DecodeTime {
            layers: Duration::ZERO,
            head: Duration::ZERO,
        };
        let mut token = 1;
        for position in 0..DECODED {
            let start = Instant::now();
            self.embedding.embed(&[token], &mut activation)?;
            let rows = BatchEntry {
                kv: &mut kv,
                first_position: position,
                rows: 1,
            };
            self.window
                .forward(&self.compute, &mut activation, &mut [rows])?;
            let after_layers = Instant::now();
            self.head.logits(&self.compute, &activation, &mut logits)?;
            time.layers += after_layers - start;
            time.head += after_layers.elapsed();
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
            token = best.unwrap_or(0) as u32;
        }
        Ok(time)
    }

    fn prefill(&self) -> Result<Duration, EngineError> {
        let spec = self.model.spec();
        let mut kv = KvCache::new(&self.model, &[self.window.layers()], PROMPT, KvFormat::F16);
        let tokens: Vec<u32> = (0..PROMPT)
            .map(|i| (i * 31 % spec.vocabulary) as u32)
            .collect();
        let mut activation = vec![0.0; PROMPT * spec.hidden];
        let start = Instant::now();
        self.embedding.embed(&tokens, &mut activation)?;
        let rows = BatchEntry {
            kv: &mut kv,
            first_position: 0,
            rows: PROMPT,
        };
        self.window
            .forward(&self.compute, &mut activation, &mut [rows])?;
        let mut logits = Vec::new();
        let last = &activation[(PROMPT - 1) * spec.hidden..];
        self.head.logits(&self.compute, last, &mut logits)?;
        Ok(start.elapsed())
    }
}
