//! What a file says of its experts.

use crate::error::ModelError;
use crate::families::{Family, Presence};
use crate::keys::Keys;
use crate::spec::Gating;

/// What is the same in all layers that have experts.
pub struct ExpertOptions {
    pub count: usize,
    pub used: usize,
    /// Inner width of each.
    pub width: usize,
    pub gating: Gating,
    pub normalized: bool,
    pub scale: f32,
    pub biases: Presence,
    pub selection_bias: bool,
    /// Inner width of the expert for all tokens; `None`: there is none.
    pub shared_width: Option<usize>,
    pub shared_gate: bool,
    /// So many layers, the first, have none.
    pub dense_layers: usize,
}

/// Published models have up to 512.
const MOST: usize = 4096;
const COUNT: &str = "expert_count";
const USED: &str = "expert_used_count";
const GATING: &str = "expert_gating_func";
const GROUPS: &str = "expert_group_count";

impl ExpertOptions {
    /// `None`: every layer has one network for all tokens. `feed_forward` is how wide that one is, or would be.
    ///
    /// # Errors
    /// [`ModelError::Key`]: experts in a family that has none, sizes that do not fit, ways to choose that prima does not compute.
    pub fn read(
        keys: &Keys<'_>,
        family: &Family,
        feed_forward: usize,
    ) -> Result<Option<ExpertOptions>, ModelError> {
        let stated = keys.optional_u32(COUNT)?.filter(|&count| count != 0);
        let Some(kind) = family.experts else {
            return match stated {
                None => Ok(None),
                Some(found) => Err(keys.refuse(COUNT, "0 (not a mixture of experts)", found)),
            };
        };
        if stated.is_none() && kind.presence == Presence::IfThere {
            return Ok(None);
        }
        let bounded = |key, most| match keys.size(key)? {
            size if size <= most => Ok(size),
            found => Err(keys.refuse(key, format!("a number from 1 to {most}"), found)),
        };
        let count = bounded(COUNT, MOST)?;
        if let Some(groups) = keys.optional_u32(GROUPS)?.filter(|&groups| groups > 1) {
            let expected = "at most 1: prima does not choose experts by groups";
            return Err(keys.refuse(GROUPS, expected, groups));
        }
        let width = keys.optional_size("expert_feed_forward_length")?;
        let width = width.unwrap_or(feed_forward);
        let dense_layers = keys.optional_u32("leading_dense_block_count")?;
        let normalized = keys.flag("expert_weights_norm")?;
        let scale = keys.positive_or_none("expert_weights_scale")?;
        Ok(Some(ExpertOptions {
            count,
            used: bounded(USED, count)?,
            width,
            gating: gating(keys)?.unwrap_or(kind.gating),
            normalized: normalized.unwrap_or(kind.normalized),
            scale: scale.unwrap_or(1.0),
            biases: kind.biases,
            selection_bias: kind.selection_bias,
            shared_width: shared_width(keys, kind.shared, width, feed_forward)?,
            shared_gate: kind.shared_gate,
            dense_layers: dense_layers.unwrap_or(0) as usize,
        }))
    }
}

/// As the file says; else as wide as so many of the others.
fn shared_width(
    keys: &Keys<'_>,
    shared: Presence,
    width: usize,
    feed_forward: usize,
) -> Result<Option<usize>, ModelError> {
    const WIDTH: &str = "expert_shared_feed_forward_length";
    const COUNT: &str = "expert_shared_count";
    if shared == Presence::Never {
        return Ok(None);
    }
    let number = |key| Ok::<_, ModelError>(keys.optional_u32(key)?.filter(|&number| number > 0));
    if number(WIDTH)?.is_some() {
        return keys.optional_size(WIDTH);
    }
    match number(COUNT)? {
        Some(count) if (count as usize) < MOST => Ok(Some(count as usize * width)),
        Some(count) => Err(keys.refuse(COUNT, format!("fewer than {MOST}"), count)),
        None if shared == Presence::Always => Ok(Some(feed_forward)),
        None => Ok(None),
    }
}

/// The numbers are llama.cpp's; 0 is none.
fn gating(keys: &Keys<'_>) -> Result<Option<Gating>, ModelError> {
    match keys.optional_u32(GATING)? {
        None | Some(0) => Ok(None),
        Some(1) => Ok(Some(Gating::Softmax)),
        Some(2) => Ok(Some(Gating::Sigmoid)),
        Some(3) => Ok(Some(Gating::SoftmaxOfChosen)),
        Some(other) => {
            let expected = "1 (softmax), 2 (sigmoid) or 3 (softmax of those chosen)";
            Err(keys.refuse(GATING, expected, other))
        }
    }
}
