//! Values of arguments in calls that put no quotes around texts: Qwen-Coder's, GLM's and others'.
//!
//! Decides: by the argument's schema, whether a value is a text as it stands there or JSON. What reads calls and what says in a grammar how
//! they look both ask here.

use serde_json::{Value, json};

use crate::schema_object::{ANYTHING, SchemaObject, list, only, resolved};
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
    /// JSON where it is JSON, else a text: both will do.
    Anything,
}

/// Choices of choices end here.
const MAX_DEPTH: usize = 8;

impl BareValue {
    /// Of an argument of a call of `tool`.
    pub(crate) fn of_argument(tools: &[Tool], tool: &str, argument: &str) -> Self {
        let Some(tool) = tools.iter().find(|other| other.name == tool) else {
            return Self::Anything;
        };
        let root = &tool.parameters;
        let schema = match SchemaObject::of(root, root) {
            Ok(object) => object.property(argument).unwrap_or(&ANYTHING),
            // Its calls are held to nothing, and read as well as may be.
            Err(_) => &root["properties"][argument],
        };
        Self::of(tool, schema)
    }

    /// By `schema`, a part of the tool's.
    pub(crate) fn of(tool: &Tool, schema: &Value) -> Self {
        Self::within(tool, schema, MAX_DEPTH)
    }

    fn within(tool: &Tool, schema: &Value, depth: usize) -> Self {
        let Ok(schema) = resolved(&tool.parameters, schema) else {
            return Self::Json;
        };
        let Value::Object(map) = schema else {
            return match schema {
                Value::Bool(false) => Self::Json,
                _ => Self::Anything,
            };
        };
        let has_only = |known: &[&str]| only(map, known).is_ok();
        if has_only(&[]) {
            return Self::Anything;
        }
        let listed: Option<Vec<Value>> = match map.get("const") {
            Some(value) => Some(vec![value.clone()]),
            None => map
                .contains_key("enum")
                .then(|| list(map, "enum").cloned().collect()),
        };
        if let Some(values) = listed {
            let of_type = |value: &Value| match map.get("type") {
                None => true,
                Some(kind) => *kind == "string" && value.is_string(),
            };
            let plain = |value| stands_for_itself(value) && of_type(value);
            return match has_only(&["const", "enum", "type"])
                && !values.is_empty()
                && values.iter().all(plain)
            {
                true => Self::OneOf(values),
                false => Self::Json,
            };
        }
        match map.get("type") {
            Some(Value::String(kind)) if kind == "string" => {
                match has_only(&["type"]) || !tool.strict {
                    true => Self::Text,
                    false => Self::QuotedText,
                }
            }
            Some(Value::Array(kinds)) if has_only(&["type"]) => {
                let mut kinds: Vec<&str> = kinds.iter().filter_map(Value::as_str).collect();
                kinds.sort_unstable();
                match kinds.as_slice() {
                    ["null", "string"] => Self::TextOrNull,
                    _ => Self::Json,
                }
            }
            None if depth > 0 && has_only(&["anyOf"]) => {
                Self::of_choices(tool, list(map, "anyOf"), depth - 1)
            }
            None if depth > 0 && has_only(&["oneOf"]) => {
                Self::of_choices(tool, list(map, "oneOf"), depth - 1)
            }
            _ => Self::Json,
        }
    }

    /// Pydantic's optional texts are choices of a text and of null.
    fn of_choices<'s>(tool: &Tool, choices: impl Iterator<Item = &'s Value>, depth: usize) -> Self {
        let is_null = |choice: &&Value| **choice == json!({"type": "null"});
        let (nulls, others): (Vec<&Value>, Vec<&Value>) = choices.partition(is_null);
        match (nulls.as_slice(), others.as_slice()) {
            ([_], [other]) => match Self::within(tool, other, depth) {
                Self::Text => Self::TextOrNull,
                Self::OneOf(mut values) => {
                    if !values.contains(&Value::Null) {
                        values.push(Value::Null);
                    }
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
            Self::Json | Self::Anything => as_json(),
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

/// Whether `text` is JSON to its end.
pub(crate) fn is_json(text: &str) -> bool {
    serde_json::from_str::<Value>(text.trim()).is_ok()
}

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

    fn tool(parameters: Value, strict: bool) -> Tool {
        Tool {
            name: "f".to_owned(),
            parameters,
            strict,
            described: json!(null),
        }
    }

    #[test]
    fn schemas_say_how_values_stand_there() {
        let root = json!({"$defs": {
            "Color": {"enum": ["red", "blue"], "type": "string"},
            "Endless": {"anyOf": [{"$ref": "#/$defs/Endless"}, {"type": "null"}]},
        }});
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
                json!({"type": ["string", "null"], "minLength": 2}),
                BareValue::Json,
            ),
            (
                json!({"anyOf": [{"type": "string"}, {"type": "null"}], "default": null}),
                BareValue::TextOrNull,
            ),
            (
                json!({"anyOf": [{"type": "string"}, {"type": "null"}], "minLength": 3}),
                BareValue::Json,
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
            (
                json!({"enum": ["red", null], "type": "string"}),
                BareValue::Json,
            ),
            (
                json!({"enum": ["a", "bb"], "minLength": 2}),
                BareValue::Json,
            ),
            (json!({"enum": [1, "a"]}), BareValue::Json),
            (json!({"enum": ["<", "a"]}), BareValue::Json),
            (json!({"type": "integer"}), BareValue::Json),
            (
                json!({"anyOf": [{"type": "string"}, {"type": "integer"}]}),
                BareValue::Json,
            ),
            (json!({"$ref": "#/$defs/None"}), BareValue::Json),
            (json!({"$ref": "#/$defs/Endless"}), BareValue::Json),
            (json!({"description": "It"}), BareValue::Anything),
            (json!(true), BareValue::Anything),
        ] {
            let tool = tool(root.clone(), true);
            assert_eq!(BareValue::of(&tool, &schema), expected, "{schema}");
        }
        // Nobody relies on how long it is, and a text is what models write.
        let schema = json!({"type": "string", "minLength": 1});
        assert_eq!(BareValue::of(&tool(root, false), &schema), BareValue::Text);
    }

    #[test]
    fn arguments_are_found_wherever_the_schema_has_them() {
        let text = json!({"type": "string"});
        for (parameters, expected) in [
            (json!({"properties": {"a": text}}), BareValue::Text),
            (json!({"additionalProperties": text}), BareValue::Text),
            (
                json!({"$ref": "#/$defs/Own", "$defs": {"Own": {"properties": {"a": text}}}}),
                BareValue::Text,
            ),
            (
                json!({"properties": {"a": text}, "minProperties": 1}),
                BareValue::Text,
            ),
            (json!({"properties": {"b": text}}), BareValue::Anything),
        ] {
            let tools = [tool(parameters.clone(), true)];
            assert_eq!(
                BareValue::of_argument(&tools, "f", "a"),
                expected,
                "{parameters}"
            );
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
        assert!(!BareValue::Anything.goes_on("[1"));
    }
}
