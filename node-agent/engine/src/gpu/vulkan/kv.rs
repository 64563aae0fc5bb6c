//! Keys and values of layers on the GPU: F16, in blocks of positions like those in memory. A layer's blocks, of all sequences, lie in
//! one buffer, so a pass names them by their places.
//!
//! Decides: how the buffer grows (by half, from sixteen blocks on), and that forks share blocks until one of them writes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prima_model::Attention;
use prima_vulkan::{Buffer, Device, KV_POSITIONS, KvShape, VulkanError};

use crate::kernels::BLOCK_POSITIONS;
use crate::kv_cache::DeviceKv;
use crate::kv_memory::{KvMemory, Taken};

/// Rank 0 counts the blocks of all members alike.
const _: () = assert!(KV_POSITIONS == BLOCK_POSITIONS);

/// Blocks that are first allocated.
const FIRST_BLOCKS: usize = 16;

/// What a position leaves behind in a layer.
pub(super) fn device_shape(attention: &Attention) -> KvShape {
    KvShape {
        kv_heads: attention.kv_heads,
        head_dim: attention.head_dim,
        values_in_keys: attention.values_in_keys(),
    }
}

/// The blocks of a layer.
pub(super) struct BlockPool {
    block_bytes: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    buffer: Option<Arc<Buffer>>,
    blocks: usize,
    free: Vec<u32>,
}

/// Blocks of one layer and sequence, which forks share.
#[derive(Clone)]
pub(super) struct DeviceBlocks {
    pool: Arc<BlockPool>,
    /// Blocks given back, before those that are here.
    first: usize,
    blocks: Vec<Arc<Block>>,
}

/// A block's place in the pool.
struct Block {
    pool: Arc<BlockPool>,
    place: u32,
    _taken: Taken,
}

/// A block that a fork is about to write, and the one that it writes instead.
pub(super) struct Unshared {
    place: usize,
    from: Arc<Block>,
    to: Arc<Block>,
}

impl BlockPool {
    pub fn new(block_bytes: u64) -> Arc<BlockPool> {
        Arc::new(BlockPool {
            block_bytes,
            state: Mutex::default(),
        })
    }

    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Sees to it that so many blocks are free.
    ///
    /// # Errors
    /// [`VulkanError::OutOfMemory`], also when kernels could not see all blocks at once, or the driver gives no such buffer.
    pub fn reserve(&self, device: &Device, blocks: usize) -> Result<(), VulkanError> {
        let mut state = self.state();
        let missing = blocks.saturating_sub(state.free.len());
        if missing == 0 {
            return Ok(());
        }
        let least = state.blocks + missing;
        let most = (device.most_buffer_bytes() / self.block_bytes) as usize;
        if least > most {
            return Err(VulkanError::OutOfMemory {
                bytes: missing as u64 * self.block_bytes,
                available: (most - state.blocks) as u64 * self.block_bytes,
            });
        }
        let wanted = least
            .max(state.blocks + state.blocks / 2)
            .max(FIRST_BLOCKS)
            .min(most);
        let grown = device.buffer(wanted as u64 * self.block_bytes)?;
        if let Some(old) = state.buffer.take() {
            let mut pass = device.pass()?;
            pass.copy(old.whole(), grown.whole());
            pass.finish()?;
        }
        let new = state.blocks as u32..wanted as u32;
        // The first is taken first.
        state.free.splice(0..0, new.rev());
        (state.buffer, state.blocks) = (Some(Arc::new(grown)), wanted);
        Ok(())
    }

    /// Where the blocks lie.
    ///
    /// # Errors
    /// [`VulkanError::OutOfMemory`] while none were reserved.
    pub fn buffer(&self) -> Result<Arc<Buffer>, VulkanError> {
        let buffer = self.state().buffer.clone();
        buffer.ok_or(VulkanError::OutOfMemory {
            bytes: self.block_bytes,
            available: 0,
        })
    }

    fn take(self: &Arc<Self>, memory: &KvMemory) -> Option<Arc<Block>> {
        let place = self.state().free.pop()?;
        Some(Arc::new(Block {
            pool: Arc::clone(self),
            place,
            _taken: memory.take(self.block_bytes),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.pool.state().free.push(self.place);
    }
}

impl DeviceBlocks {
    pub fn new(pool: &Arc<BlockPool>) -> DeviceBlocks {
        DeviceBlocks {
            pool: Arc::clone(pool),
            first: 0,
            blocks: Vec::new(),
        }
    }

    pub fn is_of(&self, pool: &Arc<BlockPool>) -> bool {
        Arc::ptr_eq(&self.pool, pool)
    }

    /// How many blocks `rows` more positions after the first `len` take, with one for a block that a fork shares.
    pub fn missing(&self, len: usize, rows: usize) -> usize {
        let held = self.first + self.blocks.len();
        let new = (len + rows).div_ceil(KV_POSITIONS).saturating_sub(held);
        new + usize::from(self.shared(len).is_some())
    }

    /// The block that the position `len` is written to, if a fork has it, too.
    fn shared(&self, len: usize) -> Option<usize> {
        let place = (len / KV_POSITIONS).checked_sub(self.first)?;
        let block = self.blocks.get(place)?;
        (Arc::strong_count(block) > 1).then_some(place)
    }

    /// A block of its own for the one that a fork shares, whose content is then to be copied. `None` if it shares none that is written.
    pub fn unshare(&self, len: usize, memory: &KvMemory) -> Option<Unshared> {
        let place = self.shared(len)?;
        Some(Unshared {
            place,
            from: Arc::clone(&self.blocks[place]),
            to: self.pool.take(memory)?,
        })
    }

    /// Takes the block whose content was copied.
    pub fn put(&mut self, unshared: Unshared) {
        self.blocks[unshared.place] = unshared.to;
    }

    /// Gives back the blocks of positions before `kept_from`.
    pub fn give_back(&mut self, kept_from: usize) {
        let gone = (kept_from / KV_POSITIONS).saturating_sub(self.first);
        let gone = gone.min(self.blocks.len());
        self.blocks.drain(..gone);
        self.first += gone;
    }

    /// Takes blocks for `rows` more positions after the first `len`.
    pub fn extend(&mut self, len: usize, rows: usize, memory: &KvMemory) {
        while self.first + self.blocks.len() < (len + rows).div_ceil(KV_POSITIONS) {
            match self.pool.take(memory) {
                Some(block) => self.blocks.push(block),
                None => return,
            }
        }
    }

    /// The first block that is here.
    pub fn first(&self) -> usize {
        self.first
    }

    /// The places of the blocks.
    pub fn places(&self) -> impl Iterator<Item = u32> {
        self.blocks.iter().map(|block| block.place)
    }
}

impl DeviceKv for DeviceBlocks {
    fn fork(&self) -> Box<dyn DeviceKv> {
        Box::new(self.clone())
    }

    fn first_position(&self) -> usize {
        self.first * KV_POSITIONS
    }

    fn truncate(&mut self, len: usize) {
        let blocks = len.div_ceil(KV_POSITIONS).saturating_sub(self.first);
        self.blocks.truncate(blocks);
    }

    fn bytes(&self) -> u64 {
        self.blocks.len() as u64 * self.pool.block_bytes
    }
}

impl Unshared {
    /// The places from and to which it is copied.
    pub fn places(&self) -> (u32, u32) {
        (self.from.place, self.to.place)
    }
}

#[cfg(test)]
mod tests {
    use super::super::open::VulkanGpu;
    use super::*;
    use crate::gpu::backend::GpuChoice;

    #[test]
    fn a_buffer_grows_to_what_a_driver_gives_and_no_further() {
        const BLOCK: u64 = 1 << 16;
        let gpu = VulkanGpu::open(GpuChoice::Software).unwrap();
        let device = gpu.device.with_most_allocated_bytes(20 * BLOCK);
        let pool = BlockPool::new(BLOCK);
        let bytes = || pool.buffer().unwrap().bytes();
        pool.reserve(&device, 1).unwrap();
        assert_eq!(bytes(), FIRST_BLOCKS as u64 * BLOCK);
        // By half, it would have 24.
        pool.reserve(&device, FIRST_BLOCKS + 1).unwrap();
        assert_eq!(bytes(), 20 * BLOCK);
        let refused = pool.reserve(&device, 21);
        assert!(matches!(refused, Err(VulkanError::OutOfMemory { .. })));
    }
}
