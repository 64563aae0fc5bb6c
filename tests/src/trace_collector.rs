//! Takes the traces that programs send by OTLP, as a collector does, and tells what came.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use tokio::runtime::Runtime;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

/// Listens until it is dropped.
pub struct TraceCollector {
    address: SocketAddr,
    spans: Spans,
    _runtime: Runtime,
}

/// Names of spans.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<BTreeSet<String>>>);

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

    /// Names of the spans that came so far.
    pub fn spans(&self) -> BTreeSet<String> {
        self.spans.0.lock().expect("spans").clone()
    }
}

#[tonic::async_trait]
impl TraceService for Spans {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let of_resources = request.into_inner().resource_spans.into_iter();
        let of_scopes = of_resources.flat_map(|spans| spans.scope_spans);
        let names = of_scopes
            .flat_map(|spans| spans.spans)
            .map(|span| span.name);
        self.0.lock().expect("spans").extend(names);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}
