//! The agent's own HTTP: /healthz (the event loop turns), /readyz (the profile is published and all watches are
//! established) and /metrics. Models are answered by the members' processes, not here.

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prima_connections::serve_probes;
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
pub async fn serve(listener: TcpListener, metrics: Metrics, established: Established) {
    let router = Router::new()
        // If it answers, it is alive.
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(scrape))
        .with_state(Shown {
            metrics,
            established,
        });
    serve_probes(listener, router).await;
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
        tokio::spawn(serve(listener, Metrics::default(), Established::default()));
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
