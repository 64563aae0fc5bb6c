//! The formats of four bits whose sixteen values are not evenly spaced: IQ4_NL, IQ4_XS, MXFP4.

use super::{BlockFormat, Symmetric, bytes_at, f16_at, map, part};

/// IQ4_NL's and IQ4_XS's values, 128 added (ggml/src/ggml-common.h: `kvalues_iq4nl`).
pub(in super::super) const IQ4_VALUES: [u8; 16] = [
    1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241,
];

/// Twice E2M1's numbers (OCP Microscaling Formats 1.0, section 5.3.3), 16 added.
pub(in super::super) const MXFP4_VALUES: [u8; 16] =
    [16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4];

/// `d: f16, nibbles: [u8; 16]`; weight = d * value of the nibble.
pub(in super::super) struct Iq4Nl;

impl BlockFormat for Iq4Nl {
    type Quants = Symmetric<32, 8>;
    const BLOCK: usize = 32;
    const BYTES: usize = 18;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        scales[0] = f16_at(block, 0);
        look_up(bytes_at(block, 2), &IQ4_VALUES, 0, values);
    }
}

/// `d: f16, upper bits of the scales: u16, lower bits: [u8; 4], nibbles: [u8; 128]`; groups of 32 with 6-bit scales from -32 to 31;
/// weight = d * scale * value of the nibble.
pub(in super::super) struct Iq4Xs;

impl BlockFormat for Iq4Xs {
    type Quants = Symmetric<32, 8>;
    const BLOCK: usize = 256;
    const BYTES: usize = 136;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        let d = f16_at(block, 0);
        let upper = u16::from_le_bytes(bytes_at(block, 2));
        let lower = u32::from_le_bytes(bytes_at(block, 4));
        for (group, scale) in scales[..8].iter_mut().enumerate() {
            let upper = ((upper >> (2 * group)) & 3) << 4;
            let packed = ((lower >> (4 * group)) & 15) as u16 | upper;
            *scale = d * (f32::from(packed) - 32.0);
            look_up(bytes_at(block, 8 + 16 * group), &IQ4_VALUES, group, values);
        }
    }
}

/// `exponent: u8, nibbles: [u8; 16]`; weight = 2^(exponent - 127) * the E2M1 number of the nibble.
pub(in super::super) struct Mxfp4;

impl BlockFormat for Mxfp4 {
    type Quants = Symmetric<32, 5>;
    const BLOCK: usize = 32;
    const BYTES: usize = 17;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        // Half of 2^(exponent - 127), as the values are twice the numbers; in two steps, as the least is subnormal.
        let exponent = u32::from(block[0]);
        let root = f32::from_bits(((exponent >> 1) + 63) << 23);
        scales[0] = root * root * (1.0 + (exponent & 1) as f32);
        look_up(bytes_at(block, 1), &MXFP4_VALUES, 0, values);
    }
}

/// Group `group` of 32: the first 16 from the low halves of the bytes, the others from the high ones.
#[inline(always)]
fn look_up(nibbles: [u8; 16], table: &[u8; 16], group: usize, values: &mut [u8]) {
    *part::<16>(values, 2 * group) = map(nibbles, |byte| table[usize::from(byte & 15)]);
    *part::<16>(values, 2 * group + 1) = map(nibbles, |byte| table[usize::from(byte >> 4)]);
}
