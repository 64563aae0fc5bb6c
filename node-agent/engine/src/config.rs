//! The numbers that a model's forward pass is built from, read from GGUF metadata and checked against one another.
//!
//! Refuses: values that need arithmetic that this engine does not have (RoPE scaling other than linear, value heads of another
//! size than key heads), and sizes larger than any model's, before they are used to allocate memory.

use prima_gguf::{Gguf, Metadata};

use crate::architecture::{self, Architecture, Side};
use crate::error::EngineError;
use crate::kernels::{AttentionShape, KvShape, Rope};

/// No size of a model is near this; products of three of them fit u64.
const MAX_SIZE: u32 = 1 << 21;

/// The shape and constants of a model.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    pub architecture: &'static Architecture,
    /// Number of layers (transformer blocks).
    pub layers: usize,
    /// Width of the activation between layers.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Elements of a query, key or value head.
    pub head_dim: usize,
    /// Inner width of the feed-forward part.
    pub feed_forward: usize,
    /// Number of tokens, which is the number of logits.
    pub vocabulary: usize,
    /// The most positions that the model was made for.
    pub context_length: usize,
    /// Added to the mean square in RMS norms.
    pub norm_epsilon: f32,
    /// How many leading elements of a head RoPE rotates.
    pub rope_dimensions: usize,
    /// Base of RoPE's frequencies.
    pub rope_base: f32,
    /// Positions are divided by this (linear RoPE scaling); 1 in most models.
    pub rope_linear_factor: f32,
}

impl ModelConfig {
    /// Reads the configuration of `gguf`; `file` names it in errors.
    ///
    /// # Errors
    /// Metadata that is missing, of another type, or not what this engine computes; an embedding that is not a matrix.
    pub(crate) fn from_gguf(file: &str, gguf: &Gguf) -> Result<ModelConfig, EngineError> {
        let metadata = &gguf.metadata;
        let name = metadata
            .require_str("general.architecture")
            .map_err(|source| EngineError::Metadata { source })?;
        let architecture =
            Architecture::by_name(name).ok_or_else(|| EngineError::UnknownArchitecture {
                file: file.to_owned(),
                found: name.to_owned(),
                known: architecture::ALL
                    .iter()
                    .map(|known| known.name)
                    .collect::<Vec<_>>()
                    .join(", "),
            })?;
        let keys = Keys {
            file,
            metadata,
            prefix: architecture.name,
        };
        for (key, meaning) in architecture.refused_metadata {
            if let Some(found) = keys.optional_u32(key)?.filter(|&found| found != 0) {
                return Err(keys.refuse(key, format!("0 (no {meaning})"), found));
            }
        }

        let hidden = keys.size("embedding_length")?;
        let heads = keys.size("attention.head_count")?;
        let kv_heads = keys
            .optional_size("attention.head_count_kv")?
            .unwrap_or(heads);
        if heads % kv_heads != 0 {
            let expected = format!("a divisor of the {heads} query heads");
            return Err(keys.refuse("attention.head_count_kv", expected, kv_heads));
        }
        let head_dim = match keys.optional_size("attention.key_length")? {
            Some(length) => length,
            None if hidden % heads == 0 => hidden / heads,
            None => {
                let expected = format!("a divisor of embedding_length {hidden}");
                return Err(keys.refuse("attention.head_count", expected, heads));
            }
        };
        if let Some(length) = keys.optional_size("attention.value_length")?
            && length != head_dim
        {
            let expected = format!("{head_dim}, the length of a key");
            return Err(keys.refuse("attention.value_length", expected, length));
        }
        let rope_dimensions = keys
            .optional_size("rope.dimension_count")?
            .unwrap_or(head_dim);
        if rope_dimensions > head_dim || rope_dimensions % 2 != 0 {
            let expected = format!("an even number up to {head_dim}, the length of a head");
            return Err(keys.refuse("rope.dimension_count", expected, rope_dimensions));
        }
        let trained = keys.size("context_length")?;
        // Within its window, a sliding-window model works like any other; beyond it, it does not.
        let context_length = match keys.optional_u32("attention.sliding_window")? {
            Some(window) if window > 0 => trained.min(window as usize),
            _ => trained,
        };
        Ok(ModelConfig {
            architecture,
            layers: keys.size("block_count")?,
            hidden,
            heads,
            kv_heads,
            head_dim,
            feed_forward: keys.size("feed_forward_length")?,
            vocabulary: vocabulary(file, gguf, architecture)?,
            context_length,
            norm_epsilon: keys.positive("attention.layer_norm_rms_epsilon", None)?,
            rope_dimensions,
            rope_base: keys.positive("rope.freq_base", Some(10_000.0))?,
            rope_linear_factor: rope_linear_factor(&keys)?,
        })
    }

    /// What attention needs to know.
    pub(crate) fn attention_shape(&self) -> AttentionShape {
        AttentionShape {
            heads: self.heads,
            kv: KvShape {
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
            },
            scale: 1.0 / (self.head_dim as f32).sqrt(),
        }
    }

    /// The rotation of queries and keys; `factors` divide its frequencies, one for each pair.
    pub(crate) fn rope(&self, factors: Option<&[f32]>) -> Rope {
        Rope::new(
            self.architecture.rope_pairing,
            self.rope_dimensions,
            self.rope_base,
            1.0 / self.rope_linear_factor,
            factors,
        )
    }

    /// The length of `side`.
    pub(crate) fn side(&self, side: Side) -> usize {
        match side {
            Side::Hidden => self.hidden,
            Side::Queries => self.heads * self.head_dim,
            Side::KeysValues => self.kv_heads * self.head_dim,
            Side::FeedForward => self.feed_forward,
            Side::Vocabulary => self.vocabulary,
        }
    }
}

fn vocabulary(
    file: &str,
    gguf: &Gguf,
    architecture: &'static Architecture,
) -> Result<usize, EngineError> {
    let name = architecture::EMBEDDING.name;
    let tensor = gguf
        .tensor(name)
        .ok_or_else(|| EngineError::MissingTensor {
            file: file.to_owned(),
            tensor: name.to_owned(),
            architecture: architecture.name,
        })?;
    match tensor.shape[..] {
        [_, tokens] if tokens <= u64::from(MAX_SIZE) => Ok(tokens as usize),
        _ => Err(EngineError::TensorShape {
            file: file.to_owned(),
            tensor: name.to_owned(),
            expected: vec![tensor.shape[0], u64::from(MAX_SIZE)],
            found: tensor.shape.clone(),
        }),
    }
}

fn rope_linear_factor(keys: &Keys<'_>) -> Result<f32, EngineError> {
    let kind = keys
        .metadata
        .str(&keys.full("rope.scaling.type"))
        .map_err(|source| EngineError::Metadata { source })?;
    match kind {
        Some("none") => Ok(1.0),
        None | Some("linear") => {
            let older = keys.positive("rope.scale_linear", Some(1.0))?;
            keys.positive("rope.scaling.factor", Some(older))
        }
        Some(other) => Err(keys.refuse(
            "rope.scaling.type",
            "\"none\" or \"linear\", the kinds that this engine computes".to_owned(),
            format!("{other:?}"),
        )),
    }
}

/// The keys of one architecture.
struct Keys<'a> {
    file: &'a str,
    metadata: &'a Metadata,
    prefix: &'static str,
}

impl Keys<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn size(&self, key: &str) -> Result<usize, EngineError> {
        let value = self
            .metadata
            .require_u32(&self.full(key))
            .map_err(|source| EngineError::Metadata { source })?;
        self.checked_size(key, value)
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>, EngineError> {
        self.optional_u32(key)?
            .map(|value| self.checked_size(key, value))
            .transpose()
    }

    fn checked_size(&self, key: &str, value: u32) -> Result<usize, EngineError> {
        if !(1..=MAX_SIZE).contains(&value) {
            return Err(self.refuse(key, format!("a number from 1 to {MAX_SIZE}"), value));
        }
        Ok(value as usize)
    }

    fn optional_u32(&self, key: &str) -> Result<Option<u32>, EngineError> {
        self.metadata
            .u32(&self.full(key))
            .map_err(|source| EngineError::Metadata { source })
    }

    fn positive(&self, key: &str, default: Option<f32>) -> Result<f32, EngineError> {
        let full = self.full(key);
        let value = match default {
            Some(default) => self
                .metadata
                .f32(&full)
                .map(|value| value.unwrap_or(default)),
            None => self.metadata.require_f32(&full),
        }
        .map_err(|source| EngineError::Metadata { source })?;
        if !(value > 0.0 && value.is_finite()) {
            return Err(self.refuse(key, "a positive number".to_owned(), value));
        }
        Ok(value)
    }

    fn refuse(&self, key: &str, expected: String, found: impl ToString) -> EngineError {
        EngineError::Config {
            file: self.file.to_owned(),
            key: self.full(key),
            expected,
            found: found.to_string(),
        }
    }
}
