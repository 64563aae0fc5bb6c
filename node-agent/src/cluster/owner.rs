//! What the machine's owner leaves to rings: the spec of its NodeProfile, which people write. Read when a member's process starts; later
//! changes take effect at the next start. Where the owner says nothing, a small machine's kubelet gets what it needs.

use std::path::Path;

use kube::api::{ApiResource, DynamicObject};
use kube::{Api, Client};
use prima_crds::quantity::Quantity;
use prima_crds::v1alpha1::node_profile::{NodeProfile, Os, usual_reserve_bytes};
use serde::Deserialize as _;
use tokio::time::{error::Elapsed, timeout};

use super::api;
use crate::available_memory;

/// Memory in bytes; what is absent is not restricted by the owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allowance {
    /// Stays free.
    pub reserved_bytes: Option<u64>,
    /// All rings together are planned to use at most this, and the weights of each keep to it.
    pub cap_bytes: Option<u64>,
}

#[derive(Debug, thiserror::Error)]
pub enum OwnerError {
    #[error("cannot read what NodeProfile {node} leaves to rings: {reason}")]
    Read { node: String, reason: String },
    #[error("no answer from the API server")]
    Deadline(#[from] Elapsed),
}

pub async fn allowance(client: &Client, node: &str) -> Result<Allowance, OwnerError> {
    let resource = ApiResource::erase::<NodeProfile>(&());
    let profiles: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let profile = timeout(api::DEADLINE, profiles.get_opt(node)).await?;
    let profile = profile.map_err(|error| OwnerError::Read {
        node: node.to_owned(),
        reason: api::reason(&error),
    })?;
    // Field by field: one that this agent does not know is no reason to ignore the others.
    let spec = profile
        .as_ref()
        .and_then(|profile| profile.data.get("spec"));
    let bytes = |field: &str| Quantity::deserialize(spec?.get(field)?).ok().map(u64::from);
    let reserved = bytes("reservedMemory").or_else(|| bytes("reservedMemoryBytes"));
    Ok(Allowance {
        reserved_bytes: reserved.or_else(for_the_kubelet),
        cap_bytes: bytes("memoryCap").or_else(|| bytes("memoryCapBytes")),
    })
}

/// More that stays free on a small machine, where what a member leaves by itself is too little for the kubelet.
fn for_the_kubelet() -> Option<u64> {
    let now = available_memory::read(Path::new("/"), Os::Linux).ok()?;
    least_reserve(now.available)
}

fn least_reserve(available: u64) -> Option<u64> {
    let reserve = usual_reserve_bytes(available, true);
    (reserve > usual_reserve_bytes(available, false)).then_some(reserve)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_small_machines_keep_more_than_the_usual_share() {
        const GIB: u64 = 1 << 30;
        assert_eq!(least_reserve(2 * GIB), Some(128 << 20));
        assert_eq!(least_reserve(3 * GIB), None);
    }
}
