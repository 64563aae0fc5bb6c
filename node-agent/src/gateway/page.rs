//! GET /: the chat page, one HTML file inside the binary. It loads nothing from elsewhere and works offline.

use axum::http::header;
use axum::response::{Html, IntoResponse};

/// Nothing from other origins, no frames around it, no forms out of it.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
    connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub async fn chat() -> impl IntoResponse {
    (
        [
            (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            (header::CACHE_CONTROL, "no-cache"),
        ],
        Html(include_str!("chat.html")),
    )
}
