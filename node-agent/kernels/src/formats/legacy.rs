//! The formats with one scale per block of 32 weights: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. In the 4- and 5-bit
//! ones, byte `j` holds weight `j` in its low half and weight `j + 16` in its high half.

use super::{Affine, BlockFormat, Symmetric, bytes_at, f16_at, map, part, zip};

/// `d: f16, nibbles: [u8; 16]`; weight = d * (nibble - 8).
pub(in super::super) struct Q4_0;

impl BlockFormat for Q4_0 {
    type Quants = Symmetric<32, 4>;
    const BLOCK: usize = 32;
    const BYTES: usize = 18;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        scales[0] = f16_at(block, 0);
        nibbles(bytes_at(block, 2), values);
    }
}

/// `d: f16, m: f16, nibbles: [u8; 16]`; weight = d * nibble + m.
pub(in super::super) struct Q4_1;

impl BlockFormat for Q4_1 {
    type Quants = Affine<32, 4>;
    const BLOCK: usize = 32;
    const BYTES: usize = 20;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], minimums: &mut [f32]) {
        scales[0] = f16_at(block, 0);
        minimums[0] = f16_at(block, 2);
        nibbles(bytes_at(block, 4), values);
    }
}

/// `d: f16, fifth bits: u32, nibbles: [u8; 16]`; weight = d * (5-bit value - 16).
pub(in super::super) struct Q5_0;

impl BlockFormat for Q5_0 {
    type Quants = Symmetric<32, 5>;
    const BLOCK: usize = 32;
    const BYTES: usize = 22;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        scales[0] = f16_at(block, 0);
        nibbles(bytes_at(block, 6), values);
        fifth_bits(bytes_at(block, 2), values);
    }
}

/// `d: f16, m: f16, fifth bits: u32, nibbles: [u8; 16]`; weight = d * 5-bit value + m.
pub(in super::super) struct Q5_1;

impl BlockFormat for Q5_1 {
    type Quants = Affine<32, 5>;
    const BLOCK: usize = 32;
    const BYTES: usize = 24;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], minimums: &mut [f32]) {
        scales[0] = f16_at(block, 0);
        minimums[0] = f16_at(block, 2);
        nibbles(bytes_at(block, 8), values);
        fifth_bits(bytes_at(block, 4), values);
    }
}

/// `d: f16, values: [i8; 32]`; weight = d * value. Kept here with 128 added, so that it is unsigned.
pub(in super::super) struct Q8_0;

impl BlockFormat for Q8_0 {
    type Quants = Symmetric<32, 8>;
    const BLOCK: usize = 32;
    const BYTES: usize = 34;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        scales[0] = f16_at(block, 0);
        *part::<32>(values, 0) = map(bytes_at(block, 2), |byte| byte ^ 0x80);
    }
}

#[inline(always)]
fn nibbles(bytes: [u8; 16], values: &mut [u8]) {
    *part::<16>(values, 0) = map(bytes, |byte| byte & 15);
    *part::<16>(values, 1) = map(bytes, |byte| byte >> 4);
}

#[inline(always)]
fn fifth_bits(bytes: [u8; 4], values: &mut [u8]) {
    let (mut repeated, mut tests) = ([0; 32], [0; 32]);
    for i in 0..32 {
        repeated[i] = bytes[i / 8];
        tests[i] = 1 << (i % 8);
    }
    let bits = zip(
        repeated,
        tests,
        |byte, test| if byte & test != 0 { 16 } else { 0 },
    );
    let values = part::<32>(values, 0);
    *values = zip(*values, bits, |value, bit| value | bit);
}
