//! What the machine's owner leaves to rings: the spec of its NodeProfile, which people write. Read when a member's process starts; later
//! changes take effect at the next start.

use kube::api::{ApiResource, DynamicObject};
use kube::{Api, Client};
use prima_crds::v1alpha1::node_profile::NodeProfile;
use tokio::time::{error::Elapsed, timeout};

use super::api;

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
    let bytes = |field: &str| profile.as_ref()?.data.pointer(field)?.as_u64();
    Ok(Allowance {
        reserved_bytes: bytes("/spec/reservedMemoryBytes"),
        cap_bytes: bytes("/spec/memoryCapBytes"),
    })
}
