//! Values of arguments in calls that put no quotes around texts: Qwen-Coder's and GLM's.
//!
//! Decides: by the argument's schema, whether a value is a text as it stands there or JSON. What reads calls and what says in a grammar how
//! they look both ask here.

use serde_json::{Value, json};

use crate::schema_object::{list, resolved};
use crate::tool::Tool;

/// How the value of an argument stands there.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum BareValue {
    /// Any text, as it is.
    Text,
    /// Any text but `null`, which is none.
    TextOrNull,
    /// One of these texts, as they are, or `null`.
    OneOf(Vec<Value>),
    /// A text with JSON's quotes, since not every text will do.
    QuotedText,
    /// Anything else, as JSON.
    Json,
}

impl BareValue {
    /// Of an argument of a call of `tool`.
    pub(crate) fn of_argument(tools: &[Tool], tool: &str, argument: &str) -> Self {
        let tool = tools.iter().find(|other| other.name == tool);
        tool.map_or(Self::Json, |tool| {
            Self::of(&tool.parameters, &tool.parameters["properties"][argument])
        })
    }

    /// By `schema`, a part of the whole schema `root`.
    pub(crate) fn of(root: &Value, schema: &Value) -> Self {
        let Ok(schema) = resolved(root, schema) else {
            return Self::Json;
        };
        let Value::Object(map) = schema else {
            return Self::Json;
        };
        let texts: Option<Vec<Value>> = match map.get("const") {
            Some(value) => Some(vec![value.clone()]),
            None => map
                .contains_key("enum")
                .then(|| list(map, "enum").cloned().collect()),
        };
        if let Some(values) = texts {
            return match values.iter().all(stands_for_itself) && !values.is_empty() {
                true => Self::OneOf(values),
                false => Self::Json,
            };
        }
        let free = !RESTRICTING.iter().any(|keyword| map.contains_key(*keyword));
        match map.get("type") {
            Some(Value::String(kind)) if kind == "string" => match free {
                true => Self::Text,
                false => Self::QuotedText,
            },
            Some(kinds) if free && *kinds == json!(["string", "null"]) => Self::TextOrNull,
            Some(kinds) if free && *kinds == json!(["null", "string"]) => Self::TextOrNull,
            Some(_) => Self::Json,
            None => Self::of_choices(root, list(map, "anyOf").chain(list(map, "oneOf"))),
        }
    }

    /// Pydantic's optional texts are choices of a text and of null.
    fn of_choices<'s>(root: &Value, choices: impl Iterator<Item = &'s Value>) -> Self {
        let is_null = |choice: &&Value| choice["type"] == "null";
        let (nulls, others): (Vec<&Value>, Vec<&Value>) = choices.partition(is_null);
        match (nulls.as_slice(), others.as_slice()) {
            ([_], [other]) => match Self::of(root, other) {
                Self::Text => Self::TextOrNull,
                Self::OneOf(mut values) => {
                    values.push(Value::Null);
                    Self::OneOf(values)
                }
                _ => Self::Json,
            },
            _ => Self::Json,
        }
    }

    /// What `text`, a whole value, means. Never fails: a text that is not what it should be is a text.
    pub(crate) fn read(&self, text: &str) -> Value {
        let as_text = || Value::String(text.to_owned());
        let as_json = || serde_json::from_str(text.trim()).unwrap_or_else(|_| as_text());
        match self {
            Self::Text => as_text(),
            Self::TextOrNull if text.trim() == "null" => Value::Null,
            Self::TextOrNull => as_text(),
            Self::OneOf(values) => {
                let same = |value: &&Value| value.as_str().unwrap_or("null") == text.trim();
                values.iter().find(same).cloned().unwrap_or_else(as_text)
            }
            Self::QuotedText => match as_json() {
                quoted @ Value::String(_) => quoted,
                _ => as_text(),
            },
            Self::Json => as_json(),
        }
    }

    /// Whether more of a text that has ended by a mark may follow: JSON's texts may hold marks.
    pub(crate) fn goes_on(&self, text: &str) -> bool {
        let text = text.trim_start();
        matches!(self, Self::QuotedText | Self::Json)
            && text.starts_with(['{', '[', '"'])
            && serde_json::from_str::<Value>(text).is_err_and(|error| error.is_eof())
    }
}

/// Keywords that some texts are not valid by.
const RESTRICTING: [&str; 9] = [
    "allOf",
    "anyOf",
    "format",
    "if",
    "maxLength",
    "minLength",
    "not",
    "oneOf",
    "pattern",
];

/// Whether a value of a list is found again by its text, without quotes.
fn stands_for_itself(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => {
            text != "null" && text.trim() == text && !text.contains('<') && !text.is_empty()
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_say_how_values_stand_there() {
        let root = json!({"$defs": {"Color": {"enum": ["red", "blue"], "type": "string"}}});
        let colors =
            |more: &[Value]| BareValue::OneOf([&[json!("red"), json!("blue")], more].concat());
        for (schema, expected) in [
            (json!({"type": "string"}), BareValue::Text),
            (
                json!({"type": "string", "description": "It"}),
                BareValue::Text,
            ),
            (json!({"type": ["string", "null"]}), BareValue::TextOrNull),
            (
                json!({"anyOf": [{"type": "string"}, {"type": "null"}], "default": null}),
                BareValue::TextOrNull,
            ),
            (
                json!({"type": "string", "pattern": "^a"}),
                BareValue::QuotedText,
            ),
            (json!({"$ref": "#/$defs/Color"}), colors(&[])),
            (
                json!({"allOf": [{"$ref": "#/$defs/Color"}], "default": "red"}),
                colors(&[]),
            ),
            (
                json!({"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}),
                colors(&[Value::Null]),
            ),
            (
                json!({"const": "red"}),
                BareValue::OneOf(vec![json!("red")]),
            ),
            (json!({"enum": [1, "a"]}), BareValue::Json),
            (json!({"enum": ["<", "a"]}), BareValue::Json),
            (json!({"type": "integer"}), BareValue::Json),
            (
                json!({"anyOf": [{"type": "string"}, {"type": "integer"}]}),
                BareValue::Json,
            ),
            (json!({"$ref": "#/$defs/None"}), BareValue::Json),
            (json!({}), BareValue::Json),
            (json!(true), BareValue::Json),
        ] {
            assert_eq!(BareValue::of(&root, &schema), expected, "{schema}");
        }
    }

    #[test]
    fn texts_are_read_by_what_they_should_be() {
        for (how, text, expected) in [
            (BareValue::Text, "12", json!("12")),
            (BareValue::Text, "null", json!("null")),
            (BareValue::TextOrNull, "12", json!("12")),
            (BareValue::TextOrNull, "null", json!(null)),
            (
                BareValue::OneOf(vec![json!("3"), json!(null)]),
                "3",
                json!("3"),
            ),
            (
                BareValue::OneOf(vec![json!("3"), json!(null)]),
                "null",
                json!(null),
            ),
            (BareValue::QuotedText, "\"2\"", json!("2")),
            (BareValue::QuotedText, "2", json!("2")),
            (BareValue::Json, "{\"a\": [2]}", json!({"a": [2]})),
            (BareValue::Json, "Oslo", json!("Oslo")),
        ] {
            assert_eq!(how.read(text), expected, "{how:?} {text}");
        }
        assert!(BareValue::Json.goes_on("{\"a\": \"b"));
        assert!(!BareValue::Json.goes_on("{\"a\": 1}"));
        assert!(!BareValue::Json.goes_on("[a"));
        assert!(!BareValue::Text.goes_on("{"));
    }
}
