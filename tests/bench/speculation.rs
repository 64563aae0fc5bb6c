//! What speculation gives, off against on, for a ring and for llama-server each: tokens per second of one request.
//!
//! Small models do not do as they are told. So that an answer repeats what stands in its prompt, the prompt has a text several times, and
//! breaks off in the middle of the last time: the likeliest continuation is the rest. Code and its edit are there once each, a passage of a
//! book three times, for small models seldom go on quoting what they saw once. In prose nothing repeats, and speculation must not
//! cost. There tokens are drawn (temperature 1, a seed for each answer): the likeliest ones alone would soon turn in circles.
//!
//! What prose costs is less than what a machine's speed changes by from one minute to the next. So all settings of a program are there at the
//! same time, and answer in turn; each answer is compared with the one of the same prompt and seed without speculation.

use prima_tests::assets;
use serde_json::json;

use crate::Effort;
use crate::client::Client;
use crate::contenders::{Contender, Contenders, moby_dick};
use crate::error::BenchError;
use crate::peer::Programs;
use prima_tests::statistics::Samples;

struct Subject {
    model: &'static str,
    /// A model to draft with. The one here has the same weights, in another format: no draft is better.
    draft: Option<&'static str>,
    /// At most: large models take long.
    turns: usize,
}

const SUBJECTS: [Subject; 3] = [
    Subject {
        model: "SmolLM2-135M-Instruct-Q4_1",
        draft: None,
        turns: 7,
    },
    Subject {
        model: "SmolLM2-135M-Instruct-F32",
        draft: Some("SmolLM2-135M-Instruct-Q4_1"),
        turns: 5,
    },
    Subject {
        model: "TinyLlama-1.1B-Chat-Q4_K_M",
        draft: None,
        turns: 7,
    },
];

/// Turns of llama-server, at most: it is there to be compared with, and takes longer.
const PEER_TURNS: usize = 3;
/// Turns of prose, each with new processes, and answers of a turn. Single ones differ by more than what is looked for.
const PROSE_TURNS: usize = 3;
const PROSE_ANSWERS: usize = 8;

/// Part of this program's own source, and an edit of it.
const SOURCE: &str = include_str!("../src/statistics.rs");
const EDIT: (&str, &str) = ("Samples", "Measurements");
/// Letters of a text that a prompt has several times, and of these the last time.
const TEXT: usize = 1800;
const LAST_TIME: usize = 700;

/// The ways to run a ring and llama-server; each contender's first is without.
const SETTINGS: [Setting; 7] = [
    Setting {
        name: "prima, off",
        contender: Contender::Prima,
        options: &["--no-speculation"],
        drafts: false,
    },
    Setting {
        name: "prima",
        contender: Contender::Prima,
        options: &[],
        drafts: false,
    },
    Setting {
        name: "prima, draft model",
        contender: Contender::Prima,
        options: &["--draft"],
        drafts: true,
    },
    Setting {
        name: "llama.cpp, off",
        contender: Contender::LlamaCpp,
        options: &[],
        drafts: false,
    },
    Setting {
        name: "llama.cpp, `--spec-default`, which is ngram-mod",
        contender: Contender::LlamaCpp,
        options: &["--spec-default"],
        drafts: false,
    },
    // As its documentation has it for source code that is written again.
    Setting {
        name: "llama.cpp, ngram-simple",
        contender: Contender::LlamaCpp,
        options: &["--spec-type", "ngram-simple", "--spec-draft-n-max", "64"],
        drafts: false,
    },
    Setting {
        name: "llama.cpp, draft model",
        contender: Contender::LlamaCpp,
        options: &["--spec-type", "draft-simple", "--model-draft"],
        drafts: true,
    },
];

struct Setting {
    name: &'static str,
    contender: Contender,
    options: &'static [&'static str],
    /// Whether the draft's path follows; left out where there is no draft.
    drafts: bool,
}

/// One prompt.
pub struct Workload {
    prompt: String,
    /// The rest of the text that breaks off; none in prose.
    rest: Option<String>,
    /// Tokens are drawn, not the likeliest.
    drawn: bool,
}

/// One model.
pub struct Speculation {
    pub model: &'static str,
    pub tokens: usize,
    pub settings: Vec<Measured>,
}

/// One setting: a cell for each of [`WORKLOADS`].
pub struct Measured {
    pub name: &'static str,
    pub contender: Contender,
    options: Vec<String>,
    pub cells: [Cell; WORKLOADS.len()],
}

#[derive(Default)]
pub struct Cell {
    /// Tokens per second of one request, from its first token on.
    pub decode: Samples,
    /// How many times as fast each answer came as without speculation; only where both ran side by side.
    gains: Samples,
    /// Percent of the answer that are the text's rest; none in prose.
    pub copied: Samples,
    /// Tokens of all answers, but for the first of each, which comes with its prompt.
    pub decoded: usize,
    /// Tokens of drafts, and those of them that were right, of all turns.
    pub drafted: usize,
    pub accepted: usize,
    /// Of each turn.
    pub answers: Vec<String>,
}

pub const WORKLOADS: [&str; 3] = ["code edit", "quotation", "prose"];
/// The last of these.
const PROSE: usize = WORKLOADS.len() - 1;

pub fn measure(effort: &Effort, peer: &Programs) -> Result<Vec<Speculation>, BenchError> {
    let book = moby_dick()?;
    SUBJECTS
        .iter()
        .map(|subject| measure_model(effort, peer, subject, &book))
        .collect()
}

fn measure_model(
    effort: &Effort,
    peer: &Programs,
    subject: &Subject,
    book: &str,
) -> Result<Speculation, BenchError> {
    let model = subject.model;
    let contenders = Contenders::open(model, peer)?;
    let repeated = [repeated_code(), repeated_passage(book)];
    let mut settings = settings(subject)?;
    for turn in 1..=subject.turns.min(effort.turns) {
        // Who begins alternates.
        settings.reverse();
        for setting in &mut settings {
            if setting.contender == Contender::LlamaCpp && turn > PEER_TURNS {
                continue;
            }
            eprintln!("speculation, turn {turn}: {model}, {}", setting.name);
            let client = setting.start(&contenders)?;
            for (workload, cell) in repeated.iter().zip(&mut setting.cells) {
                cell.measure(&client, workload, effort.decode, turn)?;
            }
        }
    }
    settings.sort_by_key(|setting| SETTINGS.iter().position(|one| one.name == setting.name));
    for contender in [Contender::Prima, Contender::LlamaCpp] {
        eprintln!("speculation, prose: {model}, {}", contender.name());
        let own = settings.iter_mut();
        let own = own.filter(|setting| setting.contender == contender);
        measure_prose(effort, &contenders, own.collect(), book)?;
    }
    let rings = settings
        .iter()
        .filter(|setting| setting.contender == Contender::Prima);
    let texts = rings.map(|ring| ring.cells.each_ref().map(|cell| &cell.answers));
    let texts: Vec<_> = texts.collect();
    if texts.iter().any(|answers| *answers != texts[0]) {
        let what = format!("a prompt, by speculation with {model}");
        return Err(BenchError::Changed { what });
    }
    Ok(Speculation {
        model,
        tokens: effort.decode,
        settings,
    })
}

/// Of all settings of one contender, of which the first is without speculation.
fn measure_prose(
    effort: &Effort,
    contenders: &Contenders<'_>,
    mut settings: Vec<&mut Measured>,
    book: &str,
) -> Result<(), BenchError> {
    for turn in 0..PROSE_TURNS.min(effort.turns) {
        let clients = settings.iter().map(|setting| setting.start(contenders));
        let clients: Vec<Client> = clients.collect::<Result<_, _>>()?;
        for answer in 1..=PROSE_ANSWERS {
            let seed = turn * PROSE_ANSWERS + answer;
            let workload = Workload::prose(book, seed);
            let mut order: Vec<usize> = (0..settings.len()).collect();
            // Who begins alternates.
            if seed.is_multiple_of(2) {
                order.reverse();
            }
            let mut speeds = vec![f64::NAN; settings.len()];
            for place in order {
                let (client, cell) = (&clients[place], &mut settings[place].cells[PROSE]);
                speeds[place] = cell.measure(client, &workload, effort.decode, seed)?;
            }
            for (setting, speed) in settings.iter_mut().zip(&speeds).skip(1) {
                setting.cells[PROSE].gains.push(speed / speeds[0]);
            }
        }
    }
    Ok(())
}

impl Speculation {
    /// The cells of a contender without speculation.
    pub fn off(&self, contender: Contender) -> &[Cell; WORKLOADS.len()] {
        let mut settings = self.settings.iter();
        let off = settings.find(|setting| setting.contender == contender);
        &off.expect("each contender's first setting").cells
    }
}

impl Measured {
    fn start(&self, contenders: &Contenders<'_>) -> Result<Client, BenchError> {
        let options: Vec<&str> = self.options.iter().map(String::as_str).collect();
        contenders.start(self.contender, &options)
    }
}

impl Cell {
    /// One answer. Returns its tokens per second, as they are kept, too.
    pub fn measure(
        &mut self,
        client: &Client,
        workload: &Workload,
        tokens: usize,
        seed: usize,
    ) -> Result<f64, BenchError> {
        let mut body = client.request(workload.prompt.as_str(), tokens);
        if workload.drawn {
            body["temperature"] = json!(1);
            body["seed"] = json!(seed);
        }
        let answer = client.answer(&body)?;
        let speed = 1.0 / answer.seconds_per_token;
        self.decode.push(speed);
        self.decoded += tokens - 1;
        self.drafted += answer.drafted;
        self.accepted += answer.accepted;
        if let Some(rest) = &workload.rest {
            let same = answer
                .text
                .chars()
                .zip(rest.chars())
                .take_while(|(a, b)| a == b);
            let share = same.count() as f64 / answer.text.chars().count() as f64;
            self.copied.push(100.0 * share);
        }
        self.answers.push(answer.text);
        Ok(speed)
    }

    /// How many times as fast tokens come as in `off`, by each answer where both ran side by side.
    pub fn gains_over(&self, off: &Cell) -> Samples {
        match self.gains.count() {
            0 => Samples::from_iter([self.decode.median() / off.decode.median()]),
            _ => self.gains.clone(),
        }
    }
}

/// Those that the subject has what they take for.
fn settings(subject: &Subject) -> Result<Vec<Measured>, BenchError> {
    let mut settings = Vec::new();
    for setting in &SETTINGS {
        let mut options: Vec<String> = setting.options.iter().map(|one| one.to_string()).collect();
        match (setting.drafts, subject.draft) {
            (true, None) => continue,
            (true, Some(draft)) => {
                let path = assets::path(&format!("models/{draft}.gguf"))?;
                options.push(path.display().to_string());
            }
            (false, _) => {}
        }
        settings.push(Measured {
            name: setting.name,
            contender: setting.contender,
            options,
            cells: Default::default(),
        });
    }
    Ok(settings)
}

/// A source file, and its edit that breaks off.
pub fn repeated_code() -> Workload {
    let source = part(SOURCE, 0);
    let (old, new) = EDIT;
    let edited = source.replace(old, new);
    let between = format!("\n\n// The same file, with {old} renamed to {new}:\n\n");
    Workload::breaks_off(&format!("{source}{between}"), &edited)
}

/// A passage of a book that stands there three times, and breaks off in the last.
pub fn repeated_passage(book: &str) -> Workload {
    let passage = part(&unbroken(book), 0);
    Workload::breaks_off(&format!("{passage}\n\n").repeat(2), &passage)
}

impl Workload {
    /// Behind a whole word: models take its part for something else.
    fn breaks_off(before: &str, last: &str) -> Self {
        let letters = last.char_indices().skip(LAST_TIME);
        let mut ends = letters.filter(|(_, letter)| letter.is_whitespace());
        let end = ends.next().map_or(last.len(), |(place, _)| place);
        let (begun, rest) = last.split_at(end);
        Self {
            prompt: format!("{before}{begun}"),
            rest: Some(rest.to_owned()),
            drawn: false,
        }
    }

    /// A part of a book, from 1 on: the first stands in another prompt.
    pub fn prose(book: &str, number: usize) -> Self {
        Self {
            prompt: part(book, number),
            rest: None,
            drawn: true,
        }
    }

    /// The same, by the likeliest tokens.
    pub fn greedy_prose(book: &str, number: usize) -> Self {
        Self {
            drawn: false,
            ..Self::prose(book, number)
        }
    }

    pub fn prompt(&self) -> &str {
        &self.prompt
    }
}

/// Each paragraph on one line: models seldom break lines where a book does.
fn unbroken(text: &str) -> String {
    let paragraphs = text.split("\n\n");
    let lines: Vec<String> = paragraphs.map(|one| one.replace('\n', " ")).collect();
    lines.join("\n\n")
}

fn part(text: &str, number: usize) -> String {
    text.chars().skip(number * TEXT).take(TEXT).collect()
}
