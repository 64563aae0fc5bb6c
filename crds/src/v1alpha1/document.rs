//! Reading a document from YAML or JSON: the header first, so that a document of another kind is called that, and not a
//! list of missing fields.
//!
//! Where documents are watched, unknown fields are ignored: a newer version wrote them. Where a person's file is read, or a plan is
//! executed, [`strict`] refuses them.

use std::ops::RangeInclusive;

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// Why a text is not the document that was expected. `name` is where it came from, a path.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    #[error("{name}: not a {kind} document")]
    Parse {
        name: String,
        kind: &'static str,
        #[source]
        // Boxed, because every result of these modules would be large otherwise.
        source: Box<serde_saphyr::Error>,
    },
    #[error("{name}: {field} is {found}, expected {expected}")]
    Header {
        name: String,
        field: &'static str,
        found: String,
        expected: &'static str,
    },
    #[error("{name}: {field}: {problem}")]
    Field {
        name: String,
        field: String,
        problem: String,
    },
}

/// The checks of one document, which is called `name` in errors.
pub(super) struct Checks<'a> {
    pub name: &'a str,
}

impl Checks<'_> {
    pub fn error(&self, field: &str, problem: impl Into<String>) -> DocumentError {
        DocumentError::Field {
            name: self.name.to_owned(),
            field: field.to_owned(),
            problem: problem.into(),
        }
    }

    /// Checks fields below `path`. Of each: its name, its value, and the range that the value may be in.
    pub fn fields<const N: usize>(
        &self,
        path: &str,
        fields: [(&str, i64, RangeInclusive<i64>); N],
    ) -> Result<(), DocumentError> {
        for (field, value, range) in fields {
            if !range.contains(&value) {
                let path = format!("{path}.{field}");
                return Err(self.error(&path, format!("{value} is outside {range:?}")));
            }
        }
        Ok(())
    }
}

pub const API_VERSION: &str = "prima.dev/v1alpha1";

/// For fields that are only written if they are true.
pub(super) fn is_false(value: &bool) -> bool {
    !value
}

/// Whether it is a SHA-256 as documents have it: 64 hexadecimal digits, letters in lower case, so that equal digests are equal texts.
pub(super) fn is_sha256(text: &str) -> bool {
    let digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    text.len() == 64 && text.bytes().all(digit)
}

pub(super) fn is_zero<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Reads the document of `kind` in `text`. Checks its header, and that it has no unknown fields, but no values.
pub(super) fn read<T: DeserializeOwned>(
    name: &str,
    kind: &'static str,
    text: &str,
) -> Result<T, DocumentError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct TypeMeta {
        #[serde(default)]
        api_version: String,
        #[serde(default)]
        kind: String,
    }
    let parse = |source| DocumentError::Parse {
        name: name.to_owned(),
        kind,
        source: Box::new(source),
    };
    let meta: TypeMeta = serde_saphyr::from_str(text).map_err(parse)?;
    for (field, found, expected) in [
        ("apiVersion", meta.api_version, API_VERSION),
        ("kind", meta.kind, kind),
    ] {
        if found != expected {
            return Err(DocumentError::Header {
                name: name.to_owned(),
                field,
                found: format!("{found:?}"),
                expected,
            });
        }
    }
    serde_saphyr::with_deserializer_from_str(text, |de| strict(de)).map_err(parse)
}

/// The items of a list, as `kubectl get -o yaml` prints one; `None` if the text is no list.
pub(super) fn items(name: &str, text: &str) -> Result<Option<Vec<Value>>, DocumentError> {
    #[derive(Deserialize)]
    struct List {
        #[serde(default)]
        kind: String,
        #[serde(default)]
        items: Option<Vec<Value>>,
    }
    let list: List = serde_saphyr::from_str(text).map_err(|source| DocumentError::Parse {
        name: name.to_owned(),
        kind: "List",
        source: Box::new(source),
    })?;
    match list.items {
        Some(items) if items.is_empty() => {
            let problem = "is empty: expected at least one document";
            Err(Checks { name }.error("items", problem))
        }
        Some(items) if list.kind.ends_with("List") => Ok(Some(items)),
        _ => Ok(None),
    }
}

/// The document of `kind` that an item of a list is. Unknown fields are left out.
pub(super) fn item<T: DeserializeOwned>(
    name: &str,
    kind: &'static str,
    index: usize,
    item: Value,
) -> Result<T, DocumentError> {
    let checks = Checks { name };
    for (field, expected) in [("apiVersion", API_VERSION), ("kind", kind)] {
        if item[field] != expected {
            return Err(DocumentError::Field {
                name: name.to_owned(),
                field: format!("items[{index}].{field} is {}", item[field]),
                problem: format!("expected {expected}"),
            });
        }
    }
    serde_json::from_value(item)
        .map_err(|error| checks.error(&format!("items[{index}]"), error.to_string()))
}

/// Reads a `T`, and refuses fields that it does not have.
///
/// # Errors
/// As `T`'s own; one that names all unknown fields by their paths.
pub fn strict<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    let mut unknown = Vec::new();
    let found = serde_ignored::deserialize(deserializer, |path| {
        // An optional field has a question mark in the path.
        unknown.push(path.to_string().replace(".?", ""));
    })?;
    // A type need not have the fields of the header.
    unknown.retain(|path| path != "apiVersion" && path != "kind");
    unknown.sort();
    match unknown.as_slice() {
        [] => Ok(found),
        [one] => Err(D::Error::custom(format_args!("unknown field {one}"))),
        several => Err(D::Error::custom(format_args!(
            "unknown fields {}",
            several.join(", ")
        ))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::v1alpha1::node_profile::NodeProfile;
    use crate::v1alpha1::ring_plan::PlannedModel;

    #[test]
    fn a_persons_file_has_no_unknown_fields() {
        let yaml = include_str!("../../tests/node-profile.yaml");
        for (from, to, named) in [
            ("kind: NodeProfile", "kind: NodeProfile\nsped: {}", "sped"),
            ("  disk:", "  disks: {}\n  disk:", "status.disks"),
            (
                "    threads:",
                "    thread: 2\n    threads:",
                "status.cpu.thread",
            ),
        ] {
            assert!(yaml.contains(from), "{from:?}");
            let text = yaml.replacen(from, to, 1);
            let error = NodeProfile::from_yaml("desk.yaml", &text).unwrap_err();
            let said = std::error::Error::source(&error).unwrap().to_string();
            assert!(said.contains(&format!("unknown field {named}")), "{said}");
        }
    }

    #[test]
    fn unknown_fields_are_refused_by_path_or_left_out() {
        let model = json!({
            "name": "m", "file": "m.gguf", "sizeBytes": 1, "layers": 8, "wings": 2,
            "version": {"headerSha256": "0", "mirror": true},
        });
        let error = strict::<PlannedModel, _>(&model).unwrap_err();
        assert_eq!(error.to_string(), "unknown fields version.mirror, wings");
        let model = PlannedModel::deserialize(&model).unwrap();
        assert_eq!(model.layers, 8);
    }
}
