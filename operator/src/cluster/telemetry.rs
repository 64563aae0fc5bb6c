//! Logs to stderr, and traces to where the environment says.

use std::io::IsTerminal;

use prima_traces::{Traces, TracesError};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt};

pub struct Telemetry {
    traces: Option<Traces>,
}

impl Telemetry {
    /// Once per process. Needs the async runtime. `instance`: which operator it is.
    pub fn start(instance: &str) -> Result<Self, TracesError> {
        let traces = Traces::start("prima-operator", instance)?;
        let spans = traces
            .as_ref()
            .map(|traces| tracing_opentelemetry::layer().with_tracer(traces.tracer()));
        tracing_subscriber::registry()
            .with(EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info")))
            .with(
                fmt::layer()
                    .with_writer(std::io::stderr)
                    .with_ansi(std::io::stderr().is_terminal())
                    .with_target(false),
            )
            .with(spans)
            .init();
        Ok(Self { traces })
    }

    /// Sends the traces that are still held back.
    pub fn flush(&self) {
        if let Some(Err(error)) = self.traces.as_ref().map(Traces::flush) {
            tracing::warn!(error, "some traces were not exported");
        }
    }
}
