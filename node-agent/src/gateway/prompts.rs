//! OpenAI's four ways to say one text or several: as text or as token ids. Tokenizes nothing.

use serde_json::Value;

use super::openai_error::ApiError;
use super::request::{Fields, token_id};

#[derive(Debug, PartialEq)]
pub enum GivenPrompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// What the field `name` says: `"text"`, `["text", ...]`, `[id, ...]` or `[[id, ...], ...]`. Ids are below `vocabulary`.
pub fn read(
    fields: &Fields<'_>,
    name: &str,
    vocabulary: usize,
    at_most: usize,
) -> Result<Vec<GivenPrompt>, ApiError> {
    let value = fields.get(name).ok_or_else(|| fields.missing(name))?;
    let must = "a string, an array of strings, an array of token ids or an array of such arrays";
    let wrong = || fields.wrong(name, must, value);
    let tokens = |ids: &[Value]| -> Result<GivenPrompt, ApiError> {
        let read = |value: &Value| {
            token_id(value, vocabulary).ok_or_else(|| {
                let must = format!("token ids below {vocabulary} throughout");
                fields.wrong(name, &must, value)
            })
        };
        Ok(GivenPrompt::Tokens(
            ids.iter().map(read).collect::<Result<_, _>>()?,
        ))
    };
    let prompts = match value {
        Value::String(text) => vec![GivenPrompt::Text(text.clone())],
        Value::Array(items) if items.first().is_some_and(Value::is_number) => vec![tokens(items)?],
        Value::Array(items) => {
            let read = |item: &Value| match item {
                Value::String(text) => Ok(GivenPrompt::Text(text.clone())),
                Value::Array(ids) => tokens(ids),
                _ => Err(wrong()),
            };
            items.iter().map(read).collect::<Result<Vec<_>, _>>()?
        }
        _ => return Err(wrong()),
    };
    if !(1..=at_most).contains(&prompts.len()) {
        let found = prompts.len();
        let problem = format!("{name} must hold 1 to {at_most} texts, but holds {found}");
        return Err(ApiError::invalid(name, problem));
    }
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(prompt: Value) -> Result<Vec<GivenPrompt>, ApiError> {
        let Value::Object(map) = json!({ "prompt": prompt }) else {
            panic!("not an object")
        };
        read(&Fields::new(&map), "prompt", 10, 16)
    }

    #[test]
    fn prompts_come_in_four_shapes() {
        let text = |text: &str| GivenPrompt::Text(text.into());
        assert_eq!(parse(json!("a")).unwrap(), [text("a")]);
        assert_eq!(parse(json!(["a", ""])).unwrap(), [text("a"), text("")]);
        assert_eq!(
            parse(json!([1, 9])).unwrap(),
            [GivenPrompt::Tokens(vec![1, 9])]
        );
        let two = [
            GivenPrompt::Tokens(vec![1]),
            GivenPrompt::Tokens(vec![2, 3]),
        ];
        assert_eq!(parse(json!([[1], [2, 3]])).unwrap(), two);
    }

    #[test]
    fn other_shapes_and_unknown_tokens_are_refused() {
        let many = vec!["x"; 17];
        for bad in [
            json!(null),
            json!(1),
            json!({}),
            json!([]),
            json!([10]),
            json!([-1]),
            json!([1.5]),
            json!([1, "a"]),
            json!(["a", 1]),
            json!([[1], [10]]),
            json!([[["a"]]]),
            json!([true]),
            json!(many),
        ] {
            let error = parse(bad.clone()).expect_err(&bad.to_string());
            assert_eq!(error.body()["error"]["param"], "prompt", "{bad}");
        }
    }
}
