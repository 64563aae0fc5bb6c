//! Keys and values of one layer and sequence on the GPU: F16, one tensor each, with room to grow.
//!
//! Decides: how it grows (doubling, from four blocks on), when what no row sees any more goes (then), and when forks stop sharing memory (at
//! the first write).

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use crate::kernels::{BLOCK_POSITIONS, KvShape};

/// Positions first allocated.
const FIRST_CAPACITY: usize = 4 * BLOCK_POSITIONS;

/// The largest F16 number. Keys and values are clamped to this range, as on the CPU.
const LARGEST_F16: f32 = 65_504.0;

#[derive(Clone, Default)]
pub(crate) struct DeviceKv {
    /// The position of the buffers' first row.
    first: usize,
    buffers: Option<Arc<Buffers>>,
}

/// Each `kv_heads x capacity x head_dim`.
struct Buffers {
    keys: Tensor,
    values: Tensor,
}

impl DeviceKv {
    /// Writes `keys` and `values` (each kv_heads x rows x head_dim, F32) after the first `len` positions, and returns those from
    /// `seen_from` on: each kv_heads x positions x head_dim, F32. Keeps none before, and never takes memory for positions beyond
    /// `context_length`.
    pub fn append(
        &mut self,
        len: usize,
        seen_from: usize,
        keys: &Tensor,
        values: &Tensor,
        context_length: usize,
    ) -> Result<(Tensor, Tensor)> {
        let end = len + keys.dim(1)?;
        let buffers = match &self.buffers {
            Some(own) if end - self.first <= own.capacity() && Arc::strong_count(own) == 1 => {
                Arc::clone(own)
            }
            _ => self.reallocated(len, seen_from, end, keys, context_length)?,
        };
        let at = len - self.first;
        buffers.keys.slice_set(&half(keys)?, 1, at)?;
        buffers.values.slice_set(&half(values)?, 1, at)?;
        let seen = |tensor: &Tensor| {
            let seen = tensor.narrow(1, seen_from - self.first, end - seen_from)?;
            seen.to_dtype(DType::F32)
        };
        let read = (seen(&buffers.keys)?, seen(&buffers.values)?);
        self.buffers = Some(buffers);
        Ok(read)
    }

    /// New buffers with what is still seen of the old ones, from where they begin from now on; `like` gives the number of heads, their size
    /// and the device.
    fn reallocated(
        &mut self,
        len: usize,
        seen_from: usize,
        end: usize,
        like: &Tensor,
        context_length: usize,
    ) -> Result<Arc<Buffers>> {
        let (heads, _, head_dim) = like.dims3()?;
        let held = len - seen_from;
        let most = context_length.max(end) - seen_from;
        let capacity = (end - seen_from).max(2 * held).max(FIRST_CAPACITY);
        let new = || {
            let shape = (heads, capacity.min(most), head_dim);
            Tensor::zeros(shape, DType::F16, like.device())
        };
        let grown = Buffers {
            keys: new()?,
            values: new()?,
        };
        if let Some(old) = self.buffers.as_ref().filter(|_| held > 0) {
            let seen = |tensor: &Tensor| {
                let seen = tensor.narrow(1, seen_from - self.first, held)?;
                seen.contiguous()
            };
            grown.keys.slice_set(&seen(&old.keys)?, 1, 0)?;
            grown.values.slice_set(&seen(&old.values)?, 1, 0)?;
        }
        self.first = seen_from;
        Ok(Arc::new(grown))
    }

    /// The first position held.
    pub fn first_position(&self) -> usize {
        self.first
    }

    /// Bytes of device memory.
    pub fn bytes(&self, shape: KvShape) -> u64 {
        let capacity = self.buffers.as_ref().map_or(0, |own| own.capacity());
        (2 * capacity * shape.row_len() * DType::F16.size_in_bytes()) as u64
    }
}

impl Buffers {
    fn capacity(&self) -> usize {
        self.keys.dims()[1]
    }
}

fn half(rows: &Tensor) -> Result<Tensor> {
    rows.clamp(-LARGEST_F16, LARGEST_F16)?
        .to_dtype(DType::F16)?
        .contiguous()
}
