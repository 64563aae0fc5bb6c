//! A file on a server: what identifies it, and its bytes by range.
//!
//! Decides: how redirects are followed (the hub sends what it knows of the file along with them), that a redirect's target is asked
//! for again when it refuses (signed addresses expire), and that every answer is held against the file's identity.
//!
//! Refuses: to send the token to another server than the source's own, and to hand out bytes of a file that changed meanwhile.

use std::error::Error;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_RANGE, ETAG, HeaderMap,
    LAST_MODIFIED, LOCATION, RANGE, RETRY_AFTER,
};
use reqwest::{Response, StatusCode, Url};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use crate::client::Client;
use crate::retry::Attempts;
use crate::source::{Location, Source, SourceError};

const MAX_REDIRECTS: usize = 10;
/// How often one request asks anew where the file is.
const MAX_REFRESHES: usize = 3;
/// What opening asks for: enough to tell a GGUF file from something else.
const PROBED_BYTES: u64 = 4;
/// The largest file that is believed: 64 TiB.
const MAX_FILE_BYTES: u64 = 1 << 46;

/// What tells one version of a file from another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Identity {
    pub size_bytes: u64,
    /// The server's name for this version: its ETag without quotes, or the date of its last change where it has no ETag.
    pub etag: Option<String>,
    /// In lower-case hexadecimal.
    pub sha256: Option<String>,
    /// The repository's commit; says nothing about the file, which most commits leave as it is.
    pub revision_commit: Option<String>,
}

/// In what two versions of a file differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The property.
    pub what: &'static str,
    pub expected: String,
    pub found: String,
}

/// An open file on a server.
#[derive(Debug)]
pub struct Remote {
    client: Client,
    source: Source,
    start: Url,
    identity: Identity,
    accepts_ranges: bool,
    first_bytes: Bytes,
    target: Mutex<Arc<Target>>,
}

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
        "repo {repo} is gated{message}: accept its licence at {page} and give a token of the account that did"
    )]
    Gated {
        repo: String,
        page: String,
        message: String,
    },

    #[error(
        "repo {repo}: not found{message}: check the name; if it is private, give a token that may read it"
    )]
    NoRepo { repo: String, message: String },

    #[error(
        "revision {revision} of repo {repo}: not found{message}: check the name of the branch, tag or commit"
    )]
    NoRevision {
        repo: String,
        revision: String,
        message: String,
    },

    #[error(
        "file {file} in repo {repo} at revision {revision}: not found{message}: check the name"
    )]
    NoFile {
        repo: String,
        revision: String,
        file: String,
        message: String,
    },

    #[error("{url}: refused ({status}){message}: {advice}")]
    Denied {
        url: String,
        status: StatusCode,
        message: String,
        advice: &'static str,
    },

    #[error("{url}: expected the file, found {status}{message}: check the address")]
    Status {
        url: String,
        status: StatusCode,
        message: String,
    },

    #[error("{url}: redirected more than {MAX_REDIRECTS} times")]
    TooManyRedirects { url: String },

    #[error("{url}: redirected to {found:?}: expected an http or https address")]
    Redirect { url: String, found: String },

    #[error("{url}: header {header}: expected {expected}, found {found:?}")]
    Header {
        url: String,
        header: &'static str,
        expected: &'static str,
        found: String,
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

    #[error("{url}: expected bytes {}..{}, found {found}", expected.start, expected.end)]
    OtherRange {
        url: String,
        expected: Range<u64>,
        found: String,
    },
}

/// Where the file's bytes come from for now.
#[derive(Debug)]
struct Target {
    url: Url,
    /// The name that this server has for the version.
    version: Option<String>,
}

/// The answer of a file that was found.
struct Found {
    target: Target,
    identity: Identity,
    accepts_ranges: bool,
    first_bytes: Bytes,
}

/// What a hub says of a file on the way to it.
#[derive(Default)]
struct Linked {
    etag: Option<String>,
    size_bytes: Option<u64>,
    commit: Option<String>,
}

impl Remote {
    /// Finds the file and learns its identity: asks for its first bytes.
    ///
    /// # Errors
    /// [`RemoteError`]; what may pass is tried again as the client's `retry` says.
    pub async fn open(client: &Client, source: &Source) -> Result<Remote, RemoteError> {
        let start = source.url()?;
        let found = find(client, source, &start).await?;
        Ok(Remote {
            client: client.clone(),
            source: source.clone(),
            start,
            identity: found.identity,
            accepts_ranges: found.accepts_ranges,
            first_bytes: found.first_bytes,
            target: Mutex::new(Arc::new(found.target)),
        })
    }

    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Whether the server sends parts of the file.
    pub fn accepts_ranges(&self) -> bool {
        self.accepts_ranges
    }

    /// The source's address, as it may be shown.
    pub fn shown(&self) -> String {
        shown(&self.start)
    }

    pub(crate) fn first_bytes(&self) -> &[u8] {
        &self.first_bytes
    }

    pub(crate) fn attempts(&self) -> Attempts {
        Attempts::new(self.client.retry)
    }

    /// The bytes of `range`, about to come. From a server without ranges the bytes before it come, too, and are dropped.
    pub(crate) async fn body(&self, range: Range<u64>) -> Result<Body, RemoteError> {
        let mut target = self.target.lock().await.clone();
        let asked = self.accepts_ranges.then(|| range.clone());
        let mut response = get(
            &self.client,
            &self.source,
            &self.start,
            &target.url,
            asked.clone(),
        )
        .await?;
        for _ in 0..MAX_REFRESHES {
            let status = response.status();
            let gone = status.is_redirection()
                || status.is_client_error() && status != StatusCode::RANGE_NOT_SATISFIABLE;
            if !gone || target.url == self.start {
                break;
            }
            target = self.refreshed(&target).await?;
            response = get(
                &self.client,
                &self.source,
                &self.start,
                &target.url,
                asked.clone(),
            )
            .await?;
        }
        self.check(&target, &response, &range)?;
        let skip = if self.accepts_ranges { 0 } else { range.start };
        Ok(Body {
            url: shown(&target.url),
            response,
            skip,
            expected: range.end - range.start,
            found: 0,
            exact: self.accepts_ranges,
        })
    }

    /// Where the file is now, after `used` turned out to be gone.
    async fn refreshed(&self, used: &Arc<Target>) -> Result<Arc<Target>, RemoteError> {
        let mut target = self.target.lock().await;
        if Arc::ptr_eq(&target, used) {
            let found = find(&self.client, &self.source, &self.start).await?;
            self.identity
                .same_file(&found.identity)
                .map_err(|difference| self.changed(difference))?;
            *target = Arc::new(found.target);
        }
        Ok(target.clone())
    }

    /// Holds an answer against the identity and against what was asked.
    fn check(
        &self,
        target: &Target,
        response: &Response,
        range: &Range<u64>,
    ) -> Result<(), RemoteError> {
        let url = &target.url;
        let version = version(response.headers());
        let same_version = || match (&target.version, &version) {
            (Some(expected), found) if found.as_ref() != Some(expected) => {
                Err(self.changed(difference("version (ETag)", expected, found.as_ref())))
            }
            _ => Ok(()),
        };
        let same_size = |found: Option<u64>| match found {
            Some(found) if found != self.identity.size_bytes => Err(self.changed(difference(
                "size in bytes",
                &self.identity.size_bytes,
                Some(&found),
            ))),
            _ => Ok(()),
        };
        not_encoded(url, response.headers())?;
        match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let (found, size_bytes) = content_range(url, response.headers())?;
                same_size(Some(size_bytes))?;
                same_version()?;
                if found.as_ref() != Some(range) {
                    return Err(RemoteError::OtherRange {
                        url: shown(url),
                        expected: range.clone(),
                        found: found.map_or_else(
                            || "none".to_owned(),
                            |found| format!("{}..{}", found.start, found.end),
                        ),
                    });
                }
                Ok(())
            }
            StatusCode::RANGE_NOT_SATISFIABLE => {
                same_size(
                    content_range(url, response.headers())
                        .ok()
                        .map(|(_, size)| size),
                )?;
                Err(refusal(&self.source, &self.start, response))
            }
            StatusCode::OK => {
                same_size(response.content_length())?;
                same_version()?;
                if self.accepts_ranges {
                    return Err(RemoteError::RangesIgnored { url: shown(url) });
                }
                Ok(())
            }
            _ => Err(refusal(&self.source, url, response)),
        }
    }

    fn changed(&self, difference: Difference) -> RemoteError {
        RemoteError::Changed {
            url: self.shown(),
            difference,
        }
    }
}

impl Identity {
    /// Whether `found` is the same version of the file. Where both have a digest, nothing else but the size counts.
    ///
    /// # Errors
    /// The first difference.
    pub fn same_file(&self, found: &Identity) -> Result<(), Difference> {
        if self.size_bytes != found.size_bytes {
            return Err(difference(
                "size in bytes",
                &self.size_bytes,
                Some(&found.size_bytes),
            ));
        }
        match (&self.sha256, &found.sha256, &self.etag, &found.etag) {
            (Some(expected), Some(found), ..) if expected != found => {
                Err(difference("sha256", expected, Some(found)))
            }
            (Some(_), Some(_), ..) => Ok(()),
            (_, _, Some(expected), found) if found.as_ref() != Some(expected) => {
                Err(difference("version (ETag)", expected, found.as_ref()))
            }
            _ => Ok(()),
        }
    }
}

impl RemoteError {
    /// Whether the same request may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            RemoteError::Request { .. }
                | RemoteError::Busy { .. }
                | RemoteError::CutOff { .. }
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

/// The bytes of one answer.
pub(crate) struct Body {
    url: String,
    response: Response,
    /// Bytes to drop before the first that was asked for.
    skip: u64,
    expected: u64,
    found: u64,
    /// Whether the answer ends where the range does.
    exact: bool,
}

impl Body {
    /// The next bytes; `None` when all that was asked for has come.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, RemoteError> {
        loop {
            let left = self.expected - self.found;
            if left == 0 && !self.exact {
                return Ok(None);
            }
            let mut chunk = match self.response.chunk().await {
                Ok(Some(chunk)) => chunk,
                Ok(None) if left == 0 => return Ok(None),
                Ok(None) => return Err(self.cut_off(None)),
                Err(source) => return Err(self.cut_off(Some(source))),
            };
            // Both conversions hold: nothing is longer than the chunk, whose length is a usize.
            let skipped = self.skip.min(chunk.len() as u64);
            self.skip -= skipped;
            let mut chunk = chunk.split_off(skipped as usize);
            if chunk.len() as u64 > left {
                if self.exact {
                    return Err(RemoteError::OtherRange {
                        url: self.url.clone(),
                        expected: 0..self.expected,
                        found: "more of them".to_owned(),
                    });
                }
                chunk.truncate(left as usize);
            }
            self.found += chunk.len() as u64;
            if !chunk.is_empty() {
                return Ok(Some(chunk));
            }
        }
    }

    fn cut_off(&self, source: Option<reqwest::Error>) -> RemoteError {
        RemoteError::CutOff {
            url: self.url.clone(),
            expected: self.expected,
            found: self.found,
            source: source.map(reqwest::Error::without_url),
        }
    }
}

/// Follows redirects until the file answers.
async fn find(client: &Client, source: &Source, start: &Url) -> Result<Found, RemoteError> {
    let mut attempts = Attempts::new(client.retry);
    loop {
        match find_once(client, source, start).await {
            Ok(found) => return Ok(found),
            Err(error) => attempts.failed(error).await?,
        }
    }
}

async fn find_once(client: &Client, source: &Source, start: &Url) -> Result<Found, RemoteError> {
    let mut url = start.clone();
    let mut linked = Linked::default();
    for _ in 0..=MAX_REDIRECTS {
        let response = get(client, source, start, &url, Some(0..PROBED_BYTES)).await?;
        // Only the source's own server says what the file is.
        if same_server(&url, start) {
            linked.note(&url, response.headers())?;
        }
        if !response.status().is_redirection() {
            return answer(source, start, url, linked, response).await;
        }
        let location = text(response.headers(), LOCATION.as_str()).unwrap_or_default();
        let next = url
            .join(&location)
            .ok()
            .filter(|next| matches!(next.scheme(), "http" | "https"));
        url = next.ok_or_else(|| RemoteError::Redirect {
            url: shown(&url),
            found: location
                .split('?')
                .next()
                .unwrap_or_default()
                .chars()
                .take(200)
                .collect(),
        })?;
    }
    Err(RemoteError::TooManyRedirects { url: shown(start) })
}

/// What the answer to the first request says of the file.
async fn answer(
    source: &Source,
    start: &Url,
    url: Url,
    linked: Linked,
    response: Response,
) -> Result<Found, RemoteError> {
    not_encoded(&url, response.headers())?;
    let (accepts_ranges, size_bytes) = match response.status() {
        // An empty file has no first bytes.
        StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
            (true, content_range(&url, response.headers())?.1)
        }
        StatusCode::OK => {
            let size = response
                .content_length()
                .ok_or_else(|| header(&url, "Content-Length", "the file's size", ""))?;
            (false, size)
        }
        _ => return Err(refusal(source, &url, &response)),
    };
    if size_bytes > MAX_FILE_BYTES {
        return Err(header(
            &url,
            "Content-Range",
            "a size of at most 64 TiB",
            &size_bytes.to_string(),
        ));
    }
    if let Some(expected) = linked.size_bytes.filter(|size| *size != size_bytes) {
        let difference = difference("size in bytes", &expected, Some(&size_bytes));
        return Err(RemoteError::Changed {
            url: shown(start),
            difference,
        });
    }
    let linked_sha256 = linked
        .etag
        .as_deref()
        .filter(|etag| is_sha256(etag))
        .map(str::to_ascii_lowercase);
    let sha256 = match (source.sha256(), linked_sha256) {
        (Some(expected), Some(found)) if expected != found => {
            return Err(RemoteError::OtherSha256 {
                url: shown(start),
                expected,
                found,
            });
        }
        (given, linked) => given.or(linked),
    };
    let version = version(response.headers());
    let mut found = Found {
        identity: Identity {
            size_bytes,
            etag: linked.etag.or_else(|| version.clone()),
            sha256,
            revision_commit: linked.commit,
        },
        accepts_ranges,
        first_bytes: Bytes::new(),
        target: Target { url, version },
    };
    let mut body = Body {
        url: shown(&found.target.url),
        response,
        skip: 0,
        expected: size_bytes.min(PROBED_BYTES),
        found: 0,
        exact: false,
    };
    let mut first_bytes = Vec::new();
    while let Some(chunk) = body.chunk().await? {
        first_bytes.extend_from_slice(&chunk);
    }
    found.first_bytes = first_bytes.into();
    Ok(found)
}

/// One request to `url`, on the way from `start`. Answers that may get better are errors already.
async fn get(
    client: &Client,
    source: &Source,
    start: &Url,
    url: &Url,
    range: Option<Range<u64>>,
) -> Result<Response, RemoteError> {
    // The bytes as they are: a compressed part is no part of the file.
    let mut request = client
        .http
        .get(url.clone())
        .header(ACCEPT_ENCODING, "identity");
    if let Some(range) = range {
        request = request.header(
            RANGE,
            format!("bytes={}-{}", range.start, range.end.saturating_sub(1)),
        );
    }
    if let Some(token) = source.token.as_ref().filter(|_| same_server(url, start)) {
        request = request.header(AUTHORIZATION, token.header());
    }
    let response = request.send().await.map_err(|source| {
        let (url, source) = (shown(url), source.without_url());
        match is_about_certificate(&source) {
            true => RemoteError::Untrusted { url, source },
            false => RemoteError::Request { url, source },
        }
    })?;
    let status = response.status();
    if status.is_server_error()
        || matches!(
            status,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT
        )
    {
        return Err(RemoteError::Busy {
            url: shown(url),
            status,
            pause: text(response.headers(), RETRY_AFTER.as_str())
                .and_then(|after| asked_pause(&after)),
        });
    }
    Ok(response)
}

/// Whether a request failed for the server's certificate, which trying again does not change.
fn is_about_certificate(error: &reqwest::Error) -> bool {
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(rustls::Error::InvalidCertificate(_)) = error.downcast_ref() {
            return true;
        }
        // An I/O error's source is that of the error in it, so the error in it would be passed over.
        let inside = error.downcast_ref().and_then(io::Error::get_ref);
        next = match inside {
            Some(inside) => Some(inside),
            None => error.source(),
        };
    }
    false
}

/// Whether what is for one is for the other: scheme, host and port.
fn same_server(one: &Url, other: &Url) -> bool {
    one.origin() == other.origin()
}

/// The error that an answer other than the file stands for.
fn refusal(source: &Source, url: &Url, response: &Response) -> RemoteError {
    let status = response.status();
    let headers = response.headers();
    let message = text(headers, "x-error-message").map_or_else(String::new, |message| {
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
            // To a token that it does not know the hub says the same as to a name that it does not know.
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

impl Linked {
    fn note(&mut self, url: &Url, headers: &HeaderMap) -> Result<(), RemoteError> {
        if let Some(etag) = text(headers, "x-linked-etag") {
            self.etag = Some(opaque(&etag));
        }
        if let Some(size) = text(headers, "x-linked-size") {
            let number = size
                .parse()
                .map_err(|_| header(url, "X-Linked-Size", "a number", &size))?;
            self.size_bytes = Some(number);
        }
        if let Some(commit) = text(headers, "x-repo-commit") {
            self.commit = Some(commit);
        }
        Ok(())
    }
}

/// The server's name for the version that it answers with.
fn version(headers: &HeaderMap) -> Option<String> {
    text(headers, ETAG.as_str())
        .map(|etag| opaque(&etag))
        .or_else(|| text(headers, LAST_MODIFIED.as_str()))
}

/// An ETag without quotes. Weak ones are taken for strong: servers make them weak for how a body is sent, and here it is sent as it is.
fn opaque(etag: &str) -> String {
    etag.trim_start_matches("W/").trim_matches('"').to_owned()
}

fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// `bytes 0-3/1000`, or `bytes */1000` with no range.
fn content_range(url: &Url, headers: &HeaderMap) -> Result<(Option<Range<u64>>, u64), RemoteError> {
    let found = text(headers, CONTENT_RANGE.as_str()).unwrap_or_default();
    let parsed = || {
        let (range, size) = found.strip_prefix("bytes ")?.split_once('/')?;
        let size = size.parse().ok()?;
        if range == "*" {
            return Some((None, size));
        }
        let (first, last) = range.split_once('-')?;
        let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        (first <= last && last < size).then(|| (Some(first..last + 1), size))
    };
    parsed().ok_or_else(|| header(url, "Content-Range", "bytes FIRST-LAST/SIZE", &found))
}

fn not_encoded(url: &Url, headers: &HeaderMap) -> Result<(), RemoteError> {
    match text(headers, CONTENT_ENCODING.as_str()) {
        Some(encoding) if encoding != "identity" => Err(header(
            url,
            "Content-Encoding",
            "none, as was asked",
            &encoding,
        )),
        _ => Ok(()),
    }
}

/// Retry-After: seconds, or a date.
fn asked_pause(text: &str) -> Option<Duration> {
    match text.parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => httpdate::parse_http_date(text)
            .ok()?
            .duration_since(SystemTime::now())
            .ok(),
    }
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

fn header(url: &Url, header: &'static str, expected: &'static str, found: &str) -> RemoteError {
    RemoteError::Header {
        url: shown(url),
        header,
        expected,
        found: found.chars().take(120).collect(),
    }
}

fn difference<T: ToString>(what: &'static str, expected: &T, found: Option<&T>) -> Difference {
    Difference {
        what,
        expected: expected.to_string(),
        found: found.map_or_else(|| "not given".to_owned(), T::to_string),
    }
}

/// An address as it may be shown: without the query, where signatures are.
fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_read_strictly() {
        let url = Url::parse("http://h/f").unwrap();
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_RANGE, text.parse().unwrap());
            content_range(&url, &headers)
        };
        assert_eq!(read("bytes 0-3/1000").unwrap(), (Some(0..4), 1000));
        assert_eq!(read("bytes */0").unwrap(), (None, 0));
        for bad in [
            "",
            "bytes 0-3/*",
            "bytes 4-3/10",
            "bytes 0-10/10",
            "bytes -1-3/10",
            "items 0-3/10",
            "bytes 0-18446744073709551615/18446744073709551615",
        ] {
            let error = read(bad).unwrap_err();
            assert!(
                error.to_string().contains("Content-Range"),
                "{bad}: {error}"
            );
        }
    }

    #[test]
    fn the_digest_decides_where_both_have_one() {
        let identity =
            |size_bytes, etag: Option<&str>, sha256: Option<&str>, commit: &str| Identity {
                size_bytes,
                etag: etag.map(str::to_owned),
                sha256: sha256.map(str::to_owned),
                revision_commit: Some(commit.to_owned()),
            };
        let known = identity(9, Some("e"), Some("s"), "1");
        assert_eq!(
            known.same_file(&identity(9, Some("other"), Some("s"), "2")),
            Ok(())
        );
        assert_eq!(known.same_file(&identity(9, Some("e"), None, "2")), Ok(()));
        for (other, what) in [
            (identity(8, Some("e"), Some("s"), "1"), "size in bytes"),
            (identity(9, Some("e"), Some("t"), "1"), "sha256"),
            (identity(9, Some("f"), None, "1"), "version (ETag)"),
            (identity(9, None, None, "1"), "version (ETag)"),
        ] {
            assert_eq!(known.same_file(&other).unwrap_err().what, what);
        }
    }

    #[test]
    fn servers_ask_for_pauses_in_seconds_or_by_date() {
        assert_eq!(asked_pause("7"), Some(Duration::from_secs(7)));
        let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(60));
        let pause = asked_pause(&date).unwrap();
        assert!((55..=60).contains(&pause.as_secs()), "{pause:?}");
        assert_eq!(asked_pause("Sun, 06 Nov 1994 08:49:37 GMT"), None);
        assert_eq!(asked_pause("soon"), None);
    }
}
