//! How a family of models marks what is not plain text in its answers: reasoning, and calls of tools. Data, found by what the model's chat
//! template writes. A model whose template knows no tools is told about them, and about Hermes' form, in its instructions.
//!
//! Decides: which form a template means. Reads no answers ([`crate::AnswerReader`] does).

use crate::channels;
use crate::tokenizer::Tokenizer;

/// Mistral may write the call's id behind its name, after this mark.
pub const CALL_ID: &str = "[CALL_ID]";

/// What stands between a call's name and its arguments in Mistral's form.
pub const MISTRAL_ARGUMENTS: &str = "[ARGS]";

/// In DeepSeek's.
pub const DEEPSEEK_SEPARATOR: &str = "<\u{FF5C}tool\u{2581}sep\u{FF5C}>";

/// Around texts in Gemma's calls.
pub const GEMMA_QUOTE: &str = "<|\"|>";

/// The marks of one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerForm {
    pub reasoning: Option<Marks>,
    /// Not of answers in channels.
    pub calls: CallForm,
    /// The template itself writes calls like this. Else models are told how: Hermes' form.
    pub calls_known: bool,
    /// An answer is several messages, each of which names its channel (harmony, of gpt-oss).
    pub channels: bool,
    /// White space that the template writes before and after the closing mark of reasoning.
    around_close: (&'static str, &'static str),
}

/// How an answer stands to reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reasoning {
    /// None may come.
    Closed,
    /// The answer may begin with it.
    Possible,
    /// The prompt has opened it.
    Open,
}

/// What is between is not content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Marks {
    pub open: &'static str,
    pub close: &'static str,
}

/// How calls of tools are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallForm {
    /// Around each call, or around the list of them; without a closing mark, it ends with the answer.
    pub marks: Marks,
    pub body: CallBody,
    /// Further marks around all calls.
    pub around: Option<Marks>,
    /// An answer that begins like a call is one, also without the opening mark.
    pub bare: bool,
    /// In a conversation, the ids of calls must be 9 letters and digits.
    pub short_ids: bool,
}

/// What is between the marks of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallBody {
    /// `{"name": "f", "arguments": {...}}`, with this word for the arguments.
    Json(&'static str),
    /// A list of such objects.
    JsonList,
    /// The name, this mark, and the arguments as JSON.
    NameThenJson(&'static str),
    /// The name, and each argument by its name, between marks.
    Keyed(&'static KeyMarks),
    /// `call:f{a:1,b:<|"|>text<|"|>}`.
    Gemma,
}

/// What stands around names and values that have no quotes.
#[derive(Debug, PartialEq, Eq)]
pub struct KeyMarks {
    pub name_open: &'static str,
    pub name_close: &'static str,
    pub key_open: &'static str,
    pub key_close: &'static str,
    pub value_open: &'static str,
    pub value_close: &'static str,
    /// A value stands on lines of its own.
    pub own_lines: bool,
    /// What follows the last value.
    pub end: &'static str,
}

impl AnswerForm {
    /// For a model that is told of tools in words: its calls have the form that the words say, whatever its template writes.
    pub(crate) fn told_in_words(self) -> Self {
        Self {
            calls: HERMES,
            ..self
        }
    }

    /// How the answer to `prompt` stands to reasoning.
    pub fn reasoning_after(&self, prompt: &str) -> Reasoning {
        let prompt = prompt.trim_end();
        match self.reasoning {
            Some(marks) if prompt.ends_with(marks.open) => Reasoning::Open,
            Some(marks) if !prompt.ends_with(marks.close) => Reasoning::Possible,
            _ => Reasoning::Closed,
        }
    }

    /// How the rest of an answer that begins like this stands to reasoning.
    pub fn reasoning_within(&self, begun: &str) -> Reasoning {
        let last = |mark: &str| begun.rfind(mark);
        match self.reasoning {
            Some(marks) if last(marks.open) > last(marks.close) => Reasoning::Open,
            _ => Reasoning::Closed,
        }
    }

    /// The marks of an answer that are tokens of structure, those of calls only where there are `calls`.
    pub fn control_tokens(&self, calls: bool, tokenizer: &Tokenizer) -> Vec<u32> {
        let mut marks = Vec::new();
        let both = |marks: Marks| [marks.open, marks.close];
        marks.extend(self.reasoning.into_iter().flat_map(both));
        if self.channels {
            marks.extend(channels::MARKS);
        } else if calls {
            let around = [Some(self.calls.marks), self.calls.around];
            marks.extend(around.into_iter().flatten().flat_map(both));
            match self.calls.body {
                CallBody::NameThenJson(separator) => marks.extend([separator, CALL_ID]),
                CallBody::Gemma => marks.push(GEMMA_QUOTE),
                _ => {}
            }
        }
        let tokens = marks.into_iter();
        tokens
            .filter_map(|mark| tokenizer.control_token(mark))
            .collect()
    }

    /// What ends reasoning that goes on for too long, so that the answer begins. `may_call`: it may be a call of a tool.
    pub(crate) fn closing(&self, may_call: bool) -> String {
        let close = self.reasoning.map_or("", |marks| marks.close);
        if self.channels {
            let next = if may_call { "" } else { channels::FINAL };
            return format!("{close}{}assistant{next}", channels::START);
        }
        let (before, after) = self.around_close;
        format!("{before}{close}{after}")
    }

    /// What `template`, the Jinja source, writes.
    pub fn of_template(template: &str) -> Self {
        if template.contains(channels::ANALYSIS) {
            return Self {
                reasoning: Some(marks(channels::ANALYSIS, channels::END)),
                calls: HERMES,
                calls_known: true,
                channels: true,
                around_close: ("", ""),
            };
        }
        let writes = |mark: &&str| template.contains(*mark);
        let known = CALLS
            .iter()
            .find(|(marks, _)| marks.iter().all(writes))
            .filter(|_| !writes(&MINIMAX_M3));
        let reasoning = REASONING
            .into_iter()
            .find(|marks| template.contains(marks.close));
        Self {
            reasoning,
            around_close: reasoning.map_or(("", ""), |marks| around(template, marks.close)),
            calls: known.map_or(HERMES, |(_, form)| *form),
            calls_known: known.is_some(),
            channels: false,
        }
    }
}

/// White space around a mark in the texts of a template, which write a line break as `\n`.
fn around(template: &str, mark: &str) -> (&'static str, &'static str) {
    let before = ["\n", ""];
    let after = ["\n\n", "\n", ""];
    let written = |space: &str| space.replace('\n', "\\n");
    let before = before
        .into_iter()
        .find(|space| template.contains(&format!("{}{mark}", written(space))));
    let after = after
        .into_iter()
        .find(|space| template.contains(&format!("{mark}{}", written(space))));
    (before.unwrap_or(""), after.unwrap_or(""))
}

const fn marks(open: &'static str, close: &'static str) -> Marks {
    Marks { open, close }
}

const fn tagged(open: &'static str, close: &'static str, body: CallBody) -> CallForm {
    CallForm {
        marks: marks(open, close),
        body,
        around: None,
        bare: false,
        short_ids: false,
    }
}

const fn mistral(body: CallBody) -> CallForm {
    CallForm {
        short_ids: true,
        ..tagged("[TOOL_CALLS]", "", body)
    }
}

const REASONING: [Marks; 5] = [
    marks("<think>", "</think>"),
    marks("[THINK]", "[/THINK]"),
    marks("<|START_THINKING|>", "<|END_THINKING|>"),
    marks("<|channel>thought", "<channel|>"),
    marks("<seed:think>", "</seed:think>"),
];

/// Qwen's too, and what is said to models that know none.
pub(crate) const HERMES: CallForm =
    tagged("<tool_call>", "</tool_call>", CallBody::Json("arguments"));

/// `<function=f><parameter=a>1</parameter></function>`.
const XML: KeyMarks = KeyMarks {
    name_open: "<function=",
    name_close: ">",
    key_open: "<parameter=",
    key_close: ">",
    value_open: "",
    value_close: "</parameter>",
    own_lines: true,
    end: "</function>",
};

/// The same, with nothing between marks and values.
const SEED: KeyMarks = KeyMarks {
    own_lines: false,
    ..XML
};

/// `f<arg_key>a</arg_key><arg_value>1</arg_value>`.
const ARG_KEYS: KeyMarks = KeyMarks {
    name_open: "",
    name_close: "",
    key_open: "<arg_key>",
    key_close: "</arg_key>",
    value_open: "<arg_value>",
    value_close: "</arg_value>",
    own_lines: false,
    end: "",
};

/// `f"><parameter name="a">1</parameter>`.
const INVOKED: KeyMarks = KeyMarks {
    name_open: "",
    name_close: "\">",
    key_open: "<parameter name=\"",
    key_close: "\">",
    value_open: "",
    value_close: "</parameter>",
    own_lines: false,
    end: "",
};

/// Its calls have a mark in common with others', and are read by nobody here.
const MINIMAX_M3: &str = "]<]minimax[>[";

/// A form, and the marks that a template must have for it. The first that fits counts.
const CALLS: [(&[&str], CallForm); 15] = [
    // GLM.
    (
        &["<tool_call>", "<arg_key>"],
        tagged("<tool_call>", "</tool_call>", CallBody::Keyed(&ARG_KEYS)),
    ),
    // Qwen3-Coder, Qwen3.5.
    (
        &["<tool_call>", "<function="],
        tagged("<tool_call>", "</tool_call>", CallBody::Keyed(&XML)),
    ),
    // Apriel.
    (
        &["<tool_calls>["],
        tagged("<tool_calls>", "</tool_calls>", CallBody::JsonList),
    ),
    (&["<tool_call>"], HERMES),
    // Mistral since 2025.
    (
        &["[TOOL_CALLS]", MISTRAL_ARGUMENTS],
        mistral(CallBody::NameThenJson(MISTRAL_ARGUMENTS)),
    ),
    // Mistral before.
    (&["[TOOL_CALLS]"], mistral(CallBody::JsonList)),
    // Granite 3.
    (
        &["<|tool_call|>"],
        tagged("<|tool_call|>", "", CallBody::JsonList),
    ),
    // Nemotron.
    (
        &["<TOOLCALL>"],
        tagged("<TOOLCALL>", "</TOOLCALL>", CallBody::JsonList),
    ),
    // Gemma 4.
    (
        &["<|tool_call>"],
        tagged("<|tool_call>", "<tool_call|>", CallBody::Gemma),
    ),
    // DeepSeek. R1 puts the name on a line of its own, and the arguments into a block of code.
    (
        &[DEEPSEEK_SEPARATOR],
        CallForm {
            marks: marks(
                "<\u{FF5C}tool\u{2581}call\u{2581}begin\u{FF5C}>",
                "<\u{FF5C}tool\u{2581}call\u{2581}end\u{FF5C}>",
            ),
            body: CallBody::NameThenJson(DEEPSEEK_SEPARATOR),
            around: Some(marks(
                "<\u{FF5C}tool\u{2581}calls\u{2581}begin\u{FF5C}>",
                "<\u{FF5C}tool\u{2581}calls\u{2581}end\u{FF5C}>",
            )),
            ..tagged("", "", CallBody::Json(""))
        },
    ),
    // Kimi.
    (
        &["<|tool_call_argument_begin|>"],
        CallForm {
            marks: marks("<|tool_call_begin|>", "<|tool_call_end|>"),
            body: CallBody::NameThenJson("<|tool_call_argument_begin|>"),
            around: Some(marks(
                "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>",
            )),
            ..tagged("", "", CallBody::Json(""))
        },
    ),
    // Seed.
    (
        &["<seed:tool_call>"],
        tagged(
            "<seed:tool_call>",
            "</seed:tool_call>",
            CallBody::Keyed(&SEED),
        ),
    ),
    // MiniMax M2.
    (
        &["<minimax:tool_call>"],
        CallForm {
            around: Some(marks("<minimax:tool_call>", "</minimax:tool_call>")),
            ..tagged("<invoke name=\"", "</invoke>", CallBody::Keyed(&INVOKED))
        },
    ),
    // Llama 3.
    (&["<|python_tag|>", "\"parameters\": "], LLAMA_3),
    (&["{\"name\": function name, \"parameters\""], LLAMA_3),
];

const LLAMA_3: CallForm = CallForm {
    bare: true,
    ..tagged("<|python_tag|>", "", CallBody::Json("parameters"))
};
