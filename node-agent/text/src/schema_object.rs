//! Schemas of arguments as far as calls that are no JSON can be held to them: objects, their properties, and what a reference leads to.
//!
//! Refuses: keywords that such a call cannot be held to, by name.

use std::collections::{BTreeSet, HashSet};

use serde_json::{Map, Value};

use crate::grammar_error::GrammarError;

/// An object's schema, taken apart.
pub(crate) struct SchemaObject<'s> {
    pub properties: Vec<Property<'s>>,
    /// What further properties are by, where there may be any.
    pub others: Option<&'s Value>,
}

pub(crate) struct Property<'s> {
    pub name: &'s str,
    pub schema: &'s Value,
    pub required: bool,
}

/// They say nothing about what is valid.
const ANNOTATIONS: [&str; 13] = [
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
];

/// References that lead to references end here.
const MAX_REFERENCES: usize = 32;

/// A schema that anything is valid by.
pub(crate) static ANYTHING: Value = Value::Bool(true);

impl<'s> SchemaObject<'s> {
    /// Of `schema`, in the whole schema `root`.
    ///
    /// # Errors
    /// A keyword that a call cannot be held to.
    pub(crate) fn of(root: &'s Value, schema: &'s Value) -> Result<Self, GrammarError> {
        let Value::Object(map) = resolved(root, schema)? else {
            return Ok(Self {
                properties: Vec::new(),
                others: Some(&ANYTHING),
            });
        };
        only(
            map,
            &["type", "properties", "required", "additionalProperties"],
        )?;
        let required = list(map, "required").filter_map(Value::as_str);
        let required: BTreeSet<&str> = required.collect();
        let named = map.get("properties").and_then(Value::as_object);
        let named = named.into_iter().flatten();
        let mut properties: Vec<Property<'_>> = named
            .map(|(name, schema)| Property {
                name,
                schema,
                required: required.contains(name.as_str()),
            })
            .collect();
        let named: HashSet<&str> = properties.iter().map(|property| property.name).collect();
        for name in required {
            if !named.contains(name) {
                properties.push(Property {
                    name,
                    schema: &ANYTHING,
                    required: true,
                });
            }
        }
        let others = match map.get("additionalProperties") {
            Some(Value::Bool(false)) => None,
            Some(schema) => Some(schema),
            // Whoever names properties means those.
            None => properties.is_empty().then_some(&ANYTHING),
        };
        Ok(Self { properties, others })
    }

    /// The schema of a property.
    pub(crate) fn property(&self, name: &str) -> Option<&'s Value> {
        let named = self.properties.iter().find(|one| one.name == name);
        named.map(|one| one.schema).or(self.others)
    }
}

/// The schema that `schema` stands for: a reference's, or that of an `allOf` of one.
pub(crate) fn resolved<'s>(
    root: &'s Value,
    mut schema: &'s Value,
) -> Result<&'s Value, GrammarError> {
    for _ in 0..MAX_REFERENCES {
        let Value::Object(map) = schema else {
            return Ok(schema);
        };
        if let Some(reference) = map.get("$ref") {
            only(map, &["$ref"])?;
            let place = reference.as_str().and_then(|text| text.strip_prefix('#'));
            schema = place
                .and_then(|place| root.pointer(place))
                .ok_or_else(|| refused(&format!("a `$ref` leads nowhere: {reference}")))?;
        } else if let Some([one]) = map
            .get("allOf")
            .and_then(Value::as_array)
            .map(Vec::as_slice)
        {
            only(map, &["allOf"])?;
            schema = one;
        } else {
            return Ok(schema);
        }
    }
    Err(refused(&format!(
        "a `$ref` leads to itself, or to more than {MAX_REFERENCES} others"
    )))
}

/// That `schema` has none but these keywords, and such as say nothing about what is valid.
pub(crate) fn only(schema: &Map<String, Value>, known: &[&str]) -> Result<(), GrammarError> {
    let unknown = schema
        .keys()
        .find(|key| !known.contains(&key.as_str()) && !ANNOTATIONS.contains(&key.as_str()));
    match unknown {
        None => Ok(()),
        Some(keyword) => Err(refused(&format!(
            "calls of this model cannot be held to `{keyword}`"
        ))),
    }
}

/// A property's name as it stands in a call without quotes.
///
/// # Errors
/// It has signs that mean something there.
pub(crate) fn plain_name<'n>(name: &'n str, signs: &str) -> Result<&'n str, GrammarError> {
    let means_something = |sign: char| sign.is_whitespace() || signs.contains(sign);
    match name.is_empty() || name.contains(means_something) {
        true => Err(refused(&format!(
            "calls of this model cannot name {name:?}"
        ))),
        false => Ok(name),
    }
}

/// The elements of an array that may be missing.
pub(crate) fn list<'s>(
    schema: &'s Map<String, Value>,
    keyword: &str,
) -> impl Iterator<Item = &'s Value> {
    let values = schema.get(keyword).and_then(Value::as_array);
    values.into_iter().flatten()
}

pub(crate) fn refused(problem: &str) -> GrammarError {
    GrammarError::Grammar {
        problem: problem.to_owned(),
    }
}
