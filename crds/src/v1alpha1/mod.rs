//! Version `v1alpha1` of the API group `prima.dev`.

pub mod ring_plan;
