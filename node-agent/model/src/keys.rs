//! The metadata keys of one family, read with bounds.

use prima_gguf::{Array, Metadata, Value};

use crate::error::ModelError;

/// No size of a model is near this; products of three of them fit u64.
pub const MAX_SIZE: u32 = 1 << 21;

/// Which layers a key speaks of.
pub enum Pattern {
    /// All but the last of so many.
    Period(usize),
    /// Whether it speaks of each layer.
    Layers(Vec<bool>),
}

/// Keys below the family's prefix.
pub struct Keys<'a> {
    pub file: &'a str,
    pub metadata: &'a Metadata,
    pub prefix: &'static str,
}

impl Keys<'_> {
    /// The key as it stands in the file.
    pub fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    /// A count or length, at least 1.
    pub fn size(&self, key: &str) -> Result<usize, ModelError> {
        let value = self.metadata.require_u32(&self.full(key))?;
        self.checked_size(key, value)
    }

    pub fn optional_size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let value = self.optional_u32(key)?;
        value.map(|value| self.checked_size(key, value)).transpose()
    }

    /// A size that a file tells once or, as Granite 4 does, for each layer. Layers of different sizes are not computed.
    pub fn size_of_all_layers(&self, key: &str) -> Result<usize, ModelError> {
        let Some(Value::Array(_)) = self.metadata.get(&self.full(key)) else {
            return self.size(key);
        };
        let sizes = self.numbers(key)?;
        let layers = self.size("block_count")?;
        let refuse = |found: String| {
            let expected = format!("one number, or the same for each of the {layers} layers");
            self.refuse(key, expected, found)
        };
        let Some(&first) = sizes.first().filter(|_| sizes.len() == layers) else {
            return Err(refuse(format!("{} numbers", sizes.len())));
        };
        if let Some(at) = sizes.iter().position(|size| *size != first) {
            let other = sizes[at];
            return Err(refuse(format!(
                "{first} for layer 0 and {other} for layer {at}"
            )));
        }
        match u32::try_from(first) {
            Ok(size) => self.checked_size(key, size),
            Err(_) => Err(refuse(first.to_string())),
        }
    }

    pub fn optional_u32(&self, key: &str) -> Result<Option<u32>, ModelError> {
        Ok(self.metadata.u32(&self.full(key))?)
    }

    pub fn pattern(&self, key: &str) -> Result<Option<Pattern>, ModelError> {
        match self.metadata.get(&self.full(key)) {
            Some(Value::Array(Array::Bool(layers))) => Ok(Some(Pattern::Layers(layers.clone()))),
            Some(_) => Ok(self.optional_size(key)?.map(Pattern::Period)),
            None => Ok(None),
        }
    }

    /// Integers; none where the key is absent.
    pub fn numbers(&self, key: &str) -> Result<Vec<i32>, ModelError> {
        Ok(self.metadata.i32s(&self.full(key))?.unwrap_or_default())
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>, ModelError> {
        Ok(self.metadata.str(&self.full(key))?)
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        Ok(self.metadata.bool(&self.full(key))?)
    }

    /// A positive number; it must be there.
    pub fn positive(&self, key: &str) -> Result<f32, ModelError> {
        let value = self.metadata.require_f32(&self.full(key))?;
        self.checked_positive(key, value)
    }

    pub fn positive_or(&self, key: &str, default: f32) -> Result<f32, ModelError> {
        match self.metadata.f32(&self.full(key))? {
            Some(value) => self.checked_positive(key, value),
            None => Ok(default),
        }
    }

    /// A positive number; 0 counts as if the key were absent.
    pub fn positive_or_none(&self, key: &str) -> Result<Option<f32>, ModelError> {
        match self.metadata.f32(&self.full(key))? {
            None | Some(0.0) => Ok(None),
            Some(value) => self.checked_positive(key, value).map(Some),
        }
    }

    pub fn has(&self, key: &str) -> bool {
        self.metadata.get(&self.full(key)).is_some()
    }

    pub fn refuse(
        &self,
        key: &str,
        expected: impl Into<String>,
        found: impl ToString,
    ) -> ModelError {
        ModelError::Key {
            file: self.file.to_owned(),
            key: self.full(key),
            expected: expected.into(),
            found: found.to_string(),
        }
    }

    fn checked_size(&self, key: &str, value: u32) -> Result<usize, ModelError> {
        match (1..=MAX_SIZE).contains(&value) {
            true => Ok(value as usize),
            false => Err(self.refuse(key, format!("a number from 1 to {MAX_SIZE}"), value)),
        }
    }

    fn checked_positive(&self, key: &str, value: f32) -> Result<f32, ModelError> {
        match value > 0.0 && value.is_finite() {
            true => Ok(value),
            false => Err(self.refuse(key, "a positive number", value)),
        }
    }
}
