//! The sections about conversations, and how they stand against their goals.

use std::fmt::Write;

use crate::beside_prompt::{self, BesidePrompt};
use crate::chats::{AT_ONCE, Chats};
use crate::contenders::Contender;
use crate::encryption::{self, Encryption};
use crate::far_links::{self, FarLinks, GREEDY, GREEDY_TOKENS, ROW};
use crate::masks::{self, Mask};
use crate::report::{scaled, spread, verdict};
use crate::second_turn::SecondTurn;
use crate::siege::{self, Siege};
use crate::speculation::{Cell, Speculation, WORKLOADS};
use crate::streamed_speculation::Streamed;
use prima_tests::statistics::Samples;

/// Percent of its first turn that a ring takes to answer a second.
const SECOND_TURN_GOAL: f64 = 10.0;
/// Times the speed without speculation, where an answer copies its prompt, at least half of it.
const COPY_GOAL: f64 = 1.8;
/// Of the speed without speculation, where nothing can be proposed.
const PROSE_GOAL: f64 = 0.97;

/// Of the mean number of tokens of a pass, where weights are read for each.
const STREAMED_GOAL: f64 = 0.9;
/// Times the speed without speculation, of what a draft model drafts over links of so many milliseconds: one draft after the other, and ahead.
const FAR_GOALS: (u64, [f64; 2]) = (5, [1.8, 2.5]);
/// Percent of a token's time that its mask may take.
const MASK_GOAL: f64 = 5.0;
/// Times a hop in the clear, and milliseconds, that a hop over TLS may take.
const ENCRYPTION_GOAL: f64 = 1.1;
const HOP_GOAL: f64 = 0.15;
/// How much longer the slowest tokens may take under siege.
const SIEGE_GOAL: f64 = 1.2;
/// How much more memory rank 0 may take, in MiB.
const GROWTH_GOAL: f64 = 512.0;

/// What holds for all sections.
pub fn preamble(threads: usize) -> String {
    format!(
        "\nRings, of one member where nothing else is said, beside llama-server of llama-cpp-python 0.3.36, built natively on this machine, with its \
         prompt cache: both over HTTP, with {threads} threads each, the same context, and the same tokens of a prompt.\n"
    )
}

pub fn second_turns(turns: &[SecondTurn]) -> String {
    let mut text = String::from(
        "\n## The second turn of a conversation\n\nSeconds to the first token. The second turn repeats the first and its answer, and adds a \
         question; a ring that never saw the first answered it with the same text, each time.\n\n\
         | model | first turn | | first token, first turn | second turn | tokens cached | second to first | goal | |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for turn in turns {
        let peers_second = turn.waits.llama_cpp.second.median();
        for (name, waits, goal) in [
            ("prima", &turn.waits.prima, Some(SECOND_TURN_GOAL)),
            ("llama.cpp", &turn.waits.llama_cpp, None),
        ] {
            let percent = 100.0 * waits.second.median() / waits.first.median();
            let (goal, met) = match goal {
                Some(goal) => (
                    format!("at most {goal} %, and not after llama.cpp"),
                    verdict(percent <= goal && waits.second.median() <= peers_second),
                ),
                None => (String::new(), ""),
            };
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "| {} | {} tokens | {name} | {} | {} | {} | **{percent:.1} %** | {goal} | {met} |",
                turn.model,
                turn.shared,
                spread(&waits.first, 2),
                spread(&waits.second, 3),
                spread(&waits.cached, 0),
            );
        }
    }
    text
}

pub fn chats(all: &[Chats]) -> String {
    let mut text = format!(
        "\n## {AT_ONCE} short chats at once\n\nIn the memory of one context, for both. The quantiles are over the time from one token of an \
         answer to its next, in milliseconds.\n\n\
         | model | | prima | llama.cpp | ratio |\n| --- | --- | --- | --- | --- |\n"
    );
    for chats in all {
        let (prima, llama_cpp) = (&chats.together.prima, &chats.together.llama_cpp);
        let mut row = |what: String, prima: &Samples, llama_cpp: &Samples, digits| {
            let ratio = prima.median() / llama_cpp.median();
            let _ = writeln!(
                text,
                "| {} | {what} | {} | {} | **{ratio:.2}** |",
                chats.model,
                spread(prima, digits),
                spread(llama_cpp, digits),
            );
        };
        row(
            format!("tokens per second in all, {} each", chats.tokens),
            &prima.tokens_per_second,
            &llama_cpp.tokens_per_second,
            1,
        );
        row("p50 per token".into(), &prima.p50, &llama_cpp.p50, 1);
        row("p99 per token".into(), &prima.p99, &llama_cpp.p99, 1);
    }
    text
}

pub fn beside_prompt(all: &[BesidePrompt]) -> String {
    let mut text = format!(
        "\n## An answer beside a long prompt\n\nWhen {} tokens of an answer have come, another request is sent: for one token, after a prompt that nobody has \
         seen. Until that token has come: tokens per second of the answer, and the longest time from one of them to the next, in milliseconds; and \
         how many seconds it took. Beside it the same of each alone. Without speculation.\n\n\
         | model | | answer alone | beside the prompt | ratio | longest gap alone | beside the prompt | first token alone | beside the answer | ratio |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
        beside_prompt::BEFORE
    );
    for one in all {
        for setting in &one.settings {
            let (alone, together) = (&setting.alone, &setting.together);
            let ratio = |together: &Samples, alone: &Samples| together.median() / alone.median();
            let _ = writeln!(
                text,
                "| {}, a prompt of {} tokens | {} | {} | {} | **{:.2}** | {} | {} | {} | {} | **{:.2}** |",
                one.model,
                one.prompt,
                setting.name,
                spread(&alone.decode, 1),
                spread(&together.decode, 1),
                ratio(&together.decode, &alone.decode),
                scaled(&alone.longest_gap, 1e-3, 0),
                scaled(&together.longest_gap, 1e-3, 0),
                spread(&alone.first_token, 2),
                spread(&together.first_token, 2),
                ratio(&together.first_token, &alone.first_token),
            );
        }
    }
    text
}

pub fn speculation(all: &[Speculation]) -> String {
    let mut text = String::from(
        "\n## Speculation\n\nTokens per second of one request, and how many times as many as the same program without speculation. \
         Small models do not do as they are told, so a prompt has a text several times (a source file and its edit, or a passage of a book three \
         times) and breaks off in the middle of the last; how much of the answer is the text's rest stands beside, and how many of the drafted \
         tokens were right. Prose is drawn at temperature 1, from another part of a book each time. There all settings of a program ran side by side, \
         and a gain is that of an answer over the one of the same prompt and seed without speculation. A ring's answers are the same with and \
         without.\n\n",
    );
    let _ = write!(text, "| model | |");
    for workload in WORKLOADS {
        let _ = write!(text, " {workload} | gain | copied | right |");
    }
    let _ = writeln!(text, "\n|{}", " --- |".repeat(2 + 4 * WORKLOADS.len()));
    for one in all {
        for setting in &one.settings {
            let _ = write!(
                text,
                "| {}, {} tokens | {} |",
                one.model, one.tokens, setting.name
            );
            for (cell, off) in setting.cells.iter().zip(one.off(setting.contender)) {
                let copied = match cell.copied.count() {
                    0 => String::new(),
                    _ => format!("{:.0} %", cell.copied.median()),
                };
                let gains = cell.gains_over(off);
                let gain = match gains.count() {
                    1 => format!("{:.2}", gains.median()),
                    _ => spread(&gains, 2),
                };
                let (decode, right) = (spread(&cell.decode, 1), right(cell));
                let _ = write!(text, " {decode} | **{gain}** | {copied} | {right} |");
            }
            text.push('\n');
        }
    }
    let _ = write!(
        text,
        "\nGoals: a ring that copies half of its answer or more at least {COPY_GOAL} times as fast, and a ring's prose at least {PROSE_GOAL} times. \
         The least gain:"
    );
    for (nth, workload) in WORKLOADS.iter().enumerate() {
        let _ = write!(text, " {workload} {}.", least_gain(all, nth));
    }
    text.push('\n');
    text
}

/// How many of its drafted tokens were right, if there are any.
fn right(cell: &Cell) -> String {
    match cell.drafted {
        0 => String::new(),
        drafted => format!(
            "{} of {drafted}, {:.0} %",
            cell.accepted,
            100.0 * cell.accepted as f64 / drafted as f64
        ),
    }
}

/// The least that a ring gains with a workload, where its answers count, beside the goal.
fn least_gain(all: &[Speculation], workload: usize) -> String {
    let gains = all.iter().flat_map(|one| {
        let off = &one.off(Contender::Prima)[workload];
        let rings = one.settings.iter();
        // The first is without speculation.
        let rings = rings.filter(|setting| setting.contender == Contender::Prima);
        rings.skip(1).filter_map(move |ring| {
            let cell = &ring.cells[workload];
            let gain = cell.gains_over(off).median();
            match cell.copied.count() {
                0 => Some((gain, PROSE_GOAL)),
                _ => (cell.copied.median() >= 50.0).then_some((gain, COPY_GOAL)),
            }
        })
    });
    match gains.min_by(|(one, _), (other, _)| one.total_cmp(other)) {
        Some((gain, goal)) => format!("{gain:.2}, {}", verdict(gain >= goal)),
        None => "not judged, for no answer copies as much".to_owned(),
    }
}

pub fn streamed_speculation(all: Option<&[Streamed]>) -> String {
    let mut text = String::from(
        "\n## Speculation, where weights are read from disk\n\nThe code edit of `speculation.md`, under a limit of memory: each pass reads what does \
         not fit. Answers are the same with and without.\n\n| model | | tokens per second | tokens per pass | gain | goal | |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    let Some(all) = all else {
        return text + "\nNot measured: no memory cgroup could be made.\n";
    };
    for one in all {
        for setting in &one.settings {
            let mut same = one.settings.iter();
            let off = same.find(|other| other.contender == setting.contender);
            let gain = setting.decode.median() / off.map_or(f64::NAN, |off| off.decode.median());
            let speculates =
                setting.contender == Contender::Prima && setting.per_pass.median() > 1.0;
            let (goal, met) = match speculates {
                true => {
                    let goal = STREAMED_GOAL * setting.per_pass.median();
                    (format!("{goal:.2}"), verdict(gain >= goal))
                }
                false => (String::new(), ""),
            };
            let _ = writeln!(
                text,
                "| {}, {} MB, {} tokens | {} | {} | {} | **{gain:.2}** | {goal} | {met} |",
                one.model,
                one.megabytes,
                one.tokens,
                setting.name,
                spread(&setting.decode, 2),
                spread(&setting.per_pass, 2),
            );
        }
    }
    text
}

pub fn far_links(all: &[FarLinks]) -> String {
    let mut text = format!(
        "\n## Drafts that run ahead\n\nThe prompts of `speculation.md` with a draft model, in rings of {} members, of one thread each, whose links take time; \
         and greedy prose, the {GREEDY_TOKENS} likeliest tokens after other parts of the book: there the goals are judged, since the draft model drafts. \
         Tokens per second of one request, and how many times as many as without speculation; beside it what it would be by a formula on machines \
         of their own where a row costs {ROW} of a pass, and how many of the drafted tokens were right. Drafts of code and quotations come from the \
         text and take no time, those of prose from the draft model. \
         Answers are the same.\n\n| model | each link | |",
        far_links::MEMBERS
    );
    for workload in far_links::WORKLOADS {
        let _ = write!(text, " {workload} | gain | formula | right |");
    }
    let columns = 3 + 4 * far_links::WORKLOADS.len();
    let _ = writeln!(text, "\n|{}", " --- |".repeat(columns));
    for one in all {
        let guess = seconds_of_a_guess(all, one.milliseconds);
        for (nth, (name, cells)) in one.settings.iter().enumerate() {
            let _ = write!(
                text,
                "| {}: {} | {} ms | {name} |",
                one.model, one.what, one.milliseconds
            );
            for (workload, cell) in cells.iter().enumerate() {
                let gain = cell.decode.median() / one.settings[0].1[workload].decode.median();
                let guess = match cell.copied.count() {
                    0 => guess,
                    _ => 0.0,
                };
                // The first is without speculation.
                let expected = nth
                    .checked_sub(1)
                    .map(|form| format!("{:.2}", one.expected(workload, guess)[form]));
                let _ = write!(
                    text,
                    " {} | **{gain:.2}** | {} | {} |",
                    spread(&cell.decode, 1),
                    expected.unwrap_or_default(),
                    right(cell)
                );
            }
            text.push('\n');
        }
    }
    let (milliseconds, goals) = FAR_GOALS;
    for one in all.iter().filter(|one| one.milliseconds == milliseconds) {
        // The first is without speculation.
        let off = &one.settings[0].1[GREEDY];
        for ((name, cells), goal) in one.settings.iter().skip(1).zip(goals) {
            let gain = cells[GREEDY].decode.median() / off.decode.median();
            let _ = writeln!(
                text,
                "\nGoal of {name}, {}, {milliseconds} ms: greedy prose {goal} times as fast. {gain:.2}, {}.",
                one.model,
                verdict(gain >= goal)
            );
        }
    }
    text
}

/// Of the draft model: it is measured as a model, too.
fn seconds_of_a_guess(all: &[FarLinks], milliseconds: u64) -> f64 {
    let mut same = all.iter().filter(|one| one.milliseconds == milliseconds);
    let own = same.find(|one| one.model == far_links::DRAFT);
    own.map_or(f64::NAN, FarLinks::computing)
}

pub fn masks(all: &[Mask]) -> String {
    let mut text = format!(
        "\n## Answers of a form\n\nMilliseconds of a token of {}, of one request on a ring of one member. A form rules out tokens at each step; where it leaves \
         no choice, several tokens come in one step, which rings do unless told otherwise.\n\n\
         | form | any text | held to the form | cost | goal | | with what is forced |\n| --- | --- | --- | --- | --- | --- | --- |\n",
        masks::MODEL
    );
    for form in all {
        let percent = 100.0 * (form.held.median() / form.free.median() - 1.0);
        let _ = writeln!(
            text,
            "| {} | {} | {} | **{percent:.1} %** | at most {MASK_GOAL} % | {} | {} |",
            form.name,
            spread(&form.free, 3),
            spread(&form.held, 3),
            verdict(percent <= MASK_GOAL),
            spread(&form.jumping, 3),
        );
    }
    text
}

pub fn encryption(measured: &Encryption) -> String {
    let ratio = measured.encrypted.median() / measured.plain.median();
    format!(
        "\n## What encryption costs a hop\n\nA ring of two members on this machine, one thread each, with {}: in the clear, as `prima run` starts it, and over TLS, with a \
         member that `prima agent` lends. Milliseconds of a hop, without what members computed: what a token of {} hops takes more than one of {}.\n\n\
         | in the clear | over TLS | ratio | goal | |\n| --- | --- | --- | --- | --- |\n\
         | {} | {} | **{ratio:.2}** | at most {ENCRYPTION_GOAL}, and below {HOP_GOAL} ms | {} |\n",
        encryption::MODEL,
        encryption::MANY_HOPS,
        encryption::FEW_HOPS,
        spread(&measured.plain, 3),
        spread(&measured.encrypted, 3),
        verdict(ratio <= ENCRYPTION_GOAL && measured.encrypted.median() < HOP_GOAL)
    )
}

pub fn siege(models: &[Siege]) -> String {
    let mut text = format!(
        "\n## Under siege\n\n{} streams on a ring of one member, while others send 200 bodies of 4 MiB and open 1,000 connections that do nothing, \
         from this machine, with what the ring leaves of its processors. Milliseconds from one token to the next.\n\n\
         | model | | in peace | under siege | ratio | goal | |\n| --- | --- | --- | --- | --- | --- | --- |\n",
        siege::STREAMS
    );
    for measured in models {
        let (p50, p99) = (
            (&measured.p50_in_peace, &measured.p50_under_siege),
            (&measured.p99_in_peace, &measured.p99_under_siege),
        );
        for (name, (peace, war), goal) in [("p50", p50, None), ("p99", p99, Some(SIEGE_GOAL))] {
            let ratio = war.median() / peace.median();
            let (goal, met) = match goal {
                Some(goal) => (format!("at most {goal}"), verdict(ratio <= goal)),
                None => (String::new(), ""),
            };
            let [peace, war] = [peace, war].map(|seconds| scaled(seconds, 1e-3, 1));
            let _ = writeln!(
                text,
                "| {} | {name} | {peace} | {war} | **{ratio:.2}** | {goal} | {met} |",
                measured.model
            );
        }
    }
    for measured in models {
        let _ = writeln!(
            text,
            "\nWith {}, rank 0 grew by {} MiB; goal: below {GROWTH_GOAL}: {}.",
            measured.model,
            spread(&measured.grown, 0),
            verdict(measured.grown.largest() < GROWTH_GOAL)
        );
    }
    text
}
