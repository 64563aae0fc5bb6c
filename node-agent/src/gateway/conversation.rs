//! Turns the messages of a request into one prompt with the model's chat template. Text only; no images.
//!
//! A model whose template knows no tools is told about them in its instructions, in Hermes' words; calls and their results are then text
//! of the conversation.

use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use prima_text::{ChatTemplate, ChatTemplateError, TokenizerError, Tool, python_json};
use serde_json::{Map, Value, json};

use super::ModelText;
use super::openai_error::ApiError;
use super::request::Fields;
use super::tools;
use super::turns::{append, in_turn};

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// A prompt as text and as tokens.
pub struct Prompt {
    pub text: String,
    pub tokens: Arc<[u32]>,
    /// What the model has said already of the answer that is gone on with.
    pub begun: Option<String>,
}

/// A conversation as a request has it.
pub struct Conversation<'a> {
    pub messages: Vec<Value>,
    pub tools: &'a [Tool],
    /// What the request says to the template.
    pub further: Map<String, Value>,
    /// Where the last message is the model's, the answer goes on with it, as at llama.cpp, Ollama and Anthropic.
    pub may_go_on: bool,
}

/// Where the last message ends, if it is gone on with: what a template writes behind it is cut off there.
const END: &str = "[the answer goes on here]";

/// The model's chat template; it is the client's mistake to chat with a model that has none.
pub fn template(text: &ModelText) -> Result<&ChatTemplate, ApiError> {
    text.chat_template.as_ref().ok_or_else(|| {
        ApiError::invalid(
            "messages",
            "this model has no chat template; use /v1/completions",
        )
    })
}

/// The messages as templates expect them: a role, the content as one string, calls with their arguments as objects.
pub fn messages(fields: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let messages = fields
        .array("messages")?
        .ok_or_else(|| fields.missing("messages"))?;
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages must not be empty"));
    }
    messages
        .iter()
        .enumerate()
        .map(|(number, value)| message(number, value))
        .collect()
}

fn message(number: usize, value: &Value) -> Result<Value, ApiError> {
    let path = format!("messages[{number}]");
    let fields = Fields::of(value, &path)?;
    let role = fields
        .string("role")?
        .ok_or_else(|| fields.missing("role"))?;
    if !ROLES.contains(&role) {
        let must = format!("one of {}", ROLES.join(", "));
        return Err(fields.wrong("role", &must, &role.into()));
    }
    let content = match fields.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => joined_parts(&path, role, parts)?,
        Some(other) => {
            return Err(fields.wrong("content", "a string or an array of text parts", other));
        }
        None if role == "assistant" => String::new(),
        None => return Err(fields.missing("content")),
    };
    // Templates know the older name of the same role.
    let role = if role == "developer" { "system" } else { role };
    let mut message = Map::new();
    message.insert("role".into(), role.into());
    message.insert("content".into(), content.into());
    for name in ["name", "reasoning_content"] {
        if let Some(text) = fields.string(name)? {
            message.insert(name.into(), text.into());
        }
    }
    if role == "tool" {
        let id = fields.string("tool_call_id")?.unwrap_or_default();
        message.insert("tool_call_id".into(), id.into());
    }
    let calls = fields.array("tool_calls")?.unwrap_or_default();
    if role == "assistant" && !calls.is_empty() {
        let calls = calls
            .iter()
            .enumerate()
            .map(|(nth, call)| tool_call(&format!("{path}.tool_calls[{nth}]"), call));
        message.insert("tool_calls".into(), calls.collect::<Result<_, _>>()?);
    }
    Ok(Value::Object(message))
}

fn tool_call(path: &str, value: &Value) -> Result<Value, ApiError> {
    let fields = Fields::of(value, path)?;
    let function = fields
        .object("function")?
        .ok_or_else(|| fields.missing("function"))?;
    let name = function
        .string("name")?
        .ok_or_else(|| function.missing("name"))?;
    let arguments = function.string("arguments")?.unwrap_or_default();
    let arguments = tools::arguments(arguments)?;
    Ok(json!({
        "id": fields.string("id")?.unwrap_or_default(),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }))
}

fn joined_parts(path: &str, role: &str, parts: &[Value]) -> Result<String, ApiError> {
    let texts: Result<Vec<Cow<'_, str>>, ApiError> = parts
        .iter()
        .enumerate()
        .map(|(number, part)| {
            let path = format!("{path}.content[{number}]");
            let fields = Fields::of(part, &path)?;
            let kind = fields
                .string("type")?
                .ok_or_else(|| fields.missing("type"))?;
            match kind {
                "text" => {
                    let text = fields.string("text")?;
                    let text = text.ok_or_else(|| fields.missing("text"))?;
                    Ok(Cow::Borrowed(text))
                }
                _ if role == "tool" => Ok(tools::part_text(part)),
                _ => {
                    let must = "`text`, all that this model reads";
                    Err(fields.wrong("type", must, &kind.into()))
                }
            }
        })
        .collect();
    Ok(texts?.join("\n"))
}

/// The prompt of a conversation.
pub fn prompt(text: &ModelText, conversation: Conversation<'_>) -> Result<Prompt, ApiError> {
    let (prompt, begun) = rendered(text, conversation)?;
    let tokens = encoded(text, &prompt, text.context_length)?;
    if tokens.is_empty() {
        return Err(ApiError::invalid("messages", "the messages make no token"));
    }
    Ok(Prompt {
        text: prompt,
        tokens: tokens.into(),
        begun,
    })
}

/// Of a prompt that is longer this is not told: memory is bounded.
const MAX_COUNTED: usize = 1 << 20;

/// How many tokens a conversation's prompt has, also if that is more than the context holds.
pub fn count(text: &ModelText, conversation: Conversation<'_>) -> Result<usize, ApiError> {
    let (prompt, _) = rendered(text, conversation)?;
    Ok(encoded(text, &prompt, MAX_COUNTED)?.len())
}

/// The prompt's text, and what it ends with if that is the beginning of an answer.
fn rendered(
    text: &ModelText,
    mut conversation: Conversation<'_>,
) -> Result<(String, Option<String>), ApiError> {
    let template = template(text)?;
    // Harmony's answers begin with their channel.
    let may_go_on = conversation.may_go_on && !template.form().channels;
    if let Some(content) = unfinished(&conversation.messages).filter(|_| may_go_on) {
        let mut open = conversation.messages.clone();
        if let Some(last) = open.last_mut() {
            last["content"] = format!("{content}{END}").into();
        }
        let rendered = told(template, open, &conversation, false);
        // Some templates leave out what they do not expect there. Their answers begin anew.
        if let Ok(mut prompt) = rendered
            && let Some(end) = prompt.rfind(END)
        {
            prompt.truncate(end);
            return Ok((prompt, Some(content.to_owned())));
        }
    }
    let messages = std::mem::take(&mut conversation.messages);
    let rendered = told(template, messages, &conversation, true);
    let prompt = rendered.map_err(|error| refused(&error))?;
    Ok((prompt, None))
}

/// The content of the last message, if the model said it and called no tool.
fn unfinished(messages: &[Value]) -> Option<&str> {
    let last = messages.last()?;
    let content = last["content"].as_str()?;
    let said = last["role"] == "assistant" && last["tool_calls"].is_null();
    (said && !content.is_empty()).then_some(content)
}

/// `begins`: with what begins an answer behind the messages.
fn told(
    template: &ChatTemplate,
    messages: Vec<Value>,
    conversation: &Conversation<'_>,
    begins: bool,
) -> Result<String, ChatTemplateError> {
    let (tools, further) = (conversation.tools, &conversation.further);
    match template.tells_of_tools() {
        true => told_by_template(template, messages, tools, further.clone(), begins),
        false => told_as_text(template, messages, tools, further, begins),
    }
}

/// A template refuses what its model was not trained for, roles out of turn for instance.
fn refused(error: &dyn std::error::Error) -> ApiError {
    let problem = format!(
        "the model's chat template: {}",
        prima_crds::error_chain(error)
    );
    ApiError::invalid("messages", problem)
}

/// At most `limit` tokens.
fn encoded(text: &ModelText, prompt: &str, limit: usize) -> Result<Vec<u32>, ApiError> {
    // One more, since one may go again.
    let tokens = text.tokenizer.encode_at_most(limit + 1, prompt, true, true);
    let mut tokens = tokens.map_err(|error| match error {
        TokenizerError::TooLong { .. } => text.context_exceeded(),
        error => refused(&error),
    })?;
    // Some templates write the beginning-of-sequence token, some leave it to the tokenizer: there must be exactly one.
    if let (Some(bos), [first, second, ..]) = (text.tokenizer.bos(), tokens.as_slice())
        && *first == bos
        && *second == bos
    {
        tokens.remove(0);
    }
    match tokens.len() > limit {
        true => Err(text.context_exceeded()),
        false => Ok(tokens),
    }
}

fn told_by_template(
    template: &ChatTemplate,
    messages: Vec<Value>,
    tools: &[Tool],
    mut further: Map<String, Value>,
    begins: bool,
) -> Result<String, ChatTemplateError> {
    let mut messages = in_turn(messages, template.turns());
    if !tools.is_empty() {
        let described = tools
            .iter()
            .map(|tool| described(tool, template.wants_descriptions()));
        further.insert("tools".into(), described.collect());
    }
    if !template.takes_objects() {
        for call in messages.iter_mut().flat_map(calls_of) {
            let arguments = &mut call["function"]["arguments"];
            *arguments = arguments.to_string().into();
        }
    }
    if template.form().calls.short_ids {
        shorten_ids(&mut messages);
    }
    if template.form().channels {
        messages = one_call_each(messages);
        thoughts_of_calls(&mut messages);
    }
    if template.thinks_in_blocks() {
        messages.iter_mut().for_each(thoughts_as_blocks);
    }
    name_results(&mut messages);
    template.render(&Value::Array(messages), begins, &further)
}

/// As the client described it. Some templates fail over a tool without a description, which every API allows.
fn described(tool: &Tool, wants_description: bool) -> Value {
    let mut described = tool.described.clone();
    if wants_description && described["function"]["description"].is_null() {
        described["function"]["description"] = "".into();
    }
    described
}

/// Harmony's template writes one call for each message, and takes a result for that of the call before it: calls that came together get a
/// message each, with their results behind them.
fn one_call_each(messages: Vec<Value>) -> Vec<Value> {
    let mut told = Vec::with_capacity(messages.len());
    let mut messages = messages.into_iter().peekable();
    while let Some(mut message) = messages.next() {
        let calls = calls_of(&mut message).to_vec();
        if calls.len() < 2 {
            told.push(message);
            continue;
        }
        let is_result = |next: &Value| next["role"] == "tool";
        let results = std::iter::from_fn(|| messages.next_if(is_result));
        let mut results: Vec<Value> = results.collect();
        for call in calls {
            let own = results
                .iter()
                .position(|result| result["tool_call_id"] == call["id"]);
            message["tool_calls"] = json!([call]);
            told.push(message);
            told.extend(own.map(|place| results.remove(place)));
            message = json!({"role": "assistant", "content": ""});
        }
        told.extend(results);
    }
    told
}

/// Harmony's template has what was thought before a call in a field of its own, and refuses content beside it.
fn thoughts_of_calls(messages: &mut [Value]) {
    for message in messages {
        if calls_of(message).is_empty() {
            continue;
        }
        let Some(thought) = message["reasoning_content"].as_str() else {
            continue;
        };
        let said = message["content"].as_str().unwrap_or_default();
        let parts: Vec<&str> = [thought, said]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect();
        message["thinking"] = parts.join("\n\n").into();
        message["content"] = "".into();
    }
}

/// Ministral's template has what was thought in a block before the text.
fn thoughts_as_blocks(message: &mut Value) {
    let thought = message["reasoning_content"].as_str();
    let Some(thought) = thought.filter(|thought| !thought.is_empty()) else {
        return;
    };
    let mut blocks = vec![json!({"type": "thinking", "thinking": thought})];
    if message["content"] != "" {
        blocks.push(json!({"type": "text", "text": message["content"]}));
    }
    message["content"] = blocks.into();
}

/// Replaces ids that are not 9 letters and digits, the same ones alike: they come from another server.
fn shorten_ids(messages: &mut [Value]) {
    let short = |id: &mut Value| {
        let text = id.as_str().unwrap_or_default();
        if text.len() != CALL_ID_LENGTH || !text.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            let mut hasher = DefaultHasher::new();
            text.hash(&mut hasher);
            *id = call_id(hasher.finish()).into();
        }
    };
    for message in messages {
        for call in calls_of(message) {
            short(&mut call["id"]);
        }
        if message["role"] == "tool" {
            short(&mut message["tool_call_id"]);
        }
    }
}

/// Mistral's models know ids of this length only.
const CALL_ID_LENGTH: usize = 9;

/// 9 letters and digits out of a number.
pub fn call_id(mut number: u64) -> String {
    const SIGNS: &[u8; 62] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    let mut sign = || {
        let sign = SIGNS[(number % 62) as usize];
        number /= 62;
        char::from(sign)
    };
    (0..CALL_ID_LENGTH).map(|_| sign()).collect()
}

/// Some templates want the name of the function with its result.
fn name_results(messages: &mut [Value]) {
    let mut names: Vec<(String, Value)> = Vec::new();
    for message in messages {
        for call in calls_of(message) {
            let id = call["id"].as_str().unwrap_or_default().to_owned();
            names.push((id, call["function"]["name"].clone()));
        }
        if message["role"] == "tool" && message["name"].is_null() {
            let id = message["tool_call_id"].as_str().unwrap_or_default();
            let named = names.iter().rev().find(|(other, _)| other == id);
            if let Some((_, name)) = named {
                message["name"] = name.clone();
            }
        }
    }
}

fn calls_of(message: &mut Value) -> &mut [Value] {
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    calls.map_or(&mut [], Vec::as_mut_slice)
}

/// For a template that knows no tools: what they are goes to the instructions, calls and results become text.
fn told_as_text(
    template: &ChatTemplate,
    messages: Vec<Value>,
    tools: &[Tool],
    further: &Map<String, Value>,
    begins: bool,
) -> Result<String, ChatTemplateError> {
    let mut messages = as_text(messages);
    if !tools.is_empty() {
        let instructs = |message: &&Value| message["role"] == "system";
        let own = messages.iter().take_while(instructs).count();
        messages.insert(
            own,
            json!({"role": "system", "content": instructions(tools)}),
        );
    }
    let messages = in_turn(messages, template.turns());
    template.render(&Value::Array(messages), begins, further)
}

fn as_text(messages: Vec<Value>) -> Vec<Value> {
    let mut told: Vec<Value> = Vec::with_capacity(messages.len() + 1);
    let mut after_result = false;
    for mut message in messages {
        let content = message["content"].as_str().unwrap_or_default().to_owned();
        if message["role"] == "tool" {
            let result = format!("<tool_response>\n{content}\n</tool_response>");
            match told.last_mut().filter(|_| after_result) {
                // Results of several calls are one message: roles must take turns.
                Some(last) => append(last, "\n", &result),
                None => told.push(json!({"role": "user", "content": result})),
            }
            after_result = true;
            continue;
        }
        after_result = false;
        let calls = calls_of(&mut message).iter();
        let calls = calls.map(|call| {
            format!(
                "<tool_call>\n{}\n</tool_call>",
                python_json(&call["function"])
            )
        });
        let parts: Vec<String> = std::iter::once(content).chain(calls).collect();
        let parts: Vec<&str> = parts
            .iter()
            .map(String::as_str)
            .filter(|part| !part.is_empty())
            .collect();
        message["content"] = parts.join("\n").into();
        if let Some(message) = message.as_object_mut() {
            message.remove("tool_calls");
        }
        told.push(message);
    }
    told
}

/// As Nous Research's Hermes and Qwen are told.
fn instructions(tools: &[Tool]) -> String {
    let described: Vec<String> = tools
        .iter()
        .map(|tool| tool.described.to_string())
        .collect();
    format!(
        "You may call one or more functions to assist with the user query.\n\n\
         You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{}\n</tools>\n\n\
         For each function call, return a json object with function name and arguments within \
         <tool_call></tool_call> XML tags:\n<tool_call>\n{{\"name\": <function-name>, \"arguments\": \
         <args-json-object>}}\n</tool_call>",
        described.join("\n")
    )
}
