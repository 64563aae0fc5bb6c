//! Which requests are traced: those that the environment chooses, and some of those whose clients ask for it.
//!
//! A client can ask with every request, whoever it is, and a traced token takes a few spans on every member. So what would not have been chosen
//! without the client is traced at a bounded rate.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use opentelemetry::trace::{Link, SpanKind, TraceContextExt as _, TraceId};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::{
    Config, IdGenerator as _, RandomIdGenerator, SamplingDecision, SamplingResult, ShouldSample,
};

/// Requests in a row that are traced only because their clients ask for it.
const IN_A_ROW: u32 = 60;
/// Until there may be one more.
const EACH: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub struct RequestSampler {
    /// By the environment.
    configured: Box<dyn ShouldSample>,
    ids: RandomIdGenerator,
    asked_for: Arc<Mutex<Allowance>>,
}

impl RequestSampler {
    pub fn from_environment() -> Self {
        Self::new(Config::default().sampler)
    }

    fn new(configured: Box<dyn ShouldSample>) -> Self {
        let spent_until = Instant::now();
        Self {
            configured,
            ids: RandomIdGenerator::default(),
            asked_for: Arc::new(Mutex::new(Allowance { spent_until })),
        }
    }

    fn may_be_asked_for(&self) -> bool {
        let mut asked_for = self
            .asked_for
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        asked_for.take(Instant::now())
    }
}

impl ShouldSample for RequestSampler {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        trace: TraceId,
        name: &str,
        kind: &SpanKind,
        attributes: &[KeyValue],
        links: &[Link],
    ) -> SamplingResult {
        let configured = &self.configured;
        let mut result = configured.should_sample(parent, trace, name, kind, attributes, links);
        // What other members began in this trace is theirs to decide.
        let of_client = matches!(kind, SpanKind::Server)
            && parent.is_some_and(|parent| parent.span().span_context().is_remote());
        if of_client && result.decision != SamplingDecision::Drop {
            // A client could make up an id that is always chosen.
            let own = self.ids.new_trace_id();
            let chosen = configured.should_sample(None, own, name, kind, attributes, links);
            if chosen.decision == SamplingDecision::Drop && !self.may_be_asked_for() {
                result.decision = SamplingDecision::Drop;
            }
        }
        result
    }
}

/// So many in a row, and one more each time that [`EACH`] has passed.
#[derive(Debug)]
struct Allowance {
    /// By when what was taken is there again.
    spent_until: Instant,
}

impl Allowance {
    fn take(&mut self, now: Instant) -> bool {
        let spent_until = self.spent_until.max(now) + EACH;
        let is_left = spent_until.duration_since(now) <= IN_A_ROW * EACH;
        if is_left {
            self.spent_until = spent_until;
        }
        is_left
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceState};
    use opentelemetry_sdk::trace::Sampler;

    use super::*;

    /// Every ratio chooses it.
    const CHOSEN: u128 = 1 << 64;

    /// Whether a span of this kind is recorded below one that others began.
    fn records(sampler: &RequestSampler, kind: &SpanKind, flags: TraceFlags) -> bool {
        let (trace, span) = (TraceId::from(CHOSEN), SpanId::from(1_u64));
        let parent = SpanContext::new(trace, span, flags, true, TraceState::default());
        let parent = Context::new().with_remote_span_context(parent);
        let result = sampler.should_sample(Some(&parent), trace, "span", kind, &[], &[]);
        result.decision == SamplingDecision::RecordAndSample
    }

    /// A sampler from which clients have asked for as much as they may.
    fn exhausted(configured: Sampler) -> RequestSampler {
        let sampler = RequestSampler::new(Box::new(configured));
        let long = Instant::now() + Duration::from_secs(3600);
        sampler.asked_for.lock().unwrap().spent_until = long;
        sampler
    }

    fn parent_based(root: Sampler) -> Sampler {
        Sampler::ParentBased(Box::new(root))
    }

    #[test]
    fn so_many_in_a_row_and_then_one_a_second() {
        let start = Instant::now();
        let mut allowance = Allowance { spent_until: start };
        for expected in [60, 0] {
            let taken = (0..100).filter(|_| allowance.take(start)).count();
            assert_eq!(taken, expected);
        }
        assert!(!allowance.take(start + Duration::from_millis(900)));
        assert!(allowance.take(start + Duration::from_millis(1100)));
        assert!(!allowance.take(start + Duration::from_millis(1200)));
        let later = start + Duration::from_secs(1000);
        assert_eq!((0..100).filter(|_| allowance.take(later)).count(), 60);
    }

    #[test]
    fn what_clients_ask_for_is_bounded() {
        let (sampled, not) = (TraceFlags::SAMPLED, TraceFlags::default());
        let never = || parent_based(Sampler::AlwaysOff);
        let sampler = RequestSampler::new(Box::new(never()));
        assert!(records(&sampler, &SpanKind::Server, sampled));
        assert!(!records(&sampler, &SpanKind::Server, not));

        let sampler = exhausted(never());
        assert!(!records(&sampler, &SpanKind::Server, sampled));
        // Of a request that is traced, all is.
        assert!(records(&sampler, &SpanKind::Internal, sampled));

        // What is traced anyway stays in its client's trace.
        let sampler = exhausted(parent_based(Sampler::AlwaysOn));
        assert!(records(&sampler, &SpanKind::Server, sampled));
        assert!(!records(&sampler, &SpanKind::Server, not));
        let sampler = exhausted(Sampler::AlwaysOff);
        assert!(!records(&sampler, &SpanKind::Server, sampled));
    }

    #[test]
    fn no_id_of_a_client_is_always_chosen() {
        let half = || Sampler::TraceIdRatioBased(0.5);
        for configured in [half(), parent_based(half())] {
            let sampler = exhausted(configured);
            let asked = 0..1000;
            let traced =
                asked.filter(|_| records(&sampler, &SpanKind::Server, TraceFlags::SAMPLED));
            let traced = traced.count();
            assert!((300..700).contains(&traced), "{traced} of 1000");
        }
    }
}
