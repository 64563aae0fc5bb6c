//! The hub that operator and agents were installed with, and what a Model's source means there.
//!
//! Decides: which hub a source without one means; which token it gets, the one that all share or that of those who have one of their own; and
//! who gets a token: the hub, and nobody else that a Model may name.

use prima_crds::v1alpha1::model_source::{HuggingFaceSource, ModelSource, UrlSource};

use crate::source::{Location, Source, SourceError, Token};

/// Where people without a mirror fetch from.
pub const PUBLIC_HUB: &str = "https://huggingface.co";

#[derive(Clone)]
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

    /// This hub for those who may have a token of their `own`: with that one, and be it empty, or else with the one that all share.
    ///
    /// # Errors
    /// [`SourceError::Token`] for what cannot be a token.
    pub fn with_own_token(&self, own: Option<&str>) -> Result<Hub, SourceError> {
        match own {
            Some(own) => Hub::new(&self.endpoint, Some(own)),
            None => Ok(self.clone()),
        }
    }

    /// Whether `source` is a file of this hub, so that the token goes along.
    pub fn has(&self, source: &ModelSource) -> bool {
        let source = source.hugging_face.as_ref();
        let endpoint = source.map(|source| source.endpoint.as_ref().unwrap_or(&self.endpoint));
        endpoint == Some(&self.endpoint)
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
        Some(Source {
            location,
            token: self.token.clone().filter(|_| self.has(source)),
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
        let shared = Hub::new("https://hub.example/", Some("secret")).unwrap();
        let own = shared.with_own_token(Some("own")).unwrap();
        let url = source(serde_json::json!({"url": {"url": "https://hub.example/c.gguf"}}));
        for hub in [shared, own] {
            let gets = |source: &ModelSource| {
                let gets = hub.source(source, None).unwrap().token.is_some();
                assert_eq!(hub.has(source), gets);
                gets
            };
            let gets_at = |endpoint: Option<&str>| {
                gets(&source(
                    serde_json::json!({"huggingFace": {"repo": "a/b", "file": "c.gguf", "endpoint": endpoint}}),
                ))
            };
            assert!(gets_at(None));
            assert!(gets_at(Some("https://hub.example")));
            assert!(!gets_at(Some("https://other.example")));
            assert!(!gets_at(Some("http://hub.example")));
            assert!(!gets(&url));
        }
    }

    #[test]
    fn an_own_token_replaces_the_shared_one() {
        let fetched = source(serde_json::json!({"huggingFace": {"repo": "a/b", "file": "c.gguf"}}));
        for (shared, own, expected) in [
            (None, None, None),
            (Some("shared"), None, Some("Bearer shared")),
            (None, Some("own"), Some("Bearer own")),
            (Some("shared"), Some("own"), Some("Bearer own")),
            // Whose own is empty asks as a stranger.
            (Some("shared"), Some(""), None),
        ] {
            let hub = Hub::new(PUBLIC_HUB, shared).unwrap();
            let hub = hub.with_own_token(own).unwrap();
            let token = hub.source(&fetched, None).unwrap().token;
            let sent = token.map(|token| token.header());
            let sent = sent.as_ref().map(|sent| sent.to_str().unwrap());
            assert_eq!(sent, expected);
        }
        let hub = Hub::new(PUBLIC_HUB, Some("shared")).unwrap();
        let refused = hub.with_own_token(Some("two words")).err();
        assert_eq!(refused, Some(SourceError::Token));
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
