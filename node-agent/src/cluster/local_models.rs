//! Which of the files that Models name by a path are on this machine. The operator plans such a Model from what agents read in the headers
//! of these files.
//!
//! Decides when to look: when Models change, and once a minute, because people copy files at any time. A missing file is not reported; a
//! folder that this agent was not given is. Refuses what agents fetched for other Models, and more files than fit into a profile.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use futures::StreamExt as _;
use kube::api::DynamicObject;
use kube::runtime::watcher::Event;
use kube::{Client, ResourceExt as _};
use prima_crds::v1alpha1::model::Model;
use prima_crds::v1alpha1::model_source::{CLAIMS_FOLDER, ModelSource};
use prima_crds::v1alpha1::node_profile::{LocalModel, NodeProfileStatus};
use prima_crds::v1alpha1::ring_plan::FileVersion;
use prima_gguf::part_paths;
use prima_weights::{Cache, model_profile};
use serde::Deserialize as _;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until};

use super::api;
use super::backoff::jittered;
use super::metrics::{Established, Step};
use super::weights::{Weights, WeightsError};
use crate::local_header;

const INTERVAL: Duration = Duration::from_secs(60);
/// Of a namespace.
const MOST_PATHS: usize = 64;
/// Of all namespaces. An object in the cluster has 1.5 MiB at most, and each file takes some 2 kB of it at worst.
const MOST_PATHS_IN_ALL: usize = 400;

/// Looks for ever.
pub async fn follow(
    client: Client,
    profile: watch::Sender<NodeProfileStatus>,
    weights: Weights,
    established: Established,
) {
    let in_container = profile.borrow().system.in_container;
    let mut events = api::watch_all::<Model>(client);
    let mut wanted = WantedPaths::default();
    let mut listed = BTreeSet::new();
    let mut seen = Seen::new();
    let mut again = Instant::now();
    loop {
        let changed = tokio::select! {
            event = events.next() => match event {
                Some(Event::Init) => {
                    listed.clear();
                    false
                }
                Some(Event::InitApply(model)) => {
                    listed.insert(key(&model));
                    wanted.seen(&model);
                    false
                }
                Some(Event::InitDone) => {
                    established.done(Step::Models);
                    wanted.0.retain(|model, _| listed.contains(model));
                    true
                }
                Some(Event::Apply(model)) => wanted.seen(&model),
                Some(Event::Delete(model)) => wanted.0.remove(&key(&model)).is_some(),
                // Watches do not end.
                None => return,
            },
            () = sleep_until(again) => true,
        };
        if !changed {
            continue;
        }
        again = Instant::now() + jittered(INTERVAL);
        let (paths, weights) = (wanted.paths(&told(&profile.borrow())), weights.clone());
        let looking = spawn_blocking(move || look(&paths, seen, in_container, weights.cache()));
        // A panic has been printed; what was seen is read again.
        seen = looking.await.unwrap_or_default();
        let found: Vec<LocalModel> = seen
            .values()
            .filter_map(|(_, found)| found.clone())
            .collect();
        profile.send_if_modified(|status| match &mut status.agent {
            Some(agent) if agent.local_models != found => {
                agent.local_models = found;
                true
            }
            _ => false,
        });
    }
}

/// The paths that each Model names, by namespace and name: of its file, and of its draft model's.
#[derive(Default)]
struct WantedPaths(BTreeMap<(String, String), BTreeSet<String>>);

impl WantedPaths {
    /// Whether something changed.
    fn seen(&mut self, model: &DynamicObject) -> bool {
        let sources = ["/spec/source", "/spec/speculation/draft"].into_iter();
        let sources = sources.filter_map(|source| model.data.pointer(source));
        // A source of a newer version is not a file on this agent's disk.
        let paths: BTreeSet<String> = sources
            .filter_map(|source| ModelSource::deserialize(source).ok()?.local_path())
            .collect();
        let key = key(model);
        match paths.is_empty() {
            true => self.0.remove(&key).is_some(),
            false => self.0.insert(key, paths.clone()) != Some(paths),
        }
    }

    /// What is looked for: before others what was `told`, as rings may use it. Where there is no room for all, namespaces take turns, so that
    /// those with few files keep them.
    fn paths(&self, told: &BTreeSet<String>) -> BTreeSet<String> {
        let mut of_namespaces: BTreeMap<&str, BTreeSet<(bool, &String)>> = BTreeMap::new();
        for ((namespace, _), paths) in &self.0 {
            let paths = paths.iter().map(|path| (!told.contains(path), path));
            of_namespaces.entry(namespace).or_default().extend(paths);
        }
        for (namespace, paths) in &of_namespaces {
            if let Some((_, first)) = paths.iter().nth(MOST_PATHS) {
                tracing::warn!(
                    namespace,
                    first,
                    paths = paths.len(),
                    "more files than a namespace may name on a machine: this one and others are not looked for"
                );
            }
        }
        let of_each = of_namespaces.into_values();
        let of_each = of_each.flat_map(|paths| paths.into_iter().take(MOST_PATHS).enumerate());
        let mut in_turns: Vec<(bool, usize, &String)> = of_each
            .map(|(turn, (is_new, path))| (is_new, turn, path))
            .collect();
        // Paths of a turn stay in the order of their namespaces.
        in_turns.sort_by_key(|(is_new, turn, _)| (*is_new, *turn));
        let mut paths = BTreeSet::new();
        for (_, _, path) in in_turns {
            if paths.len() == MOST_PATHS_IN_ALL && !paths.contains(path) {
                tracing::warn!(
                    first = path,
                    "more files than a machine can tell of: this one and others are not looked for"
                );
                break;
            }
            paths.insert(path.clone());
        }
        paths
    }
}

/// The files that this machine is said to have, also by the agent before this one.
fn told(status: &NodeProfileStatus) -> BTreeSet<String> {
    let told = status.agent.iter().flat_map(|agent| &agent.local_models);
    let usable = told.filter(|file| file.problem.is_none());
    usable.map(|file| file.path.clone()).collect()
}

fn key(model: &DynamicObject) -> (String, String) {
    (model.namespace().unwrap_or_default(), model.name_any())
}

/// By path: the file as it was when last looked at, and what to report of it.
type Seen = BTreeMap<String, (Stamp, Option<LocalModel>)>;

/// What changes with the content of a model's files.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Stamp {
    /// Length and time of the last change of each; of a part that is not there, nothing.
    Files(Vec<Option<(u64, Option<SystemTime>)>>),
    NoFile,
}

/// Reads the headers of files that are new or have changed since `seen`.
fn look(paths: &BTreeSet<String>, mut seen: Seen, in_container: bool, fetched: &Cache) -> Seen {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let look_at = |path: &String| {
        let (stamp, found) = match fs::metadata(path) {
            Ok(_) if fetched.holds(Path::new(path)) => {
                let problem = WeightsError::KeptForOthers { path: path.clone() };
                (Stamp::NoFile, Some(unusable(path, problem.to_string())))
            }
            Ok(_) => {
                let stamp = stamp(Path::new(path));
                if let Some((before, found)) = seen.remove(path)
                    && before == stamp
                {
                    return (path.clone(), (before, found));
                }
                (stamp, Some(read(path)))
            }
            Err(error) => (
                Stamp::NoFile,
                problem_without_file(path, &error, in_container, &mounts)
                    .map(|problem| unusable(path, problem)),
            ),
        };
        (path.clone(), (stamp, found))
    };
    paths.iter().map(look_at).collect()
}

fn stamp(path: &Path) -> Stamp {
    let files = part_paths(path).into_iter().map(|path| {
        let metadata = fs::metadata(path).ok()?;
        Some((metadata.len(), metadata.modified().ok()))
    });
    Stamp::Files(files.collect())
}

fn read(path: &str) -> LocalModel {
    let read = local_header::read(Path::new(path))
        .map_err(|error| prima_crds::error_chain(&error))
        .and_then(|header| {
            let profile = model_profile(path, &header.gguf)
                .map_err(|error| prima_crds::error_chain(&error))?;
            Ok((profile, header.sha256))
        });
    match read {
        Ok((profile, header_sha256)) => LocalModel {
            path: path.to_owned(),
            profile: Some(profile),
            version: Some(FileVersion {
                header_sha256,
                ..FileVersion::default()
            }),
            problem: None,
        },
        Err(problem) => unusable(path, problem),
    }
}

fn unusable(path: &str, problem: String) -> LocalModel {
    LocalModel {
        path: path.to_owned(),
        profile: None,
        version: None,
        problem: Some(problem),
    }
}

/// Why a file cannot be there at all; `None` if this machine just has no copy.
fn problem_without_file(
    path: &str,
    error: &io::Error,
    in_container: bool,
    mounts: &str,
) -> Option<String> {
    if error.kind() != io::ErrorKind::NotFound {
        return Some(format!("{path}: {error}"));
    }
    // Outside of a container every folder of the machine is there.
    if !in_container || is_mounted(path, mounts) {
        return None;
    }
    Some(match path.strip_prefix(CLAIMS_FOLDER) {
        Some(claim) => {
            let claim = claim
                .trim_start_matches('/')
                .split('/')
                .next()
                .unwrap_or("");
            format!(
                "the agent has no volume of claim {claim}: add the claim to the chart's value agent.persistentVolumeClaims, or the node, if it can mount it, to those of agent.claimNodeLabel"
            )
        }
        None => format!(
            "the agents have no folder that {path} is in: add one to the chart's value agent.modelDirs"
        ),
    })
}

/// Whether the path is below a mount other than the root itself: a container's own files are no models.
fn is_mounted(path: &str, mountinfo: &str) -> bool {
    let mut points = mountinfo.lines().filter_map(|line| line.split(' ').nth(4));
    points.any(|point| point != "/" && Path::new(path).starts_with(point))
}

#[cfg(test)]
mod tests {
    use prima_gguf::GgmlType;
    use prima_gguf::writer::GgufWriter;
    use serde_json::json;

    use super::*;

    const MOUNTS: &str = "\
22 1 0:21 / / rw - overlay overlay rw
23 22 8:1 /srv/models /srv/models ro - ext4 /dev/sda1 rw
24 22 8:2 / /var/lib/prima-claims/models ro - ext4 /dev/sdb1 rw
";

    fn missing(path: &str, in_container: bool) -> Option<String> {
        let error = io::Error::from(io::ErrorKind::NotFound);
        problem_without_file(path, &error, in_container, MOUNTS)
    }

    #[test]
    fn a_missing_folder_names_the_value_and_a_missing_copy_nothing() {
        assert_eq!(missing("/srv/models/sub/a.gguf", true), None);
        assert_eq!(missing("/var/lib/prima-claims/models/a.gguf", true), None);
        assert_eq!(missing("/home/me/a.gguf", false), None);
        let problem = missing("/home/me/a.gguf", true).unwrap();
        assert!(
            problem.contains("agent.modelDirs") && problem.contains("/home/me/a.gguf"),
            "{problem}"
        );
        let problem = missing("/var/lib/prima-claims/other/x/a.gguf", true).unwrap();
        assert!(
            problem.contains("claim other:")
                && problem.contains("agent.persistentVolumeClaims")
                && problem.contains("agent.claimNodeLabel"),
            "{problem}"
        );
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        let problem = problem_without_file("/srv/models/a.gguf", &denied, true, MOUNTS).unwrap();
        assert!(problem.contains("permission denied"), "{problem}");
    }

    fn model(name: &str, spec: serde_json::Value) -> DynamicObject {
        serde_json::from_value(json!({
            "apiVersion": "prima.dev/v1alpha1",
            "kind": "Model",
            "metadata": {"name": name, "namespace": "default"},
            "spec": spec,
        }))
        .unwrap()
    }

    #[test]
    fn only_models_with_a_path_are_looked_for() {
        let mut wanted = WantedPaths::default();
        let local = json!({"source": {"hostPath": {"path": "/srv/models/a.gguf"}}});
        let claim =
            json!({"source": {"persistentVolumeClaim": {"claimName": "c", "path": "b.gguf"}}});
        let hub = json!({"source": {"huggingFace": {"repo": "a/b", "file": "c.gguf"}}});
        assert!(wanted.seen(&model("a", local.clone())));
        assert!(!wanted.seen(&model("a", local)));
        assert!(wanted.seen(&model("b", claim)));
        assert!(!wanted.seen(&model("c", hub.clone())));
        assert!(!wanted.seen(&model("d", json!({"source": {"carrierPigeon": {}}}))));
        let paths = |wanted: &WantedPaths| -> Vec<String> {
            wanted.0.values().flatten().cloned().collect()
        };
        let both = ["/srv/models/a.gguf", "/var/lib/prima-claims/c/b.gguf"];
        assert_eq!(paths(&wanted), both);
        assert!(wanted.seen(&model("a", hub.clone())));
        // Of the draft model, too.
        let mut drafting = hub;
        drafting["speculation"] = json!({"draft": {"hostPath": {"path": "/srv/models/d.gguf"}}});
        assert!(wanted.seen(&model("c", drafting.clone())));
        assert!(!wanted.seen(&model("c", drafting)));
        assert!(paths(&wanted).contains(&"/srv/models/d.gguf".to_owned()));
    }

    #[test]
    fn a_file_that_is_no_model_is_told_with_its_problem() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        let paths = BTreeSet::from([path.display().to_string()]);
        let found = |seen: &Seen| seen.values().next().unwrap().1.clone();
        let fetched = Cache::open(&folder.path().join("cache")).unwrap();
        let seen = look(&paths, Seen::new(), false, &fetched);
        assert_eq!(found(&seen), None);

        fs::write(&path, "not a model").unwrap();
        let seen = look(&paths, seen, false, &fetched);
        let told = found(&seen).unwrap();
        assert!(told.problem.unwrap().contains("a.gguf"));
        assert_eq!((told.profile, told.version), (None, None));

        let mut writer = GgufWriter::new();
        writer.tensor("token_embd.weight", GgmlType::F32, &[10]);
        let mut data = writer.write_header(Vec::new()).unwrap();
        data.tensor(&[1; 40]).unwrap();
        fs::write(&path, data.finish().unwrap()).unwrap();
        let told = found(&look(&paths, seen, false, &fetched)).unwrap();
        let problem = told.problem.unwrap();
        assert!(problem.contains("general.architecture"), "{problem}");
    }

    /// Whoever may write to a shared folder can make one.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_pipe_is_told_with_its_problem_and_not_waited_for() {
        use rustix::fs::{CWD, Mode, mkfifoat};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.gguf");
        mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
        let fetched = Cache::open(&folder.path().join("cache")).unwrap();
        let paths = BTreeSet::from([path.display().to_string()]);
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || tell.send(look(&paths, Seen::new(), false, &fetched)));
        let seen = told.recv_timeout(Duration::from_secs(60));
        let seen = seen.expect("it waits for somebody who writes");
        let told = seen.into_values().next().unwrap().1.unwrap();
        let problem = told.problem.unwrap();
        assert!(problem.contains("expected a regular file"), "{problem}");
    }

    #[test]
    fn what_was_fetched_for_a_model_has_no_path() {
        let folder = tempfile::tempdir().unwrap();
        let fetched = Cache::open(&folder.path().join("cache")).unwrap();
        let kept = folder.path().join("cache/of-another-namespace.gguf");
        fs::write(&kept, "secret").unwrap();
        let link = folder.path().join("link.gguf");
        std::os::unix::fs::symlink(&kept, &link).unwrap();
        let around = folder.path().join("cache/./of-another-namespace.gguf");
        let first = folder.path().join("m-00001-of-00002.gguf");
        fs::write(&first, "own").unwrap();
        let second = folder.path().join("m-00002-of-00002.gguf");
        std::os::unix::fs::symlink(&kept, second).unwrap();
        for path in [kept, link, around, first] {
            let paths = BTreeSet::from([path.display().to_string()]);
            let seen = look(&paths, Seen::new(), false, &fetched);
            let told = seen.into_values().next().unwrap().1.unwrap();
            let path = path.display().to_string();
            let expected = WeightsError::KeptForOthers { path }.to_string();
            assert_eq!(told.problem.unwrap(), expected);
        }
    }

    #[test]
    fn a_namespace_names_so_many_files_at_most() {
        let mut wanted = WantedPaths::default();
        let source = |path: String| json!({"source": {"hostPath": {"path": path}}});
        for number in 0..1000 {
            let spec = source(format!("/a/{number:04}.gguf"));
            wanted.seen(&model(&format!("m{number}"), spec));
        }
        let mut other = model("one", source("/z/b.gguf".to_owned()));
        other.metadata.namespace = Some("other".to_owned());
        wanted.seen(&other);
        for (told, last) in [
            (BTreeSet::new(), "/a/0063.gguf"),
            (BTreeSet::from(["/a/0999.gguf".to_owned()]), "/a/0999.gguf"),
        ] {
            let paths: Vec<String> = wanted.paths(&told).into_iter().collect();
            assert_eq!(paths.len(), MOST_PATHS + 1);
            assert_eq!(paths[MOST_PATHS - 1], last);
            assert_eq!(paths[MOST_PATHS], "/z/b.gguf");
        }
    }

    #[test]
    fn all_namespaces_name_so_many_files_at_most_and_take_turns() {
        let mut wanted = WantedPaths::default();
        let mut add = |namespace: &str, path: &str| {
            let source = json!({"source": {"hostPath": {"path": path}}});
            let mut model = model(&path.replace('/', "-"), source);
            model.metadata.namespace = Some(namespace.to_owned());
            wanted.seen(&model);
        };
        for namespace in 0..100 {
            for number in 0..MOST_PATHS {
                let path = format!("/n{namespace:02}/{number:02}.gguf");
                add(&format!("n{namespace:02}"), &path);
            }
        }
        add("with-one", "/z/only.gguf");
        // It is told already.
        add("with-one-more", "/n00/00.gguf");
        let paths = wanted.paths(&BTreeSet::new());
        assert_eq!(paths.len(), MOST_PATHS_IN_ALL);
        assert!(paths.contains("/z/only.gguf"));
        for namespace in 0..100 {
            let own = format!("/n{namespace:02}/");
            let count = paths.iter().filter(|path| path.starts_with(&own)).count();
            let expected = if namespace == 99 { 3 } else { 4 };
            assert_eq!(count, expected, "{own}");
        }
        // What namespaces that came later would take, had it not been told.
        let told = (0..MOST_PATHS).map(|number| format!("/n99/{number:02}.gguf"));
        let told: BTreeSet<String> = told.collect();
        let paths = wanted.paths(&told);
        assert_eq!(paths.len(), MOST_PATHS_IN_ALL);
        assert!(paths.is_superset(&told) && paths.contains("/z/only.gguf"));
    }
}
