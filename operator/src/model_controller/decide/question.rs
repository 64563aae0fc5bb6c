//! What the planner is asked, and what it answers.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use kube::ResourceExt;
use prima_crds::error_chain;
use prima_crds::v1alpha1::model::{Model, ResolvedModel};
use prima_crds::v1alpha1::model_profile::ModelProfile;
use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_halda::{Options, Plan, PlanError};

use super::apart::MACHINES_APART;
use crate::model_controller::candidates::Candidates;
use crate::model_controller::update_status::missed_before;
use crate::plan::{self, PlanCommandError};

/// Asks for the best ring of these machines.
pub struct Question {
    /// Equal as long as the answer would hardly change.
    pub fingerprint: String,
    /// A ring is needed: there is none, or it cannot go on as it is.
    pub needed: bool,
    /// A ring is broken, and none of the Model's rings answers meanwhile. A first ring is not urgent.
    pub urgent: bool,
    profile: ModelProfile,
    machines: Vec<NodeProfile>,
    options: Options,
}

/// The best ring, or why there is none.
#[derive(Clone)]
pub struct Answer {
    /// The question's.
    pub fingerprint: String,
    pub plan: Result<Arc<Plan>, NoRing>,
}

#[derive(Clone, Debug)]
pub struct NoRing {
    pub reason: &'static str,
    pub message: String,
}

/// The reason where it is memory that is lacking, or machines.
pub const DOES_NOT_FIT: &str = "DoesNotFit";

impl Question {
    pub fn new(
        fingerprint: &str,
        model: &Model,
        resolved: &ResolvedModel,
        candidates: &Candidates,
        context_length: i32,
        needed: bool,
        urgent: bool,
    ) -> Self {
        let (concurrent_requests, kv_contexts) =
            plan::concurrency(model.spec.max_concurrent_requests);
        Self {
            fingerprint: fingerprint.to_owned(),
            needed,
            urgent,
            profile: ModelProfile::new(&model.name_any(), resolved.profile.clone()),
            machines: candidates.profiles.clone(),
            options: Options {
                context_tokens: context_length as usize,
                concurrent_requests: concurrent_requests as usize,
                kv_contexts: kv_contexts as usize,
                min_nodes: model.spec.min_nodes.unwrap_or(1) as usize,
                rank0: model.spec.rank0.clone(),
                apart: candidates.apart.clone(),
                split_gpus: candidates.split_gpus.clone(),
                activation_dtype: model.spec.activation_dtype,
                kv_dtype: model.spec.kv_dtype,
                draft: resolved.draft.as_ref().map(|draft| draft.profile.clone()),
                expert_misses: missed_before(model, resolved)
                    .map_or(1.0, |percent| f64::from(percent) / 100.0),
                ..Options::default()
            },
        }
    }

    #[cfg(test)]
    pub fn for_tests(fingerprint: &str, urgent: bool) -> Self {
        let profile = ModelProfile::new("m", Default::default());
        Self {
            fingerprint: fingerprint.to_owned(),
            needed: urgent,
            urgent,
            profile,
            machines: Vec::new(),
            options: Options::default(),
        }
    }

    /// Searches. This keeps a processor busy, for up to many seconds.
    pub fn answer(&self) -> Answer {
        let plan = plan::checked(&self.profile, &self.machines, &self.options);
        Answer {
            fingerprint: self.fingerprint.clone(),
            plan: plan.map(Arc::new).map_err(|error| NoRing {
                reason: match &error {
                    PlanCommandError::Plan(PlanError::Apart { .. }) => MACHINES_APART,
                    _ => DOES_NOT_FIT,
                },
                message: error_chain(&error),
            }),
        }
    }
}

/// A hash of all that the answer depends on. How many experts are missed counts in steps of a tenth.
pub fn fingerprint(model: &Model, resolved: &ResolvedModel, candidates: &Candidates) -> String {
    let machines = candidates.profiles.iter().map(|profile| {
        let promised = candidates.promised.get(&profile.name_any());
        plan_depends_on(profile, promised.copied().unwrap_or(0))
    });
    let machines: Vec<String> = machines.collect();
    let draft = resolved.draft.as_ref();
    let versions = (
        &resolved.version.header_sha256,
        draft.map(|draft| &draft.version.header_sha256),
    );
    let misses = (missed_before(model, resolved).unwrap_or(100) + 5) / 10;
    let (apart, split) = (&candidates.apart, &candidates.split_gpus);
    let asked = format!(
        "{:?} {versions:?} {machines:?} {misses} {apart:?} {split:?}",
        model.spec
    );
    let mut hasher = DefaultHasher::new();
    asked.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// What plans depend on of a machine that lacks `promised` bytes of memory, which other Models' plans have. These count to the byte, since the
/// end of a small ring helps where little is lacking. Free memory comes and goes, so what there is without them counts in steps of a
/// twentieth, and links in steps of a quarter.
pub fn plan_depends_on(profile: &NodeProfile, promised: i64) -> String {
    let steps = |value: i64| (value.max(1) as f64).log(1.25).round() as i64;
    let status = profile.status.as_ref();
    let memory = status.map(|status| {
        let memory = &status.memory;
        let available = memory.available_bytes.saturating_add(promised);
        available.saturating_mul(20) / memory.total_bytes.max(1)
    });
    let links: Vec<_> = status
        .into_iter()
        .flat_map(|status| &status.links)
        .map(|link| {
            (
                &link.to,
                steps(link.latency_nanoseconds),
                steps(link.bytes_per_second),
            )
        })
        .collect();
    let measured = status.map(|status| {
        let reads = (
            status.reads_windowed_sequences,
            status.reads_gpus,
            status.reads_chunk_positions,
        );
        (&status.measured_at, &status.gpus, reads)
    });
    format!(
        "{} {:?} {memory:?} {promised} {measured:?} {links:?}",
        profile.name_any(),
        profile.spec
    )
}
