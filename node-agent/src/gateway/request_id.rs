//! X-Request-Id, which Anthropic's clients look for as Request-Id: the client's own is echoed, else one is made; and the random numbers for
//! ids and seeds.

use std::hash::{BuildHasher, Hasher, RandomState};

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use tracing::Instrument;

pub static HEADER: HeaderName = HeaderName::from_static("x-request-id");
static ANTHROPICS_HEADER: HeaderName = HeaderName::from_static("request-id");

/// Longer ids than this are replaced, so that logs stay readable.
const MAX_LENGTH: usize = 128;

pub async fn attach(mut request: Request, next: Next) -> Response {
    let echoed = request.headers().get(&HEADER).filter(|id| {
        (1..=MAX_LENGTH).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
    });
    let id = match echoed {
        Some(id) => id.clone(),
        None => HeaderValue::from_str(&unique("req")).unwrap_or(HeaderValue::from_static("req")),
    };
    let span = tracing::info_span!("request", id = id.to_str().unwrap_or_default());
    // For whoever comes later.
    request.headers_mut().insert(HEADER.clone(), id.clone());
    let mut response = next.run(request).instrument(span).await;
    let headers = response.headers_mut();
    headers.insert(HEADER.clone(), id.clone());
    headers.insert(ANTHROPICS_HEADER.clone(), id);
    response
}

/// `PREFIX-` and 32 random hexadecimal digits.
pub fn unique(prefix: &str) -> String {
    format!("{prefix}-{:016x}{:016x}", random(), random())
}

/// The standard library's hash keys come from the operating system's randomness: good for ids and seeds, not for secrets.
pub fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
