//! What `make bench-experts` writes.

use std::fmt::Write;

use prima_tests::expert_replay::{POLICIES, Trace};
use prima_tests::statistics::Samples;

use crate::client::WORDS;
use crate::engine_speed::Pair;
use crate::expert_speed::{ExpertSpeed, OTHER_BYTES, Ours, PEER_TOKENS, WARM_UP};
use crate::report::{PREDICTION_GOAL, predicted_and_measured, spread, verdict};

/// How many times as fast as llama.cpp: in memory, and with memory for a part of the experts.
const DECODE_GOAL: f64 = 1.1;
const PREFILL_GOAL: f64 = 1.0;
const LIMITED_GOAL: f64 = 3.0;
/// Bytes that are read at most, over those of the experts that were not in memory.
const READ_GOAL: f64 = 1.1;
/// Of a layer's experts, those that a replay has room for.
const ROOM: [f64; 4] = [0.125, 0.25, 0.5, 0.75];
/// Passes of a replay that only fill memory.
const FILLING: usize = 64;

pub fn experts(speeds: &[ExpertSpeed]) -> String {
    let threads = speeds.first().map_or(0, |speed| speed.threads);
    let mut text = format!(
        "\n## Mixtures of experts beside llama.cpp\n\nTokens per second, {threads} threads each; llama.cpp with its defaults. The models have the \
         widths and the experts of Qwen3-30B-A3B (128, of which a token uses 8) and of gpt-oss-20b (32, of which it uses 4). They have 8 layers \
         rather than 48 and 24, and random weights. Routers are random, too, so that experts are nearly alike: memory helps \
         little more than its share. Tokens 'as in a text' are drawn from {WORDS}, nearly by Zipf's law: the second is half as likely as the first, the third \
         a third. A token that comes back needs much the same experts as before.\n\n\
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
    text += &match speeds.iter().any(|speed| speed.limited.is_some()) {
        false => {
            "Left out on this machine: it takes root and a writable memory cgroup.\n".to_owned()
        }
        true => format!(
            "Tokens per second of an answer under a limit of memory: for other weights, a part of the experts, and {:.0} MB. prima keeps experts by \
             protected LRU: the one that was used longest ago goes, and those that were used again stay longer. llama.cpp has its weights in its map \
             as they are (`--load-mode mmap --repack 0`). Other settings were tried once by hand, with room for half of Qwen3's experts: its defaults and \
             `--repack 1` gave no token in two minutes, `--load-mode none` and `dio` were killed for memory, and one thread is as fast as two. It \
             decodes {PEER_TOKENS} tokens after as many; where tokens come back, {PEER_TOKENS} after {WARM_UP}, once. The last columns: of the experts, what memory held in the end, \
             which is more than was planned where prima needs less beside weights; needed experts that were in memory; and bytes that were read, over \
             those of the experts that were not.\n\n\
             | model | experts that fit | limit | tokens | prima | llama.cpp | ratio | goal | | held | in memory | read | goal | |\n\
             | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
            OTHER_BYTES / 1e6,
        ),
    };
    for speed in speeds {
        for limit in speed.limited.iter().flatten() {
            let [uniform, recurring] = TOKENS;
            for (tokens, ours, llama_cpp) in [
                (uniform, &limit.uniform, &limit.llama_cpp),
                (recurring, &limit.recurring, &limit.llama_cpp_recurring),
            ] {
                let ratio = ours.rate.median() / llama_cpp.median();
                let beside = format!(
                    "{} | **{ratio:.1}** | {LIMITED_GOAL} | {}",
                    spread(llama_cpp, 2),
                    verdict(ratio >= LIMITED_GOAL)
                );
                let Ours {
                    rate,
                    hit_rate,
                    held,
                    read_ratio,
                } = ours;
                let _ = writeln!(
                    text,
                    "| {} | {:.0} % | {} MB | {tokens} | {} | {beside} | {} | {} | {} | {READ_GOAL} | {} |",
                    speed.model,
                    100.0 * limit.share,
                    limit.megabytes,
                    spread(rate, 2),
                    spread(held, 2),
                    spread(hit_rate, 2),
                    spread(read_ratio, 2),
                    verdict(read_ratio.median() <= READ_GOAL),
                );
            }
        }
    }
    text += &predictions(speeds);
    let traces = speeds.iter().flat_map(|speed| {
        let traces = TOKENS.into_iter().zip(&speed.traces);
        traces.map(move |(tokens, trace)| (format!("{} | {tokens}", speed.model), trace))
    });
    text + &format!(
        "\n### Ways of keeping experts\n\n{}",
        replayed("model | tokens", traces)
    )
}

/// What `prima run` predicted of its own plan, beside what the ring decoded.
fn predictions(speeds: &[ExpertSpeed]) -> String {
    let mut text = format!(
        "\n### Predicted\n\nTokens per second that `prima run` predicted of one member, and what it then decoded, of tokens that are drawn from all \
         alike. The error is by how much longer a token takes than predicted. Goal: below {PREDICTION_GOAL} %.\n\n\
         | model | experts that fit | predicted | measured | error of the time per token | |\n| --- | --- | --- | --- | --- | --- |\n"
    );
    for speed in speeds {
        let mut row = |share: f64, predicted: &Samples, measured: &Samples| {
            let _ = writeln!(
                text,
                "| {} | {:.0} % | {} |",
                speed.model,
                100.0 * share,
                predicted_and_measured(predicted, measured, 2)
            );
        };
        let whole = &speed.in_memory;
        row(1.0, &whole.predicted, &whole.measured);
        for limit in speed.limited.iter().flatten() {
            row(limit.share, &limit.predicted, &limit.uniform.rate);
        }
    }
    text
}

/// How tokens are drawn: from all alike, and by Zipf's law.
const TOKENS: [&str; 2] = ["all alike", "as in a text"];

/// What ways of keeping experts would have found in memory, a row for each trace and size of memory. `heads` are the first columns, which
/// traces have their own cells for.
pub fn replayed<'a>(heads: &str, traces: impl IntoIterator<Item = (String, &'a Trace)>) -> String {
    let rules = heads.split('|').map(|_| "| --- ");
    let mut text = format!(
        "Needed experts that would have been in memory, replayed from what passes needed, after the first {FILLING}. Each layer has room for so \
         many of its experts. 'Oldest goes' is LRU. prima's way is protected LRU: experts that were used again since they came have four fifths of \
         the room. 'Who knows what comes' is Belady's: no way of keeping finds more. Columns 'again' and 'within 8': the share of needed experts that \
         the pass before, or one of the eight before, needed too.\n\n\
         Published of trained models: of Qwen3-30B-A3B's experts 45 % are needed again at the next token and 80 % within eight, and with room for 40 % \
         LRU found 90 to 95 % (<https://github.com/kekzl/imp/pull/1359>); with room for 25 % of OLMoE's, it found 51 % \
         (<https://github.com/JustVugg/colibri/pull/1092>).\n\n\
         | {heads} | again | within 8 | room | oldest goes | those used again stay longer (prima) | always those most used | who knows what comes |\n\
         {}{}|\n",
        rules.collect::<String>(),
        "| --- ".repeat(7),
    );
    for (cells, trace) in traces {
        let repeated = [1, 8].map(|before| 100.0 * trace.repeated(before));
        for room in ROOM {
            let experts = trace.experts() * trace.layers.len();
            let held = (room * experts as f64) as usize;
            let found = POLICIES.map(|policy| trace.replay(policy, held, FILLING).rate());
            let found = found.map(|rate| format!("{:.0} %", 100.0 * rate));
            let [again, within] = repeated;
            let _ = writeln!(
                text,
                "| {cells} | {again:.0} % | {within:.0} % | {:.1} % | {} |",
                100.0 * room,
                found.join(" | ")
            );
        }
    }
    text
}
