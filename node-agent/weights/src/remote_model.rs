//! A model on a server, in one file or several: the headers of all of them, and what tells this version of the model from another.

use std::pin::pin;

use futures::stream::{self, StreamExt, TryStreamExt};
use prima_crds::v1alpha1::ring_plan::{FileVersion, PartVersion};
use prima_gguf::{Gguf, MAX_HEADER_LEN, part_names};
use sha2::{Digest, Sha256};

use crate::client::Client;
use crate::header::{Header, HeaderError};
use crate::identity::FileIdentity;
use crate::remote::Remote;
use crate::remote_error::RemoteError;
use crate::source::Source;

/// Files whose headers are fetched at a time.
const PARTS_AT_ONCE: usize = 4;
/// The largest header of a file but the first: such files describe nothing but their own tensors.
const MAX_PART_BYTES: u64 = 2 << 20;

/// The files of a model on a server, and its header.
#[derive(Debug)]
pub struct RemoteModel {
    /// In order.
    pub files: Vec<Remote>,
    pub gguf: Gguf,
    pub version: FileVersion,
}

/// Why a model on a server cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RemoteModelError {
    #[error(transparent)]
    File(#[from] RemoteError),
    #[error(transparent)]
    Header(#[from] HeaderError),
}

impl RemoteModel {
    /// Finds the file at `source`, and the others if it is the first of several; fetches their headers and nothing else.
    ///
    /// # Errors
    /// [`RemoteModelError`].
    pub async fn open(client: &Client, source: &Source) -> Result<RemoteModel, RemoteModelError> {
        RemoteModel::open_within(client, source, MAX_HEADER_LEN).await
    }

    /// The same, if the header has at most `limit` bytes. Models in several files are taken for larger than any limit but
    /// [`MAX_HEADER_LEN`].
    ///
    /// # Errors
    /// [`RemoteModelError`].
    pub async fn open_within(
        client: &Client,
        source: &Source,
        limit: u64,
    ) -> Result<RemoteModel, RemoteModelError> {
        let gguf = |source| HeaderError::Gguf { source };
        let (first, header) = open_file(client, source, limit).await?;
        let names = part_names(&source.file_name(), &header.gguf).map_err(gguf)?;
        let count = names.len() as u64;
        let too_large =
            |url, needed| RemoteModelError::Header(HeaderError::TooLarge { url, limit, needed });
        if count > 1 && limit < MAX_HEADER_LEN {
            return Err(too_large(first.shown(), limit + 1));
        }
        let sources: Vec<Source> = (2..=count)
            .map(|number| source.part(number, count))
            .collect::<Result<_, _>>()
            .map_err(RemoteError::from)?;
        let mut others = pin!(
            stream::iter(sources)
                .map(async |source| open_file(client, &source, MAX_PART_BYTES).await)
                .buffered(PARTS_AT_ONCE)
        );

        let mut digest = Sha256::new_with_prefix(&header.bytes);
        let mut header_bytes = header.bytes.len() as u64;
        let (mut files, mut headers) = (vec![first], vec![header.gguf]);
        while let Some((file, header)) = others.try_next().await? {
            header_bytes += header.bytes.len() as u64;
            if header_bytes > limit {
                return Err(too_large(file.shown(), header_bytes));
            }
            digest.update(&header.bytes);
            files.push(file);
            headers.push(header.gguf);
        }
        let names: Vec<String> = files.iter().map(Remote::shown).collect();
        Ok(RemoteModel {
            gguf: Gguf::join(&names, headers).map_err(gguf)?,
            version: version(&files, format!("{:x}", digest.finalize())),
            files,
        })
    }
}

/// A file, and its header if that has at most `limit` bytes.
async fn open_file(
    client: &Client,
    source: &Source,
    limit: u64,
) -> Result<(Remote, Header), RemoteModelError> {
    let file = Remote::open(client, source).await?;
    let header = file.read_header_within(limit).await?;
    Ok((file, header))
}

fn version(files: &[Remote], header_sha256: String) -> FileVersion {
    let commit = files[0].identity().revision_commit.clone();
    match files {
        [file] => FileVersion {
            header_sha256,
            commit,
            etag: file.identity().etag.clone(),
            sha256: file.identity().sha256.clone(),
            parts: Vec::new(),
        },
        files => FileVersion {
            header_sha256,
            commit,
            parts: files
                .iter()
                .map(|file| PartVersion {
                    size_bytes: file.identity().size_bytes as i64,
                    etag: file.identity().etag.clone(),
                    sha256: file.identity().sha256.clone(),
                })
                .collect(),
            ..FileVersion::default()
        },
    }
}

/// What identifies each file of a model of `size_bytes` in this version, in order.
pub fn identities(version: &FileVersion, size_bytes: u64) -> Vec<FileIdentity> {
    let identity = |size_bytes, etag: &Option<String>, sha256: &Option<String>| FileIdentity {
        size_bytes,
        etag: etag.clone(),
        sha256: sha256.clone(),
        revision_commit: version.commit.clone(),
    };
    match version.parts.as_slice() {
        [] => vec![identity(size_bytes, &version.etag, &version.sha256)],
        parts => parts
            .iter()
            .map(|part| identity(part.size_bytes as u64, &part.etag, &part.sha256))
            .collect(),
    }
}
