//! Causal attention over the KV cache: grouped query heads share the reads of their KV head, scores exist for
//! one block of positions at a time, nothing is concatenated or repeated. Decides the order in which positions are
//! summed, which is the same for every batch and number of threads.
//!
//! The softmax is taken block by block with a running maximum (Milakov and Gimelshein 2018; Rabe and Staats
//! 2021): blocks of a chunk are folded in order, and chunks are folded in order, so that in decode the
//! chunks of a long context can be computed by several threads.

use std::ops::Range;

use super::isa_level::IsaLevel;
use super::shared_slice::SharedSlice;
use super::thread_pool::ThreadPool;

mod head_block;
mod kv_block;
mod span;

use kv_block::Head;
pub use kv_block::KvBlock;
use span::Partial;

/// Positions in a KV block.
pub const BLOCK_POSITIONS: usize = 64;

/// What one position of a layer has: `kv_heads` heads of keys, and of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    pub kv_heads: usize,
    /// Numbers of a key, and of a query.
    pub head_dim: usize,
    /// The first so many numbers of a key are its value, and there are no others (multi-head latent attention, DeepSeek-V2); both are
    /// multiples of 32. `None`: values are apart, and of `head_dim` numbers.
    pub values_in_keys: Option<usize>,
}

/// What is the same for all sequences of a batch.
#[derive(Debug, Clone, Copy)]
pub struct AttentionShape<'a> {
    /// Query heads, a multiple of the KV heads.
    pub heads: usize,
    pub kv: KvShape,
    /// What scores are multiplied by before the softmax: 1 / sqrt(head_dim) in most models.
    pub scale: f32,
    /// A row sees this many positions at most, its own among them; `None`: all before it.
    pub window: Option<usize>,
    /// Scores s become softcap * tanh(s / softcap), after the scale (Gemma 2).
    pub softcap: Option<f32>,
    /// A score for each query head that takes part in the softmax without a value, so that a row may attend to nothing (gpt-oss). Neither
    /// scaled nor capped.
    pub sinks: Option<&'a [f32]>,
}

/// The attention of consecutive rows of one sequence in one layer.
pub struct SequenceAttention<'a> {
    /// Rows of `heads * head_dim` numbers.
    pub queries: &'a [f32],
    /// Row `r` stands at position `first_position + r`, and sees the positions up to its own, as far back as the window goes.
    pub first_position: usize,
    /// The first block that is here; no row's window reaches further back.
    pub first_block: usize,
    /// Blocks from the first on, at least to the last row's position.
    pub blocks: &'a [&'a KvBlock],
    /// Rows of `heads * value_dim` numbers.
    pub out: &'a mut [f32],
}

/// Positions that keys interleave.
const KEY_LANES: usize = 16;

impl KvShape {
    /// Numbers of the keys of one position.
    pub fn row_len(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Numbers of the values of one position that are apart from its keys.
    pub fn value_row_len(&self) -> usize {
        match self.values_in_keys {
            Some(_) => 0,
            None => self.row_len(),
        }
    }

    /// Numbers of a value.
    pub fn value_dim(&self) -> usize {
        self.values_in_keys.unwrap_or(self.head_dim)
    }
}

/// Computes the attention of every sequence of a batch:
/// `out = softmax(softcap(scale * queries keysᵀ), causal, in the window) values`, head by head, query head `h` with KV head
/// `h * kv_heads / heads`. A row's result does not depend on the other rows, nor on the pool.
///
/// # Panics
/// When lengths do not fit the shape, or a sequence lacks blocks for its last row.
pub fn attention(
    pool: &ThreadPool,
    shape: &AttentionShape<'_>,
    sequences: &mut [SequenceAttention<'_>],
) {
    let sequences: Vec<Sequence<'_>> = sequences
        .iter_mut()
        .map(|sequence| Sequence::new(shape, sequence))
        .collect();
    let mut tiles: Vec<Tile> = Vec::new();
    for (index, sequence) in sequences.iter().enumerate() {
        let queries = sequence.rows * sequence.group;
        for kv_head in 0..shape.kv.kv_heads {
            tiles.extend((0..queries).step_by(TILE).map(|first| Tile {
                sequence: index,
                kv_head,
                first,
                count: TILE.min(queries - first),
            }));
        }
    }
    if tiles.len() >= TILES_PER_THREAD * pool.threads() || pool.threads() == 1 {
        pool.run(tiles.len(), &|piece| {
            let tile = &tiles[piece];
            let sequence = &sequences[tile.sequence];
            let mut total = Partial::new(tile.count, shape.kv.value_dim());
            let mut chunk = Partial::new(tile.count, shape.kv.value_dim());
            for index in sequence.chunks(tile) {
                sequence.chunk(pool.level(), tile, index, &mut chunk);
                total.fold(&chunk);
            }
            sequence.finish(tile, &mut total);
        });
        return;
    }

    // Few rows: each chunk of positions is a piece of work; the chunks are folded afterwards, in the same order. Tiles of the same KV head
    // come to a chunk one after the other, while a cache still has it.
    let mut chunks: Vec<(usize, usize)> = Vec::new();
    for (number, tile) in tiles.iter().enumerate() {
        let seen = sequences[tile.sequence].chunks(tile);
        chunks.extend(seen.map(|index| (number, index)));
    }
    chunks.sort_by_key(|&(number, index)| {
        let tile = &tiles[number];
        (tile.sequence, tile.kv_head, index)
    });
    let partial = |tile: &Tile| Partial::new(tile.count, shape.kv.value_dim());
    let mut partials: Vec<Partial> = chunks
        .iter()
        .map(|&(number, _)| partial(&tiles[number]))
        .collect();
    let shared = SharedSlice::new(&mut partials);
    pool.run(chunks.len(), &|piece| {
        let (number, index) = chunks[piece];
        let tile = &tiles[number];
        // SAFETY: every piece has its own partial result.
        let partial = unsafe { &mut shared.part(piece..piece + 1)[0] };
        sequences[tile.sequence].chunk(pool.level(), tile, index, partial);
    });
    let mut totals: Vec<Partial> = tiles.iter().map(partial).collect();
    for ((number, _), partial) in chunks.iter().zip(&partials) {
        totals[*number].fold(partial);
    }
    for (tile, total) in tiles.iter().zip(&mut totals) {
        sequences[tile.sequence].finish(tile, total);
    }
}

/// Blocks in a chunk of positions.
const CHUNK_BLOCKS: usize = 4;

/// Queries that share each read of keys and values.
const TILE: usize = span::MAX_QUERIES;

/// From this many tiles on there is no need to split positions to keep the threads busy.
const TILES_PER_THREAD: usize = 4;

/// Some queries of one KV head, from number `first` on. They are counted row by row, and within a row by the
/// query heads of the KV head.
struct Tile {
    sequence: usize,
    kv_head: usize,
    first: usize,
    count: usize,
}

struct Sequence<'a> {
    shape: AttentionShape<'a>,
    /// Query heads per KV head.
    group: usize,
    rows: usize,
    queries: &'a [f32],
    first_position: usize,
    first_block: usize,
    blocks: &'a [&'a KvBlock],
    out: SharedSlice<'a, f32>,
}

impl<'a> Sequence<'a> {
    fn new(shape: &AttentionShape<'a>, sequence: &'a mut SequenceAttention<'_>) -> Self {
        let KvShape {
            kv_heads, head_dim, ..
        } = shape.kv;
        assert!(
            kv_heads > 0 && head_dim > 0 && shape.heads > 0 && shape.heads.is_multiple_of(kv_heads),
            "{} query heads for {kv_heads} KV heads of {head_dim}",
            shape.heads
        );
        assert!(
            shape.sinks.is_none_or(|sinks| sinks.len() == shape.heads),
            "a sink for each query head"
        );
        let row = shape.heads * head_dim;
        assert!(
            sequence.queries.len().is_multiple_of(row),
            "whole rows of queries"
        );
        let rows = sequence.queries.len() / row;
        assert_eq!(
            sequence.out.len(),
            rows * shape.heads * shape.kv.value_dim(),
            "outputs for the queries"
        );
        let positions = if rows == 0 {
            0
        } else {
            sequence.first_position + rows
        };
        let seen_from = visible(sequence.first_position, shape.window).start;
        assert!(
            rows == 0 || sequence.first_block * BLOCK_POSITIONS <= seen_from,
            "KV blocks from block {} on for position {seen_from}",
            sequence.first_block
        );
        assert!(
            (sequence.first_block + sequence.blocks.len()) * BLOCK_POSITIONS >= positions,
            "{} KV blocks for {positions} positions",
            sequence.blocks.len()
        );
        for block in sequence.blocks {
            assert_eq!(block.shape(), shape.kv, "the shape of a KV block");
        }
        Sequence {
            shape: *shape,
            group: shape.heads / kv_heads,
            rows,
            queries: sequence.queries,
            first_position: sequence.first_position,
            first_block: sequence.first_block,
            blocks: sequence.blocks,
            out: SharedSlice::new(sequence.out),
        }
    }

    /// The query head of query `index` of a KV head.
    fn head(&self, kv_head: usize, index: usize) -> usize {
        kv_head * self.group + index % self.group
    }

    /// The place of query `index` of a KV head among the heads of all rows.
    fn place(&self, kv_head: usize, index: usize) -> usize {
        let row = index / self.group;
        row * self.shape.heads + self.head(kv_head, index)
    }

    /// The positions that query `index` sees.
    fn visible(&self, index: usize) -> Range<usize> {
        visible(self.first_position + index / self.group, self.shape.window)
    }

    /// The positions that some query of the tile sees.
    fn seen(&self, tile: &Tile) -> Range<usize> {
        let last = self.visible(tile.first + tile.count - 1);
        self.visible(tile.first).start..last.end
    }

    /// Chunks of positions that some query of the tile sees.
    fn chunks(&self, tile: &Tile) -> Range<usize> {
        const CHUNK: usize = CHUNK_BLOCKS * BLOCK_POSITIONS;
        let seen = self.seen(tile);
        seen.start / CHUNK..seen.end.div_ceil(CHUNK)
    }

    /// The attention of the tile's queries over the positions of one chunk.
    fn chunk(&self, level: IsaLevel, tile: &Tile, index: usize, chunk: &mut Partial) {
        let KvShape { head_dim, .. } = self.shape.kv;
        let mut queries = vec![0.0; tile.count * head_dim];
        for (query, scaled) in queries.chunks_exact_mut(head_dim).enumerate() {
            let at = self.place(tile.kv_head, tile.first + query) * head_dim;
            for (scaled, number) in scaled.iter_mut().zip(&self.queries[at..at + head_dim]) {
                *scaled = number * self.shape.scale;
            }
        }
        chunk.clear();
        let seen = self.seen(tile);
        let blocks = seen.start / BLOCK_POSITIONS..seen.end.div_ceil(BLOCK_POSITIONS);
        let first_block = index * CHUNK_BLOCKS;
        let end_block = (first_block + CHUNK_BLOCKS).min(blocks.end);
        for block in first_block.max(blocks.start)..end_block {
            let first = block * BLOCK_POSITIONS;
            let within = |position: usize| position.saturating_sub(first).min(BLOCK_POSITIONS);
            let mut visible = [const { 0..0 }; TILE];
            for (query, visible) in visible[..tile.count].iter_mut().enumerate() {
                let seen = self.visible(tile.first + query);
                *visible = within(seen.start)..within(seen.end);
            }
            let visible = &visible[..tile.count];
            let softcap = self.shape.softcap;
            match self.blocks[block - self.first_block].head(tile.kv_head) {
                Head::F16(head) => {
                    span::add_block(level, &queries, head, softcap, visible, chunk);
                }
                Head::Q8_0(head) => {
                    span::add_block(level, &queries, head, softcap, visible, chunk);
                }
                Head::LatentF16(head) => {
                    span::add_block(level, &queries, head, softcap, visible, chunk);
                }
                Head::LatentQ8_0(head) => {
                    span::add_block(level, &queries, head, softcap, visible, chunk);
                }
            }
        }
    }

    fn finish(&self, tile: &Tile, total: &mut Partial) {
        for query in 0..tile.count {
            if let Some(sinks) = self.shape.sinks {
                let head = self.head(tile.kv_head, tile.first + query);
                total.add_sink(query, sinks[head]);
            }
            let value_dim = self.shape.kv.value_dim();
            let at = self.place(tile.kv_head, tile.first + query) * value_dim;
            // SAFETY: each query of each head is in one tile, and a tile is finished once.
            let out = unsafe { self.out.part(at..at + value_dim) };
            total.write(query, out);
        }
    }
}

/// The positions that a row at `position` sees.
fn visible(position: usize, window: Option<usize>) -> Range<usize> {
    let window = window.unwrap_or(usize::MAX);
    (position + 1).saturating_sub(window)..position + 1
}
