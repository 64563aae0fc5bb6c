//! The documents that the operator and the agents share, and nothing else: the API types of `prima.dev`, how an error and an amount of
//! bytes read in them, and the names by which both find the same thing.
//!
//! Kubernetes is one way to carry these documents, files are the other; the types are the same. This package
//! has no client and does no I/O. Checks that a schema cannot express (a plan must cover every layer once)
//! live beside the type they belong to.

pub mod definitions;
mod error_chain;
mod printable;
pub mod quantity;
pub mod v1alpha1;

use std::time::Duration;

pub use error_chain::error_chain;
pub use printable::printable;

/// The agent on a Node has the Lease of this name, followed by the Node's.
pub const AGENT_LEASE_PREFIX: &str = "prima-agent-";

/// On the Lease of an agent that was asked to end: its machine is to be in no ring, and in a while there is no member on it.
pub const LEAVING: &str = "prima.dev/leaving";

/// A machine counts as lost when its agent's Lease was not renewed for this long.
pub const AGENT_LEASE_SECONDS: u16 = 40;

/// Seconds after which a watch is asked for anew, from where it was. A server whose machine has gone says nothing more, not even that.
pub const WATCH_SECONDS: u32 = 60;
/// A request to the API server that brings nothing for this long has failed: no answer and no watch takes longer.
pub const SILENCE: Duration = Duration::from_secs(75);

/// Content type of all that answers at /metrics.
pub const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
