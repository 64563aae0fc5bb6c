//! Answers that go on with what the model has already said: the last message of a conversation is its own.

use prima_node_agent::generation::FinishReason;
use serde_json::{Value, json};

use crate::apis::{TEMPLATE, accepted};
use crate::client::post;
use crate::server::{MODEL, Server, options, text};

fn said(content: &str) -> Value {
    json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": content}])
}

async fn server(template: &str) -> Server {
    Server::start_with(options(), Some(text(Some(template)))).await
}

#[tokio::test]
async fn every_api_goes_on_with_a_last_word_of_the_models() {
    let mut server = server(TEMPLATE).await;
    for (route, body) in [
        ("/v1/chat/completions", json!({"messages": said("x y ")})),
        (
            "/v1/messages",
            json!({"max_tokens": 9, "messages": said("x y ")}),
        ),
        (
            "/v1/responses",
            json!({"input": [{"role": "user", "content": "u"}, {"role": "assistant", "content": [{"type": "output_text", "text": "x y "}]}]}),
        ),
        (
            "/api/chat",
            json!({"model": MODEL, "stream": false, "messages": said("x y ")}),
        ),
    ] {
        let prompt = accepted(&mut server, route, &body).await.prompt();
        assert_eq!(prompt, "user: u|assistant: x y ", "{route}");
    }
}

#[tokio::test]
async fn an_answer_begins_anew_where_nothing_can_be_gone_on_with() {
    let mut server = server(TEMPLATE).await;
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let mut called = said("x");
    called[1]["tool_calls"] = json!([call]);
    for (body, prompt) in [
        (
            json!({"messages": said("x"), "continue_final_message": false}),
            "user: u|assistant: x|assistant: ",
        ),
        (
            json!({"messages": said("")}),
            "user: u|assistant: |assistant: ",
        ),
        (
            json!({"messages": called}),
            "user: u|assistant: x<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>|assistant: ",
        ),
    ] {
        let found = accepted(&mut server, "/v1/chat/completions", &body).await;
        assert_eq!(found.prompt(), prompt, "{body}");
    }
}

/// A template that takes the model's words out, or refuses them, is used as it was meant.
#[tokio::test]
async fn templates_that_cannot_end_within_an_answer_begin_one() {
    let silent = "{% for message in messages if message.role == 'user' %}{{ message.content }}|{% endfor %}assistant: ";
    let strict = "{% for message in messages %}{{ message.content }}|{% endfor %}{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}assistant: ";
    for (template, prompt) in [(silent, "u|assistant: "), (strict, "u|x|assistant: ")] {
        let mut server = server(template).await;
        let body = json!({"messages": said("x")});
        let found = accepted(&mut server, "/v1/chat/completions", &body).await;
        assert_eq!(found.prompt(), prompt);
    }
}

/// A thought that the request began goes on as one.
#[tokio::test]
async fn a_thought_goes_on_as_a_thought() {
    let template = "{% for message in messages %}{{ message.role }}: {{ message.content }}|{% endfor %}assistant: {# <think></think> #}";
    let mut server = server(template).await;
    let address = server.address;
    for (begun, reasoning, content) in [
        ("<think>x", json!("y"), "z"),
        ("<think>w</think>x", json!(null), "y</think>z"),
    ] {
        let body = json!({"messages": said(begun)});
        let asking = tokio::spawn(async move {
            let reply = post("/v1/chat/completions", &body).send(address).await;
            reply.json().await
        });
        let accepted = server.accept().await;
        accepted.token(0, "y</think>z").await;
        accepted.finish(0, FinishReason::Stop, "").await;
        accepted.usage(1, 1).await;
        let message = asking.await.unwrap()["choices"][0]["message"].clone();
        assert_eq!(message["content"], content, "{begun}");
        assert_eq!(message["reasoning_content"], reasoning, "{begun}");
    }
}

#[tokio::test]
async fn a_response_goes_on_behind_a_call_that_was_cut_off() {
    let mut server = server(TEMPLATE).await;
    let address = server.address;
    let tool = json!({"type": "function", "name": "f", "parameters": {"type": "object"}});
    let body = json!({"input": "u", "tools": [tool]});
    let asking = tokio::spawn(async move {
        let reply = post("/v1/responses", &body).send(address).await;
        reply.json().await
    });
    let cut_off = server.accept().await;
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b";
    cut_off.token(0, call).await;
    cut_off.finish(0, FinishReason::Length, "").await;
    cut_off.usage(1, 1).await;
    let response = asking.await.unwrap();
    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["output"][0]["type"], "function_call");
    let next = json!({"input": "w", "previous_response_id": response["id"]});
    let prompt = accepted(&mut server, "/v1/responses", &next).await.prompt();
    assert_eq!(prompt, "user: u|user: w|assistant: ");
}
