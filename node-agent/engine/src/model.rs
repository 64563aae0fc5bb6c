//! A model file, opened: mapped, its header parsed, its configuration read, and every tensor checked against that configuration. Later
//! code can rely on shapes and formats.
//!
//! Refuses: tensors that the architecture does not know (leaving out a bias gives fluent nonsense, not an error).

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use prima_gguf::{GgmlType, Gguf, TensorInfo};

use crate::architecture::{self, TensorSpec};
use crate::config::ModelConfig;
use crate::device::LayerDevices;
use crate::embedding::Embedding;
use crate::error::EngineError;
use crate::kernels;
use crate::kv_cache::KvCache;
use crate::layer_window::LayerWindow;
use crate::mapped_weights::{MappedFile, MappedTensor};
use crate::output_head::OutputHead;
use crate::residency::Residency;

/// An open model. Clones share everything.
#[derive(Clone)]
pub struct Model {
    inner: Arc<Inner>,
}

struct Inner {
    path: PathBuf,
    /// The path as errors show it.
    file: String,
    map: MappedFile,
    gguf: Gguf,
    config: ModelConfig,
}

impl Model {
    /// Maps and checks the model file at `path`. Reads the header only: tensors may lie in holes of a sparse file.
    ///
    /// # Errors
    /// A file that cannot be mapped; a malformed header; an architecture or configuration that this engine does not run; a tensor
    /// that is missing or unknown, has another shape than the configuration says, or a format without kernels.
    pub fn open(path: &Path) -> Result<Model, EngineError> {
        let map = MappedFile::open(path)?;
        let file = path.display().to_string();
        let gguf = Gguf::parse(&file, map.bytes(), map.bytes().len() as u64)
            .map_err(|source| EngineError::Header { source })?;
        let config = ModelConfig::from_gguf(&file, &gguf)?;
        let model = Model {
            inner: Arc::new(Inner {
                path: path.to_owned(),
                file,
                map,
                gguf,
                config,
            }),
        };
        model.check_tensors()?;
        Ok(model)
    }

    /// Where the file was opened.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    pub fn config(&self) -> &ModelConfig {
        &self.inner.config
    }

    /// The file's header.
    pub fn gguf(&self) -> &Gguf {
        &self.inner.gguf
    }

    /// The token embedding.
    ///
    /// # Errors
    /// None that [`open`](Self::open) does not report first.
    pub fn embedding(&self) -> Result<Embedding, EngineError> {
        Ok(Embedding::new(self.tensor(&architecture::EMBEDDING, None)?))
    }

    /// The output norm and the output head, which is the embedding again in models without an `output.weight`.
    ///
    /// # Errors
    /// [`EngineError::TensorValue`] when the norm is not in the bytes of a sparse file.
    pub fn output_head(&self, residency: &Residency) -> Result<OutputHead, EngineError> {
        Ok(OutputHead::new(
            self.norm(&architecture::OUTPUT_NORM, None)?,
            self.output_tensor()?,
            self.config().norm_epsilon,
            residency.clone(),
        ))
    }

    /// The layers `layers`, on the devices that `devices` says, with weights where `residency` has them.
    ///
    /// # Errors
    /// [`EngineError::Window`] for a range that is empty or not of this model, [`EngineError::TensorValue`] when a layer is not in the
    /// bytes of a sparse file, [`EngineError::Accelerator`] when the accelerator does not take its layers.
    pub fn layer_window(
        &self,
        layers: Range<usize>,
        devices: &LayerDevices,
        residency: &Residency,
    ) -> Result<LayerWindow, EngineError> {
        if layers.is_empty() || layers.end > self.config().layers {
            return Err(EngineError::Window {
                window: layers,
                layers: self.config().layers,
            });
        }
        LayerWindow::new(self, layers, devices, residency)
    }

    /// An empty KV cache of one sequence for the layers of `layers`, of at most `context_length` positions. Allocates as it grows.
    pub fn kv_cache(&self, layers: &[Range<usize>], context_length: usize) -> KvCache {
        KvCache::new(self.config(), layers, context_length)
    }

    /// The matrix of the output head.
    pub(crate) fn output_tensor(&self) -> Result<MappedTensor, EngineError> {
        self.tensor(self.output_spec(), None)
    }

    /// Where the embedding is, unless it also serves as the output head.
    pub(crate) fn separate_embedding(&self) -> Option<Range<u64>> {
        self.inner.gguf.tensor(architecture::OUTPUT.name)?;
        let embedding = self.inner.gguf.tensor(architecture::EMBEDDING.name)?;
        Some(embedding.offset..embedding.offset + embedding.byte_len)
    }

    pub(crate) fn map(&self) -> &MappedFile {
        &self.inner.map
    }

    /// RoPE's divisors of frequencies, one for each pair, where the file has them.
    pub(crate) fn rope_factors(&self) -> Result<Option<Vec<f32>>, EngineError> {
        let Some(info) = self.inner.gguf.tensor(architecture::ROPE_FACTORS) else {
            return Ok(None);
        };
        let factors = self.numbers(info)?;
        let bad = |factor: &&f32| **factor <= 0.0 || !factor.is_finite();
        match factors.iter().find(bad) {
            None => Ok(Some(factors)),
            Some(&found) => Err(self.unexpected_value(info, "positive finite numbers", found)),
        }
    }

    /// The weights of a norm. All zeros mean a hole in a sparse file; the model would silently give nonsense.
    pub(crate) fn norm(
        &self,
        spec: &TensorSpec,
        layer: Option<usize>,
    ) -> Result<Vec<f32>, EngineError> {
        let weights = self.vector(spec, layer)?;
        if weights.iter().all(|weight| *weight == 0.0) {
            let info = self.find(spec, layer)?;
            return Err(self.unexpected_value(info, "some number other than 0", 0.0));
        }
        Ok(weights)
    }

    /// The tensor of `spec`, in layer `layer` if it belongs to a layer.
    pub(crate) fn tensor(
        &self,
        spec: &TensorSpec,
        layer: Option<usize>,
    ) -> Result<MappedTensor, EngineError> {
        let info = self.find(spec, layer)?;
        self.map_tensor(info)
    }

    /// As [`tensor`](Self::tensor), for the few small vectors: copied out of the map as numbers.
    pub(crate) fn vector(
        &self,
        spec: &TensorSpec,
        layer: Option<usize>,
    ) -> Result<Vec<f32>, EngineError> {
        let info = self.find(spec, layer)?;
        self.numbers(info)
    }

    /// The header's entry for the tensor of `spec`, checked.
    pub(crate) fn find(
        &self,
        spec: &TensorSpec,
        layer: Option<usize>,
    ) -> Result<&TensorInfo, EngineError> {
        let inner = &*self.inner;
        let tensor = match layer {
            Some(layer) => format!("blk.{layer}.{}", spec.name),
            None => spec.name.to_owned(),
        };
        let Some(info) = inner.gguf.tensor(&tensor) else {
            return Err(EngineError::MissingTensor {
                file: inner.file.clone(),
                tensor,
                architecture: inner.config.architecture.name,
            });
        };
        let expected: Vec<u64> = spec
            .shape
            .iter()
            .map(|&side| inner.config.side(side) as u64)
            .collect();
        self.check_shape(info, expected)?;
        Ok(info)
    }

    fn numbers(&self, info: &TensorInfo) -> Result<Vec<f32>, EngineError> {
        let tensor = self.map_tensor(info)?;
        let mut numbers = vec![0.0; tensor.matrix().cols()];
        kernels::dequantize_row(tensor.matrix(), 0, &mut numbers);
        Ok(numbers)
    }

    fn unexpected_value(
        &self,
        info: &TensorInfo,
        expected: &'static str,
        found: f32,
    ) -> EngineError {
        EngineError::TensorValue {
            file: self.inner.file.clone(),
            tensor: info.name.clone(),
            expected,
            found,
        }
    }

    fn map_tensor(&self, info: &TensorInfo) -> Result<MappedTensor, EngineError> {
        self.inner
            .map
            .tensor(info)
            .map_err(|source| EngineError::Tensor {
                file: self.inner.file.clone(),
                tensor: info.name.clone(),
                source,
            })
    }

    fn output_spec(&self) -> &'static TensorSpec {
        match self.inner.gguf.tensor(architecture::OUTPUT.name) {
            Some(_) => &architecture::OUTPUT,
            None => &architecture::EMBEDDING,
        }
    }

    /// Checks every tensor that the architecture asks for, then looks for tensors that it does not ask for.
    fn check_tensors(&self) -> Result<(), EngineError> {
        let mut known = Vec::new();
        let mut check = |spec: &TensorSpec, layer| {
            let info = self.find(spec, layer)?;
            self.check_format(info, spec.shape.len() == 1)?;
            known.push(info.name.as_str());
            Ok::<(), EngineError>(())
        };
        check(&architecture::EMBEDDING, None)?;
        check(&architecture::OUTPUT_NORM, None)?;
        check(self.output_spec(), None)?;
        for layer in 0..self.config().layers {
            for spec in self.config().architecture.layer_tensors() {
                check(spec, Some(layer))?;
            }
        }
        if let Some(info) = self.inner.gguf.tensor(architecture::ROPE_FACTORS) {
            self.check_shape(info, vec![self.config().rope_dimensions as u64 / 2])?;
            self.check_format(info, true)?;
            known.push(architecture::ROPE_FACTORS);
        }
        known.sort_unstable();
        match self
            .inner
            .gguf
            .tensors
            .iter()
            .find(|info| known.binary_search(&info.name.as_str()).is_err())
        {
            None => Ok(()),
            Some(info) => Err(EngineError::UnknownTensor {
                file: self.inner.file.clone(),
                tensor: info.name.clone(),
                architecture: self.config().architecture.name,
            }),
        }
    }

    fn check_shape(&self, info: &TensorInfo, expected: Vec<u64>) -> Result<(), EngineError> {
        if info.shape == expected {
            return Ok(());
        }
        Err(EngineError::TensorShape {
            file: self.inner.file.clone(),
            tensor: info.name.clone(),
            expected,
            found: info.shape.clone(),
        })
    }

    fn check_format(&self, info: &TensorInfo, vector: bool) -> Result<(), EngineError> {
        let float = matches!(
            info.ggml_type,
            GgmlType::F32 | GgmlType::F16 | GgmlType::BF16
        );
        if vector && !float {
            return Err(EngineError::TensorType {
                file: self.inner.file.clone(),
                tensor: info.name.clone(),
                expected: "F32, F16 or BF16".to_owned(),
                found: info.ggml_type,
            });
        }
        self.map_tensor(info).map(drop)
    }
}
