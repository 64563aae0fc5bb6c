//! Grammars for arguments that come by name, each between marks: Qwen-Coder's and GLM's calls.
//!
//! Decides: that arguments come in the order of their schema, those that must be there all of them. Refuses: schemas that such a call cannot
//! be held to.

use std::fmt::Write;

use serde_json::Value;

use crate::answer_form::KeyMarks;
use crate::bare_value::BareValue;
use crate::grammar::bounded;
use crate::grammar_error::GrammarError;
use crate::lark::{Writer, quoted};
use crate::schema_object::{SchemaObject, plain_name, refused};
use crate::tool::Tool;

impl Writer<'_> {
    /// All arguments of the `nth` tool.
    pub(crate) fn keyed_arguments(
        &mut self,
        nth: usize,
        tool: &Tool,
        marks: &KeyMarks,
    ) -> Result<String, GrammarError> {
        let root = &tool.parameters;
        let object = SchemaObject::of(root, root)?;
        let mut pairs = Vec::with_capacity(object.properties.len() + 1);
        let mut names = Vec::with_capacity(object.properties.len());
        for (place, property) in object.properties.iter().enumerate() {
            let name = plain_name(property.name, "<>\"")?;
            let value = format!("value_{nth}_{place}");
            let value = self.bare_value(&value, tool, property.schema, marks)?;
            self.check_size()?;
            let key = quoted(&format!("{}{name}{}", marks.key_open, marks.key_close));
            let pair = self.pair(&format!("pair_{nth}_{place}"), &key, &value, marks);
            pairs.push(match property.required {
                true => pair,
                false => format!("{pair}?"),
            });
            names.push(quoted(name));
        }
        if let Some(schema) = object.others {
            let but = match names.is_empty() {
                true => String::new(),
                false => format!(" & ~({})", names.join(" | ")),
            };
            let key = format!("OTHER_{nth}");
            let (open, close) = (quoted(marks.key_open), quoted(marks.key_close));
            let _ = writeln!(self.lark, "{key}: {open} (/[^<>\\s]+/{but}) {close}");
            let value = self.bare_value(&format!("value_{nth}_other"), tool, schema, marks)?;
            let pair = self.pair(&format!("pair_{nth}_other"), &key, &value, marks);
            pairs.push(format!("{pair}*"));
        }
        Ok(pairs.join(" "))
    }

    fn pair(&mut self, name: &str, key: &str, value: &str, marks: &KeyMarks) -> String {
        // GLM 4.6 has line breaks between all parts, 4.7 has none.
        let begins = match marks.value_open {
            "" => String::new(),
            mark => format!("/\\n?/ {}", quoted(mark)),
        };
        self.rule(name, &format!("{key} {begins} {value} /\\n?/"))
    }

    /// A value and the mark that closes it.
    fn bare_value(
        &mut self,
        name: &str,
        tool: &Tool,
        schema: &Value,
        marks: &KeyMarks,
    ) -> Result<String, GrammarError> {
        let close = quoted(marks.value_close);
        let space = if marks.own_lines { "/\\n?/" } else { "" };
        let right = match BareValue::of(tool, schema) {
            BareValue::Text | BareValue::TextOrNull | BareValue::Anything => {
                return Ok(self.text_and_mark(name, marks.value_close));
            }
            BareValue::OneOf(values) => {
                let values = values
                    .iter()
                    .map(|value| quoted(value.as_str().unwrap_or("null")));
                format!("({})", values.collect::<Vec<_>>().join(" | "))
            }
            BareValue::QuotedText | BareValue::Json => {
                let schema = on_its_own(&tool.parameters, schema)?;
                format!("%json {}", bounded(schema))
            }
        };
        let json = self.rule(&format!("{name}_alone"), &right);
        Ok(self.rule(name, &format!("{space} {json} {space} {close}")))
    }
}

/// A part of the schema `root` that holds what its references lead to.
fn on_its_own(root: &Value, schema: &Value) -> Result<Value, GrammarError> {
    let mut schema = schema.clone();
    if !refers(&schema)? {
        return Ok(schema);
    }
    if let Value::Object(map) = &mut schema {
        for definitions in DEFINITIONS {
            if map.contains_key(definitions) {
                return Err(refused(&format!(
                    "`{definitions}` must stand in the schema of all arguments"
                )));
            }
            if let Some(all) = root.get(definitions) {
                map.insert(definitions.to_owned(), all.clone());
            }
        }
    }
    Ok(schema)
}

const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// Whether there is a reference in it.
///
/// # Errors
/// One leads elsewhere than to a definition.
fn refers(schema: &Value) -> Result<bool, GrammarError> {
    let inner: Vec<&Value> = match schema {
        Value::Array(values) => values.iter().collect(),
        Value::Object(map) => map.values().collect(),
        _ => return Ok(false),
    };
    let mut found = false;
    if let Some(Value::String(place)) = schema.get("$ref") {
        let leads_to = |name: &&str| place.starts_with(&format!("#/{name}/"));
        if !DEFINITIONS.iter().any(leads_to) {
            return Err(refused(&format!(
                "a `$ref` in an argument must lead to #/$defs/, and not to {place}"
            )));
        }
        found = true;
    }
    for one in inner {
        found |= refers(one)?;
    }
    Ok(found)
}
