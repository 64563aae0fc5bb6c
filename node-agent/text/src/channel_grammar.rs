//! Grammars for answers in channels: reasoning as the model likes, then calls of tools that exist, or a last message that may have to be
//! JSON by a schema.
//!
//! Decides: how harmony's messages are said in Lark.

use crate::answer_form::Reasoning;
use crate::channels::{CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, START};
use crate::grammar::{Grammar, bounded};
use crate::lark::{Writer, quoted};
use crate::tokenizer::Tokenizer;
use crate::tool::{Calls, Wanted};

/// An answer whose last message is `rest`, a rule's right side.
pub(crate) fn last_message(reasoning: Reasoning, rest: &str, tokenizer: &Tokenizer) -> Grammar {
    let mut writer = Writer::new(tokenizer);
    let begins = begins(&mut writer, reasoning);
    let last = header(&writer, "final");
    let answer = writer.rule("answer", rest);
    writer.rule("start", &format!("{begins} {last} {answer}"));
    writer.grammar()
}

/// An answer with a call of a tool: harmony has one, after which the answer ends.
pub(crate) fn calls(reasoning: Reasoning, wanted: &Wanted<'_>, tokenizer: &Tokenizer) -> Grammar {
    let mut writer = Writer::new(tokenizer);
    let begins = begins(&mut writer, reasoning);
    let call = call(&mut writer, wanted);
    let start = match wanted.calls {
        Calls::Required => format!("{begins} {call}"),
        Calls::Allowed => {
            let last = header(&writer, "final");
            let said = header(&writer, "commentary");
            let next = next_message(&mut writer, "said");
            let text = match wanted.text {
                Some(schema) => format!("%json {}", bounded(schema.clone())),
                None => "/[\\s\\S]*/".to_owned(),
            };
            let answer = writer.rule("answer", &text);
            format!("{begins} (({said} {next})? {call} | {last} {answer})")
        }
    };
    writer.rule("start", &start);
    writer.grammar()
}

/// One message of reasoning, if the model likes.
fn begins(writer: &mut Writer<'_>, reasoning: Reasoning) -> String {
    let open = header(writer, "analysis");
    let next = next_message(writer, "reasoned");
    match reasoning {
        Reasoning::Closed => String::new(),
        Reasoning::Open => next,
        Reasoning::Possible => format!("({open} {next})?"),
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
fn call(writer: &mut Writer<'_>, wanted: &Wanted<'_>) -> String {
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
    use prima_gguf::{Metadata, Value};
    use serde_json::json;

    use super::*;
    use crate::answer_form::AnswerForm;
    use crate::call_grammar;
    use crate::channels::{ANALYSIS, MARKS};
    use crate::grammar::GrammarReader;
    use crate::tool::Tool;

    /// All signs of ASCII, and harmony's marks as tokens of structure.
    fn tokenizer() -> Tokenizer {
        let signs = (b'!'..=b'~').map(|sign| char::from(sign).to_string());
        let texts: Vec<String> = signs
            .chain(["Ġ".to_owned(), "Ċ".to_owned()])
            .chain(MARKS.map(str::to_owned))
            .collect();
        let kinds: Vec<i32> = texts
            .iter()
            .map(|text| if text.starts_with("<|") { 3 } else { 1 })
            .collect();
        let entries = [
            ("model", "gpt2".into()),
            ("pre", "gpt-2".into()),
            ("tokens", Value::from(texts)),
            ("token_type", kinds.into()),
            ("merges", Value::from(Vec::<String>::new())),
        ];
        let entries = entries.map(|(key, value)| (format!("tokenizer.ggml.{key}"), value));
        let metadata = Metadata::new("harmony", entries.into_iter().collect()).unwrap();
        Tokenizer::from_gguf(&metadata).unwrap()
    }

    /// Whether the grammar allows all of `text`, which ends the answer.
    fn allows(tokenizer: &Tokenizer, grammar: &Grammar, text: &str) -> bool {
        let reader = GrammarReader::new(tokenizer).unwrap();
        let mut constraint = reader.read(grammar.clone()).unwrap();
        let tokens = tokenizer.encode(text, false, true).unwrap();
        tokens.into_iter().all(|token| {
            let mut logits = vec![0.0; tokenizer.vocab_size()];
            constraint.restrict(&mut logits).unwrap();
            let allowed = logits[token as usize] == 0.0;
            allowed && (tokenizer.is_end_of_generation(token) || constraint.accept(token).is_ok())
        })
    }

    const THOUGHT: &str = "<|channel|>analysis<|message|>Hm <x> hm<|end|><|start|>assistant";

    #[test]
    fn the_last_message_is_by_its_schema() {
        let tokenizer = tokenizer();
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
    fn calls_are_whole_and_of_tools_that_exist() {
        let tokenizer = tokenizer();
        let form = AnswerForm::of_template(ANALYSIS);
        let tool = Tool {
            name: "f".to_owned(),
            parameters: json!({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false}),
            strict: false,
            described: json!(null),
        };
        let grammar = |calls| {
            let wanted = Wanted {
                tools: std::slice::from_ref(&tool),
                calls,
                several: true,
                text: None,
            };
            call_grammar::calls(&form, Reasoning::Possible, &wanted, &tokenizer)
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
            (
                format!(
                    "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant{commentary}{{}}<|call|>"
                ),
                true,
                false,
            ),
            (
                format!("{THOUGHT}<|channel|>final<|message|>No.<|return|>"),
                true,
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
