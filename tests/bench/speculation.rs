//! What speculation gives, off against on, for a ring and for llama-server each: tokens per second of one request.
//!
//! Small models do not do as they are told. So that an answer repeats what stands in its prompt, the prompt has a text several times, and
//! breaks off in the middle of the last time: the likeliest continuation is the rest. Code and its edit are there once each, a passage of a
//! book three times, for small models seldom go on quoting what they saw once. In prose nothing repeats, and speculation must not
//! cost. There tokens are drawn (temperature 1, a seed for each turn): the likeliest ones alone would soon turn in circles.

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
    /// Percent of the answer that are the text's rest; none in prose.
    pub copied: Samples,
    /// Tokens of drafts, and those of them that were right, of all turns.
    pub drafted: usize,
    pub accepted: usize,
    /// Of each turn.
    pub answers: Vec<String>,
}

pub const WORKLOADS: [&str; 3] = ["code edit", "quotation", "prose"];

pub fn measure(effort: &Effort, peer: &Programs) -> Result<Vec<Speculation>, BenchError> {
    let workloads = workloads()?;
    SUBJECTS
        .iter()
        .map(|subject| measure_model(effort, peer, subject, &workloads))
        .collect()
}

fn measure_model(
    effort: &Effort,
    peer: &Programs,
    subject: &Subject,
    workloads: &[Workload; WORKLOADS.len()],
) -> Result<Speculation, BenchError> {
    let model = subject.model;
    let contenders = Contenders::open(model, peer)?;
    let mut settings = settings(subject)?;
    for turn in 1..=subject.turns.min(effort.turns) {
        // Who begins alternates.
        settings.reverse();
        for setting in &mut settings {
            if setting.contender == Contender::LlamaCpp && turn > PEER_TURNS {
                continue;
            }
            eprintln!("speculation, turn {turn}: {model}, {}", setting.name);
            let options: Vec<&str> = setting.options.iter().map(String::as_str).collect();
            let client = contenders.start(setting.contender, &options)?;
            for (workload, cell) in workloads.iter().zip(&mut setting.cells) {
                cell.measure(&client, workload, effort.decode, turn)?;
            }
        }
    }
    settings.sort_by_key(|setting| SETTINGS.iter().position(|one| one.name == setting.name));
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

impl Speculation {
    /// The cells of a contender without speculation.
    pub fn off(&self, contender: Contender) -> &[Cell; WORKLOADS.len()] {
        let mut settings = self.settings.iter();
        let off = settings.find(|setting| setting.contender == contender);
        &off.expect("each contender's first setting").cells
    }
}

impl Cell {
    pub fn measure(
        &mut self,
        client: &Client,
        workload: &Workload,
        tokens: usize,
        turn: usize,
    ) -> Result<(), BenchError> {
        let mut body = client.request(workload.prompt.as_str(), tokens);
        if workload.rest.is_none() {
            body["temperature"] = json!(1);
            body["seed"] = json!(turn);
        }
        let answer = client.answer(&body)?;
        self.decode.push(1.0 / answer.seconds_per_token);
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
        Ok(())
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

/// As in [`WORKLOADS`].
pub fn workloads() -> Result<[Workload; WORKLOADS.len()], BenchError> {
    let book = moby_dick()?;
    let passage = part(&unbroken(&book), 0);
    Ok([
        repeated_code(),
        Workload::breaks_off(&format!("{passage}\n\n").repeat(2), &passage),
        Workload {
            // One that nothing is known of from the prompts before.
            prompt: part(&book, 1),
            rest: None,
        },
    ])
}
