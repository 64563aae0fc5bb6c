//! What operator and agents both ask an API server: the hub's token of a namespace, and why a request failed.
//!
//! Refuses to watch or to write anything, and to know of plans: that differs between the two.

mod hub_tokens;

pub use hub_tokens::{HubTokenError, HubTokens};

/// Why a request failed, without all fields of the answer.
pub fn reason(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        error => prima_crds::error_chain(error),
    }
}
