//! The keys and values of one sequence, for the layers that this process runs.
//!
//! Decides: which positions a layer still needs: those that the next row sees, and a window more, so that it can go back by as much. Where
//! they lie is up to the executor of the layer: in memory in the format that was asked for, on a GPU as F16. Refuses:
//! gaps and overwriting. A layer only takes the position after its last one; `truncate` goes back, as far as the window allows.

use std::any::Any;
use std::ops::Range;

use prima_model::KvFormat;

use crate::cpu::KvBlocks;
use crate::kernels::KvShape;
use crate::kv_memory::KvMemory;
use crate::layer::kv_shape;
use crate::model::Model;

/// The KV cache of one sequence.
pub struct KvCache {
    shape: KvShape,
    context_length: usize,
    /// In the order of their layers.
    layers: Vec<LayerKv>,
}

/// What keeps the keys and values of a layer and a sequence on a GPU.
pub(crate) trait DeviceKv: Any + Send + Sync {
    fn fork(&self) -> Box<dyn DeviceKv>;

    /// The first position held.
    fn first_position(&self) -> usize;

    /// Frees what holds only positions from the first `len` on.
    fn truncate(&mut self, len: usize);

    /// Bytes of device memory.
    fn bytes(&self) -> u64;
}

/// The cache of one layer.
#[derive(Clone)]
pub(crate) struct LayerKv {
    layer: usize,
    /// Positions that a row sees, its own among them; `None`: all.
    window: Option<usize>,
    /// Of blocks in memory.
    format: KvFormat,
    memory: KvMemory,
    /// Positions taken, those that were given back among them.
    len: usize,
    store: Store,
}

/// Where it lies, which the first rows decide.
enum Store {
    Cpu(KvBlocks),
    Gpu(Box<dyn DeviceKv>),
}

impl Clone for Store {
    fn clone(&self) -> Self {
        match self {
            Store::Cpu(blocks) => Store::Cpu(blocks.clone()),
            Store::Gpu(device) => Store::Gpu(device.fork()),
        }
    }
}

impl KvCache {
    /// An empty cache for these layers, of at most `context_length` positions, in `format` as far as a layer takes it
    /// ([`Attention::kv_format`](prima_model::Attention::kv_format)). Allocates as it grows.
    pub fn new(
        model: &Model,
        layers: &[Range<usize>],
        context_length: usize,
        format: KvFormat,
    ) -> KvCache {
        let memory = KvMemory::default();
        Self::counted(model, layers, context_length, format, &memory)
    }

    /// One whose bytes, and those of its forks, `memory` counts.
    pub fn counted(
        model: &Model,
        layers: &[Range<usize>],
        context_length: usize,
        format: KvFormat,
        memory: &KvMemory,
    ) -> KvCache {
        // All layers of a model have the same shape.
        let attention = &model.spec().layers[0].attention;
        let format = attention.kv_format(format);
        let window = |layer: usize| model.spec().layers.get(layer)?.attention.window;
        let mut layers: Vec<usize> = layers.iter().cloned().flatten().collect();
        layers.sort_unstable();
        layers.dedup();
        KvCache {
            shape: kv_shape(attention),
            context_length,
            layers: layers
                .into_iter()
                .map(|layer| LayerKv::new(layer, window(layer), format, memory))
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

    /// Bytes of memory held, here and on a GPU, those shared with forks included.
    pub fn bytes(&self) -> u64 {
        let bytes = |layer: &LayerKv| match &layer.store {
            Store::Cpu(blocks) => blocks.bytes(),
            Store::Gpu(device) => device.bytes(),
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
    fn new(layer: usize, window: Option<usize>, format: KvFormat, memory: &KvMemory) -> LayerKv {
        LayerKv {
            layer,
            window,
            format,
            memory: memory.clone(),
            len: 0,
            store: Store::Cpu(KvBlocks::EMPTY),
        }
    }

    pub fn layer(&self) -> usize {
        self.layer
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether what it holds lies in memory blocks; true if it holds nothing.
    pub fn is_on_cpu(&self) -> bool {
        self.len == 0 || matches!(self.store, Store::Cpu(_))
    }

    /// What keeps it on a GPU, if that is a `T`.
    pub fn device<T: DeviceKv>(&self) -> Option<&T> {
        match &self.store {
            Store::Cpu(_) => None,
            Store::Gpu(device) => (&**device as &dyn Any).downcast_ref(),
        }
    }

    /// What keeps it on a GPU, `new` if it lies elsewhere (and so holds nothing).
    pub fn on_device<T: DeviceKv>(&mut self, new: impl FnOnce() -> T) -> &mut T {
        if self.device::<T>().is_none() {
            self.store = Store::Gpu(Box::new(new()));
        }
        let own = match &mut self.store {
            Store::Gpu(device) => (&mut **device as &mut dyn Any).downcast_mut(),
            Store::Cpu(_) => None,
        };
        own.unwrap_or_else(|| unreachable!("it lies there since the lines above"))
    }

    /// Counts `rows` more positions, which the device takes.
    pub fn grow(&mut self, rows: usize) {
        self.len += rows;
    }

    /// What counts its bytes.
    pub fn memory(&self) -> &KvMemory {
        &self.memory
    }

    /// Appends positions to the blocks: `keys` and `values` are rows, as `shape` has them.
    pub fn append(&mut self, shape: KvShape, keys: &[f32], values: &[f32]) {
        let kept_from = self.kept_from(self.len);
        if let Store::Gpu(_) = &self.store {
            self.store = Store::Cpu(KvBlocks::EMPTY);
        }
        if let Store::Cpu(blocks) = &mut self.store {
            let (len, rows) = (self.len, (keys, values));
            blocks.append(shape, self.format, len, kept_from, rows, &self.memory);
            self.len += keys.len() / shape.row_len();
        }
    }

    /// The blocks in memory; none if what it holds lies on a GPU.
    pub fn blocks(&self) -> &KvBlocks {
        const NONE: &KvBlocks = &KvBlocks::EMPTY;
        match &self.store {
            Store::Cpu(blocks) => blocks,
            Store::Gpu(_) => NONE,
        }
    }

    /// The first position that the row at `position` sees.
    pub fn seen_from(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window.unwrap_or(usize::MAX))
    }

    /// The first position that is kept when the row at `position` comes.
    pub fn kept_from(&self, position: usize) -> usize {
        let kept = self.window.map_or(usize::MAX, |window| 2 * window);
        (position + 1).saturating_sub(kept)
    }

    pub fn truncate(&mut self, positions: usize) {
        self.len = self.len.min(positions);
        let first_held = match &self.store {
            Store::Cpu(blocks) => blocks.first_position(),
            Store::Gpu(device) => device.first_position(),
        };
        if self.len == 0 || self.seen_from(self.len) < first_held {
            (self.len, self.store) = (0, Store::Cpu(KvBlocks::EMPTY));
        }
        match &mut self.store {
            Store::Cpu(blocks) => blocks.truncate(self.len),
            Store::Gpu(device) => device.truncate(self.len),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::BLOCK_POSITIONS;

    const SHAPE: KvShape = KvShape {
        kv_heads: 2,
        head_dim: 32,
        values_in_keys: None,
    };

    /// Formats, and bytes of a block of keys and values.
    const BLOCKS: [(KvFormat, usize); 2] = [
        (KvFormat::F16, 2 * 2 * BLOCK_POSITIONS * 64),
        (KvFormat::Q8_0, 2 * BLOCK_POSITIONS * (64 + 2 * 2)),
    ];

    fn cache(format: KvFormat, layers: &[usize]) -> KvCache {
        KvCache {
            shape: SHAPE,
            context_length: 1000,
            layers: layers
                .iter()
                .map(|&layer| LayerKv::new(layer, None, format, &KvMemory::default()))
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
        for (format, block) in BLOCKS {
            let mut kv = cache(format, &[3, 4]);
            assert_eq!(kv.bytes(), 0);
            for (rows, blocks) in [
                (1, 1),
                (BLOCK_POSITIONS - 1, 1),
                (1, 2),
                (BLOCK_POSITIONS, 3),
            ] {
                append(&mut kv, rows);
                assert_eq!(kv.bytes(), (2 * blocks * block) as u64);
            }
            kv.truncate(BLOCK_POSITIONS);
            assert_eq!(kv.bytes(), 2 * block as u64);
            kv.truncate(0);
            assert_eq!((kv.bytes(), kv.is_empty()), (0, true));
        }
    }

    #[test]
    fn what_forks_share_counts_once() {
        for (format, block) in BLOCKS {
            let block = block as u64;
            let memory = KvMemory::default();
            let mut kv = cache(format, &[0]);
            kv.layers[0].memory = memory.clone();
            append(&mut kv, BLOCK_POSITIONS + 1);
            let mut fork = kv.fork();
            assert_eq!((memory.bytes(), kv.bytes()), (2 * block, 2 * block));
            append(&mut fork, 1);
            assert_eq!(memory.bytes(), 3 * block, "the block that was written");
            drop(kv);
            assert_eq!(memory.bytes(), 2 * block);
            fork.truncate(0);
            assert_eq!(memory.bytes(), 0);
        }
    }

    #[test]
    fn a_layer_with_a_window_can_go_back_by_a_window() {
        const WINDOW: usize = BLOCK_POSITIONS + 10;
        let mut kv = cache(KvFormat::F16, &[0]);
        kv.layers[0].window = Some(WINDOW);
        append(&mut kv, 5 * BLOCK_POSITIONS);
        let held = |kv: &KvCache| {
            let blocks = kv.layers[0].blocks();
            (blocks.first(), blocks.blocks().len())
        };
        assert_eq!(
            held(&kv),
            (0, 5),
            "a pass has not ended before its rows are seen"
        );
        append(&mut kv, 1);
        // The row at 320 sees from 247 on, that at 246 from 173.
        assert_eq!(held(&kv), (2, 4));
        assert_eq!(kv.len(), 5 * BLOCK_POSITIONS + 1);
        kv.truncate(5 * BLOCK_POSITIONS + 1 - WINDOW);
        assert_eq!(
            (kv.len(), held(&kv)),
            (5 * BLOCK_POSITIONS + 1 - WINDOW, (2, 2))
        );
        kv.truncate(2 * BLOCK_POSITIONS + WINDOW - 2);
        assert_eq!((kv.len(), held(&kv)), (0, (0, 0)));
    }

    #[test]
    fn a_window_is_found_only_where_all_its_layers_are() {
        let mut kv = cache(KvFormat::F16, &[2, 3, 4, 7, 8]);
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
