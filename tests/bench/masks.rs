//! What it costs to hold an answer to a form: milliseconds of one token with and without, on the same ring, one after the other. The ring has no
//! drafts, so that each token is a step of its own; what a form leaves no choice of is measured beside, on a ring that takes it along.
//!
//! The forms never end before the answer does, so that all answers have the same length.

use serde_json::{Value, json};

use crate::Effort;
use crate::client::Client;
use crate::contenders::{Contender, Contenders};
use crate::error::BenchError;
use crate::peer::Programs;
use prima_tests::statistics::Samples;

pub const MODEL: &str = "SmolLM2-135M-Instruct-Q4_1";
const PROMPT: &str = "All rivers of Europe as JSON:\n";
/// Times that an answer is measured in each turn: single answers differ by more than what is looked for.
const REPEATS: usize = 5;
const TURNS: usize = 3;

/// One form.
pub struct Mask {
    pub name: &'static str,
    body: Value,
    /// Milliseconds of a token: any text, by the form, and by the form where forced tokens come along.
    pub free: Samples,
    pub held: Samples,
    pub jumping: Samples,
}

fn forms() -> Vec<Mask> {
    let schema = json!({"type": "array", "minItems": 200, "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "length": {"type": "integer", "minimum": 1},
            "countries": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            "navigable": {"type": "boolean"},
        },
        "required": ["name", "length", "countries", "navigable"],
        "additionalProperties": false,
    }});
    let format = |schema| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}});
    [
        ("an array of objects by a JSON schema", format(schema)),
        (
            "any JSON",
            format(json!({"type": "array", "minItems": 200})),
        ),
        (
            "a regular expression",
            json!({"regex": "([A-Z][a-z]+( [a-z]+)+[.!?] )+"}),
        ),
        // Each sign leads to a state that was never there before.
        (
            "a regular expression that counts signs, words and sentences",
            json!({"regex": "([A-Z][a-z]{2,12}( [a-z]{1,12}){1,9}[.!?] ){200}"}),
        ),
    ]
    .map(|(name, body)| Mask {
        name,
        body,
        free: Samples::default(),
        held: Samples::default(),
        jumping: Samples::default(),
    })
    .into()
}

pub fn measure(effort: &Effort, peer: &Programs) -> Result<Vec<Mask>, BenchError> {
    let contenders = Contenders::open(MODEL, peer)?;
    let mut forms = forms();
    for turn in 1..=TURNS.min(effort.turns) {
        eprintln!("answers that are held to a form, turn {turn}");
        let single = contenders.start(Contender::Prima, &["--no-speculation"])?;
        for form in &mut forms {
            for repeat in 0..REPEATS {
                let with_form = (turn + repeat) % 2 == 0;
                for held in [with_form, !with_form] {
                    let milliseconds = form.milliseconds(&single, held, effort.decode)?;
                    let samples = if held { &mut form.held } else { &mut form.free };
                    samples.push(milliseconds);
                }
            }
        }
        drop(single);
        let drafting = contenders.start(Contender::Prima, &[])?;
        for form in &mut forms {
            let milliseconds = form.milliseconds(&drafting, true, effort.decode)?;
            form.jumping.push(milliseconds);
        }
    }
    Ok(forms)
}

impl Mask {
    fn milliseconds(&self, client: &Client, held: bool, tokens: usize) -> Result<f64, BenchError> {
        let mut body = client.request(PROMPT, tokens);
        if held {
            for (field, value) in self.body.as_object().into_iter().flatten() {
                body[field] = value.clone();
            }
        }
        Ok(1e3 * client.answer(&body)?.seconds_per_token)
    }
}
