//! What headers of an answer say.

use std::ops::Range;
use std::time::{Duration, SystemTime};

use reqwest::header::{CONTENT_ENCODING, CONTENT_RANGE, ETAG, HeaderMap, LAST_MODIFIED};

use crate::remote_error::RemoteError;

/// The server's name for the version that it answers with.
pub(crate) fn version(headers: &HeaderMap) -> Option<String> {
    text(headers, ETAG.as_str())
        .map(|etag| opaque(&etag))
        .or_else(|| text(headers, LAST_MODIFIED.as_str()))
}

/// An ETag without quotes. Weak ones count as strong: servers make them weak because of how a body is sent, and here it is sent as it
/// is.
pub(crate) fn opaque(etag: &str) -> String {
    etag.trim_start_matches("W/").trim_matches('"').to_owned()
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

pub(crate) fn header(url: &str, header: &'static str, expected: &'static str) -> RemoteError {
    RemoteError::Header {
        url: url.to_owned(),
        header,
        expected,
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
    fn servers_ask_for_pauses_in_seconds_or_by_date() {
        assert_eq!(asked_pause("7"), Some(Duration::from_secs(7)));
        let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(60));
        let pause = asked_pause(&date).unwrap();
        assert!((55..=60).contains(&pause.as_secs()), "{pause:?}");
        assert_eq!(asked_pause("Sun, 06 Nov 1994 08:49:37 GMT"), None);
        assert_eq!(asked_pause("soon"), None);
    }
}
