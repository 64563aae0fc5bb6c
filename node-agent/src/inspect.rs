//! `prima-node-agent inspect MODEL.gguf`: what is in a model file, layer by layer.
//!
//! Decides: which part of a model each tensor belongs to (embedding, a layer, the output head, other), and how the sums are shown.
//! Refuses: to read weights, and to guess what the metadata does not say.

use std::collections::BTreeMap;
use std::path::Path;

use comfy_table::{CellAlignment, ContentArrangement, Table, TableComponent, presets};
use prima_crds::v1alpha1::model_profile::{FormatWeights, ModelProfileSpec};
use prima_crds::{error_chain, printable};
use prima_engine::EngineError;
use prima_engine::kernels::IsaLevelError;
use prima_gguf::{Gguf, GgufError, TensorInfo, Value};
use prima_model::Place;
use prima_weights::model_profile;
use serde::Serialize;

/// Who is to read what is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum OutputFormat {
    /// For people: sizes rounded.
    Table,
    /// For programs: the same as integers.
    Yaml,
    /// The same as JSON.
    Json,
}

/// Why a file could not be shown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InspectError {
    /// The header is not that of a model.
    #[error("cannot read the model's header")]
    Header {
        /// What is wrong with it, with file and offset.
        #[from]
        source: GgufError,
    },
    /// The summary could not be written as YAML.
    #[error("cannot write the summary as YAML")]
    Yaml {
        /// What the YAML writer says.
        source: serde_saphyr::SerializeError,
    },
    /// The summary could not be written as JSON.
    #[error("cannot write the summary as JSON")]
    Json {
        /// What the JSON writer says.
        source: serde_json::Error,
    },
    /// `PRIMA_CPU_LEVEL` asks for a level that this processor lacks.
    #[error(transparent)]
    Kernels(#[from] IsaLevelError),
    /// The driver of a GPU fails, or `PRIMA_GPU` is none of its values.
    #[error(transparent)]
    Gpu(#[from] EngineError),
}

/// Reads the header of the GGUF file at `path` (not its weights) and describes it, in lines that end in a newline.
pub fn inspect(path: &Path, format: OutputFormat) -> Result<String, InspectError> {
    let summary = Summary::new(path, &Gguf::open(path)?)?;
    shown(&summary, format, table)
}

/// `summary` for people as `table` has it, or for programs, in lines that end in a newline.
pub(crate) fn shown<S: Serialize>(
    summary: &S,
    format: OutputFormat,
    table: impl FnOnce(&S) -> String,
) -> Result<String, InspectError> {
    match format {
        OutputFormat::Table => Ok(table(summary)),
        OutputFormat::Yaml => {
            serde_saphyr::to_string(summary).map_err(|source| InspectError::Yaml { source })
        }
        OutputFormat::Json => serde_json::to_string_pretty(summary)
            .map(|text| text + "\n")
            .map_err(|source| InspectError::Json { source }),
    }
}

/// Everything that is shown, in the order in which it is shown. Absent: the file does not say.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Summary {
    file: String,
    file_bytes: u64,
    gguf_version: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    architecture: String,
    /// Why prima does not run the model; absent: it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    layer_count: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hidden: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    feed_forward: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    heads: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_heads: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trained_context_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vocabulary_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<Experts>,
    embedding: Part,
    layers: Vec<Layer>,
    output_head: OutputHead,
    other: Part,
    total: Part,
}

/// How many experts layers have, and what a token uses.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Experts {
    per_layer: i32,
    per_token: i32,
    /// Of the matrices in all layers.
    layer_bytes: u64,
    layer_bytes_per_token: u64,
}

impl Experts {
    fn of(model: &ModelProfileSpec) -> Option<Experts> {
        let bytes = |weights: &[FormatWeights]| weights.iter().map(|one| one.bytes as u64).sum();
        (model.experts > 0).then(|| Experts {
            per_layer: model.experts,
            per_token: model.experts_per_token,
            layer_bytes: bytes(&model.layer_weights),
            layer_bytes_per_token: bytes(&model.used_weights()),
        })
    }

    fn sentence(&self) -> String {
        format!(
            "{} experts in a layer, of which a token uses {}: {} of the layers' {}",
            self.per_layer,
            self.per_token,
            bytes(self.layer_bytes_per_token),
            bytes(self.layer_bytes)
        )
    }
}

#[derive(Debug, Serialize)]
struct Layer {
    layer: usize,
    #[serde(flatten)]
    part: Part,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct OutputHead {
    /// Whether the output projection is the embedding's matrix, which is then counted there and not here.
    tied_to_embedding: bool,
    #[serde(flatten)]
    part: Part,
}

/// Sums over the tensors of one part of the model.
#[derive(Debug, Default, Serialize)]
struct Part {
    bytes: u64,
    parameters: u64,
    tensors: u64,
    formats: Vec<FormatShare>,
}

/// What one tensor format contributes to a part.
#[derive(Debug, Serialize)]
struct FormatShare {
    format: &'static str,
    tensors: u64,
    bytes: u64,
}

impl Summary {
    fn new(path: &Path, gguf: &Gguf) -> Result<Summary, GgufError> {
        let metadata = &gguf.metadata;
        let architecture = metadata.require_str("general.architecture")?.to_owned();
        let number = |name: &str| metadata.u64(&format!("{architecture}.{name}"));
        let vocabulary_tokens = match metadata.strings("tokenizer.ggml.tokens")? {
            Some(tokens) => Some(tokens.len() as u64),
            None => number("vocab_size")?,
        };
        // Some architectures store one number of heads per layer: there is no single number to show if they differ.
        let per_model = |name: &str| {
            let key = format!("{architecture}.{name}");
            let Some(Value::Array(_)) = metadata.get(&key) else {
                return number(name);
            };
            let numbers = metadata.i32s(&key).ok().flatten().unwrap_or_default();
            let first = numbers.first().copied();
            let same = first.filter(|first| numbers.iter().all(|number| number == first));
            Ok(same.and_then(|number| u64::try_from(number).ok()))
        };

        let (mut embedding, mut head, mut other, mut total) = (
            Part::default(),
            Part::default(),
            Part::default(),
            Part::default(),
        );
        let mut layers = BTreeMap::<usize, Part>::new();
        for tensor in &gguf.tensors {
            total.add(tensor);
            match Place::of(&tensor.name) {
                Place::Embedding => embedding.add(tensor),
                Place::Layer(layer) => layers.entry(layer).or_default().add(tensor),
                Place::OutputHead => head.add(tensor),
                Place::EveryLayer | Place::Other => other.add(tensor),
            }
        }
        let file = path.display().to_string();
        let profile = model_profile(&file, gguf);
        Ok(Summary {
            file,
            experts: profile.as_ref().ok().and_then(Experts::of),
            refused: profile.err().map(|error| error_chain(&error)),
            file_bytes: gguf.file_len,
            gguf_version: gguf.version,
            name: metadata.str("general.name")?.map(str::to_owned),
            layer_count: number("block_count")?,
            hidden: number("embedding_length")?,
            feed_forward: per_model("feed_forward_length")?,
            heads: per_model("attention.head_count")?,
            kv_heads: per_model("attention.head_count_kv")?,
            trained_context_tokens: number("context_length")?,
            vocabulary_tokens,
            output_head: OutputHead {
                tied_to_embedding: gguf.tensor("output.weight").is_none()
                    && gguf.tensor("token_embd.weight").is_some(),
                part: head,
            },
            architecture,
            embedding,
            layers: layers
                .into_iter()
                .map(|(layer, part)| Layer { layer, part })
                .collect(),
            other,
            total,
        })
    }
}

impl Part {
    fn add(&mut self, tensor: &TensorInfo) {
        self.bytes += tensor.byte_len;
        self.parameters += tensor.weights();
        self.tensors += 1;
        let format = tensor.ggml_type.name();
        match self.formats.iter_mut().find(|share| share.format == format) {
            Some(share) => {
                share.tensors += 1;
                share.bytes += tensor.byte_len;
            }
            None => self.formats.push(FormatShare {
                format,
                tensors: 1,
                bytes: tensor.byte_len,
            }),
        }
        // The format that weighs most comes first.
        self.formats
            .sort_by(|a, b| b.bytes.cmp(&a.bytes).then(a.format.cmp(b.format)));
    }

    fn row(&self, name: String) -> [String; 4] {
        let formats: Vec<String> = self
            .formats
            .iter()
            .map(|share| format!("{} x{}", share.format, share.tensors))
            .collect();
        [
            name,
            bytes(self.bytes),
            count(self.parameters),
            formats.join(", "),
        ]
    }
}

fn table(summary: &Summary) -> String {
    let mut table = Table::new();
    table
        .load_preset(presets::UTF8_HORIZONTAL_ONLY)
        .remove_style(TableComponent::HorizontalLines)
        .remove_style(TableComponent::MiddleIntersections)
        .set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(["part", "size", "parameters", "formats"]);
    table.add_row(summary.embedding.row("embedding".to_owned()));
    for Layer { layer, part } in &summary.layers {
        table.add_row(part.row(format!("layer {layer}")));
    }
    let tied = if summary.output_head.tied_to_embedding {
        "output head (tied to the embedding)"
    } else {
        "output head"
    };
    table.add_row(summary.output_head.part.row(tied.to_owned()));
    if summary.other.tensors > 0 {
        table.add_row(summary.other.row("other".to_owned()));
    }
    table.add_row(summary.total.row("total".to_owned()));
    for column in [1, 2] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    format!("{}\n{}\n", heading(summary), table.trim_fmt())
}

/// The lines above the table: what the file says about the whole model.
fn heading(summary: &Summary) -> String {
    let unnamed = "(unnamed)".to_owned();
    let mut lines = vec![
        format!(
            "{}, architecture {}",
            printable(summary.name.as_ref().unwrap_or(&unnamed)),
            printable(&summary.architecture)
        ),
        format!(
            "{}, {}, GGUF version {}",
            printable(&summary.file),
            bytes(summary.file_bytes),
            summary.gguf_version
        ),
    ];
    let facts: Vec<String> = [
        ("layers", summary.layer_count),
        ("hidden", summary.hidden),
        ("feed forward", summary.feed_forward),
        ("heads", summary.heads),
        ("KV heads", summary.kv_heads),
        ("trained context", summary.trained_context_tokens),
        ("vocabulary", summary.vocabulary_tokens),
    ]
    .into_iter()
    .filter_map(|(name, number)| Some(format!("{name} {}", number?)))
    .collect();
    if !facts.is_empty() {
        lines.push(facts.join(", "));
    }
    if let Some(experts) = &summary.experts {
        lines.push(experts.sentence());
    }
    lines.push(match &summary.refused {
        None => "prima runs it".to_owned(),
        Some(why) => format!("prima does not run it: {}", printable(why)),
    });
    lines.join("\n")
}

/// A size in the largest binary unit that keeps it above 1.
pub(crate) fn bytes(bytes: u64) -> String {
    scaled(
        bytes,
        1024.0,
        &[" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"],
    )
}

/// A number of parameters, as model names give it: 135 M, 8.0 B.
fn count(count: u64) -> String {
    scaled(count, 1000.0, &["", " K", " M", " B", " T", " Q"])
}

fn scaled(number: u64, step: f64, units: &[&str]) -> String {
    let mut value = number as f64;
    let mut unit = 0;
    // Compares with what would be shown as 1024.0: 1023.99 MiB is 1.0 GiB.
    while value >= step - 0.05 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    if unit == 0 {
        format!("{number}{}", units[0])
    } else {
        format!("{value:.1}{}", units[unit])
    }
}

#[cfg(test)]
mod tests {
    use prima_engine::Model;
    use prima_gguf::GgmlType;
    use prima_gguf::writer::GgufWriter;
    use prima_test_models::MadeUpModel;

    use super::*;

    /// Two layers of different formats, with an output head of its own or tied.
    fn model(folder: &Path, tied: bool) -> std::path::PathBuf {
        let mut writer = GgufWriter::new();
        writer
            .metadata("general.architecture", "llama")
            .metadata("general.name", "Tiny\u{1b}[31m Model")
            .metadata("llama.block_count", 2u32)
            .metadata("llama.embedding_length", 256u32)
            .metadata("llama.feed_forward_length", 512u32)
            .metadata("llama.attention.head_count", 4u32)
            .metadata("llama.attention.head_count_kv", vec![2u32, 1])
            .metadata("llama.context_length", 2048u32)
            .metadata(
                "tokenizer.ggml.tokens",
                vec!["a".to_owned(), "b".to_owned(), "c".to_owned()],
            );
        let mut tensors = vec![
            ("token_embd.weight", GgmlType::Q8_0, [256, 3]),
            ("blk.0.attn_q.weight", GgmlType::Q4K, [256, 256]),
            ("blk.0.attn_k.weight", GgmlType::Q4K, [256, 128]),
            ("blk.0.ffn_down.weight", GgmlType::Q6K, [512, 256]),
            ("blk.0.attn_norm.weight", GgmlType::F32, [256, 1]),
            ("blk.1.attn_q.weight", GgmlType::F16, [256, 256]),
            ("rope_freqs.weight", GgmlType::F32, [32, 1]),
            ("output_norm.weight", GgmlType::F32, [256, 1]),
        ];
        if !tied {
            tensors.push(("output.weight", GgmlType::Q6K, [256, 3]));
        }
        for (name, ggml_type, shape) in &tensors {
            writer.tensor(name, *ggml_type, shape);
        }
        let path = folder.join("tiny.gguf");
        let mut data = writer
            .write_header(std::fs::File::create(&path).unwrap())
            .unwrap();
        for (_, ggml_type, [columns, rows]) in &tensors {
            data.tensor(&vec![
                0;
                (columns * rows) as usize / ggml_type.block_len()
                    * ggml_type.block_bytes()
            ])
            .unwrap();
        }
        data.finish().unwrap();
        path
    }

    fn shown(tied: bool, format: OutputFormat) -> String {
        let folder = tempfile::tempdir().unwrap();
        let shown = inspect(&model(folder.path(), tied), format).unwrap();
        shown.replace(&format!("{}/", folder.path().display()), "")
    }

    #[test]
    fn the_table_has_a_row_per_layer() {
        assert_eq!(
            shown(false, OutputFormat::Table),
            include_str!("../tests/golden/inspect_tiny.txt")
        );
    }

    #[test]
    fn the_yaml_has_the_same_sums_as_integers() {
        assert_eq!(
            shown(true, OutputFormat::Yaml),
            include_str!("../tests/golden/inspect_tiny_tied.yaml")
        );
    }

    #[test]
    fn parts_add_up_to_the_total() {
        let folder = tempfile::tempdir().unwrap();
        let path = model(folder.path(), false);
        let gguf = Gguf::open(&path).unwrap();
        let summary = Summary::new(&path, &gguf).unwrap();
        let parts = || {
            let ends = [
                &summary.embedding,
                &summary.output_head.part,
                &summary.other,
            ];
            ends.into_iter()
                .chain(summary.layers.iter().map(|layer| &layer.part))
        };
        assert_eq!(
            parts().map(|part| part.bytes).sum::<u64>(),
            summary.total.bytes
        );
        assert_eq!(
            parts().map(|part| part.parameters).sum::<u64>(),
            summary.total.parameters
        );
        assert_eq!(
            summary.total.bytes,
            gguf.tensors
                .iter()
                .map(|tensor| tensor.byte_len)
                .sum::<u64>()
        );
    }

    #[test]
    fn names_out_of_the_file_cannot_steer_a_terminal() {
        for format in [OutputFormat::Table, OutputFormat::Yaml, OutputFormat::Json] {
            assert!(!shown(true, format).contains('\u{1b}'));
        }
    }

    #[test]
    fn a_file_that_is_no_model_is_named_with_the_place() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "not a model").unwrap();
        let error = inspect(file.path(), OutputFormat::Table).unwrap_err();
        let InspectError::Header { source } = error else {
            panic!("{error}")
        };
        assert!(
            source
                .to_string()
                .contains("at offset 0 expected the magic"),
            "{source}"
        );
    }

    #[test]
    fn a_profile_has_the_heads_of_latent_attention_alone() {
        let folder = tempfile::tempdir().unwrap();
        let heads = |family: &'static str| {
            let path = folder.path().join(family);
            MadeUpModel::of(family).write_for_ring(&path);
            let model = Model::open(&path).unwrap();
            model_profile(family, model.gguf()).unwrap().latent_heads
        };
        assert_eq!((heads("deepseek2"), heads("qwen3")), (4, 0));
    }

    #[test]
    fn what_a_token_uses_of_experts_is_told() {
        let weights = |bytes| FormatWeights {
            format: "Q4_K".to_owned(),
            weights: 2 * bytes,
            bytes,
        };
        let model = ModelProfileSpec {
            layer_weights: vec![weights(17 << 30)],
            expert_weights: vec![weights(16 << 30)],
            experts: 128,
            experts_per_token: 8,
            ..ModelProfileSpec::default()
        };
        assert_eq!(
            Experts::of(&model).unwrap().sentence(),
            "128 experts in a layer, of which a token uses 8: 2.0 GiB of the layers' 17.0 GiB"
        );
        assert!(Experts::of(&ModelProfileSpec::default()).is_none());
    }

    #[test]
    fn sizes_round_to_the_unit_that_people_use() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1024), "1.0 KiB");
        assert_eq!(bytes((1 << 30) - 1), "1.0 GiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!(count(134_515_008), "134.5 M");
        assert_eq!(count(8_030_261_312), "8.0 B");
    }
}
