//! What the operator counts, as Prometheus reads it.

use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU64};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

pub struct Metrics {
    registry: Registry,
    pub reconciles: Counter<u64, AtomicU64>,
    pub failures: Counter<u64, AtomicU64>,
    pub reconcile_seconds: Histogram,
    pub planning_seconds: Histogram,
    pub models: Gauge<i64, AtomicI64>,
    pub ready_models: Gauge<i64, AtomicI64>,
}

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("prima_operator");
        let (reconciles, failures) = (Counter::default(), Counter::default());
        let reconcile_seconds = Histogram::new(exponential_buckets(0.001, 4.0, 8));
        let planning_seconds = Histogram::new(exponential_buckets(0.001, 4.0, 8));
        let (models, ready_models) = (Gauge::default(), Gauge::default());
        registry.register(
            "reconciles",
            "Times that a Model was looked at",
            reconciles.clone(),
        );
        registry.register(
            "reconcile_failures",
            "Times that this failed and was put off",
            failures.clone(),
        );
        registry.register_with_unit(
            "reconcile",
            "Time to look at a Model, planning included",
            Unit::Seconds,
            reconcile_seconds.clone(),
        );
        registry.register_with_unit(
            "planning",
            "Time to plan a ring",
            Unit::Seconds,
            planning_seconds.clone(),
        );
        registry.register("models", "Models that were looked at", models.clone());
        registry.register("ready_models", "Models that answer", ready_models.clone());
        Self {
            registry,
            reconciles,
            failures,
            reconcile_seconds,
            planning_seconds,
            models,
            ready_models,
        }
    }

    /// OpenMetrics text.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
