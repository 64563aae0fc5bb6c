//! Reads the bodies of the generation routes: the fields that chat completions and completions have in common, each
//! checked for type and range. The answer to a wrong field has its name, what it must be and what was found. As in
//! other OpenAI-compatible servers, `null` means absent and unknown fields are ignored.

use std::ops::RangeInclusive;

use axum::http::{HeaderMap, header};
use prima_text::SamplingParams;
use serde_json::{Map, Value};

use super::openai_error::ApiError;
use super::request_id;

/// The most bytes of a request's body. A prompt of 131,072 token ids written as JSON numbers stays below this.
pub const MAX_BODY_BYTES: usize = 4 << 20;
/// The most JSON values of a body, since each may take 300 bytes of memory: for such a prompt, and some more.
pub const MAX_VALUES: usize = 160 << 10;
/// Answers per prompt (OpenAI's `n`): each holds a KV cache on every member.
pub const MAX_CHOICES: usize = 8;
/// OpenAI allows 4; agents often send more.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 256;
const MAX_LOGIT_BIASES: usize = 1024;
/// Browsers send it along with requests of pages, also where they leave out `Origin`.
const SEC_FETCH_SITE: &str = "sec-fetch-site";
pub const MAX_TOP_LOGPROBS: usize = 20;

/// The options that both routes take.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationOptions {
    pub sampling: SamplingParams,
    pub max_tokens: Option<usize>,
    pub stop: Vec<String>,
    pub choices: usize,
    pub stream: bool,
    /// A last chunk with the token counts.
    pub include_usage: bool,
}

/// A web page must declare its body as JSON: a browser asks for permission before it sends that to another origin, and sends a body of no
/// type, or of a form's, without asking. Browsers say where a request comes from. Whoever does not say so is a program, and may leave the
/// type out, as clients of Ollama do, or call the body a form, as curl does.
pub fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let content_type = headers.get(header::CONTENT_TYPE);
    let from_a_page = headers.contains_key(header::ORIGIN) || headers.contains_key(SEC_FETCH_SITE);
    if !from_a_page || content_type.is_some_and(|value| is_json(value.as_bytes())) {
        return Ok(());
    }
    Err(ApiError::MediaType {
        found: content_type.map_or("no content type".into(), |value| {
            shown(&String::from_utf8_lossy(value.as_bytes()))
        }),
    })
}

/// The JSON object that is a request's body.
pub fn object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    if values_at_most(body) > MAX_VALUES {
        return Err(ApiError::TooManyValues { limit: MAX_VALUES });
    }
    match serde_json::from_slice(body) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(ApiError::NotJson {
            problem: format!("it is {}", kind_of(&other)),
        }),
        Err(error) => Err(ApiError::NotJson {
            problem: error.to_string(),
        }),
    }
}

/// Outside of strings, every value of a JSON text but the first has a comma, a bracket or a brace before it.
pub fn values_at_most(json: &[u8]) -> usize {
    let mut values = 1;
    let mut in_string = false;
    let mut escaped = false;
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b',' | b'[' | b'{' if !in_string => values += 1,
            _ => {}
        }
    }
    values
}

impl GenerationOptions {
    /// `vocabulary`: number of tokens, which bounds the ids in `logit_bias`.
    pub fn parse(fields: &Fields<'_>, vocabulary: usize) -> Result<Self, ApiError> {
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let include_usage = match fields.object("stream_options")? {
            None => false,
            Some(_) if !stream => {
                return Err(ApiError::invalid(
                    "stream_options",
                    "stream_options is only allowed when stream is true",
                ));
            }
            Some(options) => options.boolean("include_usage")?.unwrap_or(false),
        };
        Ok(Self {
            sampling: sampling(fields, vocabulary)?,
            max_tokens: max_tokens(fields)?,
            stop: stop(fields)?,
            choices: fields.integer("n", 1..=MAX_CHOICES as i64)?.unwrap_or(1) as usize,
            stream,
            include_usage,
        })
    }
}

/// A JSON object whose fields are read by name and type.
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Where the object is inside the body: `""` or `stream_options.`.
    path: String,
}

impl<'a> Fields<'a> {
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Self::at(map, "")
    }

    pub fn at(map: &'a Map<String, Value>, path: impl Into<String>) -> Self {
        Self {
            map,
            path: path.into(),
        }
    }

    /// Those of its fields that another API has under another name, by that name.
    pub fn renamed(&self, names: &[(&str, &str)]) -> Map<String, Value> {
        let found = names
            .iter()
            .filter_map(|(theirs, ours)| Some(((*ours).to_owned(), self.get(theirs)?.clone())));
        found.collect()
    }

    pub fn to_map(&self) -> Map<String, Value> {
        self.map.clone()
    }

    /// The fields of an object inside the body, which stands at `path`.
    pub fn of(value: &'a Value, path: &str) -> Result<Self, ApiError> {
        let map = value
            .as_object()
            .ok_or_else(|| ApiError::invalid(path, format!("{path} must be an object")))?;
        Ok(Self::at(map, format!("{path}.")))
    }

    /// The field's value unless absent or null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    pub fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    pub fn string(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    pub fn array(&self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        self.read(name, "an array", |value| {
            value.as_array().map(Vec::as_slice)
        })
    }

    pub fn object(&self, name: &str) -> Result<Option<Fields<'a>>, ApiError> {
        let path = format!("{}{name}.", self.path);
        let map = self.read(name, "an object", Value::as_object)?;
        Ok(map.map(|map| Fields::at(map, path)))
    }

    pub fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let expected = match *range.end() {
            i64::MAX => format!("an integer of at least {}", range.start()),
            end => format!("an integer from {} to {end}", range.start()),
        };
        self.read(name, &expected, |value| {
            value.as_i64().filter(|number| range.contains(number))
        })
    }

    pub fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f32>, ApiError> {
        let expected = format!("a number from {} to {}", range.start(), range.end());
        self.read(name, &expected, |value| {
            let number = value.as_f64().filter(|number| range.contains(number));
            number.map(|number| number as f32)
        })
    }

    /// An error about field `name` that says what it `must` be and what it is.
    pub fn wrong(&self, name: &str, must: &str, found: &Value) -> ApiError {
        let param = format!("{}{name}", self.path);
        let problem = format!(
            "{param} must be {must}, but is {}",
            shown(&found.to_string())
        );
        ApiError::invalid(param, problem)
    }

    pub fn missing(&self, name: &str) -> ApiError {
        let param = format!("{}{name}", self.path);
        let problem = format!("the body lacks `{param}`");
        ApiError::invalid(param, problem)
    }

    fn read<T>(
        &self,
        name: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        convert(value)
            .map(Some)
            .ok_or_else(|| self.wrong(name, expected, value))
    }
}

/// `[0, vocabulary)`, the ids that the model knows.
pub fn token_id(value: &Value, vocabulary: usize) -> Option<u32> {
    let id = u32::try_from(value.as_u64()?).ok()?;
    ((id as usize) < vocabulary).then_some(id)
}

/// OpenAI's defaults; a seed of our own where none is given.
fn sampling(fields: &Fields<'_>, vocabulary: usize) -> Result<SamplingParams, ApiError> {
    let defaults = SamplingParams::default();
    // llama.cpp says repeat_penalty, vLLM and Hugging Face repetition_penalty.
    let repetition_penalty = match fields.number("repeat_penalty", 0.01..=10.0)? {
        Some(penalty) => Some(penalty),
        None => fields.number("repetition_penalty", 0.01..=10.0)?,
    };
    let seed = fields.integer("seed", i64::MIN..=i64::MAX)?;
    Ok(SamplingParams {
        temperature: fields
            .number("temperature", 0.0..=2.0)?
            .unwrap_or(defaults.temperature),
        // Below 0 means off, as in llama.cpp and vLLM.
        top_k: fields
            .integer("top_k", -1..=i64::from(i32::MAX))?
            .map_or(defaults.top_k, |k| k.max(0) as usize),
        top_p: fields.number("top_p", 0.0..=1.0)?.unwrap_or(defaults.top_p),
        min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(defaults.min_p),
        repetition_penalty: repetition_penalty.unwrap_or(defaults.repetition_penalty),
        frequency_penalty: fields
            .number("frequency_penalty", -2.0..=2.0)?
            .unwrap_or(defaults.frequency_penalty),
        presence_penalty: fields
            .number("presence_penalty", -2.0..=2.0)?
            .unwrap_or(defaults.presence_penalty),
        logit_bias: logit_bias(fields, vocabulary)?,
        // Any integer is a seed: only its bits count.
        seed: seed.map_or_else(request_id::random, |seed| seed as u64),
    })
}

fn logit_bias(fields: &Fields<'_>, vocabulary: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(biases) = fields.object("logit_bias")? else {
        return Ok(Vec::new());
    };
    if biases.map.len() > MAX_LOGIT_BIASES {
        return Err(ApiError::invalid(
            "logit_bias",
            format!(
                "logit_bias must name at most {MAX_LOGIT_BIASES} tokens, but names {}",
                biases.map.len()
            ),
        ));
    }
    let read = |name: &String| {
        let id = name
            .parse::<u32>()
            .ok()
            .filter(|id| (*id as usize) < vocabulary);
        let id = id.ok_or_else(|| {
            ApiError::invalid(
                "logit_bias",
                format!(
                    "a key of logit_bias must be a token id below {vocabulary}, but is {}",
                    shown(name)
                ),
            )
        })?;
        let bias = biases.number(name, -100.0..=100.0)?.unwrap_or(0.0);
        Ok((id, bias))
    };
    biases.map.keys().map(read).collect()
}

fn max_tokens(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    // The newer name wins, as in OpenAI's API.
    for name in ["max_completion_tokens", "max_tokens"] {
        let Some(value) = fields.get(name) else {
            continue;
        };
        return match value.as_i64() {
            // So say llama.cpp's and LM Studio's clients.
            Some(-1) => Ok(Some(usize::MAX)),
            Some(tokens @ 1..) => Ok(Some(usize::try_from(tokens).unwrap_or(usize::MAX))),
            _ => {
                let must = "an integer of at least 1, or -1 for no limit";
                Err(fields.wrong(name, must, value))
            }
        };
    }
    Ok(None)
}

fn stop(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let Some(value) = fields.get("stop") else {
        return Ok(Vec::new());
    };
    let strings = match value {
        Value::String(one) => Some(vec![one.clone()]),
        Value::Array(several) if several.len() <= MAX_STOPS => several
            .iter()
            .map(|stop| stop.as_str().map(String::from))
            .collect(),
        _ => None,
    };
    strings
        .filter(|all| all.iter().all(|s| (1..=MAX_STOP_BYTES).contains(&s.len())))
        .ok_or_else(|| {
            let must = format!(
                "a string of 1 to {MAX_STOP_BYTES} bytes or an array of at most {MAX_STOPS} of them"
            );
            fields.wrong("stop", &must, value)
        })
}

fn is_json(content_type: &[u8]) -> bool {
    let essence = content_type.split(|byte| *byte == b';').next();
    essence.is_some_and(|essence| {
        essence
            .trim_ascii()
            .eq_ignore_ascii_case(b"application/json")
    })
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// What a client sent, short enough for a message.
pub fn shown(text: &str) -> String {
    const SHOWN: usize = 60;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(body: Value) -> Result<GenerationOptions, ApiError> {
        let Value::Object(map) = body else {
            panic!("not an object")
        };
        GenerationOptions::parse(&Fields::new(&map), 100)
    }

    fn refused_param(body: Value) -> String {
        let error = parse(body.clone()).expect_err(&body.to_string());
        error.body()["error"]["param"].as_str().unwrap().to_string()
    }

    #[test]
    fn every_field_arrives() {
        let options = parse(json!({
            "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repeat_penalty": 1.1,
            "presence_penalty": -1, "frequency_penalty": 2, "logit_bias": {"7": -100, "8": 1.5}, "seed": -3,
            "max_tokens": 5, "max_completion_tokens": 6, "stop": ["a", "b"], "n": 3, "stream": true,
            "stream_options": {"include_usage": true}, "unknown": {"ignored": []}, "tools": [], "user": null,
            "response_format": {"type": "text"},
        }));
        let expected = GenerationOptions {
            sampling: SamplingParams {
                temperature: 0.5,
                top_k: 40,
                top_p: 0.9,
                min_p: 0.05,
                repetition_penalty: 1.1,
                frequency_penalty: 2.0,
                presence_penalty: -1.0,
                logit_bias: vec![(7, -100.0), (8, 1.5)],
                seed: -3i64 as u64,
            },
            max_tokens: Some(6),
            stop: vec!["a".into(), "b".into()],
            choices: 3,
            stream: true,
            include_usage: true,
        };
        assert_eq!(options.unwrap(), expected);
    }

    #[test]
    fn an_empty_body_means_the_defaults_and_a_new_seed_each_time() {
        let (one, other) = (
            parse(json!({})).unwrap(),
            parse(json!({"stop": null})).unwrap(),
        );
        assert_ne!(one.sampling.seed, other.sampling.seed);
        assert_eq!((one.max_tokens, one.choices, one.stream), (None, 1, false));
        assert_eq!((one.sampling.temperature, one.sampling.top_p), (1.0, 1.0));
    }

    #[test]
    fn a_wrong_field_is_named() {
        let cases = [
            ("temperature", json!([-0.1, 2.1, "1", true, []])),
            ("top_p", json!([-0.1, 1.1, "x"])),
            ("top_k", json!([-2, 1.5, "x"])),
            ("min_p", json!([-0.1, 1.1])),
            ("repeat_penalty", json!([0, 11])),
            ("repetition_penalty", json!([0, "x"])),
            ("presence_penalty", json!([-2.1, 2.1])),
            ("frequency_penalty", json!([-2.1, 2.1])),
            ("seed", json!([1.5, "x", 18446744073709551615u64])),
            ("max_tokens", json!([0, -2, 1.5, "5"])),
            ("max_completion_tokens", json!([0])),
            ("n", json!([0, MAX_CHOICES + 1, "1"])),
            (
                "stop",
                json!([
                    "",
                    [""],
                    [1],
                    {},
                    vec!["x"; MAX_STOPS + 1],
                    "x".repeat(MAX_STOP_BYTES + 1)
                ]),
            ),
            ("stream", json!(["true", 1])),
            ("stream_options", json!([{"include_usage": true}, "x"])),
            ("logit_bias", json!([[1], {"100": 1}, {"x": 1}])),
        ];
        for (field, values) in cases {
            for value in values.as_array().unwrap() {
                assert_eq!(refused_param(json!({ field: value })), field, "{value}");
            }
        }
        assert_eq!(
            refused_param(json!({"logit_bias": {"5": 101}})),
            "logit_bias.5"
        );
        let nested = json!({"stream": true, "stream_options": {"include_usage": 1}});
        assert_eq!(refused_param(nested), "stream_options.include_usage");
    }

    #[test]
    fn values_are_counted_before_they_are_parsed() {
        let numbers = |count: usize| format!("{{\"a\": [{}]}}", vec!["0"; count].join(","));
        // The object and the array are values, too.
        assert!(object(numbers(MAX_VALUES - 2).as_bytes()).is_ok());
        let objects = format!("{{\"a\": [{}{{}}]}}", "{},".repeat(MAX_VALUES / 2));
        for body in [numbers(MAX_VALUES - 1), "[".repeat(MAX_VALUES), objects] {
            let error = object(body.as_bytes()).unwrap_err();
            assert!(matches!(error, ApiError::TooManyValues { .. }), "{error}");
        }
        let text = r#"\" ,[{"#.repeat(MAX_VALUES);
        assert!(object(format!("{{\"a\": \"{text}\"}}").as_bytes()).is_ok());
    }

    #[test]
    fn what_was_found_is_shown_short() {
        let error = parse(json!({"temperature": "é".repeat(1000)}))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("temperature must be a number from 0 to 2, but is \"éé"),
            "{error}"
        );
        assert!(error.chars().count() < 120, "{error}");
    }
}
