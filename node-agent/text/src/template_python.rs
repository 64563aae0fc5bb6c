//! What chat templates take from Python: `tojson` as `json.dumps` writes it, `strftime_now`, `raise_exception`, methods on values.
//!
//! Decides: what these do, as Hugging Face's `chat_template_utils.py` defines them. Refuses: to write what `json.dumps` would not.

use std::fmt::Write as _;

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// What a template said when it called `raise_exception`: the source of the error that rendering ends in.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct RaisedByTemplate(pub(crate) String);

pub(crate) fn add_to(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.add_filter("tojson", tojson);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_function("strftime_now", strftime_now);
    environment.add_function("raise_exception", raise_exception);
}

/// Minijinja says that it can loop over `none`, as over nothing; Python cannot. Templates ask before they loop.
fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || value.kind() == ValueKind::Iterable
}

/// What has a length and items for Jinja2: strings, dictionaries and undefined values, too.
fn is_sequence(value: &Value) -> bool {
    use ValueKind::{Map, Seq, String, Undefined};
    matches!(value.kind(), String | Seq | Map | Undefined)
}

/// An undefined value has no items, so its length is 0.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    value
        .len()
        .ok_or_else(|| invalid(format!("length: {} has none", value.kind())))
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let raised = RaisedByTemplate(message.to_string());
    Err(Error::new(ErrorKind::InvalidOperation, "raised by the template").with_source(raised))
}

/// The local time, as Python's `datetime.now().strftime(format)`. Templates write dates with it; there is no other way to tell a model
/// what day it is.
fn strftime_now(format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &jiff::Zoned::now())
        .map_err(|source| invalid(format!("strftime_now({format:?})")).with_source(source))
}

/// `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
fn tojson(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let mut positional = positional.0.into_iter();
    let mut argument = |name: &str| match positional.next() {
        Some(value) => Ok(value),
        None => Ok::<_, Error>(named.get::<Option<Value>>(name)?.unwrap_or_default()),
    };
    let ensure_ascii = argument("ensure_ascii")?.is_true();
    let indent = argument("indent")?;
    let separators = argument("separators")?;
    let sort_keys = argument("sort_keys")?.is_true();
    named.assert_all_used()?;

    let indent = if indent.is_none() || indent.is_undefined() {
        None
    } else if let Some(text) = indent.as_str() {
        Some(text.to_owned())
    } else {
        let width = i64::try_from(indent)?.clamp(0, MAX_INDENT);
        Some(" ".repeat(usize::try_from(width).unwrap_or(0)))
    };
    let (item_separator, key_separator) = if separators.is_none() || separators.is_undefined() {
        let item_separator = if indent.is_some() { "," } else { ", " };
        (item_separator.to_owned(), ": ".to_owned())
    } else {
        let parts: Vec<Value> = separators.try_iter()?.collect();
        match parts.as_slice() {
            [item, key] => (item.to_string(), key.to_string()),
            _ => return Err(invalid("tojson: separators must be a pair")),
        }
    };
    let style = Style {
        ensure_ascii,
        sort_keys,
        indent,
        item_separator,
        key_separator,
    };
    let mut json = String::new();
    style.write(&mut json, value, 0)?;
    Ok(json)
}

/// JSON as `json.dumps` writes it, which is what models have seen.
pub fn python_json(value: &serde_json::Value) -> String {
    let style = Style {
        ensure_ascii: false,
        sort_keys: false,
        indent: None,
        item_separator: ", ".to_owned(),
        key_separator: ": ".to_owned(),
    };
    let mut json = String::new();
    match style.write(&mut json, &Value::from(Serde(value)), 0) {
        Ok(()) => json,
        Err(_) => value.to_string(),
    }
}

/// Wider than anybody writes, narrow enough for nested values.
const MAX_INDENT: i64 = 64;

/// How `json.dumps` is asked to write.
struct Style {
    ensure_ascii: bool,
    sort_keys: bool,
    /// For each level; `None`: all in one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
}

impl Style {
    fn write(&self, json: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => json.push_str("null"),
            ValueKind::Bool => json.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => json.push_str(&number(value)?),
            ValueKind::String => self.write_string(json, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?;
                self.write_items(json, ['[', ']'], depth, items, |json, item| {
                    self.write(json, &item, depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut entries = Vec::new();
                for key in value.try_iter()? {
                    entries.push((key_text(&key)?, value.get_item(&key)?));
                }
                if self.sort_keys {
                    entries.sort_by(|(a, _), (b, _)| a.cmp(b));
                }
                self.write_items(json, ['{', '}'], depth, entries, |json, (key, value)| {
                    self.write_string(json, &key);
                    json.push_str(&self.key_separator);
                    self.write(json, &value, depth + 1)
                })?;
            }
            kind => return Err(invalid(format!("tojson: {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn write_items<T>(
        &self,
        json: &mut String,
        [open, close]: [char; 2],
        depth: usize,
        items: impl IntoIterator<Item = T>,
        mut write: impl FnMut(&mut String, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let new_line = |json: &mut String, depth: usize| {
            if let Some(indent) = &self.indent {
                json.push('\n');
                json.push_str(&indent.repeat(depth));
            }
        };
        json.push(open);
        let mut is_empty = true;
        for item in items {
            if !is_empty {
                json.push_str(&self.item_separator);
            }
            is_empty = false;
            new_line(json, depth + 1);
            write(json, item)?;
        }
        if !is_empty {
            new_line(json, depth);
        }
        json.push(close);
        Ok(())
    }

    fn write_string(&self, json: &mut String, text: &str) {
        json.push('"');
        for character in text.chars() {
            match character {
                '"' => json.push_str("\\\""),
                '\\' => json.push_str("\\\\"),
                '\n' => json.push_str("\\n"),
                '\r' => json.push_str("\\r"),
                '\t' => json.push_str("\\t"),
                '\u{8}' => json.push_str("\\b"),
                '\u{C}' => json.push_str("\\f"),
                '\0'..='\u{1F}' => write_escaped(json, character),
                _ if self.ensure_ascii && !(' '..='~').contains(&character) => {
                    write_escaped(json, character);
                }
                _ => json.push(character),
            }
        }
        json.push('"');
    }
}

/// `\u0000`, in UTF-16 as JSON has it.
fn write_escaped(json: &mut String, character: char) {
    for unit in character.encode_utf16(&mut [0; 2]) {
        // Writing to a string does not fail.
        let _ = write!(json, "\\u{unit:04x}");
    }
}

/// A number as Python's `repr` writes it, which `json.dumps` uses.
fn number(value: &Value) -> Result<String, Error> {
    let text = format(FormatStyle::StrFormat, "{}", std::slice::from_ref(value))?;
    Ok(match text.as_str() {
        "nan" => "NaN".to_owned(),
        "inf" => "Infinity".to_owned(),
        "-inf" => "-Infinity".to_owned(),
        _ => text,
    })
}

fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.to_string()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number => number(key),
        kind => Err(invalid(format!("tojson: keys must be strings, not {kind}"))),
    }
}

fn invalid(what: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, value: serde_json::Value) -> Result<String, Error> {
        let mut environment = Environment::new();
        add_to(&mut environment);
        environment.render_str(
            source,
            minijinja::context! { x => Value::from(Serde(value)) },
        )
    }

    #[track_caller]
    fn renders(source: &str, value: serde_json::Value, expected: &str) {
        assert_eq!(render(source, value).unwrap(), expected, "{source}");
    }

    #[test]
    fn json_is_what_json_dumps_writes() {
        let value = serde_json::json!({
            "b": [1, -2, 1.0, 1.5e-7, 1e16, true, null], "a": {}, "é<&'": "\"\\\n\u{1}\u{7f}é🦀", "c": []
        });
        let dumped =
            r#"{"b": [1, -2, 1.0, 1.5e-07, 1e+16, true, null], "a": {}, "é<&'": "\"\\\n\u0001"#
                .to_owned()
                + "\u{7f}é🦀\", \"c\": []}";
        renders("{{ x | tojson }}", value, &dumped);
        let value = serde_json::json!({"b": [1, {"c": "é🦀"}], "a": []});
        renders(
            "{{ x | tojson(indent=2) }}",
            value.clone(),
            "{\n  \"b\": [\n    1,\n    {\n      \"c\": \"é🦀\"\n    }\n  ],\n  \"a\": []\n}",
        );
        renders(
            "{{ x | tojson(true, none, (',', ':'), sort_keys=true) }}",
            value,
            r#"{"a":[],"b":[1,{"c":"\u00e9\ud83e\udd80"}]}"#,
        );
        assert!(render("{{ missing | tojson }}", serde_json::json!(1)).is_err());
        assert!(render("{{ x | tojson(indnt=2) }}", serde_json::json!(1)).is_err());
    }

    #[test]
    fn values_are_taken_for_what_jinja2_takes_them_for() {
        let value = serde_json::json!([null, "text", [1], {"k": 1}, 1, true]);
        let kinds = "{% for v in x %}{{ v is iterable }}-{{ v is sequence }} {% endfor %}";
        renders(
            kinds,
            value.clone(),
            "False-False True-True True-True True-True False-False False-False ",
        );
        renders(
            "{{ missing is iterable }} {{ missing | length }}",
            value.clone(),
            "True 0",
        );
        renders(
            "{{ x | length }} {{ x[1] | count }} {{ x[3] | length }}",
            value.clone(),
            "6 4 1",
        );
        assert!(render("{{ x[0] | length }}", value).is_err());
    }

    #[test]
    fn dates_are_written_as_asked() {
        let date = render("{{ strftime_now('%d %b %Y|%%') }}", serde_json::json!(1)).unwrap();
        let parsed = jiff::fmt::strtime::parse("%d %b %Y|%%", &date).unwrap();
        assert!(parsed.to_date().unwrap().year() >= 2024, "{date}");
        assert!(render("{{ strftime_now('%!') }}", serde_json::json!(1)).is_err());
    }
}
