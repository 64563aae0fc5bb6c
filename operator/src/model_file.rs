//! What planning and `prima run` must know about a model file: its name, layers, formats and bytes. Reads the GGUF header and nothing else.

use std::io;
use std::path::{Path, PathBuf};

use prima_crds::v1alpha1::model_profile::ModelProfile;
use prima_crds::v1alpha1::ring_plan::{PlannedModel, RingPlanSpec};
use prima_gguf::{Gguf, GgufError, first_part};
use prima_model::layer_of;
use prima_weights::{RefusedModel, model_profile};

pub struct ModelFile {
    /// Absolute, since the agents' working directories are their own.
    pub path: PathBuf,
    /// Has the name that clients ask for: the file's, without the extension and the number of a part.
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
    #[error(transparent)]
    Refused(#[from] RefusedModel),
}

impl ModelFile {
    pub fn read(path: &Path) -> Result<Self, ModelFileError> {
        // Links stay as they are: the other parts of a model are beside the link, not beside what it points to.
        let absolute = std::path::absolute(path).and_then(|path| path.metadata().map(|_| path));
        let path = absolute.map_err(|source| ModelFileError::Path {
            path: path.to_owned(),
            source,
        })?;
        let (Some(_), Some(name)) = (
            path.to_str(),
            path.file_name().and_then(|name| name.to_str()),
        ) else {
            return Err(ModelFileError::NotUtf8 { path });
        };
        let name = model_name(name);
        let gguf = Gguf::open(&path)?;
        let spec = model_profile(&path.display().to_string(), &gguf)?;
        let mut layer_bytes = vec![0; spec.layers as usize];
        let mut other_bytes = 0;
        for tensor in &gguf.tensors {
            let layer = layer_of(&tensor.name).and_then(|layer| layer_bytes.get_mut(layer));
            *layer.unwrap_or(&mut other_bytes) += tensor.byte_len;
        }
        Ok(Self {
            profile: ModelProfile::new(name, spec),
            layer_bytes,
            other_bytes,
            path,
        })
    }

    /// The same file, under the name of another.
    pub fn named(mut self, file_name: &str) -> Self {
        model_name(file_name).clone_into(&mut self.profile.metadata.name);
        self
    }

    pub fn name(&self) -> &str {
        &self.profile.metadata.name
    }

    /// As a plan for this machine names it.
    pub fn planned(&self) -> PlannedModel {
        let (file, spec) = (self.path.display().to_string(), &self.profile.spec);
        PlannedModel::new(self.name(), file, spec.size_bytes, spec.layers)
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

/// What clients call the model in the file of this name.
fn model_name(file_name: &str) -> &str {
    match first_part(file_name) {
        Some((name, _)) => name,
        None => file_name.strip_suffix(".gguf").unwrap_or(file_name),
    }
}
