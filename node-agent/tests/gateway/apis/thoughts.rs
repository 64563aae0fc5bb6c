//! What models think before they answer: counted, bounded, and given back to them.

use prima_node_agent::generation::FinishReason;
use serde_json::{Value, json};

use super::readers::{APIS, answered};
use super::{TEMPLATE, accepted, question};
use crate::client::post;
use crate::server::{MODEL, Server, options, text};

#[tokio::test]
async fn tokens_of_thoughts_are_counted() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    for (route, body, place) in [
        (
            "/v1/chat/completions",
            json!({"messages": question()}),
            "/usage/completion_tokens_details/reasoning_tokens",
        ),
        (
            "/v1/responses",
            json!({"input": "a"}),
            "/usage/output_tokens_details/reasoning_tokens",
        ),
    ] {
        let request = post(route, &body).send(server.address);
        let answering = async {
            let accepted = server.accept().await;
            for piece in ["<think>", "h", "m", "</think>", "Yes", "."] {
                accepted.token(0, piece).await;
            }
            accepted.finish(0, FinishReason::Stop, "").await;
            accepted.usage(10, 6).await;
        };
        let (reply, ()) = tokio::join!(request, answering);
        assert_eq!(reply.json().await.pointer(place), Some(&json!(2)));
    }
}

#[tokio::test]
async fn a_bound_on_thoughts_comes_from_every_api() {
    let template = "{{ enable_thinking }}{# </think> #}|{{ reasoning_effort }}";
    let mut server = Server::start_with(options(), Some(text(Some(template)))).await;
    let chat = |field: &str, value: Value| json!({"messages": question(), field: value});
    let response = |field: &str, value: Value| json!({"input": "u", field: value});
    let message = |thinking: Value| json!({"max_tokens": 9, "messages": [{"role": "user", "content": "u"}], "thinking": thinking});
    let ollama = |think: Value| json!({"model": MODEL, "stream": false, "think": think, "messages": question()});
    let (chats, messages, chatted) = ("/v1/chat/completions", "/v1/messages", "/api/chat");
    let responses = "/v1/responses";
    // Whether the sampler holds a bound, and what the template is told.
    for (route, body, bound, told) in [
        (chats, json!({"messages": question()}), false, "|"),
        (chats, chat("thinking_budget_tokens", json!(7)), true, "|"),
        (chats, chat("thinking_token_budget", json!(7)), true, "|"),
        (
            chats,
            chat("thinking_budget_tokens", json!(0)),
            true,
            "False|",
        ),
        (chats, chat("thinking_budget_tokens", json!(-1)), false, "|"),
        (
            messages,
            message(json!({"type": "enabled", "budget_tokens": 7})),
            true,
            "True|",
        ),
        (
            messages,
            message(json!({"type": "disabled"})),
            true,
            "False|",
        ),
        (chatted, ollama(json!(false)), true, "False|"),
        (chatted, ollama(json!(true)), false, "True|"),
        (
            responses,
            response("thinking_budget_tokens", json!(7)),
            true,
            "|",
        ),
        // What is said to the template.
        (
            chats,
            chat("reasoning_effort", json!("low")),
            false,
            "True|low",
        ),
        (
            chats,
            chat("reasoning_effort", json!("none")),
            true,
            "False|none",
        ),
        (
            chats,
            chat("chat_template_kwargs", json!({"enable_thinking": false})),
            false,
            "False|",
        ),
        (
            responses,
            response("reasoning", json!({"effort": "high"})),
            false,
            "True|high",
        ),
        (chatted, ollama(json!("low")), false, "True|low"),
    ] {
        let accepted = accepted(&mut server, route, &body).await;
        let found = (accepted.request.reasoning.is_some(), accepted.prompt());
        assert_eq!(found, (bound, told.to_owned()), "{body}");
    }
    let wrong = post(chats, &chat("thinking_budget_tokens", json!(-2)));
    let reply = wrong.send(server.address).await;
    assert_eq!(reply.status, 400);
    assert!(reply.text().await.contains("thinking_budget_tokens"));
}

/// The prompt opens a thought. What must match an expression is the answer all the same.
#[tokio::test]
async fn an_answer_by_an_expression_is_content_where_models_think() {
    let template = "{{ messages[0].content }}<think>{# </think> #}";
    let mut server = Server::start_with(options(), Some(text(Some(template)))).await;
    let chat = &APIS[0];
    for (form, content, reasoning) in [
        (json!({}), "", "ab"),
        (json!({"regex": "ab"}), "ab", ""),
        (json!({"grammar": "root ::= \"ab\""}), "ab", ""),
    ] {
        let mut body = json!({"messages": question()});
        for (field, value) in form.as_object().unwrap() {
            body[field] = value.clone();
        }
        let pieces = ["ab".to_owned()];
        let reply = answered(&mut server, chat.route, &body, &pieces, FinishReason::Stop).await;
        let said = (chat.whole)(&serde_json::from_str(&reply).unwrap());
        assert_eq!(
            (said.content.as_str(), said.reasoning.as_str()),
            (content, reasoning),
            "{body}"
        );
    }
}

#[tokio::test]
async fn thoughts_before_a_call_go_back_into_harmony() {
    let template = "{% for message in messages %}{{ message.thinking }}/{{ message.content }}|{% endfor %}\
        {# <|channel|>analysis<|message|> tools #}";
    let mut server = Server::start_with(options(), Some(text(Some(template)))).await;
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let body = json!({"messages": [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "x", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "assistant", "content": "y", "reasoning_content": "so"},
    ]});
    let accepted = accepted(&mut server, "/v1/chat/completions", &body).await;
    assert_eq!(accepted.prompt(), "/u|hm\n\nx/|/r|/y|");
}

#[tokio::test]
async fn thoughts_go_back_as_blocks_where_templates_have_them_so() {
    let template = "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}\
        {% for block in message.content %}{{ block.thinking }}[{{ block.text }}]{% endfor %}{% endif %}|{% endfor %}{# tools [TOOL_CALLS] #}";
    let mut server = Server::start_with(options(), Some(text(Some(template)))).await;
    let body = json!({"messages": [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        {"role": "user", "content": "v"},
    ]});
    let accepted = accepted(&mut server, "/v1/chat/completions", &body).await;
    assert_eq!(accepted.prompt(), "u|hm[][x]|v|");
}
