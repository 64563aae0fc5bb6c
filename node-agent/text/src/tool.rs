//! A tool that a client offers to the model.

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

impl Tool {
    /// Whether this argument is a text, whatever it looks like.
    pub(crate) fn is_text(&self, argument: &str) -> bool {
        self.parameters["properties"][argument]["type"] == "string"
    }
}
