//! A model file, opened: mapped, its header read and described by [`ModelSpec`]. Later code can rely on shapes and formats.
//!
//! Refuses: what `prima-model` refuses, and formats that the CPU has no kernels for.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use prima_gguf::{Gguf, part_names, part_paths};
use prima_model::{ModelSpec, TensorRows};

use crate::error::EngineError;
use crate::kernels;
use crate::mapped_weights::{MappedFile, MappedModel, MappedTensor};

/// An open model. Clones share everything.
#[derive(Clone)]
pub struct Model {
    inner: Arc<Inner>,
    context_length: usize,
}

struct Inner {
    path: PathBuf,
    map: MappedModel,
    gguf: Gguf,
    spec: ModelSpec,
}

impl Model {
    /// Maps and checks the model file at `path`, and those that follow it if it is the first of several. Reads headers only: tensors may
    /// lie in holes of sparse files.
    ///
    /// # Errors
    /// A file that cannot be mapped; a malformed header; a model that prima does not run; a tensor in a format without kernels.
    pub fn open(path: &Path) -> Result<Model, EngineError> {
        let header = |source| EngineError::Header { source };
        let file = path.display().to_string();
        let (first, map) = mapped(path)?;
        let names = part_names(&file, &first).map_err(header)?;
        let (mut headers, mut maps) = (vec![first], vec![map]);
        for part in part_paths(path).iter().skip(1) {
            let (header, map) = mapped(part)?;
            headers.push(header);
            maps.push(map);
        }
        let gguf = Gguf::join(&names, headers).map_err(header)?;
        let map = MappedModel::new(&gguf, maps);
        let spec = ModelSpec::read(&file, &gguf)?;
        let model = Model {
            context_length: spec.context_length,
            inner: Arc::new(Inner {
                path: path.to_owned(),
                map,
                gguf,
                spec,
            }),
        };
        model.check_formats()?;
        Ok(model)
    }

    /// The same model with memory for so many positions, by which some models choose their rotation. At first it is what they were made
    /// for.
    pub fn with_context_length(self, context_length: usize) -> Model {
        Model {
            context_length,
            ..self
        }
    }

    /// Where the (first) file was opened.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.inner.spec
    }

    /// The header, of all files together.
    pub fn gguf(&self) -> &Gguf {
        &self.inner.gguf
    }

    pub(crate) fn map(&self) -> &MappedModel {
        &self.inner.map
    }

    /// A matrix, where it lies in the map.
    pub(crate) fn matrix(&self, rows: &TensorRows) -> Result<MappedTensor, EngineError> {
        let tensor = self.inner.map.tensor(rows);
        tensor.map_err(|source| EngineError::Tensor {
            file: self.inner.path.display().to_string(),
            tensor: rows.tensor.clone(),
            source,
        })
    }

    /// A small vector, or several of them one after the other, copied out of the map as numbers.
    pub(crate) fn vector(&self, rows: &TensorRows) -> Result<Vec<f32>, EngineError> {
        let tensor = self.matrix(rows)?;
        let mut numbers = vec![0.0; rows.rows * rows.cols];
        for (row, numbers) in numbers.chunks_exact_mut(rows.cols).enumerate() {
            kernels::dequantize_row(tensor.matrix(), row, numbers);
        }
        Ok(numbers)
    }

    /// The weights of a norm. All zeros mean a hole in a sparse file; the model would silently give nonsense.
    pub(crate) fn norm(&self, rows: &TensorRows) -> Result<Vec<f32>, EngineError> {
        let weights = self.vector(rows)?;
        match weights.iter().all(|weight| *weight == 0.0) {
            true => Err(self.unexpected_value(rows, "some number other than 0", 0.0)),
            false => Ok(weights),
        }
    }

    /// The rotation of queries and keys.
    pub(crate) fn rope(&self, rope: &prima_model::Rope) -> Result<kernels::Rope, EngineError> {
        let divisors = rope.divisors(self.context_length);
        let divisors = divisors.map(|rows| self.divisors(rows)).transpose()?;
        let pairing = match rope.pairing {
            prima_model::RopePairing::Interleaved => kernels::RopePairing::Interleaved,
            prima_model::RopePairing::Halves => kernels::RopePairing::Halves,
        };
        let frequencies = rope.frequencies(divisors.as_deref());
        Ok(kernels::Rope::new(pairing, frequencies, rope.magnitude))
    }

    fn divisors(&self, rows: &TensorRows) -> Result<Vec<f32>, EngineError> {
        let divisors = self.vector(rows)?;
        let bad = |divisor: &&f32| **divisor <= 0.0 || !divisor.is_finite();
        match divisors.iter().find(bad) {
            None => Ok(divisors),
            Some(&found) => Err(self.unexpected_value(rows, "positive finite numbers", found)),
        }
    }

    fn check_formats(&self) -> Result<(), EngineError> {
        let spec = self.spec();
        let layers = spec.layers.iter();
        let layers = layers.flat_map(|layer| layer.matrices().chain(layer.expert_matrices()));
        for matrix in [&spec.embedding, &spec.output_head]
            .into_iter()
            .chain(&spec.classifier)
            .chain(layers)
        {
            self.matrix(matrix)?;
        }
        Ok(())
    }

    fn unexpected_value(
        &self,
        rows: &TensorRows,
        expected: &'static str,
        found: f32,
    ) -> EngineError {
        EngineError::TensorValue {
            file: self.inner.path.display().to_string(),
            tensor: rows.tensor.clone(),
            expected,
            found,
        }
    }
}

fn mapped(path: &Path) -> Result<(Gguf, MappedFile), EngineError> {
    let map = MappedFile::open(path)?;
    let bytes = map.bytes();
    let header = Gguf::parse(&path.display().to_string(), bytes, bytes.len() as u64);
    Ok((
        header.map_err(|source| EngineError::Header { source })?,
        map,
    ))
}

#[cfg(test)]
mod tests {
    use prima_gguf::GgmlType;
    use prima_model::MATRIX_FORMATS;

    /// Headers are read where there are no kernels.
    #[test]
    fn headers_may_have_the_formats_that_there_are_kernels_for() {
        for format in GgmlType::ALL {
            let computed = crate::kernels::supported(*format);
            assert_eq!(MATRIX_FORMATS.contains(format), computed, "{format}");
        }
    }
}
