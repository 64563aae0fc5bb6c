//! Multi-head latent attention on the processor: what is before the attention kernel, and behind it.
//!
//! Decides: heads are multiplied with matrices of their own as one product, so they are moved from row after row to head after head, and
//! back.

use super::compute::LatentScratch;
use crate::error::EngineError;
use crate::kernels::{self, HeadPlaces, ThreadPool};
use crate::layer::Latent;
use crate::residency::Residency;

/// The latent attention of one layer, in one pass.
pub struct LatentStep<'a> {
    pub pool: &'a ThreadPool,
    pub residency: &'a Residency,
    pub norm_epsilon: f32,
    pub layer: &'a Latent,
    pub heads: usize,
    /// Numbers of what a position leaves behind: its latent, and its rotated key.
    pub head_dim: usize,
}

impl LatentStep<'_> {
    /// Writes queries in the space of latents (rows x heads x head_dim) and what positions leave behind (rows x head_dim), neither of them
    /// rotated yet. `x` is rows x hidden; `spare` has room for rows x heads x rank.
    pub fn before(
        &self,
        scratch: &mut LatentScratch,
        x: &[f32],
        rows: usize,
        [queries, keys]: [&mut [f32]; 2],
        spare: &mut [f32],
    ) -> Result<(), EngineError> {
        let LatentStep {
            pool,
            residency,
            layer,
            heads,
            head_dim,
            ..
        } = *self;
        let (rank, unrotated) = (layer.rank, layer.unrotated);
        let rotated = head_dim - rank;
        let query_dim = unrotated + rotated;
        let made = scratch.by_rows.take(rows * heads * query_dim);
        match &layer.query_latent {
            None => {
                let outputs = [(&layer.row, &mut *keys), (&layer.query, &mut *made)];
                residency.matmul(pool, x, rows, outputs)?;
            }
            Some(latent) => {
                let short = scratch.query_latents.take(rows * latent.norm.len());
                let outputs = [(&layer.row, &mut *keys), (&latent.down, &mut *short)];
                residency.matmul(pool, x, rows, outputs)?;
                kernels::rms_norm_in_place(pool, short, &latent.norm, self.norm_epsilon);
                residency.matmul(pool, short, rows, [(&layer.query, &mut *made)])?;
            }
        }
        kernels::rms_norm_first(pool, keys, head_dim, &layer.norm, self.norm_epsilon);

        let latents = &mut spare[..heads * rows * rank];
        let by_heads = scratch.by_heads.take(heads * rows * unrotated);
        let sizes = [rows, heads, unrotated];
        let from = (&*made, by_rows(heads, query_dim, 0));
        let to = head_after_head(rows, unrotated);
        kernels::copy_heads(pool, sizes, from, (&mut *by_heads, to));
        residency.matmul_heads(pool, by_heads, rows, heads, &layer.into_latents, latents)?;
        let from = (&*latents, head_after_head(rows, rank));
        let to = by_rows(heads, head_dim, 0);
        kernels::copy_heads(pool, [rows, heads, rank], from, (&mut *queries, to));
        let from = (&*made, by_rows(heads, query_dim, unrotated));
        let to = by_rows(heads, head_dim, rank);
        kernels::copy_heads(pool, [rows, heads, rotated], from, (queries, to));
        Ok(())
    }

    /// The results of heads (rows x heads x value_dim), made of what attention made of latents (rows x heads x rank). `spare` has room for as
    /// many numbers as these.
    pub fn behind<'b>(
        &self,
        scratch: &'b mut LatentScratch,
        attended: &[f32],
        rows: usize,
        spare: &mut [f32],
    ) -> Result<&'b [f32], EngineError> {
        let LatentStep { pool, heads, .. } = *self;
        let (rank, value_dim) = (self.layer.rank, self.layer.value_dim);
        let latents = &mut spare[..heads * rows * rank];
        let from = (attended, by_rows(heads, rank, 0));
        let to = head_after_head(rows, rank);
        kernels::copy_heads(pool, [rows, heads, rank], from, (&mut *latents, to));
        let by_heads = scratch.by_heads.take(heads * rows * value_dim);
        let matrices = &self.layer.out_of_latents;
        self.residency
            .matmul_heads(pool, latents, rows, heads, matrices, by_heads)?;
        let results = scratch.by_rows.take(heads * rows * value_dim);
        let from = (&*by_heads, head_after_head(rows, value_dim));
        let to = by_rows(heads, value_dim, 0);
        kernels::copy_heads(pool, [rows, heads, value_dim], from, (&mut *results, to));
        Ok(results)
    }
}

/// The numbers of heads of `width`, from `first` on, in rows of all heads.
fn by_rows(heads: usize, width: usize, first: usize) -> HeadPlaces {
    HeadPlaces {
        first,
        row: heads * width,
        head: width,
    }
}

/// Heads of `width`, each with its `rows` one after the other.
fn head_after_head(rows: usize, width: usize) -> HeadPlaces {
    HeadPlaces {
        first: 0,
        row: width,
        head: rows * width,
    }
}
