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
use crate::schema_object::{ANYTHING, SchemaObject, refused};
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
            let name = property.name;
            if name.is_empty()
                || name.contains(|sign: char| sign.is_whitespace() || "<>".contains(sign))
            {
                return Err(refused(&format!(
                    "calls of this model cannot name {name:?}"
                )));
            }
            let value = format!("value_{nth}_{place}");
            let value = self.bare_value(&value, root, property.schema, marks)?;
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
            let value = self.bare_value(&format!("value_{nth}_other"), root, schema, marks)?;
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
        root: &Value,
        schema: &Value,
        marks: &KeyMarks,
    ) -> Result<String, GrammarError> {
        let close = quoted(marks.value_close);
        let space = if marks.own_lines { "/\\n?/" } else { "" };
        let right = match BareValue::of(root, schema) {
            BareValue::Text | BareValue::TextOrNull => {
                return Ok(self.text_and_mark(name, marks.value_close));
            }
            _ if *schema == ANYTHING => return Ok(self.text_and_mark(name, marks.value_close)),
            BareValue::OneOf(values) => {
                let values = values
                    .iter()
                    .map(|value| quoted(value.as_str().unwrap_or("null")));
                format!("({})", values.collect::<Vec<_>>().join(" | "))
            }
            BareValue::QuotedText | BareValue::Json => {
                let mut schema = schema.clone();
                if let Value::Object(map) = &mut schema {
                    // What references in it lead to.
                    for definitions in ["$defs", "definitions"] {
                        if let Some(of_root) = root.get(definitions) {
                            map.entry(definitions).or_insert_with(|| of_root.clone());
                        }
                    }
                }
                format!("%json {}", bounded(schema))
            }
        };
        let json = self.rule(&format!("{name}_alone"), &right);
        Ok(self.rule(name, &format!("{space} {json} {space} {close}")))
    }
}
