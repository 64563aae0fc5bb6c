//! What it means when a server does not send the file. Its own words are told only where it is the hub that was named: a Model's status
//! repeats no text of a server that somebody's address, or a redirect, leads to.

use reqwest::{Response, StatusCode, Url};

use crate::headers::text;
use crate::remote_error::{RemoteError, shown};
use crate::source::{Location, Source};

/// The error for an answer that is not the file.
pub(crate) fn refusal(source: &Source, url: &Url, response: &Response) -> RemoteError {
    let status = response.status();
    let headers = response.headers();
    let said = text(headers, "x-error-message").filter(|_| is_hub(source, url));
    let message = said.map_or_else(String::new, |message| {
        let message: String = message
            .chars()
            .filter(|c| !c.is_control())
            .take(200)
            .collect();
        format!(" ({})", message.trim_end_matches('.'))
    });
    let code = text(headers, "x-error-code").unwrap_or_default();
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
                return RemoteError::Gated {
                    repo,
                    page,
                    message,
                };
            }
            // The hub gives the same answer to an unknown token as to an unknown name.
            "RepoNotFound" => return RemoteError::NoRepo { repo, message },
            "RevisionNotFound" => {
                return RemoteError::NoRevision {
                    repo,
                    revision,
                    message,
                };
            }
            "EntryNotFound" => {
                return RemoteError::NoFile {
                    repo,
                    revision,
                    file,
                    message,
                };
            }
            _ => {}
        }
    }
    let url = shown(url);
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => RemoteError::Denied {
            url,
            status,
            message,
            advice: match source.token {
                Some(_) => "the token may not read this file: give another one",
                None => "give a token",
            },
        },
        _ => RemoteError::Status {
            url,
            status,
            message,
        },
    }
}

/// Whether `url` is on the hub that the source names.
fn is_hub(source: &Source, url: &Url) -> bool {
    match &source.location {
        Location::HuggingFace { endpoint, .. } => {
            Url::parse(endpoint).is_ok_and(|hub| hub.origin() == url.origin())
        }
        Location::Url { .. } => false,
    }
}
