//! What can be wrong with a GGUF file, told so that its reader knows which byte of which file to look at.
//!
//! Every variant about the file's content carries the file's name and the offset, what was expected there and what was found.
//! Names and keys come from the file: they are shortened and escaped before they get into a message, never echoed raw.

use std::path::PathBuf;

/// Why a GGUF header was refused, or a metadata key could not be read as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file could not be opened, or its length not be learned.
    #[error("cannot open {}", path.display())]
    Open {
        path: PathBuf,
        source: std::io::Error,
    },

    /// Reading the header failed part-way.
    #[error("cannot read the header of {}, at offset {offset}", path.display())]
    Read {
        path: PathBuf,
        offset: u64,
        source: std::io::Error,
    },

    /// Not a GGUF file at all.
    #[error("{file}: not a GGUF file: at offset 0 expected the magic \"GGUF\", found \"{found}\"")]
    Magic { file: String, found: String },

    /// A GGUF file of the other byte order.
    #[error(
        "{file}: at offset 4 expected version 2 or 3 in little-endian, found version {found} in big-endian: \
         convert the file to little-endian first"
    )]
    BigEndian { file: String, found: u32 },

    /// A GGUF version that this parser does not know.
    #[error(
        "{file}: at offset 4 expected GGUF version 2 or 3, found version {found}: convert the model again with a current converter"
    )]
    Version { file: String, found: u32 },

    /// The bytes given end inside the header, but the file goes on: call again with at least `needed` bytes of the file.
    #[error(
        "{file}: at offset {offset} expected {expected}, found the end of the {have} bytes given: the header takes at least {needed} bytes"
    )]
    NeedMoreBytes {
        file: String,
        offset: u64,
        expected: String,
        have: u64,
        needed: u64,
    },

    /// The file itself ends inside the header.
    #[error(
        "{file}: at offset {offset} expected {expected}, found the end of the file after {file_len} bytes: download it again"
    )]
    EndOfFile {
        file: String,
        offset: u64,
        expected: String,
        file_len: u64,
    },

    /// The header goes on past [`crate::MAX_HEADER_LEN`].
    #[error(
        "{file}: at offset {offset} expected {expected}, found a header of more than {limit} bytes, the most that is read"
    )]
    HeaderTooLarge {
        file: String,
        offset: u64,
        expected: String,
        limit: u64,
    },

    /// A field of the header holds what it must not hold.
    #[error("{file}: {field}, at offset {offset}: expected {expected}, found {found}")]
    Invalid {
        file: String,
        field: String,
        offset: u64,
        expected: String,
        found: String,
    },

    /// A metadata key occurs twice.
    #[error(
        "{file}: at offset {offset} expected a metadata key of its own, found {key} again, first given at offset {first_offset}"
    )]
    DuplicateKey {
        file: String,
        key: String,
        offset: u64,
        first_offset: u64,
    },

    /// A tensor name occurs twice.
    #[error(
        "{file}: at offset {offset} expected a tensor name of its own, found {tensor} again, first given at offset {first_offset}"
    )]
    DuplicateTensor {
        file: String,
        tensor: String,
        offset: u64,
        first_offset: u64,
    },

    /// A tensor's data reaches past the end of the file: usually a download that was cut off.
    #[error(
        "{file}: tensor {tensor} of {byte_len} bytes at offset {offset}: expected its end inside the file of {file_len} bytes, \
         found it {missing} bytes past the end: the file is cut off, download it again"
    )]
    TensorPastEnd {
        file: String,
        tensor: String,
        offset: u64,
        byte_len: u64,
        file_len: u64,
        missing: u64,
    },

    /// Two tensors claim the same bytes.
    #[error(
        "{file}: tensor {tensor} at offset {offset}: expected it behind tensor {other}, which ends at {other_end}, found both on the same bytes"
    )]
    TensorOverlap {
        file: String,
        tensor: String,
        offset: u64,
        other: String,
        other_end: u64,
    },

    /// A file of a model in several is not the part that it should be.
    #[error("{file}: expected {expected}, found {found}")]
    Part {
        file: String,
        expected: String,
        found: String,
    },

    /// A metadata key that is needed is absent.
    #[error("{file}: metadata key {key}: expected {expected}, found no such key")]
    MissingKey {
        file: String,
        key: String,
        expected: &'static str,
    },

    /// A metadata key is there, but holds another type, or a number that does not fit.
    #[error("{file}: metadata key {key}: expected {expected}, found {found}")]
    KeyType {
        file: String,
        key: String,
        expected: &'static str,
        found: String,
    },
}

/// A name out of the file as it may be shown: quoted, control characters escaped, shortened to 96 characters.
pub(crate) fn shown(name: &str) -> String {
    const LIMIT: usize = 96;
    match name.char_indices().nth(LIMIT) {
        None => format!("{name:?}"),
        Some((cut, _)) => format!("{:?}... ({} bytes)", &name[..cut], name.len()),
    }
}
