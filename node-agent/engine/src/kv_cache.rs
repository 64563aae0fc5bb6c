//! The keys and values of one sequence, for the layers that this process runs.
//!
//! Decides: when memory is taken (a block of positions at a time) and shared (forks share blocks until one of them writes). The
//! attention kernel defines the layout inside a block. Layers that see a window of positions give back the blocks behind it. Refuses: gaps
//! and overwriting. A layer only takes the position after its last one; `truncate` goes back, as far as the window allows.

use std::ops::Range;
use std::sync::Arc;

use half::f16;

use crate::accelerator::DeviceKv;
use crate::kernels::{BLOCK_POSITIONS, KvShape};
use crate::model::Model;

/// The KV cache of one sequence, F16.
pub struct KvCache {
    shape: KvShape,
    context_length: usize,
    /// In the order of their layers.
    layers: Vec<LayerKv>,
}

/// The cache of one layer.
#[derive(Clone)]
pub(crate) struct LayerKv {
    layer: usize,
    /// Positions that a row sees, its own among them; `None`: all.
    window: Option<usize>,
    /// Positions taken, those of blocks that were given back among them.
    len: usize,
    /// Blocks given back.
    first_block: usize,
    keys: Vec<Arc<[f16]>>,
    values: Vec<Arc<[f16]>>,
    /// Where the layer runs on an accelerator; there are no blocks then.
    device: Option<DeviceKv>,
}

impl KvCache {
    /// An empty cache for these layers, of at most `context_length` positions. Allocates as it grows.
    pub fn new(model: &Model, layers: &[Range<usize>], context_length: usize) -> KvCache {
        // All layers of a model have the same shape.
        let attention = &model.spec().layers[0].attention;
        let window = |layer: usize| model.spec().layers.get(layer)?.attention.window;
        let mut layers: Vec<usize> = layers.iter().cloned().flatten().collect();
        layers.sort_unstable();
        layers.dedup();
        KvCache {
            shape: KvShape {
                kv_heads: attention.kv_heads,
                head_dim: attention.head_dim,
            },
            context_length,
            layers: layers
                .into_iter()
                .map(|layer| LayerKv::new(layer, window(layer)))
                .collect(),
        }
    }

    /// Positions that every layer holds. While a batch is between two windows of this process, the earlier window holds more.
    pub fn len(&self) -> usize {
        self.layers.iter().map(|layer| layer.len).min().unwrap_or(0)
    }

    /// Whether some layer holds nothing yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The most positions that it takes.
    pub fn context_length(&self) -> usize {
        self.context_length
    }

    /// Keeps only the first `positions` positions, in every layer, and frees the blocks that held only later ones. A layer that has given
    /// back what the next position would see keeps nothing, so that what comes next is refused.
    pub fn truncate(&mut self, positions: usize) {
        for layer in &mut self.layers {
            layer.truncate(positions);
        }
    }

    /// A cache of the same content. Memory is shared until either is written to, and then copied a block at a time.
    pub fn fork(&self) -> KvCache {
        KvCache {
            shape: self.shape,
            context_length: self.context_length,
            layers: self.layers.clone(),
        }
    }

    /// Bytes of memory held, here and on an accelerator, those shared with forks included.
    pub fn bytes(&self) -> u64 {
        let block = (self.shape.block_len() * size_of::<f16>()) as u64;
        let bytes = |layer: &LayerKv| {
            let blocks = (layer.keys.len() + layer.values.len()) as u64;
            let device = layer.device.as_ref();
            blocks * block + device.map_or(0, |device| device.bytes(self.shape))
        };
        self.layers.iter().map(bytes).sum()
    }

    pub(crate) fn shape(&self) -> KvShape {
        self.shape
    }

    /// The caches of `layers`, in order; `None` when one of them is not here.
    pub(crate) fn window(&mut self, layers: Range<usize>) -> Option<&mut [LayerKv]> {
        let first = self
            .layers
            .binary_search_by_key(&layers.start, |kv| kv.layer)
            .ok()?;
        let window = self.layers.get_mut(first..first + layers.len())?;
        // Layers are in order and without duplicates, so checking the last one is enough.
        (window.last()?.layer + 1 == layers.end).then_some(window)
    }
}

impl LayerKv {
    fn new(layer: usize, window: Option<usize>) -> LayerKv {
        LayerKv {
            layer,
            window,
            len: 0,
            first_block: 0,
            keys: Vec::new(),
            values: Vec::new(),
            device: None,
        }
    }

    /// Whether a layer can continue this cache: a layer on an accelerator if `on_device`, else one on the CPU.
    pub fn fits(&self, on_device: bool) -> bool {
        self.len == 0 || self.device.is_some() == on_device
    }

    pub fn layer(&self) -> usize {
        self.layer
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Appends positions: `keys` and `values` are rows of `kv_heads * head_dim` numbers.
    pub fn append(&mut self, shape: KvShape, keys: &[f32], values: &[f32]) {
        let row = shape.row_len();
        self.device = None;
        let unseen = self.seen_from(self.len) / BLOCK_POSITIONS;
        let unseen = unseen.saturating_sub(self.first_block).min(self.keys.len());
        self.keys.drain(..unseen);
        self.values.drain(..unseen);
        self.first_block += unseen;
        for (key, value) in keys.chunks_exact(row).zip(values.chunks_exact(row)) {
            let (block, position) = (self.len / BLOCK_POSITIONS, self.len % BLOCK_POSITIONS);
            let block = block - self.first_block;
            if block == self.keys.len() {
                self.keys.push(new_block(shape));
                self.values.push(new_block(shape));
            }
            shape.store_key(Arc::make_mut(&mut self.keys[block]), position, key);
            shape.store_value(Arc::make_mut(&mut self.values[block]), position, value);
            self.len += 1;
        }
    }

    /// The first position that the row at `position` sees.
    fn seen_from(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window.unwrap_or(usize::MAX))
    }

    /// The first block that is here.
    pub fn first_block(&self) -> usize {
        self.first_block
    }

    /// The blocks of keys from the first one on, as the attention kernel takes them.
    pub fn keys(&self) -> Vec<&[f16]> {
        self.keys.iter().map(|block| &**block).collect()
    }

    /// The blocks of values.
    pub fn values(&self) -> Vec<&[f16]> {
        self.values.iter().map(|block| &**block).collect()
    }

    /// As [`append`](Self::append), on an accelerator: each kv_heads x rows x head_dim.
    #[cfg(feature = "accelerator")]
    pub fn append_on_device(
        &mut self,
        keys: &candle_core::Tensor,
        values: &candle_core::Tensor,
        context_length: usize,
    ) -> candle_core::Result<()> {
        let device = self.device.get_or_insert_default();
        device.append(self.len, keys, values, context_length)?;
        self.len += keys.dim(1)?;
        Ok(())
    }

    /// The keys and values held, each kv_heads x positions x head_dim; `None` when there are none on an accelerator.
    #[cfg(feature = "accelerator")]
    pub fn read_on_device(
        &self,
    ) -> candle_core::Result<Option<(candle_core::Tensor, candle_core::Tensor)>> {
        match &self.device {
            Some(device) => device.read(self.len),
            None => Ok(None),
        }
    }

    pub fn truncate(&mut self, positions: usize) {
        self.len = self.len.min(positions);
        if self.seen_from(self.len) < self.first_block * BLOCK_POSITIONS {
            (self.len, self.first_block) = (0, 0);
        }
        let blocks = self.len.div_ceil(BLOCK_POSITIONS) - self.first_block;
        self.keys.truncate(blocks);
        self.values.truncate(blocks);
    }
}

fn new_block(shape: KvShape) -> Arc<[f16]> {
    std::iter::repeat_n(f16::ZERO, shape.block_len()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape = KvShape {
        kv_heads: 2,
        head_dim: 16,
    };

    fn cache(layers: &[usize]) -> KvCache {
        KvCache {
            shape: SHAPE,
            context_length: 1000,
            layers: layers
                .iter()
                .map(|&layer| LayerKv::new(layer, None))
                .collect(),
        }
    }

    fn append(kv: &mut KvCache, rows: usize) {
        let numbers = vec![1.0; rows * SHAPE.row_len()];
        for layer in &mut kv.layers {
            layer.append(SHAPE, &numbers, &numbers);
        }
    }

    #[test]
    fn memory_is_taken_a_block_at_a_time_and_given_back() {
        let mut kv = cache(&[3, 4]);
        assert_eq!(kv.bytes(), 0);
        let block = 2 * 2 * BLOCK_POSITIONS * SHAPE.row_len() * 2;
        for (rows, blocks) in [
            (1, 1),
            (BLOCK_POSITIONS - 1, 1),
            (1, 2),
            (BLOCK_POSITIONS, 3),
        ] {
            append(&mut kv, rows);
            assert_eq!(kv.bytes(), (blocks * block) as u64);
        }
        kv.truncate(BLOCK_POSITIONS);
        assert_eq!(kv.bytes(), block as u64);
        kv.truncate(0);
        assert_eq!((kv.bytes(), kv.is_empty()), (0, true));
    }

    #[test]
    fn a_fork_shares_every_block_but_the_one_that_is_written() {
        let mut kv = cache(&[0]);
        append(&mut kv, 2 * BLOCK_POSITIONS + 1);
        let mut fork = kv.fork();
        let shared = |a: &KvCache, b: &KvCache| -> Vec<bool> {
            let blocks = a.layers[0].keys.iter().zip(&b.layers[0].keys);
            blocks.map(|(a, b)| Arc::ptr_eq(a, b)).collect()
        };
        assert_eq!(shared(&kv, &fork), [true, true, true]);
        append(&mut fork, 1);
        assert_eq!(shared(&kv, &fork), [true, true, false]);
        fork.truncate(BLOCK_POSITIONS + 3);
        append(&mut fork, 1);
        assert_eq!(shared(&kv, &fork), [true, false]);
    }

    #[test]
    fn a_layer_with_a_window_keeps_what_the_next_row_sees() {
        const WINDOW: usize = BLOCK_POSITIONS + 10;
        let mut kv = cache(&[0]);
        kv.layers[0].window = Some(WINDOW);
        append(&mut kv, 5 * BLOCK_POSITIONS);
        let held = |kv: &KvCache| (kv.layers[0].first_block, kv.layers[0].keys.len());
        assert_eq!(
            held(&kv),
            (0, 5),
            "a pass has not ended before its rows are seen"
        );
        append(&mut kv, 1);
        // The row at 320 sees from 247 on.
        assert_eq!(held(&kv), (3, 3));
        assert_eq!(kv.len(), 5 * BLOCK_POSITIONS + 1);
        kv.truncate(3 * BLOCK_POSITIONS + WINDOW - 1);
        assert_eq!(
            (kv.len(), held(&kv)),
            (3 * BLOCK_POSITIONS + WINDOW - 1, (3, 2))
        );
        kv.truncate(3 * BLOCK_POSITIONS + WINDOW - 2);
        assert_eq!((kv.len(), held(&kv)), (0, (0, 0)));
    }

    #[test]
    fn a_window_is_found_only_where_all_its_layers_are() {
        let mut kv = cache(&[2, 3, 4, 7, 8]);
        for (window, found) in [
            (2..5, true),
            (3..4, true),
            (7..9, true),
            (4..8, false),
            (0..3, false),
            (8..10, false),
        ] {
            assert_eq!(kv.window(window.clone()).is_some(), found, "{window:?}");
        }
    }
}
