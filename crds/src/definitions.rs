//! The resources' definitions for a cluster (CustomResourceDefinition), generated from the types.
//!
//! `crds/yaml/` and the chart hold what this makes; a test fails when they differ. Run it with `PRIMA_WRITE_CRDS=1` to write them.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

use crate::v1alpha1::model::Model;
use crate::v1alpha1::node_profile::NodeProfile;
use crate::v1alpha1::ring_plan::RingPlan;

/// Every resource of the API group, in the order in which people meet them.
pub fn all() -> Vec<CustomResourceDefinition> {
    vec![Model::crd(), NodeProfile::crd(), RingPlan::crd()]
}

/// A definition as a YAML document.
///
/// # Errors
/// If it cannot be serialized.
pub fn yaml(definition: &CustomResourceDefinition) -> Result<String, serde_saphyr::ser::Error> {
    let text = serde_saphyr::to_string(definition)?;
    Ok(format!(
        "# Generated from the types in crds/src/v1alpha1; do not edit.\n{text}"
    ))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use kube::ResourceExt;

    use super::*;

    #[test]
    fn the_committed_files_are_what_the_types_say() {
        let write = std::env::var_os("PRIMA_WRITE_CRDS").is_some();
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        for definition in all() {
            let generated = yaml(&definition).unwrap();
            for folder in ["yaml", "../charts/prima/files/crds"] {
                let path = root
                    .join(folder)
                    .join(format!("{}.yaml", definition.name_any()));
                if write {
                    fs::create_dir_all(path.parent().unwrap()).unwrap();
                    fs::write(&path, &generated).unwrap();
                }
                let committed = fs::read_to_string(&path).unwrap_or_default();
                assert!(
                    committed == generated,
                    "{} is not what the types say; run this test with PRIMA_WRITE_CRDS=1",
                    path.display()
                );
            }
        }
    }

    /// What the API server would refuse, and what clients of other languages cannot read.
    #[test]
    fn no_schema_has_floats_unsigned_integers_or_closed_objects() {
        for definition in all() {
            let json = serde_json::to_string(&definition).unwrap();
            for bad in [
                r#""format":"uint"#,
                r#""type":"number""#,
                r#""additionalProperties":false"#,
            ] {
                assert!(!json.contains(bad), "{} has {bad}", definition.name_any());
            }
        }
    }
}
