//! Second step: which file a Model is, and what its header says. A file on the machines is described by their agents; one on a
//! server is read from there once, its header only. What was resolved is pinned in the Model's status: another version of
//! the file is another source (a revision, a URL).

use std::collections::BTreeMap;

use kube::ResourceExt;
use prima_crds::v1alpha1::model::{Model, ModelSource, ResolvedModel};
use prima_crds::v1alpha1::node_profile::LocalModel;

use super::dereference::World;
use crate::cluster::world::AgentState;

pub enum Resolution {
    Done(Box<ResolvedModel>),
    /// Nobody has looked yet.
    Awaited(String),
    Failed(String),
}

impl Resolution {
    pub fn done(&self) -> Option<&ResolvedModel> {
        match self {
            Self::Done(resolved) => Some(resolved),
            _ => None,
        }
    }

    /// Whether to look again soon.
    pub fn awaits(&self) -> bool {
        matches!(self, Self::Awaited(_))
    }
}

pub fn local(model: &Model, path: &str, world: &World, pinned: Option<&ResolvedModel>) -> Resolution {
    let mut versions: BTreeMap<&str, (usize, &LocalModel)> = BTreeMap::new();
    let mut problems = Vec::new();
    let mut looked = false;
    for machine in &world.machines {
        let alive = matches!(machine.agent, AgentState::Alive { .. });
        let agent = machine
            .profile
            .as_deref()
            .and_then(|profile| profile.status.as_ref()?.agent.as_ref());
        let Some(agent) = agent.filter(|_| alive) else {
            continue;
        };
        looked = true;
        let Some(file) = agent.local_models.iter().find(|file| file.path == path) else {
            continue;
        };
        match (&file.version, &file.problem) {
            (_, Some(problem)) => problems.push(format!("{}: {problem}", machine.name)),
            (Some(version), None) => {
                versions
                    .entry(&version.header_sha256)
                    .or_insert((0, file))
                    .0 += 1;
            }
            (None, None) => {}
        }
    }
    // A version that is in use stays the Model's while any machine has it; else the most machines decide.
    let chosen = pinned
        .and_then(|pinned| versions.get(pinned.version.header_sha256.as_str()))
        .or_else(|| versions.values().max_by_key(|(machines, _)| *machines));
    if let Some((_, LocalModel { profile: Some(profile), version: Some(version), .. })) = chosen {
        return Resolution::Done(Box::new(ResolvedModel {
            source: model.spec.source.clone(),
            version: version.clone(),
            profile: profile.clone(),
        }));
    }
    match (looked, problems.is_empty()) {
        (false, _) => Resolution::Awaited(format!("no machine has looked for {path} yet")),
        (true, false) => Resolution::Failed(problems.join("; ")),
        (true, true) => Resolution::Awaited(format!(
            "no machine has the file {path}; put it there, in the same place on every machine that may take part"
        )),
    }
}

/// What was resolved before, if it still is what the spec asks for.
pub fn pinned(model: &Model) -> Option<&ResolvedModel> {
    let resolved = model.status.as_ref()?.resolved.as_ref()?;
    (resolved.source == model.spec.source).then_some(resolved)
}

/// For messages.
pub fn shown(source: &ModelSource) -> String {
    match source {
        ModelSource { hugging_face: Some(source), .. } => {
            format!("{}/{} at {}", source.repo, source.file, source.revision)
        }
        ModelSource { url: Some(source), .. } => source.url.clone(),
        other => other.local_path().unwrap_or_default(),
    }
}

/// For messages about a Model.
pub fn name(model: &Model) -> String {
    format!("{}/{}", model.namespace().unwrap_or_default(), model.name_any())
}
