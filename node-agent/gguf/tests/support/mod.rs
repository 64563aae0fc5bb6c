//! What the suites of this package share: a small valid file, raw headers to break, and the promises of a parsed header.

#![allow(dead_code, reason = "every suite uses its own part")]
#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot make its file must fail"
)]

pub mod promises;

use prima_gguf::writer::GgufWriter;
use prima_gguf::{Array, GgmlType, Value};

/// A small file with every kind of value and three tensors, and the length of its header without padding.
pub fn small_file() -> (Vec<u8>, usize) {
    let mut writer = GgufWriter::new();
    writer
        .metadata("general.architecture", "llama")
        .metadata("general.alignment", 32u32)
        .metadata("llama.block_count", 1u32)
        .metadata("llama.rope.freq_base", 10000.0f32)
        .metadata("tokenizer.ggml.add_bos_token", true)
        .metadata(
            "tokenizer.ggml.tokens",
            vec!["<s>".to_owned(), "é".to_owned(), String::new()],
        )
        .metadata("tokenizer.ggml.scores", vec![0.0f32, -1.5, 2.0])
        .metadata("tokenizer.ggml.token_type", vec![3i32, 1, 1])
        .metadata("flags", vec![true, false])
        .metadata("u8", Value::U8(200))
        .metadata("i64", Value::I64(-5))
        .metadata("f64", Value::F64(0.25))
        .metadata("u16s", Array::U16(vec![1, 2, 3]))
        .tensor("token_embd.weight", GgmlType::F16, &[4, 3])
        .tensor("blk.0.attn_q.weight", GgmlType::Q4_0, &[32, 2])
        .tensor("output_norm.weight", GgmlType::F32, &[5]);
    let mut data = writer.write_header(Vec::new()).unwrap();
    data.tensor(&[1; 24]).unwrap();
    data.tensor(&[2; 36]).unwrap();
    data.tensor(&[3; 20]).unwrap();
    let file = data.finish().unwrap();
    // The last entry of the tensor index: one dimension, a type, an offset.
    let name = b"output_norm.weight";
    let at = file
        .windows(name.len())
        .position(|window| window == name)
        .unwrap();
    (file, at + name.len() + 4 + 8 + 4 + 8)
}

/// A header put together field by field, with nothing checked.
#[derive(Clone)]
pub struct RawHeader(pub Vec<u8>);

impl RawHeader {
    /// Magic, version 3, counts: 24 bytes.
    pub fn new(tensors: u64, pairs: u64) -> Self {
        RawHeader(b"GGUF".to_vec()).u32(3).u64(tensors).u64(pairs)
    }

    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    pub fn u32(self, number: u32) -> Self {
        self.bytes(&number.to_le_bytes())
    }

    pub fn u64(self, number: u64) -> Self {
        self.bytes(&number.to_le_bytes())
    }

    pub fn string(self, text: impl AsRef<[u8]>) -> Self {
        self.u64(text.as_ref().len() as u64).bytes(text.as_ref())
    }

    /// One entry of the tensor index.
    pub fn tensor(self, name: &str, shape: &[u64], type_id: u32, offset: u64) -> Self {
        let start = self.string(name).u32(shape.len() as u32);
        shape
            .iter()
            .fold(start, |header, &dimension| header.u64(dimension))
            .u32(type_id)
            .u64(offset)
    }

    pub fn zeros(self, count: usize) -> Self {
        self.bytes(&vec![0; count])
    }
}
