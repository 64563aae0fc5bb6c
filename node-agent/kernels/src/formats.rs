//! The block formats of quantized weights, as ggml lays them out (ggml/src/ggml-common.h): how one block becomes
//! small unsigned numbers with a scale per group, and a minimum per group where the format has one. This is the
//! specification; the vector levels unpack several rows at once (`packed_tile/`) to the same numbers. Refuses to know
//! about rows, activations or instruction sets.

mod codebook;
mod codebooks;
mod k_quants;
mod legacy;
mod nonlinear;

pub(super) use codebook::{Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs};
pub(super) use k_quants::{Q2K, Q3K, Q4K, Q5K, Q6K};
pub(super) use legacy::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
pub(super) use nonlinear::{IQ4_VALUES, MXFP4_VALUES};
pub(super) use nonlinear::{Iq4Nl, Iq4Xs, Mxfp4};

/// What a block unpacks to, which is all that products know of its format: formats whose quants are the same share their tiles. A
/// weight of group `g` is `scales[g] * (quant - OFFSET)`, and `+ minimums[g]` where `AFFINE`.
pub(super) trait Quants {
    /// Weights that share a scale: 16 or 32.
    const GROUP: usize;
    /// Quants are below `1 << BITS`. (How much headroom 16-bit sums have: of no use to plain Rust.)
    #[cfg_attr(
        not(any(target_arch = "x86_64", target_arch = "aarch64")),
        allow(dead_code)
    )]
    const BITS: u32;
    const OFFSET: i32;
    const AFFINE: bool;
}

/// Numbers around zero: the offset is in their middle.
pub(super) struct Symmetric<const GROUP: usize, const BITS: u32>;

impl<const GROUP: usize, const BITS: u32> Quants for Symmetric<GROUP, BITS> {
    const GROUP: usize = GROUP;
    const BITS: u32 = BITS;
    const OFFSET: i32 = 1 << (BITS - 1);
    const AFFINE: bool = false;
}

/// Numbers from a minimum on.
pub(super) struct Affine<const GROUP: usize, const BITS: u32>;

impl<const GROUP: usize, const BITS: u32> Quants for Affine<GROUP, BITS> {
    const GROUP: usize = GROUP;
    const BITS: u32 = BITS;
    const OFFSET: i32 = 0;
    const AFFINE: bool = true;
}

/// A format of blocks of `BLOCK` weights in `BYTES` bytes.
pub(super) trait BlockFormat {
    type Quants: Quants;
    /// Weights per block: 32 or 256.
    const BLOCK: usize;
    const BYTES: usize;
    // The quants', in short.
    const GROUP: usize = <Self::Quants as Quants>::GROUP;
    const OFFSET: i32 = <Self::Quants as Quants>::OFFSET;
    const AFFINE: bool = <Self::Quants as Quants>::AFFINE;

    /// Unpacks one block. `block` has `BYTES` bytes, `values` has `BLOCK` places for quants, `scales` and
    /// `minimums` have `BLOCK / GROUP` (`minimums` is left alone unless the quants are affine).
    fn unpack(block: &[u8], values: &mut [u8], scales: &mut [f32], minimums: &mut [f32]);
}

/// Whether quants minus the offset cover all signed bytes: then the highest bit of each, inverted, is the sign.
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(dead_code)
)]
pub(super) const fn are_signed_bytes<Q: Quants>() -> bool {
    const { assert!(Q::BITS != 8 || Q::OFFSET == 128) };
    Q::BITS == 8
}

/// `call` with `Format` as the block format of a `GgmlType`; `otherwise` for a type without a block format or
/// kernels.
macro_rules! with_block_format {
    ($ggml_type:expr, $Format:ident => $call:expr, else $otherwise:expr $(,)?) => {
        with_block_format!(
            @ $ggml_type, $Format, $call, $otherwise;
            Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2K Q3K Q4K Q5K Q6K Iq1S Iq1M Iq2Xxs Iq2Xs Iq2S Iq3Xxs Iq3S Iq4Nl Iq4Xs Mxfp4
        )
    };
    (@ $ggml_type:expr, $Format:ident, $call:expr, $otherwise:expr; $($name:ident)*) => {
        match $ggml_type {
            $(prima_gguf::GgmlType::$name => {
                type $Format = $crate::formats::$name;
                $call
            })*
            _ => $otherwise,
        }
    };
}
pub(super) use with_block_format;

/// The largest block of any format, in weights.
pub(super) const MAX_BLOCK: usize = 256;

/// The smallest group of any format, in weights.
pub(super) const MIN_GROUP: usize = 16;

/// The number that the two little-endian bytes at `offset` hold in half precision.
#[inline(always)]
fn f16_at(block: &[u8], offset: usize) -> f32 {
    super::numerics::f16_to_f32(u16::from_le_bytes([block[offset], block[offset + 1]]))
}

/// The `N` bytes at `offset`.
#[inline(always)]
fn bytes_at<const N: usize>(block: &[u8], offset: usize) -> [u8; N] {
    block[offset..offset + N].as_chunks::<N>().0[0]
}

/// Part `index` of `N` values.
#[inline(always)]
fn part<const N: usize>(values: &mut [u8], index: usize) -> &mut [u8; N] {
    &mut values[N * index..N * index + N].as_chunks_mut::<N>().0[0]
}

/// `function` of every byte. It works on copies: the compiler makes vector instructions only where it sees that
/// input and output do not overlap.
#[inline(always)]
fn map<const N: usize>(bytes: [u8; N], function: impl Fn(u8) -> u8) -> [u8; N] {
    let mut out = [0; N];
    for i in 0..N {
        out[i] = function(bytes[i]);
    }
    out
}

/// `function` of every pair of bytes.
#[inline(always)]
fn zip<const N: usize>(a: [u8; N], b: [u8; N], function: impl Fn(u8, u8) -> u8) -> [u8; N] {
    let mut out = [0; N];
    for i in 0..N {
        out[i] = function(a[i], b[i]);
    }
    out
}
