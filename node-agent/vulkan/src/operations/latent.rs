//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): what becomes of new rows before they attend to latents, and products of heads, each
//! with a matrix of its own. Heads lie one after the other for these, each with its part of all rows of a pass.

use prima_gguf::GgmlType;

use super::experts::{TILE_BYTES, Tiled, parts_at_once};
use super::input::{Input, packed_bytes};
use super::kv::SequenceRows;
use super::multiply::Matrix;
use super::new_rows::{NewRows, Rotation};
use super::{Rows, UNIT, strided};
use crate::buffer::Slice;
use crate::device::Device;
use crate::error::VulkanError;
use crate::kernels::{FEW_ROWS, Kernel, Shape};
use crate::pass::Pass;

/// Numbers of a head's query at most (`shaders/latent_heads.wgsl`).
const MOST_QUERY: usize = 576;

/// How products of heads are cut into tiles of rows, which are the same in all layers with so many heads.
#[derive(Clone, Copy, Debug)]
pub struct HeadTiles {
    rows: usize,
    heads: usize,
    height: usize,
}

impl HeadTiles {
    /// For the rows of a pass, and so many heads.
    pub fn new(rows: usize, heads: usize) -> HeadTiles {
        let height = match rows {
            0 | 1 => Shape::One.group().0,
            _ if rows <= FEW_ROWS => Shape::Four.group().0,
            _ => Shape::Tile.group().0,
        };
        HeadTiles {
            rows,
            heads,
            height,
        }
    }

    /// The tiles, as kernels take them (`shaders/expert_rows.wgsl`).
    pub fn listed(self) -> Vec<u32> {
        let HeadTiles {
            rows,
            heads,
            height,
        } = self;
        let tiles = (0..heads).flat_map(|head| {
            (0..rows).step_by(height).map(move |first| {
                let end = rows.min(first + height);
                [head, head * rows + first, head * rows + end, 0]
            })
        });
        tiles.flatten().map(|number| number as u32).collect()
    }

    fn count(self) -> usize {
        self.heads * self.rows.div_ceil(self.height)
    }

    /// The room in which heads of so many numbers are rounded to bytes, which those of few rows are.
    pub fn input_bytes(self, width: usize) -> u64 {
        match self.rows <= FEW_ROWS {
            true => packed_bytes(self.rows * self.heads, width),
            false => 0,
        }
    }

    fn shape(self, format: GgmlType, device: &Device) -> Shape {
        match self.rows {
            0 | 1 => Shape::one(format, device.abilities()),
            rows if rows <= FEW_ROWS => Shape::four(format, device.abilities()),
            _ => Shape::Tile,
        }
    }

    /// Heads of `width` numbers, rounded in `room` if they are few.
    pub(super) fn input<'a>(
        self,
        heads: Slice<'a>,
        width: usize,
        room: Slice<'a>,
    ) -> Result<Input<'a>, VulkanError> {
        let rows = Rows {
            slice: heads,
            count: self.rows * self.heads,
        };
        Input::with_bytes(rows, width, room.first(self.input_bytes(width)))
    }
}

/// The new rows of a sequence, as a layer's products made them.
#[derive(Clone, Copy)]
pub struct LatentHeads<'a> {
    pub sequence: SequenceRows<'a>,
    /// Of the pass.
    pub tiles: HeadTiles,
    /// F32, rows of the pass x heads x (`unrotated` numbers, and those behind that are rotated).
    pub queries: Slice<'a>,
    pub unrotated: usize,
    /// F32, rows of the pass x head_dim: a latent, and what is rotated behind it.
    pub keys: Slice<'a>,
    /// RMS norm of the latent: F32, as many numbers.
    pub norm: Slice<'a>,
    pub epsilon: f32,
    /// Of the last numbers of queries and keys.
    pub rotation: Option<Rotation<'a>>,
    /// F32, for what goes into the space of latents: heads x rows of the pass x unrotated.
    pub into_latents: Slice<'a>,
    /// F32, for what is rotated of queries: rows of the pass x heads x (head_dim - numbers of the latent).
    pub rotated: Slice<'a>,
}

/// A product of heads, each with its part of the matrix, which has the rows of all heads.
#[derive(Clone, Copy)]
pub struct HeadProduct<'a> {
    pub tiles: HeadTiles,
    /// What [`HeadTiles::listed`] says.
    pub listed: Slice<'a>,
    /// Heads x rows of the pass x the matrix's columns.
    pub x: Input<'a>,
    /// F32, heads x rows of the pass x the rows of one head's part.
    pub out: Slice<'a>,
}

impl Device {
    /// Whether there are kernels for latent attention with queries of so many numbers, and matrices of so many heads, each part of these formats, rows
    /// and columns.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] says why not.
    pub fn check_latents(
        &self,
        query: usize,
        heads: usize,
        matrices: [(GgmlType, usize, usize); 2],
    ) -> Result<(), VulkanError> {
        let refused = |what| Err(VulkanError::NoKernel { what });
        if query > MOST_QUERY {
            return refused(format!("queries of {query} numbers (at most {MOST_QUERY})"));
        }
        matrices.into_iter().try_for_each(|(format, rows, cols)| {
            if !rows.is_multiple_of(UNIT) {
                return refused(format!(
                    "heads of {rows} numbers: it takes a multiple of {UNIT}"
                ));
            }
            parts_at_once(self, format, (rows, cols), ("heads", heads)).map(drop)
        })
    }
}

impl<'a> Pass<'a> {
    /// Takes queries apart, turns what is rotated of them, and writes what the rows leave behind into the sequence's blocks.
    ///
    /// # Errors
    /// [`VulkanError::Driver`].
    ///
    /// # Panics
    /// When sizes do not fit each other, or there are no kernels for them ([`KvShape::check`](super::KvShape::check),
    /// [`Device::check_latents`]).
    pub fn prepare_latent_heads(&mut self, new: LatentHeads<'a>) -> Result<(), VulkanError> {
        let LatentHeads {
            sequence,
            tiles,
            queries,
            unrotated,
            keys,
            norm,
            epsilon,
            rotation,
            into_latents,
            rotated,
        } = new;
        let SequenceRows {
            kv,
            rows,
            first_row,
            ..
        } = sequence;
        let (head_dim, rank) = (kv.head_dim, kv.value_dim());
        let (pass_rows, heads) = (tiles.rows, tiles.heads);
        let rotated_dim = head_dim - rank;
        let query = unrotated + rotated_dim;
        let end = first_row + rows;
        assert!(
            kv.values_in_keys.is_some() && query <= MOST_QUERY && end <= pass_rows,
            "{kv:?}, queries of {query}, {end} of {pass_rows} rows"
        );
        let shared = NewRows::new(sequence, rotation, rotated_dim);
        let own = [
            heads as u32,
            rank as u32,
            rotated_dim as u32,
            unrotated as u32,
            pass_rows as u32,
            epsilon.to_bits(),
        ];
        let params = [&shared.params[..], &own].concat();
        let own = [
            Rows::of(queries, end, heads * query),
            Rows::of(keys, end, head_dim),
            Rows::of(norm, 1, rank),
            Rows::of(into_latents, pass_rows, heads * unrotated),
            Rows::of(rotated, end, heads * rotated_dim),
        ];
        let slices = [&shared.slices[..], &own].concat();
        let groups = [heads as u32 + 1, rows as u32];
        self.start(Kernel::LatentHeads, &slices, &params, groups)
    }

    /// Makes heads of `width` numbers of all rows ready to be multiplied, in `room` of [`HeadTiles::input_bytes`]. Products wait for it with a
    /// barrier.
    ///
    /// # Errors
    /// As [`input`](Self::input).
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn head_input(
        &mut self,
        tiles: HeadTiles,
        heads: Slice<'a>,
        width: usize,
        room: Slice<'a>,
    ) -> Result<Input<'a>, VulkanError> {
        let input = tiles.input(heads, width, room)?;
        self.pack(input)?;
        Ok(input)
    }

    /// Multiplies the rows of each head with its part of the matrix.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] for a format without kernels, for rows that are not a multiple of 16 numbers, and for parts of which kernels do
    /// not see one at once.
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn multiply_heads(
        &mut self,
        matrix: Matrix<'a>,
        product: HeadProduct<'a>,
    ) -> Result<(), VulkanError> {
        let HeadProduct {
            tiles,
            listed,
            x,
            out,
        } = product;
        let rows = tiles.rows * tiles.heads;
        assert_eq!(x.rows.count, rows, "rows of x");
        let tiled = Tiled {
            parts: ("heads", tiles.heads),
            shape: tiles.shape(matrix.format, self.device()),
            tiles: listed.first(TILE_BYTES * tiles.count() as u64),
            tile_count: tiles.count(),
            rows,
            x_rows: None,
        };
        self.multiply_tiled(tiled, matrix, x, (out, None))
    }

    /// Puts together in rows (to `out`, F32) what heads made of these, `width` numbers each (`heads`, heads x rows of the pass x width). The rows are
    /// ready to be multiplied, as by [`input`](Self::input).
    ///
    /// # Errors
    /// As [`input`](Self::input), by `width`.
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn heads_to_rows(
        &mut self,
        tiles: HeadTiles,
        heads: Slice<'a>,
        width: usize,
        out: Slice<'a>,
        room: Slice<'a>,
    ) -> Result<Input<'a>, VulkanError> {
        let heads = tiles.input(heads, width, room)?.rows.cut(width);
        let row = tiles.heads * width;
        let rows = Rows {
            slice: out,
            count: tiles.rows,
        };
        let input = Input::of(rows, row, room)?;
        let out = rows.cut(row);
        // A kernel names what it does not write.
        let bytes = match input.has_bytes() {
            true => input.bytes,
            false => out,
        };
        let sixteens = width / UNIT;
        let params = [
            tiles.rows as u32,
            tiles.heads as u32,
            sixteens as u32,
            u32::from(input.has_bytes()),
        ];
        let groups = strided(tiles.rows * tiles.heads * sixteens, 64);
        self.start(Kernel::HeadsToRows, &[heads, out, bytes], &params, groups)?;
        Ok(input)
    }
}
