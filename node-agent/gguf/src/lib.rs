//! Reads the header of GGUF model files: untrusted bytes in, metadata and tensor index out.
//!
//! Decides: whether a header is well formed, and where every tensor lies in the file. After [`Gguf::parse`] returned `Ok`, every
//! tensor's range is inside the file, aligned, free of overlaps and of exactly the size that its type and shape ask for, so
//! that nobody downstream checks it again.
//!
//! Refuses: to read tensor data; to know what a key means to a model (except `general.alignment`, which the format itself
//! needs); to repair anything. A number from the file is checked against the bytes that are there before memory is allocated by it.
//!
//! Format: GGUF versions 2 and 3, little-endian, as in <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.
//! [`writer`] writes the same format, for tools and tests that make model files.

#![forbid(unsafe_code)]

mod error;
mod gguf;
mod metadata;
mod name_index;
mod open;
mod part;
mod reader;
mod split;
mod strings;
mod tensor;
pub mod writer;

pub use error::GgufError;
pub use gguf::Gguf;
pub use metadata::{Array, Metadata, Value};
pub use open::open_regular;
pub use part::FilePart;
pub use split::{first_part, model_bytes, part_name, part_names, part_paths};
pub use strings::Strings;
pub use tensor::{GgmlType, TensorInfo};

/// The first four bytes of every GGUF file.
const MAGIC: [u8; 4] = *b"GGUF";

/// The most bytes that header, metadata and tensor index may take together, of all files of a model: 32 MiB.
///
/// Twice the largest of a published model (a vocabulary of 262,144 tokens with merges). A parsed header takes several times its bytes, and
/// people name files of any kind to programs that many others use, too.
pub const MAX_HEADER_LEN: u64 = 32 << 20;

/// Alignment of tensor data where `general.alignment` is absent.
const DEFAULT_ALIGNMENT: u64 = 32;

/// The metadata key that the format itself gives a meaning to.
const ALIGNMENT_KEY: &str = "general.alignment";
