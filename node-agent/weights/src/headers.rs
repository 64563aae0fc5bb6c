//! What headers of an answer say.

use std::borrow::Cow;
use std::ops::Range;
use std::time::{Duration, SystemTime};

use prima_crds::v1alpha1::ring_plan::{MAX_COMMIT_CHARS, MAX_ETAG_CHARS};
use reqwest::header::{CONTENT_ENCODING, CONTENT_RANGE, HeaderMap, LAST_MODIFIED};

use crate::remote_error::RemoteError;

/// The server's name for the version that it answers with.
pub(crate) fn version(url: &str, headers: &HeaderMap) -> Result<Option<String>, RemoteError> {
    match etag(url, headers, "ETag")? {
        Some(etag) => Ok(Some(etag)),
        None => {
            let changed = text(headers, LAST_MODIFIED.as_str());
            short(url, "Last-Modified", changed, MAX_ETAG_CHARS)
        }
    }
}

/// An ETag without quotes. Weak ones count as strong: servers make them weak because of how a body is sent, and here it is sent as it
/// is.
pub(crate) fn etag(
    url: &str,
    headers: &HeaderMap,
    name: &'static str,
) -> Result<Option<String>, RemoteError> {
    let opaque = |etag: String| etag.trim_start_matches("W/").trim_matches('"').to_owned();
    short(url, name, text(headers, name).map(opaque), MAX_ETAG_CHARS)
}

/// The commit of the repository that the file is in.
pub(crate) fn commit(url: &str, headers: &HeaderMap) -> Result<Option<String>, RemoteError> {
    let name = "X-Repo-Commit";
    short(url, name, text(headers, name), MAX_COMMIT_CHARS)
}

/// What is longer does not fit into the documents that say which version of a file a ring has: they could never be written.
fn short(
    url: &str,
    name: &'static str,
    found: Option<String>,
    most: usize,
) -> Result<Option<String>, RemoteError> {
    match found {
        Some(found) if found.len() > most => {
            Err(header(url, name, format!("at most {most} characters")))
        }
        found => Ok(found),
    }
}

/// `bytes 0-3/1000`, or `bytes */1000` with no range.
pub(crate) fn content_range(
    url: &str,
    headers: &HeaderMap,
) -> Result<(Option<Range<u64>>, u64), RemoteError> {
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
    parsed().ok_or_else(|| header(url, "Content-Range", "bytes FIRST-LAST/SIZE"))
}

pub(crate) fn not_encoded(url: &str, headers: &HeaderMap) -> Result<(), RemoteError> {
    match text(headers, CONTENT_ENCODING.as_str()) {
        Some(encoding) if encoding != "identity" => {
            Err(header(url, "Content-Encoding", "none, as was asked"))
        }
        _ => Ok(()),
    }
}

/// Retry-After: seconds, or a date.
pub(crate) fn asked_pause(text: &str) -> Option<Duration> {
    match text.parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => httpdate::parse_http_date(text)
            .ok()?
            .duration_since(SystemTime::now())
            .ok(),
    }
}

pub(crate) fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

pub(crate) fn header(
    url: &str,
    header: &'static str,
    expected: impl Into<Cow<'static, str>>,
) -> RemoteError {
    RemoteError::Header {
        url: url.to_owned(),
        header,
        expected: expected.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_read_strictly() {
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_RANGE, text.parse().unwrap());
            content_range("http://h/f", &headers)
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
    fn versions_are_no_longer_than_documents_can_hold() {
        type Read = fn(&str, &HeaderMap) -> Result<Option<String>, RemoteError>;
        let linked: Read = |url, headers| etag(url, headers, "X-Linked-ETag");
        let limits: [(&str, Read, usize); 4] = [
            ("ETag", version, 500),
            ("Last-Modified", version, 500),
            ("X-Linked-ETag", linked, 500),
            ("X-Repo-Commit", commit, 100),
        ];
        for (name, read, most) in limits {
            let said = |text: &str| {
                let mut headers = HeaderMap::new();
                let name = name.to_lowercase();
                let name = reqwest::header::HeaderName::from_bytes(name.as_bytes());
                headers.insert(name.unwrap(), text.parse().unwrap());
                read("http://h/f", &headers)
            };
            let longest = "a".repeat(most);
            assert_eq!(said(&longest).unwrap(), Some(longest.clone()));
            let error = said(&(longest + "a")).unwrap_err().to_string();
            let expected =
                format!("header {name} of the answer: expected at most {most} characters");
            assert!(error.contains(&expected), "{error}");
        }
        let mut headers = HeaderMap::new();
        assert_eq!(version("http://h/f", &headers).unwrap(), None);
        // What is not part of it does not count.
        let longest = "a".repeat(500);
        let weak = format!("W/\"{longest}\"");
        headers.insert("etag", weak.parse().unwrap());
        assert_eq!(version("http://h/f", &headers).unwrap(), Some(longest));
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
