//! Logs to stderr, and traces by OTLP when the environment asks for them (`OTEL_EXPORTER_OTLP_ENDPOINT` and the other
//! variables of OpenTelemetry's specification). Without these, nothing is collected.

use std::io::IsTerminal;

use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{ExporterBuildError, SpanExporter};
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt};

pub struct Telemetry {
    provider: Option<SdkTracerProvider>,
}

#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    #[error("cannot export traces as the OTEL_ variables say")]
    Exporter(#[from] ExporterBuildError),
}

/// One of these says where traces go.
const ENDPOINTS: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
];

impl Telemetry {
    /// Once per process. Needs the async runtime.
    pub fn start() -> Result<Self, TelemetryError> {
        let asked = ENDPOINTS
            .iter()
            .any(|name| std::env::var_os(name).is_some());
        let provider = match asked {
            true => {
                let exporter = SpanExporter::builder().with_tonic().build()?;
                Some(
                    SdkTracerProvider::builder()
                        .with_batch_exporter(exporter)
                        .build(),
                )
            }
            false => None,
        };
        let traces = provider
            .as_ref()
            .map(|provider| tracing_opentelemetry::layer().with_tracer(provider.tracer("prima")));
        tracing_subscriber::registry()
            .with(EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info")))
            .with(
                fmt::layer()
                    .with_writer(std::io::stderr)
                    .with_ansi(std::io::stderr().is_terminal())
                    .with_target(false),
            )
            .with(traces)
            .init();
        Ok(Self { provider })
    }

    /// Sends the traces that are still held back.
    pub fn flush(&self) {
        if let Some(Err(error)) = self.provider.as_ref().map(SdkTracerProvider::shutdown) {
            tracing::warn!(%error, "some traces were not exported");
        }
    }
}
