//! What an answer has to look like: a JSON schema, a grammar or a regular expression, kept to by ruling out tokens one by one.
//!
//! Decides: which tokens may come next. llguidance computes that; this file tells it the vocabulary and the limits. Refuses: schemas that it
//! cannot keep to to the letter (the error names the keyword), and grammars that need more memory or time than the limits.

use std::fmt;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv,
};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::gbnf;
use crate::grammar_error::GrammarError;
use crate::tokenizer::Tokenizer;

/// What an answer has to look like.
#[derive(Debug, Clone, PartialEq)]
pub enum Grammar {
    /// JSON that is valid by this schema.
    JsonSchema(Value),
    /// A grammar in Lark's form, as llguidance reads it.
    Lark(String),
    /// A grammar in llama.cpp's form.
    Gbnf(String),
    /// The whole answer matches it.
    Regex(String),
}

/// Reads grammars for one vocabulary. Cheap to clone; takes some 20 MB for a vocabulary of 150,000 tokens.
#[derive(Clone)]
pub struct GrammarReader(Arc<ParserFactory>);

/// How far one answer has come in its grammar.
#[derive(Clone)]
pub struct Constraint(Matcher);

/// States of one grammar's lexer, some 2 kB each.
const MAX_LEXER_STATES: usize = 20_000;
/// Symbols of a grammar.
const MAX_GRAMMAR_SIZE: usize = 200_000;
/// Bytes of what a client sends, or of what calls of its tools need, and brackets within brackets: rules that lead to rules are read by functions that call themselves. JSON has a
/// bound of its own for this.
pub(crate) const MAX_TEXT_BYTES: usize = 64 << 10;
const MAX_NESTING: usize = 100;

/// White space between the parts of a JSON text: one space, or a new line with its indentation. A model left free here may never end.
const JSON_WHITE_SPACE: &str = r"( |\n[ ]{0,16})";

impl Grammar {
    fn check_size(&self) -> Result<(), GrammarError> {
        let (bytes, nesting) = match self {
            Self::JsonSchema(schema) => (schema.to_string().len(), 0),
            Self::Lark(text) | Self::Gbnf(text) | Self::Regex(text) => (text.len(), nesting(text)),
        };
        if bytes > MAX_TEXT_BYTES {
            return Err(GrammarError::Size {
                expected: MAX_TEXT_BYTES,
                what: "bytes",
                found: bytes,
            });
        }
        if nesting > MAX_NESTING {
            return Err(GrammarError::Size {
                expected: MAX_NESTING,
                what: "brackets within one another",
                found: nesting,
            });
        }
        Ok(())
    }
}

/// How deep brackets are within one another, those of texts and character classes too.
fn nesting(text: &str) -> usize {
    let (mut depth, mut deepest) = (0usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

impl GrammarReader {
    /// # Errors
    /// The vocabulary has no end of generation.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, GrammarError> {
        let environment: TokEnv = Arc::new(Environment::new(tokenizer)?);
        let slices = SlicedBiasComputer::general_slices();
        let capabilities = InferenceCapabilities::default();
        let factory = ParserFactory::new(&environment, capabilities, &slices);
        let mut factory = factory.map_err(|error| GrammarError::Vocabulary {
            problem: first_line(&error.to_string()),
        })?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.max_lexer_states = MAX_LEXER_STATES;
        limits.max_grammar_size = MAX_GRAMMAR_SIZE;
        limits.verbose_errors = false;
        Ok(Self(Arc::new(factory)))
    }

    /// The beginning of an answer by this grammar.
    ///
    /// # Errors
    /// What is wrong with the grammar, or what of it cannot be kept to.
    pub fn read(&self, grammar: Grammar) -> Result<Constraint, GrammarError> {
        grammar.check_size()?;
        let top = match grammar {
            Grammar::JsonSchema(schema) => TopLevelGrammar::from_json_schema(bounded(schema)),
            Grammar::Lark(grammar) => TopLevelGrammar::from_lark(grammar),
            Grammar::Gbnf(grammar) => TopLevelGrammar::from_lark(gbnf::to_lark(&grammar)?),
            Grammar::Regex(regex) => TopLevelGrammar::from_regex(&regex),
        };
        let mut matcher = Matcher::new(self.0.create_parser(top));
        match matcher.get_error() {
            Some(problem) => Err(GrammarError::Grammar {
                problem: in_our_words(&first_line(&problem)),
            }),
            // Found out only now: a grammar that nothing matches.
            None => match matcher.compute_mask_or_eos() {
                Ok(_) => Ok(Constraint(matcher)),
                Err(error) => Err(GrammarError::Grammar {
                    problem: first_line(&error.to_string()),
                }),
            },
        }
    }
}

impl Constraint {
    /// Rules out (minus infinity) the tokens that may not come next. Ends of generation stay where the answer may end. The error is why
    /// there is no such token.
    pub(crate) fn restrict(&mut self, logits: &mut [f32]) -> Result<(), String> {
        let allowed = self.allowed()?;
        let words = allowed.as_slice();
        for (place, logits) in logits.chunks_mut(u32::BITS as usize).enumerate() {
            match words.get(place).copied().unwrap_or(0) {
                u32::MAX => {}
                0 => logits.fill(f32::NEG_INFINITY),
                word => {
                    for (bit, logit) in logits.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Tells that `token`, which is none that ends the answer, comes next.
    pub(crate) fn accept(&mut self, token: u32) -> Result<(), String> {
        self.0
            .consume_token(token)
            .map_err(|error| first_line(&error.to_string()))
    }

    /// The tokens that must come next, one after the other, none where there is a choice.
    pub(crate) fn forced(&mut self) -> Vec<u32> {
        self.0.compute_ff_tokens()
    }

    fn allowed(&mut self) -> Result<SimpleVob, String> {
        self.0
            .compute_mask_or_eos()
            .map_err(|error| first_line(&error.to_string()))
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Constraint")
    }
}

/// Days that are in every calendar: llguidance would allow the 29th of February in any year.
const DATE: &str = "[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))";
const TIME: &str = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";

/// What `format` may say by JSON Schema (2020-12, Validation, section 7.3). Any other is a remark, of Home Assistant's entities for instance.
const FORMATS: [&str; 19] = [
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "idn-email",
    "idn-hostname",
    "ipv4",
    "ipv6",
    "iri",
    "iri-reference",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "time",
    "uri",
    "uri-reference",
    "uri-template",
    "uuid",
];

/// Puts our own patterns for dates in place of formats, and takes out formats that are remarks, wherever there is a schema.
fn with_formats(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            let format = map.get("format").and_then(Value::as_str);
            let pattern = match format {
                Some("date") => Some(format!("^{DATE}$")),
                Some("date-time") => Some(format!("^{DATE}T{TIME}$")),
                _ => None,
            };
            let is_remark = format.is_some_and(|format| !FORMATS.contains(&format));
            let pattern = pattern.filter(|_| !map.contains_key("pattern"));
            if is_remark || pattern.is_some() {
                map.remove("format");
            }
            map.extend(pattern.map(|pattern| ("pattern".to_owned(), pattern.into())));
            // These hold data.
            let data = ["const", "default", "enum", "examples"];
            let inner = map
                .iter_mut()
                .filter(|(key, _)| !data.contains(&key.as_str()));
            inner.for_each(|(_, value)| with_formats(value));
        }
        Value::Array(values) => values.iter_mut().for_each(with_formats),
        _ => {}
    }
}

/// A schema with our white space, unless it says something of its own; `true` and `false` are schemas too.
pub(crate) fn bounded(mut schema: Value) -> Value {
    with_formats(&mut schema);
    match schema {
        Value::Object(mut map) => {
            map.entry("x-guidance")
                .or_insert_with(|| json!({"whitespace_pattern": JSON_WHITE_SPACE}));
            Value::Object(map)
        }
        Value::Bool(true) => bounded(json!({})),
        other => other,
    }
}

/// llguidance's messages go on with the state of its parser.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_owned()
}

/// What llguidance says of schemas, for whoever does not know llguidance, with the keyword's name.
fn in_our_words(problem: &str) -> String {
    // Of a schema within a grammar, which calls of tools are, the place is ours and not the client's.
    let within = problem.rsplit_once("failed to compile JSON schema: ");
    let problem = within.map_or(problem, |(_, problem)| problem);
    if let Some(keywords) = problem.strip_prefix("Unimplemented keys: ") {
        let keywords = keywords.trim_matches(['[', ']']).replace('"', "`");
        return format!("answers cannot be held to {keywords}");
    }
    if problem.starts_with("oneOf constraints") {
        return "answers cannot be held to `oneOf` where something may be valid by two of its schemas; \
                `anyOf` leaves that open"
            .to_owned();
    }
    if let Some((_, found)) = problem.split_once("'referencing' feature; ref ") {
        return format!(
            "a `$ref` must name a place in the schema itself, such as #/$defs/name, but is {found}"
        );
    }
    if let Some(rest) = problem.strip_prefix("Reference segment ") {
        return format!("a `$ref` leads nowhere: {rest}");
    }
    if let Some(rest) = problem.strip_prefix("patternProperty ") {
        return format!("answers cannot be held to these `patternProperties`: {rest}");
    }
    if let Some(format) = problem.strip_prefix("Unknown format: ") {
        return format!("answers cannot be held to the `format` {format}");
    }
    if let Some(rest) = problem.strip_prefix("Unsatisfiable schema: ") {
        return format!("nothing is valid by this schema: {rest}");
    }
    problem.to_owned()
}

/// A vocabulary as llguidance sees it.
struct Environment {
    tokenizer: Tokenizer,
    trie: TokTrie,
    /// Whether a text in the middle of an answer is made of the same tokens as one at the beginning.
    canonical: bool,
}

impl Environment {
    fn new(tokenizer: &Tokenizer) -> Result<Self, GrammarError> {
        let tokens = 0..tokenizer.vocab_size() as u32;
        let ends: Vec<u32> = tokens
            .clone()
            .filter(|token| tokenizer.is_end_of_generation(*token))
            .collect();
        let first = *ends.first().ok_or(GrammarError::NoEnd)?;
        let words: Vec<Vec<u8>> = tokens.map(|token| word(tokenizer, token)).collect();
        let info = TokRxInfo::new(words.len() as u32, first);
        let probe = "a{\"b\"";
        let ids = tokenizer.encode(probe, false, false).unwrap_or_default();
        let bytes: Vec<u8> = ids
            .iter()
            .flat_map(|token| tokenizer.token_bytes(*token).into_owned())
            .collect();
        Ok(Self {
            tokenizer: tokenizer.clone(),
            trie: TokTrie::from(&info, &words).with_eos_tokens(&ends),
            canonical: bytes == probe.as_bytes(),
        })
    }
}

/// What a token is in a grammar: its bytes; a control token is its name after a byte that is in no text.
fn word(tokenizer: &Tokenizer, token: u32) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(token);
    if !bytes.is_empty() {
        return bytes.into_owned();
    }
    let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
    match tokenizer.control_text(token) {
        Some(name) => word.extend_from_slice(name.as_bytes()),
        None => word.clear(),
    }
    word
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let encode = |text: &str| match self.tokenizer.encode(text, false, false) {
            Ok(tokens) => tokens,
            Err(_) => self.trie.greedy_tokenize(text.as_bytes()),
        };
        self.trie.tokenize_with_greedy_fallback(bytes, encode)
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.canonical
    }
}
