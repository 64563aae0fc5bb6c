//! Writes grammars in Lark's form, rule by rule.
//!
//! Decides: how a mark, a text and a tool's arguments are said there.

use std::fmt::Write;

use serde_json::Value;

use crate::grammar::{Grammar, MAX_TEXT_BYTES, bounded};
use crate::grammar_error::GrammarError;
use crate::tokenizer::Tokenizer;
use crate::tool::Tool;

/// A terminal.
pub(crate) const ANY_TEXT: &str = "/[\\s\\S]*/";

/// What every rule has at hand.
pub(crate) struct Writer<'t> {
    tokenizer: &'t Tokenizer,
    pub(crate) lark: String,
}

impl<'t> Writer<'t> {
    pub(crate) fn new(tokenizer: &'t Tokenizer) -> Self {
        Self {
            tokenizer,
            lark: String::new(),
        }
    }

    pub(crate) fn grammar(self) -> Grammar {
        Grammar::Lark(self.lark)
    }

    /// # Errors
    /// There is more of it than is read.
    pub(crate) fn check_size(&self) -> Result<(), GrammarError> {
        match self.lark.len() > MAX_TEXT_BYTES {
            true => Err(GrammarError::Size {
                expected: MAX_TEXT_BYTES,
                what: "bytes",
                found: self.lark.len(),
            }),
            false => Ok(()),
        }
    }

    pub(crate) fn rule(&mut self, name: &str, right: &str) -> String {
        let _ = writeln!(self.lark, "{name}: {right}");
        name.to_owned()
    }

    /// A mark as text, or as the control token that it is.
    pub(crate) fn mark(&self, mark: &str) -> String {
        if mark.is_empty() {
            return String::new();
        }
        match self.tokenizer.control_token(mark) {
            Some(token) => format!("<[{token}]>"),
            None => quoted(mark),
        }
    }

    /// Any text, up to and with the first such mark.
    pub(crate) fn text_and_mark(&mut self, name: &str, mark: &str) -> String {
        self.this_and_mark(name, ANY_TEXT, mark)
    }

    /// `text`, a terminal, up to and with the first such mark.
    pub(crate) fn this_and_mark(&mut self, name: &str, text: &str, mark: &str) -> String {
        match self.tokenizer.control_token(mark) {
            Some(token) => format!("{text} <[{token}]>"),
            None => {
                let _ = writeln!(self.lark, "{name}[lazy]: {text} {}", quoted(mark));
                name.to_owned()
            }
        }
    }

    /// A rule for arguments as JSON.
    pub(crate) fn arguments(&mut self, nth: usize, tool: &Tool) -> String {
        let schema = bounded(tool.parameters.clone());
        self.rule(&format!("arguments_{nth}"), &format!("%json {schema}"))
    }
}

/// A text of Lark's.
pub(crate) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}
