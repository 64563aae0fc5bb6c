//! The types that are generated from `proto/ring/v1/ring.proto`.

#![allow(clippy::all, missing_docs)]

tonic::include_proto!("prima.ring.v1");
