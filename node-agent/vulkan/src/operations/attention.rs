//! Attention over keys and values in blocks of positions, and their appending.

use super::{Rows, grid, strided};
use crate::buffer::Slice;
use crate::error::VulkanError;
use crate::kernels::Kernel;
use crate::pass::{MOST_GROUPS, Pass};

/// Positions of a block of keys and values.
pub const KV_POSITIONS: usize = 64;
/// Numbers of the largest head.
pub const MOST_HEAD_DIM: usize = 256;
/// Rows of queries that a group of threads has (`shaders/attention.wgsl`).
const QUERIES: usize = 8;
/// With as many groups as this a GPU has enough to do, and each takes all of its tile's blocks.
const ENOUGH_GROUPS: usize = 64;
/// Groups that share a tile's blocks at most (`shaders/combine.wgsl`).
const MOST_PARTS: usize = 32;

/// Groups that attend for so many rows of a sequence, each taking all blocks that it sees.
pub fn attention_groups(rows: usize, heads: usize, kv_heads: usize) -> usize {
    tiles(rows, heads, kv_heads) * kv_heads
}

/// The most bytes that the partial results of an attention of so many rows take, among `groups` ([`attention_groups`]) of a pass.
pub fn attention_part_bytes(rows: usize, heads: usize, head_dim: usize, groups: usize) -> u64 {
    match groups < ENOUGH_GROUPS {
        true => found_bytes(rows * heads, MOST_PARTS, head_dim),
        false => 0,
    }
}

/// Bytes of what so many parts find for rows and heads: each a largest score, a sum of weights, and the weighed values, F32.
fn found_bytes(rows_and_heads: usize, parts: usize, head_dim: usize) -> u64 {
    (rows_and_heads * parts * (head_dim + 2) * 4) as u64
}

fn tiles(rows: usize, heads: usize, kv_heads: usize) -> usize {
    (rows * (heads / kv_heads)).div_ceil(QUERIES)
}

/// Bytes of a block: keys and values of a layer, F16.
pub fn kv_block_bytes(kv_heads: usize, head_dim: usize) -> u64 {
    (2 * KV_POSITIONS * kv_heads * head_dim * 2) as u64
}

/// The rows of a sequence among those of a pass, and its blocks of keys and values in a layer.
#[derive(Clone, Copy)]
pub struct Append<'a> {
    /// Places of blocks in `cache`, of all sequences.
    pub blocks: Slice<'a>,
    /// Where those of this sequence begin among them.
    pub blocks_at: usize,
    /// Which block of the sequence is the first there.
    pub first_block: usize,
    /// Blocks of [`kv_block_bytes`] each.
    pub cache: Slice<'a>,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub rows: usize,
    pub first_row: usize,
    pub first_position: usize,
}

/// How a layer attends.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// The rows, whose keys and values are appended already.
    pub sequence: Append<'a>,
    pub heads: usize,
    /// F32, rows of the pass x heads x head_dim; `out` likewise.
    pub queries: Slice<'a>,
    pub out: Slice<'a>,
    /// Room of [`attention_part_bytes`].
    pub parts: Slice<'a>,
    /// [`attention_groups`] of all sequences of the pass.
    pub groups: usize,
    pub scale: f32,
    /// Positions that a row sees, its own among them; `None`: all.
    pub window: Option<usize>,
    /// Scores s become softcap * tanh(s / softcap), after the scale.
    pub softcap: Option<f32>,
    /// (t, n): queries at position p are multiplied by 1 + t * ln(floor(p / n) + 1).
    pub temperature: Option<(f32, usize)>,
}

impl<'a> Pass<'a> {
    /// Writes the new keys and values (F32, rows of the pass x kv_heads x head_dim) into the sequence's blocks.
    ///
    /// # Errors
    /// [`VulkanError::Driver`].
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn append(
        &mut self,
        sequence: Append<'a>,
        keys: Slice<'a>,
        values: Slice<'a>,
    ) -> Result<(), VulkanError> {
        sequence.check();
        let width = sequence.kv_heads * sequence.head_dim / 2;
        for (rows, which) in [(keys, 0), (values, 1)] {
            let rows = Rows::of(rows, sequence.first_row + sequence.rows, 2 * width);
            let params = [
                width,
                sequence.rows,
                sequence.first_row,
                sequence.first_position,
                sequence.first_block,
                sequence.blocks_at,
                which,
            ];
            let slices = [sequence.blocks, rows, sequence.cache];
            let groups = strided(sequence.rows * width, 64);
            self.start(
                Kernel::Append,
                &slices,
                &params.map(|size| size as u32),
                groups,
            )?;
        }
        Ok(())
    }

    /// Attends from the sequence's rows to all positions that they see. [`combine`](Self::combine) has to follow, behind a barrier, where
    /// [`has_parts`](Attention::has_parts).
    ///
    /// # Errors
    /// [`VulkanError::Driver`].
    ///
    /// # Panics
    /// When sizes do not fit each other, or heads are larger than [`MOST_HEAD_DIM`].
    pub fn attend(&mut self, attention: Attention<'a>) -> Result<(), VulkanError> {
        let (parts, part_blocks) = attention.cut();
        let Attention {
            sequence,
            heads,
            queries,
            out,
            parts: room,
            groups: _,
            scale,
            window,
            softcap,
            temperature,
        } = attention;
        sequence.check();
        let Append {
            kv_heads,
            head_dim,
            rows,
            first_row,
            ..
        } = sequence;
        assert!(
            heads.is_multiple_of(kv_heads),
            "{heads} heads share {kv_heads}"
        );
        assert!(head_dim <= MOST_HEAD_DIM, "a head of {head_dim}");
        let [queries, out] =
            [queries, out].map(|slice| Rows::of(slice, first_row + rows, heads * head_dim));
        let (temperature, positions) = temperature.unwrap_or((0.0, 1));
        let params = [
            heads as u32,
            kv_heads as u32,
            head_dim as u32 / 2,
            rows as u32,
            first_row as u32,
            sequence.first_position as u32,
            sequence.first_block as u32,
            sequence.blocks_at as u32,
            window.map_or(u32::MAX, |window| u32::try_from(window).unwrap_or(u32::MAX)),
            scale.to_bits(),
            softcap.unwrap_or(0.0).to_bits(),
            temperature.to_bits(),
            positions.max(1) as u32,
            parts as u32,
            part_blocks as u32,
        ];
        let groups = tiles(rows, heads, kv_heads) * parts;
        assert!(groups <= MOST_GROUPS as usize, "{rows} rows of a sequence");
        let out = match parts {
            1 => out,
            _ => room.first(found_bytes(rows * heads, parts, head_dim)),
        };
        let slices = [sequence.blocks, queries, sequence.cache, out];
        let groups = [groups as u32, kv_heads as u32];
        self.start(Kernel::Attention, &slices, &params, groups)
    }

    /// Makes one result of what the parts of an attention found, if it has parts.
    ///
    /// # Errors
    /// [`VulkanError::Driver`].
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn combine(&mut self, attention: Attention<'a>) -> Result<(), VulkanError> {
        let (parts, _) = attention.cut();
        let Append {
            rows,
            first_row,
            head_dim,
            ..
        } = attention.sequence;
        if parts == 1 {
            return Ok(());
        }
        let heads = attention.heads;
        let params = [rows * heads, first_row * heads, head_dim / 2, parts];
        let bytes = found_bytes(rows * heads, parts, head_dim);
        let out = Rows::of(attention.out, first_row + rows, heads * head_dim);
        let slices = [attention.parts.first(bytes), out];
        let params = params.map(|size| size as u32);
        self.start(Kernel::Combine, &slices, &params, grid(rows * heads))
    }
}

impl Attention<'_> {
    /// Whether several groups share a tile's blocks.
    pub fn has_parts(&self) -> bool {
        self.cut().0 > 1
    }

    /// Into how many parts the blocks of a tile are cut, and how many each has. By sizes alone, so that results are the same every time.
    fn cut(&self) -> (usize, usize) {
        let Append {
            rows,
            first_position,
            ..
        } = self.sequence;
        let seen = self.window.unwrap_or(usize::MAX);
        let first = (first_position + 1).saturating_sub(seen) / KV_POSITIONS;
        let last = (first_position + rows).saturating_sub(1) / KV_POSITIONS;
        let blocks = last - first + 1;
        match self.groups < ENOUGH_GROUPS {
            true => {
                let part_blocks = blocks.div_ceil(MOST_PARTS);
                (blocks.div_ceil(part_blocks), part_blocks)
            }
            false => (1, blocks),
        }
    }
}

impl Append<'_> {
    fn check(&self) {
        assert!(
            self.head_dim.is_multiple_of(2),
            "a head of {}",
            self.head_dim
        );
        let end = self.first_position + self.rows;
        let blocks = end.div_ceil(KV_POSITIONS) - self.first_block;
        let listed = (self.blocks.bytes() / 4) as usize;
        assert!(
            self.blocks_at + blocks <= listed,
            "{blocks} blocks of {listed}"
        );
    }
}
