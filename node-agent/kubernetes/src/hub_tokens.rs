//! Which token the hub gets for the files of a namespace: that of its Secret `prima-hub`, or else the one that all namespaces share. The Secret is
//! asked for by name whenever the hub is about to be asked: a token that was changed counts from the next time on.
//!
//! Refuses to take the shared token where the Secret cannot be read or used: whoever put it there may not be meant to have that one.

use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use prima_crds::v1alpha1::model_source::ModelSource;
use prima_weights::{Hub, Source, SourceError};
use tokio::time::timeout;

use crate::reason;

/// The Secret of a namespace that has a token of its own, and the token's key there.
const SECRET: &str = "prima-hub";
const KEY: &str = "token";
/// For the API server's answer.
const DEADLINE: Duration = Duration::from_secs(10);

pub struct HubTokens {
    client: Client,
    /// With the token of namespaces that have none of their own.
    shared: Hub,
}

/// Why it is not known which token a namespace has.
#[derive(Debug, thiserror::Error)]
pub enum HubTokenError {
    #[error("cannot read the Secret {namespace}/{SECRET}: {reason}")]
    Read { namespace: String, reason: String },
    #[error(
        "the Secret {namespace}/{SECRET}: expected the hub's token at key {KEY}, found nothing there; an empty one asks the hub without a token"
    )]
    Nothing { namespace: String },
    #[error("the Secret {namespace}/{SECRET}")]
    NoToken {
        namespace: String,
        source: SourceError,
    },
}

impl HubTokens {
    pub fn new(client: Client, shared: Hub) -> Self {
        Self { client, shared }
    }

    /// The hub with the token that all namespaces share.
    pub fn shared(&self) -> &Hub {
        &self.shared
    }

    /// Where `source` is fetched from for `namespace`, at this commit of its revision where that was looked up; `None` for what is not fetched.
    ///
    /// # Errors
    /// [`HubTokenError`] for a file of the hub, if the namespace's Secret cannot be read or used.
    pub async fn source(
        &self,
        namespace: &str,
        source: &ModelSource,
        commit: Option<&str>,
    ) -> Result<Option<Source>, HubTokenError> {
        // Other servers get no token.
        if !self.shared.has(source) {
            return Ok(self.shared.source(source, commit));
        }
        let own = self.own(namespace).await?;
        let hub = self.shared.with_own_token(own.as_deref());
        let hub = hub.map_err(|source| HubTokenError::NoToken {
            namespace: namespace.to_owned(),
            source,
        })?;
        Ok(hub.source(source, commit))
    }

    /// The token of the namespace, if it has one of its own.
    async fn own(&self, namespace: &str) -> Result<Option<String>, HubTokenError> {
        let unread = |reason| HubTokenError::Read {
            namespace: namespace.to_owned(),
            reason,
        };
        let secrets = Api::<Secret>::namespaced(self.client.clone(), namespace);
        let secret = timeout(DEADLINE, secrets.get_opt(SECRET)).await;
        let secret = secret
            .map_err(|_| unread("no answer from the API server".to_owned()))?
            .map_err(|error| unread(reason(&error)))?;
        let token = |secret: &Secret| {
            token(secret).ok_or_else(|| HubTokenError::Nothing {
                namespace: namespace.to_owned(),
            })
        };
        secret.as_ref().map(token).transpose()
    }
}

/// What the Secret has at the key. An empty one means that the namespace asks without any; none at all may be a misspelt key, and must not pass for
/// that. White space around it is an editor's.
fn token(secret: &Secret) -> Option<String> {
    let token = secret.data.as_ref()?.get(KEY)?;
    // What is no text stays no token, and is refused with all else that cannot be one.
    Some(String::from_utf8_lossy(token.0.trim_ascii()).into_owned())
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use axum::extract::Path;
    use axum::http::StatusCode;
    use axum::routing::get;
    use axum::{Json, Router};
    use k8s_openapi::ByteString;
    use prima_crds::error_chain;
    use prima_weights::PUBLIC_HUB;
    use serde_json::{Value, json};
    use tokio::net::TcpListener;

    use super::*;

    /// Of an API server in plain HTTP.
    fn client(address: SocketAddr) -> Client {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut config = kube::Config::new(format!("http://{address}").parse().unwrap());
        // No certificate is looked at, so none is looked for on this machine.
        config.root_cert = Some(Vec::new());
        Client::try_from(config).unwrap()
    }

    #[test]
    fn white_space_around_a_token_is_an_editors() {
        let found = |key: &str, value: &[u8]| {
            let entry = (key.to_owned(), ByteString(value.to_vec()));
            token(&Secret {
                data: Some([entry].into()),
                ..Secret::default()
            })
        };
        assert_eq!(found("token", b"hf_abc\n"), Some("hf_abc".to_owned()));
        assert_eq!(found("token", b" \n"), Some(String::new()));
        assert_eq!(found("tokens", b"hf_abc"), None);
        assert_eq!(token(&Secret::default()), None);
        let no_text = found("token", b"\xff").unwrap();
        assert!(!no_text.is_ascii());
    }

    /// What the API server says of a namespace's Secret. Values are in base64.
    async fn answer(Path(namespace): Path<String>) -> (StatusCode, Json<Value>) {
        let data = match namespace.as_str() {
            "own" => json!({"token": "b3du"}),
            "empty" => json!({"token": ""}),
            "misspelt" => json!({"tokens": "b3du"}),
            "two-words" => json!({"token": "dHdvIHdvcmRz"}),
            "closed" => return failure(StatusCode::FORBIDDEN, "Forbidden", "not for you"),
            _ => return failure(StatusCode::NOT_FOUND, "NotFound", "not found"),
        };
        let metadata = json!({"name": SECRET, "namespace": namespace});
        let secret =
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data});
        (StatusCode::OK, Json(secret))
    }

    fn failure(code: StatusCode, reason: &str, message: &str) -> (StatusCode, Json<Value>) {
        let status = json!({
            "apiVersion": "v1",
            "kind": "Status",
            "status": "Failure",
            "code": code.as_u16(),
            "reason": reason,
            "message": message,
        });
        (code, Json(status))
    }

    #[tokio::test]
    async fn a_namespaces_secret_counts_more_than_the_shared_token() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let path = format!("/api/v1/namespaces/{{namespace}}/secrets/{SECRET}");
        let api_server = Router::new().route(&path, get(answer));
        tokio::spawn(async move { axum::serve(listener, api_server).await });
        let tokens =
            |shared| HubTokens::new(client(address), Hub::new(PUBLIC_HUB, shared).unwrap());
        let (with_shared, without) = (tokens(Some("shared")), tokens(None));
        let source = |source: Value| -> ModelSource { serde_json::from_value(source).unwrap() };

        let on_hub = source(json!({"huggingFace": {"repo": "a/b", "file": "c.gguf"}}));
        for (tokens, namespace, expected) in [
            (&with_shared, "none", true),
            (&without, "none", false),
            (&without, "own", true),
            (&with_shared, "empty", false),
        ] {
            let fetched = tokens.source(namespace, &on_hub, None).await.unwrap();
            let token = fetched.unwrap().token;
            assert_eq!(token.is_some(), expected, "{namespace}");
        }
        for (namespace, said) in [
            (
                "closed",
                "cannot read the Secret closed/prima-hub: not for you",
            ),
            (
                "misspelt",
                "the Secret misspelt/prima-hub: expected the hub's token at key token",
            ),
            (
                "two-words",
                "the Secret two-words/prima-hub: token: expected visible ASCII",
            ),
        ] {
            let error = with_shared
                .source(namespace, &on_hub, None)
                .await
                .unwrap_err();
            let error = error_chain(&error);
            assert!(error.starts_with(said), "{error}");
        }

        let elsewhere = source(json!({"url": {"url": "https://nas/c.gguf"}}));
        let fetched = with_shared
            .source("closed", &elsewhere, None)
            .await
            .unwrap();
        assert!(fetched.unwrap().token.is_none());
    }
}
