//! What planning must know of a model: layers, formats and bytes. Whoever plans asks here first, so a model that prima cannot run is refused
//! by its header.

use std::ops::Range;

use prima_crds::v1alpha1::model_profile::{FormatWeights, ModelProfileSpec};
use prima_gguf::{Gguf, GgufError, Metadata};
use prima_model::{KvFormat, LayerSpec, ModelError, ModelSpec, TensorRows};
use prima_text::{Tokenizer, TokenizerError};
use sha2::{Digest, Sha256};

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
    let text = |source| RefusedModel::Text {
        file: name.to_owned(),
        source: Box::new(source),
    };
    Tokenizer::from_gguf(&gguf.metadata).map_err(text)?;
    let vocabulary_marks =
        vocabulary_marks(&gguf.metadata).map_err(|source| text(source.into()))?;
    let of_experts = || model.layers.iter().flat_map(LayerSpec::expert_matrices);
    let in_layers = model.layers.iter().flat_map(LayerSpec::matrices);
    let experts = model.layers.iter();
    let mut experts = experts.filter_map(|layer| layer.feed_forward.experts.as_ref());
    let experts = experts.next().map(|experts| (experts.count, experts.used));
    let (experts, experts_per_token) = experts.unwrap_or_default();
    let kv_bytes = |format| {
        let layers = model.layers.iter();
        let bytes = layers.map(|layer| layer.attention.kv_bytes(format));
        bytes.max().unwrap_or(0) as i64
    };
    let attentions = model.layers.iter().map(|layer| &layer.attention);
    let latent_heads = attentions.filter(|one| one.values_in_keys().is_some());
    let latent_heads = latent_heads.map(|attention| attention.heads);
    let layers = model.layers.iter();
    let windows: Vec<Option<usize>> = layers.map(|layer| layer.attention.window).collect();
    Ok(ModelProfileSpec {
        architecture: model.architecture.to_owned(),
        parts: model.parts().iter().map(ToString::to_string).collect(),
        size_bytes: gguf.file_len as i64,
        layers: model.layers.len() as i32,
        hidden_size: model.hidden as i32,
        vocabulary_size: model.vocabulary as i32,
        vocabulary_marks,
        trained_context_length: model.context_length as i32,
        kv_bytes_per_position_and_layer: kv_bytes(KvFormat::F16),
        quantized_kv_bytes_per_position_and_layer: kv_bytes(KvFormat::Q8_0),
        latent_heads: latent_heads.max().unwrap_or(0) as i32,
        windowed_layers: windows.iter().flatten().count() as i32,
        attention_window: model.attention_window().unwrap_or(0) as i32,
        full_attention_layers: full_attention_layers(&windows),
        layer_weights: by_format(in_layers.chain(of_experts())),
        expert_weights: by_format(of_experts()),
        largest_part_bytes: model.layers.iter().map(largest_part).max().unwrap_or(0),
        experts: experts as i32,
        experts_per_token: experts_per_token as i32,
        output_weights: by_format([&model.output_head]),
        embedding_bytes: byte_count(&model.embedding.bytes),
    })
}

/// Indexes of the layers without a window, if others have one.
fn full_attention_layers(windows: &[Option<usize>]) -> Vec<i32> {
    let full = windows.iter().enumerate();
    let full = full.filter(|(_, window)| window.is_none());
    let full: Vec<i32> = full.map(|(index, _)| index as i32).collect();
    match full.len() == windows.len() {
        true => Vec::new(),
        false => full,
    }
}

/// Bytes of the largest matrix of a layer, of whose experts all count as one.
fn largest_part(layer: &LayerSpec) -> i64 {
    let experts = layer.expert_matrices().map(|rows| byte_count(&rows.bytes));
    let single = layer.matrices().map(|rows| byte_count(&rows.bytes));
    single.fold(experts.sum(), i64::max)
}

/// Marks of the tokens that `metadata` lists: of all, and of the last [`MARKS`] multiples of [`MARKED`] below.
///
/// # Errors
/// No list of tokens.
pub fn vocabulary_marks(metadata: &Metadata) -> Result<Vec<String>, GgufError> {
    let tokens = metadata.require_strings("tokenizer.ggml.tokens")?;
    let last = tokens.len().saturating_sub(1) / MARKED;
    let mut digest = Sha256::new();
    let mut marks = Vec::new();
    for (index, token) in tokens.iter().enumerate() {
        let (number, rest) = (index / MARKED, index % MARKED);
        if rest == 0 && number > 0 && number + MARKS > last {
            marks.push(mark(index, &digest));
        }
        // Where a token ends is told by its length.
        digest.update((token.len() as u64).to_le_bytes());
        digest.update(token);
    }
    marks.push(mark(tokens.len(), &digest));
    Ok(marks)
}

/// Families differ in the last tokens: some hundreds of them are for chats, or fill up rows.
const MARKED: usize = 1024;
const MARKS: usize = 4;

fn mark(tokens: usize, digest: &Sha256) -> String {
    let digest = format!("{:x}", digest.clone().finalize());
    format!("{tokens}:{}", &digest[..8])
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

#[cfg(test)]
mod tests {
    use prima_crds::v1alpha1::model_profile::same_vocabulary;
    use prima_crds::v1alpha1::node_profile::NodeProfile;
    use prima_gguf::Value;
    use prima_model::ModelPart;

    use super::*;

    /// Of tokens `0`, `1`, ...; those of `other` are other ones.
    fn marks(count: usize, other: Range<usize>) -> Vec<String> {
        let text = |id| match other.contains(&id) {
            true => format!("x{id:04}"),
            false => format!("{id:05}"),
        };
        let tokens = (0..count).map(text).collect::<Vec<String>>();
        let entries = vec![("tokenizer.ggml.tokens".to_owned(), Value::from(tokens))];
        vocabulary_marks(&Metadata::new("model", entries).unwrap()).unwrap()
    }

    #[test]
    fn all_tokens_are_marked_and_some_multiples_below() {
        let counts = |count| -> Vec<String> {
            let marks = marks(count, 0..0).into_iter();
            marks
                .map(|mark| mark.split_once(':').unwrap().0.to_owned())
                .collect()
        };
        assert_eq!(counts(1), ["1"]);
        assert_eq!(counts(1024), ["1024"]);
        assert_eq!(counts(1025), ["1024", "1025"]);
        assert_eq!(counts(6000), ["2048", "3072", "4096", "5120", "6000"]);
        assert_eq!(counts(6144), ["2048", "3072", "4096", "5120", "6144"]);
    }

    /// A name that was changed would leave those agents out of rings.
    #[test]
    fn what_agents_of_before_compute_are_parts_of_models() {
        let yaml = include_str!("../../../crds/tests/node-profile.yaml");
        let profile = NodeProfile::from_yaml("node-profile.yaml", yaml).unwrap();
        let mut status = profile.status.unwrap();
        status.parts = vec!["experts".to_owned()];
        let names: Vec<&str> = ModelPart::ALL.iter().map(|part| part.name()).collect();
        let computed = status.computed_parts();
        assert!(computed.len() > 40 && computed.iter().all(|part| names.contains(part)));
    }

    #[test]
    fn layers_without_a_window_are_listed_where_others_have_one() {
        let (full, windowed) = (None, Some(512));
        let listed = full_attention_layers(&[windowed, full, windowed, windowed, full]);
        assert_eq!(listed, [1, 4]);
        assert!(full_attention_layers(&[windowed; 3]).is_empty());
        assert!(full_attention_layers(&[full; 3]).is_empty());
    }

    #[test]
    fn models_of_one_family_have_the_same_vocabulary() {
        let known = marks(6000, 0..0);
        let same = |other: &[String]| same_vocabulary(&known, other).is_ok();
        assert!(same(&marks(6000, 0..0)));
        assert!(same(&marks(6000, 5900..6000)), "other tokens for chats");
        assert!(same(&marks(6200, 0..0)), "more rows");
        assert!(same(&marks(5130, 5121..5130)), "fewer, and other");
        assert!(!same(&marks(6000, 0..1)), "another first token");
        assert!(!same(&marks(6000, 2000..2001)));
        assert!(!same(&marks(500, 0..0)), "a small one");
    }
}
