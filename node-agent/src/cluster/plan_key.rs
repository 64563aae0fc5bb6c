//! Which plan something is about.

use std::fmt;

use kube::ResourceExt as _;
use kube::api::DynamicObject;

/// Identifies a plan; another plan of the same name has another uid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanKey {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

impl PlanKey {
    pub fn of(plan: &DynamicObject) -> Self {
        Self {
            namespace: plan.namespace().unwrap_or_default(),
            name: plan.name_any(),
            uid: plan.uid().unwrap_or_default(),
        }
    }
}

impl fmt::Display for PlanKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
