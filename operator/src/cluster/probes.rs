//! /healthz (the event loop turns), /readyz (leads and hears from the API server, or waits to lead) and /metrics.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prima_crds::OPEN_METRICS;
use tokio::net::TcpListener;

use super::metrics::Metrics;

pub struct Probes {
    metrics: Arc<Metrics>,
    /// The API server was found.
    alive: AtomicBool,
    /// It leads and knows the cluster.
    controls: AtomicBool,
}

impl Probes {
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            metrics,
            alive: AtomicBool::new(false),
            controls: AtomicBool::new(false),
        }
    }

    pub fn set_alive(&self) {
        self.alive.store(true, Ordering::Relaxed);
    }

    pub fn set_ready(&self) {
        self.controls.store(true, Ordering::Relaxed);
    }

    /// Serves for ever.
    pub async fn serve(self: &Arc<Self>, listener: TcpListener) -> io::Result<()> {
        let app = Router::new()
            .route("/healthz", get(|| async { "ok" }))
            .route("/readyz", get(ready))
            .route("/metrics", get(metrics))
            .with_state(self.clone());
        axum::serve(listener, app).await
    }
}

/// A replica that waits to lead is ready, too: a rolling update must not wait for it to win.
async fn ready(State(probes): State<Arc<Probes>>) -> Response {
    match (
        probes.alive.load(Ordering::Relaxed),
        probes.controls.load(Ordering::Relaxed),
    ) {
        (true, true) => "leads\n".into_response(),
        (true, false) => "waits to lead\n".into_response(),
        (false, _) => (StatusCode::SERVICE_UNAVAILABLE, "starting\n").into_response(),
    }
}

async fn metrics(State(probes): State<Arc<Probes>>) -> Response {
    match probes.metrics.text() {
        Ok(text) => ([(CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
