//! Attention of the rows of one sequence over its keys and values.
//!
//! Decides: that keys and values, which are stored as F16, are widened a piece at a time, never all. Scores, and what is summed, are F32: scores
//! of some models exceed F16, or are too large for its 11 bits to tell them apart. The pieces are put together as flash attention does it
//! (<https://arxiv.org/abs/2205.14135>): shares are taken from the highest score so far, and scaled down where a later one is higher. KV heads
//! are not repeated: the query heads that share a KV head are rows of one product.

use candle_core::{D, DType, Result, Tensor};

/// Positions whose keys and values are F32 at a time.
const PIECE: usize = 512;

/// `queries`: heads x rows x head_dim, scaled, F32; `keys` and `values`: kv_heads x positions x head_dim, F16; `mask`, which is added to
/// scores: rows x positions. The result is rows x (heads * head_dim), F32.
pub(super) fn attend(
    queries: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    mask: Option<&Tensor>,
    softcap: Option<f32>,
) -> Result<Tensor> {
    let (heads, rows, head_dim) = queries.dims3()?;
    let (kv_heads, positions, _) = keys.dims3()?;
    let group_rows = heads / kv_heads * rows;
    let queries = queries.reshape((kv_heads, group_rows, head_dim))?;
    let all = |number: f32, width: usize| {
        let shape = (kv_heads, group_rows, width);
        Tensor::full(number, shape, queries.device())
    };
    // Not minus infinity, from which a row that sees nothing of the first pieces would get no number.
    let mut highest = all(f32::MIN, 1)?;
    let mut shares_sum = all(0.0, 1)?;
    let mut values_sum = all(0.0, head_dim)?;
    for first in (0..positions).step_by(PIECE) {
        let len = PIECE.min(positions - first);
        let widened = |stored: &Tensor| stored.narrow(1, first, len)?.to_dtype(DType::F32);
        let mut scores = queries.matmul(&widened(keys)?.t()?)?;
        if let Some(softcap) = softcap.map(f64::from) {
            scores = ((scores / softcap)?.tanh()? * softcap)?;
        }
        if let Some(mask) = mask {
            scores = scores
                .reshape((heads, rows, len))?
                .broadcast_add(&mask.narrow(1, first, len)?)?
                .reshape((kv_heads, group_rows, len))?;
        }
        let higher = highest.maximum(&scores.max_keepdim(D::Minus1)?)?;
        let scale = (highest - &higher)?.exp()?;
        let shares = scores.broadcast_sub(&higher)?.exp()?;
        shares_sum = ((shares_sum * &scale)? + shares.sum_keepdim(D::Minus1)?)?;
        values_sum = (values_sum.broadcast_mul(&scale)? + shares.matmul(&widened(values)?)?)?;
        highest = higher;
    }
    values_sum
        .broadcast_div(&shares_sum)?
        .reshape((heads, rows, head_dim))?
        .transpose(0, 1)?
        .reshape((rows, heads * head_dim))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_nn::ops;

    use super::*;

    const POSITIONS: usize = 2 * PIECE + 100;

    fn cycled(numbers: &[f32], shape: (usize, usize, usize)) -> Result<Tensor> {
        let numbers = numbers.iter().copied().cycle();
        let numbers: Vec<f32> = numbers.take(shape.0 * shape.1 * shape.2).collect();
        Tensor::from_vec(numbers, shape, &Device::Cpu)
    }

    /// Scores are near 30,000, where F16 knows every sixteenth number only, and what tells them apart is below that. In F32 they are exact.
    #[test]
    fn large_scores_are_told_apart_over_all_pieces() -> Result<()> {
        let queries = cycled(&[1e4, 1.0, 1e4, 0.5, 1e4, -1.0], (4, 3, 2))?;
        let keys = [3.0, 0.0, 3.0, 3.0, 3.0, 1.0, 3.0, 4.0, 3.0, 2.0];
        let keys = cycled(&keys, (2, POSITIONS, 2))?;
        let values = [1.0, -2.0, 0.5, 3.0, -4.0, 0.25, 2.0, 1.5, 0.0, -1.0];
        let values = cycled(&values, (2, POSITIONS, 2))?;
        // All in the first piece; in every piece; none before the last.
        let seen = [0..400, 0..POSITIONS, POSITIONS - 50..POSITIONS];
        let mask = seen.iter().flat_map(|seen| {
            (0..POSITIONS).map(move |position| match seen.contains(&position) {
                true => 0.0,
                false => f32::NEG_INFINITY,
            })
        });
        let mask = Tensor::from_vec(mask.collect::<Vec<_>>(), (3, POSITIONS), &Device::Cpu)?;

        let scores = queries.reshape((2, 6, 2))?.matmul(&keys.t()?)?;
        let scores = scores
            .reshape((4, 3, POSITIONS))?
            .broadcast_add(&mask)?
            .reshape((2, 6, POSITIONS))?;
        let expected = ops::softmax_last_dim(&scores)?.matmul(&values)?;
        let expected = expected.reshape((4, 3, 2))?.transpose(0, 1)?;

        let (keys, values) = (keys.to_dtype(DType::F16)?, values.to_dtype(DType::F16)?);
        let found = attend(&queries, &keys, &values, Some(&mask), None)?;
        let found: Vec<f32> = found.flatten_all()?.to_vec1()?;
        let expected: Vec<f32> = expected.flatten_all()?.to_vec1()?;
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-4, "{found}, {expected}");
        }
        Ok(())
    }
}
