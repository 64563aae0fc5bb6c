//! A model's file that people have put on the machine: whether it is the one of the plan.

use std::io;
use std::ops::Range;
use std::path::Path;

use prima_crds::v1alpha1::ring_plan::PlannedModel;
use prima_gguf::{model_bytes, part_paths};
use prima_weights::{Cache, tensors};

use super::{HeldFile, WeightsError, blocking, same_header};
use crate::local_header::{self, LocalHeader, LocalHeaderError};

/// A file that people put on the machine, and not one of those that were fetched.
pub async fn own_file(
    model: &PlannedModel,
    path: String,
    fetched: Cache,
) -> Result<HeldFile, WeightsError> {
    let expected = model.version.clone().map(|version| version.header_sha256);
    let (size, layers) = (model.size_bytes, model.layers);
    blocking(move || {
        if fetched.holds(Path::new(&path)) {
            return Err(WeightsError::KeptForOthers { path });
        }
        let found = match model_bytes(Path::new(&path)) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let mut files = part_paths(Path::new(&path)).into_iter();
                let missing = files.find(|file| !file.exists());
                let path = missing.map_or(path, |file| file.display().to_string());
                return Err(WeightsError::NotHere { path });
            }
            Err(source) => {
                return Err(WeightsError::LocalHeader(LocalHeaderError::Read {
                    path: path.into(),
                    source,
                }));
            }
        };
        if found != size as u64 {
            return Err(WeightsError::OtherSize {
                file: path,
                expected: size,
                found,
            });
        }
        let LocalHeader { gguf, sha256 } =
            local_header::read(Path::new(&path)).map_err(WeightsError::LocalHeader)?;
        if let Some(expected) = expected {
            same_header(&path, &expected, sha256)?;
        }
        let all: Range<usize> = 0..layers as usize;
        tensors::ranges(&gguf, &[all], true).map_err(WeightsError::Layers)?;
        Ok(HeldFile {
            path: path.into(),
            share: None,
            _files: Vec::new(),
        })
    })
    .await?
}

#[cfg(test)]
mod tests {
    use prima_crds::v1alpha1::ring_plan::{FileVersion, RingPlanSpec};
    use prima_gguf::GgmlType;
    use prima_gguf::writer::{self, GgufWriter};

    use super::*;
    use crate::ring::test_plan::plan;

    fn small_model(path: &Path) {
        let mut writer = GgufWriter::new();
        writer.tensor("blk.0.attn_q.weight", GgmlType::F32, &[10]);
        let mut data = writer.write_header(Vec::new()).unwrap();
        data.tensor(&[1; 40]).unwrap();
        std::fs::write(path, data.finish().unwrap()).unwrap();
    }

    #[tokio::test]
    async fn a_local_file_must_be_the_one_that_was_planned() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let name = path.display().to_string();
        let fetched = Cache::open(&folder.path().join("cache")).unwrap();
        let mut plan = plan(1, 1, 1, &[]);
        let refused = async |plan: &RingPlanSpec| {
            let error = own_file(&plan.model, name.clone(), fetched.clone())
                .await
                .err()
                .unwrap();
            assert!(error.is_refusal(), "{error}");
            error.to_string()
        };
        assert!(
            refused(&plan)
                .await
                .contains("is not on this machine: copy it there")
        );

        small_model(&path);
        plan.model.size_bytes = 7;
        assert!(
            refused(&plan)
                .await
                .contains("the plan was made for a file of 7")
        );

        plan.model.size_bytes = std::fs::metadata(&path).unwrap().len() as i64;
        plan.model.version = Some(FileVersion {
            header_sha256: "0".repeat(64),
            ..FileVersion::default()
        });
        assert!(
            refused(&plan)
                .await
                .contains("the checksum of its header is")
        );

        let header = local_header::read(&path).unwrap();
        plan.model.version = Some(FileVersion {
            header_sha256: header.sha256.to_uppercase(),
            ..FileVersion::default()
        });
        let held = own_file(&plan.model, name.clone(), fetched.clone())
            .await
            .unwrap();
        assert_eq!((held.path, held.share), (path.clone(), None));

        let kept = folder.path().join("cache/model.gguf");
        std::fs::copy(&path, &kept).unwrap();
        let name_of_kept = kept.display().to_string();
        let held = own_file(&plan.model, name_of_kept, fetched.clone()).await;
        assert!(matches!(held, Err(WeightsError::KeptForOthers { .. })));

        plan.model.layers = 2;
        assert!(refused(&plan).await.contains("layers of the plan"));
    }

    #[tokio::test]
    async fn of_a_local_model_in_several_files_all_must_be_there() {
        let folder = tempfile::tempdir().unwrap();
        let whole = folder.path().join("model.gguf");
        small_model(&whole);
        let parts = writer::split(&std::fs::read(whole).unwrap(), &[0, 1]).unwrap();
        let first = folder.path().join("m-00001-of-00002.gguf");
        let second = folder.path().join("m-00002-of-00002.gguf");
        std::fs::write(&first, &parts[0]).unwrap();
        let mut plan = plan(1, 1, 1, &[]);
        let name = first.display().to_string();
        let fetched = Cache::open(&folder.path().join("cache")).unwrap();
        let error = own_file(&plan.model, name.clone(), fetched.clone())
            .await
            .err()
            .unwrap();
        assert!(matches!(&error, WeightsError::NotHere { path } if second == Path::new(path)));

        std::fs::write(&second, &parts[1]).unwrap();
        plan.model.size_bytes = (parts[0].len() + parts[1].len()) as i64;
        let held = own_file(&plan.model, name, fetched).await.unwrap();
        assert_eq!(held.path, first);
    }
}
