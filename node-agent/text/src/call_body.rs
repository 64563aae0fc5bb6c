//! What is between the marks of a call: a name and arguments, in the ways that families write them.
//!
//! Decides: what a call's text means. Refuses: text that is no call (`None`).

use serde_json::{Map, Value};

use crate::answer_form::{CALL_ID, CallBody, DEEPSEEK_SEPARATOR, GEMMA_QUOTE, MISTRAL_ARGUMENTS};
use crate::keyed_arguments;

/// A call, read whole.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    pub name: String,
    /// A JSON object.
    pub arguments: String,
}

/// What the beginning of a call tells.
#[derive(Debug, PartialEq)]
pub enum Head {
    /// Its arguments begin after `length` bytes.
    Found { name: String, length: usize },
    /// It may become one.
    Partial,
    /// It does not begin like a call whose arguments come last.
    Other,
}

/// The calls in a whole text between marks; `None`: it cannot be read.
pub fn read(body: CallBody, text: &str) -> Option<Vec<Call>> {
    match body {
        CallBody::Json(_) | CallBody::JsonList => json_calls(text),
        CallBody::NameThenJson(separator) => {
            let (name, arguments) = text.split_once(separator)?;
            let arguments: Value = serde_json::from_str(arguments.trim()).ok()?;
            Some(vec![call(&plain_name(name, separator), arguments)?])
        }
        // With arguments, it is read while it comes.
        CallBody::Keyed(marks) => {
            let name = keyed_arguments::without_arguments(marks, text)?;
            Some(vec![call(name, Value::Object(Map::new()))?])
        }
        CallBody::Gemma => gemma_call(text).map(|call| vec![call]),
    }
}

fn json_calls(text: &str) -> Option<Vec<Call>> {
    let one = |value: Value| {
        let Value::Object(mut call_object) = value else {
            return None;
        };
        let name = call_object.get("name")?.as_str()?.to_owned();
        let arguments = ["arguments", "parameters"]
            .into_iter()
            .find_map(|key| call_object.remove(key))
            .unwrap_or_else(|| Value::Object(Map::new()));
        call(&name, arguments)
    };
    let calls: Vec<Call> = match serde_json::from_str(text.trim()).ok()? {
        Value::Array(values) => values.into_iter().map(one).collect::<Option<_>>()?,
        value => vec![one(value)?],
    };
    (!calls.is_empty()).then_some(calls)
}

/// A call with arguments that are an object, or one written as a string.
fn call(name: &str, arguments: Value) -> Option<Call> {
    let arguments = match arguments {
        Value::Object(map) => Value::Object(map).to_string(),
        Value::String(text) => match serde_json::from_str(&text).ok()? {
            Value::Object(_) => text,
            _ => return None,
        },
        _ => return None,
    };
    let named = !name.is_empty() && !name.contains(char::is_whitespace);
    named.then(|| Call {
        name: name.to_owned(),
        arguments,
    })
}

/// Gemma 4: `call:f{a:1,b:<|"|>text<|"|>}`. JSON with its own quotes, and keys without any.
fn gemma_call(text: &str) -> Option<Call> {
    let (name, rest) = text.trim().strip_prefix("call:")?.split_once('{')?;
    let mut json = "{".to_owned();
    // Every second piece is a text.
    for (nth, piece) in rest.split(GEMMA_QUOTE).enumerate() {
        match nth % 2 {
            0 => json += &quoted_keys(piece),
            _ => json += &Value::from(piece).to_string(),
        }
    }
    call(name, serde_json::from_str(&json).ok()?)
}

/// Puts quotes around names that a colon follows.
fn quoted_keys(text: &str) -> String {
    let mut quoted = String::new();
    let mut word = String::new();
    for character in text.chars() {
        let of_word =
            !matches!(character, ',' | ':' | '{' | '}' | '[' | ']') && !character.is_whitespace();
        if of_word {
            word.push(character);
            continue;
        }
        let word = std::mem::take(&mut word);
        match character == ':' && !word.is_empty() {
            true => quoted += &Value::from(word).to_string(),
            false => quoted += &word,
        }
        quoted.push(character);
    }
    quoted + &word
}

/// The head of a call as JSON, of the next one in a list too: all up to the arguments' opening brace.
pub fn json_head(text: &str) -> Head {
    let mut scan = Scan { text, at: 0 };
    let mut name = None;
    let found = (|| {
        scan.skip(|c| c.is_whitespace() || matches!(c, '[' | ','));
        scan.expect("{")?;
        scan.expect("\"name\"")?;
        scan.expect(":")?;
        name = Some(scan.string()?);
        scan.expect(",")?;
        let key = scan.string()?;
        if !matches!(key.as_str(), "arguments" | "parameters") {
            return Err(Head::Other);
        }
        scan.expect(":")?;
        scan.space();
        match scan.rest().chars().next() {
            None => Err(Head::Partial),
            Some('{') => Ok(scan.at),
            Some(_) => Err(Head::Other),
        }
    })();
    match (found, name) {
        (Ok(length), Some(name)) if !name.is_empty() => Head::Found { name, length },
        (Ok(_), _) => Head::Other,
        (Err(head), _) => head,
    }
}

/// The head of a call that is a name, a mark, and JSON.
pub fn name_head(text: &str, separator: &str) -> Head {
    let Some((name, rest)) = text.split_once(separator) else {
        return Head::Partial;
    };
    let before = name.len() + separator.len();
    // DeepSeek R1 writes what kind of call it is, and the name on the line after it.
    let Some(brace) = rest.find('{') else {
        return Head::Partial;
    };
    let between = &rest[..brace];
    let name = match between.trim() {
        "" => plain_name(name, separator),
        other => match other.strip_suffix("```json") {
            Some(own_line) => own_line.trim().to_owned(),
            None => return Head::Other,
        },
    };
    match name.is_empty() || name.contains(char::is_whitespace) {
        true => Head::Other,
        false => Head::Found {
            name,
            length: before + brace,
        },
    }
}

fn plain_name(name: &str, separator: &str) -> String {
    let name = name.trim();
    match separator {
        MISTRAL_ARGUMENTS => name.split(CALL_ID).next().unwrap_or(name).trim().to_owned(),
        DEEPSEEK_SEPARATOR => name.to_owned(),
        // Kimi writes `functions.f:0`, and sometimes leaves out either end.
        _ => {
            let name = name.strip_prefix("functions.").unwrap_or(name);
            let numbered = name.rsplit_once(':');
            let number = |number: &str| number.bytes().all(|byte| byte.is_ascii_digit());
            match numbered.filter(|(_, last)| number(last)) {
                Some((plain, _)) => plain.to_owned(),
                None => name.to_owned(),
            }
        }
    }
}

/// Reads JSON that may not be all there.
struct Scan<'t> {
    text: &'t str,
    at: usize,
}

impl<'t> Scan<'t> {
    fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }

    fn skip(&mut self, skipped: impl Fn(char) -> bool) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start_matches(skipped).len();
    }

    fn space(&mut self) {
        self.skip(char::is_whitespace);
    }

    fn expect(&mut self, token: &str) -> Result<(), Head> {
        self.space();
        let rest = self.rest();
        if rest.starts_with(token) {
            self.at += token.len();
            return Ok(());
        }
        Err(match token.starts_with(rest) {
            true => Head::Partial,
            false => Head::Other,
        })
    }

    fn string(&mut self) -> Result<String, Head> {
        self.expect("\"")?;
        let rest = self.rest();
        let mut escaped = false;
        for (at, byte) in rest.bytes().enumerate() {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => {
                    let quoted = &self.text[self.at - 1..=self.at + at];
                    self.at += at + 1;
                    return serde_json::from_str(quoted).map_err(|_| Head::Other);
                }
                _ => {}
            }
        }
        Err(Head::Partial)
    }
}

/// Finds where a JSON object ends, in a text that comes in pieces.
#[derive(Debug, Clone)]
pub struct JsonEnd {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl JsonEnd {
    /// Before its opening brace.
    pub fn outside() -> Self {
        Self {
            depth: 0,
            in_string: false,
            escaped: false,
        }
    }

    /// Behind its opening brace.
    pub fn inside() -> Self {
        Self {
            depth: 1,
            ..Self::outside()
        }
    }

    /// Takes all of `text`, or as much as belongs to the object: so many bytes, if it ends there.
    pub fn find(&mut self, text: &str) -> Option<usize> {
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' => self.in_string = !self.in_string,
                _ if self.in_string => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(at + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}
