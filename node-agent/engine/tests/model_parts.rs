//! Which parts families are said to have, and options of them. Machines are chosen by these names: one that does not compute a part gets no
//! layer of the model.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "these are tests")]

use prima_engine::{Compute, GpuApi, Model};

use prima_test_models::FAMILIES;
use prima_test_models::options::{Variant, options};

const PARTS: [(&str, &str); 19] = [
    ("llama", "interleaved-rope silu"),
    ("qwen2", "halves-rope attention-biases silu"),
    ("qwen3", "halves-rope head-norms silu"),
    (
        "gemma2",
        "embedding-scale logit-softcap halves-rope sliding-windows attention-softcap post-norms gelu",
    ),
    (
        "gemma3",
        "embedding-scale halves-rope head-norms sliding-windows post-norms gelu",
    ),
    ("phi3", "halves-rope longrope rope-magnitude silu"),
    (
        "mistral3",
        "interleaved-rope yarn rope-magnitude attention-temperature attention-output-bias silu feed-forward-biases",
    ),
    ("smollm3", "interleaved-rope no-rope silu"),
    (
        "olmo2",
        "halves-rope yarn rope-magnitude joint-head-norms sliding-windows no-pre-norms post-norms silu",
    ),
    (
        "granite",
        "embedding-scale residual-scale logit-scale interleaved-rope attention-scale silu",
    ),
    (
        "glm4",
        "interleaved-rope partial-rope attention-biases post-norms silu",
    ),
    (
        "mixtral",
        "interleaved-rope silu experts softmax-gating normalized-experts",
    ),
    (
        "qwen3moe",
        "halves-rope head-norms silu experts softmax-gating normalized-experts",
    ),
    (
        "olmoe",
        "halves-rope joint-head-norms silu experts softmax-gating",
    ),
    (
        "qwen2moe",
        "halves-rope attention-biases silu experts softmax-gating shared-experts shared-expert-gate",
    ),
    (
        "granitemoe",
        "embedding-scale residual-scale logit-scale interleaved-rope attention-scale silu experts softmax-gating \
         normalized-experts shared-experts",
    ),
    (
        "gpt-oss",
        "halves-rope yarn rope-magnitude attention-biases attention-output-bias sliding-windows attention-sinks \
         clamped-swiglu experts expert-biases softmax-of-chosen-gating",
    ),
    (
        "glm4moe",
        "halves-rope partial-rope attention-biases silu experts sigmoid-gating selection-bias normalized-experts \
         expert-scale shared-experts",
    ),
    (
        "deepseek2",
        "interleaved-rope silu experts sigmoid-gating selection-bias normalized-experts expert-scale shared-experts \
         latent-attention latent-queries",
    ),
];

/// What an option adds to a model, and what it takes away.
const OPTIONS: [(&str, &str, &str); 10] = [
    (
        "llama with biases",
        "attention-biases attention-output-bias feed-forward-biases",
        "",
    ),
    ("llama with divisors, as 3.1 has them", "rope-divisors", ""),
    ("llama with linear scaling", "linear-rope", ""),
    ("llama with YaRN", "yarn rope-magnitude", ""),
    ("granite without positions", "no-rope", "interleaved-rope"),
    (
        "glm4 with positions in parts",
        "halves-rope",
        "interleaved-rope",
    ),
    (
        "deepseek2 as V2-Lite",
        "yarn attention-scale softmax-gating",
        "sigmoid-gating selection-bias normalized-experts expert-scale latent-queries",
    ),
    (
        "deepseek2 with groups of experts, as V3",
        "expert-groups",
        "",
    ),
    (
        "deepseek2 with YaRN and a temperature",
        "yarn rope-magnitude attention-scale attention-temperature",
        "",
    ),
    (
        "deepseek2 without experts",
        "",
        "experts sigmoid-gating selection-bias normalized-experts expert-scale shared-experts",
    ),
];

fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

fn parts(variant: &Variant) -> Vec<&'static str> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("made-up.gguf");
    variant.write(&path, |_| {});
    let parts = Model::open(&path).unwrap().spec().parts();
    parts.into_iter().map(|part| part.name()).collect()
}

#[test]
fn every_family_has_its_parts() {
    assert_eq!(PARTS.map(|(family, _)| family), FAMILIES);
    for (family, expected) in PARTS {
        assert_eq!(parts(&Variant::of(family)), words(expected), "{family}");
    }
}

#[test]
fn options_add_parts_and_take_some_away() {
    for (name, more, fewer) in OPTIONS {
        let mut variants = options().into_iter();
        let variant = variants.find(|variant| variant.name == name).unwrap();
        let found = parts(&variant);
        let family = variant.model.architecture;
        let mut of_family = PARTS.into_iter().filter(|(name, _)| *name == family);
        let mut expected = words(of_family.next().unwrap().1);
        expected.retain(|part| !words(fewer).contains(part));
        expected.extend(words(more));
        let sorted = |mut parts: Vec<&'static str>| {
            parts.sort();
            parts
        };
        assert_eq!(sorted(found), sorted(expected), "{name}");
    }
}

#[test]
fn only_candle_leaves_latents_and_experts_to_the_processor() {
    let left_by = |api: GpuApi| -> Vec<_> {
        let left = Compute::model_parts().filter(|part| !api.computes(*part));
        left.map(|part| part.name()).collect()
    };
    assert!(left_by(GpuApi::Vulkan).is_empty());
    let expected = "attention-sinks clamped-swiglu experts expert-biases softmax-gating sigmoid-gating \
                    softmax-of-chosen-gating selection-bias normalized-experts expert-scale shared-experts shared-expert-gate \
                    expert-groups latent-attention latent-queries";
    assert_eq!(left_by(GpuApi::Cuda), words(expected));
    assert_eq!(left_by(GpuApi::Metal), words(expected));
}
