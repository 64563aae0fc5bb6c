//! The tools that a request offers to the model, and whether it must call one.

use std::borrow::Cow;
use std::sync::Arc;

use prima_text::{Calls, Tool};
use serde_json::{Value, json};

use super::openai_error::ApiError;
use super::request::{Fields, MAX_VALUES, values_at_most};

/// Agents with several MCP servers pass OpenAI's limit of 128. The grammar of calls to many more would be too large.
const MAX_TOOLS: usize = 256;
/// Anthropic's limit; OpenAI's is 64.
const MAX_NAME_BYTES: usize = 128;

/// What a request says about tools.
pub struct ToolUse {
    /// What the model is told of. Empty: nothing is a call.
    pub offered: Arc<[Tool]>,
    /// What it may call.
    pub callable: Vec<Tool>,
    pub calls: Calls,
    /// More than one call in an answer.
    pub several: bool,
}

impl ToolUse {
    pub fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        if fields
            .array("functions")?
            .is_some_and(|list| !list.is_empty())
        {
            return Err(ApiError::not_supported(
                "functions",
                "functions, the older form of tools, are not supported; send `tools`",
            ));
        }
        let tools = tools(fields)?;
        let several = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
        let choice = choice(fields, &tools)?;
        let (offered, callable, calls) = match choice {
            ToolChoice::None => (Vec::new(), Vec::new(), Calls::Allowed),
            ToolChoice::Auto => (tools.clone(), tools, Calls::Allowed),
            ToolChoice::Required => (tools.clone(), tools, Calls::Required),
            ToolChoice::Named(name) => {
                let named = tools.iter().filter(|tool| tool.name == name).cloned();
                (tools.clone(), named.collect(), Calls::Required)
            }
        };
        Ok(Self {
            offered: offered.into(),
            callable,
            calls,
            several,
        })
    }
}

enum ToolChoice<'f> {
    None,
    Auto,
    Required,
    Named(&'f str),
}

fn choice<'f>(fields: &Fields<'f>, tools: &[Tool]) -> Result<ToolChoice<'f>, ApiError> {
    let must = "`none`, `auto`, `required` or a function of `tools` by name";
    let choice = match fields.get("tool_choice") {
        None => return Ok(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "none" => return Ok(ToolChoice::None),
            "auto" => return Ok(ToolChoice::Auto),
            "required" => ToolChoice::Required,
            _ => return Err(fields.wrong("tool_choice", must, &word.as_str().into())),
        },
        Some(value) => match value["function"]["name"].as_str() {
            Some(name) if tools.iter().any(|tool| tool.name == name) => ToolChoice::Named(name),
            _ => return Err(fields.wrong("tool_choice", must, value)),
        },
    };
    match tools.is_empty() {
        true => Err(ApiError::invalid(
            "tool_choice",
            "tool_choice asks for a call, but `tools` is empty",
        )),
        false => Ok(choice),
    }
}

fn tools(fields: &Fields<'_>) -> Result<Vec<Tool>, ApiError> {
    let values = fields.array("tools")?.unwrap_or_default();
    if values.len() > MAX_TOOLS {
        return Err(ApiError::invalid(
            "tools",
            format!(
                "tools must hold at most {MAX_TOOLS}, but holds {}",
                values.len()
            ),
        ));
    }
    let mut tools: Vec<Tool> = Vec::with_capacity(values.len());
    for (number, value) in values.iter().enumerate() {
        let Some(tool) = tool(number, value)? else {
            continue;
        };
        if tools.iter().any(|other| other.name == tool.name) {
            return Err(ApiError::invalid(
                "tools",
                format!("tools has two functions named `{}`", tool.name),
            ));
        }
        tools.push(tool);
    }
    Ok(tools)
}

/// `None`: a tool that is no function, which a server like this one cannot call either; others ignore it, too.
fn tool(number: usize, value: &Value) -> Result<Option<Tool>, ApiError> {
    let path = format!("tools[{number}]");
    let fields = Fields::of(value, &path)?;
    if fields.string("type")?.unwrap_or("function") != "function" {
        return Ok(None);
    }
    let function = fields
        .object("function")?
        .ok_or_else(|| fields.missing("function"))?;
    let name = function
        .string("name")?
        .ok_or_else(|| function.missing("name"))?;
    if !is_name(name) {
        let must = format!("1 to {MAX_NAME_BYTES} of a-z, A-Z, 0-9, `_`, `-` and `.`");
        return Err(function.wrong("name", &must, &name.into()));
    }
    let parameters = match function.get("parameters") {
        None => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema.clone(),
        Some(other) => {
            return Err(function.wrong("parameters", "a JSON schema of an object", other));
        }
    };
    let mut described = value.clone();
    if let Some(Value::Object(function)) = described.get_mut("function") {
        // Some templates fail over a tool without them.
        function.insert("parameters".into(), parameters.clone());
        // Templates would tell the model of what is not there.
        function.retain(|_, value| !value.is_null());
    }
    Ok(Some(Tool {
        name: name.to_owned(),
        parameters,
        strict: function.boolean("strict")?.unwrap_or(false),
        described,
    }))
}

fn is_name(text: &str) -> bool {
    let sign = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    (1..=MAX_NAME_BYTES).contains(&text.len()) && text.bytes().all(sign)
}

/// What a client sent as a call's arguments, for the prompt. Of those that are no object, of a call that a limit cut off for instance, the
/// model is told none: the call's result says what went wrong, and a refusal would be the end of the conversation.
pub fn arguments(text: &str) -> Result<Value, ApiError> {
    // Within a string, they were not counted.
    if values_at_most(text.as_bytes()) > MAX_VALUES {
        return Err(ApiError::TooManyValues { limit: MAX_VALUES });
    }
    Ok(match serde_json::from_str(text) {
        Ok(object @ Value::Object(_)) => object,
        _ => json!({}),
    })
}

/// The text of a tool's result that came in parts.
pub fn result_text(parts: &[Value]) -> String {
    let texts: Vec<Cow<'_, str>> = parts.iter().map(part_text).collect();
    texts.join("\n")
}

/// The text of one part. One without, an image for instance, is a note: the agent did not choose it, and could not go on if it were refused.
pub fn part_text(part: &Value) -> Cow<'_, str> {
    if let Some(text) = part["text"].as_str() {
        return text.into();
    }
    // So Anthropic's agents tell what they found.
    let parts = part["content"].as_array().into_iter().flatten();
    let texts: Vec<&str> = parts.filter_map(|part| part["text"].as_str()).collect();
    if !texts.is_empty() {
        return texts.join("\n").into();
    }
    let kind = part["type"].as_str().filter(|kind| is_name(kind));
    let kind = kind.unwrap_or("unknown");
    format!("[a part of type {kind}, which this model cannot read]").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: Value) -> Result<ToolUse, ApiError> {
        let Value::Object(map) = body else {
            panic!("not an object")
        };
        ToolUse::read(&Fields::new(&map))
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name}})
    }

    #[test]
    fn the_choice_says_what_may_and_what_must_be_called() {
        let tools = json!([tool("f"), {"type": "web_search"}, tool("g")]);
        let named = json!({"type": "function", "function": {"name": "g"}});
        for (choice, offered, callable, calls) in [
            (Value::Null, 2, vec!["f", "g"], Calls::Allowed),
            (json!("auto"), 2, vec!["f", "g"], Calls::Allowed),
            (json!("none"), 0, vec![], Calls::Allowed),
            (json!("required"), 2, vec!["f", "g"], Calls::Required),
            (named, 2, vec!["g"], Calls::Required),
        ] {
            let found = read(json!({"tools": tools, "tool_choice": choice})).unwrap();
            let names: Vec<&str> = found
                .callable
                .iter()
                .map(|tool| tool.name.as_str())
                .collect();
            assert_eq!(
                (found.offered.len(), names, found.calls),
                (offered, callable, calls)
            );
        }
    }

    #[test]
    fn a_part_without_a_text_is_a_note_of_its_type() {
        let within = json!([{"type": "text", "text": "b"}, {"type": "image"}, {"type": "text", "text": "c"}]);
        let note = |kind: &str| format!("[a part of type {kind}, which this model cannot read]");
        for (part, told) in [
            (json!({"type": "text", "text": "a"}), "a".to_owned()),
            (json!({"type": "resource", "text": "a"}), "a".to_owned()),
            (
                json!({"type": "search_result", "content": within}),
                "b\nc".to_owned(),
            ),
            (json!({"type": "input_file"}), note("input_file")),
            (
                json!({"type": "search_result", "content": []}),
                note("search_result"),
            ),
            // No names of types: they could be marks of the model's turns, and of any length.
            (json!({"type": "<|im_end|>"}), note("unknown")),
            (json!({"type": "x".repeat(1000)}), note("unknown")),
            (json!({"type": ""}), note("unknown")),
            (json!(1), note("unknown")),
        ] {
            assert_eq!(part_text(&part), told, "{part}");
        }
    }

    #[test]
    fn wrong_tools_are_named() {
        let many: Vec<Value> = (0..=MAX_TOOLS)
            .map(|nth| tool(&format!("f{nth}")))
            .collect();
        for (body, param) in [
            (json!({"tools": {}}), "tools"),
            (json!({"tools": [1]}), "tools[0]"),
            (
                json!({"tools": [{"type": "function"}]}),
                "tools[0].function",
            ),
            (
                json!({"tools": [tool("f"), tool("a b")]}),
                "tools[1].function.name",
            ),
            (json!({"tools": [tool("f"), tool("f")]}), "tools"),
            (json!({"tools": many}), "tools"),
            (
                json!({"tools": [tool("f")], "tool_choice": "f"}),
                "tool_choice",
            ),
            (json!({"tool_choice": "required"}), "tool_choice"),
            (json!({"functions": [{"name": "f"}]}), "functions"),
        ] {
            let error = read(body.clone()).err().unwrap_or_else(|| panic!("{body}"));
            assert_eq!(error.body()["error"]["param"], param, "{body}");
        }
    }
}
