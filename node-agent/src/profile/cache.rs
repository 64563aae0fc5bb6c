//! Keeps what was measured, so that a second call costs nothing. Decides when it no longer counts: when something that it depends on has
//! changed, after a week, or after minutes if other programs were busy. A cache that cannot be read is no error: everything is measured
//! again.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use jiff::{SignedDuration, Timestamp};
use prima_crds::v1alpha1::node_profile::NodeProfileStatus;
use serde::{Deserialize, Serialize};

use super::Measured;

/// What the measurements depend on. If one of these changes, they are void.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(Default))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CacheKey {
    pub agent_version: String,
    pub kernels: String,
    pub cpu_model: String,
    pub threads: usize,
    /// The models' folder: all of it is on one disk.
    pub models: PathBuf,
    pub memory_total_bytes: u64,
    /// The GPUs that layers would run on, with their places, or why there is none.
    pub gpu: String,
}

#[derive(Debug, thiserror::Error)]
pub enum ProfileCacheError {
    #[error("cannot keep the measurements in {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot write the measurements as JSON")]
    Json(#[source] serde_json::Error),
}

/// How long measurements count.
const MAX_AGE: SignedDuration = SignedDuration::from_hours(7 * 24);
/// How long they count if others used more than [`BUSY_PERCENT`] of the processors' time.
const MAX_AGE_BUSY: SignedDuration = SignedDuration::from_mins(10);
pub const BUSY_PERCENT: u8 = 10;
/// A profile has a few kilobytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    key: CacheKey,
    /// Of the processors' time while it was measured.
    others_percent: u8,
    status: NodeProfileStatus,
}

/// What was measured earlier, or why it has to be measured again, in words.
pub fn load(path: &Path, key: &CacheKey, now: Timestamp) -> Result<Measured, String> {
    let mut text = String::new();
    let read =
        File::open(path).and_then(|file| file.take(MAX_FILE_BYTES).read_to_string(&mut text));
    match read {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err("nothing was measured yet".to_owned());
        }
        Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
    }
    let entry: Entry = serde_json::from_str(&text)
        .map_err(|error| format!("{} is not of this version: {error}", path.display()))?;
    let CacheKey {
        agent_version,
        kernels,
        cpu_model,
        threads,
        models,
        memory_total_bytes,
        gpu,
    } = &entry.key;
    for (what, same) in [
        ("the agent", *agent_version == key.agent_version),
        ("the kernels", *kernels == key.kernels),
        ("the processor", *cpu_model == key.cpu_model),
        ("the number of threads", *threads == key.threads),
        ("the models' place", *models == key.models),
        ("the memory", *memory_total_bytes == key.memory_total_bytes),
        ("the GPU", *gpu == key.gpu),
    ] {
        if !same {
            return Err(format!(
                "{what} was different when this machine was last measured"
            ));
        }
    }
    if entry.status.disk.expert_read_bytes_per_second.is_none() {
        return Err(
            "how fast experts are read was not measured when this machine last was".to_owned(),
        );
    }
    let measured_at: Timestamp = entry
        .status
        .measured_at
        .parse()
        .map_err(|error| format!("{}: {error}", path.display()))?;
    let age = now.duration_since(measured_at);
    let max_age = match entry.others_percent > BUSY_PERCENT {
        true => MAX_AGE_BUSY,
        false => MAX_AGE,
    };
    if age > max_age || age < SignedDuration::ZERO {
        return Err(format!("what was measured at {measured_at} is too old"));
    }
    Ok(Measured {
        status: entry.status,
        others_percent: entry.others_percent,
        key: entry.key,
    })
}

/// Keeps `status` for calls with the same key.
///
/// # Errors
/// A folder or a file that cannot be written.
pub fn store(
    path: &Path,
    key: CacheKey,
    others_percent: u8,
    status: NodeProfileStatus,
) -> Result<(), ProfileCacheError> {
    let entry = Entry {
        key,
        others_percent,
        status,
    };
    let text = serde_json::to_string_pretty(&entry).map_err(ProfileCacheError::Json)?;
    let folder = path.parent().unwrap_or(Path::new("."));
    // Whole or not at all: two agents may profile at once.
    let write = || {
        fs::create_dir_all(folder)?;
        let file = tempfile::NamedTempFile::new_in(folder)?;
        fs::write(file.path(), text)?;
        file.persist(path)?;
        Ok(())
    };
    write().map_err(|source: io::Error| ProfileCacheError::Write {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use prima_crds::v1alpha1::node_profile::NodeProfile;

    fn status() -> NodeProfileStatus {
        let yaml = include_str!("../../../crds/tests/node-profile.yaml");
        let profile = NodeProfile::from_yaml("node-profile.yaml", yaml).unwrap();
        profile.status.unwrap()
    }

    fn key() -> CacheKey {
        CacheKey {
            agent_version: "1".into(),
            kernels: "avx2".into(),
            cpu_model: "Some CPU".into(),
            threads: 8,
            models: "/models".into(),
            memory_total_bytes: 17_179_869_184,
            gpu: "none".into(),
        }
    }

    #[test]
    fn the_same_key_finds_it_for_a_week_and_any_other_key_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profiles/desk.json");
        let measured: Timestamp = status().measured_at.parse().unwrap();
        let later = |hours| measured + SignedDuration::from_hours(hours);
        let reason = load(&path, &key(), measured).unwrap_err();
        assert!(reason.contains("nothing"), "{reason}");
        store(&path, key(), 0, status()).unwrap();
        let measured_before = load(&path, &key(), later(167)).unwrap();
        assert_eq!(measured_before.status, status());
        for time in [later(169), later(-1)] {
            let reason = load(&path, &key(), time).unwrap_err();
            assert!(reason.contains("too old"), "{reason}");
        }
        type Change = fn(&mut CacheKey);
        let changes: [(Change, &str); 7] = [
            (|key| key.agent_version = "2".into(), "agent"),
            (|key| key.kernels = "scalar".into(), "kernels"),
            (|key| key.cpu_model = "Another".into(), "processor"),
            (|key| key.threads = 4, "threads"),
            (|key| key.models = "/other".into(), "models"),
            (|key| key.memory_total_bytes = 1, "memory"),
            (|key| key.gpu = "other".into(), "GPU"),
        ];
        for (change, named) in changes {
            let mut other = key();
            change(&mut other);
            let reason = load(&path, &other, measured).unwrap_err();
            assert!(reason.contains(named), "{reason}");
        }
    }

    #[test]
    fn what_was_measured_beside_other_programs_counts_for_minutes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("desk.json");
        let measured: Timestamp = status().measured_at.parse().unwrap();
        store(&path, key(), BUSY_PERCENT + 1, status()).unwrap();
        let later = |minutes| measured + SignedDuration::from_mins(minutes);
        let measured_before = load(&path, &key(), later(9)).unwrap();
        assert_eq!(measured_before.others_percent, BUSY_PERCENT + 1);
        assert!(load(&path, &key(), later(11)).is_err());
    }

    #[test]
    fn a_broken_file_is_measured_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("desk.json");
        fs::write(&path, "{\"key\": 3}").unwrap();
        let reason = load(&path, &key(), Timestamp::UNIX_EPOCH).unwrap_err();
        assert!(reason.contains("desk.json"), "{reason}");
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = store(&file.path().join("x/desk.json"), key(), 0, status()).unwrap_err();
        assert!(error.to_string().contains("x/desk.json"), "{error}");
    }
}
