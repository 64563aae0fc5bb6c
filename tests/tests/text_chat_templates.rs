//! Chat templates of published models against the real Jinja2, over conversations of all kinds.
//!
//! Needs `make assets`: the templates that llama.cpp ships, and a Python with jinja2.

use std::collections::{BTreeMap, BTreeSet};

use prima_crds::error_chain;
use prima_gguf::{Gguf, Metadata, Value};
use prima_tests::assets;
use prima_tests::python::ask_oracle;
use prima_text::{
    AnswerForm, AnswerPart, AnswerReader, Calls, ChatTemplate, ChatTemplateError, Detokenizer,
    GrammarReader, Reasoning, Sampler, SamplingParams, Tokenizer, Tool, WantedAnswer, calls,
};
use serde_json::{Map, json};

/// Known differences of minijinja and Jinja2: the template and how the conversation's name begins, what Jinja2's result holds, what ours
/// holds. The first are loops over none, of tools or documents that were not given: minijinja has them as loops over nothing, which is what
/// the authors meant.
const KNOWN_DIFFERENCES: [(&str, &str, &str); 9] = [
    (
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use / ",
        OVER_NONE,
        "Ok(",
    ),
    (
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use / ",
        OVER_NONE,
        "Ok(",
    ),
    (
        "CohereForAI-c4ai-command-r-plus-tool_use / ",
        OVER_NONE,
        "Ok(",
    ),
    (
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use / documents",
        OVER_NONE,
        "Ok(",
    ),
    ("Cohere2MoE / documents", OVER_NONE, "Ok("),
    ("LFM2.5-8B-A1B / tool call", OVER_NONE, "Ok("),
    // `| map | tojson` without `| list`: Python has a generator there, minijinja a list.
    (
        "llama-cpp-deepseek-r1 / tool",
        "Object of type generator is not JSON serializable",
        "Ok(",
    ),
    // `[][::-1]` in a conversation without messages.
    ("Reka-Edge / nothing", "assistant:", "minijinja panicked"),
    // `'a' | safe + text` escapes the text for HTML in Python, of all places in a prompt.
    ("meetkai-functionary-medium-v3.1 / tool", "&#34;", "Ok("),
];

const OVER_NONE: &str = "'NoneType' object is not iterable";

#[test]
fn templates_render_as_jinja2_renders_them() {
    let templates = templates();
    let conversations = conversations();
    assert!(templates.len() >= 60, "{}", templates.len());
    let expected = jinja2(&templates, &conversations);

    let (mut equal, mut refused, mut failed, mut known_differences) = (0, 0, 0, 0);
    let mut differences = Vec::new();
    let mut seen = BTreeSet::new();
    for (name, source) in &templates {
        let template = template(source);
        for (conversation, variables) in &conversations {
            let expected = &expected[name][conversation];
            let found = match &template {
                Ok(template) => render(template, variables),
                Err(error) => Err(ChatTemplateError::Refused {
                    message: error_chain(error),
                }),
            };
            match (&found, expected) {
                (Ok(found), _) if expected["text"] == **found => equal += 1,
                (Err(ChatTemplateError::Refused { message }), _)
                    if expected["raised"] == **message =>
                {
                    refused += 1
                }
                (Err(ChatTemplateError::Render { .. } | ChatTemplateError::Syntax { .. }), _)
                    if expected.get("error").is_some() =>
                {
                    failed += 1;
                }
                _ => {
                    let found = found.as_ref().map_err(|error| error_chain(error));
                    let known = KNOWN_DIFFERENCES.iter().position(|(case, theirs, ours)| {
                        format!("{name} / {conversation}").starts_with(case)
                            && expected.to_string().contains(theirs)
                            && format!("{found:?}").contains(ours)
                    });
                    if let Some(known) = known {
                        seen.insert(known);
                        known_differences += 1;
                        continue;
                    }
                    differences.push(format!(
                        "{name} / {conversation}:\n  found    {found:?}\n  expected {expected}"
                    ));
                }
            }
        }
    }
    eprintln!(
        "{} templates, {} conversations: {equal} equal prompts, {refused} equal refusals, {failed} errors in both, {known_differences} known differences, {} others",
        templates.len(),
        conversations.len(),
        differences.len()
    );
    assert!(differences.is_empty(), "{}", differences.join("\n"));
    assert!(equal >= 1000 && refused >= 30, "{equal}, {refused}");
    assert_eq!(seen.len(), KNOWN_DIFFERENCES.len(), "{seen:?}");
}

/// What families have tokens of structure for.
const MARKS: [&str; 31] = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|tool_call|>",
    "<TOOLCALL>",
    "</TOOLCALL>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<\u{FF5C}tool\u{2581}sep\u{FF5C}>",
    "<\u{FF5C}tool\u{2581}call\u{2581}begin\u{FF5C}>",
    "<\u{FF5C}tool\u{2581}call\u{2581}end\u{FF5C}>",
    "<\u{FF5C}tool\u{2581}calls\u{2581}begin\u{FF5C}>",
    "<\u{FF5C}tool\u{2581}calls\u{2581}end\u{FF5C}>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<|python_tag|>",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|constrain|>",
];

/// The grammar for calls allows `text` token by token, and the end after it; with another tool's name it does not.
fn keeps_to_grammar(
    name: &str,
    form: &AnswerForm,
    tool: &Tool,
    text: &str,
    tokenizer: &Tokenizer,
    grammars: &GrammarReader,
) {
    let wanted = WantedAnswer {
        tools: std::slice::from_ref(tool),
        calls: Calls::Allowed,
        several: true,
        text: None,
    };
    let allowed = |text: &str| {
        let grammar = calls(form, Reasoning::Closed, &wanted, tokenizer)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let constraint = grammars
            .read(grammar)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut sampler = Sampler::new(SamplingParams::default()).unwrap();
        sampler.constrain(Some(constraint));
        let tokens = tokenizer.encode(text, false, true).unwrap();
        let refused = tokens
            .iter()
            .position(|token| sampler.accept(*token).is_err());
        let ends = refused.is_none() && {
            // Everything but the end is unlikely.
            let mut logits = vec![-50.0; tokenizer.vocab_size()];
            logits[tokenizer.eos().unwrap() as usize] = 50.0;
            let next = sampler.sample(&logits, None).unwrap().token;
            tokenizer.is_end_of_generation(next)
        };
        (refused.map(|at| tokenizer.decode(&tokens[..=at])), ends)
    };
    assert_eq!(allowed(text), (None, true), "{name}: {text:?}");
    let other = text.replace("get_weather", "get_whether");
    assert!(allowed(&other).0.is_some(), "{name}: {other:?}");
    let other = text.replacen('3', "\"three\"", 1);
    assert!(allowed(&other).0.is_some(), "{name}: {other:?}");
}

/// Qwen's vocabulary, with `marks` among its control tokens.
fn vocabulary_with(marks: &[&str]) -> Tokenizer {
    let file = Gguf::open(&assets::path("vocab/ggml-vocab-qwen2.gguf").unwrap()).unwrap();
    let metadata = &file.metadata;
    let texts = metadata.strings("tokenizer.ggml.tokens").unwrap().unwrap();
    let mut texts: Vec<String> = texts.iter().map(str::to_owned).collect();
    let mut kinds = metadata
        .i32s("tokenizer.ggml.token_type")
        .unwrap()
        .unwrap()
        .to_vec();
    for mark in marks {
        texts.push((*mark).to_owned());
        kinds.push(3);
    }
    let keys = metadata
        .iter()
        .filter(|(key, _)| !matches!(*key, "tokenizer.ggml.tokens" | "tokenizer.ggml.token_type"));
    let mut entries: Vec<(String, Value)> = keys
        .map(|(key, value)| (key.to_owned(), value.clone()))
        .collect();
    entries.push(("tokenizer.ggml.tokens".to_owned(), Value::from(texts)));
    entries.push(("tokenizer.ggml.token_type".to_owned(), Value::from(kinds)));
    let metadata = Metadata::new("qwen2 with marks", entries).unwrap();
    Tokenizer::from_gguf(&metadata).unwrap()
}

/// What ends an answer, and is no text of it.
const ENDS: [&str; 17] = [
    "<|call|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<\u{FF5C}end\u{2581}of\u{2581}sentence\u{FF5C}>",
    "</s>",
    "<turn|>",
    "<|tool_response>",
    "<|observation|>",
    "<seed:eos>",
    "<SPECIAL_12>",
    "<sep>",
    "<|role_end|>",
    "</assistant>",
    "<|end|>",
    "[e~[",
];

/// What begins an answer, where the prompt would have gone on with thoughts.
const BEGINS: [&str; 3] = [
    "<|im_start|>assistant\n",
    "<SPECIAL_11>Assistant\n",
    "]~b]ai\n",
];

/// Calls that a template writes into the conversation are what its model would write: they are read in their order, however the text is cut,
/// and the grammar for calls allows them.
#[test]
fn calls_are_read_as_templates_write_them() {
    let templates: BTreeMap<String, ChatTemplate> = templates()
        .into_iter()
        .filter_map(|(name, source)| Some((name, template(&source).ok()?)))
        .filter(|(_, template)| template.tells_of_tools())
        .collect();
    assert!(templates.len() >= 37, "{:?}", templates.keys());
    // Marks are texts like any other, or tokens of their own.
    let tokenizers = [&[][..], &MARKS].map(vocabulary_with);
    let grammars = tokenizers
        .each_ref()
        .map(|tokenizer| GrammarReader::new(tokenizer).unwrap());
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
    let function = json!({"name": "get_weather", "description": "It", "parameters": parameters});
    let tool = Tool {
        name: "get_weather".into(),
        parameters: function["parameters"].clone(),
        strict: false,
        described: json!({"type": "function", "function": function}),
    };
    // Of each call.
    let arguments = [
        json!({"city": "Rom}e \"x\"", "days": 3}),
        json!({"city": "Oslo", "days": 4}),
    ];
    let mut several = 0;
    let cases = templates
        .iter()
        .flat_map(|(name, template)| [(name, template, 1), (name, template, 2)]);
    for (name, template, count) in cases {
        let call = |(nth, arguments): (usize, &serde_json::Value)| {
            let arguments = match template.takes_objects() {
                true => arguments.clone(),
                false => arguments.to_string().into(),
            };
            let id = format!("abcdefgh{nth}");
            json!({"id": id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}})
        };
        let calls: Vec<_> = arguments.iter().take(count).enumerate().map(call).collect();
        let question = json!({"role": "user", "content": "How is it in Rome?"});
        let answer = json!({"role": "assistant", "content": "", "tool_calls": calls});
        let mut extra = Map::new();
        extra.insert("tools".into(), json!([tool.described]));
        let rendered =
            |messages: serde_json::Value, begins: bool| template.render(&messages, begins, &extra);
        let whole = match rendered(json!([question, answer]), false) {
            Ok(whole) => whole,
            // Some models make one call at a time.
            Err(ChatTemplateError::Refused { .. }) if count > 1 => continue,
            // They append to lists, which templates may not do; Hugging Face's renderer fails as well.
            Err(ChatTemplateError::Render { .. }) if name.starts_with("Kimi-K2-") => continue,
            Err(error) => panic!("{name}: {}", error_chain(&error)),
        };
        // The prompt may end with a mark that opens reasoning, or with one of its own.
        let prompts = [true, false].map(|begins| rendered(json!([question]), begins).unwrap());
        let prompt = prompts
            .iter()
            .find(|prompt| whole.starts_with(prompt.as_str()))
            .unwrap_or(&prompts[1]);
        let same = |(one, other): &(char, char)| one == other;
        let shared = prompt.chars().zip(whole.chars()).take_while(same);
        let shared: usize = shared.map(|(one, _)| one.len_utf8()).sum();
        let mut text = &whole[shared..];
        for end in ENDS {
            text = text.split(end).next().unwrap();
        }
        for begin in BEGINS {
            text = text.strip_prefix(begin).unwrap_or(text);
        }
        if !text.contains("get_weather") {
            // Granite's template leaves calls out.
            assert_eq!(name, "ibm-granite-granite-3.3-2B-Instruct");
            continue;
        }
        // Harmony's template leaves out all but the first.
        let expected = &arguments[..text.matches("get_weather").count().min(count)];
        several += usize::from(expected.len() > 1);
        for (tokenizer, grammars) in tokenizers.iter().zip(&grammars) {
            let text = text.trim_end();
            keeps_to_grammar(name, template.form(), &tool, text, tokenizer, grammars);
        }
        let form = template.form();
        let reasoning = form.reasoning_after(&whole[..shared]);
        let mark = form
            .calls
            .around
            .map_or(form.calls.marks.open, |around| around.open);
        let head = text.find(mark).map_or("", |at| &text[..at]);
        // Sign by sign, in pieces of one size, cut in two at every place, and as the tokens of both vocabularies come.
        let characters: Vec<char> = text.chars().collect();
        let sizes = (1..=8).map(|size| texts(characters.chunks(size)));
        let cuts = (0..characters.len()).map(|place| {
            let (before, after) = characters.split_at(place);
            texts([before, after])
        });
        let by_tokens = tokenizers.iter().map(|tokenizer| {
            let shown = form.control_tokens(true, tokenizer);
            let mut told = Detokenizer::new(tokenizer).showing(shown);
            let tokens = tokenizer.encode(text, false, true).unwrap();
            tokens.into_iter().map(|token| told.push(token)).collect()
        });
        let ways: Vec<Vec<String>> = sizes.chain(cuts).chain(by_tokens).collect();
        for pieces in ways {
            let mut reader = AnswerReader::new(form, [tool.clone()].into(), reasoning);
            let mut parts = Vec::new();
            for piece in pieces {
                parts.extend(reader.push(&piece));
            }
            parts.extend(reader.finish());
            let (mut content, mut called) = (String::new(), Vec::new());
            for part in parts {
                match part {
                    AnswerPart::Content(text) => content += &text,
                    AnswerPart::Reasoning(_) => {}
                    AnswerPart::Call { name } => called.push((name, String::new())),
                    AnswerPart::Arguments(text) => called.last_mut().unwrap().1 += &text,
                }
            }
            assert_eq!(called.len(), expected.len(), "{name}: {text:?}");
            for ((function, read), expected) in called.iter().zip(expected) {
                let read: serde_json::Value = serde_json::from_str(read)
                    .unwrap_or_else(|error| panic!("{name}: {error}: {read}"));
                assert_eq!(
                    (function.as_str(), &read),
                    ("get_weather", expected),
                    "{name}: {text:?}"
                );
            }
            // Never a part of a mark: at most what the template writes before the first.
            assert!(
                head.contains(content.trim()),
                "{name}: {content:?} of {text:?}"
            );
        }
    }
    assert!(several > 10, "only {several} templates write several calls");
}

fn texts<'c>(pieces: impl IntoIterator<Item = &'c [char]>) -> Vec<String> {
    let pieces = pieces.into_iter();
    pieces.map(|piece| piece.iter().collect()).collect()
}

/// Conversations as variables of a template.
fn conversations() -> BTreeMap<String, Map<String, serde_json::Value>> {
    let system = json!({"role": "system", "content": "You are a pirate. <b>Arr</b> & 'so' on."});
    let user = |content: &str| json!({"role": "user", "content": content});
    let assistant = |content: &str| json!({"role": "assistant", "content": content});
    let tools = json!([{"type": "function", "function": {
        "name": "get_weather", "description": "The weather in a \"city\" — now.",
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "Its name"},
            "days": {"type": "integer", "enum": [1, 3], "default": 1},
            "scale": {"type": ["string", "null"]}}}}}]);
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{"id": "call00001", "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 3, "f": 1.5, "ok": true}}}]});
    let result = json!({"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "{\"sun\": true}"});
    let all = [
        (
            "one question",
            json!({"messages": [user("Hello, wörld! 🦀\n\n  indented\n")]}),
        ),
        (
            "system",
            json!({"messages": [system, user("Who are you?")]}),
        ),
        (
            "developer",
            json!({"messages": [{"role": "developer", "content": "Answer in *one* word."}, user("Who are you?")]}),
        ),
        (
            "turns",
            json!({"messages": [user("1"), assistant("2"), user("3"), assistant(" 4 "), user("5")]}),
        ),
        (
            "system and turns",
            json!({"messages": [system, user("1"), assistant("2"), user("3")]}),
        ),
        (
            "finished",
            json!({"messages": [user("1"), assistant("2")], "add_generation_prompt": false}),
        ),
        (
            "to be continued",
            json!({"messages": [user("1"), assistant("2")]}),
        ),
        ("two users", json!({"messages": [user("1"), user("2")]})),
        (
            "system in the middle",
            json!({"messages": [user("1"), assistant("2"), system, user("3")]}),
        ),
        ("nothing", json!({"messages": []})),
        (
            "parts",
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}),
        ),
        (
            "tools",
            json!({"messages": [system, user("Weather?")], "tools": tools}),
        ),
        (
            "tool call",
            json!({"messages": [user("Weather?"), call, result], "tools": tools}),
        ),
        (
            "tool call and more",
            json!({"messages": [user("Weather?"), call, result, assistant("Sunny"), user("Thanks")], "tools": tools}),
        ),
        (
            "thinking off",
            json!({"messages": [user("Hi")], "enable_thinking": false}),
        ),
        (
            "thoughts",
            json!({"messages": [user("1"), {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"}, user("3"),
            {"role": "assistant", "content": "4", "reasoning_content": "so"}, user("5")], "enable_thinking": true}),
        ),
        (
            "documents",
            json!({"messages": [user("Hi")], "documents": [{"title": "T", "text": "Text"}]}),
        ),
        (
            "unknown role",
            json!({"messages": [{"role": "narrator", "content": "x"}]}),
        ),
        ("no content", json!({"messages": [{"role": "user"}]})),
    ];
    all.into_iter()
        .map(|(name, variables)| {
            let mut variables = variables.as_object().unwrap().clone();
            variables
                .entry("add_generation_prompt")
                .or_insert(true.into());
            for (name, text) in [("bos_token", "<s>"), ("eos_token", "</s>")] {
                variables.insert(name.to_owned(), text.into());
            }
            (name.to_owned(), variables)
        })
        .collect()
}

fn render(
    template: &ChatTemplate,
    variables: &Map<String, serde_json::Value>,
) -> Result<String, ChatTemplateError> {
    let mut extra = variables.clone();
    let messages = extra.remove("messages").unwrap();
    let add_generation_prompt = extra.remove("add_generation_prompt") == Some(true.into());
    template.render(&messages, add_generation_prompt, &extra)
}

fn template(source: &str) -> Result<ChatTemplate, ChatTemplateError> {
    let texts = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    let metadata = Metadata::new(
        "template",
        vec![
            ("tokenizer.ggml.model".to_owned(), Value::from("llama")),
            ("tokenizer.ggml.tokens".to_owned(), Value::from(texts)),
            (
                "tokenizer.ggml.scores".to_owned(),
                Value::from(vec![0.0_f32; 3]),
            ),
            (
                "tokenizer.ggml.token_type".to_owned(),
                Value::from(vec![2, 3, 3]),
            ),
            ("tokenizer.chat_template".to_owned(), Value::from(source)),
        ],
    )
    .unwrap();
    let tokenizer = Tokenizer::from_gguf(&metadata).unwrap();
    Ok(ChatTemplate::from_gguf(&metadata, &tokenizer)?.unwrap())
}

fn templates() -> BTreeMap<String, String> {
    std::fs::read_dir(assets::path("templates").unwrap())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "jinja")
        })
        .map(|path| {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read_to_string(path).unwrap())
        })
        .collect()
}

/// What the oracle says: template, conversation, result.
fn jinja2(
    templates: &BTreeMap<String, String>,
    conversations: &BTreeMap<String, Map<String, serde_json::Value>>,
) -> BTreeMap<String, BTreeMap<String, serde_json::Value>> {
    let work = json!({"templates": templates, "conversations": conversations});
    ask_oracle("render_chat_templates.py", &work)
}
