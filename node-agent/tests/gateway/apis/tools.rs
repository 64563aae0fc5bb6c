//! How models are told of tools, and what their calls are held to.

use serde_json::{Value, json};

use super::{TEMPLATE, accepted, may_begin, question, tool};
use crate::client::post;
use crate::server::{Server, options, text};

#[tokio::test]
async fn tools_are_told_in_words_where_no_form_is_known() {
    let messages =
        "{% for message in messages %}{{ message.role }}: {{ message.content }}|{% endfor %}";
    // The second is of DeepSeek's distilled models: it shows calls, and tells of no tools.
    for told in [
        "{{ tools | tojson }}",
        "{# <\u{FF5C}tool\u{2581}sep\u{FF5C}> #}",
    ] {
        let template = format!("{told}{messages}");
        let mut server = Server::start_with(options(), Some(text(Some(&template)))).await;
        let tool = json!({"type": "function", "function": {"name": "f"}});
        let body = json!({"messages": question(), "tools": [tool], "tool_choice": "required"});
        let accepted = accepted(&mut server, "/v1/chat/completions", &body).await;
        let prompt = accepted.prompt();
        assert!(
            prompt.contains("system: You may call one or more functions"),
            "{prompt}"
        );
        assert!(prompt.contains("<tool_call>"), "{prompt}");
        // It is held to what it is told.
        let call = "<tool_call>\n{\"name\": \"f\"";
        assert!(may_begin(&accepted, call), "{told}");
    }
}

/// gpt-oss's template adds the description to a text, whether there is one or not.
#[tokio::test]
async fn a_tool_needs_no_description() {
    let adds = "{% for tool in tools %}{{ '// ' + tool.function.description + '\n' }}{{ tool.function.name }}|\
        {% endfor %}{# <|channel|>analysis<|message|> #}";
    let shows = "{{ tools[0].function | tojson }}{# <tool_call> #}";
    let schema = json!({"type": "object"});
    for (template, told) in [
        (adds, "// \nf|"),
        (
            shows,
            "{\"name\": \"f\", \"parameters\": {\"type\": \"object\"}}",
        ),
    ] {
        let mut server = Server::start_with(options(), Some(text(Some(template)))).await;
        for (route, body) in [
            (
                "/v1/chat/completions",
                json!({"messages": question(), "tools": [tool()]}),
            ),
            (
                "/v1/chat/completions",
                json!({"messages": question(), "tools": [{"type": "function", "function": {
                    "name": "f", "description": null, "parameters": schema, "strict": null,
                }}]}),
            ),
            (
                "/v1/responses",
                json!({"input": "a", "tools": [{"type": "function", "name": "f", "parameters": schema}]}),
            ),
            (
                "/v1/messages",
                json!({"max_tokens": 9, "messages": question(), "tools": [{"name": "f", "input_schema": schema}]}),
            ),
        ] {
            let prompt = accepted(&mut server, route, &body).await.prompt();
            assert_eq!(prompt, told, "{route} {body}");
        }
    }
}

/// Templates fail over a tool without parameters. In OpenAI's API of responses the field must be there, and may be null.
#[tokio::test]
async fn a_tool_needs_no_parameters() {
    let template = "{{ tools[0].function | tojson }}{# <tool_call> #}";
    let mut server = Server::start_with(options(), Some(text(Some(template)))).await;
    let chat = |function: Value| json!({"messages": question(), "tools": [{"type": "function", "function": function}]});
    for (route, body) in [
        ("/v1/chat/completions", chat(json!({"name": "f"}))),
        (
            "/v1/chat/completions",
            chat(json!({"name": "f", "parameters": null})),
        ),
        (
            "/v1/responses",
            json!({"input": "a", "tools": [{"type": "function", "name": "f", "parameters": null, "strict": null}]}),
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 9, "messages": question(), "tools": [{"name": "f"}]}),
        ),
    ] {
        let prompt = accepted(&mut server, route, &body).await.prompt();
        let told = "{\"name\": \"f\", \"parameters\": {\"type\": \"object\", \"properties\": {}}}";
        assert_eq!(prompt, told, "{route} {body}");
    }
}

/// Tools that run at OpenAI's or Anthropic's.
#[tokio::test]
async fn tools_of_other_kinds_are_left_out() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    for (route, body) in [
        (
            "/v1/messages",
            json!({"max_tokens": 9, "messages": question(), "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ),
        (
            "/v1/responses",
            json!({"input": "u", "tools": [{"type": "web_search"}]}),
        ),
    ] {
        let prompt = accepted(&mut server, route, &body).await.prompt();
        assert!(!prompt.contains("web_search"), "{route}: {prompt}");
    }
}

/// Claude Code's names of MCP servers' tools are long, and several servers have many.
#[tokio::test]
async fn many_tools_with_long_names_are_held_to() {
    let template =
        "{% for message in messages %}{{ message.content }}{% endfor %}{# tools <tool_call> #}";
    let mut server = Server::start_with(options(), Some(text(Some(template)))).await;
    let name = |nth: usize| format!("mcp__plugin_{nth:0>53}");
    let tools: Vec<Value> = (0..129)
        .map(|nth| json!({"name": name(nth), "input_schema": {"type": "object"}}))
        .collect();
    assert_eq!(name(128).len(), 65);
    let body = json!({"max_tokens": 9, "messages": question(), "tools": tools});
    let accepted = accepted(&mut server, "/v1/messages", &body).await;
    let call = |name: String| format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{");
    assert!(may_begin(&accepted, &call(name(128))));
    assert!(!may_begin(&accepted, &call(name(129))));
}

#[tokio::test]
async fn one_tool_that_cannot_be_held_frees_no_other() {
    let tool = |name: &str, strict: bool, parameters: &Value| json!({"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}});
    let days = json!({"type": "object", "properties": {"days": {"type": "integer"}}});
    // What no form of calls can be held to, and what JSON cannot.
    let least = json!({"type": "object", "minProperties": 1});
    let expression =
        json!({"type": "object", "properties": {"days": {"type": "string", "format": "regex"}}});
    type CallText = fn(&str, &str) -> String;
    let by_name: CallText = |name, value| {
        format!("<tool_call>\n<function={name}>\n<parameter=days>\n{value}\n</parameter>\n")
    };
    let as_json: CallText = |name, value| {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{\"days\": {value}")
    };
    let forms = [
        ("<tool_call><function=", by_name, &least, "`minProperties`"),
        ("<tool_call>", as_json, &expression, "`format`"),
    ];
    for (marks, call, other, named) in forms {
        let template = format!("{{{{ tools | tojson }}}}{{# {marks} #}}");
        let mut server = Server::start_with(options(), Some(text(Some(&template)))).await;
        let tools = |strict| json!([tool("f", false, &days), tool("g", strict, other)]);
        let body = json!({"messages": question(), "tools": tools(false)});
        let accepted = accepted(&mut server, "/v1/chat/completions", &body).await;
        let allowed = |call: &str| may_begin(&accepted, call);
        assert!(allowed(&call("f", "3")), "{marks}");
        assert!(!allowed(&call("f", "\"three")), "{marks}");
        assert!(allowed(&call("g", "\"three")), "{marks}");
        let body = json!({"messages": question(), "tools": tools(true)});
        let reply = post("/v1/chat/completions", &body)
            .send(server.address)
            .await;
        assert_eq!(reply.status, 400);
        let error = reply.json().await["error"].take();
        assert!(
            error["message"].as_str().unwrap().contains(named),
            "{error}"
        );
    }
}

/// A limit cut it off, or its arguments are none; clients tell of it with what went wrong.
#[tokio::test]
async fn a_broken_call_does_not_end_the_conversation() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    for arguments in ["{\"a\": \"b", "null", "[]", "\"a\"", ""] {
        let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}});
        for (route, body) in [
            (
                "/v1/chat/completions",
                json!({"messages": [
                    {"role": "user", "content": "u"},
                    {"role": "assistant", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "1", "content": "no JSON"},
                    {"role": "user", "content": "v"},
                ]}),
            ),
            (
                "/v1/responses",
                json!({"input": [
                    {"role": "user", "content": "u"},
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments},
                    {"type": "function_call_output", "call_id": "1", "output": "no JSON"},
                    {"role": "user", "content": "v"},
                ]}),
            ),
        ] {
            let prompt = accepted(&mut server, route, &body).await.prompt();
            let expected = "user: u|assistant: <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>|\
                tool: no JSON|user: v|assistant: ";
            assert_eq!(prompt, expected, "{body}");
        }
    }
}

/// Of a file that an agent reads, or a page that it looks at.
#[tokio::test]
async fn what_a_tool_brings_beside_texts_is_a_note() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}});
    let said = |content: Value| {
        json!({"max_tokens": 9, "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            {"role": "user", "content": content},
        ]})
    };
    let result = |content: Value| {
        said(json!([{"type": "tool_result", "tool_use_id": "1", "content": content}]))
    };
    let found = json!({"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "r"}]});
    let document = json!({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}});
    let note = |kind: &str| format!("[a part of type {kind}, which this model cannot read]");
    for (content, told) in [
        (
            json!([{"type": "text", "text": "r"}, image]),
            format!("r\n{}", note("image")),
        ),
        (json!([image]), note("image")),
        (json!([found, document]), format!("r\n{}", note("document"))),
    ] {
        let accepted = accepted(&mut server, "/v1/messages", &result(content)).await;
        let prompt = accepted.prompt();
        let ends = format!("|tool: {told}|assistant: ");
        assert!(prompt.ends_with(&ends), "{prompt}");
    }
    // Neither what a user sends, nor a text without one.
    for body in [said(json!([image])), result(json!([{"type": "text"}]))] {
        let reply = post("/v1/messages", &body).send(server.address).await;
        assert_eq!(reply.status, 400, "{body}");
    }
}

/// So agents send what an MCP server shows them.
#[tokio::test]
async fn an_image_in_a_chats_result_is_a_note() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let said = |content: Value| {
        json!({"messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": content},
        ]})
    };
    let image =
        json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}});
    let body = said(json!([{"type": "text", "text": "r"}, image]));
    let accepted = accepted(&mut server, "/v1/chat/completions", &body).await;
    let prompt = accepted.prompt();
    let ends = "|tool: r\n[a part of type image_url, which this model cannot read]|assistant: ";
    assert!(prompt.ends_with(ends), "{prompt}");
    // What is no part, or no text where one is promised, is a mistake.
    for content in [json!(["r"]), json!([{"type": "text"}])] {
        let reply = post("/v1/chat/completions", &said(content))
            .send(server.address)
            .await;
        assert_eq!(reply.status, 400);
        let error = reply.json().await["error"].take();
        let param = error["param"].as_str().unwrap();
        assert!(param.starts_with("messages[2].content[0]"), "{param}");
    }
}

/// Its arguments are held to the tool's schema; what the text would have to be does not matter.
#[tokio::test]
async fn a_call_that_must_come_needs_no_form_of_the_text() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    let form = json!({"type": "json_schema", "json_schema": {"schema": {"type": "array"}}});
    let mut body = json!({"messages": question(), "tools": [tool()], "response_format": form});
    body["tool_choice"] = "required".into();
    let accepted = accepted(&mut server, "/v1/chat/completions", &body).await;
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {";
    assert!(may_begin(&accepted, call));
}

#[tokio::test]
async fn a_strict_schema_that_cannot_be_kept_to_is_named() {
    let server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    let schema =
        json!({"type": "object", "properties": {"a": {"type": "string", "format": "regex"}}});
    let tool = json!({"type": "function", "function": {"name": "f", "strict": true, "parameters": schema}});
    let body = json!({"messages": question(), "tools": [tool]});
    let reply = post("/v1/chat/completions", &body)
        .send(server.address)
        .await;
    assert_eq!(reply.status, 400);
    let message = "tools: answers cannot be held to the `format` regex";
    assert_eq!(reply.json().await["error"]["message"], message);
}

#[tokio::test]
async fn calls_that_came_together_go_back_one_by_one() {
    let template = "{% for message in messages %}{{ message.thinking }}\
        {% for call in message.tool_calls %}{{ call.id }}{% endfor %}{{ message.content }}|{% endfor %}\
        {# <|channel|>analysis<|message|> tools #}";
    let mut server = Server::start_with(options(), Some(text(Some(template)))).await;
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let result =
        |id: &str, text: &str| json!({"role": "tool", "tool_call_id": id, "content": text});
    let body = json!({"messages": [
        {"role": "user", "content": "u"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call("1"), call("2"), call("3")]},
        result("2", "r2"), result("1", "r1"), result("4", "r4"),
        {"role": "user", "content": "v"},
    ]});
    let accepted = accepted(&mut server, "/v1/chat/completions", &body).await;
    assert_eq!(accepted.prompt(), "u|hm1|r1|2|r2|3|r4|v|");
}
