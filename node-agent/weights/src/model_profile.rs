//! What planning must know of a model: layers, formats and bytes.

use std::ops::Range;

use prima_crds::v1alpha1::model_profile::{FormatWeights, ModelProfileSpec};
use prima_gguf::Gguf;
use prima_model::{LayerSpec, ModelError, ModelSpec, TensorRows};

/// Keys and values are cached as F16.
const KV_BYTES: usize = 2;

/// The profile of the model with this header. `name` (a path, an address) is used in errors.
///
/// # Errors
/// [`ModelError`] for a model that prima does not run.
pub fn model_profile(name: &str, gguf: &Gguf) -> Result<ModelProfileSpec, ModelError> {
    let model = ModelSpec::read(name, gguf)?;
    let in_layers = model.layers.iter().flat_map(LayerSpec::matrices);
    let kv_width = model.layers.iter().map(|layer| layer.attention.kv_width());
    Ok(ModelProfileSpec {
        architecture: model.architecture.to_owned(),
        size_bytes: gguf.file_len as i64,
        layers: model.layers.len() as i32,
        hidden_size: model.hidden as i32,
        vocabulary_size: model.vocabulary as i32,
        trained_context_length: model.context_length as i32,
        kv_bytes_per_position_and_layer: (2 * kv_width.max().unwrap_or(0) * KV_BYTES) as i64,
        layer_weights: by_format(in_layers),
        output_weights: by_format([&model.output_head]),
        embedding_bytes: byte_count(&model.embedding.bytes),
    })
}

fn byte_count(range: &Range<u64>) -> i64 {
    (range.end - range.start) as i64
}

/// Weights and bytes of matrices, by format. Vectors are left out: they are a thousandth of a layer and not multiplied.
fn by_format<'a>(matrices: impl IntoIterator<Item = &'a TensorRows>) -> Vec<FormatWeights> {
    let mut sums: Vec<FormatWeights> = Vec::new();
    for matrix in matrices {
        let format = matrix.format.name();
        let weights = (matrix.rows * matrix.cols) as i64;
        let bytes = byte_count(&matrix.bytes);
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
