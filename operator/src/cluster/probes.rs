//! /healthz (the event loop turns), /readyz (leads and hears from the API server, or waits to lead) and /metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prima_connections::serve_probes;
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
    pub async fn serve(self: &Arc<Self>, listener: TcpListener) {
        let app = Router::new()
            .route("/healthz", get(|| async { "ok" }))
            .route("/readyz", get(ready))
            .route("/metrics", get(metrics))
            .with_state(self.clone());
        serve_probes(listener, app).await;
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prima_connections::Limits;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn half_heads_are_not_kept() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let probes = Arc::new(Probes::new(Arc::new(Metrics::new())));
        tokio::spawn(async move { probes.serve(listener).await });
        let mut strangers = Vec::new();
        for _ in 0..Limits::PROBES.connections {
            let mut stranger = TcpStream::connect(address).await.unwrap();
            stranger.write_all(b"GET /metrics HT").await.unwrap();
            strangers.push(stranger);
        }
        let mut probe = TcpStream::connect(address).await.unwrap();
        let request = "GET /healthz HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
        probe.write_all(request.as_bytes()).await.unwrap();
        // Who came first is cut off, for the probe or when its head took too long.
        for (stream, expected) in [(&mut probe, "ok"), (&mut strangers[0], "")] {
            let mut answer = Vec::new();
            let reading = stream.read_to_end(&mut answer);
            let ended = timeout(Duration::from_secs(60), reading).await;
            // One that is cut off may end with a reset.
            let _ = ended.expect("an end");
            let answer = String::from_utf8(answer).unwrap();
            assert_eq!(answer.lines().last().unwrap_or(""), expected);
        }
    }
}
