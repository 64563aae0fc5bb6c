//! What a chat asks for: the prompt, how to sample, and what the answer has to look like. Every API for conversations comes down to this.

use prima_text::{
    AnswerForm, AnswerReader, Calls, Constraint, Grammar, Reasoning, ReasoningLimit, Tool,
    WantedAnswer, after_reasoning, calls,
};
use serde_json::{Map, Value, json};

use super::conversation::{self, Conversation, Prompt};
use super::grammar;
use super::in_flight::AskedAnswers;
use super::openai_error::ApiError;
use super::request::{Fields, GenerationOptions, MAX_TOP_LOGPROBS};
use super::tools::ToolUse;
use super::{Gateway, ModelText, refused_grammar};

/// The field that bounds reasoning.
pub const THINKING_BUDGET: &str = "thinking_budget_tokens";

/// Reads the fields of OpenAI's chat completions.
pub fn asked(
    gateway: &Gateway,
    text: &ModelText,
    fields: &Fields<'_>,
) -> Result<AskedAnswers, ApiError> {
    if let Some(model) = fields.string("model")? {
        gateway.0.model.check(model)?;
    }
    let options = GenerationOptions::parse(fields, text.tokenizer.vocab_size())?;
    let logprobs = logprobs(fields)?;
    let (prompt, tools) = prompt(text, fields)?;
    let form = conversation::template(text)?.form();
    let reasoning = match &prompt.begun {
        Some(begun) => form.reasoning_within(begun),
        None => form.reasoning_after(&prompt.text),
    };
    let answer = grammar::asked(fields)?;
    let limit = match thinking_budget(fields)? {
        Some((field, tokens)) => {
            let may_call = !tools.callable.is_empty();
            ReasoningLimit::new(tokens, form, reasoning, may_call, &text.tokenizer)
                .map_err(|error| ApiError::invalid(field, format!("{field}: {error}")))?
        }
        None => None,
    };
    // A grammar or a regular expression is for all of the answer, which then has no thoughts.
    let thinks = match &answer {
        Some(asked) if !matches!(asked.grammar, Grammar::JsonSchema(_)) => Reasoning::Closed,
        _ => reasoning,
    };
    let reader = AnswerReader::new(form, tools.offered.clone(), thinks);
    Ok(AskedAnswers {
        prompts: vec![prompt.tokens],
        constraint: constraint(text, form, reasoning, &tools, answer)?,
        reasoning: limit,
        shown: form.control_tokens(!tools.offered.is_empty(), &text.tokenizer),
        reader: Some(reader),
        // If the client sets no limit, the context is the limit.
        max_tokens: options.max_tokens.unwrap_or(usize::MAX),
        options,
        logprobs,
    })
}

/// The prompt of a chat, and what it says about tools.
pub fn prompt(text: &ModelText, fields: &Fields<'_>) -> Result<(Prompt, ToolUse), ApiError> {
    let tools = ToolUse::read(fields)?;
    let prompt = conversation::prompt(text, conversation(fields, &tools)?)?;
    Ok((prompt, tools))
}

/// How many tokens the prompt of a chat has, also of one that the context does not hold.
pub fn count(text: &ModelText, fields: &Fields<'_>) -> Result<usize, ApiError> {
    let tools = ToolUse::read(fields)?;
    conversation::count(text, conversation(fields, &tools)?)
}

fn conversation<'a>(fields: &Fields<'_>, tools: &'a ToolUse) -> Result<Conversation<'a>, ApiError> {
    Ok(Conversation {
        messages: conversation::messages(fields)?,
        tools: &tools.offered,
        further: further(fields)?,
        // vLLM's field.
        may_go_on: fields.boolean("continue_final_message")?.unwrap_or(true),
    })
}

/// How many alternatives per token, if logprobs are asked for.
fn logprobs(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let asked = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=MAX_TOP_LOGPROBS as i64)?;
    match (asked, top) {
        (true, top) => Ok(Some(top.unwrap_or(0) as usize)),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid(
            "top_logprobs",
            "top_logprobs is only allowed when logprobs is true",
        )),
    }
}

/// What the request says to the template.
fn further(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let mut further = match fields.object("chat_template_kwargs")? {
        Some(given) => given.to_map(),
        None => Map::new(),
    };
    if let Some(effort) = fields.string("reasoning_effort")? {
        further.insert("reasoning_effort".into(), effort.into());
        further
            .entry("enable_thinking")
            .or_insert((effort != "none").into());
    }
    if let Some((_, 0)) = thinking_budget(fields)? {
        further.entry("enable_thinking").or_insert(false.into());
    }
    Ok(further)
}

/// How many tokens of reasoning an answer may have, and the field that says so: llama.cpp's, or vLLM's. -1 means any number.
fn thinking_budget(fields: &Fields<'_>) -> Result<Option<(&'static str, usize)>, ApiError> {
    for field in [THINKING_BUDGET, "thinking_token_budget"] {
        if let Some(tokens) = fields.integer(field, -1..=i64::MAX)? {
            return Ok(usize::try_from(tokens).ok().map(|tokens| (field, tokens)));
        }
    }
    let effort = fields.string("reasoning_effort")?;
    Ok((effort == Some("none")).then_some(("reasoning_effort", 0)))
}

/// What the answer has to look like: its calls by the tools' schemas, and what else was asked for.
fn constraint(
    text: &ModelText,
    form: &AnswerForm,
    reasoning: Reasoning,
    tools: &ToolUse,
    answer: Option<grammar::AskedForm>,
) -> Result<Option<Constraint>, ApiError> {
    if tools.callable.is_empty() {
        let Some(asked) = answer else {
            return Ok(None);
        };
        let grammar = after_reasoning(form, reasoning, asked.grammar, &text.tokenizer);
        return text.constraint(grammar, asked.field).map(Some);
    }
    let schema = match answer {
        None => None,
        Some(grammar::AskedForm {
            grammar: Grammar::JsonSchema(schema),
            ..
        }) if tools.calls == Calls::Allowed => Some(schema),
        // Of an answer that is a call, the form is the tool's.
        Some(grammar::AskedForm {
            grammar: Grammar::JsonSchema(_),
            ..
        }) => None,
        Some(asked) => {
            return Err(ApiError::invalid(
                asked.field,
                format!(
                    "{} cannot be kept to together with these tools",
                    asked.field
                ),
            ));
        }
    };
    let constraint = |callable: &[Tool]| {
        let wanted = WantedAnswer {
            tools: callable,
            calls: tools.calls,
            several: tools.several,
            text: schema.as_ref(),
        };
        let grammar = calls(form, reasoning, &wanted, &text.tokenizer)
            .map_err(|error| refused_grammar("tools", &error))?;
        text.constraint(grammar, "tools").map(Some)
    };
    // Who does not rely on a schema that cannot be kept to is served without it. If all are too much together, then without any.
    let without = |is_held: &dyn Fn(&Tool) -> bool| {
        let tools = tools.callable.iter().cloned();
        let tools = tools.map(|tool| match tool.strict || is_held(&tool) {
            true => tool,
            false => Tool {
                parameters: json!({"type": "object"}),
                ..tool
            },
        });
        constraint(&tools.collect::<Vec<_>>())
    };
    match constraint(&tools.callable) {
        Err(_) if tools.callable.iter().any(|tool| !tool.strict) => {
            let is_held = |tool: &Tool| constraint(std::slice::from_ref(tool)).is_ok();
            without(&is_held).or_else(|_| without(&|_| false))
        }
        read => read,
    }
}
