//! Takes an answer in channels apart while it comes: each message is reasoning, content, or a call of a tool.
//!
//! Decides: what of the text belongs to which message. Refuses nothing: text without a header is content, and so is a call whose arguments
//! are no object, with its header as it was written.

use std::sync::Arc;

use crate::answer_form::Reasoning;
use crate::answer_part::{AnswerPart, take_until};
use crate::call_body::JsonEnd;
use crate::channels::{self, ENDS, Kind, MESSAGE};
use crate::tool::Tool;

/// Reads one answer.
#[derive(Debug, Clone)]
pub(crate) struct ChannelReader {
    tools: Arc<[Tool]>,
    state: State,
    /// Whether reasoning and content have come in an earlier message: the next one begins a paragraph.
    reasoned: Told,
    said: Told,
}

#[derive(Debug, Clone)]
enum State {
    /// Before a message's text.
    Header,
    Reasoning,
    Content,
    /// Behind a call's header, of which nothing is told yet.
    Call {
        name: String,
        header: String,
    },
    Arguments(JsonEnd),
    /// Behind the arguments.
    AfterArguments,
}

/// How far the messages of one kind have come.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Told {
    Nothing,
    /// In this message.
    Now,
    Before,
}

impl ChannelReader {
    pub(crate) fn new(tools: Arc<[Tool]>, reasoning: Reasoning) -> Self {
        Self {
            tools,
            state: match reasoning {
                Reasoning::Open => State::Reasoning,
                Reasoning::Possible | Reasoning::Closed => State::Header,
            },
            reasoned: Told::Nothing,
            said: Told::Nothing,
        }
    }

    pub(crate) fn reasons(&self) -> bool {
        matches!(self.state, State::Reasoning)
    }

    pub(crate) fn in_call(&self) -> bool {
        matches!(self.state, State::Call { .. } | State::Arguments(_))
    }

    /// Decides about the beginning of what is held. `false`: that takes more text.
    pub(crate) fn step(&mut self, held: &mut String, parts: &mut Vec<AnswerPart>) -> bool {
        match &mut self.state {
            State::Header => self.step_header(held),
            State::Reasoning | State::Content => {
                let (text, found) = take_until(held, &ENDS);
                self.tell(&text, parts);
                if found.is_some() {
                    self.end_message();
                }
                found.is_some()
            }
            State::Call { name, .. } => match held.trim_start().chars().next() {
                None => false,
                Some('{') => {
                    *held = held.trim_start().to_owned();
                    let name = std::mem::take(name);
                    parts.push(AnswerPart::Call { name });
                    self.state = State::Arguments(JsonEnd::outside());
                    true
                }
                Some(_) => match ENDS.iter().find(|end| held.contains(**end)) {
                    None => false,
                    Some(_) => {
                        let (text, end) = take_until(held, &ENDS);
                        self.tell_call(&text, end.unwrap_or_default(), parts);
                        self.end_message();
                        true
                    }
                },
            },
            State::Arguments(end) => {
                let length = end.find(held);
                let arguments: String = held.drain(..length.unwrap_or(held.len())).collect();
                if !arguments.is_empty() {
                    parts.push(AnswerPart::Arguments(arguments));
                }
                if length.is_some() {
                    self.state = State::AfterArguments;
                }
                length.is_some()
            }
            State::AfterArguments => {
                let (_, found) = take_until(held, &ENDS);
                if found.is_some() {
                    self.end_message();
                }
                found.is_some()
            }
        }
    }

    /// The text ends with what is held.
    pub(crate) fn finish(mut self, held: String, parts: &mut Vec<AnswerPart>) {
        match &self.state {
            State::Header | State::Content => {
                if !held.trim().is_empty() {
                    self.state = State::Content;
                    self.tell(&held, parts);
                }
            }
            State::Reasoning => self.tell(&held, parts),
            State::Call { .. } => self.tell_call(&held, "", parts),
            State::Arguments(_) => parts.push(AnswerPart::Arguments(held)),
            State::AfterArguments => {}
        }
    }

    fn step_header(&mut self, held: &mut String) -> bool {
        match channels::begins_header(held) {
            None => return false,
            Some(false) => {
                self.state = State::Content;
                return true;
            }
            Some(true) => {}
        }
        let Some((header, _)) = held.split_once(MESSAGE) else {
            return false;
        };
        let header = header.to_owned();
        held.drain(..header.len() + MESSAGE.len());
        self.state = match channels::kind(&header, &self.tools) {
            Kind::Reasoning => State::Reasoning,
            Kind::Content => State::Content,
            Kind::Call { name } => State::Call { name, header },
        };
        true
    }

    fn end_message(&mut self) {
        for told in [&mut self.reasoned, &mut self.said] {
            if *told == Told::Now {
                *told = Told::Before;
            }
        }
        self.state = State::Header;
    }

    /// Tells a piece of a message that is reasoning or content.
    fn tell(&mut self, text: &str, parts: &mut Vec<AnswerPart>) {
        if text.is_empty() {
            return;
        }
        let reasons = matches!(self.state, State::Reasoning);
        let told = match reasons {
            true => &mut self.reasoned,
            false => &mut self.said,
        };
        let text = match *told {
            Told::Before => format!("\n\n{text}"),
            Told::Nothing | Told::Now => text.to_owned(),
        };
        *told = Told::Now;
        parts.push(match reasons {
            true => AnswerPart::Reasoning(text),
            false => AnswerPart::Content(text),
        });
    }

    /// Tells of a call whose text, all that there is, does not begin like an object.
    fn tell_call(&mut self, text: &str, end: &str, parts: &mut Vec<AnswerPart>) {
        let State::Call { name, header } = &mut self.state else {
            return;
        };
        if text.trim().is_empty() {
            let name = std::mem::take(name);
            parts.push(AnswerPart::Call { name });
            parts.push(AnswerPart::Arguments("{}".to_owned()));
            return;
        }
        let written = format!("{header}{MESSAGE}{text}{end}");
        self.state = State::Content;
        self.tell(&written, parts);
    }
}
