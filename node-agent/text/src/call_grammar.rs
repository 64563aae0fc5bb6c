//! Grammars for answers that may hold calls of tools: free text, and calls that are always whole, of tools that exist, with arguments that
//! their schemas allow.
//!
//! Decides: how a family's form is said in Lark. A call begins wherever its opening mark is; from there on, only the call may follow.

use std::fmt::Write;

use serde_json::Value;

use crate::answer_form::{AnswerForm, CALL_ID, CallBody, CallForm, Marks, Reasoning};
use crate::channel_grammar;
use crate::grammar::{Grammar, bounded};
use crate::lark::{Writer, quoted};
use crate::tokenizer::Tokenizer;
use crate::tool::{Calls, Tool, WantedAnswer};

/// An answer that is `answer` after reasoning, where there is any.
pub fn after_reasoning(
    form: &AnswerForm,
    reasoning: Reasoning,
    answer: Grammar,
    tokenizer: &Tokenizer,
) -> Grammar {
    let (Some(marks), Reasoning::Possible | Reasoning::Open) = (form.reasoning, reasoning) else {
        return answer;
    };
    let rest = match answer {
        Grammar::JsonSchema(schema) => format!("%json {}", bounded(schema)),
        // Nobody asks models that reason for the others, and they would need their own name space.
        other => return other,
    };
    if form.channels {
        return channel_grammar::last_message(reasoning, &rest, tokenizer);
    }
    let mut writer = Writer::new(tokenizer);
    let begins = writer.reasoning(marks, reasoning);
    let _ = writeln!(writer.lark, "start: {begins} answer\nanswer: {rest}");
    writer.grammar()
}

/// An answer with calls of tools.
pub fn calls(
    form: &AnswerForm,
    reasoning: Reasoning,
    wanted: &WantedAnswer<'_>,
    tokenizer: &Tokenizer,
) -> Grammar {
    if form.channels {
        return channel_grammar::calls(reasoning, wanted, tokenizer);
    }
    let several = wanted.several;
    let CallForm {
        marks,
        body,
        around,
        bare,
        ..
    } = form.calls;
    let mut writer = Writer::new(tokenizer);
    let begins = match form.reasoning {
        Some(marks) if reasoning != Reasoning::Closed => writer.reasoning(marks, reasoning),
        _ => String::new(),
    };
    let one = writer.bodies(body, wanted.tools);
    let list = match (body, several) {
        (CallBody::JsonList, true) => {
            writer.rule("list", &format!("\"[\" {one} (/,\\s?/ {one})* \"]\""))
        }
        (CallBody::JsonList, false) => writer.rule("list", &format!("\"[\" {one} \"]\"")),
        _ => one,
    };
    let close = writer.mark(marks.close);
    // A list has all calls between two marks.
    let repeated = several && body != CallBody::JsonList && !(bare && marks.close.is_empty());
    let (first, last) = match around {
        Some(around) => (writer.mark(around.open), writer.mark(around.close)),
        None => (String::new(), String::new()),
    };
    let open = writer.mark(marks.open);
    let start = match wanted.calls {
        Calls::Required => {
            let open = if bare { String::new() } else { open };
            let call = writer.rule("call", &format!("{open} {list} {close}"));
            let more = if repeated {
                format!("(/\\n?/ {call})*")
            } else {
                String::new()
            };
            format!("{begins} {first} {call} {more} {last}")
        }
        Calls::Allowed => {
            let text = match wanted.text {
                Some(schema) => {
                    writer.rule("answer", &format!("%json {}", bounded(schema.clone())))
                }
                None => "/[\\s\\S]*/".to_owned(),
            };
            let opened = match (wanted.text, around) {
                (Some(_), _) => format!("{first} {open}"),
                (None, Some(around)) => {
                    format!("{} {open}", writer.text_and_mark("opened", around.open))
                }
                (None, None) => writer.text_and_mark("opened", marks.open),
            };
            let call = writer.rule("call", &format!("{list} {close}"));
            let more = if repeated {
                format!("(/\\n?/ {open} {call})*")
            } else {
                String::new()
            };
            // After calls the answer ends: what tools say comes first.
            format!("{begins} ({text} | {opened} {call} {more} {last})")
        }
    };
    let _ = writeln!(writer.lark, "start: {start}");
    writer.grammar()
}

impl Writer<'_> {
    /// Reasoning at the beginning of an answer.
    fn reasoning(&mut self, marks: Marks, reasoning: Reasoning) -> String {
        let end = self.text_and_mark("reasoned", marks.close);
        match reasoning {
            Reasoning::Open => format!("{end} /\\s*/"),
            _ => format!("({} {end} /\\s*/)?", self.mark(marks.open)),
        }
    }

    /// A rule for the body of a call of any of the tools.
    fn bodies(&mut self, body: CallBody, tools: &[Tool]) -> String {
        let names: Vec<String> = tools
            .iter()
            .enumerate()
            .map(|(nth, tool)| {
                let body = self.body(body, nth, tool);
                self.rule(&format!("body_{nth}"), &body)
            })
            .collect();
        self.rule("body", &names.join(" | "))
    }

    fn body(&mut self, body: CallBody, nth: usize, tool: &Tool) -> String {
        let name = &tool.name;
        match body {
            CallBody::Json(key) => {
                let call = self.json_call(nth, tool, key, "");
                format!("/\\n?/ {call} /\\n?/")
            }
            // Mistral's models give their calls ids.
            CallBody::JsonList => {
                let id = "(\", \\\"id\\\": \\\"\" /[a-zA-Z0-9]{9}/ \"\\\"\")?";
                self.json_call(nth, tool, "arguments", id)
            }
            CallBody::NameThenJson(separator) => {
                let arguments = self.arguments(nth, tool);
                // Mistral's id, Kimi's number, DeepSeek R1's block of code: the reader takes them all.
                let id = self.mark(CALL_ID);
                let separator = self.mark(separator);
                let named = quoted(name);
                format!(
                    "(\"functions.\"? {named} /(:[0-9]+)?/ ({id} /[a-zA-Z0-9]{{9}}/)? {separator} {arguments} \
                     | \"function\" {separator} {named} \"\\n```json\\n\" {arguments} \"\\n```\")"
                )
            }
            CallBody::Xml => {
                let begin = format!("/\\n?/ {} /\\n?/", quoted(&format!("<function={name}>")));
                let key = |key: &str| quoted(&format!("<parameter={key}>"));
                let pairs = self.pairs(nth, tool, key, "</parameter>", "/\\n?/");
                format!("{begin} {pairs} \"</function>\" /\\n?/")
            }
            CallBody::ArgKeys => {
                // GLM 4.6 has line breaks here, 4.7 has none.
                let key = |key: &str| {
                    let key = quoted(&format!("<arg_key>{key}</arg_key>"));
                    format!("{key} /\\n?/ \"<arg_value>\"")
                };
                let pairs = self.pairs(nth, tool, key, "</arg_value>", "/\\n?/");
                format!("{} /\\n?/ {pairs}", quoted(name))
            }
            CallBody::Gemma => {
                let begin = quoted(&format!("call:{name}{{"));
                format!("{begin} /[^}}]*/ \"}}\"")
            }
        }
    }

    fn json_call(&mut self, nth: usize, tool: &Tool, key: &str, more: &str) -> String {
        let arguments = self.arguments(nth, tool);
        let name = Value::from(tool.name.as_str());
        let head = quoted(&format!("{{\"name\": {name}, \"{key}\": "));
        format!("{head} {arguments} {more} \"}}\"")
    }

    /// Arguments by name, each up to `end`, in any order. Their values are free.
    fn pairs(
        &mut self,
        nth: usize,
        tool: &Tool,
        key: impl Fn(&str) -> String,
        end: &str,
        between: &str,
    ) -> String {
        let properties = tool.parameters["properties"].as_object();
        let keys: Vec<String> = properties
            .into_iter()
            .flat_map(|map| map.keys().map(|name| key(name)))
            .collect();
        if keys.is_empty() {
            return String::new();
        }
        let value = format!("value_{nth}");
        let _ = writeln!(self.lark, "{value}[lazy]: /[\\s\\S]*/ {}", quoted(end));
        format!("(({}) {value} {between})*", keys.join(" | "))
    }
}
