//! The agent's own HTTP: /healthz (the event loop turns), /readyz (the profile is published and all watches are
//! established) and /metrics. Models are answered by the members' processes, not here.

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prima_crds::OPEN_METRICS;
use prometheus_client::encoding::text::encode;
use tokio::net::TcpListener;

use super::metrics::{Established, Metrics};

#[derive(Clone)]
struct Shown {
    metrics: Metrics,
    established: Established,
}

/// Serves for as long as the process runs.
pub async fn serve(
    listener: TcpListener,
    metrics: Metrics,
    established: Established,
) -> std::io::Result<()> {
    let router = Router::new()
        // If it answers, it is alive.
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(scrape))
        .with_state(Shown {
            metrics,
            established,
        });
    axum::serve(listener, router).await
}

async fn ready(State(shown): State<Shown>) -> Response {
    let missing = shown.established.missing();
    match missing.is_empty() {
        true => "ok".into_response(),
        false => (StatusCode::SERVICE_UNAVAILABLE, missing.join("\n")).into_response(),
    }
}

async fn scrape(State(shown): State<Shown>) -> Response {
    let mut text = String::new();
    match encode(&mut text, &shown.metrics.registry()) {
        Ok(()) => ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(_) => (
            StatusCode::INTERNAL_SERVER_ERROR,
            "cannot write the metrics",
        )
            .into_response(),
    }
}
