//! The chat page at `/`, and its parts below `/page/`: files of the folder `page/` inside the binary. They are open
//! without a key, load nothing from elsewhere and work offline.

use axum::extract::Path;
use axum::http::{Method, Uri, header};
use axum::response::{IntoResponse, Response};

use super::openai_error;

/// Nothing from other origins, no frames around it, no forms out of it; and what becomes markup went through DOMPurify.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; \
    img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
    require-trusted-types-for 'script'; trusted-types dompurify";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Name, type and text of each part.
const PARTS: [(&str, &str, &str); 10] = [
    ("chat.css", CSS, include_str!("page/chat.css")),
    ("chat.js", SCRIPT, include_str!("page/chat.js")),
    ("api.js", SCRIPT, include_str!("page/api.js")),
    ("make.js", SCRIPT, include_str!("page/make.js")),
    ("markdown.js", SCRIPT, include_str!("page/markdown.js")),
    ("message.js", SCRIPT, include_str!("page/message.js")),
    ("ring.js", SCRIPT, include_str!("page/ring.js")),
    ("store.js", SCRIPT, include_str!("page/store.js")),
    (
        "marked.umd.js",
        SCRIPT,
        include_str!("page/vendored/marked.umd.js"),
    ),
    (
        "purify.min.js",
        SCRIPT,
        include_str!("page/vendored/purify.min.js"),
    ),
];

pub async fn chat() -> Response {
    file(HTML, include_str!("page/chat.html"))
}

pub async fn part(Path(wanted): Path<String>, method: Method, uri: Uri) -> Response {
    match PARTS.iter().find(|(name, ..)| *name == wanted) {
        Some((_, kind, text)) => file(kind, text),
        None => openai_error::no_such_route(method, uri)
            .await
            .into_response(),
    }
}

/// A newer agent may have other parts: browsers ask each time, and never mix them.
fn file(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text).into_response()
}
