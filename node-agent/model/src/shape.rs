//! The sizes of a model that all its layers share.

use crate::error::ModelError;
use crate::keys::Keys;

/// Sizes that all layers share.
pub struct Shape {
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub feed_forward: usize,
}

impl Shape {
    pub fn read(keys: &Keys<'_>) -> Result<Shape, ModelError> {
        let hidden = keys.size("embedding_length")?;
        let heads = keys.size("attention.head_count")?;
        let kv_heads = keys.optional_size("attention.head_count_kv")?;
        let kv_heads = kv_heads.unwrap_or(heads);
        if heads % kv_heads != 0 {
            let expected = format!("a divisor of the {heads} query heads");
            return Err(keys.refuse("attention.head_count_kv", expected, kv_heads));
        }
        Ok(Shape {
            hidden,
            heads,
            kv_heads,
            head_dim: head_dim(keys, hidden, heads)?,
            feed_forward: keys.size("feed_forward_length")?,
        })
    }
}

fn head_dim(keys: &Keys<'_>, hidden: usize, heads: usize) -> Result<usize, ModelError> {
    let head_dim = match keys.optional_size("attention.key_length")? {
        Some(length) => length,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let expected = format!("a divisor of embedding_length {hidden}");
            return Err(keys.refuse("attention.head_count", expected, heads));
        }
    };
    match keys.optional_size("attention.value_length")? {
        Some(length) if length != head_dim => {
            let expected = format!("{head_dim}, the length of a key");
            Err(keys.refuse("attention.value_length", expected, length))
        }
        _ => Ok(head_dim),
    }
}
