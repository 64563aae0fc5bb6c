//! Grammars for arguments that come by name, each between marks: Qwen-Coder's, GLM's and others' calls.
//!
//! Decides: that arguments come in the order of their schema, those that must be there all of them. Refuses: schemas that such a call cannot
//! be held to.

use std::collections::BTreeSet;
use std::fmt::Write;

use serde_json::{Value, json};

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

/// A part of the schema `root`, with those of its definitions that references in it lead to.
///
/// # Errors
/// A reference leads elsewhere.
fn on_its_own(root: &Value, schema: &Value) -> Result<Value, GrammarError> {
    let mut reached = BTreeSet::new();
    let mut todo = vec![schema];
    while let Some(value) = todo.pop() {
        match value {
            Value::Array(values) => todo.extend(values),
            Value::Object(map) => {
                if let Some(Value::String(place)) = map.get("$ref") {
                    let (all, name) = definition(place)?;
                    if reached.insert((all, name.clone())) {
                        todo.extend(root[all].get(&name));
                    }
                }
                todo.extend(map.values());
            }
            _ => {}
        }
    }
    let mut schema = schema.clone();
    for (all, name) in reached {
        if let Some(one) = root[all].get(&name) {
            let definitions = &mut schema[all];
            // What a client put there may be anything.
            if !definitions.is_object() {
                *definitions = json!({});
            }
            definitions[name] = one.clone();
        }
    }
    Ok(schema)
}

/// Where definitions stand, and the name of the one that a reference leads to.
fn definition(place: &str) -> Result<(&'static str, String), GrammarError> {
    let within = |all: &'static str| {
        let rest = place.strip_prefix(&format!("#/{all}/"))?;
        let name = rest.split('/').next()?;
        Some((all, name.replace("~1", "/").replace("~0", "~")))
    };
    let found = ["$defs", "definitions"].into_iter().find_map(within);
    found.ok_or_else(|| {
        refused(&format!(
            "a `$ref` in an argument must lead to #/$defs/, and not to {place}"
        ))
    })
}
