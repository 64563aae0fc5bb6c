//! How much of the machines a namespace's Models may take: what the cluster's administrators allow in a ResourceQuota there. How many Models
//! (`count/models.prima.dev`) is the API server's to count; memory and requests are counted here, when a ring is planned. A ring that runs goes
//! on if less is allowed later, as pods do.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ResourceQuota;
use kube::ResourceExt;
use prima_crds::quantity::{Quantity, rounded};
use prima_crds::v1alpha1::ring_plan::{RingPlan, RingPlanSpec};

/// What is counted, by its name in a quota's `spec.hard`.
const COUNTED: [(&str, fn(&RingPlanSpec) -> u64, fn(u64) -> String); 2] = [
    ("prima.dev/memory", memory_bytes, rounded),
    ("prima.dev/requests", requests, |count| count.to_string()),
];

/// Why a ring may not run beside those of the namespace's other Models, if it may not.
pub fn refusal(
    quotas: &[Arc<ResourceQuota>],
    spec: &RingPlanSpec,
    others: &[&RingPlan],
) -> Option<String> {
    let counted = COUNTED.iter();
    counted
        .flat_map(|counted| quotas.iter().map(move |quota| (counted, quota)))
        .find_map(|((resource, count, shown), quota)| {
            let hard = quota.spec.as_ref()?.hard.as_ref()?.get(*resource)?;
            let of = format!("ResourceQuota {}, {resource}", quota.name_any());
            let Ok(hard) = hard.0.parse::<Quantity>() else {
                return Some(format!(
                    "{of}: expected a number such as 16 or 8Gi, found {}",
                    hard.0
                ));
            };
            let (hard, own) = (u64::from(hard), count(spec));
            let taken: u64 = others.iter().map(|plan| count(&plan.spec)).sum();
            (taken.saturating_add(own) > hard).then(|| {
                let (hard, taken, own) = (shown(hard), shown(taken), shown(own));
                format!("{of}: the namespace may take {hard}, its other Models take {taken}, this one would take {own}")
            })
        })
}

/// On all nodes together, GPUs' as well.
fn memory_bytes(spec: &RingPlanSpec) -> u64 {
    let of_member = spec
        .members
        .iter()
        .flat_map(|member| [member.memory_bytes, member.gpu_memory_bytes]);
    of_member.flatten().map(i64::unsigned_abs).sum()
}

/// That are answered at the same time.
fn requests(spec: &RingPlanSpec) -> u64 {
    spec.max_concurrent_requests.unsigned_abs().into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model_controller::test_world::{GIB, ring};

    fn quota(resource: &str, hard: &str) -> Vec<Arc<ResourceQuota>> {
        let quota = json!({"metadata": {"name": "home"}, "spec": {"hard": {resource: hard}}});
        vec![Arc::new(serde_json::from_value(quota).unwrap())]
    }

    #[test]
    fn memory_of_all_models_is_counted_with_that_of_gpus() {
        let (own, other) = (ring(&[(0, 8)], 4 * GIB, GIB), ring(&[(0, 8)], 3 * GIB, 0));
        let refused = |hard: &str, others: &[&RingPlan]| {
            refusal(&quota("prima.dev/memory", hard), &own.spec, others)
        };
        assert_eq!(refused("5Gi", &[]), None);
        let message = refused("5368709119", &[]).unwrap();
        assert!(message.contains("may take 5.0 GiB"), "{message}");
        assert_eq!(refused("8Gi", &[&other]), None);
        let message = refused("7Gi", &[&other]).unwrap();
        assert_eq!(
            message,
            "ResourceQuota home, prima.dev/memory: the namespace may take 7.0 GiB, its other Models take 3.0 GiB, this one would take 5.0 GiB"
        );
        let message = refused("500m", &[]).unwrap();
        assert!(message.contains("found 500m"), "{message}");
    }

    #[test]
    fn requests_at_once_are_counted() {
        let other = ring(&[(0, 8)], 0, 0);
        let mut own = other.spec.clone();
        own.max_concurrent_requests = 4;
        let at_once = i64::from(other.spec.max_concurrent_requests) + 4;
        let refused = |hard: i64| {
            let quota = quota("prima.dev/requests", &hard.to_string());
            refusal(&quota, &own, &[&other])
        };
        assert_eq!(refused(at_once), None);
        let message = refused(at_once - 1).unwrap();
        assert!(message.contains("this one would take 4"), "{message}");
    }

    #[test]
    fn other_resources_and_no_quotas_refuse_nothing() {
        let own = ring(&[(0, 8)], GIB, 0);
        assert_eq!(refusal(&[], &own.spec, &[]), None);
        assert_eq!(refusal(&quota("pods", "0"), &own.spec, &[]), None);
    }
}
