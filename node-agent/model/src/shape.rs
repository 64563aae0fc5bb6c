//! The sizes of a model that all its layers share.

use crate::error::ModelError;
use crate::families::Family;
use crate::keys::Keys;

/// Sizes that all layers share.
pub struct Shape {
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Where a position leaves one row behind for all heads.
    pub latent: Option<LatentShape>,
    pub feed_forward: usize,
}

/// Sizes of [`Latent`](crate::Latent) attention.
#[derive(Clone, Copy)]
pub struct LatentShape {
    pub rank: usize,
    /// Of a query's numbers, those that go into the space of latents, and those that are rotated.
    pub unrotated: usize,
    pub rotated: usize,
    pub value_dim: usize,
    /// Of the latents that queries are made of, where the file has such.
    pub query_rank: Option<usize>,
}

const KV_HEADS: &str = "attention.head_count_kv";
const KEY: &str = "attention.key_length";
const VALUE: &str = "attention.value_length";

impl Shape {
    pub fn read(keys: &Keys<'_>, family: &Family) -> Result<Shape, ModelError> {
        let hidden = keys.size("embedding_length")?;
        let heads = keys.size_of_all_layers("attention.head_count")?;
        let feed_forward = keys.size_of_all_layers("feed_forward_length")?;
        if family.latent {
            let latent = LatentShape::read(keys)?;
            return Ok(Shape {
                hidden,
                heads,
                kv_heads: 1,
                head_dim: latent.rank + latent.rotated,
                latent: Some(latent),
                feed_forward,
            });
        }
        let kv_heads = match keys.has(KV_HEADS) {
            true => keys.size_of_all_layers(KV_HEADS)?,
            false => heads,
        };
        if heads % kv_heads != 0 {
            let expected = format!("a divisor of the {heads} query heads");
            return Err(keys.refuse(KV_HEADS, expected, kv_heads));
        }
        Ok(Shape {
            hidden,
            heads,
            kv_heads,
            head_dim: head_dim(keys, hidden, heads)?,
            latent: None,
            feed_forward,
        })
    }
}

impl LatentShape {
    fn read(keys: &Keys<'_>) -> Result<LatentShape, ModelError> {
        const RANK: &str = "attention.kv_lora_rank";
        const ROTATED: &str = "rope.dimension_count";
        const HEAD: &str = "attention.key_length_mla";
        const HEAD_VALUE: &str = "attention.value_length_mla";
        const QUERY_RANK: &str = "attention.q_lora_rank";
        // What is cached of 32 numbers is scaled together, and latents and rotated keys are cached as one row.
        let whole = |key| match keys.size(key)? {
            size if size.is_multiple_of(32) => Ok(size),
            found => Err(keys.refuse(key, "a multiple of 32", found)),
        };
        let (rank, rotated) = (whole(RANK)?, whole(ROTATED)?);
        for key in [HEAD, HEAD_VALUE] {
            if !keys.has(key) {
                let expected = "a length: the file was converted before llama.cpp cached latents (April 2025), so take a newer one, or \
                                convert the model again";
                return Err(keys.refuse(key, expected, "none"));
            }
        }
        for (key, expected) in [(KV_HEADS, 1), (KEY, rank + rotated), (VALUE, rank)] {
            match keys.optional_size(key)? {
                Some(found) if found != expected => {
                    let expected = format!("{expected}, as latents of {rank} numbers are cached");
                    return Err(keys.refuse(key, expected, found));
                }
                _ => {}
            }
        }
        let head = keys.size(HEAD)?;
        if head <= rotated {
            let expected = format!("more than the {rotated} numbers that are rotated");
            return Err(keys.refuse(HEAD, expected, head));
        }
        Ok(LatentShape {
            rank,
            unrotated: head - rotated,
            rotated,
            value_dim: keys.size(HEAD_VALUE)?,
            query_rank: match keys.optional_u32(QUERY_RANK)? {
                // As if it were not there.
                Some(0) => None,
                _ => keys.optional_size(QUERY_RANK)?,
            },
        })
    }
}

fn head_dim(keys: &Keys<'_>, hidden: usize, heads: usize) -> Result<usize, ModelError> {
    let head_dim = match keys.optional_size(KEY)? {
        Some(length) => length,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let expected = format!("a divisor of embedding_length {hidden}");
            return Err(keys.refuse("attention.head_count", expected, heads));
        }
    };
    match keys.optional_size(VALUE)? {
        Some(length) if length != head_dim => {
            let expected = format!("{head_dim}, the length of a key");
            Err(keys.refuse(VALUE, expected, length))
        }
        _ => Ok(head_dim),
    }
}
