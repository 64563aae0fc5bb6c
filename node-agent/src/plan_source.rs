//! Where a RingPlan comes from (here: a file), and whether it fits the model file that it names. Decides nothing about
//! the plan itself; whatever does not fit is an error that says what to do.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use prima_crds::v1alpha1::ring_plan::{PlannedModel, RingPlan, RingPlanError, RingPlanSpec};
use prima_engine::{EngineError, Model};
use prima_gguf::model_bytes;

#[derive(Debug, thiserror::Error)]
pub enum PlanSourceError {
    #[error("cannot read the ring plan {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} is larger than {MAX_PLAN_BYTES} bytes, which no ring plan is", path.display())]
    Size { path: PathBuf },
    #[error("{} cannot be used as a ring plan", path.display())]
    Plan {
        path: PathBuf,
        #[source]
        source: RingPlanError,
    },
    #[error("{} has no member {name:?}; its members are {known}", path.display())]
    Member {
        path: PathBuf,
        name: String,
        known: String,
    },
    #[error("cannot read the size of model file {file}")]
    ModelFile {
        file: String,
        #[source]
        source: std::io::Error,
    },
    #[error(
        "model file {file} has {found} bytes, but the plan was made for {expected}: it is another file, or an incomplete copy; copy it again, or plan again"
    )]
    ModelSize {
        file: String,
        expected: i64,
        found: u64,
    },
    #[error("cannot open model file {file}")]
    Model {
        file: String,
        #[source]
        source: Box<EngineError>,
    },
    #[error(
        "model file {file} has {found} layers, but the plan was made for {expected}; plan again for this file"
    )]
    Layers {
        file: String,
        expected: i32,
        found: usize,
    },
}

/// Plans of the largest rings stay below a megabyte.
const MAX_PLAN_BYTES: u64 = 16 << 20;

/// A plan as one of its members has it.
#[derive(Debug)]
pub struct MemberPlan {
    pub spec: RingPlanSpec,
    /// Of the plan's document in a cluster.
    pub uid: Option<String>,
    pub rank: usize,
}

/// Reads and validates the plan in the file `path`, and finds the rank of its member `name`.
pub fn read(path: &Path, name: &str) -> Result<MemberPlan, PlanSourceError> {
    let failed = |source| PlanSourceError::Read {
        path: path.to_owned(),
        source,
    };
    let mut text = String::new();
    let file = fs::File::open(path).map_err(failed)?;
    file.take(MAX_PLAN_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    if text.len() as u64 > MAX_PLAN_BYTES {
        return Err(PlanSourceError::Size {
            path: path.to_owned(),
        });
    }
    let plan = RingPlan::from_yaml(&path.display().to_string(), &text).map_err(|source| {
        PlanSourceError::Plan {
            path: path.to_owned(),
            source,
        }
    })?;
    let (plan, uid) = (plan.spec, plan.metadata.uid);
    match plan.rank_of(name) {
        Some(rank) => Ok(MemberPlan {
            spec: plan,
            uid,
            rank,
        }),
        None => Err(PlanSourceError::Member {
            path: path.to_owned(),
            name: name.to_owned(),
            known: plan
                .members
                .iter()
                .map(|member| member.name.as_str())
                .collect::<Vec<_>>()
                .join(", "),
        }),
    }
}

/// Opens the file of a model that a plan names, for contexts of so many tokens, and checks that it is the one that the plan was made for.
pub fn open_model(planned: &PlannedModel, context_length: usize) -> Result<Model, PlanSourceError> {
    let file = || planned.file.clone();
    let path = Path::new(&planned.file);
    let found = model_bytes(path).map_err(|source| PlanSourceError::ModelFile {
        file: file(),
        source,
    })?;
    if found != planned.size_bytes as u64 {
        return Err(PlanSourceError::ModelSize {
            file: file(),
            expected: planned.size_bytes,
            found,
        });
    }
    let model = Model::open(path).map_err(|source| PlanSourceError::Model {
        file: file(),
        source: Box::new(source),
    })?;
    let spec = model.spec();
    if spec.layers.len() != planned.layers as usize {
        return Err(PlanSourceError::Layers {
            file: file(),
            expected: planned.layers,
            found: spec.layers.len(),
        });
    }
    if context_length > spec.context_length {
        tracing::warn!(
            model = planned.name,
            planned = context_length,
            trained = spec.context_length,
            "the plan's context is longer than the model was trained for: what it says may degrade beyond it"
        );
    }
    Ok(model.with_context_length(context_length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::test_plan::plan;

    fn written(text: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.yaml");
        fs::write(&path, text).unwrap();
        (folder, path)
    }

    fn yaml(spec: RingPlanSpec) -> String {
        serde_saphyr::to_string(&RingPlan::new("test", spec)).unwrap()
    }

    #[test]
    fn finds_the_member_in_the_plan() {
        let (_folder, path) = written(&yaml(plan(6, 3, 2, &[1, 2, 3, 4, 5])));
        let plan = read(&path, "m2").unwrap();
        assert_eq!((plan.rank, plan.spec.members.len()), (2, 3));
        assert_eq!(plan.uid, None);
        let error = read(&path, "m9").unwrap_err().to_string();
        assert!(
            error.ends_with("has no member \"m9\"; its members are m0, m1, m2"),
            "{error}"
        );
    }

    #[test]
    fn says_what_is_wrong_with_a_plan_and_where_it_is() {
        let (_folder, path) = written("kind: Pod");
        let error = prima_crds::error_chain(&read(&path, "m0").unwrap_err());
        assert!(
            error.contains("plan.yaml") && error.contains("prima.dev/v1alpha1"),
            "{error}"
        );
        let missing = path.with_file_name("none.yaml");
        assert!(matches!(
            read(&missing, "m0"),
            Err(PlanSourceError::Read { .. })
        ));
    }

    #[test]
    fn a_model_file_of_another_size_is_another_model() {
        let (folder, _) = written("");
        let mut spec = plan(6, 1, 1, &[]);
        spec.model.file = folder.path().join("model.gguf").display().to_string();
        assert!(matches!(
            open_model(&spec.model, 128),
            Err(PlanSourceError::ModelFile { .. })
        ));
        fs::write(&spec.model.file, "GGUF").unwrap();
        let error = open_model(&spec.model, 128).err().unwrap().to_string();
        assert!(
            error.contains("has 4 bytes, but the plan was made for 1"),
            "{error}"
        );
        spec.model.size_bytes = 4;
        assert!(matches!(
            open_model(&spec.model, 128),
            Err(PlanSourceError::Model { .. })
        ));
    }
}
