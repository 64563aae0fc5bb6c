//! A request's trace: spans of OpenTelemetry, made by the gateway, by `decode`, and by every member that the request's frames pass, which
//! carry the place in the trace along. Where a request is not traced, spans are nothing, and nothing is carried.
//!
//! ```text
//! POST /v1/chat/completions          from its head to the end of its answer
//!   queued                           accepted, but not begun
//!   prompt                           until the first token
//!     pass                           a chunk of the prompt goes round the ring
//!       window                       one member computes its layers of a round, or rank 0 the output head
//!     sample                         a token is chosen and told
//!   answer                           until the last token
//!     pass, sample ...
//! ```

use std::borrow::Cow;
use std::time::{Duration, Instant, SystemTime};

use axum::http::HeaderMap;
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator};
use opentelemetry::trace::{
    FutureExt, Span as _, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt, Tracer as _,
    WithContext,
};
use opentelemetry::{Context, KeyValue, Value, global};
use opentelemetry_sdk::propagation::TraceContextPropagator;

/// A place in a trace, below which spans begin; or nothing.
#[derive(Clone, Debug, Default)]
pub struct Trace(Option<SpanContext>);

/// Something that goes on, until it is dropped; or nothing, where it is not traced.
#[derive(Default)]
pub struct Span(Option<global::BoxedSpan>);

impl Trace {
    /// Where the future that runs is, within [`Trace::around`].
    pub fn current() -> Self {
        Self::of(&Context::current())
    }

    /// What a traceparent names: <https://www.w3.org/TR/trace-context/#traceparent-header>. Nothing, if it names nothing.
    pub fn parse(traceparent: &str) -> Self {
        if traceparent.is_empty() {
            return Self(None);
        }
        Self::of(&extracted(traceparent))
    }

    fn of(context: &Context) -> Self {
        let place = context.span().span_context().clone();
        Self(place.is_sampled().then_some(place))
    }

    /// The place as a traceparent; empty where there is none.
    pub fn traceparent(&self) -> String {
        let mut carried = Carried::default();
        if self.0.is_some() {
            TraceContextPropagator::new().inject_context(&self.context(), &mut carried);
        }
        carried.traceparent
    }

    /// Something begins here.
    pub fn begin(&self, name: &'static str) -> Span {
        match self.0 {
            Some(_) => Span::start(span(name), &self.context()),
            None => Span(None),
        }
    }

    /// Something began here at `begun` and took so long; `describe` says more of it.
    pub fn record(
        &self,
        name: &'static str,
        begun: Instant,
        took: Duration,
        describe: impl FnOnce(&mut Span),
    ) {
        if self.0.is_none() {
            return;
        }
        let begun = SystemTime::now()
            .checked_sub(begun.elapsed())
            .unwrap_or(SystemTime::UNIX_EPOCH);
        let mut recorded = Span::start(span(name).with_start_time(begun), &self.context());
        if !recorded.is_nothing() {
            describe(&mut recorded);
        }
        if let Some(mut span) = recorded.0 {
            span.end_with_timestamp(begun + took);
        }
    }

    /// Has [`Trace::current`] be this place while `future` runs.
    pub fn around<F: Future>(&self, future: F) -> WithContext<F> {
        future.with_context(self.context())
    }

    fn context(&self) -> Context {
        match &self.0 {
            Some(place) => Context::new().with_remote_span_context(place.clone()),
            None => Context::new(),
        }
    }
}

impl Span {
    /// An HTTP request begins, in its client's trace if `headers` name one.
    pub fn of_request(name: String, headers: &HeaderMap) -> Self {
        let traceparent = headers.get(TRACEPARENT).and_then(|text| text.to_str().ok());
        // Not sampled is something that a client can say, too.
        let client = extracted(traceparent.unwrap_or_default());
        Self::start(span(name).with_kind(SpanKind::Server), &client)
    }

    fn start(span: SpanBuilder, parent: &Context) -> Self {
        let span = global::tracer("prima").build_with_context(span, parent);
        Self(span.is_recording().then_some(span))
    }

    /// The place of what is part of it.
    pub fn trace(&self) -> Trace {
        Trace(self.0.as_ref().map(|span| span.span_context().clone()))
    }

    pub fn is_nothing(&self) -> bool {
        self.0.is_none()
    }

    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Some(span) = &mut self.0 {
            span.set_attribute(KeyValue::new(key, value));
        }
    }

    pub fn failed(&mut self, reason: impl Into<Cow<'static, str>>) {
        if let Some(span) = &mut self.0 {
            span.set_status(Status::error(reason));
        }
    }
}

fn span(name: impl Into<Cow<'static, str>>) -> SpanBuilder {
    SpanBuilder::from_name(name)
}

/// What a traceparent names, sampled or not.
fn extracted(traceparent: &str) -> Context {
    let carried = Carried {
        traceparent: traceparent.to_owned(),
    };
    TraceContextPropagator::new().extract(&carried)
}

const TRACEPARENT: &str = "traceparent";

/// The only field of a trace that is taken from others and carried on: it has a fixed size, which `tracestate` has not.
#[derive(Default)]
struct Carried {
    traceparent: String,
}

impl Extractor for Carried {
    fn get(&self, key: &str) -> Option<&str> {
        (key == TRACEPARENT).then_some(&self.traceparent)
    }

    fn keys(&self) -> Vec<&str> {
        vec![TRACEPARENT]
    }
}

impl Injector for Carried {
    fn set(&mut self, key: &str, value: String) {
        if key == TRACEPARENT {
            self.traceparent = value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_place_goes_along_as_it_came() {
        assert_eq!(Trace::parse(SAMPLED).traceparent(), SAMPLED);
        let unsampled = SAMPLED.replace("-01", "-00");
        for nothing in ["", "00", "99-zz", "00-0-0-01", &unsampled, &"9".repeat(128)] {
            assert_eq!(Trace::parse(nothing).traceparent(), "", "{nothing}");
        }
    }

    #[test]
    fn nothing_is_made_where_nobody_collects() {
        assert!(Trace::parse(SAMPLED).begin("pass").is_nothing());
        let mut headers = HeaderMap::new();
        headers.insert(TRACEPARENT, SAMPLED.parse().unwrap());
        let request = Span::of_request("POST /".into(), &headers);
        assert!(request.is_nothing() && request.trace().traceparent().is_empty());
    }
}
