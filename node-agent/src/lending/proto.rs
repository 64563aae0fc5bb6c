//! The types that are generated from `proto/lending/v1/lending.proto`.

#![allow(clippy::all, missing_docs)]

tonic::include_proto!("prima.lending.v1");
