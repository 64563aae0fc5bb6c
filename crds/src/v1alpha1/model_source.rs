//! Where a model's file comes from.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::document::is_false;

/// Where a model's file comes from: exactly one of these. If the model is in several files, this is the first
/// (`name-00001-of-00003.gguf`). The others must be beside it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[x_kube(
    validation = Rule::new("(has(self.huggingFace) ? 1 : 0) + (has(self.url) ? 1 : 0) + (has(self.hostPath) ? 1 : 0) + (has(self.persistentVolumeClaim) ? 1 : 0) == 1")
        .message("expected exactly one of huggingFace, url, hostPath, persistentVolumeClaim")
)]
#[serde(rename_all = "camelCase")]
pub struct ModelSource {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hugging_face: Option<HuggingFaceSource>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<UrlSource>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<HostPathSource>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<ClaimSource>,
}

/// A file in a repository on the Hugging Face Hub, or on a server with the same API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct HuggingFaceSource {
    /// `owner/name`.
    #[schemars(length(max = 200), regex(pattern = r"^[A-Za-z0-9][\w.-]*/[\w.-]+$"))]
    pub repo: String,
    /// The GGUF file's path in the repository.
    #[schemars(length(min = 1, max = 500))]
    #[x_kube(validation = Rule::new("!self.contains('..') && !self.startsWith('/') && self.endsWith('.gguf')")
        .message("expected the path of a .gguf file in the repository, without '..'"))]
    pub file: String,
    /// Branch, tag or commit.
    #[serde(default = "main_branch")]
    #[schemars(length(min = 1, max = 200), regex(pattern = r"^[\w][\w./-]*$"))]
    pub revision: String,
    /// URL of the hub. Default: the one that the chart was installed with, which is <https://huggingface.co> if its values name no other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 500), regex(pattern = "^https?://"))]
    pub endpoint: Option<String>,
}

/// A file on an HTTP server. The server should support range requests, so that machines can fetch only what they need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct UrlSource {
    /// URL of the GGUF file.
    #[schemars(length(max = 2000), regex(pattern = "^https?://"))]
    pub url: String,
    /// SHA-256 of the file, in hexadecimal. Machines that have the whole file check it. A model in several files may not have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[0-9a-f]{64}$"))]
    pub sha256: Option<String>,
    /// Whether machines may fetch the whole file if the server does not support range requests.
    #[serde(default, skip_serializing_if = "is_false")]
    pub allow_full_download: bool,
}

/// A file that is already on the machines. Machines without it do not take part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct HostPathSource {
    /// Absolute path of the file: in /var/lib/prima/models, of the agents' data folder, or in one of the folders of the chart's value
    /// `agent.modelDirs`. Not of a file that agents fetched themselves.
    #[schemars(length(max = 1000))]
    #[x_kube(validation = Rule::new("self.startsWith('/') && !self.contains('/../') && self.endsWith('.gguf')")
        .message("expected the absolute path of a .gguf file, without '..'"))]
    pub path: String,
}

/// A file on a volume that the agents have: one of the chart's value `agent.persistentVolumeClaims`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClaimSource {
    /// Name of a PersistentVolumeClaim in the agents' namespace.
    #[schemars(length(max = 253), regex(pattern = "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub claim_name: String,
    /// The file's path in the volume.
    #[schemars(length(max = 1000))]
    #[x_kube(validation = Rule::new("!self.startsWith('/') && !self.contains('..') && self.endsWith('.gguf')")
        .message("expected the path of a .gguf file in the volume, without '..'"))]
    pub path: String,
}

impl ModelSource {
    /// The file's name, for people.
    pub fn file_name(&self) -> &str {
        let path = match self {
            Self {
                hugging_face: Some(source),
                ..
            } => &source.file,
            Self {
                url: Some(source), ..
            } => source.url.split(['?', '#']).next().unwrap_or(""),
            Self {
                host_path: Some(source),
                ..
            } => &source.path,
            Self {
                persistent_volume_claim: Some(source),
                ..
            } => &source.path,
            _ => "",
        };
        path.rsplit('/').next().unwrap_or(path)
    }

    /// Path of a file that machines already have; `None` for one that they fetch.
    pub fn local_path(&self) -> Option<String> {
        match self {
            Self {
                host_path: Some(source),
                ..
            } => Some(source.path.clone()),
            Self {
                persistent_volume_claim: Some(source),
                ..
            } => Some(format!(
                "{CLAIMS_FOLDER}/{}/{}",
                source.claim_name, source.path
            )),
            _ => None,
        }
    }
}

/// Where agents mount the volumes of claims, each in a folder with the claim's name.
pub const CLAIMS_FOLDER: &str = "/var/lib/prima-claims";

fn main_branch() -> String {
    "main".to_owned()
}
