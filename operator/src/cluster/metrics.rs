//! What the operator counts, and what it knows of Models and machines, as Prometheus reads it.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use kube::runtime::reflector::Store;
use prima_crds::v1alpha1::model::Model;
use prima_crds::v1alpha1::node_profile::NodeProfile;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::condition::find;
use crate::model_controller::is_said_to_be_displaced;

pub struct Metrics {
    registry: Registry,
    pub reconciles: Counter<u64, AtomicU64>,
    pub failures: Counter<u64, AtomicU64>,
    pub reconcile_seconds: Histogram,
    pub planning_seconds: Histogram,
    watched: Watched,
}

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let watched = Watched::default();
        registry.register_collector(Box::new(watched.clone()));
        let own = registry.sub_registry_with_prefix("prima_operator");
        let (reconciles, failures) = (Counter::default(), Counter::default());
        let reconcile_seconds = Histogram::new(exponential_buckets(0.001, 4.0, 8));
        let planning_seconds = Histogram::new(exponential_buckets(0.001, 4.0, 8));
        own.register(
            "reconciles",
            "Times that a Model was looked at",
            reconciles.clone(),
        );
        own.register(
            "reconcile_failures",
            "Times that this failed and was put off",
            failures.clone(),
        );
        own.register_with_unit(
            "reconcile",
            "Time to look at a Model, planning included",
            Unit::Seconds,
            reconcile_seconds.clone(),
        );
        own.register_with_unit(
            "planning",
            "Time to plan a ring",
            Unit::Seconds,
            planning_seconds.clone(),
        );
        Self {
            registry,
            reconciles,
            failures,
            reconcile_seconds,
            planning_seconds,
            watched,
        }
    }

    /// From now on this instance leads, and reports Models and machines.
    pub fn lead(&self, models: Store<Model>, machines: Store<NodeProfile>) {
        // It leads once at most.
        let _ = self.watched.0.set((models, machines));
    }

    /// OpenMetrics text.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// What the API server has, as it is at the scrape. An instance that does not lead says nothing, so that each series comes once.
#[derive(Clone, Debug, Default)]
struct Watched(Arc<OnceLock<(Store<Model>, Store<NodeProfile>)>>);

#[derive(Clone, Debug, EncodeLabelSet)]
struct ModelLabels {
    namespace: String,
    model: String,
}

#[derive(Clone, Debug, EncodeLabelSet)]
struct NodeLabel {
    node: String,
}

impl Collector for Watched {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let Some((models, machines)) = self.0.get() else {
            return Ok(());
        };
        let models: Vec<_> = models.state();
        let is = |model: &Model, kind: &str| {
            let status = model.status.as_ref();
            status.is_some_and(|status| is_true(&status.conditions, kind))
        };
        let of_models = models.iter().map(|model| {
            let labels = ModelLabels {
                namespace: model.namespace().unwrap_or_default(),
                model: model.name_any(),
            };
            (labels, model)
        });
        // A Model that is suspended, or displaced by another one, does not answer because somebody wants that.
        let is_wanted = |model: &Model| !model.spec.suspend && !is_said_to_be_displaced(model);
        let running: Vec<_> = of_models.filter(|(_, model)| is_wanted(model)).collect();
        for (name, help, kind) in [
            ("prima_model_ready", "1 when a Model answers", "Ready"),
            (
                "prima_model_degraded",
                "1 when something is wrong with a Model, though it may answer",
                "Degraded",
            ),
        ] {
            let values = running
                .iter()
                .map(|(labels, model)| (labels, is(model, kind)));
            gauges(&mut encoder, name, help, values)?;
        }
        let machines: Vec<_> = machines.state();
        let machines: Vec<_> = machines
            .iter()
            // One that its owner leaves out may sleep: no ring misses it.
            .filter(|machine| !machine.spec.exclude)
            .filter_map(|machine| {
                let label = NodeLabel {
                    node: machine.name_any(),
                };
                let conditions = &machine.status.as_ref()?.conditions;
                Some((label, is_true(conditions, "Ready")))
            })
            .collect();
        gauges(
            &mut encoder,
            "prima_node_ready",
            "1 while a node's agent is heard of; of nodes that are not excluded",
            machines.iter().map(|(label, is)| (label, *is)),
        )?;
        let ready = models.iter().filter(|model| is(model, "Ready")).count();
        for (name, help, value) in [
            ("prima_operator_models", "Models", models.len()),
            ("prima_operator_ready_models", "Models that answer", ready),
        ] {
            let gauge = ConstGauge::new(value as u64);
            gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        Ok(())
    }
}

fn gauges<'a, L: EncodeLabelSet + 'a>(
    encoder: &mut DescriptorEncoder,
    name: &str,
    help: &str,
    values: impl Iterator<Item = (&'a L, bool)>,
) -> Result<(), fmt::Error> {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, is) in values {
        ConstGauge::new(i64::from(is)).encode(metric.encode_family(labels)?)?;
    }
    Ok(())
}

fn is_true(conditions: &[Condition], kind: &str) -> bool {
    find(conditions, kind).is_some_and(|condition| condition.status == "True")
}

#[cfg(test)]
mod tests {
    use kube::runtime::reflector;
    use kube::runtime::watcher::Event;
    use serde_json::{Value, json};

    use super::*;
    use crate::model_controller::test_world;

    fn store<K>(objects: Vec<K>) -> Store<K>
    where
        K: kube::Resource<DynamicType = ()> + Clone + 'static,
    {
        let (store, mut writer) = reflector::store();
        for object in objects {
            writer.apply_watcher_event(&Event::Apply(object));
        }
        store
    }

    fn condition(kind: &str, status: &str) -> Value {
        json!({"type": kind, "status": status, "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"})
    }

    #[test]
    fn each_model_and_machine_has_its_series() {
        let metrics = Metrics::new();
        assert!(!metrics.text().unwrap().contains("prima_model_ready"));
        let model = |name: &str, ready: &str, suspend: bool| {
            let mut model = test_world::model().0;
            model.metadata.name = Some(name.to_owned());
            model.metadata.namespace = Some("home".to_owned());
            model.spec.suspend = suspend;
            let status =
                json!({"conditions": [condition("Ready", ready), condition("Degraded", "True")]});
            model.status = serde_json::from_value(status).unwrap();
            model
        };
        let mut desk = test_world::machine("desk");
        let desk = test_world::profile(&mut desk);
        let ready = serde_json::from_value(condition("Ready", "False")).unwrap();
        desk.status.as_mut().unwrap().conditions = vec![ready];
        let mut excluded = desk.clone();
        excluded.metadata.name = Some("laptop".to_owned());
        excluded.spec.exclude = true;
        let mut displaced = model("displaced", "False", false);
        let mut planned = condition("Planned", "False");
        planned["reason"] = "Displaced".into();
        let planned = serde_json::from_value(planned).unwrap();
        displaced.status.as_mut().unwrap().conditions.push(planned);
        let models = [
            model("smollm2", "True", false),
            model("qwen", "False", false),
            model("asleep", "False", true),
            displaced,
        ];
        metrics.lead(store(models.to_vec()), store(vec![desk.clone(), excluded]));
        let text = metrics.text().unwrap();
        for line in [
            r#"prima_model_ready{namespace="home",model="smollm2"} 1"#,
            r#"prima_model_ready{namespace="home",model="qwen"} 0"#,
            r#"prima_model_degraded{namespace="home",model="qwen"} 1"#,
            r#"prima_node_ready{node="desk"} 0"#,
            "prima_operator_models 4",
            "prima_operator_ready_models 1",
            "prima_operator_reconciles_total 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        for left_out in ["asleep", "displaced", "laptop"] {
            assert!(!text.contains(left_out), "{text}");
        }
    }
}
