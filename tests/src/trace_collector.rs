//! Takes the traces that programs send by OTLP, as a collector does, and tells what came.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use tokio::runtime::Runtime;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

/// Listens until it is dropped.
pub struct TraceCollector {
    address: SocketAddr,
    spans: Spans,
    _runtime: Runtime,
}

/// One span, as its program told it.
#[derive(Clone, Debug)]
pub struct CollectedSpan {
    pub name: String,
    /// Ids in hexadecimal.
    pub trace: String,
    pub id: String,
    /// Empty: none.
    pub parent: String,
    /// Nanoseconds since 1970.
    pub begun: u64,
    pub ended: u64,
    /// Its own and its program's.
    pub attributes: BTreeMap<String, String>,
}

#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Vec<CollectedSpan>>>);

impl TraceCollector {
    pub fn start() -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        // Bound within that runtime.
        let incoming = runtime.block_on(async { TcpIncoming::bind(any) });
        let incoming = incoming.expect("a port");
        let address = incoming.local_addr().expect("its address");
        let spans = Spans::default();
        let server = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(spans.clone()))
            .serve_with_incoming(incoming);
        runtime.spawn(server);
        Self {
            address,
            spans,
            _runtime: runtime,
        }
    }

    /// For `OTEL_EXPORTER_OTLP_ENDPOINT`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What came so far.
    pub fn spans(&self) -> Vec<CollectedSpan> {
        self.spans.0.lock().expect("spans").clone()
    }
}

#[tonic::async_trait]
impl TraceService for Spans {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut spans = self.0.lock().expect("spans");
        for of_program in request.into_inner().resource_spans {
            let program = of_program.resource.unwrap_or_default().attributes;
            let scopes = of_program.scope_spans.into_iter();
            spans.extend(scopes.flat_map(|scope| scope.spans).map(|span| {
                let all = program.iter().chain(&span.attributes);
                CollectedSpan {
                    trace: hex(&span.trace_id),
                    id: hex(&span.span_id),
                    parent: hex(&span.parent_span_id),
                    begun: span.start_time_unix_nano,
                    ended: span.end_time_unix_nano,
                    attributes: all.map(text).collect(),
                    name: span.name,
                }
            }));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn text(attribute: &KeyValue) -> (String, String) {
    let value = attribute.value.as_ref().and_then(|any| any.value.as_ref());
    let value = match value {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    };
    (attribute.key.clone(), value)
}
