//! What a header may cost in memory: at most six times its own length, whatever its counts and lengths claim.
//!
//! One test only: the counter sees every thread of the process.

mod support;

use peak_alloc::PeakAlloc;
use prima_gguf::Gguf;
use support::{RawHeader, small_file};

#[global_allocator]
static ALLOCATIONS: PeakAlloc = PeakAlloc;

/// For the name of the file, error messages and the rounding of small vectors.
const FIXED: usize = 4096;

/// Parses, and returns the peak of bytes allocated by that.
fn peak_of(header: &[u8], file_len: u64) -> usize {
    ALLOCATIONS.reset_peak_usage();
    let before = ALLOCATIONS.current_usage();
    drop(Gguf::parse("f", header, file_len));
    ALLOCATIONS.peak_usage() - before
}

fn assert_bounded(what: &str, header: &[u8], file_len: u64) {
    let peak = peak_of(header, file_len);
    let bound = 6 * header.len() + FIXED;
    assert!(
        peak <= bound,
        "{what}: {peak} bytes allocated for a header of {} bytes, at most {bound} allowed",
        header.len()
    );
}

#[test]
fn memory_is_bounded_by_the_bytes_given() {
    // The counter counts: a vector of 1 MiB of text costs at least that.
    let text = RawHeader::new(0, 1)
        .string("k")
        .u32(8)
        .string(vec![b'x'; 1 << 20]);
    assert!(peak_of(&text.0, text.0.len() as u64) >= 1 << 20);

    // Claims that only the length of the file supports, and only a few bytes at hand.
    let huge = u64::MAX / 2;
    assert_bounded("2^40 tensors", &RawHeader::new(1 << 40, 0).0, huge);
    assert_bounded("2^24 tensors", &RawHeader::new(1 << 24, 0).0, huge);
    assert_bounded("2^24 pairs", &RawHeader::new(0, 1 << 24).0, huge);
    let pair = |element: u32, len: u64| {
        RawHeader::new(0, 1)
            .string("k")
            .u32(9)
            .u32(element)
            .u64(len)
    };
    for element in [0, 4, 7, 8, 12] {
        assert_bounded("an array of 2^21", &pair(element, 1 << 21).0, huge);
    }
    assert_bounded(
        "a string of 20 MiB",
        &RawHeader::new(0, 1).string("k").u32(8).u64(20 << 20).0,
        huge,
    );

    // The costliest contents byte for byte: many small entries, complete and at hand.
    let many = 20_000;
    let strings = pair(8, many).zeros(8 * many as usize);
    assert_bounded("empty strings", &strings.0, strings.0.len() as u64);
    let pairs = (0..many).fold(RawHeader::new(0, many), |header, n| {
        header.string(format!("{n:x}")).u32(0).bytes(&[1])
    });
    assert_bounded("small pairs", &pairs.0, pairs.0.len() as u64);
    let tensors = (0..many).fold(RawHeader::new(many, 0), |header, n| {
        header.tensor(&format!("{n:x}"), &[1], 0, n * 32)
    });
    assert_bounded(
        "small tensors",
        &tensors.0,
        tensors.0.len() as u64 + many * 32 + 64,
    );
    let not_text = RawHeader::new(0, 1)
        .string("k")
        .u32(8)
        .string(vec![0xff; 1 << 20]);
    assert_bounded(
        "a long string that is no text",
        &not_text.0,
        not_text.0.len() as u64,
    );

    // Every truncation and every bit flip of a valid file.
    let (file, header_len) = small_file();
    for cut in 0..=file.len() {
        assert_bounded("cut file", &file[..cut], cut as u64);
        assert_bounded("prefix", &file[..cut], file.len() as u64);
    }
    for bit in 0..header_len * 8 {
        let mut flipped = file.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert_bounded("bit flip", &flipped, flipped.len() as u64);
        assert_bounded("bit flip in a large file", &flipped, huge);
    }
}
