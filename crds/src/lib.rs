//! The documents that the operator and the agents share, and nothing else: the API types of `prima.dev`, and how an error reads in them.
//!
//! Kubernetes is one way to carry these documents, files are the other; the types are the same. This package
//! has no client and does no I/O. Checks that a schema cannot express (a plan must cover every layer once)
//! live beside the type they belong to.

pub mod definitions;
mod error_chain;
pub mod v1alpha1;

pub use error_chain::error_chain;
