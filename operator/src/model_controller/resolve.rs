//! Second step: finds the Model's file and what its header says. Agents describe a file on their machines; of a file on a server, only the
//! header is read, once. The result is pinned in the Model's status: another version of the file takes another source (a revision, a URL).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use prima_crds::error_chain;
use prima_crds::v1alpha1::model::{Model, ResolvedModel};
use prima_crds::v1alpha1::model_source::ModelSource;
use prima_crds::v1alpha1::node_profile::LocalModel;
use prima_weights::{RemoteModel, Retry, model_profile};

use super::Context;
use crate::cluster::world::Machine;

#[derive(Clone)]
pub enum Resolution {
    Done(Box<ResolvedModel>),
    /// Nobody has looked yet.
    Awaited(String),
    Failed(String),
}

/// A failed look at a server, and when the next is due.
pub struct FailedLook {
    source: ModelSource,
    times: u32,
    next: Instant,
    message: String,
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

/// If the server is busy or away, the controller looks again later, not within one reconcile.
pub const RETRY: Retry = Retry {
    attempts: 2,
    first_pause: Duration::from_millis(500),
    longest_pause: Duration::from_secs(5),
};
const FIRST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// `failed`: the last look at a server, if it failed.
pub async fn resolve(
    model: &Model,
    context: &Context,
    failed: &mut Option<FailedLook>,
) -> Resolution {
    let source = &model.spec.source;
    let pinned = pinned(model);
    if let Some(path) = source.local_path() {
        return local(source, &path, &context.stores.machines(), pinned);
    }
    if let Some(pinned) = pinned {
        return Resolution::Done(Box::new(pinned.clone()));
    }
    let now = Instant::now();
    let before = failed.take().filter(|look| look.source == *source);
    if let Some(look) = before.as_ref().filter(|look| now < look.next) {
        let message = look.message.clone();
        *failed = before;
        return Resolution::Failed(message);
    }
    match read_header(source, context).await {
        Ok(resolved) => Resolution::Done(Box::new(resolved)),
        Err(message) => {
            let times = before.map_or(0, |look| look.times) + 1;
            let pause = FIRST_PAUSE.saturating_mul(1 << (times - 1).min(16));
            *failed = Some(FailedLook {
                source: source.clone(),
                times,
                next: now + pause.min(LONGEST_PAUSE),
                message: message.clone(),
            });
            Resolution::Failed(message)
        }
    }
}

/// Reads the version and the header of a file on a server. Errors are one line, for people.
async fn read_header(source: &ModelSource, context: &Context) -> Result<ResolvedModel, String> {
    let fetched = context.hub.source(source, None);
    let fetched = fetched.ok_or("spec.source: expected huggingFace or url")?;
    let remote = RemoteModel::open(&context.fetching, &fetched)
        .await
        .map_err(|error| error_chain(&error))?;
    let name = remote.files[0].shown();
    let profile = model_profile(&name, &remote.gguf).map_err(|error| error_chain(&error))?;
    Ok(ResolvedModel {
        source: source.clone(),
        version: remote.version,
        profile,
    })
}

/// Resolves a file on the machines, as their agents describe it.
fn local(
    source: &ModelSource,
    path: &str,
    machines: &[Machine],
    pinned: Option<&ResolvedModel>,
) -> Resolution {
    let mut versions: BTreeMap<&str, (usize, &LocalModel)> = BTreeMap::new();
    let mut problems = Vec::new();
    let mut looked = false;
    for machine in machines {
        let agent = machine
            .profile
            .as_deref()
            .and_then(|profile| profile.status.as_ref()?.agent.as_ref());
        let Some(agent) = agent.filter(|_| machine.is_alive()) else {
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
    // The version in use stays while any machine has it; else the version on most machines is taken.
    let chosen = pinned
        .and_then(|pinned| versions.get(pinned.version.header_sha256.as_str()))
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
        return Resolution::Done(Box::new(ResolvedModel {
            source: source.clone(),
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
