//! Grammars for answers that may hold calls of tools: free text, and calls that are always whole, of tools that exist, with arguments that
//! their schemas allow.
//!
//! Decides: how a family's form is said in Lark. A call begins wherever its opening mark is; from there on, only the call may follow.

use std::fmt::Write;

use serde_json::Value;

use crate::answer_form::{
    AnswerForm, CALL_ID, CallBody, CallForm, DEEPSEEK_SEPARATOR, MISTRAL_ARGUMENTS, Marks,
    Reasoning,
};
use crate::channel_grammar;
use crate::grammar::{Grammar, bounded};
use crate::grammar_error::GrammarError;
use crate::lark::{ANY_TEXT, Writer, quoted};
use crate::tokenizer::Tokenizer;
use crate::tool::{Calls, Tool, WantedAnswer};

/// How a call begins that has no opening mark: what is read as the head of one ([`crate::call_body::json_head`]).
const BARE_HEAD: &str = "/\\s*\\{\\s*\"name\"\\s*:\\s*\"([^\"\\\\]|\\\\.)*\"\\s*,\\s*\"(arguments|parameters)\"\\s*:\\s*\\{/";

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
///
/// # Errors
/// A tool's schema that calls of this form cannot be held to.
pub fn calls(
    form: &AnswerForm,
    reasoning: Reasoning,
    wanted: &WantedAnswer<'_>,
    tokenizer: &Tokenizer,
) -> Result<Grammar, GrammarError> {
    if form.channels {
        return Ok(channel_grammar::calls(reasoning, wanted, tokenizer));
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
    let one = writer.bodies(body, wanted.tools)?;
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
        Some(around) => (
            format!("{} /\\n?/", writer.mark(around.open)),
            format!("/\\n?/ {}", writer.mark(around.close)),
        ),
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
            // What begins like a bare call is one.
            let any = match bare {
                true => writer.rule("TEXT", &format!("{ANY_TEXT} & ~({BARE_HEAD} {ANY_TEXT})")),
                false => ANY_TEXT.to_owned(),
            };
            let (text, opened) = match (wanted.text, around) {
                (Some(schema), _) => (
                    writer.rule("answer", &format!("%json {}", bounded(schema.clone()))),
                    format!("{first} {open}"),
                ),
                (None, around) => {
                    let mark = around.map_or(marks.open, |around| around.open);
                    let opened = writer.this_and_mark("opened", &any, mark);
                    let then = match around {
                        Some(_) => format!("/\\n?/ {open}"),
                        None => String::new(),
                    };
                    (any, format!("{opened} {then}"))
                }
            };
            let opened = match bare {
                true => format!("({opened})?"),
                false => opened,
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
    Ok(writer.grammar())
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
    fn bodies(&mut self, body: CallBody, tools: &[Tool]) -> Result<String, GrammarError> {
        let mut names = Vec::with_capacity(tools.len());
        for (nth, tool) in tools.iter().enumerate() {
            let body = self.body(body, nth, tool)?;
            self.check_size()?;
            names.push(self.rule(&format!("body_{nth}"), &body));
        }
        Ok(self.rule("body", &names.join(" | ")))
    }

    fn body(&mut self, body: CallBody, nth: usize, tool: &Tool) -> Result<String, GrammarError> {
        let name = &tool.name;
        Ok(match body {
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
                let mark = self.mark(separator);
                let named = quoted(name);
                match separator {
                    MISTRAL_ARGUMENTS => {
                        let id = self.mark(CALL_ID);
                        format!("{named} ({id} /[a-zA-Z0-9]{{9}}/)? {mark} {arguments}")
                    }
                    // R1 writes what kind of call it is, and puts its arguments into a block of code.
                    DEEPSEEK_SEPARATOR => format!(
                        "({named} {mark} {arguments} \
                         | \"function\" {mark} {named} \"\\n```json\\n\" {arguments} \"\\n```\")"
                    ),
                    // Kimi numbers its calls.
                    _ => format!("\"functions.\"? {named} /(:[0-9]+)?/ {mark} {arguments}"),
                }
            }
            CallBody::Keyed(marks) => {
                let begin = quoted(&format!("{}{name}{}", marks.name_open, marks.name_close));
                let pairs = self.keyed_arguments(nth, tool, marks)?;
                let end = match marks.end {
                    "" => String::new(),
                    end => format!("{} /\\n?/", quoted(end)),
                };
                format!("/\\n?/ {begin} /\\n?/ {pairs} {end}")
            }
            CallBody::Gemma => {
                let arguments = self.gemma_arguments(nth, tool)?;
                format!("{} {arguments}", quoted(&format!("call:{name}")))
            }
        })
    }

    fn json_call(&mut self, nth: usize, tool: &Tool, key: &str, more: &str) -> String {
        let arguments = self.arguments(nth, tool);
        let name = Value::from(tool.name.as_str());
        let head = quoted(&format!("{{\"name\": {name}, \"{key}\": "));
        format!("{head} {arguments} {more} \"}}\"")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;
    use crate::answer_form::GEMMA_QUOTE;
    use crate::answer_part::AnswerPart;
    use crate::answer_reader::AnswerReader;
    use crate::channels;
    use crate::grammar::GrammarReader;
    use crate::sampler::Sampler;
    use crate::sampling_params::SamplingParams;
    use crate::test_vocabulary::{allows, signs_and};

    const END: &str = "<|im_end|>";

    /// What ends a text among arguments.
    const TEXT_ENDS: [&str; 5] = [
        "</arg_value>",
        "</parameter>",
        GEMMA_QUOTE,
        "\"",
        "<tool_call|>",
    ];

    /// For each form, what a template has that writes it.
    const FORMS: [&str; 16] = [
        "<tool_call><arg_key>",
        "<tool_call><function=",
        "<tool_call>",
        "<tool_calls>[",
        "[TOOL_CALLS][ARGS]",
        "[TOOL_CALLS]",
        "<|tool_call|>",
        "<TOOLCALL>",
        "<|tool_call><tool_call|>",
        "<\u{FF5C}tool\u{2581}sep\u{FF5C}>",
        "<|tool_call_argument_begin|>",
        "<seed:tool_call>",
        "<minimax:tool_call>",
        "<|python_tag|>\"parameters\": ",
        channels::ANALYSIS,
        "no form",
    ];

    fn tool(parameters: Value) -> Tool {
        Tool {
            name: "weather".to_owned(),
            parameters,
            strict: true,
            described: json!(null),
        }
    }

    fn form_and_grammar(
        template: &str,
        tool: &Tool,
        calls: Calls,
        tokenizer: &Tokenizer,
    ) -> (AnswerForm, Result<Grammar, GrammarError>) {
        let form = AnswerForm::of_template(template);
        let wanted = WantedAnswer {
            tools: std::slice::from_ref(tool),
            calls,
            several: true,
            text: None,
        };
        let grammar = super::calls(&form, Reasoning::Closed, &wanted, tokenizer);
        (form, grammar)
    }

    #[test]
    fn arguments_without_quotes_are_held_to_their_schemas() {
        let schema = json!({
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["C", "F"]},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "tags": {"type": "array", "items": {"$ref": "#/$defs/Tag"}, "maxItems": 2},
                "place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": false},
            },
            "required": ["city", "days"],
            "$defs": {"Tag": {"type": "string", "minLength": 2}},
        });
        let tokenizer = signs_and(&[END]);
        let xml = |pairs: &[(&str, &str)]| {
            let pairs = pairs
                .iter()
                .map(|(key, value)| format!("<parameter={key}>\n{value}\n</parameter>\n"));
            let pairs: String = pairs.collect();
            format!("<tool_call>\n<function=weather>\n{pairs}</function>\n</tool_call>{END}")
        };
        let keys = |pairs: &[(&str, &str)]| {
            let pairs = pairs.iter().map(|(key, value)| {
                format!("<arg_key>{key}</arg_key><arg_value>{value}</arg_value>")
            });
            let pairs: String = pairs.collect();
            format!("<tool_call>weather{pairs}</tool_call>{END}")
        };
        let rome = [("city", "Ro\nm"), ("days", "3")];
        for (pairs, allowed) in [
            (&[][..], true),
            (&[("unit", "F")], true),
            (&[("unit", "K")], false),
            (
                &[("note", "null"), ("tags", "[\"ab\", \"</parameter>\"]")],
                true,
            ),
            (&[("tags", "[\"a\"]")], false),
            (&[("tags", "[\"ab\", \"ab\", \"ab\"]")], false),
            (&[("place", "{\"x\": 1.5}")], true),
            (&[("place", "{\"y\": 1.5}")], false),
            (&[("other", "x")], false),
            // They come in the schema's order.
            (&[("note", "a"), ("unit", "F")], false),
        ] {
            let pairs = [&rome[..], pairs].concat();
            for (template, text) in [(FORMS[0], keys(&pairs)), (FORMS[1], xml(&pairs))] {
                let (_, grammar) =
                    form_and_grammar(template, &tool(schema.clone()), Calls::Allowed, &tokenizer);
                assert_eq!(
                    allows(&tokenizer, &grammar.unwrap(), &text),
                    allowed,
                    "{text}"
                );
            }
        }
        for pairs in [
            &rome[..1],
            &rome[1..],
            &[("city", "Rom"), ("days", "0")],
            &[("city", "Rom"), ("days", "ten")],
        ] {
            for (template, text) in [(FORMS[0], keys(pairs)), (FORMS[1], xml(pairs))] {
                let (_, grammar) =
                    form_and_grammar(template, &tool(schema.clone()), Calls::Allowed, &tokenizer);
                assert!(!allows(&tokenizer, &grammar.unwrap(), &text), "{text}");
            }
        }
    }

    #[test]
    fn gemmas_arguments_are_held_to_their_schemas() {
        let schema = json!({
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["C", "F"]},
                "City": {"type": "string"},
                "days": {"type": ["integer", "null"], "maximum": 9},
                "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
                "tree": {"$ref": "#/$defs/Tree"},
            },
            "required": ["City"],
            "$defs": {"Tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}, "value": {}}, "additionalProperties": false}},
        });
        for marks in [
            &[END][..],
            &[END, GEMMA_QUOTE, "<|tool_call>", "<tool_call|>"],
        ] {
            let tokenizer = signs_and(marks);
            let (_, grammar) =
                form_and_grammar(FORMS[8], &tool(schema.clone()), Calls::Allowed, &tokenizer);
            let grammar = grammar.unwrap();
            for (arguments, allowed) in [
                ("City:'Ro}m'", true),
                ("City:'Rom',days:3", true),
                ("City:'Rom',days:null,tags:['a','b'],unit:'C'", true),
                (
                    "City:'Rom',tree:{left:{left:{},value:[1,{a:'b'}]},value:'x'}",
                    true,
                ),
                ("City:'Rom',tree:{right:{}}", false),
                ("City:'Rom',tags:[]", false),
                ("City:'Rom',tags:['a','b','c']", false),
                ("City:'Rom',days:30", false),
                ("City:'Rom',unit:'K'", false),
                ("City:'Rom',other:1", false),
                ("City:Rom", false),
                ("days:3", false),
                ("", false),
            ] {
                let arguments = arguments.replace('\'', GEMMA_QUOTE);
                let text = format!("<|tool_call>call:weather{{{arguments}}}<tool_call|>{END}");
                assert_eq!(allows(&tokenizer, &grammar, &text), allowed, "{text}");
            }
        }
    }

    /// The calls that are read, each with its arguments.
    fn read(form: &AnswerForm, tool: &Tool, text: &str) -> Vec<(String, Value)> {
        let mut reader = AnswerReader::new(form, [tool.clone()].into(), Reasoning::Closed);
        let mut parts = reader.push(text);
        parts.extend(reader.finish());
        let mut calls = Vec::new();
        for part in parts {
            match part {
                AnswerPart::Call { name } => calls.push((name, String::new())),
                AnswerPart::Arguments(more) => calls.last_mut().unwrap().1 += &more,
                other => panic!("{other:?} of {text:?}"),
            }
        }
        let whole = |(name, arguments): (String, String)| {
            let read = serde_json::from_str(&arguments);
            (
                name,
                read.unwrap_or_else(|error| panic!("{error}: {arguments} of {text:?}")),
            )
        };
        calls.into_iter().map(whole).collect()
    }

    #[test]
    fn what_is_allowed_is_read_as_it_was_meant() {
        let tokenizer = signs_and(&[END]);
        let text = json!({"type": "string"});
        for (schema, value, expected) in [
            (json!({"properties": {"a": text}}), "12", json!("12")),
            (
                json!({"properties": {"b": text}, "additionalProperties": text}),
                "12",
                json!("12"),
            ),
            (
                json!({"$ref": "#/$defs/Own", "$defs": {"Own": {"type": "object", "properties": {"a": text}}}}),
                "12",
                json!("12"),
            ),
            (
                json!({"properties": {"a": {"enum": ["1", "2"]}}}),
                "2",
                json!("2"),
            ),
            (
                json!({"properties": {"a": {"anyOf": [text, {"type": "null"}]}}}),
                "null",
                json!(null),
            ),
            (
                json!({"properties": {"a": {"anyOf": [text, {"type": "null"}]}}}),
                "1\n",
                json!("1\n"),
            ),
            (
                json!({"properties": {"a": {"type": "string", "pattern": "^1"}}}),
                "\"12\"",
                json!("12"),
            ),
            (json!({"properties": {"a": {}}}), "[1", json!("[1")),
            (json!({"type": "object"}), "[1", json!("[1")),
            (json!({"type": "object"}), "{\"b\": 1}", json!({"b": 1})),
        ] {
            let tool = tool(schema.clone());
            for (template, text) in [
                (
                    FORMS[0],
                    format!(
                        "<tool_call>weather<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
                    ),
                ),
                (
                    FORMS[1],
                    format!(
                        "<tool_call>\n<function=weather>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
                    ),
                ),
                (
                    "<seed:tool_call>",
                    format!(
                        "<seed:tool_call><function=weather><parameter=a>{value}</parameter></function></seed:tool_call>"
                    ),
                ),
            ] {
                let (form, grammar) =
                    form_and_grammar(template, &tool, Calls::Required, &tokenizer);
                let allowed = allows(&tokenizer, &grammar.unwrap(), &format!("{text}{END}"));
                assert!(allowed, "{schema}: {text}");
                let called = ("weather".to_owned(), json!({"a": expected}));
                assert_eq!(read(&form, &tool, &text), [called], "{schema}");
            }
        }
    }

    #[test]
    fn no_schema_takes_long_or_all_the_memory() {
        let tokenizer = signs_and(&[END]);
        let chain: Map<String, Value> = (0..50_000)
            .map(|nth| {
                let next = format!("#/$defs/d{}", nth + 1);
                (
                    format!("d{nth}"),
                    json!({"type": "array", "items": {"$ref": next}}),
                )
            })
            .collect();
        let many: Map<String, Value> = (0..2000)
            .map(|nth| {
                (
                    format!("p{nth}"),
                    json!({"type": "array", "items": {"$ref": "#/$defs/d"}}),
                )
            })
            .collect();
        let names: Vec<String> = (0..20_000).map(|nth| format!("n{nth}")).collect();
        let reader = GrammarReader::new(&tokenizer).unwrap();
        let endless = json!({"anyOf": [{"$ref": "#/properties/a"}, {"type": "null"}]});
        let no_definitions = json!({"type": "array", "items": {"$ref": "#/$defs/d"}, "$defs": "x"});
        for (schema, refused) in [
            (json!({"properties": {"a": endless}}), false),
            (
                json!({"properties": {"a": no_definitions}, "$defs": {"d": {"type": "integer"}}}),
                false,
            ),
            (
                json!({"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": chain}),
                true,
            ),
            (
                json!({"properties": many, "$defs": {"d": {"description": "x".repeat(1 << 20)}}}),
                true,
            ),
            (json!({"required": names}), true),
        ] {
            for template in FORMS {
                let tool = tool(schema.clone());
                let (_, grammar) = form_and_grammar(template, &tool, Calls::Required, &tokenizer);
                let grammar = grammar.and_then(|grammar| reader.read(grammar));
                assert!(grammar.is_err() || !refused, "{template}");
                let form = AnswerForm::of_template(FORMS[0]);
                let call =
                    "<tool_call>weather<arg_key>a</arg_key><arg_value>null</arg_value></tool_call>";
                assert_eq!(read(&form, &tool, call).len(), 1);
            }
        }
    }

    #[test]
    fn a_tool_without_properties_may_be_told_anything() {
        let tokenizer = signs_and(&[END]);
        for (template, text) in [
            (
                FORMS[0],
                "<tool_call>weather<arg_key>a-b</arg_key><arg_value>[1</arg_value></tool_call>",
            ),
            (
                FORMS[1],
                "<tool_call><function=weather><parameter=a>x</parameter></function></tool_call>",
            ),
            (
                FORMS[8],
                "<|tool_call>call:weather{a:{b:[1,true]},c:<|\"|>x<|\"|>}<tool_call|>",
            ),
            (
                FORMS[2],
                "<tool_call>{\"name\": \"weather\", \"arguments\": {\"a\": [1]}}</tool_call>",
            ),
        ] {
            let tool = tool(json!({"type": "object"}));
            let (_, grammar) = form_and_grammar(template, &tool, Calls::Required, &tokenizer);
            assert!(
                allows(&tokenizer, &grammar.unwrap(), &format!("{text}{END}")),
                "{text}"
            );
        }
    }

    #[test]
    fn what_a_call_cannot_be_held_to_is_named() {
        let tokenizer = signs_and(&[END]);
        for (schema, named) in [
            (
                json!({"type": "object", "minProperties": 1}),
                "`minProperties`",
            ),
            (
                json!({"type": "object", "properties": {"a b": {}}}),
                "\"a b\"",
            ),
            (json!({"$ref": "#/$defs/none"}), "leads nowhere"),
            (json!({"$ref": "#"}), "leads to itself"),
        ] {
            for template in [FORMS[0], FORMS[1], FORMS[8]] {
                let (_, grammar) =
                    form_and_grammar(template, &tool(schema.clone()), Calls::Allowed, &tokenizer);
                let error = grammar.unwrap_err().to_string();
                assert!(error.contains(named), "{error}");
            }
        }
        for (schema, named) in [
            (json!({"type": "string", "pattern": "a"}), "`pattern`"),
            (
                json!({"type": "array", "uniqueItems": true}),
                "`uniqueItems`",
            ),
            (json!({"oneOf": [{"type": "string"}]}), "`oneOf`"),
            (json!({"enum": [[1]]}), "`enum`"),
            (json!(false), "`false`"),
        ] {
            let schema = json!({"type": "object", "properties": {"a": schema}});
            let (_, grammar) =
                form_and_grammar(FORMS[8], &tool(schema), Calls::Allowed, &tokenizer);
            let error = grammar.unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn beside_calls_an_answer_may_have_to_be_json() {
        let answer = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false});
        let tool = tool(json!({"type": "object", "properties": {}}));
        for (template, marks, call, before) in [
            (
                FORMS[2],
                vec![END],
                "<tool_call>{\"name\": \"weather\", \"arguments\": {}}</tool_call>",
                "",
            ),
            (
                FORMS[1],
                vec![END],
                "<tool_call><function=weather></function></tool_call>",
                "",
            ),
            (
                FORMS[8],
                vec![END],
                "<|tool_call>call:weather{}<tool_call|>",
                "",
            ),
            (
                channels::ANALYSIS,
                channels::MARKS.to_vec(),
                "<|channel|>commentary to=functions.weather<|message|>{}",
                "<|channel|>final<|message|>",
            ),
        ] {
            let tokenizer = signs_and(&marks);
            let end = if marks.len() > 1 { "<|return|>" } else { END };
            let form = AnswerForm::of_template(template);
            let wanted = WantedAnswer {
                tools: std::slice::from_ref(&tool),
                calls: Calls::Allowed,
                several: true,
                text: Some(&answer),
            };
            let grammar = super::calls(&form, Reasoning::Closed, &wanted, &tokenizer).unwrap();
            let allowed = |text: &str| allows(&tokenizer, &grammar, &format!("{text}{end}"));
            assert!(allowed(&format!("{before}{{\"n\": 3}}")), "{template}");
            assert!(allowed(call), "{template}");
            assert!(!allowed(&format!("{before}It is warm")), "{template}");
            assert!(!allowed(&format!("{before}{{\"n\": \"3\"}}")), "{template}");
        }
    }

    #[test]
    fn what_begins_like_a_bare_call_is_one() {
        for marks in [&[END][..], &[END, "<|python_tag|>"]] {
            let tokenizer = signs_and(marks);
            let tool = tool(json!({"type": "object", "properties": {"days": {"type": "integer"}}}));
            let (_, grammar) = form_and_grammar(FORMS[13], &tool, Calls::Allowed, &tokenizer);
            let grammar = grammar.unwrap();
            let call = "{\"name\": \"weather\", \"parameters\": {\"days\": 3}}";
            for (text, allowed) in [
                (call.to_owned(), true),
                (format!("<|python_tag|>{call}"), true),
                ("{\"days\": 3} is what I'd say".to_owned(), true),
                ("It is warm. {\"name\": 1}".to_owned(), true),
                (call.replace("weather", "wetter"), false),
                (call.replace('3', "\"3\""), false),
                (
                    format!("<|python_tag|>{}", call.replace("weather", "wetter")),
                    false,
                ),
                (" {\"name\": 3}".to_owned(), true),
                ("{\"name\": \"Alice\", \"age\": 3}".to_owned(), true),
            ] {
                assert_eq!(
                    allows(&tokenizer, &grammar, &format!("{text}{END}")),
                    allowed,
                    "{text}"
                );
            }
        }
    }

    /// Whether `arguments` are valid by the schema of the test below, checked by hand.
    fn valid(arguments: &Value) -> bool {
        let Value::Object(map) = arguments else {
            return false;
        };
        let known = ["city", "days", "unit", "note", "tags"];
        let note = &map.get("note").unwrap_or(&Value::Null);
        let tags = map
            .get("tags")
            .map_or(Some(&[][..]), |tags| tags.as_array().map(Vec::as_slice));
        map.keys().all(|key| known.contains(&key.as_str()))
            && map.get("city").is_some_and(Value::is_string)
            && map
                .get("days")
                .and_then(Value::as_i64)
                .is_some_and(|days| (1..=14).contains(&days))
            && map
                .get("unit")
                .is_none_or(|unit| ["C", "F"].contains(&unit.as_str().unwrap_or_default()))
            && (note.is_null() || note.is_string())
            && tags.is_some_and(|tags| tags.len() <= 3 && tags.iter().all(Value::is_boolean))
    }

    #[test]
    fn whatever_is_drawn_is_a_valid_call_in_every_form() {
        let tool = tool(json!({
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "note": {"type": ["string", "null"]},
                "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city", "days"],
            "additionalProperties": false,
        }));
        for template in FORMS {
            let mut marks = vec![END];
            if template == channels::ANALYSIS {
                marks = channels::MARKS.to_vec();
            }
            let tokenizer = signs_and(&marks);
            let (form, grammar) = form_and_grammar(template, &tool, Calls::Required, &tokenizer);
            let start = GrammarReader::new(&tokenizer)
                .unwrap()
                .read(grammar.unwrap())
                .unwrap();
            for seed in 0..100 {
                let params = SamplingParams {
                    temperature: 1.0,
                    seed,
                    ..SamplingParams::default()
                };
                let mut sampler = Sampler::new(params).unwrap();
                sampler.constrain(Some(start.clone()));
                let mut bytes = Vec::new();
                let mut ending = Vec::new();
                for step in seed.. {
                    let mut logits = vec![0.0; tokenizer.vocab_size()];
                    // Now and then, what ends a text in this form is likely, sign by sign.
                    if step % 16 == 0 {
                        let close = TEXT_ENDS[step as usize / 16 % TEXT_ENDS.len()];
                        ending = tokenizer.encode(close, false, true).unwrap();
                    }
                    if let Some(token) = (!ending.is_empty()).then(|| ending.remove(0)) {
                        logits[token as usize] = 20.0;
                    }
                    let token = sampler.sample(&logits, None).unwrap().token;
                    if tokenizer.is_end_of_generation(token) {
                        break;
                    }
                    sampler.accept(token).unwrap();
                    match tokenizer.control_text(token) {
                        Some(mark) => bytes.extend_from_slice(mark.as_bytes()),
                        None => bytes.extend_from_slice(&tokenizer.token_bytes(token)),
                    }
                    assert!(bytes.len() < 100_000, "{template}: no end");
                }
                let text = String::from_utf8(bytes).unwrap();
                let calls = read(&form, &tool, &text);
                assert!(!calls.is_empty(), "{template}: {text:?}");
                for (name, arguments) in calls {
                    assert!(
                        name == "weather" && valid(&arguments),
                        "{template}: {arguments} of {text:?}"
                    );
                }
            }
        }
    }
}
