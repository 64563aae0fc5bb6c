//! Turns conversations into prompts, with the template in the model's file.
//!
//! Decides: what a template means, which is what it means to Hugging Face's `apply_chat_template` (transformers,
//! `utils/chat_template_utils.py`): Jinja with `trim_blocks`, `lstrip_blocks` and loop controls, `{% generation %}`, Python's methods on
//! strings and dictionaries, and the variables that models are published with. Refuses: constructs that minijinja lacks (the error names
//! the line), and to invent a template for models that carry none.

use std::error::Error as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value};
use prima_gguf::{GgufError, Metadata};
use regex::Regex;
use serde_json::{Map, json};

use crate::answer_form::AnswerForm;
use crate::template_memory;
use crate::template_python::{self, RaisedByTemplate};
use crate::tokenizer::Tokenizer;
use crate::turns::Turns;

/// A model's chat templates, read and ready to render. Most models carry one; some have another for conversations with tools.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Whether there is a template named [`TOOL_USE`] besides the default one.
    has_tool_use: bool,
    /// `bos_token` and the others, as texts.
    special_tokens: Vec<(&'static str, String)>,
    form: AnswerForm,
    tells_of_tools: bool,
    takes_objects: bool,
    thinks_in_blocks: bool,
    wants_descriptions: bool,
    turns: Turns,
}

impl ChatTemplate {
    /// Reads `tokenizer.chat_template`, and `tokenizer.chat_template.tool_use` where it is there. `None`: the model carries no template (a
    /// base model). An error means that a template is not valid Jinja, or that it uses what minijinja lacks.
    pub fn from_gguf(
        metadata: &Metadata,
        tokenizer: &Tokenizer,
    ) -> Result<Option<Self>, ChatTemplateError> {
        let Some(default) = metadata.str(TEMPLATE)? else {
            return Ok(None);
        };
        let tool_use = metadata.str(TOOL_USE_TEMPLATE)?;
        let mut special_tokens = Vec::new();
        for (name, key) in SPECIAL_TOKENS {
            let token = match name {
                "bos_token" => tokenizer.bos(),
                "eos_token" => tokenizer.eos(),
                _ => metadata.u32(key)?,
            };
            if let Some(token) = token {
                special_tokens.push((name, tokenizer.token_text(token).to_owned()));
            }
        }
        Self::new(default, tool_use, special_tokens).map(Some)
    }

    fn new(
        default: &str,
        tool_use: Option<&str>,
        special_tokens: Vec<(&'static str, String)>,
    ) -> Result<Self, ChatTemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .keep_trailing_newline(false)
            .build()
            .map_err(|source| ChatTemplateError::Syntax {
                name: DEFAULT,
                line: 0,
                source,
            })?;
        environment.set_syntax(syntax);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_fuel(Some(FUEL));
        environment.set_debug(false);
        template_python::add_to(&mut environment);
        let templates = [(DEFAULT, Some(default)), (TOOL_USE, tool_use)];
        for (name, source) in templates {
            if let Some(source) = source {
                environment
                    .add_template_owned(name, without_generation_blocks(source)?)
                    .map_err(|source| ChatTemplateError::Syntax {
                        name,
                        line: source.line().unwrap_or(0),
                        source,
                    })?;
            }
        }
        let form = AnswerForm::of_template(tool_use.unwrap_or(default));
        let tells_of_tools = tool_use.is_some() || default.contains("tools");
        // Calls in a form that nobody could read are of no use: such models are told of tools in words.
        let tells_of_tools = tells_of_tools && form.calls_known;
        let form = match tells_of_tools {
            true => form,
            false => form.told_in_words(),
        };
        let mut template = Self {
            environment,
            has_tool_use: tool_use.is_some(),
            special_tokens,
            tells_of_tools,
            form,
            takes_objects: true,
            thinks_in_blocks: false,
            wants_descriptions: false,
            turns: Turns::ALL,
        };
        template.takes_objects = template.reads_objects();
        template.thinks_in_blocks = template.reads_thoughts_as_blocks();
        template.wants_descriptions = tells_of_tools && template.needs_descriptions();
        template.turns = template.tried_turns();
        Ok(template)
    }

    /// How the model marks reasoning and calls.
    pub fn form(&self) -> &AnswerForm {
        &self.form
    }

    /// Whether it tells the model which tools there are. One that does not cannot show calls either.
    pub fn tells_of_tools(&self) -> bool {
        self.tells_of_tools
    }

    /// Whether it wants the arguments of calls in the conversation as objects; else as JSON text.
    pub fn takes_objects(&self) -> bool {
        self.takes_objects
    }

    /// Whether it wants an answer's thoughts as a block of its content; else as `reasoning_content`, or not at all.
    pub fn thinks_in_blocks(&self) -> bool {
        self.thinks_in_blocks
    }

    /// Whether it fails over a tool that has no description, and not over one whose description is empty.
    pub fn wants_descriptions(&self) -> bool {
        self.wants_descriptions
    }

    /// Which messages it takes, and where.
    pub fn turns(&self) -> Turns {
        self.turns
    }

    /// Of a template for conversations with tools and another one without, both must take them.
    fn tried_turns(&self) -> Turns {
        let mut extras = vec![Map::new()];
        if self.has_tool_use {
            extras.push(Map::from_iter([("tools".to_owned(), json!([]))]));
        }
        let arguments = match self.takes_objects {
            true => json!({}),
            false => "{}".into(),
        };
        Turns::tried(&arguments, |messages, texts| {
            extras.iter().all(|extra| {
                let rendered = self.render(messages, true, extra);
                rendered.is_ok_and(|prompt| holds_in_order(&prompt, texts))
            })
        })
    }

    /// Tries it.
    fn needs_descriptions(&self) -> bool {
        let renders = |function: serde_json::Value| {
            let messages = json!([{"role": "user", "content": "a"}]);
            let tools = json!([{"type": "function", "function": function}]);
            let extra = Map::from_iter([("tools".to_owned(), tools)]);
            self.render(&messages, true, &extra).is_ok()
        };
        let parameters = json!({"type": "object", "properties": {}});
        !renders(json!({"name": "f", "parameters": parameters}))
            && renders(json!({"name": "f", "description": "", "parameters": parameters}))
    }

    /// Tries it.
    fn reads_thoughts_as_blocks(&self) -> bool {
        let blocks =
            json!([{"type": "thinking", "thinking": "probe"}, {"type": "text", "text": "b"}]);
        let shows = |answer: serde_json::Value| {
            let messages = json!([{"role": "user", "content": "a"}, answer]);
            let rendered = self.render(&messages, false, &Map::new());
            // A template that shows lists as Python does has not read them.
            rendered.is_ok_and(|text| text.contains("probe") && !text.contains("'thinking'"))
        };
        shows(json!({"role": "assistant", "content": blocks}))
            && !shows(json!({"role": "assistant", "content": "b", "reasoning_content": "probe"}))
    }

    /// Tries it: some templates put arguments into the prompt as they are, where an object would look like Python's.
    fn reads_objects(&self) -> bool {
        let rendered = |arguments: serde_json::Value| {
            let function = json!({"name": "f", "arguments": arguments});
            let call = json!({"id": "123456789", "type": "function", "function": function});
            let messages = json!([
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]);
            self.render(&messages, false, &Map::new()).ok()
        };
        match rendered(json!({"probe": "value"})) {
            Some(text) => !text.contains("'probe'"),
            None => rendered(json!("{}")).is_none(),
        }
    }

    /// The prompt for `messages`, an array of objects with `role` and `content` as OpenAI's API has them. With `add_generation_prompt` it
    /// ends where the assistant's answer begins. `extra` are further variables: `tools`, `documents`, and others that the model's template
    /// knows (`enable_thinking`); they may replace `bos_token` and similar ones.
    ///
    /// The prompt has special tokens as text: encode it with `parse_special`. It has BOS if the template writes it.
    pub fn render(
        &self,
        messages: &serde_json::Value,
        add_generation_prompt: bool,
        extra: &Map<String, serde_json::Value>,
    ) -> Result<String, ChatTemplateError> {
        let has_tools = extra.get("tools").is_some_and(|tools| !tools.is_null());
        let name = if self.has_tool_use && has_tools {
            TOOL_USE
        } else {
            DEFAULT
        };
        let failed = |error: minijinja::Error| failure(name, error);
        let special_tokens = self
            .special_tokens
            .iter()
            .map(|(name, text)| ((*name).to_owned(), Value::from(text.as_str())));
        let given = extra
            .iter()
            .map(|(name, value)| (name.clone(), Value::from(Serde(value))));
        // Later ones win. If nobody gives tools or documents, Hugging Face defines them as none.
        let absent = ["tools", "documents"].map(|name| (name.to_owned(), Value::from(())));
        let conversation = [
            ("messages", Value::from(Serde(messages))),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
        ];
        let conversation = conversation.map(|(name, value)| (name.to_owned(), value));
        let variables = Value::from_pairs(
            absent
                .into_iter()
                .chain(special_tokens)
                .chain(given)
                .chain(conversation),
        );
        let template = self.environment.get_template(name).map_err(failed)?;
        // minijinja 3.0.5 panics where a template turns an empty list around (`[][::-1]`). Template and conversation both come from
        // outside, so a panic must end this prompt and nothing else. Rendering leaves nothing in the environment that a panic could have
        // left half done.
        template_memory::limited(|| catch_unwind(AssertUnwindSafe(|| template.render(variables))))
            .map_err(|_| ChatTemplateError::Engine { name })?
            .map_err(failed)
    }
}

/// Why there is no prompt.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatTemplateError {
    #[error("cannot read the chat template from the metadata")]
    Metadata {
        #[from]
        source: GgufError,
    },

    /// The template itself refuses the conversation: the client's mistake.
    #[error("the model's chat template refuses this conversation: {message}")]
    Refused { message: String },

    /// Not Jinja, or Jinja that minijinja lacks.
    #[error("cannot read the chat template {name:?}, line {line}")]
    Syntax {
        name: &'static str,
        line: usize,
        source: minijinja::Error,
    },

    /// The template fails while rendering, with this conversation or with any.
    #[error("cannot render the chat template {name:?}, line {line}")]
    Render {
        name: &'static str,
        line: usize,
        source: minijinja::Error,
    },

    #[error("the chat template {name:?} does not come to an end: stopped after {FUEL} steps")]
    TooLong { name: &'static str },

    #[error("cannot render the chat template {name:?}: minijinja panicked over it")]
    Engine { name: &'static str },

    #[error("cannot build the pattern for generation blocks")]
    Pattern { source: regex::Error },
}

const TEMPLATE: &str = "tokenizer.chat_template";
const TOOL_USE_TEMPLATE: &str = "tokenizer.chat_template.tool_use";

/// Names of the templates, as Hugging Face has them.
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// Variables of the special tokens, and the keys of their ids.
const SPECIAL_TOKENS: [(&str, &str); 6] = [
    ("bos_token", "tokenizer.ggml.bos_token_id"),
    ("eos_token", "tokenizer.ggml.eos_token_id"),
    ("unk_token", "tokenizer.ggml.unknown_token_id"),
    // The misspelling is the format's.
    ("sep_token", "tokenizer.ggml.seperator_token_id"),
    ("pad_token", "tokenizer.ggml.padding_token_id"),
    ("mask_token", "tokenizer.ggml.mask_token_id"),
];

/// How many instructions a template may execute: nobody trusts the file that it comes from, and loops can be nested. Templates in use take
/// some hundreds for each message.
const FUEL: u64 = 20_000_000;

/// `{% generation %}` marks the assistant's part for training and does not change the text. A `with` block replaces it, with the same scope
/// and white space control.
fn without_generation_blocks(source: &str) -> Result<String, ChatTemplateError> {
    let tag = Regex::new(r"\{%([-+]?)(\s*)(end)?generation(\s*)([-+]?)%\}")
        .map_err(|source| ChatTemplateError::Pattern { source })?;
    Ok(tag
        .replace_all(source, "{%${1}${2}${3}with${4}${5}%}")
        .into_owned())
}

/// Whether the texts are in a prompt, one behind the other.
fn holds_in_order(prompt: &str, texts: &[String]) -> bool {
    let mut texts = texts.iter();
    let found = texts.try_fold(prompt, |rest, text| {
        let (_, behind) = rest.split_once(text.as_str())?;
        Some(behind)
    });
    found.is_some()
}

fn failure(name: &'static str, error: minijinja::Error) -> ChatTemplateError {
    if error.kind() == ErrorKind::OutOfFuel {
        return ChatTemplateError::TooLong { name };
    }
    let mut cause = error.source();
    while let Some(inner) = cause {
        if let Some(RaisedByTemplate(message)) = inner.downcast_ref() {
            return ChatTemplateError::Refused {
                message: message.clone(),
            };
        }
        cause = inner.source();
    }
    ChatTemplateError::Render {
        name,
        line: error.line().unwrap_or(0),
        source: error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, None, vec![("bos_token", "<s>".to_owned())]).unwrap()
    }

    fn render(source: &str, extra: serde_json::Value) -> Result<String, ChatTemplateError> {
        let messages = json!([{"role": "user", "content": "Hi <b> é"}, {"role": "assistant", "content": null}]);
        let serde_json::Value::Object(extra) = extra else {
            panic!("not an object");
        };
        template(source).render(&messages, true, &extra)
    }

    #[track_caller]
    fn renders(source: &str, expected: &str) {
        assert_eq!(render(source, json!({})).unwrap(), expected, "{source}");
    }

    #[test]
    fn white_space_is_trimmed_as_hugging_face_does() {
        renders("  {% if true %}\n  a\n  {% endif %}\nb\n", "  a\nb");
        renders("{{ bos_token }}\n\n", "<s>\n");
        renders("x  {%- if true -%}  a  {%- endif +%}\nb", "xa\nb");
        renders("{# note #}\na", "a");
    }

    #[test]
    fn values_print_as_in_python() {
        renders(
            "{{ true }} {{ none }} {{ [1, 'a', 2.0] }} {{ {'k': none} }} {{ missing }}.",
            "True None [1, 'a', 2.0] {'k': None} .",
        );
        renders(
            "{{ messages[1].content }}{{ messages[1].content ~ 1 }}",
            "NoneNone1",
        );
        renders(
            "{{ 'a-b'.split('-')[::-1] }}{{ ' x '.strip() }}",
            "['b', 'a']x",
        );
        renders(
            "{{ messages[0].get('x', 'y') }}{% for k, v in messages[0].items() %}{{ k }}{% endfor %}",
            "yrolecontent",
        );
    }

    #[test]
    fn variables_of_the_caller_and_of_hugging_face_are_there() {
        renders(
            "{{ tools is defined and tools is none }}{{ documents is none }}{{ add_generation_prompt }}",
            "TrueTrueTrue",
        );
        let extra = json!({"bos_token": "<B>", "enable_thinking": false, "messages": []});
        let source = "{{ bos_token }}{{ enable_thinking }}{{ messages | length }}";
        assert_eq!(render(source, extra).unwrap(), "<B>False2");
    }

    #[test]
    fn generation_blocks_are_their_content() {
        renders("a {%- generation -%} b {%- endgeneration %} c", "ab c");
        renders(
            "{% generation %}\n  {% set x = 1 %}{{ x }}\n{% endgeneration %}\n{{ x is defined }}",
            "1\nFalse",
        );
    }

    #[test]
    fn what_a_template_raises_is_the_clients_mistake() {
        for source in [
            "{{ raise_exception('Roles must ' + 'alternate!') }}",
            "{% macro m() %}{{ raise_exception('Roles must alternate!') }}{% endmacro %}{{ m() }}",
        ] {
            let error = render(source, json!({})).unwrap_err();
            assert!(
                matches!(&error, ChatTemplateError::Refused { message } if message == "Roles must alternate!"),
                "{error:?}"
            );
        }
    }

    #[test]
    fn what_cannot_be_done_is_an_error_with_its_line() {
        let error = ChatTemplate::new("a\n{% frobnicate %}", None, Vec::new()).unwrap_err();
        assert!(
            matches!(error, ChatTemplateError::Syntax { line: 2, .. }),
            "{error:?}"
        );
        for source in [
            "a\n\n{{ 'x' | frobnicate }}",
            "a\n\n{{ 'x'.frobnicate() }}",
            "a\n\n{{ missing.field.field }}",
        ] {
            let error = render(source, json!({})).unwrap_err();
            assert!(
                matches!(error, ChatTemplateError::Render { line: 3, .. }),
                "{error:?}"
            );
        }
    }

    #[test]
    fn it_is_tried_whether_tools_need_descriptions() {
        for (told, expected) in [
            ("{{ tool.function.name }}", false),
            ("{{ '// ' + tool.function.description }}", true),
            ("{{ '// ' ~ tool.function.description }}", false),
            ("{{ tool.function.description.missing.field }}", false),
        ] {
            let source =
                format!("{{# <tool_call> #}}{{% for tool in tools %}}{told}{{% endfor %}}");
            assert_eq!(template(&source).wants_descriptions(), expected, "{told}");
        }
    }

    #[test]
    fn it_is_tried_which_turns_are_taken() {
        let turns = |taken: [bool; 4]| Turns {
            instructions: taken[0],
            later_instructions: taken[1],
            user_after_user: taken[2],
            user_after_result: taken[3],
        };
        let each = |before: &str, if_any: &str| {
            format!("{{% for m in messages{if_any} %}}{before}{{{{ m.content }}}}{{% endfor %}}")
        };
        let system = " if m.role == 'system'";
        let others = each("", " if m.role != 'system'");
        let refuses =
            |what: &str| format!("{{% if {what} %}}{{{{ raise_exception('no') }}}}{{% endif %}}");
        let again = "m.role == 'user' and loop.previtem and loop.previtem.role";
        for (source, taken) in [
            (each("", ""), [true; 4]),
            // gpt-oss.
            (
                format!(
                    "{{% if messages[0].role == 'system' %}}{{{{ messages[0].content }}}}{{% endif %}}{others}"
                ),
                [true, false, true, true],
            ),
            // DeepSeek's distilled models: the last instructions are in the place of all others.
            (
                format!(
                    "{{% set n = namespace(s='') %}}{{% for m in messages{system} %}}{{% set n.s = m.content %}}{{% endfor %}}{{{{ n.s }}}}{others}"
                ),
                [true, false, true, true],
            ),
            // DeepSeek's other models: all instructions are at the beginning.
            (
                format!("{}{others}", each("", system)),
                [true, false, true, true],
            ),
            // Mistral Nemo: they are before the last words of the user.
            (
                "{% for m in messages if m.role != 'system' %}{% if loop.last and messages[0].role == 'system' %}\
                    {{ messages[0].content }}{% endif %}{{ m.content }}{% endfor %}"
                    .to_owned(),
                [false, false, true, true],
            ),
            // Qwen 3.5.
            (
                each(&refuses("m.role == 'system' and not loop.first"), ""),
                [true, false, true, true],
            ),
            // Mistral's.
            (
                each(
                    &(refuses("m.role == 'system' and not loop.first")
                        + &refuses(&format!("{again} in ['user', 'tool']"))),
                    "",
                ),
                [true, false, false, false],
            ),
            // Gemma 2, without results of tools.
            (
                each(
                    &(refuses("m.role in ['system', 'tool']")
                        + &refuses(&format!("{again} == 'user'"))),
                    "",
                ),
                [false, false, false, true],
            ),
            // Nothing is known.
            (refuses("true"), [true; 4]),
        ] {
            assert_eq!(template(&source).turns(), turns(taken), "{source}");
        }
        let both = ChatTemplate::new(&each("", ""), Some(&others), Vec::new()).unwrap();
        assert_eq!(both.turns(), turns([false, false, true, true]));
    }

    #[test]
    fn a_panic_of_the_engine_is_an_error() {
        let error = render("{{ [][::-1] | list }}", json!({})).unwrap_err();
        assert!(
            matches!(error, ChatTemplateError::Engine { .. }),
            "{error:?}"
        );
    }

    #[test]
    fn a_template_that_never_ends_is_stopped() {
        let source =
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
        let error = render(source, json!({})).unwrap_err();
        assert!(
            matches!(error, ChatTemplateError::TooLong { .. }),
            "{error:?}"
        );
    }

    #[test]
    fn conversations_with_tools_have_their_own_template() {
        let template = ChatTemplate::new("plain", Some("tools"), Vec::new()).unwrap();
        let render = |extra: serde_json::Value| {
            template
                .render(&json!([]), true, extra.as_object().unwrap())
                .unwrap()
        };
        assert_eq!(render(json!({})), "plain");
        assert_eq!(render(json!({"tools": null})), "plain");
        assert_eq!(render(json!({"tools": []})), "tools");
    }
}
