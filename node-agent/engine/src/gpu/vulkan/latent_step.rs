//! The part of a layer's step that is multi-head latent attention: what is before the kernel that attends, and behind it. Queries go into the space
//! of latents, and results out of it, by a matrix of each head, so both lie head after head there.

use std::ops::Range;

use prima_vulkan::{HeadProduct, HeadTiles, Input, LatentHeads, Pass, Slice, input_bytes};

use super::placed::{Latent, Matrices, PlacedLayer, Projection, Projections};
use super::step::{Step, StepError};
use super::workspace::Layout;

/// Where what latent attention needs lies in the workspace.
pub(super) struct LatentPlaces {
    /// As all layers have as many heads, their tiles are listed once.
    tiles: HeadTiles,
    pub listed: Range<u64>,
    /// What queries are made of, and its norm, rounded to bytes as well.
    query_latents: Range<u64>,
    normed_query_latents: Range<u64>,
    query_bytes: Range<u64>,
    keys: Range<u64>,
    /// Queries as they are made, then results of heads.
    made: Range<u64>,
    /// What goes into the space of latents, then results of rows.
    moved: Range<u64>,
    rotated: Range<u64>,
    queries: Range<u64>,
    attended: Range<u64>,
    /// What is multiplied next, rounded to bytes.
    bytes: Range<u64>,
}

impl LatentPlaces {
    /// For so many rows in any of the layers; without latents, no places.
    pub fn new<'a>(
        layout: &mut Layout,
        rows: usize,
        layers: impl Iterator<Item = &'a PlacedLayer>,
    ) -> LatentPlaces {
        let (mut heads, mut most) = (0, [0; 8]);
        let (mut widest_head, mut widest_query_latent) = (0, 0);
        for layer in layers {
            if let Projections::Latent(latent) = &layer.projections {
                heads = layer.spec.attention.heads;
                let own = row_numbers(layer, latent);
                for (most, own) in most.iter_mut().zip(own) {
                    *most = own.max(*most);
                }
                let of_head = latent.unrotated.max(latent.rank).max(latent.value_dim);
                widest_head = of_head.max(widest_head);
                widest_query_latent = query_rank(latent).max(widest_query_latent);
            }
        }
        let tiles = HeadTiles::new(rows, heads);
        let [
            query_latents,
            normed_query_latents,
            keys,
            made,
            moved,
            rotated,
            queries,
            attended,
        ] = most.map(|numbers| layout.numbers(rows * numbers));
        LatentPlaces {
            tiles,
            listed: layout.numbers(tiles.listed().len()),
            query_latents,
            normed_query_latents,
            query_bytes: layout.bytes(input_bytes(rows, widest_query_latent)),
            keys,
            made,
            moved,
            rotated,
            queries,
            attended,
            bytes: layout.bytes(tiles.input_bytes(widest_head)),
        }
    }

    /// What kernels are told of tiles.
    pub fn tiles(&self) -> Vec<u32> {
        self.tiles.listed()
    }
}

/// Numbers that each of the places has for a row.
fn row_numbers(layer: &PlacedLayer, latent: &Latent) -> [usize; 8] {
    let attention = &layer.spec.attention;
    let (heads, head_dim) = (attention.heads, attention.head_dim);
    let (rank, unrotated, value_dim) = (latent.rank, latent.unrotated, latent.value_dim);
    let rotated = head_dim - rank;
    let query_latent = query_rank(latent);
    [
        query_latent,
        query_latent,
        head_dim,
        heads * value_dim.max(unrotated + rotated),
        heads * value_dim.max(unrotated),
        heads * rotated,
        heads * rank,
        heads * rank,
    ]
}

fn query_rank(latent: &Latent) -> usize {
    let query = latent.query_latent.as_ref();
    query.map_or(0, |query| query.down.rows)
}

/// Numbers of a row in the widest of the places.
pub(super) fn widest_row(layer: &PlacedLayer) -> usize {
    match &layer.projections {
        Projections::Direct(_) => 0,
        Projections::Latent(latent) => {
            let numbers = row_numbers(layer, latent).into_iter();
            numbers.max().unwrap_or(0)
        }
    }
}

impl<'a> Step<'a> {
    /// Appends the new latents, then attends to them and to all before. What is attended is ready to be multiplied.
    pub(super) fn attend_to_latents(
        &self,
        pass: &mut Pass<'a>,
        matrices: &mut dyn Matrices<'a>,
        latent: &'a Latent,
        x: Input<'a>,
    ) -> Result<Input<'a>, StepError> {
        let (layer, places) = (self.layer, &self.places.latents);
        let slice = |place: &Range<u64>| self.slice(place);
        let (keys, made) = (slice(&places.keys), slice(&places.made));
        self.project(pass, matrices, &latent.row, x, keys, None)?;
        match &latent.query_latent {
            None => self.project(pass, matrices, &latent.query, x, made, None)?,
            Some(query) => {
                let short = slice(&places.query_latents);
                self.project(pass, matrices, &query.down, x, short, None)?;
                pass.barrier();
                let normed = slice(&places.normed_query_latents);
                let norm = self.norm(&query.norm, self.pass_rows(short), normed, None);
                let normed = pass.norm_input(norm, slice(&places.query_bytes))?;
                pass.barrier();
                self.project(pass, matrices, &latent.query, normed, made, None)?;
            }
        }
        pass.barrier();

        let (tiles, bytes) = (places.tiles, slice(&places.bytes));
        let (moved, rotated) = (slice(&places.moved), slice(&places.rotated));
        for sequence in self.sequences() {
            pass.prepare_latent_heads(LatentHeads {
                sequence,
                tiles,
                queries: made,
                unrotated: latent.unrotated,
                keys,
                norm: layer.vector(&latent.norm),
                epsilon: self.norm_epsilon,
                rotation: self.rotation(),
                into_latents: moved,
                rotated,
            })?;
        }
        pass.barrier();
        let x = pass.head_input(tiles, moved, latent.unrotated, bytes)?;
        pass.barrier();
        let queries = slice(&places.queries);
        self.project_heads(pass, matrices, &latent.into_latents, x, queries)?;
        pass.barrier();
        let out = slice(&places.attended);
        let attentions = self.attend_each(pass, queries, Some(rotated), self.pass_rows(out))?;
        let attended = pass.attended_latents(&attentions, tiles, (out, latent.rank), bytes)?;
        pass.barrier();
        self.project_heads(pass, matrices, &latent.out_of_latents, attended, made)?;
        pass.barrier();
        Ok(pass.heads_to_rows(tiles, made, latent.value_dim, moved, bytes)?)
    }

    /// Multiplies each head with its part of a matrix.
    fn project_heads(
        &self,
        pass: &mut Pass<'a>,
        matrices: &mut dyn Matrices<'a>,
        projection: &'a Projection,
        x: Input<'a>,
        out: Slice<'a>,
    ) -> Result<(), StepError> {
        let places = &self.places.latents;
        let product = HeadProduct {
            tiles: places.tiles,
            listed: self.slice(&places.listed),
            x,
            out,
        };
        let matrix = matrices.matrix(pass, projection)?;
        Ok(pass.multiply_heads(matrix, product)?)
    }
}
