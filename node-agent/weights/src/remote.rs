//! A file on a server: what identifies it, and its bytes by range.
//!
//! Decides how redirects are followed; the hub sends what it knows of the file along with them. If a redirect's target refuses, it is
//! looked up again, as signed addresses expire. Every answer is checked against the file's identity.
//!
//! Refuses: to send the token to another server than the source's own, and to hand out bytes of a file that changed meanwhile.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use reqwest::header::{ACCEPT_ENCODING, AUTHORIZATION, HeaderMap, LOCATION, RANGE, RETRY_AFTER};
use reqwest::{Response, StatusCode, Url};
use tokio::sync::Mutex;

use crate::client::Client;
use crate::headers::{
    asked_pause, commit, content_range, etag, header, not_encoded, text, version,
};
use crate::identity::{Difference, FileIdentity, another_version, difference};
use crate::reach::OutOfReach;
use crate::refusal::refusal;
use crate::remote_error::{
    MAX_REDIRECTS, RemoteError, is_about_certificate, is_about_time, is_caused_by, shown,
    shown_on_way,
};
use crate::retry::{Attempts, SLOWEST_BYTES};
use crate::source::Source;

/// How often one request may look up again where the file is.
const MAX_REFRESHES: usize = 3;
/// What opening asks for: enough to tell a GGUF file from something else.
const PROBED_BYTES: u64 = 4;
/// The largest file that is believed: 64 TiB.
const MAX_FILE_BYTES: u64 = 1 << 46;

/// An open file on a server.
#[derive(Debug)]
pub struct Remote {
    client: Client,
    source: Source,
    start: Url,
    identity: FileIdentity,
    accepts_ranges: bool,
    first_bytes: Bytes,
    target: Mutex<Arc<Target>>,
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
    identity: FileIdentity,
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
    /// [`RemoteError`]; temporary errors are tried again as the client's `retry` says.
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

    pub fn identity(&self) -> &FileIdentity {
        &self.identity
    }

    /// Whether the server sends parts of the file.
    pub fn accepts_ranges(&self) -> bool {
        self.accepts_ranges
    }

    /// The source's address, safe to show.
    pub fn shown(&self) -> String {
        shown(&self.start)
    }

    pub(crate) fn first_bytes(&self) -> &[u8] {
        &self.first_bytes
    }

    pub(crate) fn attempts(&self) -> Attempts {
        Attempts::new(self.client.retry)
    }

    /// Requests the bytes of `range`. A server without ranges also sends the bytes before it, which are dropped.
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
            url: shown_on_way(&self.start, &target.url),
            response,
            skip,
            expected: range.end - range.start,
            found: 0,
            exact: self.accepts_ranges,
            pace: Pace::new(self.client.retry.patience),
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

    /// Checks an answer against the identity and against what was asked.
    fn check(
        &self,
        target: &Target,
        response: &Response,
        range: &Range<u64>,
    ) -> Result<(), RemoteError> {
        let url = shown_on_way(&self.start, &target.url);
        let same_version = || {
            let found = version(&url, response.headers())?;
            match &target.version {
                Some(expected) if found.as_ref() != Some(expected) => {
                    Err(self.changed(another_version(found.as_ref())))
                }
                _ => Ok(()),
            }
        };
        let same_size = |found: Option<u64>| match found {
            Some(found) if found != self.identity.size_bytes => Err(self.changed(difference(
                "size in bytes",
                &self.identity.size_bytes,
                Some(&found),
            ))),
            _ => Ok(()),
        };
        not_encoded(&url, response.headers())?;
        match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let (found, size_bytes) = content_range(&url, response.headers())?;
                same_size(Some(size_bytes))?;
                same_version()?;
                if found.as_ref() != Some(range) {
                    return Err(RemoteError::OtherRange {
                        url,
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
                    content_range(&url, response.headers())
                        .ok()
                        .map(|(_, size)| size),
                )?;
                Err(refusal(&self.source, url, response))
            }
            StatusCode::OK => {
                same_size(response.content_length())?;
                same_version()?;
                if self.accepts_ranges {
                    return Err(RemoteError::RangesIgnored { url });
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
    pace: Pace,
}

/// How much of an answer comes in how long: one that drips would else never end.
struct Pace {
    patience: Duration,
    /// For the bytes: what else takes time here is not the server's.
    waited: Duration,
    bytes: u64,
}

impl Pace {
    fn new(patience: Duration) -> Self {
        Self {
            patience,
            waited: Duration::ZERO,
            bytes: 0,
        }
    }

    /// So many more came after so long. Fails if next to none did for as long as one has patience.
    fn add(&mut self, bytes: usize, waited: Duration, url: &str) -> Result<(), RemoteError> {
        self.bytes += bytes as u64;
        self.waited += waited;
        let (bytes, within) = (self.bytes, self.waited);
        if within < self.patience {
            return Ok(());
        }
        *self = Self::new(self.patience);
        match bytes < SLOWEST_BYTES {
            true => Err(RemoteError::TooSlow {
                url: url.to_owned(),
                bytes,
                within,
            }),
            false => Ok(()),
        }
    }
}

impl Body {
    /// The next bytes; `None` when all that was asked for has come.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, RemoteError> {
        loop {
            let left = self.expected - self.found;
            if left == 0 && !self.exact {
                return Ok(None);
            }
            let begun = Instant::now();
            let came = self.response.chunk().await;
            let waited = begun.elapsed();
            let mut chunk = match came {
                Ok(Some(chunk)) => chunk,
                Ok(None) if left == 0 => return Ok(None),
                Ok(None) => return Err(self.cut_off(None)),
                Err(source) => return Err(self.cut_off(Some(source))),
            };
            self.pace.add(chunk.len(), waited, &self.url)?;
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
            linked.note(&shown_on_way(start, &url), response.headers())?;
        }
        if !response.status().is_redirection() {
            return answer(client, source, start, url, linked, response).await;
        }
        let location = text(response.headers(), LOCATION.as_str()).unwrap_or_default();
        let next = url
            .join(&location)
            .ok()
            .filter(|next| matches!(next.scheme(), "http" | "https"));
        url = next.ok_or_else(|| RemoteError::Redirect {
            url: shown_on_way(start, &url),
        })?;
    }
    Err(RemoteError::TooManyRedirects { url: shown(start) })
}

/// What the answer to the first request says of the file.
async fn answer(
    client: &Client,
    source: &Source,
    start: &Url,
    url: Url,
    linked: Linked,
    response: Response,
) -> Result<Found, RemoteError> {
    let told = shown_on_way(start, &url);
    not_encoded(&told, response.headers())?;
    let (accepts_ranges, size_bytes) = match response.status() {
        // An empty file has no first bytes.
        StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
            (true, content_range(&told, response.headers())?.1)
        }
        StatusCode::OK => {
            let size = response
                .content_length()
                .ok_or_else(|| header(&told, "Content-Length", "the file's size"))?;
            (false, size)
        }
        _ => return Err(refusal(source, told, &response)),
    };
    if size_bytes > MAX_FILE_BYTES {
        return Err(header(&told, "Content-Range", "a size of at most 64 TiB"));
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
    let version = version(&told, response.headers())?;
    let mut found = Found {
        identity: FileIdentity {
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
        url: told,
        response,
        skip: 0,
        expected: size_bytes.min(PROBED_BYTES),
        found: 0,
        exact: false,
        pace: Pace::new(client.retry.patience),
    };
    let mut first_bytes = Vec::new();
    while let Some(chunk) = body.chunk().await? {
        first_bytes.extend_from_slice(&chunk);
    }
    found.first_bytes = first_bytes.into();
    Ok(found)
}

/// One request to `url`, on the way from `start`. Answers that a new try may improve are already errors.
async fn get(
    client: &Client,
    source: &Source,
    start: &Url,
    url: &Url,
    range: Option<Range<u64>>,
) -> Result<Response, RemoteError> {
    // The bytes as they are: a part of a compressed body is no part of the file.
    let http = client.http(url).map_err(|_| RemoteError::OutOfReach {
        url: shown_on_way(start, url),
    })?;
    let mut request = http.get(url.clone()).header(ACCEPT_ENCODING, "identity");
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
        let (url, source) = (shown_on_way(start, url), source.without_url());
        let out_of_reach = is_caused_by(&source, |_: &OutOfReach| true);
        match (is_about_certificate(&source), out_of_reach) {
            (true, _) if is_about_time(&source) => RemoteError::OutOfDate { url, source },
            (true, _) => RemoteError::Untrusted { url, source },
            (_, true) => RemoteError::OutOfReach { url },
            _ => RemoteError::Request { url, source },
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
            url: shown_on_way(start, url),
            status,
            pause: text(response.headers(), RETRY_AFTER.as_str())
                .and_then(|after| asked_pause(&after)),
        });
    }
    Ok(response)
}

/// Whether both are the same server: scheme, host and port.
fn same_server(one: &Url, other: &Url) -> bool {
    one.origin() == other.origin()
}

impl Linked {
    fn note(&mut self, url: &str, headers: &HeaderMap) -> Result<(), RemoteError> {
        if let Some(etag) = etag(url, headers, "X-Linked-ETag")? {
            self.etag = Some(etag);
        }
        if let Some(size) = text(headers, "x-linked-size") {
            let number = size
                .parse()
                .map_err(|_| header(url, "X-Linked-Size", "a number"))?;
            self.size_bytes = Some(number);
        }
        if let Some(commit) = commit(url, headers)? {
            self.commit = Some(commit);
        }
        Ok(())
    }
}

fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
