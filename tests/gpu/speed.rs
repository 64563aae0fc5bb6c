//! How fast the engine is on the GPU and on the processor, taking turns in this process.

use std::ops::Range;
use std::time::Duration;

use prima_crds::error_chain;
use prima_crds::v1alpha1::ring_plan::CHUNK_POSITIONS;
use prima_engine::Timeline;
use prima_tests::statistics::Samples;

use crate::Finding;
use crate::engine::Engine;
use crate::error::CheckError;
use crate::machine::Machine;
use crate::models::Model;

pub const TURNS: usize = 3;
/// Files above it take long on a processor.
const LARGE: u64 = 2 << 30;

/// Tokens of a turn, as llama-bench has them.
#[derive(Clone, Copy)]
pub struct Tokens {
    pub prefill: usize,
    pub decode: usize,
}

const FULL: Tokens = Tokens {
    prefill: 512,
    decode: 128,
};
const FEW: Tokens = Tokens {
    prefill: 64,
    decode: 16,
};

/// Tokens per second.
pub struct Rates {
    pub prefill: f64,
    pub decode: f64,
}

pub struct Speed {
    pub processor: Rates,
    pub gpu: Rates,
    /// Of prompts on the GPU whose weights are copied there for each piece of the usual size.
    pub copied: f64,
    /// What went on side by side in one of them, or why that is not known: not every driver has a clock for all queues.
    pub timeline: Result<Timeline, String>,
    /// What the two were measured with.
    pub tokens: [Tokens; 2],
}

impl Finding for Rates {
    fn told(&self) -> String {
        let Rates { prefill, decode } = self;
        format!("{prefill:.0} tokens/s of a prompt, {decode:.1} tokens/s of an answer on the GPU")
    }
}

impl Finding for Speed {
    fn told(&self) -> String {
        let milliseconds = |spans: &[Range<Duration>]| {
            let all = spans.iter().map(|span| span.end - span.start);
            all.sum::<Duration>().as_millis()
        };
        let copied = match &self.timeline {
            Ok(timeline) => format!(
                "of a prompt whose weights were copied, on {}, pieces took {} ms to be filled ({} ms of it beside kernels) and {} ms to be copied ({} ms), \
                 kernels {} ms",
                match timeline.copies_on_own_queue {
                    true => "a queue of their own",
                    false => "the kernels' queue",
                },
                milliseconds(&timeline.filled),
                timeline.filled_while_computing().as_millis(),
                milliseconds(&timeline.copied),
                timeline.copied_while_computing().as_millis(),
                milliseconds(&timeline.computed),
            ),
            Err(why) => format!("what goes on while weights are copied is not known: {why}"),
        };
        format!("{}; {copied}", self.gpu.told())
    }
}

pub fn tokens_on_gpu(machine: &Machine) -> Tokens {
    if machine.software { FEW } else { FULL }
}

pub fn measure(machine: &Machine, model: &Model) -> Result<Speed, CheckError> {
    let on_gpu = tokens_on_gpu(machine);
    let on_processor = if machine.software || model.bytes > LARGE {
        FEW
    } else {
        FULL
    };
    let processor = Engine::open(&model.path, None)?;
    let gpu = Engine::open(&model.path, Some(&machine.gpu))?;
    let copying = Engine::open_copying(&model.path, &machine.gpu)?;
    let (mut processor_turns, mut gpu_turns) = (Vec::new(), Vec::new());
    let mut copied_turns = Vec::new();
    // The first pass reads the file, and takes memory.
    turn(&processor, on_processor)?;
    turn(&gpu, on_gpu)?;
    copying.prefill_in(CHUNK_POSITIONS, on_gpu.prefill)?;
    for _ in 0..TURNS {
        processor_turns.push(turn(&processor, on_processor)?);
        // GPUs lower their clocks while they wait, and raise them when they have been busy for a while.
        turn(&gpu, on_gpu)?;
        gpu_turns.push(turn(&gpu, on_gpu)?);
        copied_turns.push(copying.prefill_in(CHUNK_POSITIONS, on_gpu.prefill)?);
    }
    let started = machine.gpu.start_timeline();
    // Also without a clock, a GPU that is there computes.
    copying.prefill_in(CHUNK_POSITIONS, on_gpu.prefill)?;
    let timeline = machine.gpu.end_timeline()?;
    Ok(Speed {
        timeline: match started {
            Ok(()) => Ok(timeline),
            Err(error) => Err(error_chain(&error)),
        },
        processor: medians(&processor_turns),
        gpu: medians(&gpu_turns),
        copied: copied_turns.into_iter().collect::<Samples>().median(),
        tokens: [on_processor, on_gpu],
    })
}

fn turn(engine: &Engine, tokens: Tokens) -> Result<Rates, CheckError> {
    Ok(Rates {
        prefill: engine.prefill(tokens.prefill)?,
        decode: engine.decode(tokens.decode)?,
    })
}

fn medians(turns: &[Rates]) -> Rates {
    let median = |rate: fn(&Rates) -> f64| turns.iter().map(rate).collect::<Samples>().median();
    Rates {
        prefill: median(|turn| turn.prefill),
        decode: median(|turn| turn.decode),
    }
}
