//! What a request says about the form of its answer: `response_format`, and the fields of llama.cpp and vLLM for grammars.

use prima_text::Grammar;
use serde_json::{Value, json};

use super::openai_error::ApiError;
use super::request::Fields;

/// The form that an answer must have, and the field that asks for it.
pub struct AskedForm {
    pub grammar: Grammar,
    pub field: &'static str,
}

/// A body asks for one form at most.
pub fn asked(fields: &Fields<'_>) -> Result<Option<AskedForm>, ApiError> {
    let forms = [
        response_format(fields)?,
        text(fields, "grammar", grammar)?,
        text(fields, "regex", Grammar::Regex)?,
    ];
    let mut forms = forms.into_iter().flatten();
    let first = forms.next();
    match (&first, forms.next()) {
        (Some(first), Some(second)) => Err(ApiError::invalid(
            second.field,
            format!(
                "the body asks for two forms of the answer, by {} and by {}; leave one out",
                first.field, second.field
            ),
        )),
        _ => Ok(first),
    }
}

fn response_format(fields: &Fields<'_>) -> Result<Option<AskedForm>, ApiError> {
    let Some(format) = fields.object("response_format")? else {
        return Ok(None);
    };
    let kind = format
        .string("type")?
        .ok_or_else(|| format.missing("type"))?;
    let schema = match kind {
        "text" => return Ok(None),
        // llama.cpp's clients put a schema here.
        "json_object" => match format.get("schema") {
            Some(schema) => schema_of(&format, schema)?,
            None => json!({"type": "object"}),
        },
        "json_schema" => {
            let described = format
                .object("json_schema")?
                .ok_or_else(|| format.missing("json_schema"))?;
            let schema = described
                .get("schema")
                .ok_or_else(|| described.missing("schema"))?;
            schema_of(&described, schema)?
        }
        other => {
            let must = "`text`, `json_object` or `json_schema`";
            return Err(format.wrong("type", must, &other.into()));
        }
    };
    Ok(Some(AskedForm {
        grammar: Grammar::JsonSchema(schema),
        field: "response_format",
    }))
}

fn schema_of(fields: &Fields<'_>, schema: &Value) -> Result<Value, ApiError> {
    match schema {
        Value::Object(_) | Value::Bool(true) => Ok(schema.clone()),
        _ => Err(fields.wrong("schema", "a JSON schema, which is an object", schema)),
    }
}

fn text(
    fields: &Fields<'_>,
    field: &'static str,
    read: impl FnOnce(String) -> Grammar,
) -> Result<Option<AskedForm>, ApiError> {
    let text = fields.string(field)?.filter(|text| !text.trim().is_empty());
    Ok(text.map(|text| AskedForm {
        grammar: read(text.to_owned()),
        field,
    }))
}

/// llama.cpp's form defines rules with `::=`, Lark's with `:`.
fn grammar(text: String) -> Grammar {
    match text.contains("::=") {
        true => Grammar::Gbnf(text),
        false => Grammar::Lark(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: Value) -> Result<Option<AskedForm>, ApiError> {
        let Value::Object(map) = body else {
            panic!("not an object")
        };
        asked(&Fields::new(&map))
    }

    #[test]
    fn each_field_asks_for_its_form() {
        let schema = json!({"type": "array"});
        for (body, expected) in [
            (json!({"regex": "a+"}), Grammar::Regex("a+".into())),
            (
                json!({"grammar": "start: \"a\""}),
                Grammar::Lark("start: \"a\"".into()),
            ),
            (
                json!({"grammar": "root ::= \"a\""}),
                Grammar::Gbnf("root ::= \"a\"".into()),
            ),
            (
                json!({"response_format": {"type": "json_object"}}),
                Grammar::JsonSchema(json!({"type": "object"})),
            ),
            (
                json!({"response_format": {"type": "json_object", "schema": schema}}),
                Grammar::JsonSchema(schema.clone()),
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
                Grammar::JsonSchema(schema.clone()),
            ),
        ] {
            assert_eq!(read(body).unwrap().unwrap().grammar, expected);
        }
        for body in [
            json!({}),
            json!({"response_format": {"type": "text"}}),
            json!({"grammar": " "}),
        ] {
            assert!(read(body).unwrap().is_none());
        }
    }

    #[test]
    fn a_wrong_form_is_named() {
        for (body, param) in [
            (json!({"response_format": "json"}), "response_format"),
            (json!({"response_format": {}}), "response_format.type"),
            (
                json!({"response_format": {"type": "yaml"}}),
                "response_format.type",
            ),
            (
                json!({"response_format": {"type": "json_schema"}}),
                "response_format.json_schema",
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}),
                "response_format.json_schema.schema",
            ),
            (json!({"regex": 1}), "regex"),
            (json!({"regex": "a", "grammar": "b"}), "regex"),
        ] {
            let error = read(body.clone()).err().unwrap_or_else(|| panic!("{body}"));
            assert_eq!(error.body()["error"]["param"], param, "{body}");
        }
    }
}
