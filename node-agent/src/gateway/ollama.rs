//! Ollama's API, said again as a chat of OpenAI's: /api/chat, /api/generate, and what its clients ask before that. Answers are lines of JSON.
//! What tells Ollama to load or unload the model is accepted and does nothing: this server has its one model loaded.

use std::time::Instant;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use prima_text::AnswerPart;
use serde_json::{Map, Value, json};

use crate::generation::{FinishReason, SubmitError, Usage};

use super::auth::Caller;
use super::chat;
use super::completions;
use super::conversation::call_id;
use super::in_flight::{AnswerProgress, AnsweredChoice, AskedAnswers, InFlight};
use super::intake::Taken;
use super::openai_error::{ApiError, with_body};
use super::request::Fields;
use super::request_id;
use super::stream::{self, Format, Message};
use super::{Gateway, ModelText};

/// The version of Ollama whose API this is; some clients want a recent one.
const API_VERSION: &str = "0.12.0";

/// Which of the two routes: they name what was said differently.
#[derive(Clone, Copy, PartialEq)]
enum Route {
    Chat,
    Generate,
}

pub async fn chat(
    State(gateway): State<Gateway>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Response {
    answer(gateway, caller, request, Route::Chat).await
}

pub async fn generate(
    State(gateway): State<Gateway>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Response {
    answer(gateway, caller, request, Route::Generate).await
}

pub async fn version() -> Json<Value> {
    Json(json!({ "version": API_VERSION }))
}

/// /api/tags: the models that there are.
pub async fn tags(State(gateway): State<Gateway>) -> Json<Value> {
    Json(json!({"models": [card(&gateway)]}))
}

/// /api/ps: the models that are loaded, and until when: as good as for ever.
pub async fn ps(State(gateway): State<Gateway>) -> Json<Value> {
    let loaded = gateway.ready().ok().map(|_| {
        let mut card = card(&gateway);
        card["expires_at"] = "9999-12-31T23:59:59Z".into();
        card["size_vram"] = 0.into();
        card
    });
    Json(json!({"models": loaded.into_iter().collect::<Vec<_>>()}))
}

/// /api/pull: nothing has to be fetched of the model that is served, and there is no other.
pub async fn pull(State(gateway): State<Gateway>, request: Request) -> Response {
    let pulled = async {
        names_model(&gateway, request).await?;
        Ok(Json(json!({"status": "success"})).into_response())
    };
    pulled.await.unwrap_or_else(refusal)
}

/// /api/show: what the model can do.
pub async fn show(State(gateway): State<Gateway>, request: Request) -> Response {
    let shown = async {
        let text = gateway.ready()?;
        names_model(&gateway, request).await?;
        let mut capabilities = vec!["completion"];
        if let Some(template) = &text.chat_template {
            capabilities.push("tools");
            capabilities.extend(template.form().reasoning.map(|_| "thinking"));
        }
        capabilities.extend(text.tokenizer.fill_in().map(|_| "insert"));
        let architecture = &text.architecture;
        let mut info = Map::new();
        info.insert("general.architecture".into(), architecture.as_str().into());
        info.insert(
            format!("{architecture}.context_length"),
            text.context_length.into(),
        );
        Ok(Json(json!({
            "details": details(architecture),
            "model_info": info,
            "capabilities": capabilities,
            "modified_at": gateway.0.model.since(),
        }))
        .into_response())
    };
    shown.await.unwrap_or_else(refusal)
}

fn card(gateway: &Gateway) -> Value {
    let model = &gateway.0.model;
    let (name, size, since) = (&model.name, model.bytes, model.since());
    let text = gateway.0.text.borrow().clone();
    let family = text.map_or(String::new(), |text| text.architecture.clone());
    json!({"name": name, "model": name, "modified_at": since, "size": size, "digest": "", "details": details(&family)})
}

fn details(family: &str) -> Value {
    json!({"format": "gguf", "family": family, "families": [family], "parameter_size": "", "quantization_level": ""})
}

async fn answer(gateway: Gateway, caller: Caller, request: Request, route: Route) -> Response {
    let answered = async {
        let (own, text) = (gateway.clone(), gateway.ready()?);
        let read = move |fields: &Fields<'_>| {
            check_model(&own, fields)?;
            let Some(messages) = messages(fields, route)? else {
                return Ok(Asked::Nothing {
                    reason: load_reason(fields),
                });
            };
            let mut chat = as_chat(fields, messages)?;
            let asked = match goes_on(fields, route)? {
                true => {
                    for name in ["prompt", "suffix"] {
                        chat.insert(name.into(), fields.get(name).cloned().unwrap_or_default());
                    }
                    let context = text.context_length.into();
                    chat.entry("max_tokens").or_insert(context);
                    completions::asked(&own, &text, &Fields::new(&chat))?
                }
                false => match chat::asked(&own, &text, &Fields::new(&chat)) {
                    Err(ApiError::Submit(SubmitError::ContextExceeded { .. })) => {
                        let shorter = within_context(&text, chat);
                        chat::asked(&own, &text, &Fields::new(&shorter))?
                    }
                    asked => asked?,
                },
            };
            Ok(Asked::Answers(Box::new(asked)))
        };
        let Taken { asked, place, room } = gateway.0.intake.take(request, read).await?;
        let mut lines = Lines {
            model: gateway.0.model.name.clone(),
            route,
            begun: Instant::now(),
            calls: 0,
            call: None,
            reason: "stop",
        };
        let asked = match asked {
            Asked::Answers(asked) => *asked,
            Asked::Nothing { reason } => return Ok(Json(lines.nothing(reason)).into_response()),
        };
        let stream = asked.options.stream;
        let taken = Taken { asked, place, room };
        let in_flight = InFlight::submit(&gateway, caller, taken).await?;
        if stream {
            return Ok(stream::lines(in_flight, lines));
        }
        let (answered, usage) = in_flight.collect_one().await?;
        Ok(Json(lines.whole(answered, &usage)).into_response())
    };
    answered.await.unwrap_or_else(refusal)
}

/// Ollama's error body, with our status and headers.
pub fn refusal(error: ApiError) -> Response {
    let message = error.to_string();
    with_body(error.into_response(), &json!({ "error": message }))
}

/// That a request, which asks for nothing else, names the model.
async fn names_model(gateway: &Gateway, request: Request) -> Result<(), ApiError> {
    let own = gateway.clone();
    let read = move |fields: &Fields<'_>| check_model(&own, fields);
    gateway.0.intake.take(request, read).await.map(drop)
}

/// Ollama's names have a tag. `name` is the older word for the field.
pub fn check_model(gateway: &Gateway, fields: &Fields<'_>) -> Result<(), ApiError> {
    let asked = match fields.string("model")? {
        None => fields.string("name")?,
        asked => asked,
    };
    match asked {
        Some(asked) => {
            let plain = asked.strip_suffix(":latest").unwrap_or(asked);
            gateway.0.model.check(plain)
        }
        None => Err(fields.missing("model")),
    }
}

// ---- the request as a chat ----

enum Asked {
    Answers(Box<AskedAnswers>),
    /// That the model is loaded, or unloaded.
    Nothing {
        reason: &'static str,
    },
}

/// The conversation; none where the request asks for nothing.
fn messages(fields: &Fields<'_>, route: Route) -> Result<Option<Value>, ApiError> {
    Ok(match route {
        Route::Chat => fields
            .array("messages")?
            .filter(|messages| !messages.is_empty())
            .map(|messages| {
                messages
                    .iter()
                    .enumerate()
                    .map(said)
                    .collect::<Result<Value, _>>()
            })
            .transpose()?,
        Route::Generate => {
            without_images(fields)?;
            let role = |role, text: &str| json!({"role": role, "content": text});
            let system = fields.string("system")?.map(|text| role("system", text));
            let prompt = fields.string("prompt")?.filter(|text| !text.is_empty());
            prompt.map(|text| system.into_iter().chain([role("user", text)]).collect())
        }
    })
}

/// Whether the prompt is continued as it is, without a chat template: editors ask so for what they complete.
fn goes_on(fields: &Fields<'_>, route: Route) -> Result<bool, ApiError> {
    let suffix = fields
        .string("suffix")?
        .is_some_and(|text| !text.is_empty());
    let raw = fields.boolean("raw")?.unwrap_or(false);
    Ok(route == Route::Generate && (raw || suffix))
}

/// Clients have the model loaded by a request that asks for nothing, and unloaded by one that also says to keep it for no time.
fn load_reason(fields: &Fields<'_>) -> &'static str {
    let unloads = match fields.get("keep_alive") {
        Some(Value::Number(time)) => time.as_f64() == Some(0.0),
        Some(Value::String(time)) => ["0", "0s", "0m", "0h"].contains(&time.as_str()),
        _ => false,
    };
    if unloads { "unload" } else { "load" }
}

/// Bytes of a conversation for each token of the context that are looked at where it may be cut: hardly a text has longer tokens.
const BYTES_PER_TOKEN: usize = 64;

/// Of a conversation that the context does not hold, the oldest turns are left out, as few as possible; instructions stay. So does Ollama.
fn within_context(text: &ModelText, mut chat: Map<String, Value>) -> Map<String, Value> {
    let messages = chat.remove("messages");
    let messages = match &messages {
        Some(Value::Array(messages)) => messages.as_slice(),
        _ => &[],
    };
    let is = |role: &str, number: usize| messages[number]["role"] == role;
    let from = |turn: usize| {
        let kept = (0..messages.len()).filter(|number| *number >= turn || is("system", *number));
        let mut shorter = chat.clone();
        let kept = kept.map(|number| messages[number].clone()).collect();
        shorter.insert("messages".into(), kept);
        shorter
    };
    let exceeds = |chat: &Map<String, Value>| {
        let prompt = chat::prompt(text, &Fields::new(chat));
        matches!(
            prompt,
            Err(ApiError::Submit(SubmitError::ContextExceeded { .. }))
        )
    };
    // A hostile body has a hundred thousand turns.
    let most = text.context_length.saturating_mul(BYTES_PER_TOKEN);
    let mut bytes = 0;
    let near = |number: &usize| {
        bytes += messages[*number].to_string().len();
        bytes <= most
    };
    let near: Vec<usize> = (0..messages.len()).rev().take_while(near).collect();
    let oldest = near.last().copied().unwrap_or(messages.len());
    let turns: Vec<usize> = (oldest.max(1)..messages.len())
        .filter(|number| is("user", *number))
        .collect();
    let first = turns.partition_point(|turn| exceeds(&from(*turn)));
    // If not even the last turn fits, the whole is refused as it was.
    from(turns.get(first).copied().unwrap_or(0))
}

fn as_chat(fields: &Fields<'_>, messages: Value) -> Result<Map<String, Value>, ApiError> {
    let mut chat = Map::new();
    chat.insert("messages".into(), messages);
    chat.insert(
        "stream".into(),
        fields.boolean("stream")?.unwrap_or(true).into(),
    );
    if let Some(tools) = fields.get("tools") {
        chat.insert("tools".into(), tools.clone());
    }
    match fields.get("format") {
        None => {}
        Some(Value::String(word)) if word.is_empty() => {}
        Some(Value::String(word)) if word == "json" => {
            chat.insert("response_format".into(), json!({"type": "json_object"}));
        }
        Some(schema @ Value::Object(_)) => {
            let mut schema = schema.clone();
            leave_out_uniqueness(&mut schema);
            let form = json!({"type": "json_object", "schema": schema});
            chat.insert("response_format".into(), form);
        }
        Some(other) => return Err(fields.wrong("format", "`json` or a JSON schema", other)),
    }
    match fields.get("think") {
        None => {}
        Some(Value::Bool(think)) => {
            chat.insert(
                "chat_template_kwargs".into(),
                json!({ "enable_thinking": think }),
            );
            // Also where the template knows no such word.
            if !think {
                chat.insert(chat::THINKING_BUDGET.into(), 0.into());
            }
        }
        Some(Value::String(effort)) => {
            chat.insert("reasoning_effort".into(), effort.as_str().into());
        }
        Some(other) => return Err(fields.wrong("think", "true, false or an effort", other)),
    }
    // What Ollama does where a request says nothing.
    chat.insert("temperature".into(), 0.8.into());
    chat.insert("top_k".into(), 40.into());
    chat.insert("top_p".into(), 0.9.into());
    let Some(options) = fields.object("options")? else {
        return Ok(chat);
    };
    chat.extend(options.renamed(&[
        ("temperature", "temperature"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("seed", "seed"),
        ("stop", "stop"),
        ("repeat_penalty", "repeat_penalty"),
        ("presence_penalty", "presence_penalty"),
        ("frequency_penalty", "frequency_penalty"),
    ]));
    // Below 0 means without a limit.
    if let Some(limit) = options.integer("num_predict", i64::MIN..=i64::MAX)?
        && limit > 0
    {
        chat.insert("max_tokens".into(), limit.into());
    }
    Ok(chat)
}

/// Ollama does not hold arrays to it either, and clients ask for it: Home Assistant where several of a list may be chosen.
fn leave_out_uniqueness(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            if map.get("uniqueItems").is_some_and(Value::is_boolean) {
                map.remove("uniqueItems");
            }
            map.values_mut().for_each(leave_out_uniqueness);
        }
        Value::Array(values) => values.iter_mut().for_each(leave_out_uniqueness),
        _ => {}
    }
}

/// Nobody's question may be answered as if its images were not there.
fn without_images(fields: &Fields<'_>) -> Result<(), ApiError> {
    match fields.get("images") {
        Some(images) if images.as_array().is_none_or(|images| !images.is_empty()) => {
            Err(fields.wrong("images", "left out: this model reads text only", images))
        }
        _ => Ok(()),
    }
}

/// A message of theirs: calls have no ids, and arguments that are objects.
fn said((number, message): (usize, &Value)) -> Result<Value, ApiError> {
    without_images(&Fields::of(message, &format!("messages[{number}]"))?)?;
    let mut said = message.clone();
    if let Some(thinking) = said.get("thinking").cloned() {
        said["reasoning_content"] = thinking;
    }
    let calls = said.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        let arguments = &mut call["function"]["arguments"];
        if !arguments.is_string() {
            *arguments = arguments.to_string().into();
        }
    }
    if let Some(name) = said.get("tool_name").cloned() {
        said["name"] = name;
    }
    Ok(said)
}

// ---- the answer as lines ----

struct Lines {
    model: String,
    route: Route,
    begun: Instant,
    /// That were told.
    calls: usize,
    /// Clients get calls whole.
    call: Option<(String, String)>,
    reason: &'static str,
}

impl Lines {
    fn whole(&mut self, answered: AnsweredChoice, usage: &Usage) -> Value {
        let calls = answered.calls();
        let calls = calls.filter_map(|(name, arguments)| self.called(name, arguments));
        let calls: Vec<Value> = calls.collect();
        self.reason = done_reason(answered.reason);
        let mut said = self.said(&answered.content(), &answered.reasoning(), calls);
        self.end(&mut said, usage);
        said
    }

    /// The answer to a request that asks for nothing.
    fn nothing(&self, reason: &'static str) -> Value {
        let mut said = self.said("", "", Vec::new());
        said["done"] = true.into();
        said["done_reason"] = reason.into();
        said
    }

    fn said(&self, content: &str, thinking: &str, calls: Vec<Value>) -> Value {
        let mut line = json!({"model": self.model, "created_at": now()});
        match self.route {
            Route::Generate => {
                line["response"] = content.into();
                if !thinking.is_empty() {
                    line["thinking"] = thinking.into();
                }
            }
            Route::Chat => {
                let mut message = json!({"role": "assistant", "content": content});
                if !thinking.is_empty() {
                    message["thinking"] = thinking.into();
                }
                if !calls.is_empty() {
                    message["tool_calls"] = calls.into();
                }
                line["message"] = message;
            }
        }
        line["done"] = false.into();
        line
    }

    /// Makes the last line of a line: durations are in nanoseconds.
    fn end(&self, line: &mut Value, usage: &Usage) {
        let nanoseconds = |seconds: f64| Value::from((seconds * 1e9) as u64);
        line["done"] = true.into();
        line["done_reason"] = self.reason.into();
        line["total_duration"] = nanoseconds(self.begun.elapsed().as_secs_f64());
        line["load_duration"] = 0.into();
        line["prompt_eval_count"] = usage.prompt_tokens.into();
        line["prompt_eval_duration"] = nanoseconds(usage.prompt_seconds);
        line["eval_count"] = usage.completion_tokens.into();
        line["eval_duration"] = nanoseconds(usage.completion_seconds);
    }

    fn parts(&mut self, parts: Vec<AnswerPart>, messages: &mut Vec<Message>) {
        for part in parts {
            match part {
                AnswerPart::Arguments(text) => {
                    if let Some((_, arguments)) = &mut self.call {
                        *arguments += &text;
                    }
                    continue;
                }
                AnswerPart::Call { name } => {
                    self.tell_call(messages);
                    self.call = Some((name, String::new()));
                }
                AnswerPart::Content(text) => {
                    self.tell_call(messages);
                    messages.push(Message::json(&self.said(&text, "", Vec::new())));
                }
                AnswerPart::Reasoning(text) => {
                    self.tell_call(messages);
                    messages.push(Message::json(&self.said("", &text, Vec::new())));
                }
            }
        }
    }

    fn tell_call(&mut self, messages: &mut Vec<Message>) {
        if let Some((name, arguments)) = self.call.take()
            && let Some(call) = self.called(&name, &arguments)
        {
            messages.push(Message::json(&self.said("", "", vec![call])));
        }
    }

    /// A call as they have it. One that a limit cut off is none: agents would carry it out.
    fn called(&mut self, name: &str, arguments: &str) -> Option<Value> {
        let arguments: Value = serde_json::from_str(arguments).ok()?;
        let number = self.calls;
        self.calls += 1;
        let id = call_id(request_id::random());
        Some(json!({"id": id, "function": {"index": number, "name": name, "arguments": arguments}}))
    }
}

impl Format for Lines {
    fn begin(&mut self, _: usize) -> Vec<Message> {
        Vec::new()
    }

    fn write(&mut self, progress: AnswerProgress) -> Vec<Message> {
        let mut messages = Vec::new();
        match progress {
            AnswerProgress::Token { parts, .. } => self.parts(parts, &mut messages),
            AnswerProgress::Finished { reason, parts, .. } => {
                self.parts(parts, &mut messages);
                self.tell_call(&mut messages);
                self.reason = done_reason(reason);
            }
            AnswerProgress::Done(usage) => {
                let mut line = self.said("", "", Vec::new());
                self.end(&mut line, &usage);
                messages.push(Message::json(&line));
            }
            AnswerProgress::Failed(error) => {
                messages.push(Message::json(&json!({"error": error.to_string()})));
            }
        }
        messages
    }
}

fn done_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => "length",
        FinishReason::Stop | FinishReason::StopString(_) => "stop",
    }
}

fn now() -> String {
    jiff::Timestamp::now().to_string()
}
