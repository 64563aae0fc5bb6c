//! The hub that operator and agents were installed with, and what a Model's source means there.
//!
//! Decides: which hub a source without one means, and who gets the hub's token: the hub, and nobody else that a Model may name.

use prima_crds::v1alpha1::model_source::{HuggingFaceSource, ModelSource, UrlSource};

use crate::source::{Location, Source, SourceError, Token};

/// Where people without a mirror fetch from.
pub const PUBLIC_HUB: &str = "https://huggingface.co";

pub struct Hub {
    endpoint: String,
    token: Option<Token>,
}

impl Hub {
    /// The hub at `endpoint`, which gets `token`, if it asks for one; an empty token is none.
    ///
    /// # Errors
    /// [`SourceError::Token`] for what cannot be a token.
    pub fn new(endpoint: &str, token: Option<&str>) -> Result<Hub, SourceError> {
        let token = token.filter(|token| !token.is_empty());
        Ok(Hub {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: token.map(Token::new).transpose()?,
        })
    }

    /// Where `source` is fetched from; `None` for what is not fetched. `commit`: the commit of its revision when that was looked
    /// up, since a branch may have moved on.
    pub fn source(&self, source: &ModelSource, commit: Option<&str>) -> Option<Source> {
        let location = match source {
            ModelSource {
                hugging_face:
                    Some(HuggingFaceSource {
                        repo,
                        file,
                        revision,
                        endpoint,
                    }),
                ..
            } => Location::HuggingFace {
                endpoint: endpoint.as_ref().unwrap_or(&self.endpoint).clone(),
                repo: repo.clone(),
                revision: commit.unwrap_or(revision).to_owned(),
                file: file.clone(),
            },
            ModelSource {
                url:
                    Some(UrlSource {
                        url,
                        sha256,
                        allow_full_download: _,
                    }),
                ..
            } => Location::Url {
                url: url.clone(),
                sha256: sha256.clone(),
            },
            _ => return None,
        };
        let ours = matches!(&location, Location::HuggingFace { endpoint, .. } if *endpoint == self.endpoint);
        Some(Source {
            location,
            token: self.token.clone().filter(|_| ours),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(json: serde_json::Value) -> ModelSource {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn only_the_hub_itself_gets_its_token() {
        let hub = Hub::new("https://hub.example/", Some("secret")).unwrap();
        let gets = |endpoint: Option<&str>| {
            let source = source(
                serde_json::json!({"huggingFace": {"repo": "a/b", "file": "c.gguf", "endpoint": endpoint}}),
            );
            hub.source(&source, None).unwrap().token.is_some()
        };
        assert!(gets(None));
        assert!(gets(Some("https://hub.example")));
        assert!(!gets(Some("https://other.example")));
        assert!(!gets(Some("http://hub.example")));
        let url = source(serde_json::json!({"url": {"url": "https://hub.example/c.gguf"}}));
        assert!(hub.source(&url, None).unwrap().token.is_none());
    }

    #[test]
    fn a_commit_counts_more_than_a_revision() {
        let hub = Hub::new(PUBLIC_HUB, Some("")).unwrap();
        let fetched = source(serde_json::json!({"huggingFace": {"repo": "a/b", "file": "c.gguf"}}));
        for (commit, expected) in [(None, "main"), (Some("0123"), "0123")] {
            match hub.source(&fetched, commit).unwrap().location {
                Location::HuggingFace {
                    revision, endpoint, ..
                } => {
                    assert_eq!(
                        (revision.as_str(), endpoint.as_str()),
                        (expected, PUBLIC_HUB)
                    );
                }
                other => panic!("{other:?}"),
            }
        }
        let local = source(serde_json::json!({"hostPath": {"path": "/a.gguf"}}));
        assert!(hub.source(&local, None).is_none());
    }
}
