//! What planning must know of a model: layers, formats and bytes. Whoever plans asks here first, so a model that prima cannot run is refused
//! by its header.

use std::ops::Range;

use prima_crds::v1alpha1::model_profile::{FormatWeights, ModelProfileSpec};
use prima_gguf::Gguf;
use prima_model::{KvFormat, LayerSpec, ModelError, ModelSpec, TensorRows};
use prima_text::{Tokenizer, TokenizerError};

/// Why prima does not run a model.
#[derive(Debug, thiserror::Error)]
pub enum RefusedModel {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("{file}: prima cannot turn text into this model's tokens")]
    Text {
        file: String,
        #[source]
        source: Box<TokenizerError>,
    },
}

/// The profile of the model with this header. `name` (a path, an address) is used in errors.
///
/// # Errors
/// [`RefusedModel`] for layers or a vocabulary that prima does not compute with.
pub fn model_profile(name: &str, gguf: &Gguf) -> Result<ModelProfileSpec, RefusedModel> {
    let model = ModelSpec::read(name, gguf)?;
    Tokenizer::from_gguf(&gguf.metadata).map_err(|source| RefusedModel::Text {
        file: name.to_owned(),
        source: Box::new(source),
    })?;
    let in_layers = model.layers.iter().flat_map(LayerSpec::matrices);
    let kv_bytes = |format| {
        let layers = model.layers.iter();
        let bytes = layers.map(|layer| layer.attention.kv_bytes(format));
        bytes.max().unwrap_or(0) as i64
    };
    let windows = model
        .layers
        .iter()
        .filter_map(|layer| layer.attention.window);
    Ok(ModelProfileSpec {
        architecture: model.architecture.to_owned(),
        size_bytes: gguf.file_len as i64,
        layers: model.layers.len() as i32,
        hidden_size: model.hidden as i32,
        vocabulary_size: model.vocabulary as i32,
        trained_context_length: model.context_length as i32,
        kv_bytes_per_position_and_layer: kv_bytes(KvFormat::F16),
        quantized_kv_bytes_per_position_and_layer: kv_bytes(KvFormat::Q8_0),
        windowed_layers: windows.clone().count() as i32,
        attention_window: windows.max().unwrap_or(0) as i32,
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
