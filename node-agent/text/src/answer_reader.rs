//! Takes an answer apart while it comes: content, reasoning, and calls of tools, by the marks of its family.
//!
//! Decides: what of the text belongs to what, piece by piece, so that no part of a mark is ever content. Refuses nothing: a call that
//! cannot be read is content, as it was written. How the text is cut into pieces changes nothing but where the pieces end.

use std::sync::Arc;

use crate::answer_form::{AnswerForm, CallBody, CallForm, GEMMA_QUOTE, Marks, Reasoning};
use crate::answer_part::{AnswerPart, join, take_until};
use crate::call_body::{self, Call, Head, JsonEnd};
use crate::channel_reader::ChannelReader;
use crate::keyed_arguments::{self, KeyedArguments, Step};
use crate::tool::Tool;

/// Reads one answer.
#[derive(Debug, Clone)]
pub struct AnswerReader {
    reasoning: Option<Marks>,
    /// `None`: no tools were offered, so nothing is a call.
    calls: Option<CallForm>,
    tools: Arc<[Tool]>,
    state: State,
    /// What has come and is not decided yet.
    held: String,
    /// White space is dropped here: after reasoning and around calls.
    at_edge: bool,
    /// Nothing but white space has come so far.
    at_start: bool,
    /// Between the marks around all calls.
    among_calls: bool,
}

#[derive(Debug, Clone)]
enum State {
    Content,
    Reasoning,
    /// After the opening mark of a call, which `mark` is; nothing of the call is told yet.
    Call {
        mark: &'static str,
    },
    Arguments(JsonEnd),
    /// Arguments that come by name.
    Keyed(KeyedArguments),
    /// Behind the arguments, in the object that the call is.
    AfterArguments(JsonEnd),
    /// Behind a call, before its closing mark or the next one of the list.
    AfterCall,
    /// In all of an answer whose messages name their channels.
    Channels(ChannelReader),
}

impl AnswerReader {
    /// Of an answer to a prompt with these tools. In its text it needs to see the names of [`AnswerForm::control_tokens`].
    pub fn new(form: &AnswerForm, tools: Arc<[Tool]>, reasoning: Reasoning) -> Self {
        let in_reasoning = reasoning == Reasoning::Open;
        let state = match (form.channels, in_reasoning) {
            (true, _) => State::Channels(ChannelReader::new(tools.clone(), reasoning)),
            (false, true) => State::Reasoning,
            (false, false) => State::Content,
        };
        Self {
            reasoning: form.reasoning,
            calls: (!tools.is_empty()).then_some(form.calls),
            tools,
            state,
            held: String::new(),
            at_edge: in_reasoning,
            at_start: true,
            among_calls: false,
        }
    }

    /// Whether the text so far ends in reasoning.
    pub fn reasons(&self) -> bool {
        match &self.state {
            State::Reasoning => true,
            State::Channels(reader) => reader.reasons(),
            _ => false,
        }
    }

    /// Whether the text so far ends in the middle of a call.
    pub fn in_call(&self) -> bool {
        match &self.state {
            State::Call { .. } => match self.calls.map(|form| form.body) {
                // Arguments may follow the name, and nothing says that none will.
                Some(CallBody::Keyed(marks)) if marks.end.is_empty() => true,
                Some(body) => call_body::read(body, &self.held).is_none(),
                None => false,
            },
            State::Arguments(_) => true,
            State::Keyed(arguments) => {
                let mut held = self.held.clone();
                !arguments.clone().finish(&mut held, &mut Vec::new())
            }
            State::Channels(reader) => reader.in_call(),
            State::Content | State::Reasoning | State::AfterArguments(_) | State::AfterCall => {
                false
            }
        }
    }

    /// Takes the next piece of the text.
    pub fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        join(parts)
    }

    /// The text ends here.
    pub fn finish(mut self) -> Vec<AnswerPart> {
        let mut parts = self.push("");
        if let State::Keyed(arguments) = &mut self.state
            && arguments.finish(&mut self.held, &mut parts)
        {
            self.state = State::AfterCall;
            parts.extend(self.finish());
            return join(parts);
        }
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Content => self.content(&held, &mut parts),
            State::Reasoning => parts.push(AnswerPart::Reasoning(held)),
            State::Call { mark } => self.whole_call(mark, &held, "", &mut parts),
            State::Arguments(_) => parts.push(AnswerPart::Arguments(held)),
            State::Keyed(_) | State::AfterArguments(_) | State::AfterCall => {}
            State::Channels(reader) => reader.finish(held, &mut parts),
        }
        join(parts)
    }

    /// The text ends here, because a limit cut it off: what might have become a mark or a call is nothing, and no call is made whole.
    pub fn cut_off(mut self) -> Vec<AnswerPart> {
        let mut parts = self.push("");
        // Without a mark, it may be JSON that was asked for.
        if let State::Call { mark: "" } = self.state
            && self.calls.is_some_and(|form| form.bare)
        {
            let held = std::mem::take(&mut self.held);
            self.content(&held, &mut parts);
        }
        join(parts)
    }

    /// Decides about the beginning of what is held. `false`: that takes more text.
    fn step(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        match &mut self.state {
            State::Content => self.step_content(parts),
            State::Reasoning => {
                let close = self.reasoning.map_or("", |marks| marks.close);
                let (before, found) = take_until(&mut self.held, &[close]);
                let text = match self.at_edge {
                    true => before.trim_start(),
                    false => &before,
                };
                if !text.is_empty() {
                    self.at_edge = false;
                    parts.push(AnswerPart::Reasoning(text.to_owned()));
                }
                if found.is_some() {
                    self.state = State::Content;
                    self.at_edge = true;
                }
                found.is_some()
            }
            State::Call { mark } => {
                let mark = *mark;
                self.step_call(mark, parts)
            }
            State::Arguments(end) => {
                let length = end.find(&self.held);
                let arguments: String = self
                    .held
                    .drain(..length.unwrap_or(self.held.len()))
                    .collect();
                if !arguments.is_empty() {
                    parts.push(AnswerPart::Arguments(arguments));
                }
                if length.is_some() {
                    self.state = match self.calls.map(|form| form.body) {
                        Some(CallBody::Json(_) | CallBody::JsonList) => {
                            State::AfterArguments(JsonEnd::inside())
                        }
                        _ => State::AfterCall,
                    };
                }
                length.is_some()
            }
            State::AfterArguments(end) => {
                let length = end.find(&self.held);
                self.held.drain(..length.unwrap_or(self.held.len()));
                if length.is_some() {
                    self.state = State::AfterCall;
                }
                length.is_some()
            }
            State::Keyed(arguments) => match arguments.step(&mut self.held, parts) {
                Step::Again => true,
                Step::MoreText => false,
                Step::Done => {
                    self.state = State::AfterCall;
                    true
                }
            },
            State::AfterCall => self.step_after_call(),
            State::Channels(reader) => reader.step(&mut self.held, parts),
        }
    }

    fn step_content(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        if let Some(form) = self.calls
            && form.bare
            && self.at_start
        {
            match self.held.trim_start().chars().next() {
                None => return false,
                Some('{') => {
                    self.state = State::Call { mark: "" };
                    return true;
                }
                Some(_) => {}
            }
        }
        let mut marks = Vec::new();
        marks.extend(self.reasoning.map(|marks| marks.open));
        if let Some(form) = self.calls {
            match form.around {
                Some(around) if self.among_calls => marks.extend([form.marks.open, around.close]),
                Some(around) => marks.extend([around.open, around.close]),
                None => marks.push(form.marks.open),
            }
        }
        let (before, found) = take_until(&mut self.held, &marks);
        self.content(&before, parts);
        let Some(found) = found else {
            return false;
        };
        self.at_start = false;
        let around = self.calls.and_then(|form| form.around);
        if self.reasoning.is_some_and(|marks| marks.open == found) {
            self.state = State::Reasoning;
        } else if let Some(around) =
            around.filter(|around| [around.open, around.close].contains(&found))
        {
            self.among_calls = found == around.open;
        } else if self.calls.is_some_and(|form| form.marks.open == found) {
            self.state = State::Call { mark: found };
        }
        self.at_edge = true;
        true
    }

    fn content(&mut self, text: &str, parts: &mut Vec<AnswerPart>) {
        let text = match self.at_edge {
            true => text.trim_start(),
            false => text,
        };
        if !text.is_empty() {
            self.at_edge = false;
            self.at_start &= text.trim_start().is_empty();
            parts.push(AnswerPart::Content(text.to_owned()));
        }
    }

    fn step_call(&mut self, mark: &'static str, parts: &mut Vec<AnswerPart>) -> bool {
        let Some(form) = self.calls else {
            return false;
        };
        let head = match form.body {
            CallBody::Json(_) | CallBody::JsonList => call_body::json_head(&self.held),
            CallBody::NameThenJson(separator) => call_body::name_head(&self.held, separator),
            CallBody::Keyed(marks) => keyed_arguments::head(marks, &self.held),
            CallBody::Gemma => Head::Other,
        };
        let head = match head {
            Head::Found { name, .. } if !self.may_call(mark, &name) => Head::Other,
            head => head,
        };
        match head {
            Head::Found { name, length } => {
                self.held.drain(..length);
                self.at_start = false;
                let tools = self.tools.clone();
                self.state = match form.body {
                    CallBody::Keyed(marks) => {
                        State::Keyed(KeyedArguments::new(marks, &name, tools))
                    }
                    _ => State::Arguments(JsonEnd::outside()),
                };
                parts.push(AnswerPart::Call { name });
                true
            }
            // Not a call after all.
            Head::Other if mark.is_empty() => {
                self.state = State::Content;
                self.at_start = false;
                true
            }
            Head::Other | Head::Partial => {
                let close = form.marks.close;
                let outside = |at: &usize| match form.body {
                    // Between quotes, a mark is text.
                    CallBody::Gemma => {
                        let quotes = self.held[..*at].matches(GEMMA_QUOTE).count();
                        quotes.is_multiple_of(2)
                    }
                    _ => true,
                };
                let mut ends = self.held.match_indices(close).map(|(at, _)| at);
                let Some(end) = ends.find(outside).filter(|_| !close.is_empty()) else {
                    return false;
                };
                let mut body: String = self.held.drain(..end + close.len()).collect();
                body.truncate(end);
                self.state = State::Content;
                self.whole_call(mark, &body, close, parts);
                true
            }
        }
    }

    /// Whether this is a call of `name`: without any mark, it may as well be other JSON with the same keys.
    fn may_call(&self, mark: &str, name: &str) -> bool {
        let bare = mark.is_empty() && self.calls.is_some_and(|form| form.bare);
        !bare || self.tools.iter().any(|tool| tool.name == name)
    }

    /// Tells of calls whose text is complete; what cannot be read is content.
    fn whole_call(&mut self, mark: &str, body: &str, close: &str, parts: &mut Vec<AnswerPart>) {
        let calls = self
            .calls
            .and_then(|form| call_body::read(form.body, body))
            .filter(|calls| calls.iter().all(|call| self.may_call(mark, &call.name)));
        self.at_start = false;
        match calls {
            Some(calls) => {
                for Call { name, arguments } in calls {
                    parts.push(AnswerPart::Call { name });
                    parts.push(AnswerPart::Arguments(arguments));
                }
                self.at_edge = true;
            }
            None => {
                self.at_edge = false;
                self.content(&format!("{mark}{body}{close}"), parts);
            }
        }
    }

    fn step_after_call(&mut self) -> bool {
        let Some(form) = self.calls else {
            return false;
        };
        self.at_edge = true;
        if form.body == CallBody::JsonList {
            let rest = self.held.trim_start().to_owned();
            if rest.starts_with(',') {
                self.held = rest;
                // The comma is part of the next head.
                self.state = State::Call { mark: "" };
                return true;
            }
            if rest.is_empty() {
                return false;
            }
        }
        match form.marks.close {
            "" => {
                if form.body == CallBody::JsonList {
                    let rest = self.held.trim_start();
                    self.held = rest.strip_prefix(']').unwrap_or(rest).to_owned();
                }
                self.state = State::Content;
                true
            }
            close => {
                let (_, found) = take_until(&mut self.held, &[close]);
                if found.is_some() {
                    self.state = State::Content;
                }
                found.is_some()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channels;
    use proptest::prelude::*;
    use serde_json::json;

    fn tools() -> Arc<[Tool]> {
        let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
        [Tool {
            name: "weather".to_owned(),
            parameters,
            strict: false,
            described: json!(null),
        }]
        .into()
    }

    /// The whole answer: content, reasoning, and calls with their arguments.
    type Whole = (String, String, Vec<(String, String)>);

    fn read(form: &AnswerForm, pieces: &[&str]) -> Whole {
        let mut reader = AnswerReader::new(form, tools(), Reasoning::Possible);
        let mut parts = Vec::new();
        for piece in pieces {
            parts.extend(reader.push(piece));
        }
        parts.extend(reader.finish());
        whole(parts)
    }

    fn whole(parts: Vec<AnswerPart>) -> Whole {
        let mut whole = Whole::default();
        for part in parts {
            match part {
                AnswerPart::Content(text) => whole.0 += &text,
                AnswerPart::Reasoning(text) => whole.1 += &text,
                AnswerPart::Call { name } => whole.2.push((name, String::new())),
                AnswerPart::Arguments(text) => {
                    whole.2.last_mut().expect("a call before its arguments").1 += &text
                }
            }
        }
        whole
    }

    /// A template's mark, an answer of its family, and what it means.
    fn families() -> Vec<(&'static str, &'static str, Whole)> {
        let call = |arguments: &str| ("weather".to_owned(), arguments.to_owned());
        let rome = || call(r#"{"city": "R}o\"m"}"#);
        let whole = |content: &str, reasoning: &str, calls: Vec<(String, String)>| {
            (content.to_owned(), reasoning.to_owned(), calls)
        };
        let rome_json = r#"{"name": "weather", "arguments": {"city": "R}o\"m"}}"#;
        let leak = |text: String| -> &'static str { Box::leak(text.into_boxed_str()) };
        vec![
            (
                "<tool_call></think>",
                leak(format!(
                    "<think>\nhm\n</think>\n\nLet me < see.\n<tool_call>\n{rome_json}\n</tool_call>\n<tool_call>\n{rome_json}\n</tool_call>"
                )),
                whole("Let me < see.\n", "hm\n", vec![rome(), rome()]),
            ),
            (
                "<tool_call>",
                "<tool_call>{\"arguments\": {\"days\": 2}, \"name\": \"weather\"}</tool_call> done",
                whole("done", "", vec![call(r#"{"days":2}"#)]),
            ),
            (
                "[TOOL_CALLS]",
                leak(format!(
                    "[TOOL_CALLS] [{rome_json}, {}]",
                    r#"{"name": "weather", "arguments": {"days": 1}, "id": "abc"}"#
                )),
                whole("", "", vec![rome(), call(r#"{"days": 1}"#)]),
            ),
            (
                "[TOOL_CALLS][ARGS]",
                "Hi[TOOL_CALLS]weather[ARGS]{\"days\": 1}[TOOL_CALLS]weather[ARGS]{}",
                whole("Hi", "", vec![call(r#"{"days": 1}"#), call("{}")]),
            ),
            (
                "<|tool_call|>",
                leak(format!("<|tool_call|>[{rome_json}]")),
                whole("", "", vec![rome()]),
            ),
            (
                "<|python_tag|>\"parameters\": ",
                r#"{"name": "weather", "parameters": {"days": 1}}"#,
                whole("", "", vec![call(r#"{"days": 1}"#)]),
            ),
            (
                "<|python_tag|>\"parameters\": ",
                r#"{"days": 1} is what I'd say"#,
                whole(r#"{"days": 1} is what I'd say"#, "", vec![]),
            ),
            (
                "<tool_call><function=",
                "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
                whole("", "", vec![call(r#"{"city":"12","days":3}"#)]),
            ),
            (
                "<tool_call><arg_key>",
                "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rom</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
                whole("", "", vec![call(r#"{"city":"Rom","days":3}"#)]),
            ),
            (
                "<|tool_call><channel|>",
                "<|channel>thought\nhm<channel|>Yes<|tool_call>call:weather{city:<|\"|>Ro:m, \"x\"<|\"|>,days:3}<tool_call|>",
                whole(
                    "Yes",
                    "hm",
                    vec![call(r#"{"city":"Ro:m, \"x\"","days":3}"#)],
                ),
            ),
            (
                "<｜tool▁sep｜>",
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"days\": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                whole("", "", vec![call(r#"{"days": 1}"#), call("{}")]),
            ),
            (
                "<|tool_call_argument_begin|>",
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{\"days\": 1}<|tool_call_end|><|tool_calls_section_end|>",
                whole("", "", vec![call(r#"{"days": 1}"#)]),
            ),
            (
                "<|channel|>analysis<|message|>",
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Let me < see.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"R}o\\\"m\"}<|call|>",
                whole("Let me < see.", "hm", vec![rome()]),
            ),
            (
                "<|channel|>analysis<|message|>",
                "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>analysis<|message|>on<|end|><|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{\"days\": 1}",
                whole("", "so\n\non", vec![call(r#"{"days": 1}"#)]),
            ),
            (
                "<|channel|>analysis<|message|>",
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>It is <|warm|>.<|return|>",
                whole("It is <|warm|>.", "hm", vec![]),
            ),
            (
                "<|channel|>analysis<|message|>",
                " to=functions.weather<|channel|>commentary<|message|><|call|>",
                whole("", "", vec![call("{}")]),
            ),
            (
                "<|channel|>analysis<|message|>",
                "to=functions.weather<|channel|>commentary<|message|>Rome!<|call|>",
                whole(
                    "to=functions.weather<|channel|>commentary<|message|>Rome!<|call|>",
                    "",
                    vec![],
                ),
            ),
            (
                "<|channel|>analysis<|message|>",
                "tomorrow, plain",
                whole("tomorrow, plain", "", vec![]),
            ),
        ]
    }

    #[test]
    fn every_familys_calls_are_read() {
        for (template, answer, expected) in families() {
            let form = AnswerForm::of_template(template);
            assert_eq!(read(&form, &[answer]), expected, "{answer}");
        }
    }

    #[test]
    fn texts_among_named_arguments_come_in_pieces() {
        for (template, begins, ends) in [
            (
                "<tool_call><function=",
                "<tool_call><function=weather><parameter=city>\n",
                "\n</parameter></function></tool_call>",
            ),
            (
                "<tool_call><arg_key>",
                "<tool_call>weather<arg_key>city</arg_key><arg_value>",
                "</arg_value></tool_call>",
            ),
        ] {
            let mut reader = AnswerReader::new(
                &AnswerForm::of_template(template),
                tools(),
                Reasoning::Possible,
            );
            let begun = [
                AnswerPart::Call {
                    name: "weather".to_owned(),
                },
                AnswerPart::Arguments("{\"city\":\"".to_owned()),
            ];
            assert_eq!(reader.push(begins), begun);
            let arguments = |text: &str| [AnswerPart::Arguments(text.to_owned())];
            assert_eq!(reader.push("Ro\"m"), arguments("Ro\\\"m"));
            assert_eq!(reader.push("a\nb<"), arguments("a\\nb"));
            assert_eq!(reader.push("i"), arguments("<i"));
            assert_eq!(reader.push(ends), arguments("\"}"));
            assert_eq!(reader.finish(), []);
        }
    }

    #[test]
    fn json_that_is_no_call_is_content() {
        let form = AnswerForm::of_template("<|python_tag|>\"parameters\": ");
        for text in [
            r#"{"name": "Alice", "parameters": {"age": 3}}"#,
            r#"{"parameters": {"age": 3}, "name": "Alice"}"#,
        ] {
            assert_eq!(
                read(&form, &[text]),
                (text.to_owned(), String::new(), vec![])
            );
        }
    }

    #[test]
    fn a_value_that_never_ends_takes_no_other_call_along() {
        let form = AnswerForm::of_template("<tool_call><function=");
        let call = |days: &str| {
            format!(
                "<tool_call>\n<function=weather>\n<parameter=days>\n{days}\n</parameter>\n</function>\n</tool_call>"
            )
        };
        let text = call("[1, 2") + &call("3");
        let called = |arguments: &str| ("weather".to_owned(), arguments.to_owned());
        let expected = vec![called(r#"{"days":"[1, 2"}"#), called(r#"{"days":3}"#)];
        assert_eq!(
            read(&form, &[&text]),
            (String::new(), String::new(), expected)
        );
    }

    #[test]
    fn a_broken_call_is_content() {
        let form = AnswerForm::of_template("<tool_call>");
        for broken in [
            "<tool_call>\nweather(Rome)\n</tool_call>",
            "<tool_call>{\"name\": 3}</tool_call>",
            "a <tool_call>{\"name\": \"weather\"",
            "[1, 2] </tool_call> <tool_c",
        ] {
            assert_eq!(
                read(&form, &[broken]),
                (broken.to_owned(), String::new(), vec![])
            );
        }
    }

    #[test]
    fn without_tools_no_channel_is_a_call() {
        let form = AnswerForm::of_template(channels::ANALYSIS);
        let mut reader = AnswerReader::new(&form, [].into(), Reasoning::Possible);
        let text = "<|channel|>commentary to=functions.f<|message|>{}<|call|>";
        let mut parts = reader.push(text);
        parts.extend(reader.finish());
        assert_eq!(parts, [AnswerPart::Content("{}".to_owned())]);
    }

    #[test]
    fn without_tools_nothing_is_a_call() {
        let form = AnswerForm::of_template("<tool_call></think>");
        let mut reader = AnswerReader::new(&form, [].into(), Reasoning::Open);
        let text = "so</think><tool_call>{}</tool_call>";
        let mut parts = reader.push(text);
        parts.extend(reader.finish());
        let expected = [
            AnswerPart::Reasoning("so".to_owned()),
            AnswerPart::Content("<tool_call>{}</tool_call>".to_owned()),
        ];
        assert_eq!(parts, expected);
    }

    #[test]
    fn a_text_may_end_in_the_middle_of_a_call() {
        let xml = "<tool_call>\n<function=weather>\n";
        let channel = " to=functions.weather<|channel|>commentary<|message|>";
        // What follows the beginning of a call, and whether the call is not whole then.
        type Ends<'t> = &'t [(&'t str, bool)];
        let cases: [(&str, &str, Ends); 5] = [
            (
                "<tool_call>",
                "<tool_call>{",
                &[
                    ("\"name\": \"weather\"", true),
                    ("\"name\": \"weather\", \"arguments\": {\"a\"", true),
                    ("\"name\": \"weather\", \"arguments\": {}", false),
                    ("\"arguments\": {}, \"name\": \"weather\"}", false),
                ],
            ),
            (
                "<tool_call><function=",
                xml,
                &[
                    ("<parameter=city>\na\n", true),
                    ("<parameter=days>\n3\n", true),
                    ("<parameter=city>\na\n</parameter>\n<para", true),
                    ("<parameter=city>\na\n</parameter>\n", false),
                    ("</function>\n", false),
                ],
            ),
            (
                "<tool_call><arg_key>",
                "<tool_call>weather",
                &[("\n", true)],
            ),
            (
                channels::ANALYSIS,
                channel,
                &[("", true), ("{\"a\": 1", true), ("{\"a\": 1}", false)],
            ),
            ("<tool_call>", "Rome <", &[("", false), ("tool", false)]),
        ];
        for (template, begins, ends) in cases {
            for (end, expected) in ends {
                let form = AnswerForm::of_template(template);
                let mut reader = AnswerReader::new(&form, tools(), Reasoning::Possible);
                reader.push(begins);
                reader.push(end);
                assert_eq!(reader.in_call(), *expected, "{begins}{end}");
            }
        }
    }

    /// What a limit cuts off is a part of what would have come: no half mark, and no half call's head.
    #[test]
    fn what_is_cut_off_shows_no_mark() {
        for (template, answer, (content, reasoning, calls)) in families() {
            let form = AnswerForm::of_template(template);
            for (length, _) in answer.char_indices() {
                let mut reader = AnswerReader::new(&form, tools(), Reasoning::Possible);
                let mut parts = reader.push(&answer[..length]);
                parts.extend(reader.cut_off());
                let cut = whole(parts);
                // Without a mark, it may be JSON that was asked for.
                if form.calls.bare && cut.2.is_empty() {
                    continue;
                }
                let case = format!("{:?} of {template}", &answer[..length]);
                assert!(content.starts_with(&cut.0), "{case}: {cut:?}");
                assert!(reasoning.starts_with(&cut.1), "{case}: {cut:?}");
                let names = |calls: &[(String, String)]| -> Vec<String> {
                    calls.iter().map(|(name, _)| name.clone()).collect()
                };
                assert!(names(&calls).starts_with(&names(&cut.2)), "{case}: {cut:?}");
                for ((_, all), (_, told)) in calls.iter().zip(&cut.2) {
                    assert!(all.starts_with(told), "{case}: {cut:?}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn cuts_of_the_text_change_nothing(family in 0..18usize, sizes in prop::collection::vec(1..9usize, 1..8)) {
            let families = families();
            let (template, answer, expected) = &families[family];
            let form = AnswerForm::of_template(template);
            let (mut pieces, mut rest, mut sizes) = (Vec::new(), *answer, sizes.iter().cycle());
            while let Some(&size) = sizes.next().filter(|_| !rest.is_empty()) {
                let end = (size..=rest.len()).find(|&end| rest.is_char_boundary(end)).unwrap_or(rest.len());
                let (piece, after) = rest.split_at(end);
                pieces.push(piece);
                rest = after;
            }
            prop_assert_eq!(&read(&form, &pieces), expected);
        }

        #[test]
        fn any_call_by_names_is_cut_as_well(text in "(<tool_call>|</tool_call>|f|weather|<function=weather>|<parameter=(city|days)>|</parameter>|</function>|<arg_key>city</arg_key>|<arg_value>|</arg_value>|[1\\n\"<]){0,16}") {
            for template in ["<tool_call><function=", "<tool_call><arg_key>"] {
                let form = AnswerForm::of_template(template);
                let pieces: Vec<String> = text.chars().map(String::from).collect();
                let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
                prop_assert_eq!(read(&form, &pieces), read(&form, &[&text]));
            }
        }

        #[test]
        fn any_channels_are_cut_as_well(text in "(<\\|channel\\|>|<\\|message\\|>|<\\|end\\|>|<\\|start\\|>|<\\|call\\|>|analysis|commentary| to=functions.weather|\\{\\}|[a\\n <]){0,16}") {
            let form = AnswerForm::of_template(channels::ANALYSIS);
            let pieces: Vec<String> = text.chars().map(String::from).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(read(&form, &pieces), read(&form, &[&text]));
        }

        #[test]
        fn any_text_comes_through(text in "[<a{\\[\"]{0,12}(<tool_call>|</tool_call>|<think>|\\{\"name\": \"f\", \"arguments\": \\{|\\}){0,6}[a\\n ]{0,3}") {
            for template in ["<tool_call></think>", "<|python_tag|>\"parameters\": ", "[TOOL_CALLS]"] {
                let form = AnswerForm::of_template(template);
                let pieces: Vec<String> = text.chars().map(String::from).collect();
                let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
                prop_assert_eq!(read(&form, &pieces), read(&form, &[&text]));
            }
        }
    }
}
