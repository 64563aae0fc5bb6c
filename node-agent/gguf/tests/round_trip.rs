//! What the writer writes is what the parser reads; and files on disk, read piece by piece.

mod support;

use std::io::Write;

use prima_gguf::writer::{GgufWriter, WriterError};
use prima_gguf::{Array, GgmlType, Gguf, GgufError, MAX_HEADER_LEN, Value};
use proptest::prelude::*;
use support::{RawHeader, promises, small_file};

fn any_value() -> impl Strategy<Value = Value> {
    use prop::collection::vec;
    use prop::num::{f32, f64};
    let array = prop_oneof![
        vec(any::<u8>(), 0..9).prop_map(Array::U8),
        vec(any::<i8>(), 0..9).prop_map(Array::I8),
        vec(any::<u16>(), 0..9).prop_map(Array::U16),
        vec(any::<i16>(), 0..9).prop_map(Array::I16),
        vec(any::<u32>(), 0..9).prop_map(Array::U32),
        vec(any::<i32>(), 0..9).prop_map(Array::I32),
        vec(f32::NORMAL, 0..9).prop_map(Array::F32),
        vec(any::<bool>(), 0..9).prop_map(Array::Bool),
        vec(".*", 0..9).prop_map(|texts| Array::String(texts.iter().collect())),
        vec(any::<u64>(), 0..9).prop_map(Array::U64),
        vec(any::<i64>(), 0..9).prop_map(Array::I64),
        vec(f64::NORMAL, 0..9).prop_map(Array::F64),
    ];
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        f32::NORMAL.prop_map(Value::F32),
        any::<bool>().prop_map(Value::Bool),
        ".*".prop_map(Value::String),
        array.prop_map(Value::Array),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        f64::NORMAL.prop_map(Value::F64),
    ]
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(
        values in prop::collection::vec(any_value(), 0..12),
        tensors in prop::collection::vec((prop::sample::select(GgmlType::ALL), 1u64..4, 1u64..5), 0..6),
        alignment in prop::sample::select(vec![None, Some(8u32), Some(64), Some(4096)]),
    ) {
        let mut writer = GgufWriter::new();
        for (at, value) in values.iter().enumerate() {
            writer.metadata(&format!("key.{at}"), value.clone());
        }
        if let Some(alignment) = alignment {
            writer.metadata("general.alignment", alignment);
        }
        let mut contents = Vec::new();
        for (at, &(ggml_type, blocks, rows)) in tensors.iter().enumerate() {
            writer.tensor(&format!("tensor.{at}"), ggml_type, &[blocks * ggml_type.block_len() as u64, rows]);
            contents.push(vec![at as u8 + 1; (blocks * rows) as usize * ggml_type.block_bytes()]);
        }
        let mut data = writer.write_header(Vec::new()).unwrap();
        for content in &contents {
            data.tensor(content).unwrap();
        }
        let file = data.finish().unwrap();

        let gguf = Gguf::parse("f", &file, file.len() as u64).unwrap();
        promises::check(&gguf);
        prop_assert_eq!(gguf.alignment, u64::from(alignment.unwrap_or(32)));
        prop_assert_eq!(gguf.metadata.iter().len(), values.len() + usize::from(alignment.is_some()));
        for (at, value) in values.iter().enumerate() {
            prop_assert_eq!(gguf.metadata.get(&format!("key.{at}")), Some(value));
        }
        prop_assert_eq!(gguf.tensors.len(), tensors.len());
        for (at, content) in contents.iter().enumerate() {
            let tensor = gguf.tensor(&format!("tensor.{at}")).unwrap();
            prop_assert_eq!(tensor.ggml_type, tensors[at].0);
            let start = tensor.offset as usize;
            prop_assert_eq!(&file[start..start + tensor.byte_len as usize], content.as_slice());
        }
    }
}

#[test]
fn version_2_reads_as_version_3_does() {
    let (mut file, _) = small_file();
    let third = Gguf::parse("f", &file, file.len() as u64).unwrap();
    file[4] = 2;
    let second = Gguf::parse("f", &file, file.len() as u64).unwrap();
    assert_eq!(second.version, 2);
    assert_eq!(
        (second.metadata, second.tensors),
        (third.metadata, third.tensors)
    );
}

#[test]
fn the_writer_refuses_what_no_reader_takes() {
    let refused = |writer: GgufWriter| match writer.write_header(Vec::new()) {
        Err(WriterError::Refused { source }) => source,
        other => panic!("not refused: {other:?}"),
    };
    let mut writer = GgufWriter::new();
    writer.tensor("t", GgmlType::Q4K, &[128, 2]);
    assert!(refused(writer).to_string().contains("a multiple of 256"));
    let mut writer = GgufWriter::new();
    writer
        .tensor("t", GgmlType::F32, &[1])
        .tensor("t", GgmlType::F32, &[1]);
    assert!(matches!(refused(writer), GgufError::DuplicateTensor { .. }));
    let mut writer = GgufWriter::new();
    writer.metadata("general.alignment", 12u32);
    assert!(refused(writer).to_string().contains("found U32 12"));
    let mut writer = GgufWriter::new();
    writer
        .tensor("t", GgmlType::F32, &[1 << 61])
        .tensor("u", GgmlType::F32, &[1 << 61]);
    assert!(matches!(
        refused(writer),
        GgufError::TensorPastEnd { .. } | GgufError::Invalid { .. }
    ));
}

#[test]
fn the_writer_wants_every_tensor_and_its_exact_bytes() {
    let start = || {
        let mut writer = GgufWriter::new();
        writer.tensor("a", GgmlType::F32, &[2]);
        writer.write_header(Vec::new()).unwrap()
    };
    let error = start().tensor(&[0; 7]).unwrap_err();
    assert_eq!(error.to_string(), "tensor \"a\": expected 8 bytes, found 7");
    assert!(
        matches!(start().finish().unwrap_err(), WriterError::MissingTensor { next } if next == "a")
    );
    let mut data = start();
    data.tensor(&[0; 8]).unwrap();
    assert!(matches!(
        data.tensor(&[0; 8]).unwrap_err(),
        WriterError::TooManyTensors { announced: 1 }
    ));
}

#[test]
fn a_header_longer_than_the_first_read_is_read_whole() {
    let tokens: Vec<String> = (0..300_000).map(|token| format!("token {token}")).collect();
    let mut writer = GgufWriter::new();
    writer
        .metadata("tokenizer.ggml.tokens", tokens.clone())
        .metadata("last", 7u32);
    writer.tensor("t", GgmlType::F32, &[2]);
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let mut data = writer.write_header(&mut file).unwrap();
    data.tensor(&[0; 8]).unwrap();
    data.finish().unwrap();

    let gguf = Gguf::open(file.path()).unwrap();
    assert!(
        gguf.data_offset > 4 << 20,
        "the header must not fit the first reads: {}",
        gguf.data_offset
    );
    let read = gguf.metadata.require_strings("tokenizer.ggml.tokens");
    assert!(read.unwrap().iter().eq(&tokens));
    assert_eq!(gguf.metadata.require_u32("last").unwrap(), 7);
    promises::check(&gguf);
}

/// Of zeros that take no room on the disk.
#[test]
fn a_header_larger_than_any_models_is_not_read() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let header = RawHeader::new(0, 1).string("k").u32(9).u32(0);
    file.as_file()
        .write_all(&header.u64(MAX_HEADER_LEN).0)
        .unwrap();
    file.as_file().set_len(2 * MAX_HEADER_LEN).unwrap();
    let error = Gguf::open(file.path()).unwrap_err();
    assert!(
        matches!(error, GgufError::HeaderTooLarge { .. })
            && error.to_string().contains("33554432 bytes"),
        "{error}"
    );
}

#[test]
fn errors_of_files_on_disk_name_their_path() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("absent.gguf");
    let error = Gguf::open(&absent).unwrap_err();
    assert!(
        matches!(error, GgufError::Open { .. }) && error.to_string().contains("absent.gguf"),
        "{error}"
    );

    let cut = folder.path().join("cut.gguf");
    let (file, header_len) = small_file();
    std::fs::File::create(&cut)
        .unwrap()
        .write_all(&file[..header_len - 1])
        .unwrap();
    let error = Gguf::open(&cut).unwrap_err();
    assert!(
        matches!(error, GgufError::EndOfFile { .. }) && error.to_string().contains("cut.gguf"),
        "{error}"
    );
}
