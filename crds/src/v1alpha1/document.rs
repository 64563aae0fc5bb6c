//! Reading a document from YAML or JSON: the header first, so that a document of another kind is called that, and not a
//! list of missing fields.

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Why a text is not the document that was expected. `name` is where it came from, a path.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    #[error("{name}: not a {kind} document")]
    Parse {
        name: String,
        kind: &'static str,
        #[source]
        // Boxed, as it would make every result of these modules large.
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

    pub fn bounded(
        &self,
        field: &str,
        value: i64,
        low: i64,
        high: i64,
    ) -> Result<(), DocumentError> {
        match value {
            value if (low..=high).contains(&value) => Ok(()),
            value => Err(self.error(field, format!("{value} is outside {low}..={high}"))),
        }
    }
}

pub const API_VERSION: &str = "prima.dev/v1alpha1";

/// The document of `kind` in `text`, its header checked and nothing else.
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
    serde_saphyr::from_str(text).map_err(parse)
}
