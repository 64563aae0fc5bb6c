//! What `make bench-experts` writes.

use std::fmt::Write;

use crate::engine_speed::Pair;
use crate::expert_speed::ExpertSpeed;
use crate::report::{spread, verdict};

/// How many times as fast as llama.cpp: in memory, and with memory for a part of the experts.
const DECODE_GOAL: f64 = 1.1;
const PREFILL_GOAL: f64 = 1.0;
const LIMITED_GOAL: f64 = 3.0;
/// Bytes that are read at most, over those of the experts that were not in memory.
const READ_GOAL: f64 = 1.1;

pub fn experts(speeds: &[ExpertSpeed]) -> String {
    let threads = speeds.first().map_or(0, |speed| speed.threads);
    let mut text = format!(
        "\n## Mixtures of experts beside llama.cpp\n\nTokens per second, {threads} threads each. The models have the widths and the experts of Qwen3-30B-A3B (128, of \
         which a token uses 8) and of gpt-oss-20b (32, of which it uses 4), in 8 layers rather than 48 and 24, with random weights. Routers are \
         random, too, so that every expert is as likely as the others: memory helps as little as it can.\n\n\
         | model | | prima | llama.cpp | ratio | goal | |\n| --- | --- | --- | --- | --- | --- | --- |\n"
    );
    for speed in speeds {
        let mut row = |what: String, pair: &Pair, goal: f64| {
            // Writing to a String cannot fail, here and below.
            let _ = writeln!(
                text,
                "| {} | {what} | {} | {} | **{:.2}** | {goal} | {} |",
                speed.model,
                spread(&pair.engine, 1),
                spread(&pair.llama_cpp, 1),
                pair.ratio(),
                verdict(pair.ratio() >= goal),
            );
        };
        let decode = format!("decode {}", speed.decode_tokens);
        row(decode, &speed.decode, DECODE_GOAL);
        let prefill = format!("prefill {}", speed.prefill_tokens);
        row(prefill, &speed.prefill, PREFILL_GOAL);
    }
    text += "\n### Memory for a part of the experts\n\n";
    if speeds.iter().all(|speed| speed.limited.is_none()) {
        text += "Left out on this machine: it takes root and a writable memory cgroup.\n";
        return text;
    }
    text += "Tokens per second of an answer under a limit of memory. llama.cpp: in its map, not repacked, which is its best there. The last \
             columns: needed experts that were in memory, and bytes that were read, over those of the experts that were not.\n\n\
             | model | experts that fit | limit | prima | llama.cpp | ratio | goal | | in memory | read | goal | |\n\
             | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
    for speed in speeds {
        for limit in speed.limited.iter().flatten() {
            let ratio = limit.ring.median() / limit.llama_cpp.median();
            let _ = writeln!(
                text,
                "| {} | {:.0} % | {} MB | {} | {} | **{ratio:.1}** | {LIMITED_GOAL} | {} | {} | {} | {READ_GOAL} | {} |",
                speed.model,
                100.0 * limit.share,
                limit.megabytes,
                spread(&limit.ring, 2),
                spread(&limit.llama_cpp, 2),
                verdict(ratio >= LIMITED_GOAL),
                spread(&limit.hit_rate, 2),
                spread(&limit.read_ratio, 2),
                verdict(limit.read_ratio.median() <= READ_GOAL),
            );
        }
    }
    text
}
