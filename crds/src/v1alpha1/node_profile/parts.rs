//! Which models a machine computes, on its processor and on its GPU: by their families, by their parts, and on a GPU by their formats.
//!
//! Decides what agents of earlier versions count as, whose profiles do not name all parts. Refuses to know what a part is (`prima-model`
//! does): here a part is a name, so that those of newer versions are compared like all others.

use super::super::model_profile::ModelProfileSpec;
use super::{GpuMeasurements, NodeProfileStatus};

/// Layers with experts: the one part that agents named before they named all.
const EXPERTS: &str = "experts";

/// What the first agents computed, which ran llama and qwen2.
const OF_FIRST_FAMILIES: [&str; 7] = [
    "interleaved-rope",
    "halves-rope",
    "partial-rope",
    "linear-rope",
    "rope-divisors",
    "attention-biases",
    "silu",
];

/// What came with further families, all of them without experts. GPUs computed this, too.
const OF_DENSE_FAMILIES: [&str; 22] = [
    "embedding-scale",
    "residual-scale",
    "logit-scale",
    "logit-softcap",
    "mean-pooling",
    "cls-pooling",
    "rank-pooling",
    "yarn",
    "longrope",
    "rope-magnitude",
    "no-rope",
    "attention-temperature",
    "attention-scale",
    "attention-output-bias",
    "head-norms",
    "joint-head-norms",
    "sliding-windows",
    "attention-softcap",
    "no-pre-norms",
    "post-norms",
    "gelu",
    "feed-forward-biases",
];

/// What came with experts.
const OF_MIXTURES: [&str; 12] = [
    "attention-sinks",
    "clamped-swiglu",
    EXPERTS,
    "expert-biases",
    "softmax-gating",
    "sigmoid-gating",
    "softmax-of-chosen-gating",
    "selection-bias",
    "normalized-experts",
    "expert-scale",
    "shared-experts",
    "shared-expert-gate",
];

impl NodeProfileStatus {
    /// Whether the agent can run this model.
    pub fn runs(&self, model: &ModelProfileSpec) -> bool {
        self.lacks("model", model).is_none()
    }

    /// What the agent lacks for this model, which is called `what`, and what to do about it: one sentence, without a capital and a stop.
    pub fn lacks(&self, what: &str, model: &ModelProfileSpec) -> Option<String> {
        let (architecture, version) = (&model.architecture, &self.agent_version);
        if !self.architectures.contains(architecture) {
            return Some(format!(
                "its agent ({version}) cannot run {architecture} models: update it"
            ));
        }
        let computed = self.computed_parts();
        let lacking = needed_parts(model).find(|part| !computed.contains(part))?;
        Some(format!(
            "its agent ({version}) cannot compute {lacking}, a part of the {what}: update it"
        ))
    }

    /// Names of the parts that the processor computes. An agent of an earlier version names none but experts: what it computes is known by
    /// that, and by the families that it names.
    pub fn computed_parts(&self) -> Vec<&str> {
        let is_earlier = self.parts.iter().all(|part| part == EXPERTS);
        if !is_earlier {
            return self.parts.iter().map(String::as_str).collect();
        }
        let has_experts = !self.parts.is_empty();
        let is_first = self.architectures == first_architectures();
        let before: &[&[&str]] = match (has_experts, is_first) {
            (true, _) => &[&OF_FIRST_FAMILIES, &OF_DENSE_FAMILIES, &OF_MIXTURES],
            (false, false) => &[&OF_FIRST_FAMILIES, &OF_DENSE_FAMILIES],
            (false, true) => &[&OF_FIRST_FAMILIES],
        };
        before.concat()
    }
}

impl GpuMeasurements {
    pub(super) fn computes(&self, part: &str) -> bool {
        match self.parts.is_empty() {
            true => OF_FIRST_FAMILIES.contains(&part) || OF_DENSE_FAMILIES.contains(&part),
            false => self.parts.iter().any(|own| own == part),
        }
    }
}

/// Names of what a machine must compute of a model. A profile of an earlier version does not say, but for its experts.
pub(super) fn needed_parts(model: &ModelProfileSpec) -> impl Iterator<Item = &str> {
    let is_earlier = model.parts.is_empty();
    let experts = (is_earlier && model.experts > 0).then_some(EXPERTS);
    model.parts.iter().map(String::as_str).chain(experts)
}

/// What agents of the first version run, which do not say so.
pub(super) fn first_architectures() -> Vec<String> {
    ["llama", "qwen2"].map(str::to_owned).to_vec()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::model_profile::FormatWeights;
    use super::super::{GpuProfile, NodeProfile};
    use super::*;

    /// Of an agent of the first version.
    fn status() -> NodeProfileStatus {
        let yaml = include_str!("../../../tests/node-profile.yaml");
        let profile = NodeProfile::from_yaml("node.yaml", yaml).unwrap();
        profile.status.unwrap()
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn model(architecture: &str, parts: &[&str]) -> ModelProfileSpec {
        ModelProfileSpec {
            architecture: architecture.to_owned(),
            parts: names(parts),
            ..ModelProfileSpec::default()
        }
    }

    fn gpu(name: &str, formats: &[&str], unified: bool) -> GpuProfile {
        let rate = |format: &&str| json!({"format": format, "decodeBytesPerSecond": 1, "prefillFlopPerSecond": 1});
        let throughput: Vec<_> = formats.iter().map(rate).collect();
        serde_json::from_value(json!({
            "name": name, "backend": "CUDA",
            "measured": {
                "unifiedMemory": unified, "totalBytes": 9, "availableBytes": formats.len(), "readBytesPerSecond": 1,
                "kvAppendBytesPerSecond": 1, "toGpuBytesPerSecond": 1, "fromGpuBytesPerSecond": 1,
                "copyOverheadNanoseconds": 1, "layerOverheadNanoseconds": 1, "throughput": throughput,
            },
        }))
        .unwrap()
    }

    #[test]
    fn who_lacks_a_family_or_a_part_is_told_what_and_why() {
        let mut status = status();
        status.architectures.push("gpt-oss".to_owned());
        status.parts = names(&["silu", "halves-rope", "a-part-of-tomorrow"]);
        assert_eq!(
            status.lacks("model", &model("gemma3", &["silu"])).unwrap(),
            "its agent (0.1.0) cannot run gemma3 models: update it"
        );
        assert_eq!(
            status
                .lacks(
                    "draft model",
                    &model("gpt-oss", &["silu", "attention-sinks"])
                )
                .unwrap(),
            "its agent (0.1.0) cannot compute attention-sinks, a part of the draft model: update it"
        );
        assert!(status.runs(&model("gpt-oss", &["halves-rope", "silu"])));
        assert!(status.runs(&model("llama", &["a-part-of-tomorrow"])));
        assert!(!status.runs(&model("llama", &["interleaved-rope"])));
    }

    #[test]
    fn agents_of_before_compute_what_there_was_then() {
        let mut status = status();
        let of = |status: &NodeProfileStatus, part| status.computed_parts().contains(&part);
        // Of the first version.
        assert_eq!(status.computed_parts().len(), 7);
        assert!(of(&status, "rope-divisors") && !of(&status, "sliding-windows"));
        // With further families.
        status.architectures.push("gemma3".to_owned());
        assert_eq!(status.computed_parts().len(), 7 + 22);
        assert!(of(&status, "sliding-windows") && !of(&status, "experts"));
        // With experts.
        status.parts = names(&["experts"]);
        assert_eq!(status.computed_parts().len(), 7 + 22 + 12);
        assert!(of(&status, "attention-sinks") && of(&status, "silu"));
        // Of now.
        status.parts = names(&["experts", "silu"]);
        assert_eq!(status.computed_parts(), ["experts", "silu"]);
    }

    #[test]
    fn of_a_model_of_before_only_experts_are_known() {
        let mut status = status();
        let dense = model("llama", &[]);
        let mixture = ModelProfileSpec {
            experts: 8,
            ..model("llama", &[])
        };
        assert!(status.runs(&dense) && !status.runs(&mixture));
        let lacking = status.lacks("model", &mixture).unwrap();
        assert!(lacking.contains("cannot compute experts"), "{lacking}");
        status.parts = names(&["experts"]);
        assert!(status.runs(&mixture));
        status.parts = names(&["experts", "silu"]);
        assert!(status.runs(&mixture));
    }

    #[test]
    fn the_gpus_for_a_model_run_all_its_formats() {
        let mut status = status();
        let weights = |format: &str| FormatWeights {
            format: format.to_owned(),
            weights: 1,
            bytes: 1,
        };
        let model = ModelProfileSpec {
            layer_weights: vec![weights("Q4_K"), weights("Q6_K")],
            output_weights: vec![weights("F16")],
            ..ModelProfileSpec::default()
        };
        status.gpus = vec![gpu("half", &["Q4_K"], false)];
        assert!(status.gpu_for(&model).is_none());
        status.gpus.push(gpu("all", &["Q6_K", "Q4_K"], false));
        status
            .gpus
            .push(gpu("more", &["Q6_K", "Q4_K", "F16"], false));
        let (_, found) = status.gpu_for(&model).unwrap();
        assert_eq!(found.own_available_bytes(), Some(2 + 3));
        assert_eq!(found.throughput.len(), 2);
        let shared = gpu("shared", &["Q4_K"], true).measured.unwrap();
        assert_eq!(shared.own_available_bytes(), None);
    }

    #[test]
    fn a_gpu_that_lacks_a_part_holds_no_layers() {
        let mut status = status();
        let mut with_parts = |parts: &[&str]| {
            let mut gpu = gpu("one", &[], false);
            gpu.measured.as_mut().unwrap().parts = names(parts);
            status.gpus = vec![gpu];
            let has = |model: &ModelProfileSpec| status.gpu_for(model).is_some();
            let mixture = ModelProfileSpec {
                experts: 8,
                ..model("llama", &[])
            };
            [
                has(&model("gemma3", &["gelu", "silu"])),
                has(&model("gpt-oss", &["silu", "attention-sinks"])),
                has(&model("llama", &["silu", "a-part-of-tomorrow"])),
                has(&mixture),
            ]
        };
        // Those of earlier versions do not say: they compute all but what came with experts.
        assert_eq!(with_parts(&[]), [true, false, false, false]);
        let known = ["gelu", "silu", "attention-sinks"];
        assert_eq!(with_parts(&known), [true, true, false, false]);
        assert_eq!(with_parts(&["silu"]), [false, false, false, false]);
        let next = ["silu", "experts", "a-part-of-tomorrow"];
        assert_eq!(with_parts(&next), [false, false, true, true]);
    }
}
