//! Why a file on a server cannot be fetched, and what would help. No text of a server is repeated: these errors end in the status of Models, and
//! whoever may write Models names servers.

use std::borrow::Cow;
use std::error::Error;
use std::io;
use std::ops::Range;
use std::time::Duration;

use reqwest::{StatusCode, Url};

use crate::identity::Difference;
use crate::source::SourceError;

/// The most redirects that are followed.
pub(crate) const MAX_REDIRECTS: usize = 10;

/// Why a file cannot be fetched. Addresses are shown without their query, which may hold a signature.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    #[error(transparent)]
    Source(#[from] SourceError),

    #[error("cannot fetch {url}")]
    Request { url: String, source: reqwest::Error },

    #[error(
        "{url}: the server's certificate is not trusted: look at the address, or name a file with its authority in SSL_CERT_FILE"
    )]
    Untrusted { url: String, source: reqwest::Error },

    #[error(
        "{url}: by this machine's clock, the server's certificate is not valid yet or has expired: set the clock, or renew the certificate"
    )]
    OutOfDate { url: String, source: reqwest::Error },

    #[error(
        "{url}: the server is not on the internet, and prima may not ask it: whoever installed prima can allow it (allowedServers of the chart)"
    )]
    OutOfReach { url: String },

    #[error("{url}: the server cannot answer now ({status})")]
    Busy {
        url: String,
        status: StatusCode,
        pause: Option<Duration>,
    },

    #[error("no answer after {attempts} tries")]
    GaveUp {
        attempts: u32,
        source: Box<RemoteError>,
    },

    #[error(
        "repo {repo} is gated: accept its licence at {page} and give a token of the account that did"
    )]
    Gated { repo: String, page: String },

    #[error(
        "repo {repo}: not found: check the name; if it is private, give a token that may read it"
    )]
    NoRepo { repo: String },

    #[error(
        "revision {revision} of repo {repo}: not found: check the name of the branch, tag or commit"
    )]
    NoRevision { repo: String, revision: String },

    #[error("file {file} in repo {repo} at revision {revision}: not found: check the name")]
    NoFile {
        repo: String,
        revision: String,
        file: String,
    },

    #[error("{url}: refused ({status}): {advice}")]
    Denied {
        url: String,
        status: StatusCode,
        advice: &'static str,
    },

    #[error("{url}: expected the file, found {status}: check the address")]
    Status { url: String, status: StatusCode },

    #[error("{url}: redirected more than {MAX_REDIRECTS} times")]
    TooManyRedirects { url: String },

    #[error("{url}: redirected to something that is no http or https address")]
    Redirect { url: String },

    #[error("{url}: header {header} of the answer: expected {expected}")]
    Header {
        url: String,
        header: &'static str,
        expected: Cow<'static, str>,
    },

    #[error("{url}: the file changed on the server: {} was {}, is {}", difference.what, difference.expected, difference.found)]
    Changed { url: String, difference: Difference },

    #[error(
        "{url}: expected sha256 {expected}, as given with the address, found {found}: correct one of them"
    )]
    OtherSha256 {
        url: String,
        expected: String,
        found: String,
    },

    #[error(
        "{url}: the server cannot send parts of the file: use one that can, or allow the whole file to be fetched"
    )]
    RangesIgnored { url: String },

    #[error("{url}: expected {expected} bytes, the connection ended after {found}")]
    CutOff {
        url: String,
        expected: u64,
        found: u64,
        source: Option<reqwest::Error>,
    },

    #[error("{url}: only {bytes} bytes came in {} s", within.as_secs())]
    TooSlow {
        url: String,
        bytes: u64,
        within: Duration,
    },

    #[error("{url}: expected bytes {}..{}, found {found}", expected.start, expected.end)]
    OtherRange {
        url: String,
        expected: Range<u64>,
        found: String,
    },
}

impl RemoteError {
    /// Whether the same request may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            RemoteError::Request { .. }
                | RemoteError::OutOfDate { .. }
                | RemoteError::Busy { .. }
                | RemoteError::CutOff { .. }
                | RemoteError::TooSlow { .. }
                | RemoteError::OtherRange { .. }
        )
    }

    /// How long the server asks its clients to wait.
    pub(crate) fn asked_pause(&self) -> Option<Duration> {
        match self {
            RemoteError::Busy { pause, .. } => *pause,
            _ => None,
        }
    }
}

/// Whether a request failed because of the server's certificate.
pub(crate) fn is_about_certificate(error: &reqwest::Error) -> bool {
    let is_about = |error: &rustls::Error| matches!(error, rustls::Error::InvalidCertificate(_));
    is_caused_by(error, is_about)
}

/// Whether that is because the certificate is valid at other times than now. Machines without a clock of their own start in the past.
pub(crate) fn is_about_time(error: &reqwest::Error) -> bool {
    use rustls::CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};
    is_caused_by(error, |error: &rustls::Error| {
        let rustls::Error::InvalidCertificate(error) = error else {
            return false;
        };
        matches!(
            error,
            Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. }
        )
    })
}

/// Whether `error`, or one that it came from, is an `E` for which `holds`.
pub(crate) fn is_caused_by<E: Error + 'static>(
    error: &reqwest::Error,
    holds: impl Fn(&E) -> bool,
) -> bool {
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = next {
        if error.downcast_ref().is_some_and(&holds) {
            return true;
        }
        // The source of an I/O error skips the error wrapped in it, so the wrapped error is looked at here.
        let inside = error.downcast_ref().and_then(io::Error::get_ref);
        next = match inside {
            Some(inside) => Some(inside),
            None => error.source(),
        };
    }
    false
}

/// An address as it may be shown: without the query, where signatures are.
pub(crate) fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.to_string()
}

/// The same for an address on the way from `start`. Of one that a redirect names, only the server: the rest is that server's text.
pub(crate) fn shown_on_way(start: &Url, url: &Url) -> String {
    match url == start {
        true => shown(url),
        false => url.origin().ascii_serialization(),
    }
}
