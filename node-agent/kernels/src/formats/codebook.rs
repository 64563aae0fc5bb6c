//! The formats whose weights are picked from a codebook, eight at a time: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S.
//! Blocks of 256 weights; where the codebook holds magnitudes, the signs are stored separately.

use super::codebooks;
use super::{BlockFormat, Symmetric, bytes_at, f16_at, part};

/// `d: f16`, then per 32 weights: four one-byte places in the codebook, and a word with four times seven signs and a 4-bit scale;
/// weight = d * (scale + 1/2) / 4 * number.
pub(in super::super) struct Iq2Xxs;

impl BlockFormat for Iq2Xxs {
    type Quants = Symmetric<32, 7>;
    const BLOCK: usize = 256;
    const BYTES: usize = 66;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        let d = f16_at(block, 0);
        for (group, scale) in scales[..8].iter_mut().enumerate() {
            let places = bytes_at::<4>(block, 2 + 8 * group);
            let packed = u32::from_le_bytes(bytes_at(block, 6 + 8 * group));
            *scale = d * (0.5 + (packed >> 28) as f32) * 0.25;
            for (eight, place) in places.into_iter().enumerate() {
                let magnitudes = codebooks::IQ2_XXS[usize::from(place)];
                let negative = NEGATIVE_EVEN[((packed >> (7 * eight)) & 127) as usize];
                put(
                    values,
                    4 * group + eight,
                    signed::<64>(magnitudes, negative),
                );
            }
        }
    }
}

/// `d: f16, places: [u16; 32], scales: [u8; 8]`; a place's upper seven bits are signs; groups of 16 with 4-bit scales;
/// weight = d * (scale + 1/2) / 4 * number.
pub(in super::super) struct Iq2Xs;

impl BlockFormat for Iq2Xs {
    type Quants = Symmetric<16, 7>;
    const BLOCK: usize = 256;
    const BYTES: usize = 74;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        four_bit_scales(f16_at(block, 0), bytes_at(block, 66), scales);
        for eight in 0..32 {
            let packed = u16::from_le_bytes(bytes_at(block, 2 + 2 * eight));
            let magnitudes = codebooks::IQ2_XS[usize::from(packed & 511)];
            let negative = NEGATIVE_EVEN[usize::from(packed >> 9)];
            put(values, eight, signed::<64>(magnitudes, negative));
        }
    }
}

/// `d: f16, places: [u8; 32], signs: [u8; 32], upper bits of the places: [u8; 8], scales: [u8; 8]`; groups of 16 as in IQ2_XS.
pub(in super::super) struct Iq2S;

impl BlockFormat for Iq2S {
    type Quants = Symmetric<16, 7>;
    const BLOCK: usize = 256;
    const BYTES: usize = 82;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        four_bit_scales(f16_at(block, 0), bytes_at(block, 74), scales);
        let (places, signs) = (bytes_at::<32>(block, 2), bytes_at::<32>(block, 34));
        let upper = bytes_at::<8>(block, 66);
        for eight in 0..32 {
            let upper = usize::from(upper[eight / 4] >> (2 * (eight % 4))) & 3;
            let place = usize::from(places[eight]) | (upper << 8);
            let negative = NEGATIVE[usize::from(signs[eight])];
            let value = signed::<64>(codebooks::IQ2_S[place], negative);
            put(values, eight, value);
        }
    }
}

/// `d: f16, places: [u8; 64]` (of four magnitudes each), then per 32 weights a word of four times seven signs and a 4-bit scale;
/// weight = d * (scale + 1/2) / 2 * number.
pub(in super::super) struct Iq3Xxs;

impl BlockFormat for Iq3Xxs {
    type Quants = Symmetric<32, 7>;
    const BLOCK: usize = 256;
    const BYTES: usize = 98;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        let d = f16_at(block, 0);
        let places = bytes_at::<64>(block, 2);
        for (group, scale) in scales[..8].iter_mut().enumerate() {
            let packed = u32::from_le_bytes(bytes_at(block, 66 + 4 * group));
            *scale = d * (0.5 + (packed >> 28) as f32) * 0.5;
            for within in 0..4 {
                let eight = 4 * group + within;
                let half = |half: usize| {
                    let place = places[2 * eight + half];
                    codebooks::IQ3_XXS[usize::from(place)]
                };
                let negative = NEGATIVE_EVEN[((packed >> (7 * within)) & 127) as usize];
                let magnitudes = half(0) | (half(1) << 32);
                put(values, eight, signed::<64>(magnitudes, negative));
            }
        }
    }
}

/// `d: f16, places: [u8; 64]` (of four magnitudes each), `ninth bits of the places: [u8; 8], signs: [u8; 32], scales: [u8; 4]`;
/// groups of 32; weight = d * (2 * scale + 1) * number.
pub(in super::super) struct Iq3S;

impl BlockFormat for Iq3S {
    type Quants = Symmetric<32, 5>;
    const BLOCK: usize = 256;
    const BYTES: usize = 110;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        let d = f16_at(block, 0);
        let packed = bytes_at::<4>(block, 106);
        for (group, scale) in scales[..8].iter_mut().enumerate() {
            let packed = (packed[group / 2] >> (4 * (group % 2))) & 15;
            *scale = d * f32::from(1 + 2 * packed);
        }
        let (places, ninth) = (bytes_at::<64>(block, 2), bytes_at::<8>(block, 66));
        let signs = bytes_at::<32>(block, 74);
        for (eight, signs) in signs.into_iter().enumerate() {
            let half = |half: usize| {
                let place = 2 * eight + half;
                let ninth = usize::from(ninth[place / 8] >> (place % 8)) & 1;
                codebooks::IQ3_S[usize::from(places[place]) | (ninth << 8)]
            };
            let magnitudes = half(0) | (half(1) << 32);
            let negative = NEGATIVE[usize::from(signs)];
            put(values, eight, signed::<16>(magnitudes, negative));
        }
    }
}

/// `d: f16, places: [u8; 32]`, then per 32 weights four times three upper bits of the places, a 3-bit scale and the sign of a shift;
/// weight = d * (2 * scale + 1) * (number + 1/8 or - 1/8). Kept here in eighths.
pub(in super::super) struct Iq1S;

impl BlockFormat for Iq1S {
    type Quants = Symmetric<32, 5>;
    const BLOCK: usize = 256;
    const BYTES: usize = 50;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        let d = f16_at(block, 0);
        let places = bytes_at::<32>(block, 2);
        for (group, scale) in scales[..8].iter_mut().enumerate() {
            let packed = u16::from_le_bytes(bytes_at(block, 34 + 2 * group));
            *scale = d * f32::from(1 + 2 * ((packed >> 12) & 7)) * 0.125;
            for within in 0..4 {
                let eight = 4 * group + within;
                let upper = usize::from(packed >> (3 * within)) & 7;
                let numbers = codebooks::IQ1_S[usize::from(places[eight]) | (upper << 8)];
                put(values, eight, shifted(numbers, packed & 0x8000 != 0));
            }
        }
    }
}

/// `places: [u8; 32]`; `[u8; 16]`: for two places a byte of two nibbles, each three upper bits and the sign of a shift; `[u16; 4]`:
/// each four 3-bit scales and above them a quarter of `d: f16`, the lowest quarter first; groups of 16; weights as in IQ1_S.
pub(in super::super) struct Iq1M;

impl BlockFormat for Iq1M {
    type Quants = Symmetric<16, 5>;
    const BLOCK: usize = 256;
    const BYTES: usize = 56;

    #[inline(always)]
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        let packed = [0, 1, 2, 3].map(|i| u16::from_le_bytes(bytes_at(block, 48 + 2 * i)));
        let [a, b, c, d] = packed.map(|packed| packed & 0xf000);
        let d = (a >> 12) | (b >> 8) | (c >> 4) | d;
        let d = f16_at(&d.to_le_bytes(), 0);
        for (group, scale) in scales[..16].iter_mut().enumerate() {
            let packed = (packed[group / 4] >> (3 * (group % 4))) & 7;
            *scale = d * f32::from(1 + 2 * packed) * 0.125;
        }
        let (places, upper) = (bytes_at::<32>(block, 0), bytes_at::<16>(block, 32));
        for (eight, place) in places.into_iter().enumerate() {
            let upper = usize::from(upper[eight / 2] >> (4 * (eight % 2)));
            let numbers = codebooks::IQ1_S[usize::from(place) | ((upper & 7) << 8)];
            put(values, eight, shifted(numbers, upper & 8 != 0));
        }
    }
}

/// Groups of 16 whose 4-bit scales are two a byte, the first lower: d * (scale + 1/2) / 4.
#[inline(always)]
fn four_bit_scales(d: f32, packed: [u8; 8], scales: &mut [f32]) {
    for (group, scale) in scales[..16].iter_mut().enumerate() {
        let packed = (packed[group / 2] >> (4 * (group % 2))) & 15;
        *scale = d * (0.5 + f32::from(packed)) * 0.25;
    }
}

const ONES: u64 = 0x0101_0101_0101_0101;

/// For eight sign bits, eight bytes: 127 where the bit is set.
static NEGATIVE: [u64; 256] = {
    let mut table = [0; 256];
    let mut signs = 0;
    while signs < 256 {
        // Each bit in a byte of its own. In the next step, no byte carries into its neighbour.
        let bits = (signs as u64 * ONES) & 0x8040_2010_0804_0201;
        table[signs] = (((bits + 0x7f * ONES) >> 7) & ONES) * 127;
        signs += 1;
    }
    table
};

/// As [`NEGATIVE`], for seven signs. The eighth follows: it makes the number of minus signs even.
static NEGATIVE_EVEN: [u64; 128] = {
    let mut table = [0; 128];
    let mut seven = 0;
    while seven < 128 {
        table[seven] = NEGATIVE[seven | ((seven.count_ones() as usize & 1) << 7)];
        seven += 1;
    }
    table
};

/// `OFFSET` plus or minus each of eight magnitudes, which are below 64: minus where the byte of `negative` is 127.
#[inline(always)]
fn signed<const OFFSET: u8>(magnitudes: u64, negative: u64) -> u64 {
    (magnitudes ^ negative) + OFFSET as u64 * ONES - negative
}

/// Eight numbers in eighths, an eighth more or, if `down`, less.
#[inline(always)]
fn shifted(numbers: u64, down: bool) -> u64 {
    match down {
        false => numbers + ONES,
        true => numbers - ONES,
    }
}

#[inline(always)]
fn put(values: &mut [u8], eight: usize, bytes: u64) {
    *part::<8>(values, eight) = bytes.to_le_bytes();
}
