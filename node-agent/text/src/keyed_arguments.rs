//! Arguments that a model writes by name, each between marks, as one JSON object while they come: Qwen-Coder's, GLM's and others' calls.
//!
//! Decides: what of a value is certain, so that texts come in pieces. Other values come whole, since only then it is known what they are.

use std::sync::Arc;

use serde_json::Value;

use crate::answer_form::KeyMarks;
use crate::answer_part::{AnswerPart, take_until};
use crate::bare_value::{BareValue, is_json};
use crate::call_body::Head;
use crate::tool::Tool;

/// Reads the arguments of one call.
#[derive(Debug, Clone)]
pub(crate) struct KeyedArguments {
    marks: &'static KeyMarks,
    tools: Arc<[Tool]>,
    name: String,
    /// What comes before the next name.
    before: char,
    /// No more text will come.
    at_end: bool,
    state: State,
}

#[derive(Debug, Clone)]
enum State {
    BeforeKey,
    /// Of a text that has begun, or not yet.
    Text {
        begun: bool,
    },
    /// Of anything else. Its end is looked for after so many bytes: marks before are part of it.
    Value {
        how: BareValue,
        after: usize,
    },
}

/// How far a step has come.
#[derive(Debug, PartialEq)]
pub(crate) enum Step {
    Again,
    MoreText,
    /// All arguments are there.
    Done,
}

/// The head of a call that has an argument: all up to the mark of its first name.
pub(crate) fn head(marks: &KeyMarks, text: &str) -> Head {
    let Some((before, _)) = text.split_once(marks.key_open) else {
        return Head::Partial;
    };
    match name(marks, before) {
        Some(name) => Head::Found {
            name: name.to_owned(),
            length: before.len(),
        },
        None => Head::Other,
    }
}

/// The name of a whole call that has no argument.
pub(crate) fn without_arguments<'t>(marks: &KeyMarks, text: &'t str) -> Option<&'t str> {
    name(marks, text.trim().strip_suffix(marks.end)?)
}

/// The name in what comes before the first argument.
fn name<'t>(marks: &KeyMarks, before: &'t str) -> Option<&'t str> {
    let name = before.trim().strip_prefix(marks.name_open)?;
    let name = name.strip_suffix(marks.name_close)?;
    let plain = !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c == '<');
    plain.then_some(name)
}

impl KeyedArguments {
    /// Of a call of `name`.
    pub(crate) fn new(marks: &'static KeyMarks, name: &str, tools: Arc<[Tool]>) -> Self {
        Self {
            marks,
            tools,
            name: name.to_owned(),
            before: '{',
            at_end: false,
            state: State::BeforeKey,
        }
    }

    /// Decides about the beginning of what is held.
    pub(crate) fn step(&mut self, held: &mut String, parts: &mut Vec<AnswerPart>) -> Step {
        match &mut self.state {
            State::BeforeKey => self.step_key(held, parts),
            State::Text { begun } => {
                if !*begun && self.marks.own_lines {
                    if held.is_empty() {
                        return Step::MoreText;
                    }
                    if held.starts_with('\n') {
                        held.remove(0);
                    }
                }
                *begun = true;
                let (mut text, found) = take_until(held, &[self.marks.value_close]);
                // A line break that may be the one before the closing mark.
                if self.marks.own_lines && text.ends_with('\n') {
                    text.pop();
                    if found.is_none() {
                        held.insert(0, '\n');
                    }
                }
                parts.push(AnswerPart::Arguments(escaped(&text)));
                if found.is_none() {
                    return Step::MoreText;
                }
                parts.push(AnswerPart::Arguments("\"".to_owned()));
                self.state = State::BeforeKey;
                Step::Again
            }
            State::Value { how, after } => {
                let close = self.marks.value_close;
                let from = *after;
                let ends = held[from..].match_indices(close);
                let mut ends = ends.map(|(place, _)| from + place);
                let found = ends.find(|end| {
                    let goes_on = how.goes_on(&held[..*end]);
                    *after = if goes_on { end + close.len() } else { *after };
                    !goes_on
                });
                let end = match found {
                    Some(end) if *after == 0 || is_json(&held[..end]) => Some(end),
                    None if !self.at_end => None,
                    // What seemed to go on did not become JSON.
                    _ => held.find(close),
                };
                let Some(end) = end else {
                    return Step::MoreText;
                };
                let value = match self.marks.own_lines {
                    true => own_line(&held[..end]),
                    false => &held[..end],
                };
                parts.push(AnswerPart::Arguments(how.read(value).to_string()));
                held.drain(..end + close.len());
                self.state = State::BeforeKey;
                Step::Again
            }
        }
    }

    /// The text ends with what is held. `true`: the call is whole, and what is held then comes after it. A value that has not ended leaves
    /// the arguments unfinished.
    pub(crate) fn finish(&mut self, held: &mut String, parts: &mut Vec<AnswerPart>) -> bool {
        self.at_end = true;
        let mut step = Step::Again;
        while step == Step::Again {
            step = self.step(held, parts);
        }
        match self.state {
            _ if step == Step::Done => true,
            State::Text { .. } => {
                parts.push(AnswerPart::Arguments(escaped(held)));
                false
            }
            State::BeforeKey if self.before == ',' && held.trim().is_empty() => {
                parts.push(AnswerPart::Arguments("}".to_owned()));
                true
            }
            State::BeforeKey | State::Value { .. } => false,
        }
    }

    fn step_key(&mut self, held: &mut String, parts: &mut Vec<AnswerPart>) -> Step {
        let KeyMarks {
            key_open,
            key_close,
            value_open,
            ..
        } = self.marks;
        let text = held.trim_start();
        let Some(rest) = text.strip_prefix(key_open) else {
            if key_open.starts_with(text) {
                return Step::MoreText;
            }
            parts.push(AnswerPart::Arguments("}".to_owned()));
            return Step::Done;
        };
        let Some((key, rest)) = rest.split_once(key_close) else {
            return Step::MoreText;
        };
        let Some((_, rest)) = rest.split_once(value_open) else {
            return Step::MoreText;
        };
        let key = key.to_owned();
        *held = rest.to_owned();
        let quoted = Value::from(key.as_str());
        parts.push(AnswerPart::Arguments(format!("{}{quoted}:", self.before)));
        self.before = ',';
        self.state = match BareValue::of_argument(&self.tools, &self.name, &key) {
            BareValue::Text => {
                parts.push(AnswerPart::Arguments("\"".to_owned()));
                State::Text { begun: false }
            }
            how => State::Value { how, after: 0 },
        };
        Step::Again
    }
}

/// A value without the line breaks around it.
fn own_line(value: &str) -> &str {
    let value = value.strip_prefix('\n').unwrap_or(value);
    value.strip_suffix('\n').unwrap_or(value)
}

/// What stands for a text between the quotes of JSON.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}
