//! Grammars for answers in channels: reasoning as the model likes, then calls of tools that exist, or a last message that may have to be
//! JSON by a schema.
//!
//! Decides: how harmony's messages are said in Lark.

use crate::answer_form::Reasoning;
use crate::channels::{CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, START};
use crate::grammar::{Grammar, bounded};
use crate::lark::{ANY_TEXT, Writer, quoted};
use crate::tokenizer::Tokenizer;
use crate::tool::{Calls, WantedAnswer};

/// An answer whose last message is `rest`, a rule's right side.
pub(crate) fn last_message(reasoning: Reasoning, rest: &str, tokenizer: &Tokenizer) -> Grammar {
    let mut writer = Writer::new(tokenizer);
    let begins = begins(&mut writer, reasoning);
    let last = header(&writer, "final");
    let answer = writer.rule("answer", rest);
    writer.rule("start", &format!("{begins} {last} {answer}"));
    writer.grammar()
}

/// An answer with calls of tools. A model ends its answer with the mark of a call, or has another call follow.
pub(crate) fn calls(
    reasoning: Reasoning,
    wanted: &WantedAnswer<'_>,
    tokenizer: &Tokenizer,
) -> Grammar {
    let mut writer = Writer::new(tokenizer);
    let begins = begins(&mut writer, reasoning);
    let mut call = call(&mut writer, wanted);
    if wanted.several {
        let (end, start) = (writer.mark(END), writer.mark(START));
        call = format!("{call} ({end} {start} \"assistant\" {call})*");
    }
    let start = match wanted.calls {
        Calls::Required => format!("{begins} {call}"),
        Calls::Allowed => {
            let last = header(&writer, "final");
            // What the user is told before calls; more thoughts may follow it.
            let said = header(&writer, "commentary");
            let said = format!("{said} {}", next_message(&mut writer, "said"));
            let said = writer.rule("preamble", &said);
            let text = match wanted.text {
                Some(schema) => format!("%json {}", bounded(schema.clone())),
                None => ANY_TEXT.to_owned(),
            };
            let answer = writer.rule("answer", &text);
            format!("{begins} (({said} {begins})* {call} | {last} {answer})")
        }
    };
    writer.rule("start", &start);
    writer.grammar()
}

/// Messages of reasoning, as many as the model likes.
fn begins(writer: &mut Writer<'_>, reasoning: Reasoning) -> String {
    if reasoning == Reasoning::Closed {
        return String::new();
    }
    let open = header(writer, "analysis");
    let rest = next_message(writer, "reasoned");
    let rest = writer.rule("thought", &rest);
    let more = writer.rule("thoughts", &format!("({open} {rest})*"));
    match reasoning {
        Reasoning::Open => format!("{rest} {more}"),
        _ => more,
    }
}

/// The rest of a message, and what begins the next one.
fn next_message(writer: &mut Writer<'_>, name: &str) -> String {
    let text = writer.text_and_mark(name, END);
    format!("{text} {} \"assistant\"", writer.mark(START))
}

fn header(writer: &Writer<'_>, channel: &str) -> String {
    let (begin, end) = (writer.mark(CHANNEL), writer.mark(MESSAGE));
    format!("{begin} {} {end}", quoted(channel))
}

/// The name is in the channel's part of the header, or in the role's before it.
fn call(writer: &mut Writer<'_>, wanted: &WantedAnswer<'_>) -> String {
    let (channel, message) = (writer.mark(CHANNEL), writer.mark(MESSAGE));
    let kind = format!("(\" json\" | \" \"? {} \"json\")?", writer.mark(CONSTRAIN));
    let mut names = Vec::with_capacity(wanted.tools.len());
    for (nth, tool) in wanted.tools.iter().enumerate() {
        let arguments = writer.arguments(nth, tool);
        let to = quoted(&format!(" to={FUNCTIONS}{}", tool.name));
        let right = format!(
            "({to} {channel} \"commentary\" | {channel} \"commentary\" {to}) {kind} {message} {arguments}"
        );
        names.push(writer.rule(&format!("call_{nth}"), &right));
    }
    writer.rule("call", &names.join(" | "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::answer_form::AnswerForm;
    use crate::call_grammar;
    use crate::channels::{ANALYSIS, MARKS};
    use crate::test_vocabulary::{allows, signs_and};
    use crate::tool::Tool;

    const THOUGHT: &str = "<|channel|>analysis<|message|>Hm <x> hm<|end|><|start|>assistant";

    const SAID: &str = "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant";

    #[test]
    fn the_last_message_is_by_its_schema() {
        let tokenizer = signs_and(&MARKS);
        let form = AnswerForm::of_template(ANALYSIS);
        let schema = Grammar::JsonSchema(json!({"type": "integer"}));
        let grammar = call_grammar::after_reasoning(&form, Reasoning::Possible, schema, &tokenizer);
        for (text, allowed) in [
            ("<|channel|>final<|message|>12<|return|>".to_owned(), true),
            (
                format!("{THOUGHT}<|channel|>final<|message|>12<|return|>"),
                true,
            ),
            (format!("{THOUGHT}<|channel|>final<|message|>one"), false),
            (
                format!("{THOUGHT}<|channel|>commentary<|message|>Well"),
                false,
            ),
            ("12".to_owned(), false),
        ] {
            assert_eq!(allows(&tokenizer, &grammar, &text), allowed, "{text}");
        }
    }

    #[test]
    fn without_parallel_calls_there_is_one() {
        let tokenizer = signs_and(&MARKS);
        let form = AnswerForm::of_template(ANALYSIS);
        let tool = Tool {
            name: "f".to_owned(),
            parameters: json!({"type": "object", "additionalProperties": false}),
            strict: false,
            described: json!(null),
        };
        let wanted = WantedAnswer {
            tools: &[tool],
            calls: Calls::Required,
            several: false,
            text: None,
        };
        let grammar = call_grammar::calls(&form, Reasoning::Possible, &wanted, &tokenizer).unwrap();
        let call = " to=functions.f<|channel|>commentary<|message|>{}";
        assert!(allows(&tokenizer, &grammar, &format!("{call}<|call|>")));
        let two = format!("{call}<|end|><|start|>assistant{call}<|call|>");
        assert!(!allows(&tokenizer, &grammar, &two));
    }

    #[test]
    fn calls_are_whole_and_of_tools_that_exist() {
        let tokenizer = signs_and(&MARKS);
        let form = AnswerForm::of_template(ANALYSIS);
        let tool = Tool {
            name: "f".to_owned(),
            parameters: json!({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false}),
            strict: false,
            described: json!(null),
        };
        let grammar = |calls| {
            let wanted = WantedAnswer {
                tools: std::slice::from_ref(&tool),
                calls,
                several: true,
                text: None,
            };
            call_grammar::calls(&form, Reasoning::Possible, &wanted, &tokenizer).unwrap()
        };
        let (free, required) = (grammar(Calls::Allowed), grammar(Calls::Required));
        let commentary = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>";
        // The text, and whether it is allowed where a call may come and where it must.
        for (text, may, must) in [
            (format!("{commentary}{{\"a\": 1}}<|call|>"), true, true),
            (format!("{THOUGHT}{commentary}{{}}<|call|>"), true, true),
            (
                format!(
                    "{THOUGHT} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>"
                ),
                true,
                true,
            ),
            (format!("{SAID}{commentary}{{}}<|call|>"), true, false),
            (
                format!("{THOUGHT}<|channel|>final<|message|>No.<|return|>"),
                true,
                false,
            ),
            // Thoughts around what the user is told, and one call after the other.
            (
                format!("{THOUGHT}{SAID}{THOUGHT}{THOUGHT}{SAID}{commentary}{{}}<|call|>"),
                true,
                false,
            ),
            (
                format!(
                    "{THOUGHT}{THOUGHT}{commentary}{{}}<|end|><|start|>assistant{commentary}{{\"a\": 2}}<|call|>"
                ),
                true,
                true,
            ),
            (
                format!("{commentary}{{}}<|end|><|start|>assistant<|channel|>final"),
                false,
                false,
            ),
            (format!("{commentary}{{\"a\": \"x"), false, false),
            (format!("{commentary}{{\"a\": 1<|call|>"), false, false),
            (
                "<|channel|>commentary to=functions.g".to_owned(),
                false,
                false,
            ),
            ("No.".to_owned(), false, false),
        ] {
            let found = [&free, &required].map(|grammar| allows(&tokenizer, grammar, &text));
            assert_eq!(found, [may, must], "{text}");
        }
    }
}
