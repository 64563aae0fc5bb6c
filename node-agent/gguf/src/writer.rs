//! Writes GGUF version 3 files, streaming: header first, then the tensors' bytes in order.
//!
//! Decides: offsets and padding. Refuses: to know what the bytes mean; whatever [`Gguf::parse`] would refuse; a tensor with
//! another number of bytes than its type and shape ask for; a file with tensors left out.

use std::io::{self, Write};

use crate::gguf::alignment_of;
use crate::metadata::{Array, Value};
use crate::tensor::{self, GgmlType};
use crate::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, Gguf, GgufError, MAGIC, split};

/// Collects metadata and the tensor index, then writes the header.
///
/// ```
/// use prima_gguf::{Gguf, GgmlType, writer::GgufWriter};
/// let mut writer = GgufWriter::new();
/// writer.metadata("general.architecture", "llama");
/// writer.tensor("output_norm.weight", GgmlType::F32, &[2]);
/// let mut data = writer.write_header(Vec::new())?;
/// data.tensor(&[0, 0, 0x80, 0x3f, 0, 0, 0x80, 0x3f])?;
/// let file = data.finish()?;
/// assert_eq!(Gguf::parse("example", &file, file.len() as u64)?.tensors[0].byte_len, 8);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct GgufWriter {
    metadata: Vec<(String, Value)>,
    tensors: Vec<(String, GgmlType, Vec<u64>)>,
}

/// Why a GGUF file could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriterError {
    /// The output refused bytes.
    #[error("cannot write {what}")]
    Write {
        what: &'static str,
        source: io::Error,
    },

    /// [`Gguf::parse`] would refuse the header: a name given twice, a shape without whole blocks, a bad alignment.
    #[error("cannot write a header that no reader takes")]
    Refused { source: GgufError },

    /// A tensor came with another number of bytes than its type and shape ask for.
    #[error("tensor {tensor:?}: expected {expected} bytes, found {found}")]
    TensorLength {
        tensor: String,
        expected: u64,
        found: u64,
    },

    /// More tensors came than were announced.
    #[error("expected {announced} tensors, found another one")]
    TooManyTensors { announced: usize },

    /// The file was finished before every tensor came.
    #[error("expected the data of tensor {next:?}, found the end of the file")]
    MissingTensor { next: String },
}

impl GgufWriter {
    /// A file without metadata and tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a metadata pair.
    pub fn metadata(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        self.metadata.push((key.to_owned(), value.into()));
        self
    }

    /// Announces a tensor; `shape` in GGUF order (the contiguous dimension first).
    pub fn tensor(&mut self, name: &str, ggml_type: GgmlType, shape: &[u64]) -> &mut Self {
        self.tensors
            .push((name.to_owned(), ggml_type, shape.to_vec()));
        self
    }

    /// Writes the header to `out`, up to where tensor data begins. Tensor data follows through what this returns.
    pub fn write_header<W: Write>(self, mut out: W) -> Result<TensorDataWriter<W>, WriterError> {
        // Whatever has no alignment or no size gets a stand-in here and is refused below, by the parser itself.
        let alignment = self.metadata.iter().find(|(key, _)| key == ALIGNMENT_KEY);
        let alignment = alignment.map_or(Some(DEFAULT_ALIGNMENT), |(_, value)| alignment_of(value));
        let alignment = alignment.unwrap_or(DEFAULT_ALIGNMENT);

        let mut header = Vec::new();
        header.extend(MAGIC);
        header.extend(3u32.to_le_bytes());
        header.extend((self.tensors.len() as u64).to_le_bytes());
        header.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_string(&mut header, key);
            put_value(&mut header, value);
        }
        let mut pending = Vec::with_capacity(self.tensors.len());
        let mut data_len = 0u64;
        for (name, ggml_type, shape) in self.tensors {
            let byte_len = tensor::byte_len(ggml_type, &shape).unwrap_or(0);
            put_string(&mut header, &name);
            header.extend((shape.len() as u32).to_le_bytes());
            header.extend(shape.iter().flat_map(|dimension| dimension.to_le_bytes()));
            header.extend(ggml_type.id().to_le_bytes());
            header.extend(data_len.to_le_bytes());
            let end = data_len.saturating_add(byte_len);
            data_len = end.checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
            pending.push((name, byte_len));
        }
        header.resize(header.len().next_multiple_of(alignment as usize), 0);
        Gguf::parse(
            "new file",
            &header,
            data_len.saturating_add(header.len() as u64),
        )
        .map_err(|source| WriterError::Refused { source })?;
        out.write_all(&header)
            .map_err(|source| WriterError::Write {
                what: "the header",
                source,
            })?;
        Ok(TensorDataWriter {
            out,
            alignment,
            announced: pending.len(),
            pending: pending.into_iter(),
        })
    }
}

/// Takes the tensors' bytes, in the order in which they were announced.
#[derive(Debug)]
pub struct TensorDataWriter<W> {
    out: W,
    alignment: u64,
    announced: usize,
    pending: std::vec::IntoIter<(String, u64)>,
}

impl<W: Write> TensorDataWriter<W> {
    /// Writes the next tensor's bytes and pads them to the alignment.
    pub fn tensor(&mut self, bytes: &[u8]) -> Result<(), WriterError> {
        let (tensor, expected) = self.pending.next().ok_or(WriterError::TooManyTensors {
            announced: self.announced,
        })?;
        let found = bytes.len() as u64;
        if found != expected {
            return Err(WriterError::TensorLength {
                tensor,
                expected,
                found,
            });
        }
        let padding = vec![0; (found.next_multiple_of(self.alignment) - found) as usize];
        let written = self
            .out
            .write_all(bytes)
            .and_then(|()| self.out.write_all(&padding));
        written.map_err(|source| WriterError::Write {
            what: "tensor data",
            source,
        })
    }

    /// Flushes the output and gives it back; an error where a tensor is still missing.
    pub fn finish(mut self) -> Result<W, WriterError> {
        if let Some((next, _)) = self.pending.next() {
            return Err(WriterError::MissingTensor { next });
        }
        self.out.flush().map_err(|source| WriterError::Write {
            what: "the last bytes",
            source,
        })?;
        Ok(self.out)
    }
}

/// Writes the model in `file` as several files, as `llama-gguf-split` does: `tensors` says how many of its tensors go into each, in
/// order; the first file may have none. All metadata is in the first.
pub fn split(file: &[u8], tensors: &[usize]) -> Result<Vec<Vec<u8>>, WriterError> {
    let model = Gguf::parse("the model to split", file, file.len() as u64)
        .map_err(|source| WriterError::Refused { source })?;
    let mut left = model.tensors.as_slice();
    let mut parts = Vec::with_capacity(tensors.len());
    for (number, &count) in tensors.iter().enumerate() {
        let own = left.split_off(..count).ok_or(WriterError::TooManyTensors {
            announced: left.len(),
        })?;
        let mut writer = GgufWriter::new();
        if number == 0 {
            for (key, value) in model.metadata.iter() {
                writer.metadata(key, value.clone());
            }
        }
        writer.metadata(split::NUMBER_KEY, Value::U16(number as u16));
        writer.metadata(split::COUNT_KEY, Value::U16(tensors.len() as u16));
        writer.metadata(split::TENSORS_KEY, model.tensors.len() as i32);
        for tensor in own {
            writer.tensor(&tensor.name, tensor.ggml_type, &tensor.shape);
        }
        let mut data = writer.write_header(Vec::new())?;
        for tensor in own {
            let start = tensor.offset as usize;
            data.tensor(&file[start..start + tensor.byte_len as usize])?;
        }
        parts.push(data.finish()?);
    }
    match left.first() {
        None => Ok(parts),
        Some(next) => Err(WriterError::MissingTensor {
            next: next.name.clone(),
        }),
    }
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    fn scalar(out: &mut Vec<u8>, value_type: u32, bytes: &[u8]) {
        out.extend(value_type.to_le_bytes());
        out.extend(bytes);
    }
    match value {
        Value::U8(number) => scalar(out, 0, &number.to_le_bytes()),
        Value::I8(number) => scalar(out, 1, &number.to_le_bytes()),
        Value::U16(number) => scalar(out, 2, &number.to_le_bytes()),
        Value::I16(number) => scalar(out, 3, &number.to_le_bytes()),
        Value::U32(number) => scalar(out, 4, &number.to_le_bytes()),
        Value::I32(number) => scalar(out, 5, &number.to_le_bytes()),
        Value::F32(number) => scalar(out, 6, &number.to_le_bytes()),
        Value::Bool(flag) => scalar(out, 7, &[u8::from(*flag)]),
        Value::String(text) => {
            out.extend(8u32.to_le_bytes());
            put_string(out, text);
        }
        Value::Array(array) => {
            out.extend(9u32.to_le_bytes());
            put_array(out, array);
        }
        Value::U64(number) => scalar(out, 10, &number.to_le_bytes()),
        Value::I64(number) => scalar(out, 11, &number.to_le_bytes()),
        Value::F64(number) => scalar(out, 12, &number.to_le_bytes()),
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    fn elements<T: Copy, const N: usize>(
        out: &mut Vec<u8>,
        element_type: u32,
        elements: &[T],
        bytes: impl Fn(T) -> [u8; N],
    ) {
        out.extend(element_type.to_le_bytes());
        out.extend((elements.len() as u64).to_le_bytes());
        out.extend(elements.iter().flat_map(|&element| bytes(element)));
    }
    match array {
        Array::U8(numbers) => elements(out, 0, numbers, u8::to_le_bytes),
        Array::I8(numbers) => elements(out, 1, numbers, i8::to_le_bytes),
        Array::U16(numbers) => elements(out, 2, numbers, u16::to_le_bytes),
        Array::I16(numbers) => elements(out, 3, numbers, i16::to_le_bytes),
        Array::U32(numbers) => elements(out, 4, numbers, u32::to_le_bytes),
        Array::I32(numbers) => elements(out, 5, numbers, i32::to_le_bytes),
        Array::F32(numbers) => elements(out, 6, numbers, f32::to_le_bytes),
        Array::Bool(flags) => elements(out, 7, flags, |flag| [u8::from(flag)]),
        Array::String(texts) => {
            out.extend(8u32.to_le_bytes());
            out.extend((texts.len() as u64).to_le_bytes());
            for text in texts.iter() {
                put_string(out, text);
            }
        }
        Array::U64(numbers) => elements(out, 10, numbers, u64::to_le_bytes),
        Array::I64(numbers) => elements(out, 11, numbers, i64::to_le_bytes),
        Array::F64(numbers) => elements(out, 12, numbers, f64::to_le_bytes),
    }
}
