//! Conversations whose turns are not those that templates were written for.

use serde_json::{Value, json};

use super::{accepted, question, tool};
use crate::server::{Server, options, text};

/// As Mistral's.
const REFUSES: &str = "{% for message in messages %}\
    {% if message.role == 'system' and not loop.first %}{{ raise_exception('not first') }}{% endif %}\
    {% if message.role == 'user' and loop.previtem and loop.previtem.role in ['user', 'tool'] %}\
    {{ raise_exception('not in turn') }}{% endif %}\
    {{ message.role }}: {{ message.content }}|{% endfor %}{# tools <tool_call> #}assistant: ";

/// As gpt-oss's.
const IGNORES: &str = "{% if messages[0].role == 'system' %}system: {{ messages[0].content }}|{% endif %}\
    {% for message in messages if message.role != 'system' %}{{ message.role }}: {{ message.content }}|\
    {% endfor %}{# tools <tool_call> #}assistant: ";

/// As DeepSeek's.
const GATHERS: &str = "{% for message in messages if message.role == 'system' %}system: {{ message.content }}|{% endfor %}\
    {% for message in messages if message.role != 'system' %}{{ message.role }}: {{ message.content }}|\
    {% endfor %}{# tools <tool_call> #}assistant: ";

/// As Mistral Nemo's.
const MOVES: &str = "{% for message in messages if message.role != 'system' %}\
    {% if loop.last and messages[0].role == 'system' %}system: {{ messages[0].content }}|{% endif %}\
    {{ message.role }}: {{ message.content }}|{% endfor %}{# tools <tool_call> #}assistant: ";

async fn server(template: &str) -> Server {
    Server::start_with(options(), Some(text(Some(template)))).await
}

fn said(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// What agents send in each API: instructions in two messages and later ones, and words of the user behind others and behind a result.
fn agents() -> [(&'static str, Value); 3] {
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    [
        (
            "/v1/chat/completions",
            json!({"messages": [
                said("system", "a"), said("developer", "b"), said("user", "u"), said("user", "v"),
                {"role": "assistant", "content": "x", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "r"},
                said("user", "w"), said("system", "c"), said("user", "y"),
            ]}),
        ),
        (
            "/v1/responses",
            json!({"instructions": "a", "input": [
                said("developer", "b"), said("user", "u"), said("user", "v"), said("assistant", "x"),
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "r"},
                said("user", "w"), said("developer", "c"), said("user", "y"),
            ]}),
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 9, "system": "a", "messages": [
                said("system", "b"), said("user", "u"), said("user", "v"),
                {"role": "assistant", "content": [
                    {"type": "text", "text": "x"}, {"type": "tool_use", "id": "1", "name": "f", "input": {}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "r"}, {"type": "text", "text": "w"},
                ]},
                said("system", "c"), said("user", "y"),
            ]}),
        ),
    ]
}

#[tokio::test]
async fn nothing_is_refused_or_lost_for_its_turn() {
    for (template, told) in [
        (
            REFUSES,
            "system: a\n\nb|user: u\n\nv|assistant: x|tool: r\n\nw\n\nc\n\ny|assistant: ",
        ),
        (
            IGNORES,
            "system: a\n\nb|user: u|user: v|assistant: x|tool: r|user: w|user: c|user: y|assistant: ",
        ),
    ] {
        let mut server = server(template).await;
        for (route, body) in agents() {
            let prompt = accepted(&mut server, route, &body).await.prompt();
            assert_eq!(prompt, told, "{route}");
        }
    }
}

/// What was computed of it is of use.
#[tokio::test]
async fn a_conversation_that_goes_on_begins_as_before() {
    for template in [REFUSES, IGNORES, GATHERS, MOVES] {
        let mut server = server(template).await;
        let messages = [
            said("system", "a"),
            said("system", "b"),
            said("user", "u"),
            said("assistant", "x"),
            said("user", "v"),
            said("system", "c"),
            said("assistant", "y"),
            said("user", "w"),
            said("user", "z"),
        ];
        let mut before = String::new();
        for length in [3, 6, 9] {
            let body = json!({"messages": messages[..length]});
            let accepted = accepted(&mut server, "/v1/chat/completions", &body).await;
            let prompt = accepted.prompt();
            assert!(prompt.starts_with(&before), "{prompt:?} after {before:?}");
            before = prompt;
        }
    }
}

/// As Qwen 3.5's and MiniMax', which leave out what was thought before the user's last turn.
#[tokio::test]
async fn instructions_behind_a_result_leave_the_thoughts_there() {
    let template = "{% set turns = namespace(last=0) %}\
        {% for message in messages if message.role == 'user' %}{% set turns.last = turns.last + 1 %}{% endfor %}\
        {% set now = namespace(turn=0) %}{% for message in messages %}\
        {% if message.role == 'system' and not loop.first %}{{ raise_exception('not first') }}{% endif %}\
        {% if message.role == 'user' %}{% set now.turn = now.turn + 1 %}{% endif %}{{ message.role }}: \
        {% if message.reasoning_content and now.turn == turns.last %}({{ message.reasoning_content }}){% endif %}\
        {{ message.content }}|{% endfor %}{# tools <tool_call> </think> #}assistant: ";
    let mut server = server(template).await;
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let body = json!({"messages": [
        said("user", "u"),
        {"role": "assistant", "content": "x", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        said("system", "a"), said("developer", "b"),
    ]});
    let accepted = accepted(&mut server, "/v1/chat/completions", &body).await;
    let told = "user: u|assistant: (hm)x|tool: r\n\na\n\nb|assistant: ";
    assert_eq!(accepted.prompt(), told);
}

/// Gemma 2 has no instructions; it is told of tools in words.
#[tokio::test]
async fn where_a_template_takes_no_instructions_the_user_says_them() {
    let template = "{% for message in messages %}\
        {% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}\
        {{ message.role }}: {{ message.content }}|{% endfor %}assistant: ";
    let mut server = server(template).await;
    let mut messages = question();
    messages
        .as_array_mut()
        .unwrap()
        .insert(0, said("system", "s"));
    let mut body = json!({"messages": messages});
    let plain = accepted(&mut server, "/v1/chat/completions", &body).await;
    assert_eq!(plain.prompt(), "user: s\n\na|assistant: ");
    body["tools"] = json!([tool()]);
    let told = accepted(&mut server, "/v1/chat/completions", &body).await;
    let prompt = told.prompt();
    let begins = "user: s\n\nYou may call one or more functions";
    assert!(prompt.starts_with(begins), "{prompt}");
    assert!(prompt.ends_with("\n\na|assistant: "), "{prompt}");
}
