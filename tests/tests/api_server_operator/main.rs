//! The operator against a real API server, with the rights that the chart gives it: what it makes of Models and machines, and that
//! it makes the same whatever happens to it. The machines declare themselves; rings that compute are the cluster suite's.

mod harness;
mod headers;
mod life;
mod machines;
mod many_models;
mod operators;
mod services;
