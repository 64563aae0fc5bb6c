//! What `prima run` must know about the model: its name, layers and bytes. Reads the GGUF header and nothing else;
//! whether the model can be run at all is the agents' to say.

use std::io;
use std::path::{Path, PathBuf};

use prima_crds::v1alpha1::ring_plan::RingPlanSpec;
use prima_gguf::{Gguf, GgufError};

pub struct ModelFile {
    /// Absolute, since the agents' working directories are their own.
    pub path: PathBuf,
    /// The name that clients ask for: the file's, without the extension.
    pub name: String,
    pub size_bytes: u64,
    /// Transformer layers.
    pub layers: usize,
    /// Positions that the model was trained for.
    pub trained_context: u32,
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
}

/// No known model comes near; a plan allows no more.
const MAX_LAYERS: u32 = 4096;
const MAX_CONTEXT: u32 = 1 << 24;

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
        let architecture = gguf.metadata.require_str("general.architecture")?;
        let bounded = |field: &str, most: u32| {
            let key = format!("{architecture}.{field}");
            let found = gguf.metadata.require_u32(&key)?;
            if (1..=most).contains(&found) {
                return Ok(found);
            }
            Err(ModelFileError::OutOfRange {
                path: path.clone(),
                key,
                most,
                found,
            })
        };
        let layers = bounded("block_count", MAX_LAYERS)? as usize;
        let trained_context = bounded("context_length", MAX_CONTEXT)?;

        let mut layer_bytes = vec![0; layers];
        let mut other_bytes = 0;
        for tensor in &gguf.tensors {
            let layer = layer_of(&tensor.name).and_then(|layer| layer_bytes.get_mut(layer));
            *layer.unwrap_or(&mut other_bytes) += tensor.byte_len;
        }
        Ok(Self {
            name,
            size_bytes: gguf.file_len,
            layers,
            trained_context,
            layer_bytes,
            other_bytes,
            path,
        })
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
