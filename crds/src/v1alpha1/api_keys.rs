//! The API keys of a Model as its rings know them: by name and salted digest. They stand in an annotation of its RingPlans and not in the
//! plans, which do not change: keys come and go while a ring runs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::document;
use super::model::ApiKeyLimits;

/// The annotation of a RingPlan.
pub const API_KEYS: &str = "prima.dev/api-keys";

/// Keys of one Model, at most.
pub const MAX_API_KEYS: usize = 64;

/// What the annotation holds, as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ApiKeys {
    /// Goes before each key into its digest, so that a key of two Models has two digests.
    pub salt: String,
    /// Digests by the keys' names.
    #[serde(default)]
    pub sha256: BTreeMap<String, String>,
    /// What each key may use.
    #[serde(default)]
    pub limits: ApiKeyLimits,
}

#[derive(Debug, thiserror::Error)]
pub enum ApiKeysError {
    #[error("the API keys are no JSON of this version")]
    Json(#[from] serde_json::Error),
    #[error("{count} API keys, expected at most {MAX_API_KEYS}")]
    Count { count: usize },
    #[error(
        "the API key {name}: expected 64 hexadecimal digits in lower case, the SHA-256 of salt and key"
    )]
    Digest { name: String },
    #[error("tokensPerMinute of the API keys is {found}, expected at least 1")]
    Limit { found: i32 },
}

impl ApiKeys {
    /// Reads the annotation's value.
    ///
    /// # Errors
    /// [`ApiKeysError`]: another version wrote it, or nobody of ours.
    pub fn from_json(text: &str) -> Result<Self, ApiKeysError> {
        let keys: Self = serde_json::from_str(text)?;
        let count = keys.sha256.len();
        if count > MAX_API_KEYS {
            return Err(ApiKeysError::Count { count });
        }
        if let Some(found) = keys.limits.tokens_per_minute.filter(|tokens| *tokens < 1) {
            return Err(ApiKeysError::Limit { found });
        }
        match keys
            .sha256
            .iter()
            .find(|(_, digest)| !document::is_sha256(digest))
        {
            Some((name, _)) => Err(ApiKeysError::Digest { name: name.clone() }),
            None => Ok(keys),
        }
    }

    /// The annotation's value.
    pub fn to_json(&self) -> String {
        // Maps of texts have no value that JSON lacks.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// SHA-256 of `salt` and `key`, in hexadecimal.
    pub fn digest(salt: &str, key: &[u8]) -> String {
        let salted = Sha256::new().chain_update(salt).chain_update(key);
        format!("{:x}", salted.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `printf 'saltabc' | sha256sum` says.
    const SALTED_ABC: &str = "3681099918be28c95b81e27e7e5c2e4c6a6dea566d2d10e7f49139ebb779eb6f";

    #[test]
    fn salt_and_key_are_digested_as_one_text() {
        assert_eq!(ApiKeys::digest("salt", b"abc"), SALTED_ABC);
        // FIPS 180-2, B.1.
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(ApiKeys::digest("", b"abc"), abc);
    }

    #[test]
    fn what_is_written_is_read() {
        let digest = ApiKeys::digest("salt", b"abc");
        let keys = ApiKeys {
            salt: "salt".into(),
            sha256: [("alice".into(), digest)].into(),
            limits: ApiKeyLimits {
                tokens_per_minute: Some(600),
            },
        };
        assert_eq!(ApiKeys::from_json(&keys.to_json()).unwrap(), keys);
        let none = ApiKeys::from_json(r#"{"salt": "s"}"#).unwrap();
        assert!(none.sha256.is_empty() && none.limits.tokens_per_minute.is_none());
    }

    #[test]
    fn what_is_not_ours_is_refused_by_name() {
        let error = |text: &str| ApiKeys::from_json(text).unwrap_err().to_string();
        let of_another_version = error(r#"{"salt": "s", "sha512": {}}"#);
        assert!(of_another_version.contains("no JSON of this version"));
        let none = error(r#"{"salt": "s", "limits": {"tokensPerMinute": 0}}"#);
        assert!(none.contains("expected at least 1"), "{none}");
        let short = error(r#"{"salt": "s", "sha256": {"alice": "12"}}"#);
        assert!(short.contains("the API key alice: expected 64"), "{short}");
        let many: BTreeMap<String, String> = (0..=MAX_API_KEYS)
            .map(|number| (number.to_string(), ApiKeys::digest("", b"")))
            .collect();
        let many = serde_json::json!({"salt": "s", "sha256": many}).to_string();
        assert_eq!(error(&many), "65 API keys, expected at most 64");
    }
}
