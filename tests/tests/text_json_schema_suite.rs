//! The official JSON-Schema-Test-Suite: each of its schemas is kept to or refused by the name of what cannot be kept to, and of what the suite
//! calls invalid no grammar allows anything. And answers by schemas of all kinds, drawn without a model, are valid.
//!
//! Needs `make assets`: the suite, vocabularies, and a Python with jsonschema.

use std::fs;

use prima_gguf::Gguf;
use prima_tests::local_ring::smollm2;
use prima_tests::python::ask_oracle;
use prima_tests::{assets, inputs};
use prima_text::{Constraint, Grammar, GrammarReader, Sampler, SamplingParams, Tokenizer};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// A schema of the suite.
#[derive(Deserialize)]
struct Group {
    /// The file and what the suite says it is about.
    #[serde(rename = "description")]
    name: String,
    schema: Value,
    #[serde(rename = "tests")]
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    data: Value,
    valid: bool,
}

/// All of its schemas. Panics if the suite has not been fetched.
fn groups() -> Vec<Group> {
    let folder = assets::path("json-schema-suite").unwrap_or_else(|error| panic!("{error}"));
    let files = fs::read_dir(folder).expect("the suite");
    let mut files: Vec<_> = files.map(|file| file.expect("a file").path()).collect();
    files.sort();
    let mut all = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).expect("a file of the suite");
        let groups: Vec<Group> = serde_json::from_str(&text).expect("JSON of the suite");
        let stem = file.file_stem().expect("a name").to_string_lossy();
        all.extend(groups.into_iter().map(|group| Group {
            name: format!("{stem}: {}", group.name),
            ..group
        }));
    }
    all
}

/// What a refusal may name.
const KEYWORDS: [&str; 39] = [
    "$dynamicAnchor",
    "$dynamicRef",
    "$ref",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "if",
    "items",
    "maxContains",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minContains",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "not",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "propertyNames",
    "then",
    "type",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
];

/// Whether a refusal names a keyword that is in the schema, or says that nothing is valid by it.
fn names_the_reason(message: &str, schema: &Value) -> bool {
    let named = |key: &str| KEYWORDS.contains(&key) && message.contains(key);
    match schema {
        Value::Bool(false) => message.contains("nothing is valid"),
        Value::Object(map) => map
            .iter()
            .any(|(key, value)| named(key) || names_the_reason(message, value)),
        Value::Array(values) => values.iter().any(|value| names_the_reason(message, value)),
        _ => false,
    }
}

/// Whether an answer may be exactly `text`.
fn allows(constraint: &Constraint, text: &str, tokenizer: &Tokenizer) -> bool {
    let mut sampler = Sampler::new(SamplingParams::default()).unwrap();
    sampler.constrain(Some(constraint.clone()));
    let tokens = tokenizer.encode(text, false, false).unwrap();
    if tokens.iter().any(|token| sampler.accept(*token).is_err()) {
        return false;
    }
    // Everything but the end is unlikely.
    let mut logits = vec![-50.0; tokenizer.vocab_size()];
    logits[tokenizer.eos().unwrap() as usize] = 50.0;
    let next = sampler.sample(&logits, None).unwrap().token;
    tokenizer.is_end_of_generation(next)
}

#[test]
fn schemas_are_kept_to_or_refused_by_keyword() {
    let vocabulary = Gguf::open(&assets::path("vocab/ggml-vocab-qwen2.gguf").unwrap()).unwrap();
    let tokenizer = Tokenizer::from_gguf(&vocabulary.metadata).unwrap();
    let grammars = GrammarReader::new(&tokenizer).unwrap();
    let (mut kept, mut refused, mut invalid, mut valid, mut allowed) = (0, 0, 0, 0, 0);
    let mut problems = Vec::new();
    for group in groups() {
        let name = &group.name;
        let constraint = match grammars.read(Grammar::JsonSchema(group.schema.clone())) {
            Ok(constraint) => constraint,
            Err(error) => {
                refused += 1;
                let message = error.to_string();
                if !names_the_reason(&message, &group.schema) {
                    problems.push(format!("{name}: {message:?} for {}", group.schema));
                }
                continue;
            }
        };
        kept += 1;
        for case in &group.cases {
            let texts = [case.data.to_string(), spaced(&case.data)];
            let said = texts
                .iter()
                .any(|text| allows(&constraint, text, &tokenizer));
            match case.valid {
                true => {
                    valid += 1;
                    allowed += usize::from(said);
                }
                false => {
                    invalid += 1;
                    if said {
                        problems.push(format!(
                            "{name}: {} is allowed by {}",
                            case.data, group.schema
                        ));
                    }
                }
            }
        }
    }
    eprintln!(
        "{kept} schemas kept to, {refused} refused; {invalid} invalid texts, {allowed} of {valid} valid ones allowed"
    );
    // A grammar that allows nothing would refuse what is invalid, too.
    assert!(kept >= 140 && invalid >= 200, "{kept}, {invalid}");
    assert!(10 * allowed >= 9 * valid, "{allowed} of {valid}");
    assert!(
        problems.is_empty(),
        "{} problems\n{}",
        problems.len(),
        problems.join("\n")
    );
}

/// With a space behind each comma and colon, as models write.
fn spaced(value: &Value) -> String {
    match value {
        Value::Array(values) => {
            let values: Vec<String> = values.iter().map(spaced).collect();
            format!("[{}]", values.join(", "))
        }
        Value::Object(map) => {
            let entry = |(key, value): (&String, &Value)| {
                format!("{}: {}", Value::from(key.as_str()), spaced(value))
            };
            let entries: Vec<String> = map.iter().map(entry).collect();
            format!("{{{}}}", entries.join(", "))
        }
        other => other.to_string(),
    }
}

/// Answers to draw for each schema, and tokens that one may have: nearly all end before.
const DRAWS: u64 = 40;
const MOST_TOKENS: usize = 400;

/// What a grammar allows through a model's own tokens is drawn, unlikely things too, and shown to another program. (What models say is tested with
/// few answers by the same schemas: tests/clients/test_schemas.py.)
#[test]
fn drawn_answers_are_valid() {
    let file = Gguf::open(&smollm2()).unwrap();
    let tokenizer = Tokenizer::from_gguf(&file.metadata).unwrap();
    let grammars = GrammarReader::new(&tokenizer).unwrap();
    let logits = of_characters(&tokenizer);
    let schemas = fs::read_to_string(inputs::file("tests/clients/schemas.json")).unwrap();
    let schemas: Map<String, Value> = serde_json::from_str(&schemas).unwrap();
    let mut drawn = Map::new();
    let mut ended = 0;
    for (name, schema) in schemas {
        let constraint = grammars.read(Grammar::JsonSchema(schema.clone()));
        let constraint = constraint.unwrap();
        let answers: Vec<String> = (0..DRAWS)
            .filter_map(|seed| draw(&constraint, &tokenizer, &logits, seed))
            .collect();
        assert!(answers.len() >= 20, "{name}: {} ended", answers.len());
        ended += answers.len();
        drawn.insert(name, json!({"schema": schema, "answers": answers}));
    }
    assert!(ended >= 500, "{ended} ended");
    let wrong: Vec<String> = ask_oracle("validate_json.py", &drawn);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Logits by which mostly single characters are drawn, so that all that a grammar allows is, and soon the end of a text or of all.
fn of_characters(tokenizer: &Tokenizer) -> Vec<f32> {
    let mut logits = vec![0.0; tokenizer.vocab_size()];
    for character in ' '..='~' {
        let tokens = tokenizer.encode(&character.to_string(), false, false);
        if let [token] = tokens.unwrap()[..] {
            logits[token as usize] = if character == '"' { 11.0 } else { 8.0 };
        }
    }
    logits[tokenizer.eos().unwrap() as usize] = 12.0;
    logits
}

/// `None` if it does not end.
fn draw(
    constraint: &Constraint,
    tokenizer: &Tokenizer,
    logits: &[f32],
    seed: u64,
) -> Option<String> {
    let params = SamplingParams {
        seed,
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::new(params).unwrap();
    sampler.constrain(Some(constraint.clone()));
    let mut tokens = Vec::new();
    while tokens.len() < MOST_TOKENS {
        let token = sampler.sample(logits, None).unwrap().token;
        if tokenizer.is_end_of_generation(token) {
            return Some(tokenizer.decode(&tokens));
        }
        sampler.accept(token).unwrap();
        tokens.push(token);
    }
    None
}
