//! Arguments that a model writes by name, each between marks, as one JSON object while they come: Qwen-Coder's and GLM's calls.
//!
//! Decides: what of a value is certain, so that texts come in pieces. Other values come whole, since only then it is known what they are.

use std::sync::Arc;

use serde_json::Value;

use crate::answer_form::CallBody;
use crate::answer_part::{AnswerPart, take_until};
use crate::call_body::{Head, typed};
use crate::tool::Tool;

/// Reads the arguments of one call.
#[derive(Debug, Clone)]
pub(crate) struct KeyedArguments {
    marks: &'static KeyMarks,
    tools: Arc<[Tool]>,
    name: String,
    /// What comes before the next name.
    before: char,
    state: State,
}

#[derive(Debug, Clone)]
enum State {
    BeforeKey,
    /// Of a text that has begun, or not yet.
    Text {
        begun: bool,
    },
    /// Of anything else, by its name.
    Value {
        key: String,
    },
}

#[derive(Debug)]
struct KeyMarks {
    name_open: &'static str,
    key_open: &'static str,
    key_close: &'static str,
    value_open: &'static str,
    value_close: &'static str,
    /// A value stands on lines of its own.
    own_lines: bool,
}

/// How far a step has come.
#[derive(Debug, PartialEq)]
pub(crate) enum Step {
    Again,
    MoreText,
    /// All arguments are there.
    Done,
}

const XML: KeyMarks = KeyMarks {
    name_open: "<function=",
    key_open: "<parameter=",
    key_close: ">",
    value_open: "",
    value_close: "</parameter>",
    own_lines: true,
};

const ARG_KEYS: KeyMarks = KeyMarks {
    name_open: "",
    key_open: "<arg_key>",
    key_close: "</arg_key>",
    value_open: "<arg_value>",
    value_close: "</arg_value>",
    own_lines: false,
};

fn marks(body: CallBody) -> Option<&'static KeyMarks> {
    match body {
        CallBody::Xml => Some(&XML),
        CallBody::ArgKeys => Some(&ARG_KEYS),
        _ => None,
    }
}

/// The head of a call that has an argument: all up to the mark of its first name.
pub(crate) fn head(body: CallBody, text: &str) -> Head {
    let Some(marks) = marks(body) else {
        return Head::Other;
    };
    let Some((before, _)) = text.split_once(marks.key_open) else {
        return Head::Partial;
    };
    let name = before.trim().strip_prefix(marks.name_open);
    let name = match marks.name_open {
        "" => name,
        _ => name.and_then(|name| name.strip_suffix('>')),
    };
    let plain =
        |name: &&str| !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c == '<');
    match name.filter(plain) {
        Some(name) => Head::Found {
            name: name.to_owned(),
            length: before.len(),
        },
        None => Head::Other,
    }
}

impl KeyedArguments {
    /// Of a call of `name`. `None`: this family writes its arguments otherwise.
    pub(crate) fn new(body: CallBody, name: &str, tools: Arc<[Tool]>) -> Option<Self> {
        Some(Self {
            marks: marks(body)?,
            tools,
            name: name.to_owned(),
            before: '{',
            state: State::BeforeKey,
        })
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
            State::Value { key } => {
                if !held.contains(self.marks.value_close) {
                    return Step::MoreText;
                }
                let (value, _) = take_until(held, &[self.marks.value_close]);
                let value = match self.marks.own_lines {
                    true => value.trim_matches('\n'),
                    false => &value,
                };
                let value = typed(&self.tools, &self.name, key, value);
                parts.push(AnswerPart::Arguments(value.to_string()));
                self.state = State::BeforeKey;
                Step::Again
            }
        }
    }

    /// The text ends with what is held. A value that has not ended leaves the arguments unfinished.
    pub(crate) fn finish(self, held: &str, parts: &mut Vec<AnswerPart>) {
        match self.state {
            State::Text { .. } => parts.push(AnswerPart::Arguments(escaped(held))),
            State::BeforeKey if self.before == ',' && held.trim().is_empty() => {
                parts.push(AnswerPart::Arguments("}".to_owned()));
            }
            State::BeforeKey | State::Value { .. } => {}
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
        let mut tools = self.tools.iter();
        self.state = match tools.any(|tool| tool.name == self.name && tool.is_text(&key)) {
            true => {
                parts.push(AnswerPart::Arguments("\"".to_owned()));
                State::Text { begun: false }
            }
            false => State::Value { key },
        };
        Step::Again
    }
}

/// What stands for a text between the quotes of JSON.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}
