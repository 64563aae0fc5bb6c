//! Attention over keys and values in blocks of positions.

use super::input::{Input, input_bytes};
use super::kv::{KV_POSITIONS, KvShape, SequenceRows};
use super::latent::HeadTiles;
use super::{Rows, UNIT, grid};
use crate::buffer::Slice;
use crate::error::VulkanError;
use crate::kernels::{FEW_QUERIES, FEW_ROWS, Kernel, LATENT_QUERIES, QUERIES};
use crate::pass::{MOST_GROUPS, Pass};

/// With as many groups as this a GPU has enough to do, and each takes all of its tile's blocks.
const ENOUGH_GROUPS: usize = 64;
/// Groups that share a tile's blocks at most (`shaders/combine.wgsl`).
const MOST_PARTS: usize = 32;

/// Groups that attend for so many rows of a sequence, each taking all blocks that it sees.
pub fn attention_groups(rows: usize, heads: usize, kv: KvShape) -> usize {
    tiles(rows, heads, kv) * kv.kv_heads
}

/// The most bytes that the partial results of an attention of so many rows take, among `pass_rows` and `groups` ([`attention_groups`])
/// of a pass.
pub fn attention_part_bytes(
    rows: usize,
    heads: usize,
    kv: KvShape,
    (pass_rows, groups): (usize, usize),
) -> u64 {
    let parts = match (groups < ENOUGH_GROUPS, pass_rows <= FEW_ROWS) {
        (true, _) => MOST_PARTS,
        (false, true) => 1,
        (false, false) => 0,
    };
    found_bytes(rows * heads, parts, kv.value_dim())
}

/// Bytes of what so many parts find for rows and heads: each a largest score, a sum of weights, and the weighed values, F32.
fn found_bytes(rows_and_heads: usize, parts: usize, value_dim: usize) -> u64 {
    (rows_and_heads * parts * (value_dim + 2) * 4) as u64
}

/// How many of some groups start at once, in as few starts as there can be with `most` (not 0) of them at once: starts of the same size, as far as that
/// goes, so that none leaves a GPU with little to do.
fn evenly(groups: usize, most: usize) -> usize {
    let starts = groups.div_ceil(most).max(1);
    groups.div_ceil(starts).max(1)
}

fn tiles(rows: usize, heads: usize, kv: KvShape) -> usize {
    let queries = match kv.values_in_keys {
        None => QUERIES,
        Some(_) => LATENT_QUERIES,
    };
    (rows * (heads / kv.kv_heads)).div_ceil(queries)
}

/// How a layer attends.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// The rows, whose keys and values are appended already.
    pub sequence: SequenceRows<'a>,
    pub heads: usize,
    /// F32, rows of the pass x heads x head_dim. To latents: heads x rows of the pass x numbers of a latent.
    pub queries: Slice<'a>,
    /// What is rotated of queries to latents: F32, rows of the pass x heads x the other numbers of a key.
    pub rotated: Option<Slice<'a>>,
    /// For the results: F32, rows of the pass x heads x head_dim; of latents heads x rows of the pass x numbers of a latent. All sequences of a pass
    /// have the same.
    pub out: Rows<'a>,
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
    /// F32, of each head a score that takes part in the softmax, and has no value.
    pub sinks: Option<Slice<'a>>,
}

impl<'a> Pass<'a> {
    /// Attends from the sequence's rows to all positions that they see. [`attended`](Self::attended), or of latents
    /// [`attended_latents`](Self::attended_latents), has to follow, behind a barrier.
    ///
    /// # Errors
    /// [`VulkanError::Driver`].
    ///
    /// # Panics
    /// When sizes do not fit each other, or there are no kernels for such heads ([`KvShape::check`]).
    pub fn attend(&mut self, attention: Attention<'a>) -> Result<(), VulkanError> {
        let (parts, part_blocks) = attention.cut();
        let Attention {
            sequence,
            heads,
            queries,
            rotated,
            out,
            parts: room,
            groups: _,
            scale,
            window,
            softcap,
            temperature,
            sinks,
        } = attention;
        sequence.check();
        let SequenceRows {
            kv,
            rows,
            first_row,
            ..
        } = sequence;
        let (kv_heads, head_dim, value_dim) = (kv.kv_heads, kv.head_dim, kv.value_dim());
        assert!(
            heads.is_multiple_of(kv_heads) && rotated.is_some() == kv.values_in_keys.is_some(),
            "{heads} heads share {kv_heads}, rotated apart: {}",
            rotated.is_some()
        );
        let end = first_row + rows;
        assert!(end <= out.count, "{end} of {} rows", out.count);
        let queries = match rotated {
            None => Rows::of(queries, end, heads * head_dim),
            Some(_) => Rows::of(queries, out.count, heads * value_dim),
        };
        let (temperature, positions) = temperature.unwrap_or((0.0, 1));
        let params = [
            heads as u32,
            kv_heads as u32,
            head_dim as u32 / 2,
            value_dim as u32 / 2,
            out.count as u32,
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
            u32::from(attention.is_direct()),
            u32::from(sinks.is_some()),
        ];
        let groups = tiles(rows, heads, kv) * parts;
        assert!(groups <= MOST_GROUPS as usize, "{rows} rows of a sequence");
        let out = match attention.is_direct() {
            true => out.cut(heads * value_dim),
            false => room.first(found_bytes(rows * heads, parts, value_dim)),
        };
        // A kernel names its sinks even where it reads none.
        let sinks = sinks.map_or(queries, |sinks| Rows::of(sinks, 1, heads));
        let mut slices = vec![sequence.blocks, queries, sequence.cache, out, sinks];
        let kernel = match rotated {
            None => Kernel::Attention(attention.group_queries()),
            Some(rotated) => {
                slices.push(Rows::of(rotated, end, heads * (head_dim - value_dim)));
                Kernel::LatentAttention
            }
        };
        // What there is to do grows with the context. Each start has no more groups than have as much to do as a part of a pass may.
        let flop = attention.group_flop(part_blocks);
        let most = (self.device().most_part_flop() / flop).max(1) as usize;
        let at_once = evenly(groups, most);
        for first in (0..groups).step_by(at_once) {
            let count = at_once.min(groups - first);
            let params = [&params[..], &[first as u32]].concat();
            let groups = [count as u32, kv_heads as u32];
            self.start_long(kernel, &slices, &params, groups, count as u64 * flop)?;
        }
        Ok(())
    }

    /// The results of all of a pass's attentions, whose `out` is given, ready to be multiplied, as by [`input`](Self::input): rows of `width`
    /// numbers, few of them also rounded, in `room`.
    ///
    /// # Errors
    /// As [`input`](Self::input).
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn attended(
        &mut self,
        attentions: &[Attention<'a>],
        out: Rows<'a>,
        width: usize,
        room: Slice<'a>,
    ) -> Result<Input<'a>, VulkanError> {
        let combined = self.combine_all(attentions, room)?;
        if attentions.iter().all(Attention::is_rounded) {
            return Input::of(out, width, room);
        }
        if combined {
            self.barrier();
        }
        self.input(out, width, room)
    }

    /// The results of all of a pass's attentions to latents, whose `out` is given, ready for [`multiply_heads`](Self::multiply_heads): few rows are
    /// also rounded, in `room` of [`HeadTiles::input_bytes`].
    ///
    /// # Errors
    /// As [`input`](Self::input).
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn attended_latents(
        &mut self,
        attentions: &[Attention<'a>],
        tiles: HeadTiles,
        (out, rank): (Slice<'a>, usize),
        room: Slice<'a>,
    ) -> Result<Input<'a>, VulkanError> {
        self.combine_all(attentions, room)?;
        // Few rows are rounded as they are combined: latents are of whole sixteens.
        tiles.input(out, rank, room)
    }

    /// Whether there was anything to combine.
    fn combine_all(
        &mut self,
        attentions: &[Attention<'a>],
        room: Slice<'a>,
    ) -> Result<bool, VulkanError> {
        let mut combined = false;
        for attention in attentions.iter().filter(|attention| !attention.is_direct()) {
            self.combine(attention, room)?;
            combined = true;
        }
        Ok(combined)
    }

    /// Makes one result of what the parts of an attention found.
    fn combine(&mut self, attention: &Attention<'a>, room: Slice<'a>) -> Result<(), VulkanError> {
        let (parts, _) = attention.cut();
        let SequenceRows {
            kv,
            rows,
            first_row,
            ..
        } = attention.sequence;
        let (heads, value_dim) = (attention.heads, kv.value_dim());
        let pass_rows = attention.out.count;
        let width = heads * value_dim;
        let found = attention
            .parts
            .first(found_bytes(rows * heads, parts, value_dim));
        let out = attention.out.cut(width);
        // A kernel names what it does not write.
        let (sixteens, room) = match attention.is_rounded() {
            true => (
                pass_rows * width / UNIT,
                room.first(input_bytes(pass_rows, width)),
            ),
            false => (0, out),
        };
        let head_after_head = match kv.values_in_keys {
            None => 0,
            Some(_) => pass_rows,
        };
        let params = [
            rows * heads,
            heads,
            first_row,
            head_after_head,
            value_dim / 2,
            parts,
            sixteens,
        ];
        let params = params.map(|size| size as u32);
        self.start(
            Kernel::Combine,
            &[found, out, room],
            &params,
            grid(rows * heads),
        )
    }
}

impl Attention<'_> {
    /// Whether a tile's group has its result, which is not rounded to bytes; else it hands on what it found.
    fn is_direct(&self) -> bool {
        self.cut().0 == 1 && !self.is_rounded()
    }

    /// Whether the results are rounded to bytes as they are combined: sixteen of the same head at a time.
    fn is_rounded(&self) -> bool {
        self.out.count <= FEW_ROWS && self.sequence.kv.value_dim().is_multiple_of(UNIT)
    }

    /// Rows of queries of a group of threads.
    fn group_queries(&self) -> usize {
        let SequenceRows { kv, rows, .. } = self.sequence;
        match kv.values_in_keys {
            Some(_) => LATENT_QUERIES,
            None if rows * (self.heads / kv.kv_heads) <= FEW_QUERIES => FEW_QUERIES,
            None => QUERIES,
        }
    }

    /// Floating-point operations of a group for each of the key heads together, with so many blocks; not 0.
    fn group_flop(&self, part_blocks: usize) -> u64 {
        let kv = self.sequence.kv;
        // A window begins anywhere in a block.
        let seen = self.window.unwrap_or(usize::MAX);
        let seen = seen.saturating_add(KV_POSITIONS);
        let positions = seen.min(part_blocks * KV_POSITIONS);
        let numbers = kv.kv_heads * (kv.head_dim + kv.value_dim());
        (2 * self.group_queries() * positions * numbers).max(1) as u64
    }

    /// Into how many parts the blocks of a tile are cut, and how many each has. By sizes alone, so that results are the same every time.
    fn cut(&self) -> (usize, usize) {
        let SequenceRows {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_start_evenly() {
        for (groups, most, at_once) in [
            (256, 232, 128),
            (256, 256, 256),
            (256, usize::MAX, 256),
            (10, 4, 4),
            (9, 4, 3),
            (7, 1, 1),
            (0, 5, 1),
        ] {
            assert_eq!(evenly(groups, most), at_once, "{groups} groups, {most}");
        }
    }
}
