//! Keys and values of one layer and sequence on the GPU: F16, one tensor each, with room to grow.
//!
//! Decides: how it grows (doubling, from four blocks on), when what no row sees any more goes (then), and when forks stop sharing memory (at
//! the first write).

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use crate::kernels::BLOCK_POSITIONS;
use crate::kv_cache::DeviceKv;
use crate::kv_memory::{KvMemory, Taken};

/// Positions first allocated.
const FIRST_CAPACITY: usize = 4 * BLOCK_POSITIONS;

/// The largest F16 number. Keys and values are clamped to this range, as on the CPU.
const LARGEST_F16: f32 = 65_504.0;

#[derive(Clone, Default)]
pub(crate) struct CandleKv {
    /// The position of the buffers' first row.
    first: usize,
    buffers: Option<Arc<Buffers>>,
}

/// Each `kv_heads x capacity x head_dim`.
struct Buffers {
    keys: Tensor,
    values: Tensor,
    _taken: Taken,
}

/// Which positions an append sees and keeps.
pub(crate) struct Reach {
    /// The first that the first new row sees.
    pub seen_from: usize,
    /// The first that is not given back.
    pub kept_from: usize,
    /// The most positions that there will be.
    pub context_length: usize,
}

impl CandleKv {
    /// Writes `keys` and `values` (each kv_heads x rows x head_dim, F32) after the first `len` positions, and returns those that
    /// are seen: each kv_heads x positions x head_dim, F16, and no copy: for use before the next append.
    pub fn append(
        &mut self,
        len: usize,
        reach: &Reach,
        (keys, values): (&Tensor, &Tensor),
        memory: &KvMemory,
    ) -> Result<(Tensor, Tensor)> {
        let end = len + keys.dim(1)?;
        let buffers = match &self.buffers {
            Some(own) if end - self.first <= own.capacity() && Arc::strong_count(own) == 1 => {
                Arc::clone(own)
            }
            _ => self.reallocated(len..end, reach, keys, memory)?,
        };
        let at = len - self.first;
        buffers.keys.slice_set(&half(keys)?, 1, at)?;
        buffers.values.slice_set(&half(values)?, 1, at)?;
        let from = reach.seen_from;
        let seen = |tensor: &Tensor| tensor.narrow(1, from - self.first, end - from);
        let read = (seen(&buffers.keys)?, seen(&buffers.values)?);
        self.buffers = Some(buffers);
        Ok(read)
    }

    /// New buffers with what is kept of the old ones, and room for the `new` positions; `like` gives the number of heads, their size and the
    /// device.
    fn reallocated(
        &mut self,
        new: Range<usize>,
        reach: &Reach,
        like: &Tensor,
        memory: &KvMemory,
    ) -> Result<Arc<Buffers>> {
        let (heads, _, head_dim) = like.dims3()?;
        let first = reach.kept_from.max(self.first).min(new.start);
        let held = new.start - first;
        let most = reach.context_length.max(new.end) - first;
        let capacity = (new.end - first)
            .max(2 * held)
            .max(FIRST_CAPACITY)
            .min(most);
        let zeros = || Tensor::zeros((heads, capacity, head_dim), DType::F16, like.device());
        let bytes = 2 * heads * capacity * head_dim * DType::F16.size_in_bytes();
        let grown = Buffers {
            keys: zeros()?,
            values: zeros()?,
            _taken: memory.take(bytes as u64),
        };
        if let Some(old) = self.buffers.as_ref().filter(|_| held > 0) {
            let kept = |tensor: &Tensor| {
                let kept = tensor.narrow(1, first - self.first, held)?;
                kept.contiguous()
            };
            grown.keys.slice_set(&kept(&old.keys)?, 1, 0)?;
            grown.values.slice_set(&kept(&old.values)?, 1, 0)?;
        }
        self.first = first;
        Ok(Arc::new(grown))
    }
}

impl DeviceKv for CandleKv {
    fn fork(&self) -> Box<dyn DeviceKv> {
        Box::new(self.clone())
    }

    fn first_position(&self) -> usize {
        self.first
    }

    /// What it has stays for further positions.
    fn truncate(&mut self, _len: usize) {}

    fn bytes(&self) -> u64 {
        let bytes = |own: &Arc<Buffers>| 2 * own.keys.elem_count() * DType::F16.size_in_bytes();
        self.buffers.as_ref().map_or(0, bytes) as u64
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
