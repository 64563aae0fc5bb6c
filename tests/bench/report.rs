//! The results as Markdown, for people: what was measured, on what, and how it stands against its goals.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::engine_speed::{AT_ONCE, DEEP, Deep, EngineSpeed, EngineSpeeds, Pair};
use crate::error::BenchError;
use crate::hop_cost::HopCost;
use crate::kernel_speed::{COLS, Cell, KernelSpeeds, ROWS};

use crate::machines::{Outcome, READINGS, Reading};
use crate::memory_limit::UnderLimit;
use crate::planning_speed::{MACHINES, PlanningSpeed};
use crate::prediction::Prediction;
use crate::ring_speed::{REQUESTS, RingSpeed};
use prima_engine::kernels::IsaLevel;
use prima_tests::statistics::{Samples, error_percent};

/// The goals of the kernels: times llama.cpp.
const DECODE_GOAL: f64 = 1.1;
const PREFILL_GOAL: f64 = 1.0;
const DEEP_GOAL: f64 = 1.2;
const AT_ONCE_GOAL: f64 = 1.1;
/// The goals of the ring's first release.
const SLOPE_GOAL: f64 = 1.5; // times bare TCP
const FIXED_GOAL: f64 = 0.3; // milliseconds per token
const THREE_MEMBERS_GOAL: f64 = 0.85; // of one member's decode
/// The goal of residency, percent.
const PRESSURE_GOAL: f64 = 6.0;
/// The goals of the planner.
pub const PREDICTION_GOAL: f64 = 20.0; // percent of the time per token
const FIRST_GOAL: f64 = 12.0; // milliseconds
const PROOF_GOAL: f64 = 1.0; // seconds

/// The title and what holds for all sections.
pub fn title(command: &str) -> String {
    format!(
        "# What `{command}` measured\n\n{}\n\nOf {}. Medians (smallest to largest; how many turns, `x 7`); what is compared took turns in one run, \
         and who begins alternates.\n",
        machine(),
        revision()
    )
}

/// Where the results of this machine are kept: a folder named after its processor, and the level of its kernels, since a virtual machine often hides
/// which processor of a make it has.
pub fn folder(results: &Path) -> PathBuf {
    let name = format!("{} {} cores {}", processor(), cores(), level());
    let letters = name.replace("(R)", "").replace("(TM)", "").to_lowercase();
    let words = letters.split(|letter: char| !letter.is_ascii_alphanumeric());
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    results.join(words.join("-"))
}

/// The commit that was measured, and whether anything was changed since.
fn revision() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git")
            .args(["-C", env!("CARGO_MANIFEST_DIR")])
            .args(arguments)
            .output()
            .ok()
            .filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else {
        return "an unknown commit".to_owned();
    };
    // Earlier results do not count as changes.
    let changes = git(&["status", "--porcelain", "--", ":/", ":!results"]);
    match changes.is_some_and(|changes| changes.is_empty()) {
        true => format!("commit {commit}"),
        false => format!("commit {commit} with changes that are not committed"),
    }
}

/// The section about the engine alone.
pub fn engine(speeds: &EngineSpeeds) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = write!(
        text,
        "\n## The engine beside llama.cpp\n\nTokens per second, {} threads each; llama-bench and llama-batched-bench of llama-cpp-python 0.3.36, built \
         natively on this machine.\n\nThe machine's limits: {} GB/s of memory read, {} billion operations per second on bytes in registers. \
         The last column is the share of these that decode and prefill reach: of weights read, where caches do not hold them; of products with quantized weights.\n\n\
         | model | | engine | llama.cpp | ratio | goal | | of the limit |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n",
        speeds.threads,
        scaled(&speeds.read, 1e9, 1),
        scaled(&speeds.operations, 1e9, 0),
    );
    for speed in &speeds.models {
        engine_rows(&mut text, speeds, speed);
    }
    text
}

fn engine_rows(text: &mut String, speeds: &EngineSpeeds, speed: &EngineSpeed) {
    let mut row = |what: String, pair: &Pair, goal: f64, share: Option<f64>| {
        let share = share.map_or(String::new(), |share| format!("{share:.2}"));
        let _ = writeln!(
            text,
            "| {} | {what} | {} | {} | **{:.2}** | {goal} | {} | {share} |",
            speed.model,
            spread(&pair.engine, 1),
            spread(&pair.llama_cpp, 1),
            pair.ratio(),
            verdict(pair.ratio() >= goal),
        );
    };
    row(
        format!("decode {}", speed.decode_tokens),
        &speed.decode,
        DECODE_GOAL,
        speed
            .bytes
            .map(|bytes| speed.decode.engine.median() * bytes / speeds.read.median()),
    );
    row(
        format!("prefill {}", speed.prefill_tokens),
        &speed.prefill,
        PREFILL_GOAL,
        speed.operations.map(|operations| {
            speed.prefill.engine.median() * operations / speeds.operations.median()
        }),
    );
    for (deep, pair, setting) in &speed.deep {
        let (what, goal) = match deep {
            Deep::Decode => ("decode", DEEP_GOAL),
            Deep::Prefill => ("prefill", PREFILL_GOAL),
        };
        let (tokens, setting) = (deep.tokens(), setting.name());
        let what = format!(
            "{what} {tokens} after {DEEP}, llama.cpp with flash attention {setting}, which is its better"
        );
        row(what, pair, goal, None);
    }
    row(
        format!("decode {}, {AT_ONCE} at once, in all", speed.at_once_tokens),
        &speed.at_once,
        AT_ONCE_GOAL,
        None,
    );
}

/// The section about the kernels.
pub fn kernels(speeds: &KernelSpeeds) -> String {
    let mut text = format!(
        "\n## Kernels\n\nA matrix is {ROWS} x {COLS}, {} threads. The limit: what reading memory alone reaches, and products of bytes that are in registers \
         already (plain Rust has no such limit of its own).\n",
        speeds.threads
    );
    type Metric = fn(&Cell) -> &Samples;
    let decode: Metric = |cell| &cell.decode;
    let prefill: Metric = |cell| &cell.prefill;
    let tables = [
        ("Decode, GB/s of weights read from memory", decode, 1e9, 1),
        (
            "Prefill, 128 rows of activations, billions of operations per second, a product and a sum being two",
            prefill,
            1e9,
            0,
        ),
    ];
    for (what, metric, unit, digits) in tables {
        let _ = write!(text, "\n{what}:\n\n| | {} |\n|", speeds.levels.join(" | "));
        text += &" --- |".repeat(1 + speeds.levels.len());
        text.push('\n');
        for (format, cells) in &speeds.formats {
            let cells: Vec<String> = cells
                .iter()
                .map(|cell| scaled(metric(cell), unit, digits))
                .collect();
            let _ = writeln!(text, "| {format} | {} |", cells.join(" | "));
        }
    }
    let _ = write!(
        text,
        "\n| | {} |\n|{}\n",
        speeds.levels.join(" | "),
        " --- |".repeat(1 + speeds.levels.len())
    );
    for (what, samples, unit, digits) in [
        (
            "attention of one row, 32 heads on 8 of 64, at 4096, µs",
            &speeds.attention_decode,
            1e-6,
            0,
        ),
        (
            "attention of 512 rows, ms",
            &speeds.attention_prefill,
            1e-3,
            1,
        ),
        ("an empty job, µs", &speeds.dispatch, 1e-6, 2),
    ] {
        let cells: Vec<String> = samples
            .iter()
            .map(|samples| scaled(samples, unit, digits))
            .collect();
        let _ = writeln!(text, "| {what} | {} |", cells.join(" | "));
    }
    text
}

/// The sections about rings on one machine.
pub fn rings(hops: &HopCost, ring: &[RingSpeed]) -> String {
    let mut text = String::new();
    hop_section(&mut text, hops);
    ring_section(&mut text, ring);
    text
}

/// The section about models that are larger than memory.
pub fn memory_limits(limits: Option<&[UnderLimit]>) -> String {
    let mut text = String::from("\n## Less memory than the model\n\n");
    let Some(limits) = limits else {
        text += "Left out on this machine: it takes root and a writable memory cgroup.\n";
        return text;
    };
    let _ = write!(
        text,
        "{} (4.9 GB) on one machine, tokens per second under a limit of memory, 2 threads. llama.cpp: in its map, not repacked, which is \
         its best there.\n\n\
         | limit | prima | llama.cpp | ratio | goal | | predicted | MB read a token | planned |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
        crate::memory_limit::MODEL
    );
    for limit in limits {
        let ratio = limit.ring.median() / limit.llama_cpp.median();
        let _ = writeln!(
            text,
            "| {} MB | {} | {} | **{ratio:.2}** | {} | {} | {} | {} | {} |",
            limit.megabytes,
            spread(&limit.ring, 2),
            spread(&limit.llama_cpp, 2),
            limit.goal,
            verdict(ratio >= limit.goal),
            spread(&limit.predicted, 2),
            spread(&limit.read, 0),
            spread(&limit.planned_read, 0),
        );
    }
    text
}

/// The section about rings of separate machines.
pub fn machines(outcomes: Option<&[Outcome]>) -> String {
    let mut text = String::from("\n## Rings of separate machines\n\n");
    let Some(outcomes) = outcomes else {
        text += "Left out on this machine: it takes root and writable cgroups.\n";
        return text;
    };
    text += "Each machine has its own limits of memory, processors and disk, and its own copy of the model. It measures itself, `prima plan` makes the plan. \
        Memory pressure is the fall of the available memory, as a share of all. The error is by how much longer a token takes than predicted.\n\n";
    let (ahead, others): (Vec<&Outcome>, Vec<&Outcome>) = outcomes
        .iter()
        .partition(|outcome| outcome.setting.reading == Reading::Ahead);
    text += &machines_table(&ahead);
    let _ = writeln!(text, "\nGoal: an error below {PREDICTION_GOAL} %.");
    let _ = write!(
        text,
        "\n### What each part of reading weights gives\n\n{}, tokens per second of 8 tokens, of 3 with the page cache.\n\n\
         | machines | | rounds | tokens per second | times the page cache |\n| --- | --- | --- | --- | --- |\n",
        crate::machines::LARGE
    );
    for machines in [crate::machines::TWO, crate::machines::FOUR] {
        let of = |reading| {
            let same = |one: &&&Outcome| {
                one.setting.machines == machines && one.setting.reading == reading
            };
            others
                .iter()
                .chain(&ahead)
                .filter(same)
                .copied()
                .collect::<Vec<_>>()
        };
        let least = of(Reading::PageCache)
            .first()
            .map_or(f64::NAN, |one| one.measured.median());
        for (reading, name) in READINGS {
            for one in of(reading) {
                let _ = writeln!(
                    text,
                    "| {} | {} | {} | {} | **{:.1}** |",
                    one.setting.describe_machines(),
                    name,
                    one.setting.rounds,
                    spread(&one.measured, 3),
                    one.measured.median() / least
                );
            }
        }
    }
    text += "\n![tokens per second by how weights are read](reading.svg)\n";
    text
}

/// The report about a model of 70B.
pub fn machines_70b(outcomes: &[Outcome]) -> String {
    let all: Vec<&Outcome> = outcomes.iter().collect();
    format!(
        "{}\nRandom weights in the shape of Llama 3 70B (42 GB, Q4_K_M) in a ring of machines with 4 GiB each, that read one file on \
         one disk.\n\n{}\nGoal: memory pressure below {PRESSURE_GOAL} %: {}.\n",
        title("make bench-70b"),
        machines_table(&all),
        pressure_verdict(outcomes)
    )
}

/// The report about a mixture of experts in a ring.
pub fn machines_mixture(outcomes: &[Outcome]) -> String {
    let all: Vec<&Outcome> = outcomes.iter().collect();
    let of = |reading| all.iter().find(|one| one.setting.reading == reading);
    let rate = |reading| of(reading).map_or(f64::NAN, |one| one.measured.median());
    let mut text = format!(
        "{}\nA model in the shape of Qwen3-30B-A3B (18.6 GB, Q4_K_M) with all 48 layers and random weights. Machines with 4 GiB each make a ring; \
         they share two cores and read one file on one disk. It was read through before: where this is a virtual machine, its host may keep it. Tokens are random. \
         First as planned, then with the page cache alone (`--no-streaming`), whose time is not predicted.\n\n{}\nTimes the page cache alone: \
         **{:.1}**. Goal: memory pressure below {PRESSURE_GOAL} %: {}.\n",
        title("make bench-experts-ring"),
        machines_table(&all),
        rate(Reading::Ahead) / rate(Reading::PageCache),
        pressure_verdict(outcomes)
    );
    if let Some(Outcome {
        known, measured, ..
    }) = of(Reading::Ahead)
    {
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "\nThe first plan takes it that tokens choose all experts alike. But of random routers, too, some experts are likelier than others, in some \
             layers more than in others. Members counted, just before the timed tokens, how many of the expected misses came. This is \
             predicted with it, as an operator's next plan does (`prima plan --expert-misses`):\n\n\
             | misses that came, % | predicted | measured | error of the time per token | | MB read a token, planned |\n| --- | --- | --- | --- | --- | --- |\n\
             | {} | {} | {} |\n",
            spread(&known.expert_misses, 0),
            predicted_and_measured(&known.predicted, measured, 2),
            spread(&known.planned_read, 0),
        );
    }
    text
}

fn pressure_verdict(outcomes: &[Outcome]) -> &'static str {
    let low = |one: &Outcome| one.pressure_percent.largest() < PRESSURE_GOAL;
    verdict(outcomes.iter().all(low))
}

fn machines_table(outcomes: &[&Outcome]) -> String {
    let mut text = String::from(
        "| model | machines | rounds | predicted | measured | error of the time per token | | MB read a token | planned | most memory pressure, % | most anonymous MB a member |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for one in outcomes {
        let error = one.error_percent();
        // What the page cache does is neither planned nor counted.
        let [predicted, error, verdict, read, planned_read] = match one.setting.reading {
            Reading::PageCache => <[String; 5]>::default(),
            Reading::LeastAhead | Reading::Ahead => [
                spread(&one.predicted, 2),
                format!("{error:+.0} %"),
                verdict(error.abs() < PREDICTION_GOAL).to_owned(),
                spread(&one.read, 0),
                spread(&one.planned_read, 0),
            ],
        };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {predicted} | {} | {error} | {verdict} | {read} | {planned_read} | {:.1} | {:.0} |",
            one.setting.model,
            one.setting.describe_machines(),
            one.setting.rounds,
            spread(&one.measured, 2),
            one.pressure_percent.largest(),
            one.anonymous.largest()
        );
    }
    text
}

/// Four cells: what was predicted, what was measured, by how much longer a token took, and whether that meets the goal.
pub fn predicted_and_measured(predicted: &Samples, measured: &Samples, digits: usize) -> String {
    let error = error_percent(predicted, measured);
    format!(
        "{} | {} | {error:+.0} % | {}",
        spread(predicted, digits),
        spread(measured, digits),
        verdict(error.abs() < PREDICTION_GOAL)
    )
}

/// The section about the planner.
pub fn planner(predictions: &[Prediction], planning: &PlanningSpeed) -> String {
    let mut text = String::from(
        "\n## The planner\n\nTokens per second that `prima run` predicted of its own plan, and what the ring then decoded. The error is by how \
         much longer a token takes than predicted.\n\n\
         | model | members x rounds | predicted | measured | error of the time per token | |\n| --- | --- | --- | --- | --- | --- |\n",
    );
    for one in predictions {
        let _ = writeln!(
            text,
            "| {} | {} x {} | {} |",
            one.model,
            one.members,
            one.rounds,
            predicted_and_measured(&one.predicted, &one.measured, 0)
        );
    }
    let (first, proof) = (planning.first.median(), planning.seconds.median());
    let _ = writeln!(
        text,
        "\nGoal: an error below {PREDICTION_GOAL} %.\n\nPlanning {} layers on {MACHINES} machines ({} take part): a first answer, {:.0} % slower than the best, after {} ms (goal {FIRST_GOAL} ms: {}); \
         the best, proven to a thousandth, after {} s (goal {PROOF_GOAL} s: {}).",
        planning.layers,
        planning.members,
        planning.first_worse_percent,
        spread(&planning.first, 2),
        verdict(first <= FIRST_GOAL),
        spread(&planning.seconds, 3),
        verdict(proof <= PROOF_GOAL)
    );
    text
}

/// Writes a file of the report.
pub fn write(path: &Path, text: &str) -> Result<(), BenchError> {
    let write = || {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(path, text)
    };
    write().map_err(|source| BenchError::Write {
        path: path.to_owned(),
        source,
    })
}

fn hop_section(text: &mut String, cost: &HopCost) {
    let (ring, tcp) = cost.lines();
    let (slope, fixed) = (ring.slope / tcp.slope, cost.fixed());
    let _ = write!(
        text,
        "\n## What a hop costs\n\n{}, one thread per member, loopback, {} bytes a hop. One process computes a token in {} ms. \
         What members compute is by their own clocks, the ring is all the rest. Bare TCP hands on the same bytes as often, with \
         as much computing between. Milliseconds per token:\n\n\
         | members x rounds | hops | members compute | the ring adds | bare TCP |\n| --- | --- | --- | --- | --- |\n",
        cost.model,
        cost.bytes,
        spread(&cost.one_process, 2)
    );
    for shape in &cost.rings {
        let _ = writeln!(
            text,
            "| {} x {} | {} | {} | {} | {} |",
            shape.members,
            shape.rounds,
            shape.hops(),
            spread(&shape.computing, 2),
            spread(&shape.ring, 3),
            spread(&shape.tcp, 3)
        );
    }
    let _ = write!(
        text,
        "\n| | ring | bare TCP | goal | |\n| --- | --- | --- | --- | --- |\n\
         | ms per hop: slope of the line through 2 to 30 hops | {:.4} | {:.4} | at most {SLOPE_GOAL} times bare TCP: {slope:.2} | {} |\n\
         | ms per token besides: a ring of one member, which has no hops | {fixed:.3} | 0 | below {FIXED_GOAL} | {} |\n\
         | ms per token where that line meets zero hops | {:.3} | {:.3} | | |\n\n![hops](hops.svg)\n",
        ring.slope,
        tcp.slope,
        verdict(slope <= SLOPE_GOAL),
        verdict(fixed < FIXED_GOAL),
        ring.fixed,
        tcp.fixed,
    );
}

fn ring_section(text: &mut String, rings: &[RingSpeed]) {
    let Some((one, three)) = rings.first().zip(rings.last()) else {
        return;
    };
    let _ = write!(
        text,
        "\n## Members on one machine, requests at once\n\n{}, {} threads per member, tokens per second at the HTTP endpoint.\n\n\
         | | {} member | {} members | ratio |\n| --- | --- | --- | --- |\n",
        one.model, one.threads, one.members, three.members
    );
    let mut row = |what: &str, one: &Samples, three: &Samples| {
        let ratio = three.median() / one.median();
        let _ = writeln!(
            text,
            "| {what} | {} | {} | **{ratio:.2}** |",
            spread(one, 1),
            spread(three, 1)
        );
    };
    row("decode, one request", &one.decode, &three.decode);
    for (requests, (one, three)) in REQUESTS.iter().zip(one.at_once.iter().zip(&three.at_once)) {
        row(&format!("{requests} at once, in all"), one, three);
    }
    let ratio = three.decode.median() / one.decode.median();
    let _ = writeln!(
        text,
        "\nGoal: three members decode at least {THREE_MEMBERS_GOAL} times as fast as one: {ratio:.2}, {}.",
        verdict(ratio >= THREE_MEMBERS_GOAL)
    );
}

pub fn spread(samples: &Samples, digits: usize) -> String {
    scaled(samples, 1.0, digits)
}

/// In units of `unit`.
pub fn scaled(samples: &Samples, unit: f64, digits: usize) -> String {
    let scale = |number: f64| number / unit;
    format!(
        "{:.digits$} ({:.digits$} to {:.digits$}; x {})",
        scale(samples.median()),
        scale(samples.smallest()),
        scale(samples.largest()),
        samples.count()
    )
}

pub fn verdict(met: bool) -> &'static str {
    if met { "met" } else { "missed" }
}

/// Processor, cores, kernels and what else was running.
fn machine() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    format!(
        "{} ({}), {} cores, {} kernels, load average at the end {}.",
        processor(),
        std::env::consts::ARCH,
        cores(),
        level(),
        load.split_whitespace().next().unwrap_or("unknown")
    )
}

fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|line| line.starts_with("model name"));
    let name = line.and_then(|line| line.split_once(':'));
    name.map_or("unknown processor".to_owned(), |(_, name)| {
        name.trim().to_owned()
    })
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(0, Into::into)
}

/// Of instructions, the highest that this processor has kernels for.
fn level() -> &'static str {
    IsaLevel::detect().name()
}
