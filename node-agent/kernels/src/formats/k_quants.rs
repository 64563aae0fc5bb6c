//! The K-quants: blocks of 256 weights whose groups of 16 or 32 have integer scales (and minimums) in
//! units of one or two half-precision numbers per block: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.

use super::{Affine, BlockFormat, Symmetric, bytes_at, f16_at, map, part, zip};

/// `group scales and minimums: [u8; 16], quants: [u8; 64], d: f16, dmin: f16`; groups of 16, each with a
/// 4-bit scale (low half) and a 4-bit minimum (high half).
pub(in super::super) struct Q2K;

impl BlockFormat for Q2K {
    type Quants = Affine<16, 2>;
    const BLOCK: usize = 256;
    const BYTES: usize = 84;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], minimums: &mut [f32]) {
        let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
        let packed = bytes_at::<16>(block, 0);
        for group in 0..16 {
            scales[group] = d * f32::from(packed[group] & 15);
            minimums[group] = -(dmin * f32::from(packed[group] >> 4));
        }
        two_bits(bytes_at(block, 16), values);
    }
}

/// `third bits: [u8; 32], low bits: [u8; 64], scales: [u8; 12], d: f16`; groups of 16 with 6-bit scales
/// from -32 to 31; weight = d * scale * (3-bit value - 4).
pub(in super::super) struct Q3K;

impl BlockFormat for Q3K {
    type Quants = Symmetric<16, 3>;
    const BLOCK: usize = 256;
    const BYTES: usize = 110;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        let d = f16_at(block, 108);
        let low = u64::from_le_bytes(bytes_at(block, 96));
        let high = u32::from_le_bytes(bytes_at(block, 104));
        let spread = |shift: u32| u64::from((high >> shift) & 0x0303_0303) << 4;
        // Bytes of scales 0 to 7, then 8 to 15; their upper two bits are in `high`, four scales a pair.
        let halves = [
            (low & NIBBLES) | spread(0) | (spread(2) << 32),
            ((low >> 4) & NIBBLES) | spread(4) | (spread(6) << 32),
        ];
        for (half, bytes) in halves.iter().enumerate() {
            let bytes = bytes.to_le_bytes();
            for i in 0..8 {
                scales[8 * half + i] = d * (f32::from(bytes[i]) - 32.0);
            }
        }
        two_bits(bytes_at(block, 32), values);
        add_bit(bytes_at(block, 0), 2, values);
    }
}

/// `d: f16, dmin: f16, scales: [u8; 12], nibbles: [u8; 128]`; groups of 32 with 6-bit scales and minimums.
pub(in super::super) struct Q4K;

impl BlockFormat for Q4K {
    type Quants = Affine<32, 4>;
    const BLOCK: usize = 256;
    const BYTES: usize = 144;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], minimums: &mut [f32]) {
        six_bit_scales(block, scales, minimums);
        nibble_rows(bytes_at(block, 16), values);
    }
}

/// `d: f16, dmin: f16, scales: [u8; 12], fifth bits: [u8; 32], nibbles: [u8; 128]`; as Q4_K with one bit more.
pub(in super::super) struct Q5K;

impl BlockFormat for Q5K {
    type Quants = Affine<32, 5>;
    const BLOCK: usize = 256;
    const BYTES: usize = 176;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], minimums: &mut [f32]) {
        six_bit_scales(block, scales, minimums);
        nibble_rows(bytes_at(block, 48), values);
        add_bit(bytes_at(block, 16), 4, values);
    }
}

/// `low bits: [u8; 128], high bits: [u8; 64], scales: [i8; 16], d: f16`; groups of 16;
/// weight = d * scale * (6-bit value - 32).
pub(in super::super) struct Q6K;

impl BlockFormat for Q6K {
    type Quants = Symmetric<16, 6>;
    const BLOCK: usize = 256;
    const BYTES: usize = 210;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        let d = f16_at(block, 208);
        let bytes = bytes_at::<16>(block, 192);
        for group in 0..16 {
            scales[group] = d * f32::from(bytes[group].cast_signed());
        }
        for half in 0..2 {
            let first = bytes_at::<32>(block, 64 * half);
            let second = bytes_at::<32>(block, 64 * half + 32);
            let high = bytes_at::<32>(block, 128 + 32 * half);
            *part(values, 4 * half) = zip(first, high, |low, high| (low & 15) | ((high & 3) << 4));
            *part(values, 4 * half + 1) =
                zip(second, high, |low, high| (low & 15) | ((high & 12) << 2));
            *part(values, 4 * half + 2) = zip(first, high, |low, high| (low >> 4) | (high & 48));
            *part(values, 4 * half + 3) =
                zip(second, high, |low, high| (low >> 4) | ((high >> 2) & 48));
        }
    }
}

const NIBBLES: u64 = 0x0f0f_0f0f_0f0f_0f0f;

/// Each 32 bytes hold four rows of 32 weights, two bits each, the first row lowest.
#[inline(always)]
fn two_bits(bytes: [u8; 64], values: &mut [u8]) {
    for half in 0..2 {
        let bytes = bytes_at::<32>(&bytes, 32 * half);
        *part(values, 4 * half) = map(bytes, |byte| byte & 3);
        *part(values, 4 * half + 1) = map(bytes, |byte| (byte >> 2) & 3);
        *part(values, 4 * half + 2) = map(bytes, |byte| (byte >> 4) & 3);
        *part(values, 4 * half + 3) = map(bytes, |byte| byte >> 6);
    }
}

/// Each 32 bytes hold two rows of 32 weights, four bits each, the first row lowest.
#[inline(always)]
fn nibble_rows(bytes: [u8; 128], values: &mut [u8]) {
    for quarter in 0..4 {
        let bytes = bytes_at::<32>(&bytes, 32 * quarter);
        *part(values, 2 * quarter) = map(bytes, |byte| byte & 15);
        *part(values, 2 * quarter + 1) = map(bytes, |byte| byte >> 4);
    }
}

/// Bit `row` of each byte is bit `place` of one weight: the one in row `row` of 32, at the byte's place.
#[inline(always)]
fn add_bit(bytes: [u8; 32], place: usize, values: &mut [u8]) {
    for row in 0..8 {
        let values = part::<32>(values, row);
        *values = zip(*values, bytes, |value, byte| {
            value | (((byte >> row) & 1) << place)
        });
    }
}

/// The eight 6-bit scales and minimums of Q4_K and Q5_K in the 12 bytes from offset 4 on. The first four of
/// each are in whole bytes; the upper two bits of these are the upper bits of the last four.
#[inline(always)]
fn six_bit_scales(block: &[u8], scales: &mut [f32], minimums: &mut [f32]) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    let [first, second, third] = [4, 8, 12].map(|at| u32::from_le_bytes(bytes_at(block, at)));
    let pack = |low: u32, high: u32| (u64::from(low) | (u64::from(high) << 32)).to_le_bytes();
    let top_bits = 0x3030_3030;
    let (nibbles, sixes) = (0x0f0f_0f0f, 0x3f3f_3f3f);
    let scale_bytes = pack(first & sixes, (third & nibbles) | ((first >> 2) & top_bits));
    let minimum_bytes = pack(
        second & sixes,
        ((third >> 4) & nibbles) | ((second >> 2) & top_bits),
    );
    let (scales, minimums) = (&mut scales[..8], &mut minimums[..8]);
    for group in 0..8 {
        scales[group] = d * f32::from(scale_bytes[group]);
        minimums[group] = -(dmin * f32::from(minimum_bytes[group]));
    }
}
