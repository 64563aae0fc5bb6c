//! The kernels as a pass starts them, each in a file of its own. Sizes are checked here, since kernels do not.

mod attention;
mod experts;
mod heads;
mod input;
mod kv;
mod latent;
mod multiply;
mod new_rows;
mod norm;

pub use attention::{Attention, attention_groups, attention_part_bytes};
pub use experts::{ExpertProduct, ExpertRows, ExpertTiles, Gating, Mixture, Routing, SharedExpert};
pub use heads::{HeadNorms, Heads};
pub use input::{ActivationFunction, Input, input_bytes};
pub use kv::{KV_POSITIONS, KvShape, SequenceRows, pack_position, unpack_position};
pub use latent::{HeadProduct, HeadTiles, LatentHeads};
pub use multiply::{Matrix, Product};
pub use new_rows::Rotation;
pub use norm::Norm;

use crate::buffer::Slice;
use crate::pass::MOST_GROUPS;

/// Kernels load sixteen numbers at once.
const UNIT: usize = 16;

/// Rows of F32 numbers, one after another.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub slice: Slice<'a>,
    pub count: usize,
}

impl<'a> Rows<'a> {
    /// The rows, of so many numbers each, and nothing behind them.
    fn of(slice: Slice<'a>, count: usize, width: usize) -> Slice<'a> {
        Rows { slice, count }.cut(width)
    }

    fn cut(self, width: usize) -> Slice<'a> {
        self.slice.first(4 * (self.count * width) as u64)
    }
}

/// Groups of `threads` for so many pieces of work, where threads go on to the next piece.
fn strided(pieces: usize, threads: usize) -> [u32; 2] {
    [pieces.div_ceil(threads).min(MOST_GROUPS as usize) as u32, 1]
}

/// A group for each of so many rows.
fn grid(rows: usize) -> [u32; 2] {
    let across = rows.min(MOST_GROUPS as usize);
    [across as u32, rows.div_ceil(across.max(1)) as u32]
}
