//! Traces by OTLP, where the environment asks for them: `OTEL_EXPORTER_OTLP_ENDPOINT`, and the other variables of OpenTelemetry's
//! specification. Without these, nothing is collected. Collectors are spoken to over gRPC without TLS.

mod sampler;

use std::time::Duration;

use opentelemetry::{Key, KeyValue, Value};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};

use self::sampler::RequestSampler;

/// Where spans go until the process ends.
pub struct Traces(SdkTracerProvider);

#[derive(Debug, thiserror::Error)]
pub enum TracesError {
    #[error("cannot export traces as the OTEL_ variables say")]
    Exporter(#[from] ExporterBuildError),
}

/// One of these says where traces go.
const ENDPOINTS: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
];
/// These say that nothing is to be collected all the same.
const OFF: [(&str, &str); 2] = [
    ("OTEL_SDK_DISABLED", "true"),
    ("OTEL_TRACES_EXPORTER", "none"),
];
const SERVICE: Key = Key::from_static_str("service.name");
/// A collector that does not answer holds up no end.
const LAST_WORD: Duration = Duration::from_secs(1);

impl Traces {
    /// `None` where the environment asks for none. Needs the async runtime. `service` is what the spans are shown under unless the environment
    /// names it, `instance` which of several.
    pub fn start(service: &'static str, instance: &str) -> Result<Option<Self>, TracesError> {
        let given = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_off = |&(name, value): &(&str, &str)| {
            std::env::var(name).is_ok_and(|found| found.eq_ignore_ascii_case(value))
        };
        if !ENDPOINTS.iter().any(given) || OFF.iter().any(is_off) {
            return Ok(None);
        }
        let named = Resource::builder().build().get(&SERVICE);
        let named = named.filter(|name| !name.as_str().starts_with("unknown_service"));
        let resource = Resource::builder()
            .with_service_name(named.unwrap_or(Value::from(service)))
            .with_attribute(KeyValue::new("service.instance.id", instance.to_owned()));
        let exporter = SpanExporter::builder().with_tonic().build()?;
        let provider = SdkTracerProvider::builder()
            .with_resource(resource.build())
            .with_sampler(RequestSampler::from_environment())
            .with_batch_exporter(exporter)
            .build();
        opentelemetry::global::set_tracer_provider(provider.clone());
        Ok(Some(Self(provider)))
    }

    /// What makes spans.
    pub fn tracer(&self) -> SdkTracer {
        use opentelemetry::trace::TracerProvider as _;
        self.0.tracer("prima")
    }

    /// Sends the spans that are still held back.
    ///
    /// # Errors
    /// In words, where some were not sent.
    pub fn flush(&self) -> Result<(), String> {
        let ended = self.0.shutdown_with_timeout(LAST_WORD);
        ended.map_err(|error| error.to_string())
    }
}
