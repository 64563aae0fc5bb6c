//! The formats with one scale per block of 32 weights: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. In the 4- and 5-bit
//! ones, byte `j` holds weight `j` in its low half and weight `j + 16` in its high half.

use super::super::numerics::Halves;
use super::{BlockFormat, f16_at};

/// `d: f16, nibbles: [u8; 16]`; weight = d * (nibble - 8).
pub(in super::super) struct Q4_0;

impl BlockFormat for Q4_0 {
    const BLOCK: usize = 32;
    const BYTES: usize = 18;
    const GROUP: usize = 32;
    const BITS: u32 = 4;
    const OFFSET: i32 = 8;
    const AFFINE: bool = false;

    #[inline(always)]
    fn unpack<H: Halves>(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        scales[0] = f16_at::<H>(block, 0);
        nibbles(&block[2..18], values);
    }
}

/// `d: f16, m: f16, nibbles: [u8; 16]`; weight = d * nibble + m.
pub(in super::super) struct Q4_1;

impl BlockFormat for Q4_1 {
    const BLOCK: usize = 32;
    const BYTES: usize = 20;
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
        scales[0] = f16_at::<H>(block, 0);
        minimums[0] = f16_at::<H>(block, 2);
        nibbles(&block[4..20], values);
    }
}

/// `d: f16, fifth bits: u32, nibbles: [u8; 16]`; weight = d * (5-bit value - 16).
pub(in super::super) struct Q5_0;

impl BlockFormat for Q5_0 {
    const BLOCK: usize = 32;
    const BYTES: usize = 22;
    const GROUP: usize = 32;
    const BITS: u32 = 5;
    const OFFSET: i32 = 16;
    const AFFINE: bool = false;

    #[inline(always)]
    fn unpack<H: Halves>(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        scales[0] = f16_at::<H>(block, 0);
        nibbles(&block[6..22], values);
        fifth_bits(&block[2..6], values);
    }
}

/// `d: f16, m: f16, fifth bits: u32, nibbles: [u8; 16]`; weight = d * 5-bit value + m.
pub(in super::super) struct Q5_1;

impl BlockFormat for Q5_1 {
    const BLOCK: usize = 32;
    const BYTES: usize = 24;
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
        scales[0] = f16_at::<H>(block, 0);
        minimums[0] = f16_at::<H>(block, 2);
        nibbles(&block[8..24], values);
        fifth_bits(&block[4..8], values);
    }
}

/// `d: f16, values: [i8; 32]`; weight = d * value. Kept here with 128 added, so that it is unsigned.
pub(in super::super) struct Q8_0;

impl BlockFormat for Q8_0 {
    const BLOCK: usize = 32;
    const BYTES: usize = 34;
    const GROUP: usize = 32;
    const BITS: u32 = 8;
    const OFFSET: i32 = 128;
    const AFFINE: bool = false;

    #[inline(always)]
    fn unpack<H: Halves>(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        scales[0] = f16_at::<H>(block, 0);
        let bytes = &block[2..34];
        for (value, byte) in values[..32].iter_mut().zip(bytes) {
            *value = byte ^ 0x80;
        }
    }
}

#[inline(always)]
fn nibbles(bytes: &[u8], values: &mut [u8]) {
    let (low, high) = values[..32].split_at_mut(16);
    for ((byte, low), high) in bytes[..16].iter().zip(low).zip(high) {
        *low = byte & 15;
        *high = byte >> 4;
    }
}

#[inline(always)]
fn fifth_bits(bytes: &[u8], values: &mut [u8]) {
    for (eight, byte) in values[..32].chunks_exact_mut(8).zip(bytes) {
        for (bit, value) in eight.iter_mut().enumerate() {
            *value |= ((byte >> bit) & 1) << 4;
        }
    }
}
