//! Which turns a chat template takes. Some refuse messages that stand where their model has seen none, some leave them out without a word,
//! some put them elsewhere.
//!
//! Decides: by trying, once. So a conversation is told alike however far it has come, and no request is rendered twice to find out.

use serde_json::{Value, json};

/// What a template takes beside the words of the user and the model in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turns {
    /// Instructions before all else.
    pub instructions: bool,
    /// Instructions in the course of the conversation.
    pub later_instructions: bool,
    /// Words of the user behind others of the user.
    pub user_after_user: bool,
    /// Words of the user behind the result of a tool.
    pub user_after_result: bool,
}

/// A message of a conversation that is tried.
#[derive(Clone, Copy)]
enum Turn {
    System,
    User,
    Assistant,
    Call,
    ToolResult,
}

impl Turns {
    /// A template that takes them all.
    pub(crate) const ALL: Self = Self {
        instructions: true,
        later_instructions: true,
        user_after_user: true,
        user_after_result: true,
    };

    /// Of a template. `shows` says whether its prompt of some messages holds these texts, in this order. `arguments` are a call's, in the form
    /// that it wants.
    pub(crate) fn tried(arguments: &Value, shows: impl Fn(&Value, &[String]) -> bool) -> Self {
        use Turn::{Assistant, Call, System, ToolResult, User};
        let takes = |turns: &[Turn]| {
            let messages: Value = turns
                .iter()
                .enumerate()
                .map(|(nth, turn)| message(nth, *turn, arguments))
                .collect();
            // What the model said may be left out: its thoughts are.
            let told = turns
                .iter()
                .enumerate()
                .filter(|(_, turn)| !matches!(turn, Assistant | Call))
                .map(|(nth, _)| content(nth));
            shows(&messages, &told.collect::<Vec<_>>())
        };
        // Nothing can be learned of a template that wants something else.
        if !takes(&[User]) {
            return Self::ALL;
        }
        // Some templates have them before the last words of the user, so with each turn elsewhere, and behind the result of a tool nowhere.
        let instructions = takes(&[System, User]) && takes(&[System, User, Assistant, User]);
        Self {
            instructions,
            later_instructions: instructions && takes(&[System, User, Assistant, System, User]),
            user_after_user: takes(&[User, User]),
            user_after_result: !takes(&[User, Call, ToolResult])
                || takes(&[User, Call, ToolResult, User]),
        }
    }
}

/// One word, which no template trims or escapes.
fn content(nth: usize) -> String {
    format!("probe{nth}")
}

fn message(nth: usize, turn: Turn, arguments: &Value) -> Value {
    let said = |role: &str| json!({"role": role, "content": content(nth)});
    // Of the length that Mistral's models know.
    let id = "123456789";
    match turn {
        Turn::System => said("system"),
        Turn::User => said("user"),
        Turn::Assistant => said("assistant"),
        Turn::Call => {
            let function = json!({"name": "f", "arguments": arguments});
            let call = json!({"id": id, "type": "function", "function": function});
            json!({"role": "assistant", "content": "", "tool_calls": [call]})
        }
        Turn::ToolResult => {
            json!({"role": "tool", "tool_call_id": id, "name": "f", "content": content(nth)})
        }
    }
}
