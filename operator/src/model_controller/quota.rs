//! How much of the machines a namespace's Models may take: what the cluster's administrators allow in a ResourceQuota there. How many Models
//! (`count/models.prima.dev`) is the API server's to count; memory and requests are counted here, when a ring is planned. A ring that runs goes
//! on if less is allowed later, as pods do. Of each Model its newest ring counts, so that none is refused because another one is being replaced.
//!
//! The highest priority that Models there may have is bounded, too. That is no sum, and it bounds what rings count as that run already: else an
//! edit of a Model would keep others from its machines.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ResourceQuota;
use kube::ResourceExt;
use prima_crds::quantity::{Quantity, QuantityError, rounded};
use prima_crds::v1alpha1::model::Model;
use prima_crds::v1alpha1::ring_plan::{RingPlan, RingPlanSpec};

/// What is counted.
struct Counted {
    /// Its name in a quota's `spec.hard`.
    resource: &'static str,
    of_ring: fn(&RingPlanSpec) -> u64,
    /// For people.
    shown: fn(u64) -> String,
}

const COUNTED: [Counted; 2] = [
    Counted {
        resource: "prima.dev/memory",
        of_ring: memory_bytes,
        shown: rounded,
    },
    Counted {
        resource: "prima.dev/requests",
        of_ring: requests,
        shown: |count| count.to_string(),
    },
];

/// The highest priority, in a quota's `spec.hard`. It is no less than 0, as the API server takes no negative quantity there.
const PRIORITY: &str = "prima.dev/priority";

/// Why a Model of this priority gets no ring in a namespace, if so.
pub fn priority_refusal(quotas: &[Arc<ResourceQuota>], priority: i32) -> Option<String> {
    quotas.iter().find_map(|quota| match allowed(quota, PRIORITY)? {
        Ok(highest) if i128::from(priority) > i128::from(highest) => Some(format!(
            "{}: Models of the namespace may have a priority of {highest} at most, and this one has {priority}",
            named(quota, PRIORITY)
        )),
        Ok(_) => None,
        Err(problem) => Some(problem),
    })
}

/// What a Model's priority counts as: no more than the quotas of its namespace allow.
pub fn priority(model: &Model, quotas: &[Arc<ResourceQuota>]) -> i32 {
    let highest = quotas
        .iter()
        .filter_map(|quota| allowed(quota, PRIORITY)?.ok());
    let highest = highest.map(|highest| i32::try_from(highest).unwrap_or(i32::MAX));
    highest.fold(model.spec.priority, i32::min)
}

/// Why a ring may not run in a namespace, beside those of other Models, if it may not. `others`: of all namespaces.
pub fn refusal(
    quotas: &[Arc<ResourceQuota>],
    namespace: &str,
    spec: &RingPlanSpec,
    others: &[Arc<RingPlan>],
) -> Option<String> {
    let mut newest: BTreeMap<&str, &RingPlanSpec> = BTreeMap::new();
    for plan in others {
        if plan.metadata.namespace.as_deref() == Some(namespace) {
            let of_model = newest.entry(&plan.spec.model.name).or_insert(&plan.spec);
            if of_model.generation < plan.spec.generation {
                *of_model = &plan.spec;
            }
        }
    }
    COUNTED.iter().find_map(|counted| {
        let mut quotas = quotas.iter();
        quotas.find_map(|quota| refused_by(quota, counted, spec, newest.values()))
    })
}

/// Why this quota refuses a ring beside `others`, if it does.
fn refused_by<'a>(
    quota: &ResourceQuota,
    counted: &Counted,
    spec: &RingPlanSpec,
    others: impl Iterator<Item = &'a &'a RingPlanSpec>,
) -> Option<String> {
    let Counted {
        resource,
        of_ring,
        shown,
    } = counted;
    let hard = match allowed(quota, resource)? {
        Ok(hard) => hard,
        Err(problem) => return Some(problem),
    };
    let own = of_ring(spec);
    let taken: u64 = others.map(|spec| of_ring(spec)).sum();
    let over = taken.saturating_add(own).saturating_sub(hard);
    (over > 0).then(|| {
        let of = named(quota, resource);
        let [hard, taken, own, over] = [hard, taken, own, over].map(shown);
        format!(
            "{of}: the namespace may take {hard}, its other Models take {taken}, and this one would take {own}, which is {over} too much"
        )
    })
}

/// What a quota allows of a resource, if it says anything of it; or what is wrong with that.
fn allowed(quota: &ResourceQuota, resource: &str) -> Option<Result<u64, String>> {
    let hard = &quota.spec.as_ref()?.hard.as_ref()?.get(resource)?.0;
    Some(number(hard).ok_or_else(|| {
        let of = named(quota, resource);
        format!("{of}: expected a number such as 16 or 8Gi, found {hard}")
    }))
}

/// For people.
fn named(quota: &ResourceQuota, resource: &str) -> String {
    format!("ResourceQuota {}, {resource}", quota.name_any())
}

/// A quantity as the API server keeps it: also in thousandths, and with exponents or units for more than any machine has.
fn number(quantity: &str) -> Option<u64> {
    if let Some(thousandths) = quantity.strip_suffix('m') {
        return Some(thousandths.parse::<u64>().ok()? / 1000);
    }
    match quantity.parse::<Quantity>() {
        Ok(bytes) => Some(bytes.into()),
        Err(QuantityError::TooMuch { .. }) => Some(u64::MAX),
        Err(QuantityError::Form { .. }) => {
            let number = quantity.trim_end_matches('i').trim_end_matches(['P', 'E']);
            let value: f64 = number.parse().ok()?;
            // Rounds down, and to the largest there is.
            (value >= 0.0).then_some(match number == quantity {
                true => value as u64,
                false => u64::MAX,
            })
        }
    }
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

    fn plan(namespace: &str, model: &str, generation: i64, memory_bytes: i64) -> Arc<RingPlan> {
        let mut plan = RingPlan::clone(&ring(&[(0, 8)], memory_bytes, 0));
        plan.metadata.namespace = Some(namespace.to_owned());
        plan.spec.model.name = model.to_owned();
        plan.spec.generation = generation;
        Arc::new(plan)
    }

    #[test]
    fn memory_of_all_models_is_counted_with_that_of_gpus() {
        let own = ring(&[(0, 8)], 4 * GIB, GIB);
        let refused = |hard: &str, others: &[Arc<RingPlan>]| {
            refusal(&quota("prima.dev/memory", hard), "kids", &own.spec, others)
        };
        assert_eq!(refused("5Gi", &[]), None);
        let message = refused("5368709119", &[]).unwrap();
        assert!(message.ends_with("which is 1 bytes too much"), "{message}");
        let other = plan("kids", "other", 1, 3 * GIB);
        assert_eq!(refused("8Gi", std::slice::from_ref(&other)), None);
        let message = refused("7Gi", std::slice::from_ref(&other)).unwrap();
        assert_eq!(
            message,
            "ResourceQuota home, prima.dev/memory: the namespace may take 7.0 GiB, its other Models take 3.0 GiB, \
             and this one would take 5.0 GiB, which is 1.0 GiB too much"
        );
        // Not the ring that is being replaced, and nothing of other namespaces.
        let newer = plan("kids", "other", 2, GIB);
        let elsewhere = plan("parents", "other", 1, 9 * GIB);
        assert_eq!(refused("6Gi", &[other, newer, elsewhere]), None);
    }

    #[test]
    fn quantities_are_read_as_the_api_server_keeps_them() {
        for (text, found) in [
            ("8Gi", Some(8 << 30)),
            ("1181116006400m", Some(1_181_116_006)),
            ("1e9", Some(1_000_000_000)),
            ("2Pi", Some(u64::MAX)),
            ("1E", Some(u64::MAX)),
            ("-1", None),
            ("many", None),
        ] {
            assert_eq!(number(text), found, "{text}");
        }
        let own = ring(&[(0, 8)], GIB, 0);
        let message = refusal(&quota("prima.dev/memory", "many"), "kids", &own.spec, &[]);
        assert!(message.unwrap().contains("found many"));
    }

    #[test]
    fn requests_at_once_are_counted() {
        let other = [plan("kids", "other", 1, 0)];
        let mut own = other[0].spec.clone();
        own.max_concurrent_requests = 4;
        let at_once = i64::from(other[0].spec.max_concurrent_requests) + 4;
        let refused = |hard: i64| {
            let quota = quota("prima.dev/requests", &hard.to_string());
            refusal(&quota, "kids", &own, &other)
        };
        assert_eq!(refused(at_once), None);
        let message = refused(at_once - 1).unwrap();
        assert!(
            message.ends_with("take 4, which is 1 too much"),
            "{message}"
        );
    }

    #[test]
    fn a_priority_above_the_bound_counts_as_the_bound() {
        let (mut model, _) = crate::model_controller::test_world::model();
        for (hard, own, counts, refused) in [
            ("5", 5, 5, false),
            ("5", 6, 5, true),
            ("0", 1, 0, true),
            ("0", 0, 0, false),
            ("0", -7, -7, false),
            ("1k", 1000, 1000, false),
            ("1500m", 2, 1, true),
            ("1E", 1000, 1000, false),
        ] {
            let quotas = quota("prima.dev/priority", hard);
            model.spec.priority = own;
            assert_eq!(priority(&model, &quotas), counts, "{hard} {own}");
            let found = priority_refusal(&quotas, own);
            assert_eq!(found.is_some(), refused, "{hard} {own}: {found:?}");
        }
        assert_eq!(
            priority_refusal(&quota("prima.dev/priority", "5"), 10).unwrap(),
            "ResourceQuota home, prima.dev/priority: Models of the namespace may have a priority of 5 at most, and this one has 10"
        );
        // Of several, the lowest counts.
        let both = [
            quota("prima.dev/priority", "5"),
            quota("prima.dev/priority", "3"),
        ]
        .concat();
        model.spec.priority = 4;
        assert_eq!(priority(&model, &both), 3);
        assert!(priority_refusal(&both, 4).is_some());
        // What the API server would not let through.
        let negative = quota("prima.dev/priority", "-1");
        assert!(priority_refusal(&negative, 0).unwrap().contains("found -1"));
        assert_eq!(priority(&model, &quota("pods", "0")), 4);
    }

    #[test]
    fn other_resources_and_no_quotas_refuse_nothing() {
        let own = ring(&[(0, 8)], GIB, 0);
        assert_eq!(refusal(&[], "kids", &own.spec, &[]), None);
        let pods = quota("pods", "0");
        assert_eq!(refusal(&pods, "kids", &own.spec, &[]), None);
    }
}
