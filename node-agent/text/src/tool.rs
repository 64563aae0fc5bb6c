//! A tool that a client offers to the model, and what is wanted of an answer that may call it.

use serde_json::Value;

/// A function that the client can call for the model.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    pub name: String,
    /// JSON schema of its arguments, an object.
    pub parameters: Value,
    /// The client relies on the schema: what cannot be kept to is refused.
    pub strict: bool,
    /// As the client described it, for the chat template.
    pub described: Value,
}

/// Whether calls must be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Calls {
    /// As the model likes.
    Allowed,
    /// At least one, and no text outside.
    Required,
}

/// What is wanted of an answer that may hold calls.
pub struct WantedAnswer<'t> {
    /// What may be called; at least one.
    pub tools: &'t [Tool],
    pub calls: Calls,
    /// More than one call.
    pub several: bool,
    /// Where there is no call, the answer is JSON by this schema instead of any text.
    pub text: Option<&'t Value>,
}
