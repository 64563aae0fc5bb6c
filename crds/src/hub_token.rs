//! The hub's token of a namespace. Operator and agents read it from a Secret of one name, and send it to the hub for that namespace's Models
//! in place of the token that all namespaces share.

use k8s_openapi::api::core::v1::Secret;

/// The Secret of a namespace that has a token of its own.
pub const HUB_SECRET: &str = "prima-hub";

const KEY: &str = "token";

/// The Secret is there, and says nothing.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected the hub's token at key {KEY}, found nothing there; an empty one asks the hub without a token"
)]
pub struct NoHubToken;

/// What a namespace's Secret [`HUB_SECRET`] has as the token. An empty one means that the namespace asks without any. White space around it is
/// an editor's.
///
/// # Errors
/// [`NoHubToken`] when it has nothing at the key: a misspelt one must not pass for none.
pub fn hub_token(secret: &Secret) -> Result<String, NoHubToken> {
    let data = secret.data.as_ref();
    let token = data.and_then(|data| data.get(KEY)).ok_or(NoHubToken)?;
    // What is no text stays no token, and is refused with all else that cannot be one.
    Ok(String::from_utf8_lossy(token.0.trim_ascii()).into_owned())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;

    use super::*;

    #[test]
    fn white_space_around_a_token_is_an_editors() {
        let found = |key: &str, value: &[u8]| {
            let entry = (key.to_owned(), ByteString(value.to_vec()));
            hub_token(&Secret {
                data: Some([entry].into()),
                ..Secret::default()
            })
        };
        assert_eq!(found("token", b"hf_abc\n"), Ok("hf_abc".to_owned()));
        assert_eq!(found("token", b" \n"), Ok(String::new()));
        assert_eq!(found("tokens", b"hf_abc"), Err(NoHubToken));
        assert_eq!(hub_token(&Secret::default()), Err(NoHubToken));
        let no_text = found("token", b"\xff").unwrap();
        assert!(!no_text.is_ascii());
    }
}
