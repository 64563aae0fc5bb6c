//! Mixtures of experts: which experts the rows of a pass go to, products of rows that are grouped by expert, and the sum of what experts make
//! of a row.

use prima_gguf::GgmlType;

use super::input::{ActivationFunction, Input, packed_bytes};
use super::multiply::{Matrix, row_bytes, whole_steps};
use super::{Rows, strided};
use crate::buffer::Slice;
use crate::device::Device;
use crate::error::VulkanError;
use crate::kernels::{Kernel, Shape, few_rows, takes_bytes};
use crate::pass::{MOST_GROUPS, Pass};

/// Experts of a layer, those that a row goes to, and groups of experts, at most (`shaders/route.wgsl`).
const MOST_EXPERTS: usize = 512;
const MOST_USED: usize = 64;
const MOST_EXPERT_GROUPS: usize = 64;
/// Bytes of a tile: four words (`shaders/expert_rows.wgsl`).
pub(super) const TILE_BYTES: u64 = 16;

/// How many rows a pass has, and experts a layer, and how products of them are cut into tiles of rows.
#[derive(Clone, Copy, Debug)]
pub struct ExpertTiles {
    rows: usize,
    used: usize,
    experts: usize,
    height: usize,
}

impl ExpertTiles {
    /// For rows (not 0) that go to `used` of so many experts each, whose gate, up and down have these formats.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] when there are more experts than the kernels take.
    pub fn new(
        rows: usize,
        used: usize,
        experts: usize,
        formats: [GgmlType; 3],
    ) -> Result<ExpertTiles, VulkanError> {
        if experts > MOST_EXPERTS || used > MOST_USED.min(experts) {
            return Err(VulkanError::NoKernel {
                what: format!(
                    "{used} of {experts} experts (at most {MOST_USED} of {MOST_EXPERTS})"
                ),
            });
        }
        let few = formats.map(few_rows).into_iter().min().unwrap_or(0);
        // By how many rows an expert gets on average.
        let height = match rows * used {
            _ if rows == 1 => 1,
            choices if choices <= experts => 1,
            choices if choices <= few * experts => Shape::Four.group().0,
            _ => Shape::Tile.group().0,
        };
        Ok(ExpertTiles {
            rows,
            used,
            experts,
            height,
        })
    }

    /// Choices of all rows; each is a row of what experts make.
    pub fn choices(self) -> usize {
        self.rows * self.used
    }

    /// Tiles at most.
    fn most_tiles(self) -> usize {
        let choices = self.choices();
        (choices / self.height + self.experts).min(choices)
    }

    /// Bytes of the parts of [`ExpertRows`]: choices, rows, places and tiles.
    pub fn bytes(self) -> [u64; 4] {
        let choices = self.choices() as u64;
        [
            8 * choices,
            4 * choices,
            4 * choices,
            TILE_BYTES * self.most_tiles() as u64,
        ]
    }

    /// The room in which rows of so many numbers are rounded to bytes, as the pass has them.
    pub fn input_bytes(self, width: usize) -> u64 {
        self.rounded(self.rows, width)
    }

    /// The same of what gates make, a row for each choice.
    pub fn gated_bytes(self, width: usize) -> u64 {
        self.rounded(self.choices(), width)
    }

    fn rounded(self, rows: usize, width: usize) -> u64 {
        match self.height < Shape::Tile.group().0 {
            true => packed_bytes(rows, width),
            false => 0,
        }
    }

    /// Whether each choice is a tile of its own.
    fn is_ungrouped(self) -> bool {
        self.height == 1
    }

    fn shape(self, format: GgmlType, pass: &Pass<'_>) -> Shape {
        let abilities = pass.device().abilities();
        match self.height {
            1 => Shape::one(format, abilities),
            height if height == Shape::Four.group().0 => Shape::four(format, abilities),
            _ => Shape::Tile,
        }
    }
}

/// Where a pass's rows go: written by [`Pass::route`] and [`Pass::group_by_expert`]. Each part has the bytes of [`ExpertTiles::bytes`].
#[derive(Clone, Copy)]
pub struct ExpertRows<'a> {
    pub sizes: ExpertTiles,
    pub choices: Slice<'a>,
    pub rows: Slice<'a>,
    pub places: Slice<'a>,
    pub tiles: Slice<'a>,
}

impl<'a> ExpertRows<'a> {
    /// Its parts, and nothing behind them.
    fn cut(self) -> [Slice<'a>; 4] {
        let [choices, rows, places, tiles] = self.sizes.bytes();
        [
            self.choices.first(choices),
            self.rows.first(rows),
            self.places.first(places),
            self.tiles.first(tiles),
        ]
    }
}

/// How logits become scores, and scores of chosen experts weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// Scores are the softmax over all experts.
    Softmax,
    /// Scores are the sigmoid of each logit.
    Sigmoid,
    /// Scores are the logits; weights are the softmax over those that were chosen.
    SoftmaxOfChosen,
}

/// How a layer's router chooses.
#[derive(Clone, Copy)]
pub struct Routing<'a> {
    /// F32, rows x experts.
    pub logits: Slice<'a>,
    /// F32, for each expert: added to scores where experts are chosen, and not to weights.
    pub selection_bias: Option<Slice<'a>>,
    pub gating: Gating,
    /// Experts in so many groups of equal size (two or more), by their numbers, of which a row uses the second number: by the sum of the two
    /// best scores of each.
    pub groups: Option<(usize, usize)>,
    /// Whether the weights of a row are divided by their sum.
    pub normalized: bool,
    /// What weights are multiplied by at last.
    pub scale: f32,
}

/// A product of rows, each with the part of a matrix that is its expert's: out = x * weights + bias.
#[derive(Clone, Copy)]
pub struct ExpertProduct<'a> {
    /// Rows of the pass x the matrix's columns, or, if they are grouped, rows of choices by expert.
    pub x: Input<'a>,
    pub is_grouped: bool,
    /// F32, rows of choices, grouped by expert, x the rows of one expert's part.
    pub out: Slice<'a>,
    /// F32, one for each of the matrix's rows.
    pub bias: Option<Slice<'a>>,
}

/// What becomes of what experts made: their weighted sum, with the part of an expert for all rows.
#[derive(Clone, Copy)]
pub struct Mixture<'a> {
    /// F32, rows of choices, grouped by expert, x width.
    pub made: Slice<'a>,
    pub width: usize,
    pub shared: Option<SharedExpert<'a>>,
    /// F32, rows of the pass x width. Not where the others are.
    pub out: Slice<'a>,
    /// With a number, the result is multiplied by it and added to what is there.
    pub add: Option<f32>,
}

/// What the expert for all rows made.
#[derive(Clone, Copy)]
pub struct SharedExpert<'a> {
    /// F32, rows of the pass x width.
    pub made: Slice<'a>,
    /// F32, of each row the logit of what it counts; `None`: it counts in full.
    pub logits: Option<Slice<'a>>,
}

/// How rows that are multiplied with parts of a matrix lie in tiles, each of one part.
pub(super) struct Tiled<'a> {
    /// What the parts are of, and how many there are.
    pub parts: (&'static str, usize),
    pub shape: Shape,
    pub tiles: Slice<'a>,
    pub tile_count: usize,
    /// Rows of the result.
    pub rows: usize,
    /// Which row of x each of them is made of; `None`: the same.
    pub x_rows: Option<Slice<'a>>,
}

/// Bytes of one part of a matrix, such as an expert's, and how many parts a kernel sees at once.
///
/// # Errors
/// [`VulkanError::NoKernel`] when it does not see one, and for rows that are not a multiple of 16 numbers.
pub(super) fn parts_at_once(
    device: &Device,
    format: GgmlType,
    (rows, cols): (usize, usize),
    (what, parts): (&'static str, usize),
) -> Result<(u64, usize), VulkanError> {
    let bytes = rows as u64 * row_bytes(format, cols)?;
    let bound = device.most_bound_bytes();
    let fit = (bound / bytes.max(1)).min(parts as u64);
    let most = match fit < parts as u64 {
        // The next ones begin where a slice may begin.
        true => whole_steps(fit, bytes, device.alignment()) as u64,
        false => fit,
    };
    let (_, rows_of_group) = Shape::One.group();
    if most > fit || rows > MOST_GROUPS as usize * rows_of_group {
        return Err(VulkanError::NoKernel {
            what: format!(
                "{what} of {rows} x {cols} {format} weights (it sees {bound} bytes at once)"
            ),
        });
    }
    Ok((bytes, most as usize))
}

/// How many tiles, each with so much to do, are multiplied at once: as many as `most_flop` are enough for, or the fewest, so that the next ones begin
/// where a slice may begin.
fn tiles_at_once(tile_flop: u64, most_flop: u64, alignment: u64) -> usize {
    let fit = most_flop / tile_flop.max(1);
    whole_steps(fit, TILE_BYTES, alignment)
}

impl Device {
    /// Whether there are kernels for a layer of so many experts, `used` for each row, with gate, up and down of these formats, rows and columns
    /// each.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] says why not.
    pub fn check_experts(
        &self,
        (used, experts): (usize, usize),
        matrices: [(GgmlType, usize, usize); 3],
    ) -> Result<(), VulkanError> {
        ExpertTiles::new(1, used, experts, matrices.map(|(format, ..)| format))?;
        matrices.into_iter().try_for_each(|(format, rows, cols)| {
            parts_at_once(self, format, (rows, cols), ("experts", experts)).map(drop)
        })
    }
}

impl<'a> Pass<'a> {
    /// Chooses the experts of each row, the best first; of equal ones the one with the lower number.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] for more groups of experts than the kernel takes.
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn route(&mut self, to: ExpertRows<'a>, routing: Routing<'a>) -> Result<(), VulkanError> {
        let Routing {
            logits,
            selection_bias,
            gating,
            groups,
            normalized,
            scale,
        } = routing;
        let ExpertTiles {
            rows,
            used,
            experts,
            ..
        } = to.sizes;
        let (groups, groups_used) = groups.unwrap_or((1, 1));
        if groups > MOST_EXPERT_GROUPS {
            return Err(VulkanError::NoKernel {
                what: format!("{groups} groups of experts (at most {MOST_EXPERT_GROUPS})"),
            });
        }
        assert!(
            experts.is_multiple_of(groups) && used <= experts / groups * groups_used,
            "{used} of {groups_used} of {groups} groups of {experts} experts"
        );
        let logits = Rows::of(logits, rows, experts);
        let bias = selection_bias.map(|bias| Rows::of(bias, 1, experts));
        let params = [
            experts as u32,
            used as u32,
            groups as u32,
            groups_used as u32,
            match gating {
                Gating::Softmax => 0,
                Gating::Sigmoid => 1,
                Gating::SoftmaxOfChosen => 2,
            },
            u32::from(bias.is_some()) | (u32::from(normalized) << 1),
            scale.to_bits(),
            u32::from(to.sizes.is_ungrouped()),
        ];
        let [choices, to_rows, places, tiles] = to.cut();
        // A kernel names its bias even where it reads none.
        let slices = [
            logits,
            bias.unwrap_or(logits),
            choices,
            to_rows,
            places,
            tiles,
        ];
        self.start(Kernel::Route, &slices, &params, [rows as u32, 1])
    }

    /// Groups the rows that were routed by their experts, where there is something to group.
    ///
    /// # Errors
    /// [`VulkanError::Driver`].
    pub fn group_by_expert(&mut self, routed: ExpertRows<'a>) -> Result<(), VulkanError> {
        let tiles = routed.sizes;
        if tiles.is_ungrouped() {
            return Ok(());
        }
        let params = [
            tiles.choices(),
            tiles.used,
            tiles.experts,
            tiles.height,
            tiles.most_tiles(),
        ];
        let params = params.map(|size| size as u32);
        self.start(Kernel::GroupExperts, &routed.cut(), &params, [1, 1])
    }

    /// Makes rows of the pass ready to be multiplied by experts' matrices of these formats, in `room` of [`ExpertTiles::input_bytes`].
    ///
    /// # Errors
    /// As [`input`](Self::input).
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn expert_input(
        &mut self,
        to: ExpertRows<'a>,
        x: Input<'a>,
        formats: [GgmlType; 2],
        room: Slice<'a>,
    ) -> Result<Input<'a>, VulkanError> {
        if x.has_bytes() || !formats.into_iter().any(takes_bytes) {
            return Ok(x);
        }
        let bytes = room.first(to.sizes.input_bytes(x.width));
        let input = Input::with_bytes(x.rows, x.width, bytes)?;
        self.pack(input)?;
        Ok(input)
    }

    /// As [`gate_input`](Self::gate_input), of rows of choices, in `room` of [`ExpertTiles::gated_bytes`], ready to be multiplied by experts'
    /// matrices of this format.
    ///
    /// # Errors
    /// As [`input`](Self::input).
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn gate_experts(
        &mut self,
        of: ExpertRows<'a>,
        activation: ActivationFunction,
        (gate, up): (Slice<'a>, Slice<'a>),
        width: usize,
        (format, room): (GgmlType, Slice<'a>),
    ) -> Result<Input<'a>, VulkanError> {
        let rows = Rows {
            slice: gate,
            count: of.sizes.choices(),
        };
        let bytes = match takes_bytes(format) {
            true => of.sizes.gated_bytes(width),
            false => 0,
        };
        let input = Input::with_bytes(rows, width, room.first(bytes))?;
        self.gate(activation, input, up)?;
        Ok(input)
    }

    /// Multiplies rows, grouped by expert, each by its expert's part of the matrix, which has the rows of all experts.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] for a format without kernels, for rows that are not a multiple of 16 numbers, and for experts of which kernels do
    /// not see one at once.
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn multiply_experts(
        &mut self,
        grouped: ExpertRows<'a>,
        matrix: Matrix<'a>,
        product: ExpertProduct<'a>,
    ) -> Result<(), VulkanError> {
        let ExpertProduct {
            x,
            is_grouped,
            out,
            bias,
        } = product;
        let sizes = grouped.sizes;
        let [_, rows, _, tiles] = grouped.cut();
        let (expected_rows, x_rows) = match is_grouped {
            true => (sizes.choices(), None),
            false => (sizes.rows, Some(rows)),
        };
        assert_eq!(x.rows.count, expected_rows, "rows of x");
        let tiled = Tiled {
            parts: ("experts", sizes.experts),
            shape: sizes.shape(matrix.format, self),
            tiles,
            tile_count: sizes.most_tiles(),
            rows: sizes.choices(),
            x_rows,
        };
        self.multiply_tiled(tiled, matrix, x, (out, bias))
    }

    /// Multiplies the rows of each tile with its part of the matrix. `bias` is F32, one for each of the matrix's rows. Where there is more to do than a
    /// part of a pass may have, it is done tiles by tiles.
    pub(super) fn multiply_tiled(
        &mut self,
        tiled: Tiled<'a>,
        matrix: Matrix<'a>,
        x: Input<'a>,
        (out, bias): (Slice<'a>, Option<Slice<'a>>),
    ) -> Result<(), VulkanError> {
        let Tiled {
            parts: (what, parts),
            shape,
            tiles,
            tile_count,
            rows,
            x_rows,
        } = tiled;
        let Matrix {
            weights,
            format,
            rows: matrix_rows,
            cols,
        } = matrix;
        assert!(
            matrix_rows.is_multiple_of(parts) && x.width == cols,
            "{matrix_rows} rows of {parts} {what}, and {cols} columns for {}",
            x.width
        );
        let own_rows = matrix_rows / parts;
        let (part_bytes, most) =
            parts_at_once(self.device(), format, (own_rows, cols), (what, parts))?;
        let out = Rows::of(out, rows, own_rows);
        let bias = bias.map(|bias| Rows::of(bias, 1, matrix_rows));
        let numbers = match takes_bytes(format) && shape != Shape::Tile {
            true => x.bytes.first(packed_bytes(x.rows.count, cols)),
            false => x.rows.cut(cols),
        };
        let flags = u32::from(bias.is_some()) | (u32::from(x_rows.is_none()) << 2);
        let (group_rows, group_matrix_rows) = shape.group();
        let across = own_rows.div_ceil(group_matrix_rows);
        let kernel = Kernel::MultiplyExperts(shape, format);
        // Rows that only fill up a tile are computed, too.
        let tile_flop = 2 * (group_rows * own_rows * cols) as u64;
        let device = self.device();
        let at_once = tiles_at_once(tile_flop, device.most_part_flop(), device.alignment());
        // A kernel counts tiles from the first that is bound. Each writes rows of its own, so none waits for another.
        for first_tile in (0..tile_count).step_by(at_once) {
            let count = at_once.min(tile_count - first_tile);
            let [start, end] =
                [first_tile, first_tile + count].map(|tile| tile as u64 * TILE_BYTES);
            let tiles = tiles.part(start..end);
            for first in (0..parts).step_by(most) {
                let part = most.min(parts - first);
                let bytes = first as u64 * part_bytes..(first + part) as u64 * part_bytes;
                let params = [
                    cols as u32,
                    own_rows as u32,
                    0,
                    x.rows.count as u32,
                    own_rows as u32,
                    flags,
                    1.0_f32.to_bits(),
                    first as u32,
                    part as u32,
                ];
                // As in other products.
                let bound = [
                    weights.part(bytes),
                    numbers,
                    out,
                    bias.unwrap_or(numbers),
                    numbers,
                    tiles,
                    x_rows.unwrap_or(tiles),
                ];
                // Tiles whose part is not bound are not computed: of all tiles each is, once.
                let flop = count as u64 * tile_flop * part as u64 / parts as u64;
                let groups = [across as u32, count as u32];
                self.start_long(kernel, &bound, &params, groups, flop)?;
            }
        }
        Ok(())
    }

    /// Adds up what the experts of each row made of it.
    ///
    /// # Errors
    /// [`VulkanError::Driver`].
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn mix_experts(
        &mut self,
        grouped: ExpertRows<'a>,
        mixture: Mixture<'a>,
    ) -> Result<(), VulkanError> {
        let Mixture {
            made,
            width,
            shared,
            out,
            add,
        } = mixture;
        let tiles = grouped.sizes;
        let [choices, _, places, _] = grouped.cut();
        let made = Rows::of(made, tiles.choices(), width);
        let logits = shared.and_then(|shared| shared.logits);
        let logits = logits.map(|logits| Rows::of(logits, tiles.rows, 1));
        let shared = shared.map(|shared| Rows::of(shared.made, tiles.rows, width));
        let flags = u32::from(shared.is_some())
            | (u32::from(logits.is_some()) << 1)
            | (u32::from(add.is_some()) << 2);
        let fours = width / 4;
        let params = [
            tiles.rows as u32,
            fours as u32,
            tiles.used as u32,
            flags,
            add.unwrap_or(1.0).to_bits(),
        ];
        // A kernel names what it does not read.
        let slices = [
            choices,
            places,
            made,
            shared.unwrap_or(made),
            logits.unwrap_or(made),
            Rows::of(out, tiles.rows, width),
        ];
        let groups = strided(tiles.rows * fours, 256);
        self.start(Kernel::MixExperts, &slices, &params, groups)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_multiplied_as_many_at_once_as_there_may_be() {
        // Of a gate of Mixtral 8x22B, of which 512 rows are 24 tiles at most: of ten to the eleventh, seven.
        let tile_flop = 2 * 64 * 16_384 * 6144;
        let most_flop = 100_000_000_000;
        for (alignment, at_once) in [(16, 7), (32, 6), (64, 4), (256, 16)] {
            assert_eq!(tiles_at_once(tile_flop, most_flop, alignment), at_once);
            // What is more than may be done at once is done.
            let least = alignment as usize / 16;
            assert_eq!(tiles_at_once(tile_flop, 1, alignment), least);
        }
        assert_eq!(tiles_at_once(0, 1, 16), 1);
    }
}
