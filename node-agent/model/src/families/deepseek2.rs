//! DeepSeek V2-Lite, V3 to V3.1 and R1, GLM-4.7-Flash, Kimi K2 and whatever else llama.cpp's converter writes as `deepseek2`: keys and values
//! of all heads are one latent row of each position; some dense layers first, then experts, and one for all tokens.
//!
//! Two things are not as in llama.cpp. It ranks groups of experts by their two best scores in all models, as V3 was trained; V2 (236B) was
//! trained to rank them by the best one, and is refused. (Files from before llama.cpp knew groups, of either, do not name them: then a token
//! chooses among all experts, here as there.) And YaRN's `beta_fast` and `beta_slow` are taken from the file, as published (Kimi K2 has other
//! ones than most); llama.cpp does not read them for this family.

use super::llama::DENSE;
use super::{EXPERTS, ExpertKind, Family, Presence};

pub const DEEPSEEK2: Family = Family {
    architecture: "deepseek2",
    latent: true,
    attention_biases: Presence::Never,
    other_biases: Presence::Never,
    long_context_keys: true,
    experts: Some(ExpertKind {
        presence: Presence::IfThere,
        sigmoid_vocabulary: Some(154_880),
        normalized: false,
        selection_bias: Presence::IfThere,
        shared: Presence::IfThere,
        ..EXPERTS
    }),
    ..DENSE
};
