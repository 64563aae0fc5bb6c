//! Version `v1alpha1` of the API group `prima.dev`.

pub mod api_keys;
pub mod document;
pub mod model;
pub mod model_profile;
pub mod model_source;
pub mod node_profile;
pub mod ring_plan;
