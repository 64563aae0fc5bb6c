//! What a file says of its experts.

use crate::error::ModelError;
use crate::families::{Family, Presence};
use crate::keys::Keys;
use crate::spec::{ExpertGroups, Gating};

/// What is the same in all layers that have experts.
pub struct ExpertOptions {
    pub count: usize,
    pub used: usize,
    pub groups: Option<ExpertGroups>,
    /// Inner width of each.
    pub width: usize,
    pub gating: Gating,
    pub normalized: bool,
    pub scale: f32,
    pub biases: Presence,
    pub selection_bias: Presence,
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
const GROUPS_USED: &str = "expert_group_used_count";

impl ExpertOptions {
    /// `None`: every layer has one network for all tokens. `feed_forward` is how wide that one is, or would be; `vocabulary` how many tokens
    /// there are.
    ///
    /// # Errors
    /// [`ModelError::Key`]: experts in a family that has none, sizes that do not fit, ways to choose that prima does not compute.
    pub fn read(
        keys: &Keys<'_>,
        family: &Family,
        feed_forward: usize,
        vocabulary: usize,
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
        let used = bounded(USED, count)?;
        let width = keys.optional_size("expert_feed_forward_length")?;
        let width = width.unwrap_or(feed_forward);
        let dense_layers = keys.optional_u32("leading_dense_block_count")?;
        let default_gating = match kind.sigmoid_vocabulary == Some(vocabulary) {
            true => Gating::Sigmoid,
            false => kind.gating,
        };
        let gating = gating(keys)?.unwrap_or(default_gating);
        let normalized = keys.flag("expert_weights_norm")?;
        let scale = keys.positive_or_none("expert_weights_scale")?;
        Ok(Some(ExpertOptions {
            count,
            used,
            groups: groups(keys, gating, count, used)?,
            width,
            gating,
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

/// `None`: all experts are one group. The groups that a token chooses hold as many experts as it uses.
///
/// Groups are ranked as DeepSeek-V3 ranks them, whose scores are sigmoids. V2 (236B), with a softmax, was trained to rank them by the best
/// score of each; no key says so.
fn groups(
    keys: &Keys<'_>,
    gating: Gating,
    experts: usize,
    used: usize,
) -> Result<Option<ExpertGroups>, ModelError> {
    let Some(count) = keys.optional_u32(GROUPS)?.filter(|&count| count > 1) else {
        return Ok(None);
    };
    let count = count as usize;
    if !experts.is_multiple_of(count) || 2 * count > experts {
        let expected = format!("a divisor of the {experts} experts, for two or more in each");
        return Err(keys.refuse(GROUPS, expected, count));
    }
    if gating != Gating::Sigmoid {
        let expected = format!(
            "1 where {GATING} is not 2 (sigmoid): prima ranks groups as DeepSeek-V3 does, and V2 (236B) ranks them otherwise, so take \
             V2-Lite, or V3 or a newer one"
        );
        return Err(keys.refuse(GROUPS, expected, count));
    }
    let groups_used = keys.size(GROUPS_USED)?;
    if groups_used > count || groups_used * (experts / count) < used {
        let expected = format!("at most {count} groups, with {used} experts or more");
        return Err(keys.refuse(GROUPS_USED, expected, groups_used));
    }
    Ok(Some(ExpertGroups {
        count,
        used: groups_used,
    }))
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

#[cfg(test)]
mod tests {
    use prima_gguf::Gguf;
    use prima_gguf::writer::GgufWriter;

    use super::*;
    use crate::families::by_name;

    /// Files of GLM-4.7-Flash do not say it; llama.cpp, too, knows them by their vocabulary.
    #[test]
    fn gating_that_no_key_states_follows_from_the_vocabulary() {
        let mut writer = GgufWriter::new();
        writer.metadata("deepseek2.expert_count", 64_u32);
        writer.metadata("deepseek2.expert_used_count", 4_u32);
        let header = writer.write_header(Vec::new()).unwrap().finish().unwrap();
        let gguf = Gguf::parse("header", &header, header.len() as u64).unwrap();
        let family = by_name("deepseek2").unwrap();
        let keys = Keys {
            file: "header",
            metadata: &gguf.metadata,
            prefix: family.architecture,
        };
        for (vocabulary, gating) in [(154_880, Gating::Sigmoid), (102_400, Gating::Softmax)] {
            let options = ExpertOptions::read(&keys, family, 128, vocabulary).unwrap();
            assert_eq!(options.unwrap().gating, gating, "{vocabulary} tokens");
        }
    }
}
