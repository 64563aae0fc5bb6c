//! Fetches model files over HTTP: their headers for whoever plans, and of their weights only what one member runs.
//!
//! Decides: where a file is, and whether it is still the same ([`Remote`]); which of its bytes a member needs ([`tensors`]); which
//! of them are already on the disk ([`LocalFile`]); how the rest gets there ([`Download`]); which files may go ([`Cache`]).
//!
//! Refuses: to mix the bytes of two versions of a file; to call anything fetched that would not survive a power failure; to send a
//! token to another server than the one it was given for; to know what Kubernetes or a ring is.

#![forbid(unsafe_code)]
#![allow(
    clippy::single_range_in_vec_init,
    reason = "a list of one range is meant"
)]

mod cache;
mod client;
mod download;
mod header;
mod headers;
mod held;
mod hub;
mod identity;
mod ledger;
mod local_file;
mod model_profile;
mod reach;
mod refusal;
mod remote;
mod remote_error;
mod remote_model;
mod retry;
mod source;
pub mod tensors;
mod turns;

pub use cache::{Cache, CacheEntry, CacheError, Collected, KeptRoom, Room, cache_folder};
pub use client::{Client, ClientError};
pub use download::{Download, DownloadError, Progress};
pub use header::{Header, HeaderError};
pub use held::{Held, holding};
pub use hub::{Hub, PUBLIC_HUB};
pub use identity::{Difference, FileIdentity};
pub use local_file::{LocalFile, LocalFileError, Writer};
pub use model_profile::{RefusedModel, model_profile, vocabulary_marks};
pub use reach::{AllowedServer, AllowedServerError, Reach};
pub use remote::Remote;
pub use remote_error::RemoteError;
pub use remote_model::{RemoteModel, RemoteModelError, identities};
pub use retry::Retry;
pub use source::{Location, Source, SourceError, Token};
pub use turns::HeaderTurns;
