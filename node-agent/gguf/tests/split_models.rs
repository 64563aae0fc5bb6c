//! Models in several files: joined to the same tensors, and refused when a file is another part or of another model.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

use std::fs;
use std::path::{Path, PathBuf};

use prima_gguf::writer::{GgufWriter, split};
use prima_gguf::{Array, GgmlType, Gguf, GgufError, Value, model_bytes};

/// A file with tensors of different lengths; the bytes of each are its number.
fn model(tensors: u8) -> Vec<u8> {
    let mut writer = GgufWriter::new();
    writer.metadata("general.architecture", "llama");
    for number in 0..tensors {
        let shape = [u64::from(number) + 1, 3];
        writer.tensor(&format!("blk.{number}.w"), GgmlType::F32, &shape);
    }
    let mut data = writer.write_header(Vec::new()).unwrap();
    for number in 0..tensors {
        let bytes = (usize::from(number) + 1) * 12;
        data.tensor(&vec![number; bytes]).unwrap();
    }
    data.finish().unwrap()
}

/// Writes the parts of a model with these files into a folder; returns the path of the first.
fn write(folder: &Path, parts: &[Vec<u8>]) -> PathBuf {
    let name = |number| folder.join(format!("m-{number:05}-of-{:05}.gguf", parts.len()));
    for (number, part) in (1..).zip(parts) {
        fs::write(name(number), part).unwrap();
    }
    name(1)
}

#[test]
fn a_split_model_has_the_tensors_of_the_whole() {
    let file = model(6);
    let whole = Gguf::parse("whole", &file, file.len() as u64).unwrap();
    for counts in [&[6][..], &[2, 4], &[0, 1, 5], &[1, 1, 1, 1, 1, 1]] {
        let folder = tempfile::tempdir().unwrap();
        let parts = split(&file, counts).unwrap();
        let path = write(folder.path(), &parts);
        let joined = Gguf::open(&path).unwrap();
        assert_eq!(
            joined.metadata.str("general.architecture").unwrap(),
            Some("llama")
        );
        assert_eq!(joined.parts.len(), counts.len());
        let bytes: usize = parts.iter().map(Vec::len).sum();
        assert_eq!(joined.file_len, bytes as u64);
        assert_eq!(model_bytes(&path).unwrap(), bytes as u64);

        assert_eq!(joined.tensors.len(), whole.tensors.len());
        for (number, tensor) in whole.tensors.iter().enumerate() {
            let found = joined.tensor(&tensor.name).unwrap();
            assert_eq!(
                (found.ggml_type, &found.shape),
                (tensor.ggml_type, &tensor.shape)
            );
            let range = found.offset..found.offset + found.byte_len;
            let inside: Vec<Vec<u8>> = joined
                .parts
                .iter()
                .zip(&parts)
                .map(|(part, bytes)| (part.own(&range), bytes))
                .filter(|(own, _)| !own.is_empty())
                .map(|(own, bytes)| bytes[own.start as usize..own.end as usize].to_vec())
                .collect();
            assert_eq!(inside, [vec![number as u8; tensor.byte_len as usize]]);
        }
        for pair in joined.parts.windows(2) {
            assert!(pair[0].start + pair[0].len <= pair[1].start);
            assert_eq!(
                pair[1].start % 65536,
                0,
                "pages of the files are pages of the whole"
            );
        }
    }
}

#[test]
fn a_part_that_does_not_belong_is_named() {
    let file = model(6);
    let good = split(&file, &[1, 2, 3]).unwrap();
    let other = split(&model(5), &[1, 2, 2]).unwrap();
    let same_names = split(&file, &[3, 1, 2]).unwrap();
    let with = |at: usize, part: &[u8]| {
        let mut parts = good.clone();
        parts[at] = part.to_vec();
        parts
    };
    for (parts, expected) in [
        (
            with(1, &good[2]),
            "m-00002-of-00003.gguf: expected part 2 of 3, with split.no = 1, found 2",
        ),
        (
            with(2, &split(&file, &[1, 2, 1, 2]).unwrap()[2]),
            "m-00003-of-00003.gguf: expected part 3 of 3, with split.count = 3, found 4",
        ),
        (
            with(1, &file),
            "m-00002-of-00003.gguf: expected part 2 of 3, with split.no = 1, found no such key",
        ),
        (
            with(2, &other[2]),
            "m-00001-of-00003.gguf: expected 6 tensors in all parts together (split.tensors.count), found 5: a part is of another model",
        ),
        (
            vec![
                same_names[0].clone(),
                good[1].clone(),
                same_names[2].clone(),
            ],
            "expected 6 tensors in all parts",
        ),
        (
            vec![
                same_names[0].clone(),
                same_names[1].clone(),
                split(&file, &[1, 3, 2]).unwrap()[1].clone(),
            ],
            "with split.no = 2, found 1",
        ),
        (
            vec![
                good[0].clone(),
                good[1].clone(),
                split(&file, &[2, 1, 3]).unwrap()[0].clone(),
            ],
            "with split.no = 2, found 0",
        ),
        (
            with(0, &good[1]),
            "m-00001-of-00003.gguf: expected the first of 3 parts, with which a model begins, found part 2",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let error = Gguf::open(&write(folder.path(), &parts))
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn tensors_that_two_parts_have_are_refused() {
    let file = model(6);
    let (good, shifted) = (
        split(&file, &[2, 2, 2]).unwrap(),
        split(&file, &[1, 2, 3]).unwrap(),
    );
    let folder = tempfile::tempdir().unwrap();
    let path = write(
        folder.path(),
        &[good[0].clone(), shifted[1].clone(), good[2].clone()],
    );
    let error = Gguf::open(&path).unwrap_err().to_string();
    assert!(
        error.contains(
            "m-00002-of-00003.gguf: expected tensors that no other part has, found \"blk.1.w\""
        ) && error.contains("m-00001-of-00003.gguf has, too"),
        "{error}"
    );
}

#[test]
fn a_part_that_is_missing_or_misnamed_is_named() {
    let parts = split(&model(3), &[0, 3]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), &parts);
    let second = folder.path().join("m-00002-of-00002.gguf");
    fs::remove_file(&second).unwrap();
    let error = Gguf::open(&path).unwrap_err().to_string();
    assert!(
        error.contains("cannot open") && error.contains("m-00002-of-00002.gguf"),
        "{error}"
    );
    let error = model_bytes(&path).unwrap_err().to_string();
    assert!(error.contains("m-00002-of-00002.gguf"), "{error}");

    let renamed = folder.path().join("model.gguf");
    fs::rename(&path, &renamed).unwrap();
    let error = Gguf::open(&renamed).unwrap_err().to_string();
    assert!(
        error.contains("expected a name that ends in -00001-of-00002.gguf"),
        "{error}"
    );
}

#[test]
fn more_parts_than_any_model_has_are_refused() {
    let mut writer = GgufWriter::new();
    writer
        .metadata("split.no", Value::U16(0))
        .metadata("split.count", Value::U16(u16::MAX));
    let file = writer.write_header(Vec::new()).unwrap().finish().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m-00001-of-65535.gguf");
    fs::write(&path, file).unwrap();
    let error = Gguf::open(&path).unwrap_err().to_string();
    assert!(
        error.contains("expected at most 1024 parts, found split.count = 65535"),
        "{error}"
    );
}

/// Each is below the limit.
#[test]
fn headers_that_are_too_large_together_are_refused() {
    let parts: Vec<Vec<u8>> = (0..2)
        .map(|number| {
            let mut writer = GgufWriter::new();
            writer
                .metadata("split.no", Value::U16(number))
                .metadata("split.count", Value::U16(2))
                .metadata("much", Array::U8(vec![0; 17 << 20]));
            writer.write_header(Vec::new()).unwrap().finish().unwrap()
        })
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), &parts);
    let error = Gguf::open(&path).unwrap_err();
    assert!(
        matches!(error, GgufError::HeaderTooLarge { .. })
            && error.to_string().contains("m-00002-of-00002.gguf"),
        "{error}"
    );
}
