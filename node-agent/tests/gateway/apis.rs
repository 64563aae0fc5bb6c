//! The four APIs for conversations: what holds for all of them, and what for thoughts, for tools and for single ones.

mod every_api;
mod readers;
mod responses;
mod single_apis;
mod thoughts;
mod tools;
mod turns;

use prima_node_agent::generation::FinishReason;
use prima_text::{Sampler, SamplingParams};
use serde_json::{Value, json};

use crate::client::post;
use crate::server::{Accepted, Server, text};

/// Of a model that reasons, and calls tools as Hermes does.
pub const TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: \
    {% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}\
    {% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}|\
    {% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{# </think> #}assistant: ";

fn question() -> Value {
    json!([{"role": "user", "content": "a"}])
}

fn tool() -> Value {
    json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}})
}

/// Has an empty answer come to a request, and returns what the ring got.
pub async fn accepted(server: &mut Server, route: &str, body: &Value) -> Accepted {
    let (request, address) = (post(route, body), server.address);
    let answering = async {
        let accepted = server.accept().await;
        accepted.finish(0, FinishReason::Stop, "").await;
        accepted.usage(1, 0).await;
        accepted
    };
    let (reply, accepted) = tokio::join!(request.send(address), answering);
    assert_eq!(reply.status, 200, "{route} {body}");
    accepted
}

/// Whether the answer may begin like this, by what it is held to.
fn may_begin(accepted: &Accepted, answer: &str) -> bool {
    let mut sampler = Sampler::new(SamplingParams::default()).unwrap();
    sampler.constrain(accepted.request.constraint.clone());
    let tokens = text(None).tokenizer.encode(answer, false, false).unwrap();
    let mut tokens = tokens.into_iter();
    tokens.all(|token| sampler.accept(token).is_ok())
}
