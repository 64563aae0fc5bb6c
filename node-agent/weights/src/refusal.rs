//! What it means when a server does not send the file.

use reqwest::{Response, StatusCode};

use crate::headers::text;
use crate::remote_error::RemoteError;
use crate::source::{Location, Source};

/// The error for an answer of `url` that is not the file.
pub(crate) fn refusal(source: &Source, url: String, response: &Response) -> RemoteError {
    let code = text(response.headers(), "x-error-code").unwrap_or_default();
    if let Location::HuggingFace {
        endpoint,
        repo,
        revision,
        file,
    } = &source.location
    {
        let (repo, revision, file) = (repo.clone(), revision.clone(), file.clone());
        match code.as_str() {
            "GatedRepo" => {
                let page = format!("{}/{repo}", endpoint.trim_end_matches('/'));
                return RemoteError::Gated { repo, page };
            }
            // The hub gives the same answer to an unknown token as to an unknown name.
            "RepoNotFound" => return RemoteError::NoRepo { repo },
            "RevisionNotFound" => return RemoteError::NoRevision { repo, revision },
            "EntryNotFound" => {
                return RemoteError::NoFile {
                    repo,
                    revision,
                    file,
                };
            }
            _ => {}
        }
    }
    match response.status() {
        status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => RemoteError::Denied {
            url,
            status,
            advice: match source.token {
                Some(_) => "the token may not read this file: give another one",
                None => "give a token",
            },
        },
        status => RemoteError::Status { url, status },
    }
}
