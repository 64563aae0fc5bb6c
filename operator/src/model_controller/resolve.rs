//! Second step: finds the Model's file, and its draft model's, and what their headers say. Agents describe files on their machines; of a file
//! on a server, only the header is read, once, beside the reconciles (`looks`). The result is pinned in the Model's status: another version of a file takes another source (a
//! revision, a URL). Refuses a draft model whose tokens are not the model's.

mod looks;

use std::collections::BTreeMap;

use prima_crds::v1alpha1::model::{Model, ResolvedFile, ResolvedModel};
use prima_crds::v1alpha1::model_profile::{ModelProfile, ModelProfileSpec, same_vocabulary};
use prima_crds::v1alpha1::model_source::ModelSource;
use prima_crds::v1alpha1::node_profile::LocalModel;

use super::Context;
use crate::cluster::world::Machine;
pub use looks::{HeaderReader, Looks, RETRY};

#[derive(Clone)]
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
        matches!(self, Self::Awaited(_) | Self::Failed(_))
    }
}

/// Why a file is not known.
#[derive(Debug)]
pub enum Unknown {
    Awaited(String),
    Failed(String),
}

/// The condition that this step decides, and its reason when it fails.
pub const RESOLVED: &str = "Resolved";
pub const RESOLVE_FAILED: &str = "ResolveFailed";
/// How messages about the draft model begin.
const OF_DRAFT: &str = "spec.speculation.draft: ";

pub fn resolve(model: &Model, context: &Context, looks: &mut Looks) -> Resolution {
    match resolved(model, context, looks) {
        Ok(resolved) => Resolution::Done(Box::new(resolved)),
        Err(Unknown::Awaited(message)) => Resolution::Awaited(message),
        Err(Unknown::Failed(message)) => Resolution::Failed(message),
    }
}

fn resolved(model: &Model, context: &Context, looks: &mut Looks) -> Result<ResolvedModel, Unknown> {
    let (source, draft) = (&model.spec.source, model.spec.draft());
    looks.keep(|used| used == source || Some(used) == draft);
    let before = pinned(model);
    let file_before = before.map(|before| ResolvedFile {
        source: before.source.clone(),
        version: before.version.clone(),
        profile: before.profile.clone(),
    });
    let found = file(model, source, file_before, context, looks)?;
    let draft = match draft {
        Some(source) => {
            let before = before.and_then(|before| before.draft.clone());
            let before = before.filter(|before| before.source == *source);
            let draft = file(model, source, before, context, looks);
            let draft = draft.and_then(|draft| guesses_for(&found, draft));
            Some(draft.map_err(Unknown::of_draft)?)
        }
        None => None,
    };
    Ok(ResolvedModel {
        source: found.source,
        version: found.version,
        profile: found.profile,
        draft,
    })
}

/// `draft`, if it can guess for `model`.
fn guesses_for(model: &ResolvedFile, draft: ResolvedFile) -> Result<ResolvedFile, Unknown> {
    let marks = |file: &ResolvedFile| file.profile.vocabulary_marks.clone();
    match same_vocabulary(&marks(&draft), &marks(model)) {
        Ok(()) => Ok(draft),
        Err(error) => Err(Unknown::Failed(format!(
            "{}: {error}",
            shown(&draft.source)
        ))),
    }
}

impl Unknown {
    fn of_draft(self) -> Self {
        self.after(OF_DRAFT)
    }

    /// The same, with these words before it.
    fn after(self, words: &str) -> Self {
        match self {
            Self::Awaited(message) => Self::Awaited(format!("{words}{message}")),
            Self::Failed(message) => Self::Failed(format!("{words}{message}")),
        }
    }
}

/// The file at `source`, which was `before`.
fn file(
    model: &Model,
    source: &ModelSource,
    before: Option<ResolvedFile>,
    context: &Context,
    looks: &mut Looks,
) -> Result<ResolvedFile, Unknown> {
    match (source.local_path(), before) {
        (Some(path), before) => {
            let found = local(source, &path, &context.stores.machines(), before.as_ref());
            found.map_err(|unknown| {
                // Agents that wait for a volume do not run, and so cannot tell; each waits for those of all claims.
                let claim = source.persistent_volume_claim.as_ref();
                match claim.and_then(|_| context.stores.claim_problem()) {
                    Some(problem) => unknown.after(&format!("{problem}; ")),
                    None => unknown,
                }
            })
        }
        (None, Some(before)) => Ok(before),
        (None, None) => looks.look(model, source, &context.headers),
    }
}

/// The file at `path` of the machines, as their agents describe it.
fn local(
    source: &ModelSource,
    path: &str,
    machines: &[Machine],
    before: Option<&ResolvedFile>,
) -> Result<ResolvedFile, Unknown> {
    let mut versions: BTreeMap<&str, (usize, &LocalModel)> = BTreeMap::new();
    let mut problems = Vec::new();
    // Of machines that had the file when they were heard of last.
    let mut silent = Vec::new();
    let mut looked = false;
    for machine in machines {
        let agent = machine
            .profile
            .as_deref()
            .and_then(|profile| profile.status.as_ref()?.agent.as_ref());
        let Some(agent) = agent else {
            continue;
        };
        looked |= machine.is_alive();
        let Some(file) = agent.local_models.iter().find(|file| file.path == path) else {
            continue;
        };
        if !machine.is_alive() {
            if file.version.is_some() && file.problem.is_none() {
                silent.push(format!(
                    "{} has {path}, and nothing is heard of its agent",
                    machine.name
                ));
            }
            continue;
        }
        match (&file.version, &file.problem) {
            (_, Some(problem)) => problems.push(format!("{}: {problem}", machine.name)),
            (Some(version), None) => {
                if let Some(Err(error)) = file.profile.as_ref().map(|one| checked(path, one)) {
                    problems.push(format!("{}: {error}", machine.name));
                    continue;
                }
                let (machines, chosen) =
                    versions.entry(&version.header_sha256).or_insert((0, file));
                *machines += 1;
                // Agents of earlier versions do not say which parts the model has.
                if !names_parts(chosen) && names_parts(file) {
                    *chosen = file;
                }
            }
            (None, None) => {}
        }
    }
    // The version in use stays while any machine has it; else the version on most machines is taken.
    let chosen = before
        .and_then(|before| versions.get(before.version.header_sha256.as_str()))
        .or_else(|| versions.values().max_by_key(|(machines, _)| *machines));
    if let Some((
        _,
        LocalModel {
            profile: Some(profile),
            version: Some(version),
            ..
        },
    )) = chosen
    {
        return Ok(ResolvedFile {
            source: source.clone(),
            version: version.clone(),
            profile: profile.clone(),
        });
    }
    if !silent.is_empty() {
        // These may come back; what others lack may be no fault of theirs.
        silent.append(&mut problems);
        return Err(Unknown::Awaited(silent.join("; ")));
    }
    Err(match (looked, problems.is_empty()) {
        (false, _) => Unknown::Awaited(format!("no machine has looked for {path} yet")),
        (true, false) => Unknown::Failed(problems.join("; ")),
        (true, true) => Unknown::Awaited(format!(
            "no machine has the file {path}; put it there, in the same place on every machine that may take part"
        )),
    })
}

/// What an agent says of a file is planned with, so it must be possible.
fn checked(path: &str, profile: &ModelProfileSpec) -> Result<(), String> {
    let profile = ModelProfile::new("local", profile.clone());
    profile.validate(path).map_err(|error| error.to_string())
}

fn names_parts(file: &LocalModel) -> bool {
    let profile = file.profile.as_ref();
    profile.is_some_and(|profile| !profile.parts.is_empty())
}

/// What was resolved before, if it still is what the spec asks for.
pub fn pinned(model: &Model) -> Option<&ResolvedModel> {
    let resolved = model.status.as_ref()?.resolved.as_ref()?;
    (resolved.source == model.spec.source).then_some(resolved)
}

/// As messages show it.
pub fn shown(source: &ModelSource) -> String {
    match source {
        ModelSource {
            hugging_face: Some(source),
            ..
        } => {
            format!("{}/{} at {}", source.repo, source.file, source.revision)
        }
        ModelSource {
            url: Some(source), ..
        } => source.url.clone(),
        other => other.local_path().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cluster::world::AgentState;
    use crate::model_controller::test_world::{machine, model, profile};

    #[test]
    fn an_agent_that_names_the_models_parts_is_believed() {
        let (_, resolved) = model();
        let mut machines = [machine("desk"), machine("pi4"), machine("laptop")];
        for (index, machine) in machines.iter_mut().enumerate() {
            let status = profile(machine).status.as_mut().unwrap();
            let file = &mut status.agent.as_mut().unwrap().local_models[0];
            let mut described = resolved.profile.clone();
            if index == 1 {
                described.parts = vec!["silu".to_owned()];
            }
            file.profile = Some(described);
        }
        let found = local(&resolved.source, "/models/m.gguf", &machines, None);
        let Ok(found) = found else {
            panic!("it is not found");
        };
        assert_eq!(found.profile.parts, ["silu"]);
    }

    #[test]
    fn a_silent_machine_that_alone_has_the_file_is_named() {
        let (_, resolved) = model();
        let mut machines = [machine("desk"), machine("nas")];
        for machine in &mut machines {
            let status = profile(machine).status.as_mut().unwrap();
            let file = &mut status.agent.as_mut().unwrap().local_models[0];
            file.profile = Some(resolved.profile.clone());
        }
        let alive = machines[1].agent;
        machines[1].agent = AgentState::Silent;
        let look = |machines: &[Machine]| local(&resolved.source, "/models/m.gguf", machines, None);
        assert!(look(&machines).is_ok());
        // The other one has no such folder.
        let status = profile(&mut machines[0]).status.as_mut().unwrap();
        let file = &mut status.agent.as_mut().unwrap().local_models[0];
        (file.version, file.profile) = (None, None);
        file.problem = Some("no folder".to_owned());
        let Err(Unknown::Awaited(message)) = look(&machines) else {
            panic!("it is not awaited");
        };
        assert_eq!(
            message,
            "nas has /models/m.gguf, and nothing is heard of its agent; desk: no folder"
        );
        machines[1].agent = alive;
        assert!(look(&machines).is_ok());
    }

    #[test]
    fn an_impossible_profile_is_not_planned_with() {
        let (_, resolved) = model();
        let mut desk = machine("desk");
        let status = profile(&mut desk).status.as_mut().unwrap();
        let file = &mut status.agent.as_mut().unwrap().local_models[0];
        file.profile = Some(ModelProfileSpec {
            layers: i32::MAX,
            ..resolved.profile
        });
        let found = local(&resolved.source, "/models/m.gguf", &[desk], None);
        let Err(Unknown::Failed(message)) = found else {
            panic!("it is not refused");
        };
        assert!(message.starts_with("desk: /models/m.gguf: "), "{message}");
        assert!(message.contains("spec.layers"), "{message}");
    }

    #[test]
    fn a_draft_model_of_another_vocabulary_is_refused() {
        let (_, resolved) = model();
        let file = |path: &str, mark: &str| ResolvedFile {
            source: serde_json::from_value(json!({"hostPath": {"path": path}})).unwrap(),
            version: resolved.version.clone(),
            profile: ModelProfileSpec {
                vocabulary_marks: vec![mark.to_owned()],
                ..resolved.profile.clone()
            },
        };
        let model = file("/models/m.gguf", "256:a");
        assert!(guesses_for(&model, file("/models/d.gguf", "256:a")).is_ok());
        let refused =
            guesses_for(&model, file("/models/d.gguf", "256:b")).map_err(Unknown::of_draft);
        let Err(Unknown::Failed(message)) = refused else {
            panic!("it is not refused");
        };
        assert_eq!(
            message,
            "spec.speculation.draft: /models/d.gguf: expected the same vocabulary as the model's, found another; use a small model of the same family"
        );
    }
}
