//! Which plan something is about.

use std::fmt;

/// Identifies a plan; another plan of the same name has another uid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanKey {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

impl fmt::Display for PlanKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
