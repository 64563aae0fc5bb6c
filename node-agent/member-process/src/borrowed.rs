//! What `prima-node-agent borrow look` finds out of machines that are lent, as it writes it for `prima run`: JSON, on stdout.

use std::path::PathBuf;

use prima_crds::v1alpha1::node_profile::{LinkProfile, NodeProfile};
use serde::{Deserialize, Serialize};

/// The machines that a ring can have.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Borrowed {
    pub own: OwnPlace,
    /// Those that are lent, in the order in which they were named.
    pub lent: Vec<LentPlace>,
}

/// Where a machine's member is found by its neighbours.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Place {
    /// No two are called the same.
    pub name: String,
    /// `IP:PORT` of its ring service.
    pub address: String,
    /// SHA-256 of its public key, as plans have it.
    pub public_key_sha256: String,
}

/// The machine on which `prima run` is.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OwnPlace {
    pub place: Place,
    /// The file with its key.
    pub identity: PathBuf,
    /// To each of the others.
    pub links: Vec<LinkProfile>,
}

/// A machine that is lent.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LentPlace {
    pub place: Place,
    /// `HOST:PORT` of its agent.
    pub lender: String,
    /// With its links to all others, and the name of `place`.
    pub profile: NodeProfile,
}
