//! The header as a whole: magic, version, counts, metadata, tensor index, and where the data begins.
//!
//! Decides: the order of reading and the checks that need more than one field (alignment, ranges, overlaps).
//! Refuses: versions other than 2 and 3, big-endian files, arrays of arrays, unknown tensor types.

use std::fmt::Display;

use crate::error::{GgufError, shown};
use crate::metadata::{Array, Metadata, Value};
use crate::name_index::NameIndex;
use crate::part::FilePart;
use crate::reader::Reader;
use crate::strings::Strings;
use crate::tensor::{self, GgmlType, MAX_DIMENSIONS, TensorInfo};
use crate::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC};

/// The longest metadata key in bytes, as the specification has it.
const MAX_KEY_LEN: u64 = (1 << 16) - 1;

/// The longest tensor name in bytes, as the specification has it.
const MAX_TENSOR_NAME_LEN: u64 = 64;

/// The largest alignment that is believed: 1 MiB, well above the pages and sectors that any tool aligns to.
const MAX_ALIGNMENT: u64 = 1 << 20;

/// The most tensors: a mixture with a tensor for each expert has some 30,000.
const MAX_TENSORS: u64 = 1 << 17;

/// The most key-value pairs: models have some 50. Both take several times their bytes in memory.
const MAX_PAIRS: u64 = 1 << 16;

/// Least bytes of a key-value pair: length and one byte of key, type, one byte of value.
const MIN_PAIR_LEN: u64 = 8 + 1 + 4 + 1;

/// Least bytes of a tensor's entry: length and one byte of name, number of dimensions, one dimension, type, offset.
const MIN_TENSOR_LEN: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// The header of a GGUF file, or of a model in several of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Gguf {
    /// Format version: 2 or 3.
    pub version: u32,
    /// Every tensor begins at a multiple of this many bytes: a power of two from 8 to 1 MiB.
    pub alignment: u64,
    /// The key-value pairs, in file order.
    pub metadata: Metadata,
    /// The tensor index, in file order.
    pub tensors: Vec<TensorInfo>,
    /// Offset in the (first) file where tensor data begins (or would begin, in a file without tensors); never past `file_len`.
    pub data_offset: u64,
    /// Length of the whole file in bytes; of a model in several, of all of them together.
    pub file_len: u64,
    /// The model's files; this one alone, until it is [joined](Gguf::join) with others.
    pub parts: Vec<FilePart>,
    pub(crate) by_name: NameIndex,
}

impl Gguf {
    /// Parses a header.
    ///
    /// `name` stands for the file in errors (its path). `header` holds the file's bytes from offset 0: all of it, or a prefix that
    /// holds the header. `file_len` is the length of the whole file in bytes.
    ///
    /// Errors: [`GgufError::NeedMoreBytes`] where `header` ends too early and the file does not; any other variant where the file
    /// itself is at fault. Allocates at most about six times `header.len()`, whatever the file says.
    pub fn parse(name: &str, header: &[u8], file_len: u64) -> Result<Gguf, GgufError> {
        let mut reader = Reader::new(name, header, file_len);
        let version = read_version(&mut reader)?;
        let tensor_count =
            reader.count_up_to(MAX_TENSORS, MIN_TENSOR_LEN, &"the number of tensors")?;
        let pair_count =
            reader.count_up_to(MAX_PAIRS, MIN_PAIR_LEN, &"the number of metadata pairs")?;
        let (metadata, alignment) = read_metadata(&mut reader, pair_count)?;

        let mut tensors = Vec::with_capacity(tensor_count);
        let mut entry_offsets = Vec::with_capacity(tensor_count);
        for position in 0..tensor_count {
            entry_offsets.push(reader.position());
            tensors.push(read_tensor(&mut reader, position, alignment)?);
        }
        let by_name =
            NameIndex::new(tensors.len(), |at| &tensors[at].name).map_err(|(first, second)| {
                GgufError::DuplicateTensor {
                    file: name.to_owned(),
                    tensor: shown(&tensors[second].name),
                    offset: entry_offsets[second],
                    first_offset: entry_offsets[first],
                }
            })?;
        // The header is at most MAX_HEADER_LEN long, so this does not overflow.
        let data_offset = reader.position().next_multiple_of(alignment);
        place_tensors(name, &mut tensors, data_offset, file_len)?;
        let data_offset = data_offset.min(file_len);
        Ok(Gguf {
            version,
            alignment,
            metadata,
            tensors,
            data_offset,
            file_len,
            parts: vec![FilePart {
                start: 0,
                header_len: data_offset,
                len: file_len,
            }],
            by_name,
        })
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name
            .find(name, |at| &self.tensors[at].name)
            .map(|at| &self.tensors[at])
    }
}

fn read_version(reader: &mut Reader<'_>) -> Result<u32, GgufError> {
    let file = reader.file().to_owned();
    let magic: [u8; 4] = reader.array(&"the magic \"GGUF\"")?;
    if magic != MAGIC {
        let found = magic.escape_ascii().to_string();
        return Err(GgufError::Magic { file, found });
    }
    match reader.u32(&"the version")? {
        version @ (2 | 3) => Ok(version),
        // A number whose low half is empty is a small one in the other byte order.
        swapped if swapped & 0xffff == 0 && swapped != 0 => {
            let found = swapped.swap_bytes();
            Err(GgufError::BigEndian { file, found })
        }
        found => Err(GgufError::Version { file, found }),
    }
}

/// The alignment that `value`, stored as `general.alignment`, means; `None` if it is not a valid one.
pub(crate) fn alignment_of(value: &Value) -> Option<u64> {
    let alignment = u64::try_from(value.integer()?).ok()?;
    (alignment.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(&alignment)).then_some(alignment)
}

/// Reads the key-value pairs; returns them, and the alignment of tensor data.
fn read_metadata(reader: &mut Reader<'_>, pair_count: usize) -> Result<(Metadata, u64), GgufError> {
    let mut alignment = DEFAULT_ALIGNMENT;
    let mut entries = Vec::with_capacity(pair_count);
    let mut key_offsets = Vec::with_capacity(pair_count);
    for position in 0..pair_count {
        let offset = reader.position();
        let what = format_args!("the key of metadata pair {position}");
        let key = reader.string_up_to(MAX_KEY_LEN, &what)?;
        if key.is_empty() {
            return Err(reader.invalid(offset, &what, "a key of at least 1 byte", "an empty key"));
        }
        let value_offset = reader.position();
        let value = read_value(reader, key)?;
        if key == ALIGNMENT_KEY {
            alignment = alignment_of(&value).ok_or_else(|| {
                let expected = format!("a power of two from 8 to {MAX_ALIGNMENT}");
                reader.invalid(
                    value_offset,
                    &Quoted("metadata key", key),
                    expected,
                    value.describe(),
                )
            })?;
        }
        key_offsets.push(offset);
        entries.push((key.to_owned(), value));
    }
    let metadata = Metadata::from_file(reader.file(), entries, |position| key_offsets[position])?;
    Ok((metadata, alignment))
}

/// Reads the type and the value of the pair called `key`.
fn read_value(reader: &mut Reader<'_>, key: &str) -> Result<Value, GgufError> {
    let what = &Quoted("the value of metadata key", key);
    let offset = reader.position();
    let value_type = reader.u32(&Quoted("the type of metadata key", key))?;
    Ok(match value_type {
        0 => Value::U8(u8::from_le_bytes(reader.array(what)?)),
        1 => Value::I8(i8::from_le_bytes(reader.array(what)?)),
        2 => Value::U16(u16::from_le_bytes(reader.array(what)?)),
        3 => Value::I16(i16::from_le_bytes(reader.array(what)?)),
        4 => Value::U32(u32::from_le_bytes(reader.array(what)?)),
        5 => Value::I32(i32::from_le_bytes(reader.array(what)?)),
        6 => Value::F32(f32::from_le_bytes(reader.array(what)?)),
        7 => {
            let offset = reader.position();
            let [byte] = reader.array(what)?;
            Value::Bool(to_bool(reader, offset, byte, what)?)
        }
        8 => Value::String(reader.string(what)?.to_owned()),
        9 => Value::Array(read_array(reader, key)?),
        10 => Value::U64(u64::from_le_bytes(reader.array(what)?)),
        11 => Value::I64(i64::from_le_bytes(reader.array(what)?)),
        12 => Value::F64(f64::from_le_bytes(reader.array(what)?)),
        _ => {
            return Err(reader.invalid(
                offset,
                &Quoted("the type of metadata key", key),
                "a type from 0 to 12",
                value_type,
            ));
        }
    })
}

fn read_array(reader: &mut Reader<'_>, key: &str) -> Result<Array, GgufError> {
    let type_offset = reader.position();
    let element_type = reader.u32(&Quoted("the element type of metadata key", key))?;
    let min_len = match element_type {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        // A string takes at least its length.
        8 | 10..=12 => 8,
        9 => {
            let what = Quoted("the element type of metadata key", key);
            return Err(reader.invalid(
                type_offset,
                &what,
                "no array inside an array",
                "element type 9 (array)",
            ));
        }
        _ => {
            let what = Quoted("the element type of metadata key", key);
            return Err(reader.invalid(type_offset, &what, "a type from 0 to 12", element_type));
        }
    };
    let what = &Quoted("the elements of metadata key", key);
    let len = reader.count(min_len, &Quoted("the array length of metadata key", key))?;
    if element_type == 8 {
        let mut strings = Strings::with_capacity(len);
        for _ in 0..len {
            strings.push(reader.string(what)?);
        }
        return Ok(Array::String(strings));
    }
    let offset = reader.position();
    // `count` checked that the product fits the bytes at hand.
    let bytes = reader.take(len as u64 * min_len, what)?;
    Ok(match element_type {
        0 => Array::U8(bytes.to_vec()),
        1 => Array::I8(numbers(bytes, i8::from_le_bytes)),
        2 => Array::U16(numbers(bytes, u16::from_le_bytes)),
        3 => Array::I16(numbers(bytes, i16::from_le_bytes)),
        4 => Array::U32(numbers(bytes, u32::from_le_bytes)),
        5 => Array::I32(numbers(bytes, i32::from_le_bytes)),
        6 => Array::F32(numbers(bytes, f32::from_le_bytes)),
        7 => {
            let mut flags = Vec::with_capacity(len);
            for (at, &byte) in bytes.iter().enumerate() {
                flags.push(to_bool(reader, offset + at as u64, byte, what)?);
            }
            Array::Bool(flags)
        }
        10 => Array::U64(numbers(bytes, u64::from_le_bytes)),
        11 => Array::I64(numbers(bytes, i64::from_le_bytes)),
        _ => Array::F64(numbers(bytes, f64::from_le_bytes)),
    })
}

fn numbers<const N: usize, T>(bytes: &[u8], convert: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes
        .as_chunks::<N>()
        .0
        .iter()
        .map(|&chunk| convert(chunk))
        .collect()
}

fn to_bool(
    reader: &Reader<'_>,
    offset: u64,
    byte: u8,
    what: &dyn Display,
) -> Result<bool, GgufError> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(reader.invalid(offset, what, "a bool of 0 or 1", byte)),
    }
}

/// Reads one entry of the tensor index; its offset is still relative to the start of tensor data.
fn read_tensor(
    reader: &mut Reader<'_>,
    position: usize,
    alignment: u64,
) -> Result<TensorInfo, GgufError> {
    let name_offset = reader.position();
    let name = reader.string_up_to(
        MAX_TENSOR_NAME_LEN,
        &format_args!("the name of tensor {position}"),
    )?;
    if name.is_empty() {
        return Err(reader.invalid(
            name_offset,
            &format_args!("the name of tensor {position}"),
            "a name of at least 1 byte",
            "an empty name",
        ));
    }
    let shape_offset = reader.position();
    let shape_field = &Quoted("the shape of tensor", name);
    let dimensions = reader.u32(shape_field)?;
    if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
        return Err(reader.invalid(
            shape_offset,
            shape_field,
            format!("1 to {MAX_DIMENSIONS} dimensions"),
            dimensions,
        ));
    }
    let mut shape = Vec::with_capacity(dimensions as usize);
    for _ in 0..dimensions {
        shape.push(reader.u64(shape_field)?);
    }

    let type_offset = reader.position();
    let type_field = &Quoted("the type of tensor", name);
    let type_id = reader.u32(type_field)?;
    let ggml_type = GgmlType::from_id(type_id).ok_or_else(|| match type_id {
        4 | 5 | 31..=33 | 36..=38 => reader.invalid(
            type_offset,
            type_field,
            "a type in use",
            format!("{type_id}, which ggml removed: convert the model again"),
        ),
        _ => reader.invalid(type_offset, type_field, "a ggml type of 0 to 42", type_id),
    })?;
    let byte_len = tensor::byte_len(ggml_type, &shape)
        .map_err(|(expected, found)| reader.invalid(shape_offset, shape_field, expected, found))?;

    let data_field_offset = reader.position();
    let data_field = &Quoted("the data offset of tensor", name);
    let offset = reader.u64(data_field)?;
    if !offset.is_multiple_of(alignment) {
        return Err(reader.invalid(
            data_field_offset,
            data_field,
            format!("a multiple of the alignment {alignment}"),
            offset,
        ));
    }
    Ok(TensorInfo {
        name: name.to_owned(),
        ggml_type,
        shape,
        offset,
        byte_len,
    })
}

/// Makes the tensors' offsets absolute, and checks that each tensor is inside the file and overlaps no other.
fn place_tensors(
    file: &str,
    tensors: &mut [TensorInfo],
    data_offset: u64,
    file_len: u64,
) -> Result<(), GgufError> {
    for tensor in &mut *tensors {
        let end = u128::from(data_offset) + u128::from(tensor.offset) + u128::from(tensor.byte_len);
        if end > u128::from(file_len) {
            return Err(GgufError::TensorPastEnd {
                file: file.to_owned(),
                tensor: shown(&tensor.name),
                offset: data_offset.saturating_add(tensor.offset),
                byte_len: tensor.byte_len,
                file_len,
                missing: u64::try_from(end - u128::from(file_len)).unwrap_or(u64::MAX),
            });
        }
        tensor.offset += data_offset;
    }
    let mut by_offset: Vec<&TensorInfo> = tensors.iter().collect();
    by_offset.sort_unstable_by_key(|tensor| tensor.offset);
    for pair in by_offset.windows(2) {
        let (before, behind) = (pair[0], pair[1]);
        let end = before.offset + before.byte_len;
        if behind.offset < end {
            return Err(GgufError::TensorOverlap {
                file: file.to_owned(),
                tensor: shown(&behind.name),
                offset: behind.offset,
                other: shown(&before.name),
                other_end: end,
            });
        }
    }
    Ok(())
}

/// A field of something named in the file, as errors name it: `the type of tensor "blk.0.attn_q.weight"`. Formatted only when
/// an error is made.
struct Quoted<'a>(&'static str, &'a str);

impl Display for Quoted<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.0, shown(self.1))
    }
}
