//! Grammars for arguments as Gemma writes them: JSON with quotes of its own around texts, and names without any.
//!
//! Decides: that names come in the order in which Gemma's template sorts them. Refuses: schemas that such a call cannot be held to.

use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::answer_form::GEMMA_QUOTE;
use crate::grammar_error::GrammarError;
use crate::lark::{Writer, quoted};
use crate::schema_object::{ANYTHING, SchemaObject, list, only, plain_name, refused, resolved};
use crate::tool::Tool;

impl Writer<'_> {
    /// The braces of a call of the `nth` tool, and all between them.
    pub(crate) fn gemma_arguments(
        &mut self,
        nth: usize,
        tool: &Tool,
    ) -> Result<String, GrammarError> {
        let mut rules = Rules {
            writer: self,
            root: &tool.parameters,
            prefix: format!("value_{nth}"),
            strict: tool.strict,
            rules: 0,
            depth: 0,
            names: HashMap::new(),
            anything: None,
        };
        match &tool.parameters {
            Value::Object(map) if map.get("type").is_some_and(|kind| kind != "object") => {
                Err(refused("the arguments of a call are an object"))
            }
            root => {
                let object = rules.object(root)?;
                Ok(rules.rule(&object))
            }
        }
    }
}

/// Rules for the values of one call.
struct Rules<'r, 't> {
    writer: &'r mut Writer<'t>,
    root: &'r Value,
    prefix: String,
    /// The client relies on the schema.
    strict: bool,
    /// So many have a name.
    rules: usize,
    /// Of the value within others whose rule is being made.
    depth: usize,
    /// Of schemas that have a rule: they may lead to themselves.
    names: HashMap<*const Value, String>,
    anything: Option<String>,
}

const NUMBERS: [&str; 5] = [
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];
/// What a call cannot be held to.
const TEXTS: [&str; 4] = ["format", "maxLength", "minLength", "pattern"];
const ARRAYS: [&str; 3] = ["items", "minItems", "maxItems"];
const OBJECTS: [&str; 3] = ["properties", "required", "additionalProperties"];

/// Values within one another.
const MAX_DEPTH: usize = 64;

fn whole_number(keyword: &str) -> GrammarError {
    refused(&format!("`{keyword}` must be a whole number"))
}

/// One of several.
///
/// # Errors
/// There is no alternative.
fn some_of(keyword: &str, alternatives: Vec<String>) -> Result<String, GrammarError> {
    match alternatives.is_empty() {
        true => Err(refused(&format!("nothing is valid by this `{keyword}`"))),
        false => Ok(alternatives.join(" | ")),
    }
}

fn is_of(kind: &str, value: &Value) -> bool {
    match kind {
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        _ => false,
    }
}

/// What a name may be made of, where any will do.
const NAME: &str = "/[A-Za-z0-9_$.\\-]+/";

impl Rules<'_, '_> {
    fn rule(&mut self, right: &str) -> String {
        let name = self.next_name();
        self.writer.rule(&name, right)
    }

    fn next_name(&mut self) -> String {
        self.rules += 1;
        format!("{}_{}", self.prefix, self.rules)
    }

    /// The rule for a value by `schema`.
    fn value(&mut self, schema: &Value) -> Result<String, GrammarError> {
        let schema = resolved(self.root, schema)?;
        self.writer.check_size()?;
        if self.depth >= MAX_DEPTH {
            return Err(refused(&format!(
                "arguments of more than {MAX_DEPTH} levels"
            )));
        }
        if let Some(name) = self.names.get(&std::ptr::from_ref(schema)) {
            return Ok(name.clone());
        }
        let map = match schema {
            Value::Object(map) => map,
            Value::Bool(true) => return Ok(self.anything()),
            other => return Err(refused(&format!("nothing is valid by `{other}`"))),
        };
        let name = self.next_name();
        self.names.insert(schema, name.clone());
        self.depth += 1;
        let right = self.alternatives(schema, map)?;
        self.depth -= 1;
        Ok(self.writer.rule(&name, &right))
    }

    fn alternatives(
        &mut self,
        schema: &Value,
        map: &Map<String, Value>,
    ) -> Result<String, GrammarError> {
        if let Some(value) = map.get("const") {
            only(map, &["const", "type"])?;
            return self.listed(map, std::slice::from_ref(value));
        }
        if let Some(values) = map.get("enum").and_then(Value::as_array) {
            only(map, &["enum", "type"])?;
            return self.listed(map, values);
        }
        if map.contains_key("anyOf") {
            only(map, &["anyOf"])?;
            let values = list(map, "anyOf").map(|choice| self.value(choice));
            return some_of("anyOf", values.collect::<Result<_, _>>()?);
        }
        let kinds: Vec<&str> = match map.get("type") {
            Some(Value::String(kind)) => vec![kind],
            Some(_) => list(map, "type").filter_map(Value::as_str).collect(),
            None if map.contains_key("properties") => vec!["object"],
            None => {
                only(map, &[])?;
                return Ok(self.anything());
            }
        };
        let mut known = vec!["type"];
        for kind in &kinds {
            known.extend(match *kind {
                "integer" | "number" => &NUMBERS[..],
                "array" => &ARRAYS,
                "object" => &OBJECTS,
                // Nobody relies on it, and all else of the schema is worth more.
                "string" if !self.strict => &TEXTS,
                _ => &[],
            });
        }
        only(map, &known)?;
        let values = kinds.iter().map(|kind| match *kind {
            "string" => Ok(self.text()),
            "integer" | "number" => {
                let numbers = map
                    .iter()
                    .filter(|(key, _)| NUMBERS.contains(&key.as_str()));
                let mut numbers: Map<String, Value> = numbers
                    .map(|(key, value)| (key.clone(), value.clone()))
                    .collect();
                numbers.insert("type".to_owned(), (*kind).into());
                Ok(self.rule(&format!("%json {}", Value::Object(numbers))))
            }
            "boolean" => Ok("\"true\" | \"false\"".to_owned()),
            "null" => Ok("\"null\"".to_owned()),
            "array" => self.array(map),
            "object" => self.object(schema),
            other => Err(refused(&format!("there is no `type` {other:?}"))),
        });
        some_of("type", values.collect::<Result<_, _>>()?)
    }

    fn text(&mut self) -> String {
        let open = self.writer.mark(GEMMA_QUOTE);
        let name = self.next_name();
        let rest = self.writer.text_and_mark(&name, GEMMA_QUOTE);
        format!("{open} {rest}")
    }

    /// The values of a list that are of the type.
    fn listed(
        &mut self,
        map: &Map<String, Value>,
        values: &[Value],
    ) -> Result<String, GrammarError> {
        let of_type = |value: &&Value| match map.get("type") {
            None => true,
            Some(Value::String(kind)) => is_of(kind, value),
            Some(_) => list(map, "type")
                .filter_map(Value::as_str)
                .any(|kind| is_of(kind, value)),
        };
        let values = values.iter().filter(of_type);
        let values = values.map(|value| self.literal(value));
        some_of("enum", values.collect::<Result<_, _>>()?)
    }

    /// A value of a list.
    fn literal(&mut self, value: &Value) -> Result<String, GrammarError> {
        let mark = self.writer.mark(GEMMA_QUOTE);
        match value {
            Value::String(text) if text.is_empty() => Ok(format!("{mark} {mark}")),
            Value::String(text) if !text.contains(GEMMA_QUOTE) => {
                Ok(format!("{mark} {} {mark}", quoted(text)))
            }
            Value::String(_) | Value::Array(_) | Value::Object(_) => {
                Err(refused("calls of this model cannot be held to this `enum`"))
            }
            plain => Ok(quoted(&plain.to_string())),
        }
    }

    fn array(&mut self, map: &Map<String, Value>) -> Result<String, GrammarError> {
        let item = self.value(map.get("items").unwrap_or(&ANYTHING))?;
        let number = |keyword: &str| {
            let given = map.get(keyword);
            let whole = given.map(|value| value.as_u64().ok_or_else(|| whole_number(keyword)));
            whole.transpose()
        };
        let (least, most) = (number("minItems")?.unwrap_or(0), number("maxItems")?);
        let more = match most {
            Some(0) if least == 0 => return Ok("\"[\" \"]\"".to_owned()),
            Some(most) if most < least => return Err(refused("`maxItems` is below `minItems`")),
            Some(1) => String::new(),
            Some(most) => format!("(\",\" {item}){{{},{}}}", least.saturating_sub(1), most - 1),
            None => format!("(\",\" {item}){{{},}}", least.saturating_sub(1)),
        };
        Ok(match least {
            0 => format!("\"[\" ({item} {more})? \"]\""),
            _ => format!("\"[\" {item} {more} \"]\""),
        })
    }

    fn object(&mut self, schema: &Value) -> Result<String, GrammarError> {
        let mut object = SchemaObject::of(self.root, schema)?;
        object
            .properties
            .sort_by_key(|property| property.name.to_lowercase());
        // From the last to the first: what may follow something, and what may begin.
        let (mut rest, mut first) = (String::new(), "\"\"".to_owned());
        if let Some(schema) = object.others {
            let names = object
                .properties
                .iter()
                .map(|property| quoted(property.name));
            let names: Vec<String> = names.collect();
            let name = match names.is_empty() {
                true => NAME.to_owned(),
                false => {
                    let terminal = self.next_name().to_uppercase();
                    let right = format!("{NAME} & ~({})", names.join(" | "));
                    self.writer.rule(&terminal, &right)
                }
            };
            let value = self.value(schema)?;
            let pair = self.rule(&format!("{name} \":\" {value}"));
            rest = self.rule(&format!("(\",\" {pair})*"));
            first = self.rule(&format!("({pair} {rest})?"));
        }
        for property in object.properties.iter().rev() {
            let name = plain_name(property.name, ",:{}[]<>|\"")?;
            let value = self.value(property.schema)?;
            let key = quoted(&format!("{name}:"));
            let pair = self.rule(&format!("{key} {value}"));
            let begins = format!("{pair} {rest}");
            (rest, first) = match property.required {
                true => (
                    self.rule(&format!("\",\" {pair} {rest}")),
                    self.rule(&begins),
                ),
                false => (
                    self.rule(&format!("(\",\" {pair})? {rest}")),
                    self.rule(&format!("{begins} | {first}")),
                ),
            };
        }
        Ok(format!("\"{{\" {first} \"}}\""))
    }

    /// A rule for any value, which is made when it is needed first.
    fn anything(&mut self) -> String {
        if let Some(name) = &self.anything {
            return name.clone();
        }
        let name = format!("{}_anything", self.prefix);
        self.anything = Some(name.clone());
        let text = self.text();
        let number = self.rule("%json {\"type\": \"number\"}");
        let right = format!(
            "{text} | {number} | \"true\" | \"false\" | \"null\" | \"[\" ({name} (\",\" {name})*)? \"]\" \
             | \"{{\" ({NAME} \":\" {name} (\",\" {NAME} \":\" {name})*)? \"}}\""
        );
        self.writer.rule(&name, &right)
    }
}
