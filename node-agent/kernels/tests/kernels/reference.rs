//! What the tests compare with: the block formats, one weight at a time as ggml's documentation of the
//! blocks defines them, and random blocks.

use half::f16;
use prima_gguf::GgmlType;
use prima_kernels::{Matrix, dequantize_row};

pub const FORMATS: [GgmlType; 23] = [
    GgmlType::F32,
    GgmlType::F16,
    GgmlType::BF16,
    GgmlType::Q4_0,
    GgmlType::Q4_1,
    GgmlType::Q5_0,
    GgmlType::Q5_1,
    GgmlType::Q8_0,
    GgmlType::Q2K,
    GgmlType::Q3K,
    GgmlType::Q4K,
    GgmlType::Q5K,
    GgmlType::Q6K,
    GgmlType::Iq1S,
    GgmlType::Iq1M,
    GgmlType::Iq2Xxs,
    GgmlType::Iq2Xs,
    GgmlType::Iq2S,
    GgmlType::Iq3Xxs,
    GgmlType::Iq3S,
    GgmlType::Iq4Nl,
    GgmlType::Iq4Xs,
    GgmlType::Mxfp4,
];

/// A small generator of numbers (splitmix64), so that failures repeat.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    /// Between -1 and 1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    pub fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
}

/// How the half-precision scales of random blocks are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scales {
    Usual,
    /// Zero, subnormal, the largest, negative.
    Extreme,
    /// Powers of two: with small whole numbers as activations nothing is rounded.
    Exact,
}

/// Bytes of `weights` weights of a format: random quants, finite scales.
pub fn random_weights(
    random: &mut Random,
    ggml_type: GgmlType,
    weights: usize,
    scales: Scales,
) -> Vec<u8> {
    let blocks = weights / ggml_type.block_len();
    let mut bytes = vec![0_u8; blocks * ggml_type.block_bytes()];
    for block in bytes.chunks_exact_mut(ggml_type.block_bytes()) {
        for byte in block.iter_mut() {
            *byte = random.bits() as u8;
            if scales == Scales::Extreme && random.below(3) == 0 {
                *byte = if random.below(2) == 0 { 0 } else { 255 };
            }
        }
        let scale = |random: &mut Random| match scales {
            Scales::Usual => f16::from_f32(random.unit() * 0.1),
            Scales::Extreme => [
                f16::ZERO,
                f16::MAX,
                f16::MIN,
                f16::from_bits(1),
                f16::from_bits(0x8203),
            ][random.below(5)],
            Scales::Exact => [0.25, -0.5, 1.0].map(f16::from_f32)[random.below(3)],
        };
        for at in half_offsets(ggml_type) {
            block[*at..at + 2].copy_from_slice(&scale(random).to_le_bytes());
        }
        match ggml_type {
            GgmlType::F32 | GgmlType::BF16 => {
                let number = match scales {
                    Scales::Usual | Scales::Extreme => random.unit(),
                    Scales::Exact => scale(random).to_f32(),
                };
                match ggml_type {
                    GgmlType::F32 => block.copy_from_slice(&number.to_le_bytes()),
                    _ => block.copy_from_slice(&half::bf16::from_f32(number).to_le_bytes()),
                }
            }
            GgmlType::F16 => {
                let number = match scales {
                    Scales::Usual => f16::from_f32(random.unit()),
                    Scales::Extreme | Scales::Exact => scale(random),
                };
                block.copy_from_slice(&number.to_le_bytes());
            }
            GgmlType::Mxfp4 => {
                block[0] = match scales {
                    Scales::Usual => 118 + random.below(7) as u8,
                    Scales::Extreme => [0, 1, 2, 100, 127, 248][random.below(6)],
                    Scales::Exact => 126 + random.below(3) as u8,
                }
            }
            // A quarter of the half-precision number each.
            GgmlType::Iq1M => {
                for (at, quarter) in scale(random).to_le_bytes().into_iter().enumerate() {
                    for (at, nibble) in [(2 * at, quarter & 15), (2 * at + 1, quarter >> 4)] {
                        let byte = &mut block[49 + 2 * at];
                        *byte = (*byte & 15) | (nibble << 4);
                    }
                }
            }
            _ => {}
        }
    }
    bytes
}

/// Where a block holds half-precision numbers.
fn half_offsets(ggml_type: GgmlType) -> &'static [usize] {
    match ggml_type {
        GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0 => &[0],
        GgmlType::Iq1S
        | GgmlType::Iq2Xxs
        | GgmlType::Iq2Xs
        | GgmlType::Iq2S
        | GgmlType::Iq3Xxs
        | GgmlType::Iq3S
        | GgmlType::Iq4Nl
        | GgmlType::Iq4Xs => &[0],
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K => &[0, 2],
        GgmlType::Q2K => &[80, 82],
        GgmlType::Q3K => &[108],
        GgmlType::Q6K => &[208],
        _ => &[],
    }
}

/// All weights of `bytes`, exactly.
pub fn weights(ggml_type: GgmlType, bytes: &[u8]) -> Vec<f64> {
    if has_codebook(ggml_type) {
        let count = bytes.len() / ggml_type.block_bytes() * ggml_type.block_len();
        let mut weights = vec![0.0; count];
        let Ok(matrix) = Matrix::new(ggml_type, 1, count, bytes) else {
            panic!("no whole blocks of {ggml_type}");
        };
        dequantize_row(matrix, 0, &mut weights);
        return weights.into_iter().map(f64::from).collect();
    }
    bytes
        .chunks_exact(ggml_type.block_bytes())
        .flat_map(|block| (0..ggml_type.block_len()).map(|i| weight(ggml_type, block, i)))
        .collect()
}

/// The codebook defines these formats. So the engine's own unpacking is compared with that of the gguf package (`prima-tests`,
/// `parity_weight_formats`), and products here with the engine's own unpacking.
pub fn has_codebook(ggml_type: GgmlType) -> bool {
    matches!(
        ggml_type,
        GgmlType::Iq1S
            | GgmlType::Iq1M
            | GgmlType::Iq2Xxs
            | GgmlType::Iq2Xs
            | GgmlType::Iq2S
            | GgmlType::Iq3Xxs
            | GgmlType::Iq3S
    )
}

/// The values of IQ4_NL and IQ4_XS, as ggml's documentation has them.
const IQ4: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

fn half(block: &[u8], at: usize) -> f64 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f64()
}

/// Weight `i` of a block.
fn weight(ggml_type: GgmlType, block: &[u8], i: usize) -> f64 {
    let bit = |at: usize, bit: usize| f64::from((block[at + bit / 8] >> (bit % 8)) & 1);
    // 32 weights: bytes 0..16 hold weights 0..16 in their low halves, 16..32 in their high ones.
    let nibble = |at: usize| f64::from((block[at + i % 16] >> (4 * (i / 16))) & 15);
    match ggml_type {
        GgmlType::F32 => f64::from(f32::from_le_bytes([block[0], block[1], block[2], block[3]])),
        GgmlType::F16 => half(block, 0),
        GgmlType::BF16 => half::bf16::from_le_bytes([block[0], block[1]]).to_f64(),
        GgmlType::Q4_0 => half(block, 0) * (nibble(2) - 8.0),
        GgmlType::Q4_1 => half(block, 0) * nibble(4) + half(block, 2),
        GgmlType::Q5_0 => half(block, 0) * (nibble(6) + 16.0 * bit(2, i) - 16.0),
        GgmlType::Q5_1 => half(block, 0) * (nibble(8) + 16.0 * bit(4, i)) + half(block, 2),
        GgmlType::Q8_0 => half(block, 0) * f64::from(block[2 + i] as i8),
        GgmlType::Q2K => {
            let packed = block[i / 16];
            let (half_block, row, column) = (i / 128, i % 128 / 32, i % 32);
            let quant = (block[16 + 32 * half_block + column] >> (2 * row)) & 3;
            half(block, 80) * f64::from(packed & 15) * f64::from(quant)
                - half(block, 82) * f64::from(packed >> 4)
        }
        GgmlType::Q3K => {
            let (half_block, row, column) = (i / 128, i % 128 / 32, i % 32);
            let low = (block[32 + 32 * half_block + column] >> (2 * row)) & 3;
            let third = (block[column] >> (i / 32)) & 1;
            let quant = f64::from(low) - if third == 1 { 0.0 } else { 4.0 };
            let group = i / 16;
            let scales = &block[96..108];
            let low = if group < 8 {
                scales[group] & 15
            } else {
                scales[group - 8] >> 4
            };
            let high = match group / 4 {
                0 => scales[8 + group] & 3,
                1 => (scales[4 + group] >> 2) & 3,
                2 => (scales[group] >> 4) & 3,
                _ => scales[group - 4] >> 6,
            };
            half(block, 108) * (f64::from(low + 16 * high) - 32.0) * quant
        }
        GgmlType::Q4K => {
            let nibble = (block[16 + 32 * (i / 64) + i % 32] >> (4 * (i % 64 / 32))) & 15;
            let (scale, minimum) = six_bits(&block[4..16], i / 32);
            half(block, 0) * scale * f64::from(nibble) - half(block, 2) * minimum
        }
        GgmlType::Q5K => {
            let nibble = (block[48 + 32 * (i / 64) + i % 32] >> (4 * (i % 64 / 32))) & 15;
            let fifth = (block[16 + i % 32] >> (i / 32)) & 1;
            let (scale, minimum) = six_bits(&block[4..16], i / 32);
            half(block, 0) * scale * f64::from(nibble + 16 * fifth) - half(block, 2) * minimum
        }
        GgmlType::Q6K => {
            let (half_block, row, column) = (i / 128, i % 128 / 32, i % 32);
            let low = block[64 * half_block + 32 * (row % 2) + column] >> (4 * (row / 2));
            let high = block[128 + 32 * half_block + column] >> (2 * row);
            let quant = f64::from((low & 15) + 16 * (high & 3)) - 32.0;
            half(block, 208) * f64::from(block[192 + i / 16] as i8) * quant
        }
        GgmlType::Iq4Nl => half(block, 0) * f64::from(IQ4[nibble(2) as usize]),
        GgmlType::Iq4Xs => {
            let group = i / 32;
            let nibble = (block[8 + 16 * group + i % 16] >> (4 * (i % 32 / 16))) & 15;
            let upper = u16::from_le_bytes([block[2], block[3]]) >> (2 * group) & 3;
            let lower = block[4 + group / 2] >> (4 * (group % 2)) & 15;
            let scale = f64::from(lower) + 16.0 * f64::from(upper) - 32.0;
            half(block, 0) * scale * f64::from(IQ4[usize::from(nibble)])
        }
        GgmlType::Mxfp4 => {
            let code = nibble(1) as usize;
            let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code % 8];
            let sign = if code < 8 { 1.0 } else { -1.0 };
            sign * magnitude * 2.0_f64.powi(i32::from(block[0]) - 127)
        }
        other => panic!("no formula for {other}"),
    }
}

/// Scale and minimum `j` of the twelve bytes in Q4_K and Q5_K (ggml's get_scale_min_k4).
fn six_bits(q: &[u8], j: usize) -> (f64, f64) {
    let (scale, minimum) = if j < 4 {
        (q[j] & 63, q[j + 4] & 63)
    } else {
        (
            (q[j + 4] & 15) | ((q[j - 4] >> 6) << 4),
            (q[j + 4] >> 4) | ((q[j] >> 6) << 4),
        )
    };
    (f64::from(scale), f64::from(minimum))
}
