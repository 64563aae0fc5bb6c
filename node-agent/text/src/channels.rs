//! The marks of harmony, the form in which gpt-oss writes: an answer is several messages, each with a header that names its channel and
//! whom it is for.
//!
//! Decides: what a header means. Reads no text that comes in pieces ([`crate::channel_reader`] does).

use crate::tool::Tool;

pub(crate) const START: &str = "<|start|>";
pub(crate) const CHANNEL: &str = "<|channel|>";
pub(crate) const CONSTRAIN: &str = "<|constrain|>";
pub(crate) const MESSAGE: &str = "<|message|>";
/// Ends a message that another one follows.
pub(crate) const END: &str = "<|end|>";
/// End a message and the answer.
const RETURN: &str = "<|return|>";
const CALL: &str = "<|call|>";

/// The whole header of reasoning.
pub(crate) const ANALYSIS: &str = "<|channel|>analysis<|message|>";

/// The whole header of the answer itself.
pub(crate) const FINAL: &str = "<|channel|>final<|message|>";

pub(crate) const MARKS: [&str; 7] = [START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL];
pub(crate) const ENDS: [&str; 3] = [END, RETURN, CALL];

/// What a header can begin with. The prompt holds the first one's `<|start|>assistant`.
const BEGINNINGS: [&str; 4] = [START, CHANNEL, MESSAGE, "to="];

/// Functions of the client have this before their names.
pub(crate) const FUNCTIONS: &str = "functions.";

/// What a message is.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Kind {
    Reasoning,
    Content,
    Call { name: String },
}

/// Whether `text` begins a header; `None`: more of it must come.
pub(crate) fn begins_header(text: &str) -> Option<bool> {
    let text = text.trim_start();
    if BEGINNINGS.iter().any(|mark| text.starts_with(mark)) {
        return Some(true);
    }
    match BEGINNINGS.iter().any(|mark| mark.starts_with(text)) {
        true => None,
        false => Some(false),
    }
}

/// Reads a header, all that is before its `<|message|>`. Without tools nothing is a call.
pub(crate) fn kind(header: &str, tools: &[Tool]) -> Kind {
    let words = |text: &str| -> Vec<String> {
        let spaced = text.replace("<|", " <|").replace("|>", "|> ");
        spaced.split_whitespace().map(str::to_owned).collect()
    };
    let words = words(header);
    let recipient = words.iter().find_map(|word| word.strip_prefix("to="));
    let function = recipient.and_then(|recipient| match recipient.strip_prefix(FUNCTIONS) {
        Some(name) => Some(name),
        None => tools
            .iter()
            .any(|tool| tool.name == recipient)
            .then_some(recipient),
    });
    match function.filter(|name| !name.is_empty() && !tools.is_empty()) {
        Some(name) => Kind::Call {
            name: name.to_owned(),
        },
        None => {
            let mut after = words.iter().skip_while(|word| *word != CHANNEL).skip(1);
            match after.next().is_some_and(|word| word == "analysis") {
                true => Kind::Reasoning,
                false => Kind::Content,
            }
        }
    }
}
