//! Model files that prima must not run, each a header that was altered in one place, and what is said about it. Their weights are a hole.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use prima_gguf::writer::GgufWriter;
use prima_gguf::{GgmlType, Value};

/// Weights begin here in each file: as far as the first read of a header goes, so that none of them comes with it.
pub const WEIGHTS_OFFSET: u32 = 1 << 20;

/// A header, before it is written.
struct Header {
    keys: Vec<(String, Value)>,
    tensors: Vec<(String, GgmlType, Vec<u64>)>,
}

/// One altered header.
pub struct Refused {
    /// Of the file, or of the first of several.
    pub path: PathBuf,
    /// What the refusal must contain.
    pub said: &'static str,
}

type Change = fn(&mut Header);

/// What is changed in llama's header, and what is said about it.
const OF_LLAMA: [(Change, &str); 31] = [
    (
        |header| header.remove("general.architecture"),
        "general.architecture",
    ),
    (
        |header| header.set("general.architecture", "mamba"),
        "general.architecture is \"mamba\", which prima does not run; it runs llama, qwen2",
    ),
    (
        |header| header.format("blk.1.ffn_down.weight", GgmlType::Tq1_0),
        "\"blk.1.ffn_down.weight\": expected F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, an IQ format or MXFP4, found TQ1_0",
    ),
    (
        |header| header.remove("llama.block_count"),
        "llama.block_count",
    ),
    (
        |header| header.set("llama.block_count", 0_u32),
        "\"llama.block_count\": expected a number from 1 to 2097152, found 0",
    ),
    (
        |header| header.remove("llama.embedding_length"),
        "llama.embedding_length",
    ),
    (
        |header| header.set("llama.embedding_length", "wide"),
        "llama.embedding_length",
    ),
    (
        |header| header.remove("llama.attention.head_count"),
        "llama.attention.head_count",
    ),
    (
        |header| {
            header.set("llama.attention.head_count", 7_u32);
            header.set("llama.attention.head_count_kv", 7_u32);
        },
        "\"llama.attention.head_count\": expected a divisor of embedding_length 512, found 7",
    ),
    (
        |header| header.set("llama.attention.head_count_kv", 3_u32),
        "\"llama.attention.head_count_kv\": expected a divisor of the 8 query heads, found 3",
    ),
    (
        |header| header.set("llama.attention.head_count_kv", vec![2, 4]),
        "\"llama.attention.head_count_kv\": expected one number, or the same for each of the 2 layers, found 2 for layer 0 and 4 for layer 1",
    ),
    (
        |header| header.set("llama.feed_forward_length", vec![1024; 3]),
        "\"llama.feed_forward_length\": expected one number, or the same for each of the 2 layers, found 3 numbers",
    ),
    (
        |header| header.remove("llama.feed_forward_length"),
        "llama.feed_forward_length",
    ),
    (
        |header| header.remove("llama.context_length"),
        "llama.context_length",
    ),
    (
        |header| header.remove("llama.attention.layer_norm_rms_epsilon"),
        "llama.attention.layer_norm_rms_epsilon",
    ),
    (
        |header| header.set("llama.attention.value_length", 32_u32),
        "\"llama.attention.value_length\": expected 64, the length of a key, found 32",
    ),
    (
        |header| header.set("llama.rope.dimension_count", 33_u32),
        "\"llama.rope.dimension_count\": expected an even number up to 64, the length of a head, found 33",
    ),
    (
        |header| header.set("llama.rope.freq_base", -1_f32),
        "\"llama.rope.freq_base\": expected a positive number, found -1",
    ),
    (
        |header| header.set("llama.rope.scaling.type", "dynamic"),
        "\"llama.rope.scaling.type\": expected none, linear, yarn or longrope, the kinds that prima computes, found \"dynamic\"",
    ),
    (
        |header| header.set("llama.rope.scaling.type", "yarn"),
        "llama.rope.scaling.factor",
    ),
    (
        |header| header.set("llama.rope.scaling.type", "longrope"),
        "tensor \"rope_factors_short.weight\" is missing; architecture llama needs it",
    ),
    (
        |header| header.set("llama.attention.causal", false),
        "\"llama.attention.causal\": expected true: prima computes models where a token sees those before it only, found false",
    ),
    (
        |header| header.set("llama.expert_count", 8_u32),
        "llama.expert_used_count",
    ),
    (
        |header| {
            header
                .tensors
                .retain(|tensor| tensor.0 != "blk.1.ffn_up.weight")
        },
        "tensor \"blk.1.ffn_up.weight\" is missing; architecture llama needs it",
    ),
    (
        |header| header.shape("blk.0.attn_k.weight", &[512, 256]),
        "tensor \"blk.0.attn_k.weight\": expected shape [512, 128], found [512, 256]",
    ),
    (
        |header| header.shape("output_norm.weight", &[256]),
        "tensor \"output_norm.weight\": expected shape [512], found [256]",
    ),
    (
        |header| header.add("blk.0.attn_sinks.weight", &[8]),
        "tensor \"blk.0.attn_sinks.weight\" is not one that architecture llama computes with here; leaving it out would give wrong answers",
    ),
    (
        |header| header.add("blk.2.attn_q.weight", &[512, 512]),
        "tensor \"blk.2.attn_q.weight\" is not one that architecture llama computes with here",
    ),
    (
        |header| header.set("tokenizer.ggml.model", "t5"),
        "\"tokenizer.ggml.model\": expected \"gpt2\" (byte-pair encoding), \"gemma4\" (the same from characters) or \"llama\" (SentencePiece), found \"t5\"",
    ),
    (
        |header| header.remove("tokenizer.ggml.tokens"),
        "tokenizer.ggml.tokens",
    ),
    (
        |header| {
            header.set("tokenizer.ggml.model", "gpt2");
            header.set("tokenizer.ggml.pre", "next-years");
        },
        "found \"next-years\"",
    ),
];

/// Families whose own parts llama's header lacks.
const OTHER_FAMILIES: [(&str, &str); 8] = [
    (
        "qwen2",
        "tensor \"blk.0.attn_q.bias\" is missing; architecture qwen2 needs it",
    ),
    (
        "qwen3",
        "tensor \"blk.0.attn_q_norm.weight\" is missing; architecture qwen3 needs it",
    ),
    (
        "gemma3",
        "tensor \"blk.0.attn_q_norm.weight\" is missing; architecture gemma3 needs it",
    ),
    (
        "olmo2",
        "tensor \"blk.0.attn_q_norm.weight\" is missing; architecture olmo2 needs it",
    ),
    ("qwen3moe", "qwen3moe.expert_count"),
    ("gpt-oss", "gpt-oss.expert_count"),
    ("deepseek2", "deepseek2.attention.kv_lora_rank"),
    (
        "glm4",
        "tensor \"blk.0.post_attention_norm.weight\" is missing; architecture glm4 needs it",
    ),
];

/// Writes all of them into `folder`.
pub fn write(folder: &Path) -> Vec<Refused> {
    let mut refused = Vec::new();
    let mut add = |name: String, header: Header, said| {
        let path = folder.join(name);
        header.write(&path);
        refused.push(Refused { path, said });
    };
    for (number, (change, said)) in OF_LLAMA.into_iter().enumerate() {
        let mut header = Header::llama();
        change(&mut header);
        add(format!("altered-{number}.gguf"), header, said);
    }
    for (family, said) in OTHER_FAMILIES {
        add(
            format!("{family}.gguf"),
            Header::llama().named(family),
            said,
        );
    }
    let part = |number: u16, tensors: i32| {
        let mut header = Header::llama();
        header.set("split.no", Value::U16(number));
        header.set("split.count", Value::U16(2));
        header.set("split.tensors.count", tensors);
        header
    };
    add(
        "alone-00001-of-00002.gguf".to_owned(),
        part(0, 40),
        "alone-00002-of-00002.gguf",
    );
    add(
        "mixed-00001-of-00002.gguf".to_owned(),
        part(0, 40),
        "mixed-00002-of-00002.gguf: expected part 2 of 2, with split.no = 1, found 0",
    );
    part(0, 40).write(&folder.join("mixed-00002-of-00002.gguf"));
    add(
        "other-00001-of-00002.gguf".to_owned(),
        part(0, 40),
        "other-00002-of-00002.gguf: expected tensors that no other part has, found \"blk.0.attn_k.weight\"",
    );
    part(1, 40).write(&folder.join("other-00002-of-00002.gguf"));
    let page = folder.join("page.gguf");
    fs::write(&page, "<!doctype html>").expect("a file");
    refused.push(Refused {
        path: page,
        said: "expected the magic \"GGUF\", found \"<!do\"",
    });
    refused
}

impl Header {
    /// Of a model of two layers that prima runs.
    fn llama() -> Header {
        let mut header = Header {
            keys: Vec::new(),
            tensors: Vec::new(),
        };
        header.set("general.architecture", "llama");
        header.set("general.alignment", WEIGHTS_OFFSET);
        for (key, number) in [
            ("block_count", 2_u32),
            ("embedding_length", 512),
            ("feed_forward_length", 1024),
            ("context_length", 2048),
            ("attention.head_count", 8),
            ("attention.head_count_kv", 2),
        ] {
            header.set(&format!("llama.{key}"), number);
        }
        header.set("llama.attention.layer_norm_rms_epsilon", 1e-5_f32);
        let bytes = (0..=255).map(|byte: u8| format!("<0x{byte:02X}>"));
        let tokens = ["<unk>", "<s>", "</s>"].map(str::to_owned);
        let tokens: Vec<String> = tokens.into_iter().chain(bytes).collect();
        let types = [[2, 3, 3].as_slice(), &[6; 256]].concat();
        header.set("tokenizer.ggml.model", "llama");
        header.set("tokenizer.ggml.scores", vec![0_f32; tokens.len()]);
        header.set("tokenizer.ggml.token_type", types);
        header.add("token_embd.weight", &[512, tokens.len() as u64]);
        header.set("tokenizer.ggml.tokens", tokens);
        for layer in 0..2 {
            for (name, shape) in [
                ("attn_norm", &[512][..]),
                ("attn_q", &[512, 512]),
                ("attn_k", &[512, 128]),
                ("attn_v", &[512, 128]),
                ("attn_output", &[512, 512]),
                ("ffn_norm", &[512]),
                ("ffn_gate", &[512, 1024]),
                ("ffn_up", &[512, 1024]),
                ("ffn_down", &[1024, 512]),
            ] {
                header.add(&format!("blk.{layer}.{name}.weight"), shape);
            }
        }
        header.add("output_norm.weight", &[512]);
        header
    }

    /// The same, said to be of another family.
    fn named(mut self, family: &str) -> Header {
        for (key, _) in &mut self.keys {
            if let Some(rest) = key.strip_prefix("llama.") {
                *key = format!("{family}.{rest}");
            }
        }
        self.set("general.architecture", family);
        self
    }

    fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.remove(key);
        self.keys.push((key.to_owned(), value.into()));
    }

    fn remove(&mut self, key: &str) {
        self.keys.retain(|(name, _)| name != key);
    }

    fn add(&mut self, tensor: &str, shape: &[u64]) {
        let tensor = (tensor.to_owned(), GgmlType::F32, shape.to_vec());
        self.tensors.push(tensor);
    }

    fn shape(&mut self, tensor: &str, shape: &[u64]) {
        self.tensors.retain(|(name, ..)| name != tensor);
        self.add(tensor, shape);
    }

    fn format(&mut self, tensor: &str, format: GgmlType) {
        let changed = self.tensors.iter_mut().filter(|(name, ..)| name == tensor);
        changed.for_each(|(_, found, _)| *found = format);
    }

    fn write(&self, path: &Path) {
        let mut writer = GgufWriter::new();
        for (key, value) in &self.keys {
            writer.metadata(key, value.clone());
        }
        for (name, format, shape) in &self.tensors {
            writer.tensor(name, *format, shape);
        }
        let mut file = File::create(path).expect("a file");
        writer.write_header(&mut file).expect("a header");
        let weights: u64 = self
            .tensors
            .iter()
            .map(|(_, _, shape)| 4 * shape.iter().product::<u64>())
            .sum();
        let header = file.metadata().expect("a length").len();
        // Between tensors there may be padding.
        let padding = u64::from(WEIGHTS_OFFSET) * self.tensors.len() as u64;
        file.set_len(header + weights + padding)
            .expect("a hole for the weights");
    }
}
