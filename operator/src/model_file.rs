//! What planning and `prima run` must know about a model file: its name, layers, formats and bytes. Reads the GGUF header
//! and nothing else; whether the model can be run at all is the agents' to say.

use std::io;
use std::path::{Path, PathBuf};

use prima_crds::v1alpha1::model_profile::{FormatWeights, ModelProfile, ModelProfileSpec};
use prima_crds::v1alpha1::ring_plan::RingPlanSpec;
use prima_gguf::{Gguf, GgufError, TensorInfo};

pub struct ModelFile {
    /// Absolute, since the agents' working directories are their own.
    pub path: PathBuf,
    /// Its name is the one that clients ask for: the file's, without the extension.
    pub profile: ModelProfile,
    layer_bytes: Vec<u64>,
    other_bytes: u64,
}

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelFileError {
    #[error("no model file at {}", path.display())]
    Path {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{}: expected a path in UTF-8, which the ring's plan can hold", path.display())]
    NotUtf8 { path: PathBuf },
    #[error(transparent)]
    Header(#[from] GgufError),
    #[error("{}: metadata key {key}: expected 1..={most}, found {found}", path.display())]
    OutOfRange {
        path: PathBuf,
        key: String,
        most: u32,
        found: u32,
    },
    #[error("{}: expected a tensor {tensor}, found none", path.display())]
    NoTensor { path: PathBuf, tensor: &'static str },
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

impl ModelFile {
    pub fn read(path: &Path) -> Result<Self, ModelFileError> {
        let path = path.canonicalize().map_err(|source| ModelFileError::Path {
            path: path.to_owned(),
            source,
        })?;
        let (Some(_), Some(name)) = (
            path.to_str(),
            path.file_stem().and_then(|name| name.to_str()),
        ) else {
            return Err(ModelFileError::NotUtf8 { path });
        };
        let name = name.to_owned();
        let gguf = Gguf::open(&path)?;
        let spec = spec(&path, &gguf)?;
        let mut layer_bytes = vec![0; spec.layers as usize];
        let mut other_bytes = 0;
        for tensor in &gguf.tensors {
            let layer = layer_of(&tensor.name).and_then(|layer| layer_bytes.get_mut(layer));
            *layer.unwrap_or(&mut other_bytes) += tensor.byte_len;
        }
        Ok(Self {
            profile: ModelProfile::new(&name, spec),
            layer_bytes,
            other_bytes,
            path,
        })
    }

    pub fn name(&self) -> &str {
        &self.profile.metadata.name
    }

    /// Bytes of weights that each member of `plan` reads; rank 0 also has the embedding and the output head.
    pub fn bytes_per_member(&self, plan: &RingPlanSpec) -> Vec<u64> {
        plan.members
            .iter()
            .enumerate()
            .map(|(rank, member)| {
                let layers: u64 = member
                    .windows
                    .iter()
                    .flat_map(|window| &self.layer_bytes[window.layers()])
                    .sum();
                layers + if rank == 0 { self.other_bytes } else { 0 }
            })
            .collect()
    }
}

fn spec(path: &Path, gguf: &Gguf) -> Result<ModelProfileSpec, ModelFileError> {
    let metadata = &gguf.metadata;
    let architecture = metadata.require_str("general.architecture")?;
    let checked = |key: String, found: u32, most: u32| match found {
        found if (1..=most).contains(&found) => Ok(found),
        found => Err(ModelFileError::OutOfRange {
            path: path.to_owned(),
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

    let tensor = |name: &'static str| {
        gguf.tensor(name).ok_or_else(|| ModelFileError::NoTensor {
            path: path.to_owned(),
            tensor: name,
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
        return Err(ModelFileError::NoTensor {
            path: path.to_owned(),
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

/// Weights and bytes of matrices, by format; what is not a matrix is a thousandth of a layer and not multiplied.
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
fn layer_of(tensor: &str) -> Option<usize> {
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
