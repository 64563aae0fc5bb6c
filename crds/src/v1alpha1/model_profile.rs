//! ModelProfile: what the planner needs to know of a model. It is read from a GGUF header, or from a YAML file where there is no
//! model file yet. In a cluster it is no resource of its own, but a part of others.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::document::{self, API_VERSION, Checks, DocumentError, is_zero};
use super::ring_plan::{KV_BLOCK_POSITIONS, KvDtype, USUAL_WINDOWED_SEQUENCES};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelProfile {
    pub api_version: String,
    pub kind: String,
    pub metadata: ModelProfileName,
    pub spec: ModelProfileSpec,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelProfileName {
    pub name: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelProfileSpec {
    /// Family of the model: `general.architecture` of its GGUF file. Documents of the first version lack this field, and mean `llama`.
    #[serde(default = "llama")]
    #[schemars(length(max = 64))]
    pub architecture: String,
    /// Parts of the model, such as `sliding-windows`: what a machine must compute to be a member of its ring. Empty, as in documents of
    /// earlier versions: not known, but for its experts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), inner(length(max = 64)))]
    pub parts: Vec<String>,
    /// Size of the file in bytes.
    pub size_bytes: i64,
    /// Number of transformer layers (L).
    pub layers: i32,
    /// Numbers in one activation (e).
    pub hidden_size: i32,
    /// Number of tokens in the vocabulary.
    pub vocabulary_size: i32,
    /// Marks by which vocabularies are compared, such as `49152:0123abcd`: a number of tokens, and the beginning of the SHA-256 of the first so
    /// many. There is one for all tokens, and one for each of the last few multiples of 1024. Vocabularies that share a mark are the same up to
    /// there. Empty, as in documents of earlier versions: not known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), inner(length(max = 32)))]
    pub vocabulary_marks: Vec<String>,
    /// Positions that the model was trained for.
    pub trained_context_length: i32,
    /// Bytes of the keys and values of one position in one layer, in F16.
    pub kv_bytes_per_position_and_layer: i64,
    /// Bytes of the keys and values of one position in one layer, in Q8_0. 0, or absent as in documents of earlier versions: not known, so it
    /// is counted as in F16.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub quantized_kv_bytes_per_position_and_layer: i64,
    /// Heads of a layer that attend to latents. 0, or absent as in documents of earlier versions: there are none, or it is not known. Where `parts`
    /// say that there are some, 128 are counted then.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub latent_heads: i32,
    /// Number of layers with a sliding window. These see the last `attentionWindow` positions only.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub windowed_layers: i32,
    /// Size of the sliding window in positions, the current one included. 0 where all layers see all positions.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub attention_window: i32,
    /// Indexes, from 0 and in order, of the layers that see all positions, where others have a sliding window. Empty where all layers are alike. In
    /// documents of earlier versions: not known, and taken to be the last of every few layers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4096))]
    pub full_attention_layers: Vec<i32>,
    /// Weights of all layers together, by format.
    pub layer_weights: Vec<FormatWeights>,
    /// Of `layerWeights`, those of experts, by format. Empty, as in documents of earlier versions: a token uses all weights of a layer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expert_weights: Vec<FormatWeights>,
    /// Bytes of the largest matrix of a layer; all experts of a layer count as one. 0, or absent as in documents of earlier versions: not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub largest_part_bytes: i64,
    /// Experts of a layer that has some. 0: no layer has.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub experts: i32,
    /// Of these, how many a token uses.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub experts_per_token: i32,
    /// Weights of output norm and output head, by format.
    pub output_weights: Vec<FormatWeights>,
    /// Bytes of the input embedding. One row of it is read for each token.
    pub embedding_bytes: i64,
}

impl ModelProfileSpec {
    /// Bytes in memory of the keys and values of one position in one layer, where `dtype` is asked for. GPUs hold F16 whatever is asked
    /// for.
    pub fn kv_bytes(&self, dtype: KvDtype) -> i64 {
        match (dtype, self.quantized_kv_bytes_per_position_and_layer) {
            (KvDtype::Q8_0, bytes @ 1..) => bytes,
            _ => self.kv_bytes_per_position_and_layer,
        }
    }

    /// Which part of the experts' weights a token uses; 1 where there are none.
    pub fn expert_share(&self) -> f64 {
        match self.experts {
            0 => 1.0,
            all => f64::from(self.experts_per_token) / f64::from(all),
        }
    }

    /// Bytes of the largest part of a layer; where that is not known, of a layer that is larger than most.
    pub fn part_bytes(&self) -> i64 {
        match self.largest_part_bytes {
            0 => self.layer_bytes() / 4 * 5,
            bytes => bytes,
        }
    }

    /// Bytes of the weights of a layer, on average.
    pub fn layer_bytes(&self) -> i64 {
        let all: i64 = self.layer_weights.iter().map(|one| one.bytes).sum();
        all / i64::from(self.layers).max(1)
    }

    /// Of all layers together, the weights that a token uses, by format.
    pub fn used_weights(&self) -> Vec<FormatWeights> {
        let unused = 1.0 - self.expert_share();
        let mut used = self.layer_weights.clone();
        for experts in &self.expert_weights {
            let all = used.iter_mut().find(|all| all.format == experts.format);
            if let Some(all) = all {
                all.weights -= (experts.weights as f64 * unused) as i64;
                all.bytes -= (experts.bytes as f64 * unused) as i64;
            }
        }
        used
    }

    /// Bytes of the whole model on a processor: all weights, and keys and values of so many positions, as F16.
    pub fn whole_bytes(&self, positions: i64) -> i64 {
        let position = i64::from(self.layers).saturating_mul(self.kv_bytes_per_position_and_layer);
        let kv = positions.saturating_mul(position);
        self.size_bytes.saturating_add(kv)
    }

    /// Positions that a ring for one context of `positions` keeps, of each layer; in those with windows, of so many long sequences, of whose prompts
    /// `chunk_positions` go round together.
    pub fn kept_positions(
        &self,
        positions: usize,
        windowed_sequences: usize,
        chunk_positions: usize,
    ) -> Vec<usize> {
        let window = AttentionWindow {
            positions: self.attention_window as usize,
        };
        let planned = window.planned(positions, windowed_sequences, chunk_positions);
        let mut kept = vec![planned; self.layers as usize];
        for index in self.layers_that_see_all() {
            if let Some(kept) = kept.get_mut(index) {
                *kept = positions;
            }
        }
        kept
    }

    /// For how many long sequences each of `kv_contexts` has memory in layers with windows, if so many requests run at once: for all of them, and
    /// for no fewer than in plans that do not say. Those are all that there are for a model without windows.
    pub fn windowed_sequences(&self, concurrent_requests: usize, kv_contexts: usize) -> usize {
        let usual = USUAL_WINDOWED_SEQUENCES as usize;
        match self.windowed_layers {
            0 => usual,
            _ => concurrent_requests.div_ceil(kv_contexts.max(1)).max(usual),
        }
    }

    fn layers_that_see_all(&self) -> Vec<usize> {
        if !self.full_attention_layers.is_empty() {
            let indexes = self.full_attention_layers.iter();
            return indexes.map(|&index| index as usize).collect();
        }
        // So it is in most models that had windows when documents did not say which layers have one.
        let count = self.layers.saturating_sub(self.windowed_layers).max(0);
        let period = (self.layers / count.max(1)).max(1);
        (1..=count).map(|n| (n * period - 1) as usize).collect()
    }

    /// Positions that a row sees in a layer when `positions` are there, on average over the model's layers.
    pub fn seen_positions(&self, positions: f64) -> f64 {
        let windowed = f64::from(self.windowed_layers) / f64::from(self.layers);
        let in_window = positions.min(f64::from(self.attention_window));
        (1.0 - windowed) * positions + windowed * in_window
    }
}

/// A model cannot guess for another whose tokens mean something else.
#[derive(Debug, thiserror::Error)]
#[error(
    "expected the same vocabulary as the model's, found another; use a small model of the same family"
)]
pub struct OtherVocabulary;

/// Whether models with these `vocabulary_marks` have the same tokens. At the end they may differ: models of one family have tokens for
/// other chats there, or rows that no token uses. What is not known counts as the same.
///
/// # Errors
/// [`OtherVocabulary`].
pub fn same_vocabulary(one: &[String], other: &[String]) -> Result<(), OtherVocabulary> {
    let unknown = one.is_empty() || other.is_empty();
    match unknown || one.iter().any(|mark| other.contains(mark)) {
        true => Ok(()),
        false => Err(OtherVocabulary),
    }
}

/// The sliding window of a layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionWindow {
    /// How many a row sees, its own included.
    pub positions: usize,
}

impl AttentionWindow {
    /// Positions that such a layer keeps of a long sequence: what the rows of one pass see, a chunk at most, and one window more. So a conversation
    /// can go back, and GPUs seldom have to move what they hold. They begin and end anywhere in a block, so there is one more of these.
    pub fn kept(self, chunk_positions: usize) -> usize {
        2 * self.positions + chunk_positions + KV_BLOCK_POSITIONS
    }

    /// Positions that all sequences of a ring for one context may hold in such a layer: so many long ones, or all the context, if that is less.
    pub fn planned(self, context_length: usize, sequences: usize, chunk_positions: usize) -> usize {
        context_length.min(sequences.saturating_mul(self.kept(chunk_positions)))
    }
}

/// Weights of one format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FormatWeights {
    /// GGML's name of the format: `Q4_K`, `F16`, ...
    pub format: String,
    /// How many weights there are.
    pub weights: i64,
    /// How many bytes they take.
    pub bytes: i64,
}

impl ModelProfile {
    pub fn new(name: &str, spec: ModelProfileSpec) -> Self {
        Self {
            api_version: API_VERSION.to_owned(),
            kind: "ModelProfile".to_owned(),
            metadata: ModelProfileName {
                name: name.to_owned(),
            },
            spec,
        }
    }

    /// Reads a profile from YAML (or JSON) and validates it. `name` (a path) is used in errors.
    pub fn from_yaml(name: &str, text: &str) -> Result<Self, DocumentError> {
        let profile: Self = document::read(name, "ModelProfile", text)?;
        profile.validate(name)?;
        Ok(profile)
    }

    /// Checks everything that the planner relies on.
    pub fn validate(&self, name: &str) -> Result<(), DocumentError> {
        let checks = Checks { name };
        let ModelProfileSpec {
            architecture: _,
            parts: _,
            size_bytes,
            layers,
            hidden_size,
            vocabulary_size,
            vocabulary_marks: _,
            trained_context_length,
            kv_bytes_per_position_and_layer,
            quantized_kv_bytes_per_position_and_layer,
            latent_heads,
            windowed_layers,
            attention_window,
            full_attention_layers,
            layer_weights,
            expert_weights,
            largest_part_bytes,
            experts,
            experts_per_token,
            output_weights,
            embedding_bytes,
        } = &self.spec;
        if self.metadata.name.is_empty() {
            return Err(checks.error("metadata.name", "must name the model"));
        }
        let trained = (*trained_context_length).into();
        let kv_bytes = *kv_bytes_per_position_and_layer;
        let quantized = *quantized_kv_bytes_per_position_and_layer;
        let all_layers = (*layers).into();
        let windows = match *windowed_layers {
            0 => 0..=0,
            _ => 1..=1 << 24,
        };
        checks.fields(
            "spec",
            [
                ("sizeBytes", *size_bytes, 1..=MAX_BYTES),
                ("layers", (*layers).into(), 1..=4096),
                ("hiddenSize", (*hidden_size).into(), 1..=1 << 20),
                ("vocabularySize", (*vocabulary_size).into(), 1..=1 << 24),
                ("trainedContextLength", trained, 1..=1 << 24),
                ("kvBytesPerPositionAndLayer", kv_bytes, 1..=1 << 30),
                (
                    "quantizedKvBytesPerPositionAndLayer",
                    quantized,
                    0..=kv_bytes,
                ),
                ("latentHeads", (*latent_heads).into(), 0..=4096),
                ("windowedLayers", (*windowed_layers).into(), 0..=all_layers),
                ("attentionWindow", (*attention_window).into(), windows),
                ("largestPartBytes", *largest_part_bytes, 0..=MAX_BYTES),
                ("experts", (*experts).into(), 0..=4096),
                (
                    "expertsPerToken",
                    (*experts_per_token).into(),
                    (*experts).min(1).into()..=(*experts).into(),
                ),
                ("embeddingBytes", *embedding_bytes, 1..=MAX_BYTES),
            ],
        )?;
        let in_order = full_attention_layers.is_sorted_by(|one, next| one < next);
        let exist = full_attention_layers
            .iter()
            .all(|index| (0..*layers).contains(index));
        let all = *windowed_layers as usize + full_attention_layers.len() == *layers as usize;
        let possible = full_attention_layers.is_empty() || (in_order && exist && all);
        if !possible {
            let problem = "must be the indexes of all layers without a window, in order";
            return Err(checks.error("spec.fullAttentionLayers", problem));
        }
        for (path, weights) in [
            ("spec.layerWeights", layer_weights),
            ("spec.outputWeights", output_weights),
        ] {
            if weights.is_empty() {
                return Err(checks.error(path, "is empty"));
            }
            for (i, one) in weights.iter().enumerate() {
                checks.fields(
                    &format!("{path}[{i}]"),
                    [
                        ("weights", one.weights, 1..=16 * MAX_BYTES),
                        ("bytes", one.bytes, 1..=MAX_BYTES),
                    ],
                )?;
            }
        }
        if expert_weights.is_empty() != (*experts == 0) {
            return Err(checks.error("spec.expertWeights", "must be there if spec.experts is"));
        }
        for (i, one) in expert_weights.iter().enumerate() {
            let all = layer_weights.iter().find(|all| all.format == one.format);
            let most = all.map_or((0, 0), |all| (all.weights, all.bytes));
            let fields = [
                ("weights", one.weights, 1..=most.0),
                ("bytes", one.bytes, 1..=most.1),
            ];
            checks.fields(&format!("spec.expertWeights[{i}]"), fields)?;
        }
        Ok(())
    }
}

fn llama() -> String {
    "llama".to_owned()
}

/// 64 TiB.
const MAX_BYTES: i64 = 1 << 46;

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> ModelProfile {
        let weights = |format: &str, weights, bytes| FormatWeights {
            format: format.into(),
            weights,
            bytes,
        };
        ModelProfile::new(
            "tiny",
            ModelProfileSpec {
                architecture: "qwen2".into(),
                parts: vec!["halves-rope".into(), "silu".into()],
                size_bytes: 1000,
                layers: 6,
                hidden_size: 64,
                vocabulary_size: 512,
                vocabulary_marks: vec!["512:01ab".into()],
                trained_context_length: 2048,
                kv_bytes_per_position_and_layer: 256,
                quantized_kv_bytes_per_position_and_layer: 136,
                latent_heads: 0,
                windowed_layers: 5,
                attention_window: 512,
                full_attention_layers: vec![1],
                layer_weights: vec![weights("Q8_0", 800, 850)],
                expert_weights: vec![weights("Q8_0", 640, 680)],
                largest_part_bytes: 113,
                experts: 8,
                experts_per_token: 2,
                output_weights: vec![weights("F32", 20, 80)],
                embedding_bytes: 70,
            },
        )
    }

    #[test]
    fn windows_bound_what_a_sequence_keeps() {
        let spec = profile().spec;
        assert_eq!(spec.kept_positions(1000, 4, 128), [1000; 6]);
        // One layer has all, five have two windows, a chunk and a block of each sequence; but no more than all.
        for (positions, sequences, chunk, windowed) in [
            (6000, 4, 128, 4 * 1216),
            (6000, 16, 128, 6000),
            (30_000, 16, 128, 16 * 1216),
            (30_000, 16, 512, 16 * 1600),
        ] {
            let mut expected = [windowed; 6];
            expected[1] = positions;
            let kept = spec.kept_positions(positions, sequences, chunk);
            assert_eq!(kept, expected);
        }
        let seen = (6000.0 + 5.0 * 512.0) / 6.0;
        assert!((spec.seen_positions(6000.0) - seen).abs() < 1e-6);
        let all = ModelProfileSpec {
            windowed_layers: 0,
            attention_window: 0,
            full_attention_layers: Vec::new(),
            ..spec
        };
        assert_eq!(all.kept_positions(6000, 4, 128), [6000; 6]);
        assert_eq!(all.windowed_sequences(16, 1), 4);
    }

    #[test]
    fn windows_have_room_for_all_that_run_at_once() {
        let spec = profile().spec;
        // As a Model without a number has it, then as Models with one have it.
        assert_eq!(spec.windowed_sequences(16, 1), 16);
        for requests in [1, 2, 40] {
            assert_eq!(spec.windowed_sequences(requests, requests), 4);
        }
        assert_eq!(spec.windowed_sequences(16, 3), 6);
    }

    #[test]
    fn without_a_list_the_last_of_every_few_layers_sees_all() {
        for (layers, windowed_layers, full) in [
            (12, 10, &[5, 11][..]),
            // The models of 62 and 26 layers have two more at their ends.
            (26, 22, &[5, 11, 17, 23]),
            (62, 52, &[5, 11, 17, 23, 29, 35, 41, 47, 53, 59]),
            (5, 3, &[1, 3]),
            (3, 3, &[]),
            (2, 0, &[0, 1]),
        ] {
            let spec = ModelProfileSpec {
                layers,
                windowed_layers,
                full_attention_layers: Vec::new(),
                ..profile().spec
            };
            let kept = spec.kept_positions(9000, 4, 128);
            assert_eq!(kept.len(), layers as usize);
            let seen = (0..kept.len()).filter(|&index| kept[index] == 9000);
            assert_eq!(seen.collect::<Vec<_>>(), full, "{layers}");
        }
    }

    #[test]
    fn a_vocabulary_may_differ_at_its_end_only() {
        let marks =
            |marks: &[&str]| -> Vec<String> { marks.iter().map(|&mark| mark.to_owned()).collect() };
        let known = marks(&["2100:a", "2048:b", "1024:c"]);
        for (other, same) in [
            (&["2100:a", "2048:b", "1024:c"][..], true),
            (&["2200:d", "2048:b", "1024:c"], true),
            (&["2000:e", "1024:c"], true),
            (&["2100:f", "2048:g", "1024:h"], false),
            (&["512:i"], false),
            (&[], true),
        ] {
            let other = marks(other);
            assert_eq!(same_vocabulary(&known, &other).is_ok(), same, "{other:?}");
            assert_eq!(same_vocabulary(&other, &known).is_ok(), same, "{other:?}");
        }
    }

    #[test]
    fn a_whole_model_is_its_weights_and_its_context() {
        let spec = profile().spec;
        assert_eq!(spec.whole_bytes(0), 1000);
        assert_eq!(spec.whole_bytes(10), 1000 + 10 * 6 * 256);
        assert_eq!(spec.whole_bytes(i64::MAX), i64::MAX);
    }

    #[test]
    fn a_token_uses_its_experts_and_all_else() {
        let spec = profile().spec;
        let used = spec.used_weights();
        assert_eq!((used[0].weights, used[0].bytes), (800 - 480, 850 - 510));
        let dense = ModelProfileSpec {
            expert_weights: Vec::new(),
            experts: 0,
            experts_per_token: 0,
            ..spec
        };
        assert_eq!(dense.used_weights(), dense.layer_weights);
    }

    #[test]
    fn q8_0_counts_as_f16_where_a_profile_does_not_know_it() {
        let profile = profile();
        let bytes = |profile: &ModelProfile| {
            [KvDtype::F16, KvDtype::Q8_0].map(|dtype| profile.spec.kv_bytes(dtype))
        };
        assert_eq!(bytes(&profile), [256, 136]);
        let yaml = serde_saphyr::to_string(&profile).unwrap();
        let without = yaml.replacen("  quantizedKvBytesPerPositionAndLayer: 136\n", "", 1);
        assert_ne!(yaml, without);
        let earlier = ModelProfile::from_yaml("m.yaml", &without).unwrap();
        assert_eq!(bytes(&earlier), [256, 256]);
    }

    #[test]
    fn a_profile_survives_yaml_and_a_bad_one_is_refused() {
        let yaml = serde_saphyr::to_string(&profile()).unwrap();
        assert_eq!(ModelProfile::from_yaml("m.yaml", &yaml).unwrap(), profile());
        for (from, to, named) in [
            ("  - 1\n", "  - 6\n", "spec.fullAttentionLayers"),
            ("  - 1\n", "  - 1\n  - 1\n", "spec.fullAttentionLayers"),
            (
                "windowedLayers: 5",
                "windowedLayers: 4",
                "spec.fullAttentionLayers",
            ),
            ("layers: 6", "layers: 0", "spec.layers"),
            ("bytes: 850", "bytes: -850", "spec.layerWeights[0].bytes"),
            (
                "windowedLayers: 5",
                "windowedLayers: 7",
                "spec.windowedLayers",
            ),
            (
                "attentionWindow: 512",
                "attentionWindow: 0",
                "spec.attentionWindow",
            ),
            (
                "windowedLayers: 5",
                "windowedLayers: 0",
                "spec.attentionWindow",
            ),
            (
                "quantizedKvBytesPerPositionAndLayer: 136",
                "quantizedKvBytesPerPositionAndLayer: 257",
                "spec.quantizedKvBytesPerPositionAndLayer",
            ),
            ("experts: 8", "experts: 0", "spec.expertsPerToken"),
            (
                "expertsPerToken: 2",
                "expertsPerToken: 9",
                "spec.expertsPerToken",
            ),
            (
                "expertsPerToken: 2",
                "expertsPerToken: 0",
                "spec.expertsPerToken",
            ),
            ("bytes: 680", "bytes: 851", "spec.expertWeights[0].bytes"),
            ("kind: ModelProfile", "kind: Pod", "kind is \"Pod\""),
        ] {
            assert!(yaml.contains(from), "{yaml}");
            let error = ModelProfile::from_yaml("m.yaml", &yaml.replacen(from, to, 1)).unwrap_err();
            assert!(error.to_string().contains(named), "{error}");
        }
    }
}
