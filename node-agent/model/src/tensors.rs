//! The tensors of a file by their names and shapes. A tensor that nobody asks for is refused: leaving out a bias gives fluent nonsense, not
//! an error.

use std::collections::HashSet;
use std::ops::Range;

use prima_gguf::{GgmlType, Gguf, TensorInfo};

use crate::error::ModelError;
use crate::tensor_rows::TensorRows;

/// The tensors that were not asked for yet.
pub struct Tensors<'a> {
    file: &'a str,
    gguf: &'a Gguf,
    architecture: &'static str,
    /// Layers of which nothing is asked for: they predict further tokens, which is a way to be faster.
    predicting: Range<usize>,
    taken: HashSet<&'a str>,
}

impl<'a> Tensors<'a> {
    pub fn new(
        file: &'a str,
        gguf: &'a Gguf,
        architecture: &'static str,
        predicting: Range<usize>,
    ) -> Self {
        Self {
            file,
            gguf,
            architecture,
            predicting,
            taken: HashSet::new(),
        }
    }

    /// A matrix, `cols` inputs to `rows` outputs.
    pub fn matrix(
        &mut self,
        name: &str,
        cols: usize,
        rows: usize,
    ) -> Result<TensorRows, ModelError> {
        let info = self.take(name)?;
        self.check_shape(info, &[cols, rows])?;
        self.check_format(info)?;
        Ok(rows_of(info, cols, rows))
    }

    /// As [`matrix`](Self::matrix), if there is one.
    pub fn optional_matrix(
        &mut self,
        name: &str,
        cols: usize,
        rows: usize,
    ) -> Result<Option<TensorRows>, ModelError> {
        self.if_there(name, |tensors| tensors.matrix(name, cols, rows))
    }

    /// A vector of floats.
    pub fn vector(&mut self, name: &str, length: usize) -> Result<TensorRows, ModelError> {
        let info = self.take(name)?;
        self.check_shape(info, &[length])?;
        self.check_floats(info)?;
        Ok(rows_of(info, length, 1))
    }

    /// A matrix of floats, `cols` inputs to `rows` outputs.
    pub fn float_matrix(
        &mut self,
        name: &str,
        cols: usize,
        rows: usize,
    ) -> Result<TensorRows, ModelError> {
        let matrix = self.matrix(name, cols, rows)?;
        self.check_floats(self.find(name)?)?;
        Ok(matrix)
    }

    /// Matrices of `count` experts or heads, `cols` inputs to `rows` outputs each: their rows, one expert after the other.
    pub fn stack(
        &mut self,
        name: &str,
        cols: usize,
        rows: usize,
        count: usize,
    ) -> Result<TensorRows, ModelError> {
        let info = self.take(name)?;
        self.check_shape(info, &[cols, rows, count])?;
        self.check_format(info)?;
        Ok(rows_of(info, cols, rows * count))
    }

    /// As [`vector`](Self::vector), if there is one.
    pub fn optional_vector(
        &mut self,
        name: &str,
        length: usize,
    ) -> Result<Option<TensorRows>, ModelError> {
        self.if_there(name, |tensors| tensors.vector(name, length))
    }

    /// The rows of a matrix of `cols` columns, which the file decides, up to `most`.
    pub fn rows(&self, name: &str, cols: usize, most: usize) -> Result<usize, ModelError> {
        let info = self.find(name)?;
        match info.shape[..] {
            [found, rows] if found == cols as u64 && rows <= most as u64 => Ok(rows as usize),
            _ => Err(self.shape_error(info, vec![cols as u64, most as u64])),
        }
    }

    pub fn has(&self, name: &str) -> bool {
        self.gguf.tensor(name).is_some()
    }

    /// A tensor that is not computed with must not be there.
    pub fn refuse(&self, name: &str) -> Result<(), ModelError> {
        match self.gguf.tensor(name) {
            None => Ok(()),
            Some(info) => Err(self.unknown(info)),
        }
    }

    /// That every tensor was asked for.
    pub fn finish(self) -> Result<(), ModelError> {
        let unknown = |info: &&TensorInfo| {
            !self.taken.contains(info.name.as_str())
                && !layer_of(&info.name).is_some_and(|layer| self.predicting.contains(&layer))
        };
        match self.gguf.tensors.iter().find(unknown) {
            None => Ok(()),
            Some(info) => Err(self.unknown(info)),
        }
    }

    fn unknown(&self, info: &TensorInfo) -> ModelError {
        ModelError::UnknownTensor {
            file: self.file.to_owned(),
            tensor: info.name.clone(),
            architecture: self.architecture,
        }
    }

    fn if_there<T>(
        &mut self,
        name: &str,
        read: impl FnOnce(&mut Self) -> Result<T, ModelError>,
    ) -> Result<Option<T>, ModelError> {
        match self.gguf.tensor(name) {
            Some(_) => read(self).map(Some),
            None => Ok(None),
        }
    }

    fn take(&mut self, name: &str) -> Result<&'a TensorInfo, ModelError> {
        let info = self.find(name)?;
        self.taken.insert(&info.name);
        Ok(info)
    }

    fn find(&self, name: &str) -> Result<&'a TensorInfo, ModelError> {
        self.gguf
            .tensor(name)
            .ok_or_else(|| ModelError::MissingTensor {
                file: self.file.to_owned(),
                tensor: name.to_owned(),
                architecture: self.architecture,
            })
    }

    fn check_format(&self, info: &TensorInfo) -> Result<(), ModelError> {
        let expected =
            "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, an IQ format or MXFP4";
        self.check_is_one_of(&MATRIX_FORMATS, expected, info)
    }

    fn check_floats(&self, info: &TensorInfo) -> Result<(), ModelError> {
        self.check_is_one_of(&FLOATS, "F32, F16 or BF16", info)
    }

    fn check_is_one_of(
        &self,
        formats: &[GgmlType],
        expected: &'static str,
        info: &TensorInfo,
    ) -> Result<(), ModelError> {
        match formats.contains(&info.ggml_type) {
            true => Ok(()),
            false => Err(ModelError::Format {
                file: self.file.to_owned(),
                tensor: info.name.clone(),
                expected,
                found: info.ggml_type,
            }),
        }
    }

    fn check_shape(&self, info: &TensorInfo, expected: &[usize]) -> Result<(), ModelError> {
        let expected: Vec<u64> = expected.iter().map(|&length| length as u64).collect();
        match info.shape == expected {
            true => Ok(()),
            false => Err(self.shape_error(info, expected)),
        }
    }

    fn shape_error(&self, info: &TensorInfo, expected: Vec<u64>) -> ModelError {
        ModelError::Shape {
            file: self.file.to_owned(),
            tensor: info.name.clone(),
            expected,
            found: info.shape.clone(),
        }
    }
}

const FLOATS: [GgmlType; 3] = [GgmlType::F32, GgmlType::F16, GgmlType::BF16];

/// Formats of matrices that every executor on a processor computes with.
pub const MATRIX_FORMATS: [GgmlType; 23] = [
    GgmlType::F32,
    GgmlType::F16,
    GgmlType::BF16,
    GgmlType::Q4_0,
    GgmlType::Q4_1,
    GgmlType::Q5_0,
    GgmlType::Q5_1,
    GgmlType::Q8_0,
    GgmlType::Q2K,
    GgmlType::Q3K,
    GgmlType::Q4K,
    GgmlType::Q5K,
    GgmlType::Q6K,
    GgmlType::Iq1S,
    GgmlType::Iq1M,
    GgmlType::Iq2Xxs,
    GgmlType::Iq2Xs,
    GgmlType::Iq2S,
    GgmlType::Iq3Xxs,
    GgmlType::Iq3S,
    GgmlType::Iq4Nl,
    GgmlType::Iq4Xs,
    GgmlType::Mxfp4,
];

fn rows_of(info: &TensorInfo, cols: usize, rows: usize) -> TensorRows {
    TensorRows {
        tensor: info.name.clone(),
        format: info.ggml_type,
        rows,
        cols,
        bytes: info.offset..info.offset + info.byte_len,
    }
}

/// Which part of a model a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Embedding,
    Layer(usize),
    /// RoPE's divisors of frequencies, which some families have in a long and a short form.
    EveryLayer,
    OutputHead,
    Other,
}

impl Place {
    /// By the names that GGUF fixes for all architectures.
    pub fn of(tensor: &str) -> Place {
        if let Some(layer) = layer_of(tensor) {
            return Place::Layer(layer);
        }
        match tensor.split_once('.').map_or(tensor, |(stem, _)| stem) {
            "token_embd" | "token_embd_norm" | "position_embd" | "token_types" => Place::Embedding,
            "output" | "output_norm" => Place::OutputHead,
            stem if stem.starts_with("rope_") => Place::EveryLayer,
            _ => Place::Other,
        }
    }
}

/// The layer that a tensor belongs to: 7 for `blk.7.attn_q.weight`.
pub fn layer_of(tensor: &str) -> Option<usize> {
    tensor.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_the_parts_of_a_model_apart() {
        for (tensor, place) in [
            ("token_embd.weight", Place::Embedding),
            ("blk.7.attn_q.weight", Place::Layer(7)),
            ("rope_factors_long.weight", Place::EveryLayer),
            ("output.weight", Place::OutputHead),
            ("output_norm.weight", Place::OutputHead),
            ("cls.weight", Place::Other),
        ] {
            assert_eq!(Place::of(tensor), place, "{tensor}");
        }
    }

    #[test]
    fn tells_a_layers_tensor_from_the_others() {
        assert_eq!(layer_of("blk.7.attn_q.weight"), Some(7));
        assert_eq!(layer_of("blk.12.ffn_norm.weight"), Some(12));
        assert_eq!(layer_of("token_embd.weight"), None);
        assert_eq!(layer_of("blk.x.attn_q.weight"), None);
    }
}
