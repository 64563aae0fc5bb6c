//! The first span of a request's trace: from its head to the end of its answer.

use axum::body::Body;
use axum::extract::{MatchedPath, Request};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use prima_connections::LastingBody;

use super::request_id;
use crate::trace::Span;

/// Traces what is posted: nothing else makes the ring compute.
pub async fn trace(request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>();
    let mut span = match route {
        Some(route) if request.method() == Method::POST => {
            Span::of_request(format!("POST {}", route.as_str()), request.headers())
        }
        _ => Span::default(),
    };
    if span.is_nothing() {
        return next.run(request).await;
    }
    span.set("http.request.method", "POST");
    if let Some(Ok(id)) = request
        .headers()
        .get(&request_id::HEADER)
        .map(|id| id.to_str())
    {
        span.set("prima.request_id", id.to_owned());
    }
    let response = span.trace().around(next.run(request)).await;
    let status = response.status();
    span.set("http.response.status_code", i64::from(status.as_u16()));
    if status.is_server_error() {
        span.failed(status.to_string());
    }
    response.map(|body| Body::new(LastingBody::new(body, span)))
}
