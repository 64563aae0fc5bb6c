//! Headers made to break a reader: each is refused, and the message says where, what was expected and what was found.

mod support;

use prima_gguf::{Gguf, GgufError};
use proptest::prelude::*;
use support::{RawHeader, promises, small_file};

/// What is wrong, the bytes, and what the message must say.
struct Case {
    name: &'static str,
    bytes: Vec<u8>,
    offset: u64,
    expected: &'static str,
    found: &'static str,
}

fn case(
    name: &'static str,
    header: RawHeader,
    offset: u64,
    expected: &'static str,
    found: &'static str,
) -> Case {
    Case {
        name,
        bytes: header.0,
        offset,
        expected,
        found,
    }
}

/// A header with one pair `k`, whose type and value follow; its value begins at offset 37.
fn pair(value_type: u32) -> RawHeader {
    RawHeader::new(0, 1).string("k").u32(value_type)
}

/// A header with one tensor `t`; 57 bytes with one dimension, so that data begins at 64.
fn tensor(shape: &[u64], type_id: u32, offset: u64) -> RawHeader {
    let header = RawHeader::new(1, 0).tensor("t", shape, type_id, offset);
    let padding = header.0.len().next_multiple_of(32) - header.0.len();
    header.zeros(padding)
}

fn alignment(alignment: u32) -> RawHeader {
    RawHeader::new(0, 1)
        .string("general.alignment")
        .u32(4)
        .u32(alignment)
        .zeros(64)
}

fn cases() -> Vec<Case> {
    let magic = |version: [u8; 4]| RawHeader(b"GGUF".to_vec()).bytes(&version).u64(0).u64(0);
    vec![
        case(
            "empty",
            RawHeader(vec![]),
            0,
            "the magic \"GGUF\"",
            "end of the file after 0 bytes",
        ),
        case(
            "an older format",
            RawHeader(b"ggjt\x01\0\0\0".to_vec()),
            0,
            "the magic \"GGUF\"",
            "found \"ggjt\"",
        ),
        case(
            "not text at all",
            RawHeader(vec![0x1b, 0xff, 0, 1]),
            0,
            "the magic",
            r#"found "\x1b\xff\x00\x01""#,
        ),
        case(
            "big-endian",
            magic([0, 0, 0, 3]),
            4,
            "little-endian",
            "version 3 in big-endian",
        ),
        case(
            "version 1",
            magic([1, 0, 0, 0]),
            4,
            "version 2 or 3",
            "version 1",
        ),
        case(
            "version 0",
            magic([0, 0, 0, 0]),
            4,
            "version 2 or 3",
            "version 0",
        ),
        case(
            "version 4",
            magic([4, 0, 0, 0]),
            4,
            "version 2 or 3",
            "version 4",
        ),
        case(
            "all tensors there are",
            RawHeader::new(u64::MAX, 0),
            8,
            "at most 0",
            "18446744073709551615",
        ),
        case(
            "all pairs there are",
            RawHeader::new(0, u64::MAX),
            16,
            "at most 0",
            "18446744073709551615",
        ),
        case(
            "one pair too many",
            RawHeader::new(0, 2).zeros(27),
            16,
            "at most 1 (",
            "found 2",
        ),
        case(
            "one tensor too many",
            RawHeader::new(2, 0).zeros(57),
            8,
            "at most 1 (",
            "found 2",
        ),
        case(
            "more pairs than any model has",
            RawHeader::new(0, (1 << 16) + 1).zeros(14 * ((1 << 16) + 1)),
            16,
            "at most 65536",
            "found 65537",
        ),
        case(
            "more tensors than any model has",
            RawHeader::new((1 << 17) + 1, 0).zeros(33 * ((1 << 17) + 1)),
            8,
            "at most 131072",
            "found 131073",
        ),
        case(
            "a key of 64 KiB",
            RawHeader::new(0, 1).u64(65536).zeros(99),
            24,
            "at most 65535 bytes",
            "found 65536",
        ),
        case(
            "an empty key",
            RawHeader::new(0, 1).u64(0).u32(4).u32(0),
            24,
            "at least 1 byte",
            "empty key",
        ),
        case(
            "a key past the end",
            RawHeader::new(0, 1).u64(7).zeros(6),
            32,
            "7 bytes of the key",
            "after 38 bytes",
        ),
        case(
            "a key in Latin-1",
            RawHeader::new(0, 1).string(b"na\xefve").u32(0).zeros(9),
            34,
            "UTF-8",
            r#"0xef in "na\xefve""#,
        ),
        case(
            "type 13",
            pair(13).zeros(8),
            33,
            "a type from 0 to 12",
            "found 13",
        ),
        case(
            "bool 2",
            pair(7).bytes(&[2]),
            37,
            "a bool of 0 or 1",
            "found 2",
        ),
        case(
            "a cut value",
            pair(12).zeros(7),
            37,
            "the value of metadata key \"k\"",
            "after 44 bytes",
        ),
        case(
            "an endless string",
            pair(8).u64(u64::MAX),
            45,
            "18446744073709551615 bytes of the value",
            "after 45 bytes",
        ),
        case(
            "a string past the end",
            pair(8).u64(2).bytes(b"a"),
            45,
            "2 bytes of the value",
            "after 46 bytes",
        ),
        case(
            "a string in Latin-1",
            pair(8).string([0xe9]),
            45,
            "UTF-8",
            "0xe9",
        ),
        case(
            "arrays in an array",
            pair(9).u32(9).u64(0),
            37,
            "no array inside an array",
            "type 9",
        ),
        case(
            "array of type 99",
            pair(9).u32(99).u64(0),
            37,
            "a type from 0 to 12",
            "found 99",
        ),
        case(
            "2^61 numbers",
            pair(9).u32(12).u64(1 << 61),
            41,
            "at most 0",
            "2305843009213693952",
        ),
        case(
            "5 numbers in 19 bytes",
            pair(9).u32(4).u64(5).zeros(19),
            41,
            "at most 4",
            "found 5",
        ),
        case(
            "3 strings in 23 bytes",
            pair(9).u32(8).u64(3).zeros(23),
            41,
            "at most 2",
            "found 3",
        ),
        case(
            "an array with bool 3",
            pair(9).u32(7).u64(2).bytes(&[1, 3]),
            50,
            "0 or 1",
            "found 3",
        ),
        case(
            "alignment 0",
            alignment(0),
            49,
            "a power of two from 8 to 1048576",
            "U32 0",
        ),
        case(
            "alignment 4",
            alignment(4),
            49,
            "a power of two from 8",
            "U32 4",
        ),
        case(
            "alignment 24",
            alignment(24),
            49,
            "a power of two",
            "U32 24",
        ),
        case(
            "alignment 2 GiB",
            alignment(1 << 31),
            49,
            "to 1048576",
            "U32 2147483648",
        ),
        case(
            "alignment as text",
            RawHeader::new(0, 1)
                .string("general.alignment")
                .u32(8)
                .string("32")
                .zeros(64),
            49,
            "a power of two",
            "string \"32\"",
        ),
        case(
            "a key given twice",
            RawHeader::new(0, 2)
                .string("k")
                .u32(0)
                .bytes(&[1])
                .string("k")
                .u32(0)
                .bytes(&[1]),
            38,
            "a metadata key of its own",
            "\"k\" again, first given at offset 24",
        ),
        case(
            "a name of 65 bytes",
            RawHeader::new(1, 0).string([b'x'; 65]).zeros(64),
            24,
            "at most 64 bytes",
            "found 65",
        ),
        case(
            "an empty name",
            RawHeader::new(1, 0).tensor("", &[1], 0, 0).zeros(64),
            24,
            "at least 1 byte",
            "empty name",
        ),
        case(
            "no dimension",
            tensor(&[], 0, 0).zeros(64),
            33,
            "1 to 4 dimensions",
            "found 0",
        ),
        case(
            "five dimensions",
            tensor(&[1; 5], 0, 0).zeros(64),
            33,
            "1 to 4 dimensions",
            "found 5",
        ),
        case(
            "a dimension of 0",
            tensor(&[4, 0], 0, 0).zeros(64),
            33,
            "at least 1",
            "[4, 0]",
        ),
        case(
            "half a block",
            tensor(&[16], 2, 0).zeros(64),
            33,
            "a multiple of 32, the block of Q4_0",
            "16 in [16]",
        ),
        case(
            "2^66 weights",
            tensor(&[1 << 33, 1 << 33], 0, 0),
            33,
            "fewer than 2^64",
            "[8589934592, 8589934592]",
        ),
        case(
            "2^64 bytes",
            tensor(&[1 << 62], 0, 0),
            33,
            "fewer than 2^64",
            "[4611686018427387904]",
        ),
        case(
            "a removed type",
            tensor(&[32], 31, 0).zeros(64),
            45,
            "a type in use",
            "31, which ggml removed",
        ),
        case(
            "an unknown type",
            tensor(&[32], 43, 0).zeros(64),
            45,
            "a ggml type of 0 to 42",
            "found 43",
        ),
        case(
            "type -1",
            tensor(&[32], u32::MAX, 0).zeros(64),
            45,
            "a ggml type of 0 to 42",
            "4294967295",
        ),
        case(
            "data off the alignment",
            tensor(&[1], 0, 8).zeros(64),
            49,
            "a multiple of the alignment 32",
            "found 8",
        ),
        case(
            "data cut off",
            tensor(&[8], 0, 0).zeros(31),
            64,
            "inside the file of 95 bytes",
            "1 bytes past the end",
        ),
        case(
            "data behind the end",
            tensor(&[8], 0, 1 << 40).zeros(32),
            1099511627840,
            "inside the file of 96",
            "past the end",
        ),
        case(
            "data at the end of u64",
            tensor(&[8], 0, !31),
            u64::MAX,
            "inside the file of 64",
            "past the end",
        ),
        case(
            "a name given twice",
            RawHeader::new(2, 0)
                .tensor("t", &[1], 0, 0)
                .tensor("t", &[1], 0, 32)
                .zeros(99),
            57,
            "a tensor name of its own",
            "\"t\" again, first given at offset 24",
        ),
        case(
            "two tensors on the same bytes",
            RawHeader::new(2, 0)
                .tensor("t", &[9], 0, 0)
                .tensor("u", &[1], 0, 32)
                .zeros(99),
            128,
            "behind tensor \"t\", which ends at 132",
            "both on the same bytes",
        ),
        case(
            "a cut index",
            RawHeader::new(1, 0).tensor("t", &[1, 1], 0, 0).cut(3),
            57,
            "the data offset of tensor \"t\"",
            "after 62 bytes",
        ),
    ]
}

impl RawHeader {
    fn cut(mut self, count: usize) -> Self {
        self.0.truncate(self.0.len() - count);
        self
    }
}

#[test]
fn each_is_refused_with_file_offset_expected_and_found() {
    for Case {
        name,
        bytes,
        offset,
        expected,
        found,
    } in cases()
    {
        let error = Gguf::parse("models/x.gguf", &bytes, bytes.len() as u64).expect_err(name);
        assert!(
            !matches!(error, GgufError::NeedMoreBytes { .. }),
            "{name}: all bytes are there: {error}"
        );
        let message = error.to_string();
        assert!(
            message.starts_with("models/x.gguf: "),
            "{name}: names no file: {message}"
        );
        let place = format!("offset {offset}");
        let said = message
            .match_indices(&place)
            .any(|(at, _)| !message[at + place.len()..].starts_with(|c: char| c.is_ascii_digit()));
        assert!(said, "{name}: expected {place:?} in: {message}");
        let (_, after) = message
            .split_once("expected ")
            .unwrap_or_else(|| panic!("{name}: expects nothing: {message}"));
        assert!(
            after.contains(expected),
            "{name}: expected {expected:?} in: {message}"
        );
        let (_, after) = after
            .split_once("found ")
            .unwrap_or_else(|| panic!("{name}: found nothing: {message}"));
        assert!(
            format!("found {after}").contains(found),
            "{name}: expected {found:?} in: {message}"
        );
    }
}

#[test]
fn messages_stay_short_and_printable_whatever_the_names() {
    let long = "\u{1b}[2J".repeat(10_000);
    let header = RawHeader::new(0, 1).string(&long).u32(7).bytes(&[9]);
    let message = Gguf::parse("f", &header.0, header.0.len() as u64)
        .unwrap_err()
        .to_string();
    assert!(
        message.len() < 1000 && !message.contains('\u{1b}'),
        "{message}"
    );
}

#[test]
fn a_prefix_asks_for_more_until_the_header_is_whole() {
    let (file, header_len) = small_file();
    let whole = Gguf::parse("f", &file, file.len() as u64).unwrap();
    for cut in 0..file.len() {
        match Gguf::parse("f", &file[..cut], file.len() as u64) {
            Ok(gguf) => assert!(
                cut >= header_len && gguf == whole,
                "a header out of {cut} of {header_len} bytes"
            ),
            Err(GgufError::NeedMoreBytes { have, needed, .. }) => {
                assert!(cut < header_len && have == cut as u64);
                assert!(
                    needed > have && needed <= header_len as u64,
                    "{needed} bytes asked for, {header_len} needed"
                );
            }
            Err(other) => panic!("prefix of {cut} bytes: {other}"),
        }
    }
}

#[test]
fn a_file_cut_off_anywhere_is_refused_for_what_it_lacks() {
    let (file, header_len) = small_file();
    let whole = Gguf::parse("f", &file, file.len() as u64).unwrap();
    let last = whole.tensors.last().unwrap();
    let data_end = (last.offset + last.byte_len) as usize;
    for cut in 0..file.len() {
        match Gguf::parse("f", &file[..cut], cut as u64) {
            Ok(_) => assert!(
                cut >= data_end,
                "nothing was missed in {cut} of {data_end} bytes"
            ),
            Err(GgufError::TensorPastEnd { .. }) => {
                assert!((header_len..data_end).contains(&cut), "at {cut}")
            }
            // A count that the rest of the file cannot hold is noticed before the end is met.
            Err(GgufError::EndOfFile { .. } | GgufError::Invalid { .. }) => {
                assert!(cut < header_len, "at {cut}")
            }
            Err(other) => panic!("file cut at {cut}: {other}"),
        }
    }
}

#[test]
fn every_bit_flip_is_refused_or_keeps_the_promises() {
    let (file, header_len) = small_file();
    let mut refused = 0;
    for bit in 0..header_len * 8 {
        let mut flipped = file.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        match Gguf::parse("f", &flipped, flipped.len() as u64) {
            Ok(gguf) => promises::check(&gguf),
            Err(_) => refused += 1,
        }
    }
    // Flips inside names, texts and numbers give other, valid files; those in lengths, types and counts must not.
    assert!(
        refused > header_len * 2,
        "only {refused} of {} flips were refused",
        header_len * 8
    );
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), more in 0u64..2000) {
        // Behind a good start, so that most runs get past the first checks.
        let counts = RawHeader::new(bytes.len() as u64 % 3, bytes.first().map_or(0, |&byte| byte as u64 % 4));
        for header in [bytes.clone(), counts.bytes(&bytes).0] {
            if let Ok(gguf) = Gguf::parse("f", &header, header.len() as u64 + more) {
                promises::check(&gguf);
            }
        }
    }

    #[test]
    fn numbers_overwritten_anywhere_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![
            any::<u64>(), 0u64..70, Just(u64::MAX), (0u32..64).prop_map(|shift| 1 << shift),
        ], any::<bool>()), 1..4),
    ) {
        let (mut file, header_len) = small_file();
        for (at, number, wide) in edits {
            let at = at.index(header_len);
            let bytes = number.to_le_bytes();
            let len = if wide { 8 } else { 4 };
            file[at..at + len].copy_from_slice(&bytes[..len]);
        }
        if let Ok(gguf) = Gguf::parse("f", &file, file.len() as u64) {
            promises::check(&gguf);
        }
    }
}
