//! Tensors as the index describes them, and ggml's tensor types.
//!
//! Decides: how many bytes a tensor of some type and shape takes. Refuses: shapes whose size overflows, is zero, or is not made of
//! whole blocks.

use std::fmt;

/// The most dimensions that a tensor has (GGML_MAX_DIMS).
pub(crate) const MAX_DIMENSIONS: u32 = 4;

/// One tensor of the file: what it is, and where its bytes lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name as the model's architecture defines it, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// How the weights are encoded.
    pub ggml_type: GgmlType,
    /// GGUF order: `shape[0]` is contiguous (a matrix's columns, its inputs), `shape[1]` its rows (outputs). One to four dimensions.
    pub shape: Vec<u64>,
    /// Absolute offset in the file of the first byte; a multiple of the file's alignment.
    pub offset: u64,
    /// Bytes of data, without the padding that follows.
    pub byte_len: u64,
}

impl TensorInfo {
    /// Number of weights: the product of the shape (the parser checked that it fits).
    pub fn weights(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// Bytes of a tensor; if there is no such tensor, `Err` with what was expected and what was found.
pub(crate) fn byte_len(ggml_type: GgmlType, shape: &[u64]) -> Result<u64, (String, String)> {
    if shape.is_empty() || shape.len() > MAX_DIMENSIONS as usize || shape.contains(&0) {
        return Err((
            format!("1 to {MAX_DIMENSIONS} dimensions of at least 1"),
            format!("{shape:?}"),
        ));
    }
    let block_len = ggml_type.block_len() as u64;
    if !shape[0].is_multiple_of(block_len) {
        return Err((
            format!(
                "a first dimension that is a multiple of {block_len}, the block of {ggml_type}"
            ),
            format!("{} in {shape:?}", shape[0]),
        ));
    }
    let overflow = || {
        (
            "fewer than 2^64 weights and bytes".to_owned(),
            format!("{shape:?}"),
        )
    };
    let weights = shape
        .iter()
        .try_fold(1u64, |product, &dimension| product.checked_mul(dimension))
        .ok_or_else(overflow)?;
    (weights / block_len)
        .checked_mul(ggml_type.block_bytes() as u64)
        .ok_or_else(overflow)
}

/// Writes the enum and its tables from one list, so that they cannot disagree.
macro_rules! ggml_types {
    ($($variant:ident = $id:literal, $name:literal, $block_len:literal weights in $block_bytes:literal bytes;)*) => {
        /// A tensor type of ggml: how weights are packed into blocks.
        ///
        /// Source: `enum ggml_type` in ggml.h, block layouts in ggml-common.h. Types that ggml removed (4, 5, 31 to 33, 36 to 38)
        /// are not here.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        #[allow(missing_docs)]
        pub enum GgmlType { $($variant = $id,)* }

        impl GgmlType {
            /// Every type, in the order of their numbers.
            pub const ALL: &'static [GgmlType] = &[$(GgmlType::$variant,)*];

            /// The type of this number in the file; `None` for numbers unknown or removed.
            pub fn from_id(id: u32) -> Option<GgmlType> {
                match id { $($id => Some(GgmlType::$variant),)* _ => None }
            }

            /// ggml's name, e.g. `Q4_K`.
            pub fn name(self) -> &'static str {
                match self { $(GgmlType::$variant => $name,)* }
            }

            /// Weights per block.
            pub fn block_len(self) -> usize {
                match self { $(GgmlType::$variant => $block_len,)* }
            }

            /// Bytes per block.
            pub fn block_bytes(self) -> usize {
                match self { $(GgmlType::$variant => $block_bytes,)* }
            }
        }
    };
}

ggml_types! {
    F32 = 0, "F32", 1 weights in 4 bytes;
    F16 = 1, "F16", 1 weights in 2 bytes;
    Q4_0 = 2, "Q4_0", 32 weights in 18 bytes;
    Q4_1 = 3, "Q4_1", 32 weights in 20 bytes;
    Q5_0 = 6, "Q5_0", 32 weights in 22 bytes;
    Q5_1 = 7, "Q5_1", 32 weights in 24 bytes;
    Q8_0 = 8, "Q8_0", 32 weights in 34 bytes;
    Q8_1 = 9, "Q8_1", 32 weights in 36 bytes;
    Q2K = 10, "Q2_K", 256 weights in 84 bytes;
    Q3K = 11, "Q3_K", 256 weights in 110 bytes;
    Q4K = 12, "Q4_K", 256 weights in 144 bytes;
    Q5K = 13, "Q5_K", 256 weights in 176 bytes;
    Q6K = 14, "Q6_K", 256 weights in 210 bytes;
    Q8K = 15, "Q8_K", 256 weights in 292 bytes;
    Iq2Xxs = 16, "IQ2_XXS", 256 weights in 66 bytes;
    Iq2Xs = 17, "IQ2_XS", 256 weights in 74 bytes;
    Iq3Xxs = 18, "IQ3_XXS", 256 weights in 98 bytes;
    Iq1S = 19, "IQ1_S", 256 weights in 50 bytes;
    Iq4Nl = 20, "IQ4_NL", 32 weights in 18 bytes;
    Iq3S = 21, "IQ3_S", 256 weights in 110 bytes;
    Iq2S = 22, "IQ2_S", 256 weights in 82 bytes;
    Iq4Xs = 23, "IQ4_XS", 256 weights in 136 bytes;
    I8 = 24, "I8", 1 weights in 1 bytes;
    I16 = 25, "I16", 1 weights in 2 bytes;
    I32 = 26, "I32", 1 weights in 4 bytes;
    I64 = 27, "I64", 1 weights in 8 bytes;
    F64 = 28, "F64", 1 weights in 8 bytes;
    Iq1M = 29, "IQ1_M", 256 weights in 56 bytes;
    BF16 = 30, "BF16", 1 weights in 2 bytes;
    Tq1_0 = 34, "TQ1_0", 256 weights in 54 bytes;
    Tq2_0 = 35, "TQ2_0", 256 weights in 66 bytes;
    Mxfp4 = 39, "MXFP4", 32 weights in 17 bytes;
    Nvfp4 = 40, "NVFP4", 64 weights in 36 bytes;
    Q1_0 = 41, "Q1_0", 128 weights in 18 bytes;
    Q2_0 = 42, "Q2_0", 64 weights in 18 bytes;
}

impl GgmlType {
    /// The number that stands for this type in the file.
    pub fn id(self) -> u32 {
        self as u32
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_types_are_one_to_one() {
        for &ggml_type in GgmlType::ALL {
            assert_eq!(GgmlType::from_id(ggml_type.id()), Some(ggml_type));
        }
        for removed in [4, 5, 31, 32, 33, 36, 37, 38, 43, u32::MAX] {
            assert_eq!(GgmlType::from_id(removed), None);
        }
    }

    /// Bits per weight as llama.cpp's documentation of the formats gives them: an independent view of the block table.
    #[test]
    fn bits_per_weight_are_the_published_ones() {
        let published = [
            (GgmlType::Q4_0, 4.5),
            (GgmlType::Q4_1, 5.0),
            (GgmlType::Q5_0, 5.5),
            (GgmlType::Q5_1, 6.0),
            (GgmlType::Q8_0, 8.5),
            (GgmlType::Q2K, 2.625),
            (GgmlType::Q3K, 3.4375),
            (GgmlType::Q4K, 4.5),
            (GgmlType::Q5K, 5.5),
            (GgmlType::Q6K, 6.5625),
            (GgmlType::Iq1S, 1.5625),
            (GgmlType::Iq1M, 1.75),
            (GgmlType::Iq2Xxs, 2.0625),
            (GgmlType::Iq2Xs, 2.3125),
            (GgmlType::Iq2S, 2.5625),
            (GgmlType::Iq3Xxs, 3.0625),
            (GgmlType::Iq3S, 3.4375),
            (GgmlType::Iq4Nl, 4.5),
            (GgmlType::Iq4Xs, 4.25),
            (GgmlType::Tq1_0, 1.6875),
            (GgmlType::Tq2_0, 2.0625),
            (GgmlType::Mxfp4, 4.25),
            (GgmlType::Nvfp4, 4.5),
        ];
        for (ggml_type, bits) in published {
            assert_eq!(
                ggml_type.block_bytes() as f64 * 8.0 / ggml_type.block_len() as f64,
                bits,
                "{ggml_type}"
            );
        }
    }

    #[test]
    fn sizes_count_whole_blocks() {
        assert_eq!(byte_len(GgmlType::F32, &[3, 5]), Ok(60));
        assert_eq!(byte_len(GgmlType::Q4K, &[512, 3]), Ok(2 * 3 * 144));
        assert!(
            byte_len(GgmlType::Q4K, &[255, 256])
                .unwrap_err()
                .0
                .contains("multiple of 256")
        );
        assert!(byte_len(GgmlType::F32, &[]).is_err());
        assert!(byte_len(GgmlType::F32, &[4, 0]).is_err());
        assert!(byte_len(GgmlType::F32, &[1; 5]).is_err());
        assert!(
            byte_len(GgmlType::F32, &[1 << 33, 1 << 33]).is_err(),
            "the product overflows"
        );
        assert!(
            byte_len(GgmlType::F32, &[1 << 62]).is_err(),
            "the bytes overflow"
        );
    }
}
