//! What planning must know of a model, from its header: layers, formats and bytes. The agents say whether the model can
//! be run at all.

use prima_crds::v1alpha1::model_profile::{FormatWeights, ModelProfileSpec};
use prima_gguf::{Gguf, GgufError, TensorInfo};

/// Why a model cannot be planned with. `name` is where its header came from.
#[derive(Debug, thiserror::Error)]
pub enum ModelProfileError {
    #[error(transparent)]
    Header(#[from] GgufError),
    #[error("{name}: metadata key {key}: expected 1..={most}, found {found}")]
    OutOfRange {
        name: String,
        key: String,
        most: u32,
        found: u32,
    },
    #[error("{name}: expected a tensor {tensor}, found none")]
    NoTensor { name: String, tensor: &'static str },
}

/// No known model comes near; a plan allows no more.
const MAX_LAYERS: u32 = 4096;
const MAX_CONTEXT: u32 = 1 << 24;
const MAX_SIZE: u32 = 1 << 20;
const MAX_VOCABULARY: u32 = 1 << 24;

const EMBEDDING: &str = "token_embd.weight";
const OUTPUT: &str = "output.weight";
/// Keys and values are cached as F16.
const KV_BYTES: i64 = 2;

/// The profile of the model with this header. `name` (a path, an address) is used in errors.
///
/// # Errors
/// [`ModelProfileError`] for a header that lacks what every model has, or has it out of bounds.
pub fn model_profile(name: &str, gguf: &Gguf) -> Result<ModelProfileSpec, ModelProfileError> {
    let metadata = &gguf.metadata;
    let architecture = metadata.require_str("general.architecture")?;
    let checked = |key: String, found: u32, most: u32| match found {
        found if (1..=most).contains(&found) => Ok(found),
        found => Err(ModelProfileError::OutOfRange {
            name: name.to_owned(),
            key,
            most,
            found,
        }),
    };
    let required = |field: &str, most: u32| {
        let key = format!("{architecture}.{field}");
        let found = metadata.require_u32(&key)?;
        checked(key, found, most)
    };
    let optional = |field: &str, default: u32| {
        let key = format!("{architecture}.{field}");
        let found = metadata.u32(&key)?.unwrap_or(default);
        checked(key, found, MAX_SIZE)
    };
    let layers = required("block_count", MAX_LAYERS)?;
    let hidden = required("embedding_length", MAX_SIZE)?;
    let heads = required("attention.head_count", MAX_SIZE)?;
    let kv_heads = optional("attention.head_count_kv", heads)?;
    let head = (hidden / heads).max(1);
    let key_length = optional("attention.key_length", head)?;
    let value_length = optional("attention.value_length", head)?;

    let tensor = |tensor: &'static str| {
        gguf.tensor(tensor)
            .ok_or_else(|| ModelProfileError::NoTensor {
                name: name.to_owned(),
                tensor,
            })
    };
    let embedding = tensor(EMBEDDING)?;
    // Where there is no output head, the embedding is it.
    let output = gguf.tensor(OUTPUT).unwrap_or(embedding);
    let rows = embedding.shape.last().copied().unwrap_or(0);
    let rows = u32::try_from(rows).unwrap_or(u32::MAX);
    let in_layers = gguf
        .tensors
        .iter()
        .filter(|tensor| layer_of(&tensor.name).is_some_and(|layer| layer < layers as usize));
    let layer_weights = by_format(in_layers);
    if layer_weights.is_empty() {
        return Err(ModelProfileError::NoTensor {
            name: name.to_owned(),
            tensor: "blk.0.*",
        });
    }
    let size = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    Ok(ModelProfileSpec {
        size_bytes: size(gguf.file_len),
        layers: layers as i32,
        hidden_size: hidden as i32,
        vocabulary_size: checked("the rows of token_embd.weight".into(), rows, MAX_VOCABULARY)?
            as i32,
        trained_context_length: required("context_length", MAX_CONTEXT)? as i32,
        kv_bytes_per_position_and_layer: i64::from(kv_heads)
            * (i64::from(key_length) + i64::from(value_length))
            * KV_BYTES,
        layer_weights,
        output_weights: by_format([output]),
        embedding_bytes: size(embedding.byte_len),
    })
}

/// Weights and bytes of matrices, by format. Other tensors are left out: they are a thousandth of a layer and not
/// multiplied.
fn by_format<'a>(tensors: impl IntoIterator<Item = &'a TensorInfo>) -> Vec<FormatWeights> {
    let mut sums: Vec<FormatWeights> = Vec::new();
    for tensor in tensors.into_iter().filter(|tensor| tensor.shape.len() > 1) {
        let format = tensor.ggml_type.name();
        let (weights, bytes) = (tensor.weights() as i64, tensor.byte_len as i64);
        match sums.iter_mut().find(|sum| sum.format == format) {
            Some(sum) => {
                sum.weights += weights;
                sum.bytes += bytes;
            }
            None => sums.push(FormatWeights {
                format: format.to_owned(),
                weights,
                bytes,
            }),
        }
    }
    sums
}

/// The layer that a tensor belongs to: 7 for `blk.7.attn_q.weight`.
pub fn layer_of(tensor: &str) -> Option<usize> {
    tensor.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_a_layers_tensor_from_the_others() {
        assert_eq!(layer_of("blk.7.attn_q.weight"), Some(7));
        assert_eq!(layer_of("blk.12.ffn_norm.weight"), Some(12));
        assert_eq!(layer_of("token_embd.weight"), None);
        assert_eq!(layer_of("blk.x.attn_q.weight"), None);
    }
}
