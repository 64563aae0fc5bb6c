//! Keys and values of one layer and sequence on the accelerator: F16, one tensor each, with room to grow.
//!
//! Decides: how it grows (doubling, from four blocks on), and when forks stop sharing memory (at the first write).

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use crate::kernels::{BLOCK_POSITIONS, KvShape};

/// Positions first allocated.
const FIRST_CAPACITY: usize = 4 * BLOCK_POSITIONS;

/// The largest F16 number. Keys and values are clamped to this range, as on the CPU.
const LARGEST_F16: f32 = 65_504.0;

#[derive(Clone, Default)]
pub(crate) struct DeviceKv {
    buffers: Option<Arc<Buffers>>,
}

/// Each `kv_heads x capacity x head_dim`.
struct Buffers {
    keys: Tensor,
    values: Tensor,
}

impl DeviceKv {
    /// Writes `keys` and `values` (each kv_heads x rows x head_dim, F32) after the first `len` positions. Never takes memory for
    /// more than `context_length` positions.
    pub fn append(
        &mut self,
        len: usize,
        keys: &Tensor,
        values: &Tensor,
        context_length: usize,
    ) -> Result<()> {
        let end = len + keys.dim(1)?;
        if self.capacity() < end || self.is_shared() {
            let capacity = if self.capacity() < end {
                end.max(2 * self.capacity())
                    .max(FIRST_CAPACITY)
                    .min(context_length)
            } else {
                self.capacity()
            };
            self.reallocate(len, keys, capacity)?;
        }
        if let Some(buffers) = &self.buffers {
            buffers.keys.slice_set(&half(keys)?, 1, len)?;
            buffers.values.slice_set(&half(values)?, 1, len)?;
        }
        Ok(())
    }

    /// The first `len` positions of keys and of values, as F32: each kv_heads x len x head_dim.
    pub fn read(&self, len: usize) -> Result<Option<(Tensor, Tensor)>> {
        let Some(buffers) = &self.buffers else {
            return Ok(None);
        };
        let read = |tensor: &Tensor| tensor.narrow(1, 0, len)?.to_dtype(DType::F32);
        Ok(Some((read(&buffers.keys)?, read(&buffers.values)?)))
    }

    /// Bytes of device memory.
    pub fn bytes(&self, shape: KvShape) -> u64 {
        (2 * self.capacity() * shape.row_len() * DType::F16.size_in_bytes()) as u64
    }

    fn capacity(&self) -> usize {
        self.buffers
            .as_ref()
            .map_or(0, |buffers| buffers.keys.dims()[1])
    }

    /// Whether a fork shares these buffers.
    fn is_shared(&self) -> bool {
        self.buffers
            .as_ref()
            .is_some_and(|buffers| Arc::strong_count(buffers) > 1)
    }

    /// New buffers with the first `len` positions of the old ones; `like` gives the number of heads, their size and the device.
    fn reallocate(&mut self, len: usize, like: &Tensor, capacity: usize) -> Result<()> {
        let (heads, _, head_dim) = like.dims3()?;
        let new = || Tensor::zeros((heads, capacity, head_dim), DType::F16, like.device());
        let grown = Buffers {
            keys: new()?,
            values: new()?,
        };
        if let Some(old) = self.buffers.as_ref().filter(|_| len > 0) {
            let held = |tensor: &Tensor| tensor.narrow(1, 0, len)?.contiguous();
            grown.keys.slice_set(&held(&old.keys)?, 1, 0)?;
            grown.values.slice_set(&held(&old.values)?, 1, 0)?;
        }
        self.buffers = Some(Arc::new(grown));
        Ok(())
    }
}

fn half(rows: &Tensor) -> Result<Tensor> {
    rows.clamp(-LARGEST_F16, LARGEST_F16)?
        .to_dtype(DType::F16)?
        .contiguous()
}
