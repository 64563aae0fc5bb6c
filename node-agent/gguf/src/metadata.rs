//! The key-value part of the header, and typed access to it.
//!
//! Decides: when a stored value counts as the asked-for type (integers of any width and sign do where the number fits; nothing else
//! is converted but F64 to f32). Refuses: defaults. Absent is `None`, or an error of `require_*` that names the key.

use crate::error::{GgufError, shown};
use crate::name_index::NameIndex;
use crate::strings::Strings;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array value: all elements of one type. Arrays of arrays are not in use by any model and are refused.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Strings),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// All metadata of a file, in file order, found by key.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metadata {
    file: String,
    entries: Vec<(String, Value)>,
    by_key: NameIndex,
}

impl Metadata {
    /// Metadata that did not come out of a file; `name` stands for the file in errors. A key given twice is an error whose
    /// offsets are the positions in `entries`.
    pub fn new(name: &str, entries: Vec<(String, Value)>) -> Result<Metadata, GgufError> {
        Self::from_file(name, entries, |position| position as u64)
    }

    /// `offset_of`: where in the file the entry of that position has its key.
    pub(crate) fn from_file(
        file: &str,
        entries: Vec<(String, Value)>,
        offset_of: impl Fn(usize) -> u64,
    ) -> Result<Metadata, GgufError> {
        let by_key =
            NameIndex::new(entries.len(), |at| &entries[at].0).map_err(|(first, second)| {
                GgufError::DuplicateKey {
                    file: file.to_owned(),
                    key: shown(&entries[second].0),
                    offset: offset_of(second),
                    first_offset: offset_of(first),
                }
            })?;
        Ok(Metadata {
            file: file.to_owned(),
            entries,
            by_key,
        })
    }

    /// The value of `key`, as stored.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let at = self.by_key.find(key, |at| &self.entries[at].0)?;
        Some(&self.entries[at].1)
    }

    /// Every key with its value, in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries
            .iter()
            .map(|(key, value)| (key.as_str(), value))
    }

    /// `Ok(None)` where the key is absent; an error where it holds no integer or one that does not fit. The same holds for all that
    /// follow.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        self.read(key, "an integer that fits u32", |value| {
            u32::try_from(value.integer()?).ok()
        })
    }

    /// An integer that fits u64.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.read(key, "an integer that fits u64", |value| {
            u64::try_from(value.integer()?).ok()
        })
    }

    /// An F32, or an F64 rounded to f32.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        self.read(key, "a floating-point number", |value| match value {
            Value::F32(number) => Some(*number),
            Value::F64(number) => Some(*number as f32),
            _ => None,
        })
    }

    /// A boolean.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.read(key, "a bool", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    /// A string.
    pub fn str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.read(key, "a string", |value| match value {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Result<Option<&Strings>, GgufError> {
        self.read(key, "an array of strings", |value| match value {
            Value::Array(Array::String(texts)) => Some(texts),
            _ => None,
        })
    }

    /// An array of F32.
    pub fn f32s(&self, key: &str) -> Result<Option<&[f32]>, GgufError> {
        self.read(key, "an array of F32", |value| match value {
            Value::Array(Array::F32(numbers)) => Some(numbers.as_slice()),
            _ => None,
        })
    }

    /// An array of integers, of any width, all of which fit i32.
    pub fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>, GgufError> {
        fn narrow<T: Copy + TryInto<i32>>(numbers: &[T]) -> Option<Vec<i32>> {
            numbers
                .iter()
                .map(|&number| number.try_into().ok())
                .collect()
        }
        self.read(
            key,
            "an array of integers that fit i32",
            |value| match value {
                Value::Array(Array::U8(numbers)) => narrow(numbers),
                Value::Array(Array::I8(numbers)) => narrow(numbers),
                Value::Array(Array::U16(numbers)) => narrow(numbers),
                Value::Array(Array::I16(numbers)) => narrow(numbers),
                Value::Array(Array::U32(numbers)) => narrow(numbers),
                Value::Array(Array::I32(numbers)) => Some(numbers.clone()),
                Value::Array(Array::U64(numbers)) => narrow(numbers),
                Value::Array(Array::I64(numbers)) => narrow(numbers),
                _ => None,
            },
        )
    }

    /// As [`Metadata::u32`], with an error that names the key where it is absent. The same holds for all that follow.
    pub fn require_u32(&self, key: &str) -> Result<u32, GgufError> {
        self.u32(key)?
            .ok_or_else(|| self.missing(key, "an integer that fits u32"))
    }

    /// As [`Metadata::f32`], but the key must be there.
    pub fn require_f32(&self, key: &str) -> Result<f32, GgufError> {
        self.f32(key)?
            .ok_or_else(|| self.missing(key, "a floating-point number"))
    }

    /// As [`Metadata::str`], but the key must be there.
    pub fn require_str(&self, key: &str) -> Result<&str, GgufError> {
        self.str(key)?.ok_or_else(|| self.missing(key, "a string"))
    }

    /// As [`Metadata::strings`], but the key must be there.
    pub fn require_strings(&self, key: &str) -> Result<&Strings, GgufError> {
        self.strings(key)?
            .ok_or_else(|| self.missing(key, "an array of strings"))
    }

    fn read<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        convert(value).map(Some).ok_or_else(|| GgufError::KeyType {
            file: self.file.clone(),
            key: shown(key),
            expected,
            found: value.describe(),
        })
    }

    fn missing(&self, key: &str, expected: &'static str) -> GgufError {
        GgufError::MissingKey {
            file: self.file.clone(),
            key: shown(key),
            expected,
        }
    }
}

impl Value {
    /// The number, where this is an integer of any width.
    pub(crate) fn integer(&self) -> Option<i128> {
        match *self {
            Value::U8(number) => Some(number.into()),
            Value::I8(number) => Some(number.into()),
            Value::U16(number) => Some(number.into()),
            Value::I16(number) => Some(number.into()),
            Value::U32(number) => Some(number.into()),
            Value::I32(number) => Some(number.into()),
            Value::U64(number) => Some(number.into()),
            Value::I64(number) => Some(number.into()),
            Value::F32(_) | Value::F64(_) | Value::Bool(_) | Value::String(_) | Value::Array(_) => {
                None
            }
        }
    }

    /// Type and content for an error: short, whatever the file holds.
    pub(crate) fn describe(&self) -> String {
        match self {
            Value::U8(number) => format!("U8 {number}"),
            Value::I8(number) => format!("I8 {number}"),
            Value::U16(number) => format!("U16 {number}"),
            Value::I16(number) => format!("I16 {number}"),
            Value::U32(number) => format!("U32 {number}"),
            Value::I32(number) => format!("I32 {number}"),
            Value::U64(number) => format!("U64 {number}"),
            Value::I64(number) => format!("I64 {number}"),
            Value::F32(number) => format!("F32 {number}"),
            Value::F64(number) => format!("F64 {number}"),
            Value::Bool(flag) => format!("bool {flag}"),
            Value::String(text) => format!("string {}", shown(text)),
            Value::Array(array) => {
                let (element, len) = array.element_and_len();
                format!("array of {len} {element}")
            }
        }
    }
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.element_and_len().1
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn element_and_len(&self) -> (&'static str, usize) {
        match self {
            Array::U8(elements) => ("U8", elements.len()),
            Array::I8(elements) => ("I8", elements.len()),
            Array::U16(elements) => ("U16", elements.len()),
            Array::I16(elements) => ("I16", elements.len()),
            Array::U32(elements) => ("U32", elements.len()),
            Array::I32(elements) => ("I32", elements.len()),
            Array::F32(elements) => ("F32", elements.len()),
            Array::Bool(elements) => ("bool", elements.len()),
            Array::String(elements) => ("string", elements.len()),
            Array::U64(elements) => ("U64", elements.len()),
            Array::I64(elements) => ("I64", elements.len()),
            Array::F64(elements) => ("F64", elements.len()),
        }
    }
}

macro_rules! value_from {
    ($($from:ty => $value:expr;)*) => {
        $(impl From<$from> for Value {
            fn from(from: $from) -> Value {
                let wrap: fn($from) -> Value = $value;
                wrap(from)
            }
        })*
    };
}

value_from! {
    u32 => Value::U32;
    i32 => Value::I32;
    u64 => Value::U64;
    f32 => Value::F32;
    bool => Value::Bool;
    String => Value::String;
    &str => |text| Value::String(text.to_owned());
    Vec<u32> => |numbers| Value::Array(Array::U32(numbers));
    Vec<i32> => |numbers| Value::Array(Array::I32(numbers));
    Vec<f32> => |numbers| Value::Array(Array::F32(numbers));
    Vec<bool> => |flags| Value::Array(Array::Bool(flags));
    Vec<String> => |texts| Value::Array(Array::String(texts.iter().collect()));
    Array => Value::Array;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Metadata {
        let entries = [
            ("small", Value::U8(7)),
            ("negative", Value::I64(-1)),
            ("large", Value::U64(u64::MAX)),
            ("rate", Value::F64(0.5)),
            ("name", "x\u{1b}[31m".into()),
            ("ids", Value::Array(Array::U16(vec![1, 65535]))),
            ("wide", Value::Array(Array::U64(vec![1, 1 << 40]))),
        ];
        Metadata::new(
            "m.gguf",
            entries.map(|(key, value)| (key.to_owned(), value)).into(),
        )
        .unwrap()
    }

    #[test]
    fn integers_of_any_width_are_read_where_they_fit() {
        let metadata = sample();
        assert_eq!(metadata.u32("small").unwrap(), Some(7));
        assert_eq!(metadata.u64("large").unwrap(), Some(u64::MAX));
        assert_eq!(metadata.i32s("ids").unwrap(), Some(vec![1, 65535]));
        assert_eq!(metadata.f32("rate").unwrap(), Some(0.5));
        assert_eq!(metadata.u32("absent").unwrap(), None);
        for (key, found) in [
            ("negative", "I64 -1"),
            ("large", "U64 18446744073709551615"),
            ("rate", "F64 0.5"),
        ] {
            let message = metadata.u32(key).unwrap_err().to_string();
            assert_eq!(
                message,
                format!(
                    "m.gguf: metadata key \"{key}\": expected an integer that fits u32, found {found}"
                )
            );
        }
        assert!(
            metadata
                .i32s("wide")
                .unwrap_err()
                .to_string()
                .ends_with("found array of 2 U64")
        );
    }

    #[test]
    fn a_missing_key_is_named() {
        let message = sample()
            .require_str("tokenizer.ggml.model")
            .unwrap_err()
            .to_string();
        assert_eq!(
            message,
            "m.gguf: metadata key \"tokenizer.ggml.model\": expected a string, found no such key"
        );
    }

    #[test]
    fn control_characters_are_escaped_in_messages() {
        let message = sample().u32("name").unwrap_err().to_string();
        assert!(
            message.ends_with(r#"found string "x\u{1b}[31m""#),
            "{message}"
        );
    }

    #[test]
    fn order_is_kept_and_duplicates_are_refused() {
        let keys: Vec<_> = sample().iter().map(|(key, _)| key.to_owned()).collect();
        assert_eq!(
            keys,
            ["small", "negative", "large", "rate", "name", "ids", "wide"]
        );
        let twice = vec![
            ("a".to_owned(), Value::U8(1)),
            ("b".to_owned(), Value::U8(1)),
            ("a".to_owned(), Value::U8(2)),
        ];
        assert!(matches!(
            Metadata::new("m", twice).unwrap_err(),
            GgufError::DuplicateKey {
                first_offset: 0,
                offset: 2,
                ..
            }
        ));
    }
}
