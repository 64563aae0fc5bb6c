//! GET /metrics: what this server measured, as OpenMetrics text. Our own names begin with `prima_`; a few are repeated
//! under vLLM's names, so that dashboards and autoscalers made for vLLM work. Every label value comes from a bounded
//! set: our routes, statuses and outcomes, the plan's members, and the names of API keys.

use std::fmt;
use std::time::Duration;

use axum::extract::{MatchedPath, Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use prima_crds::OPEN_METRICS;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::generation::{MemberTotals, Readiness, RingStatus};
use crate::ring::{HOP_METRICS, MetricKind};

use super::Gateway;
use super::key_account::KeyUsage;
use super::openai_error::ApiError;
use super::recent::Recent;

/// The counters and histograms that requests feed; what the ring counts itself is read at the scrape.
pub struct Metrics {
    requests: Family<RequestLabels, Counter>,
    generations: Family<OutcomeLabel, Counter>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    generated_tokens: Counter,
    time_to_first_token: Histogram,
    time_per_token: Histogram,
    recent_first_tokens: Recent,
    recent_tokens: Recent,
    model_name: String,
}

/// How a choice ended.
#[derive(Clone, Copy, Debug)]
pub enum ChoiceOutcome {
    Stop,
    Length,
    /// By its client, who hung up.
    Cancelled,
    Failed,
}

impl ChoiceOutcome {
    const ALL: [Self; 4] = [Self::Stop, Self::Length, Self::Cancelled, Self::Failed];

    fn label(self) -> OutcomeLabel {
        let outcome = match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        };
        OutcomeLabel { outcome }
    }
}

/// Seconds, from a small model on one machine to a long prompt on slow ones.
const FIRST_TOKEN_BUCKETS: [f64; 16] = [
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
];
const PER_TOKEN_BUCKETS: [f64; 13] = [
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4,
];

impl Metrics {
    pub fn new(model_name: &str) -> Self {
        let generations = Family::<OutcomeLabel, Counter>::default();
        // A counter that begins with its first event hides that event from rate().
        for outcome in ChoiceOutcome::ALL {
            generations.get_or_create(&outcome.label()).inc_by(0);
        }
        Self {
            requests: Family::default(),
            generations,
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            time_to_first_token: Histogram::new(FIRST_TOKEN_BUCKETS),
            time_per_token: Histogram::new(PER_TOKEN_BUCKETS),
            recent_first_tokens: Recent::default(),
            recent_tokens: Recent::default(),
            model_name: model_name.into(),
        }
    }

    /// The first token of a prompt of `prompt_tokens` came `after` its submission.
    pub fn first_token(&self, prompt_tokens: usize, after: Duration) {
        self.prompt_tokens.inc_by(prompt_tokens as u64);
        self.time_to_first_token.observe(after.as_secs_f64());
        self.recent_first_tokens.add(after);
    }

    /// A text of so many tokens was computed, for its vector or its score.
    pub fn pooled(&self, prompt_tokens: usize) {
        self.prompt_tokens.inc_by(prompt_tokens as u64);
    }

    /// So many tokens of a prompt had been computed before.
    pub fn cached_tokens(&self, tokens: usize) {
        self.cached_tokens.inc_by(tokens as u64);
    }

    pub fn token(&self) {
        self.generated_tokens.inc();
    }

    /// Mean time between the tokens of one choice.
    pub fn time_per_token(&self, mean: Duration) {
        self.time_per_token.observe(mean.as_secs_f64());
        self.recent_tokens.add(mean);
    }

    pub fn finished(&self, outcome: ChoiceOutcome) {
        self.generations.get_or_create(&outcome.label()).inc();
    }

    /// Prompt and generated tokens since the start.
    pub fn tokens(&self) -> (u64, u64) {
        (self.prompt_tokens.get(), self.generated_tokens.get())
    }

    /// Median times of the last answers: to the first token, and from one token to the next.
    pub fn recent(&self) -> (Option<Duration>, Option<Duration>) {
        (
            self.recent_first_tokens.median(),
            self.recent_tokens.median(),
        )
    }

    fn text(&self, ring: RingStatus, keys: Vec<KeyUsage>) -> Result<String, fmt::Error> {
        let mut registry = Registry::default();
        registry.register(
            "prima_requests",
            "HTTP requests answered",
            self.requests.clone(),
        );
        registry.register(
            "prima_generations",
            "Generated choices that ended, by how",
            self.generations.clone(),
        );
        registry.register(
            "prima_prompt_tokens",
            "Prompt tokens of requests",
            self.prompt_tokens.clone(),
        );
        registry.register(
            "prima_cached_prompt_tokens",
            "Prompt tokens that had been computed for an earlier request",
            self.cached_tokens.clone(),
        );
        registry.register(
            "prima_generated_tokens",
            "Tokens generated",
            self.generated_tokens.clone(),
        );
        registry.register(
            "prima_time_to_first_token_seconds",
            "From a prompt's submission to its first token",
            self.time_to_first_token.clone(),
        );
        registry.register(
            "prima_time_per_output_token_seconds",
            "Mean time between the tokens of a choice",
            self.time_per_token.clone(),
        );
        let drafts = [
            (
                "drafted",
                "Tokens computed before they were known",
                ring.drafts.drafted,
            ),
            (
                "accepted",
                "Drafted tokens that the model said, too",
                ring.drafts.accepted,
            ),
        ];
        for (name, help, tokens) in drafts {
            let counter = ConstCounter::new(tokens as u64);
            registry.register(format!("prima_{name}_tokens"), help, counter);
        }
        let vllm =
            registry.sub_registry_with_label(("model_name".into(), self.model_name.clone().into()));
        vllm.register(
            "vllm:prompt_tokens",
            "Alias of prima_prompt_tokens",
            self.prompt_tokens.clone(),
        );
        vllm.register(
            "vllm:generation_tokens",
            "Alias of prima_generated_tokens",
            self.generated_tokens.clone(),
        );
        vllm.register(
            "vllm:time_to_first_token_seconds",
            "Alias of prima_time_to_first_token_seconds",
            self.time_to_first_token.clone(),
        );
        vllm.register(
            "vllm:time_per_output_token_seconds",
            "Alias of prima_time_per_output_token_seconds",
            self.time_per_token.clone(),
        );
        vllm.register(
            "vllm:spec_decode_num_draft_tokens",
            "Alias of prima_drafted_tokens",
            ConstCounter::new(ring.drafts.drafted as u64),
        );
        vllm.register(
            "vllm:spec_decode_num_accepted_tokens",
            "Alias of prima_accepted_tokens",
            ConstCounter::new(ring.drafts.accepted as u64),
        );
        vllm.register(
            "vllm:num_requests_running",
            "Alias of prima_requests_running",
            ConstGauge::new(ring.running_requests as u64),
        );
        vllm.register(
            "vllm:num_requests_waiting",
            "Alias of prima_requests_waiting",
            ConstGauge::new(ring.waiting_requests as u64),
        );
        registry.register_collector(Box::new(RingCollector(ring)));
        registry.register_collector(Box::new(KeyCollector(keys)));
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    }
}

pub async fn scrape(State(gateway): State<Gateway>) -> Result<Response, ApiError> {
    let ring = gateway.0.generator.status().borrow().clone();
    let keys = gateway.0.access.accounts().usage();
    let text = gateway
        .0
        .metrics
        .text(ring, keys)
        .map_err(|_| ApiError::Internal {
            action: "writing the metrics",
        })?;
    Ok(([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response())
}

/// Counts what was answered, by route and status.
pub async fn count_request(
    State(gateway): State<Gateway>,
    request: Request,
    next: Next,
) -> Response {
    // Not the path: a scan for paths would create a label for each.
    let route = match request.extensions().get::<MatchedPath>() {
        Some(path) => path.as_str().to_string(),
        None => "none".into(),
    };
    let response = next.run(request).await;
    let status = response.status().as_u16();
    let labels = RequestLabels { route, status };
    gateway.0.metrics.requests.get_or_create(&labels).inc();
    response
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    route: String,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MemberLabel {
    member: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KeyLabel {
    key: String,
}

/// What each API key has used, as it is at the scrape.
#[derive(Debug)]
struct KeyCollector(Vec<KeyUsage>);

impl Collector for KeyCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        // Nothing is said of keys where none is asked for.
        if self.0.is_empty() {
            return Ok(());
        }
        let mut tell = |name: &str, help: &str, count: fn(&KeyUsage) -> f64| {
            let name = format!("prima_api_key_{name}");
            let mut metric = encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
            self.0.iter().try_for_each(|used| {
                let labels = KeyLabel {
                    key: used.name.clone(),
                };
                ConstCounter::new(count(used)).encode(metric.encode_family(&labels)?)
            })
        };
        tell("requests", "HTTP requests with the key", |used| {
            used.requests as f64
        })?;
        tell("prompt_tokens", "Prompt tokens of its requests", |used| {
            used.prompt_tokens as f64
        })?;
        tell("generated_tokens", "Tokens generated for it", |used| {
            used.generated_tokens as f64
        })?;
        tell(
            "answer_seconds",
            "Time from its requests' submission to the ends of their answers",
            |used| used.seconds,
        )
    }
}

/// The ring's own counts, as they are at the scrape.
#[derive(Debug)]
struct RingCollector(RingStatus);

impl Collector for RingCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        self.encode_ring(&mut encoder)?;
        self.encode_members(&mut encoder)?;
        self.encode_hops(&mut encoder)
    }
}

impl RingCollector {
    fn encode_ring(&self, encoder: &mut DescriptorEncoder) -> fmt::Result {
        let RingStatus {
            readiness,
            fails_at: _,
            missed_by: _,
            silent,
            late,
            looked: _,
            plan_generation,
            rounds,
            members,
            running_requests,
            waiting_requests,
            kv_bytes,
            kv,
            drafts: _,
            expert_miss_percent: _,
        } = &self.0;
        let stands_still = silent.is_some() || *late || self.0.stands_still();
        let ready = *readiness == Readiness::Ready && !stands_still;
        let ready = i64::from(ready);
        for (name, help, value) in [
            ("prima_ring_ready", "1 when the ring can serve", ready),
            (
                "prima_plan_generation",
                "Generation of the plan that the ring runs",
                *plan_generation,
            ),
            ("prima_ring_rounds", "Rounds per token (k)", *rounds as i64),
            (
                "prima_ring_members",
                "Members of the ring",
                members.len() as i64,
            ),
            (
                "prima_requests_running",
                "Requests being computed",
                *running_requests as i64,
            ),
            (
                "prima_requests_waiting",
                "Requests waiting for room",
                *waiting_requests as i64,
            ),
            (
                "prima_kv_cache_bytes",
                "KV caches on all members",
                *kv_bytes as i64,
            ),
            (
                "prima_kv_planned_positions",
                "Positions that the plan has KV cache for",
                kv.planned_positions as i64,
            ),
            (
                "prima_kv_used_positions",
                "Positions in KV caches",
                kv.used_positions as i64,
            ),
            (
                "prima_kv_kept_positions",
                "Positions in KV caches that no request uses and later ones may",
                kv.kept_positions as i64,
            ),
        ] {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        Ok(())
    }

    fn encode_members(&self, encoder: &mut DescriptorEncoder) -> fmt::Result {
        self.of_members(
            encoder,
            "frames",
            "Frames computed",
            MetricType::Counter,
            |member| Some(member.frames as f64),
        )?;
        self.of_members(
            encoder,
            "network_seconds",
            "Estimated time of frames between members: what no member computed or waited, in equal shares",
            MetricType::Counter,
            |member| Some(member.network_seconds),
        )?;
        self.of_members(
            encoder,
            "planned_read_bytes",
            "Weights that the plan expects to be read for every token",
            MetricType::Gauge,
            |member| member.planned_read_bytes.map(|bytes| bytes as f64),
        )?;
        self.of_members(
            encoder,
            "planned_kv_bytes",
            "KV cache that the plan counts on",
            MetricType::Gauge,
            |member| member.planned_kv_bytes.map(|bytes| bytes as f64),
        )
    }

    fn encode_hops(&self, encoder: &mut DescriptorEncoder) -> fmt::Result {
        for metric in &HOP_METRICS {
            let kind = match metric.kind {
                MetricKind::Sum => MetricType::Counter,
                MetricKind::Gauge => MetricType::Gauge,
            };
            self.of_members(encoder, metric.name, metric.help, kind, |member| {
                Some(metric.of(&member.timing))
            })?;
        }
        Ok(())
    }

    /// A counter or gauge with a value of each member that has one.
    fn of_members(
        &self,
        encoder: &mut DescriptorEncoder,
        name: &str,
        help: &str,
        kind: MetricType,
        value: impl Fn(&MemberTotals) -> Option<f64>,
    ) -> fmt::Result {
        let name = format!("prima_member_{name}");
        let mut metric = encoder.encode_descriptor(&name, help, None, kind)?;
        for member in &self.0.members {
            let Some(value) = value(member) else {
                continue;
            };
            let labels = MemberLabel {
                member: member.name.clone(),
            };
            let metric = metric.encode_family(&labels)?;
            match kind {
                MetricType::Counter => ConstCounter::new(value).encode(metric)?,
                _ => ConstGauge::new(value).encode(metric)?,
            }
        }
        Ok(())
    }
}
