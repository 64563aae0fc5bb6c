//! The types that are generated from `proto/lending/v1/lending.proto`.

#![allow(clippy::all, missing_docs)]

tonic::include_proto!("prima.lending.v1");

impl From<std::ops::Range<u64>> for Range {
    fn from(range: std::ops::Range<u64>) -> Self {
        Self {
            start: range.start,
            end: range.end,
        }
    }
}
