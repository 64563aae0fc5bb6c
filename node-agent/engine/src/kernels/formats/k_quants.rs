//! The K-quants: blocks of 256 weights whose groups of 16 or 32 have integer scales (and minimums) in
//! units of one or two half-precision numbers per block: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.

use super::super::numerics::Halves;
use super::{BlockFormat, f16_at};

/// `group scales and minimums: [u8; 16], quants: [u8; 64], d: f16, dmin: f16`; groups of 16, each with a
/// 4-bit scale (low half) and a 4-bit minimum (high half).
pub(in super::super) struct Q2K;

impl BlockFormat for Q2K {
    const BLOCK: usize = 256;
    const BYTES: usize = 84;
    const GROUP: usize = 16;
    const BITS: u32 = 2;
    const OFFSET: i32 = 0;
    const AFFINE: bool = true;

    #[inline(always)]
    fn unpack<H: Halves>(
        block: &[u8],
        values: &mut [u8],
        scales: &mut [f32],
        minimums: &mut [f32],
    ) {
        let (d, dmin) = (f16_at::<H>(block, 80), f16_at::<H>(block, 82));
        for (group, packed) in block[..16].iter().enumerate() {
            scales[group] = d * f32::from(packed & 15);
            minimums[group] = -(dmin * f32::from(packed >> 4));
        }
        two_bits(&block[16..80], values);
    }
}

/// `third bits: [u8; 32], low bits: [u8; 64], scales: [u8; 12], d: f16`; groups of 16 with 6-bit scales
/// from -32 to 31; weight = d * scale * (3-bit value - 4).
pub(in super::super) struct Q3K;

impl BlockFormat for Q3K {
    const BLOCK: usize = 256;
    const BYTES: usize = 110;
    const GROUP: usize = 16;
    const BITS: u32 = 3;
    const OFFSET: i32 = 4;
    const AFFINE: bool = false;

    #[inline(always)]
    fn unpack<H: Halves>(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        let d = f16_at::<H>(block, 108);
        let packed = &block[96..108];
        for (group, scale) in scales[..16].iter_mut().enumerate() {
            let low = (packed[group % 8] >> (4 * (group / 8))) & 15;
            let high = (packed[8 + group % 4] >> (2 * (group / 4))) & 3;
            *scale = d * (f32::from(low | (high << 4)) - 32.0);
        }
        two_bits(&block[32..96], values);
        let third = &block[..32];
        for (row, values) in values[..256].chunks_exact_mut(32).enumerate() {
            for (value, byte) in values.iter_mut().zip(third) {
                *value |= ((byte >> row) & 1) << 2;
            }
        }
    }
}

/// `d: f16, dmin: f16, scales: [u8; 12], nibbles: [u8; 128]`; groups of 32 with 6-bit scales and minimums.
pub(in super::super) struct Q4K;

impl BlockFormat for Q4K {
    const BLOCK: usize = 256;
    const BYTES: usize = 144;
    const GROUP: usize = 32;
    const BITS: u32 = 4;
    const OFFSET: i32 = 0;
    const AFFINE: bool = true;

    #[inline(always)]
    fn unpack<H: Halves>(
        block: &[u8],
        values: &mut [u8],
        scales: &mut [f32],
        minimums: &mut [f32],
    ) {
        six_bit_scales::<H>(block, scales, minimums);
        nibble_rows(&block[16..144], values);
    }
}

/// `d: f16, dmin: f16, scales: [u8; 12], fifth bits: [u8; 32], nibbles: [u8; 128]`; as Q4_K with one bit more.
pub(in super::super) struct Q5K;

impl BlockFormat for Q5K {
    const BLOCK: usize = 256;
    const BYTES: usize = 176;
    const GROUP: usize = 32;
    const BITS: u32 = 5;
    const OFFSET: i32 = 0;
    const AFFINE: bool = true;

    #[inline(always)]
    fn unpack<H: Halves>(
        block: &[u8],
        values: &mut [u8],
        scales: &mut [f32],
        minimums: &mut [f32],
    ) {
        six_bit_scales::<H>(block, scales, minimums);
        nibble_rows(&block[48..176], values);
        let fifth = &block[16..48];
        for (row, values) in values[..256].chunks_exact_mut(32).enumerate() {
            for (value, byte) in values.iter_mut().zip(fifth) {
                *value |= ((byte >> row) & 1) << 4;
            }
        }
    }
}

/// `low bits: [u8; 128], high bits: [u8; 64], scales: [i8; 16], d: f16`; groups of 16;
/// weight = d * scale * (6-bit value - 32).
pub(in super::super) struct Q6K;

impl BlockFormat for Q6K {
    const BLOCK: usize = 256;
    const BYTES: usize = 210;
    const GROUP: usize = 16;
    const BITS: u32 = 6;
    const OFFSET: i32 = 32;
    const AFFINE: bool = false;

    #[inline(always)]
    fn unpack<H: Halves>(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        let d = f16_at::<H>(block, 208);
        for (scale, byte) in scales[..16].iter_mut().zip(&block[192..208]) {
            *scale = d * f32::from(byte.cast_signed());
        }
        let halves = values[..256].chunks_exact_mut(128);
        let low = block[..128].chunks_exact(64);
        let high = block[128..192].chunks_exact(32);
        for ((values, low), high) in halves.zip(low).zip(high) {
            for (row, values) in values.chunks_exact_mut(32).enumerate() {
                let low = &low[32 * (row % 2)..][..32];
                let (low_shift, high_shift) = (4 * (row / 2), 2 * row);
                for ((value, low), high) in values.iter_mut().zip(low).zip(high) {
                    *value = ((low >> low_shift) & 15) | (((high >> high_shift) & 3) << 4);
                }
            }
        }
    }
}

/// Each 32 bytes hold four rows of 32 weights, two bits each, the first row lowest.
#[inline(always)]
fn two_bits(bytes: &[u8], values: &mut [u8]) {
    for (values, bytes) in values[..256]
        .chunks_exact_mut(128)
        .zip(bytes.chunks_exact(32))
    {
        for (row, values) in values.chunks_exact_mut(32).enumerate() {
            for (value, byte) in values.iter_mut().zip(bytes) {
                *value = (byte >> (2 * row)) & 3;
            }
        }
    }
}

/// Each 32 bytes hold two rows of 32 weights, four bits each, the first row lowest.
#[inline(always)]
fn nibble_rows(bytes: &[u8], values: &mut [u8]) {
    for (values, bytes) in values[..256]
        .chunks_exact_mut(64)
        .zip(bytes.chunks_exact(32))
    {
        let (low, high) = values.split_at_mut(32);
        for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
            *low = byte & 15;
            *high = byte >> 4;
        }
    }
}

/// The eight 6-bit scales and minimums of Q4_K and Q5_K in the 12 bytes from offset 4 on: the first
/// four of each in whole bytes, whose upper two bits are the upper bits of the last four.
#[inline(always)]
fn six_bit_scales<H: Halves>(block: &[u8], scales: &mut [f32], minimums: &mut [f32]) {
    let (d, dmin) = (f16_at::<H>(block, 0), f16_at::<H>(block, 2));
    let word =
        |at: usize| u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    let (first, second, third) = (word(4), word(8), word(12));
    let top_bits = 0x3030_3030;
    let scale_words = [
        first & 0x3f3f_3f3f,
        (third & 0x0f0f_0f0f) | ((first >> 2) & top_bits),
    ];
    let minimum_words = [
        second & 0x3f3f_3f3f,
        ((third >> 4) & 0x0f0f_0f0f) | ((second >> 2) & top_bits),
    ];
    for half in 0..2 {
        for (byte, (scale, minimum)) in scale_words[half]
            .to_le_bytes()
            .into_iter()
            .zip(minimum_words[half].to_le_bytes())
            .enumerate()
        {
            scales[4 * half + byte] = d * f32::from(scale);
            minimums[4 * half + byte] = -(dmin * f32::from(minimum));
        }
    }
}
