//! A conversation in the turns that the model's template takes. Agents send instructions several times, also in the course of a conversation,
//! and words of the user one after the other; some templates refuse that, some leave it out.
//!
//! What a template does not take as instructions is said by the user, in its place, and behind a tool's result is part of it: so a
//! conversation that goes on begins as it did before, and what was computed of it is of use.

use prima_text::Turns;
use serde_json::Value;

/// The same conversation.
pub fn in_turn(messages: Vec<Value>, takes: Turns) -> Vec<Value> {
    let mut told: Vec<Value> = Vec::with_capacity(messages.len());
    // Nothing but instructions has come.
    let mut at_start = true;
    for mut message in messages {
        let instructs = message["role"] == "system";
        at_start &= instructs;
        let is_taken = takes.instructions && (at_start || takes.later_instructions);
        let said_by_user = instructs && !is_taken;
        if said_by_user {
            message["role"] = "user".into();
        }
        let follows = |role: &str| told.last().is_some_and(|last| last["role"] == role);
        let joins = match message["role"].as_str() {
            // Models were trained with one such message.
            Some("system") => at_start && follows("system"),
            Some("user") => {
                // Some templates leave out what was thought before the user's next turn, and that has not come with instructions.
                (follows("user") && !takes.user_after_user)
                    || (follows("tool") && (said_by_user || !takes.user_after_result))
            }
            _ => false,
        };
        let text = message["content"].as_str().unwrap_or_default();
        match told.last_mut().filter(|_| joins) {
            Some(last) => append(last, "\n\n", text),
            None => told.push(message),
        }
    }
    told
}

/// Adds to what a message says. In place: a conversation may have very many messages that become one.
pub fn append(message: &mut Value, between: &str, text: &str) {
    if let Some(Value::String(content)) = message.get_mut("content") {
        if !content.is_empty() && !text.is_empty() {
            content.push_str(between);
        }
        content.push_str(text);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ALL: Turns = Turns {
        instructions: true,
        later_instructions: true,
        user_after_user: true,
        user_after_result: true,
    };

    /// Each message as `role: content`.
    fn told(takes: Turns) -> Vec<String> {
        let messages = [
            ("system", "a"),
            ("system", ""),
            ("system", "b"),
            ("user", "c"),
            ("user", "d"),
            ("assistant", "e"),
            ("system", "f"),
            ("user", "g"),
            ("assistant", "h"),
            ("tool", "i"),
            ("system", "j"),
            ("user", "k"),
        ];
        let messages = messages.map(|(role, content)| json!({"role": role, "content": content}));
        let line = |message: Value| {
            let text = |field: &str| message[field].as_str().unwrap().to_owned();
            format!("{}: {}", text("role"), text("content"))
        };
        in_turn(messages.into(), takes)
            .into_iter()
            .map(line)
            .collect()
    }

    #[test]
    fn what_is_taken_stays_and_first_instructions_are_one() {
        let expected = [
            "system: a\n\nb",
            "user: c",
            "user: d",
            "assistant: e",
            "system: f",
            "user: g",
            "assistant: h",
            "tool: i",
            "system: j",
            "user: k",
        ];
        assert_eq!(told(ALL), expected);
    }

    #[test]
    fn later_instructions_are_the_users_words_in_their_place() {
        let takes = Turns {
            later_instructions: false,
            ..ALL
        };
        let expected = [
            "system: a\n\nb",
            "user: c",
            "user: d",
            "assistant: e",
            "user: f",
            "user: g",
            "assistant: h",
            "tool: i\n\nj",
            "user: k",
        ];
        assert_eq!(told(takes), expected);
    }

    #[test]
    fn words_of_the_user_become_one_turn() {
        let takes = Turns {
            later_instructions: false,
            user_after_user: false,
            user_after_result: false,
            ..ALL
        };
        let expected = [
            "system: a\n\nb",
            "user: c\n\nd",
            "assistant: e",
            "user: f\n\ng",
            "assistant: h",
            "tool: i\n\nj\n\nk",
        ];
        assert_eq!(told(takes), expected);
    }

    #[test]
    fn where_no_instructions_are_taken_the_user_says_all() {
        let takes = Turns {
            instructions: false,
            user_after_user: false,
            ..ALL
        };
        let expected = [
            "user: a\n\nb\n\nc\n\nd",
            "assistant: e",
            "user: f\n\ng",
            "assistant: h",
            "tool: i\n\nj",
            "user: k",
        ];
        assert_eq!(told(takes), expected);
    }
}
