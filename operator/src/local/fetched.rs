//! A model that `prima run` fetches: `hf.co/OWNER/REPO/FILE.gguf`, or an address. It is fetched once, whole, into prima's cache; from then on no
//! server is asked for it. Machines that are lent get their part of it from here.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use prima_crds::quantity::rounded;
use prima_crds::v1alpha1::model_source::{HuggingFaceSource, ModelSource, UrlSource};
use prima_gguf::part_paths;
use prima_weights::{
    Cache, CacheError, Client, ClientError, Download, DownloadError, Hub, PUBLIC_HUB, Progress,
    Reach, RefusedModel, RemoteModel, RemoteModelError, Retry, SourceError, cache_folder,
    identities, model_profile,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;

use super::screen::Screen;

/// A model as the command line names it.
#[derive(Clone, Debug)]
pub enum ModelName {
    File(PathBuf),
    Fetched(Box<FetchedName>),
}

/// A model on a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchedName {
    /// As it was named.
    text: String,
    source: ModelSource,
}

/// Why a model cannot be fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error(
        "neither PRIMA_CACHE, XDG_CACHE_HOME nor HOME says where to keep what is fetched; set PRIMA_CACHE to a folder"
    )]
    NoFolder,
    #[error("{name} is no address to fetch from")]
    NoAddress { name: String },
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("HF_TOKEN cannot be used")]
    Token(#[source] SourceError),
    #[error("cannot find {name}")]
    Find {
        name: String,
        #[source]
        source: Box<RemoteModelError>,
    },
    #[error(transparent)]
    Refused(#[from] Box<RefusedModel>),
    #[error("cannot keep {name}")]
    Cache {
        name: String,
        #[source]
        source: CacheError,
    },
    #[error("cannot fetch {name}; what is there stays, and the next try goes on with it")]
    Download {
        name: String,
        #[source]
        source: Box<DownloadError>,
    },
    #[error("cannot note where {name} is kept")]
    Note {
        name: String,
        #[source]
        source: io::Error,
    },
}

/// Beside the files, under the digest of a name: where its model is.
#[derive(Serialize, Deserialize)]
struct Note {
    file: PathBuf,
}

const HUBS: [&str; 2] = ["hf.co/", "huggingface.co/"];
const EXPECTED: &str = "expected hf.co/OWNER/REPO/FILE.gguf, as the hub shows the file, or the http address of a .gguf file";

impl FromStr for ModelName {
    type Err = String;

    /// A file where there is one, else what looks like an address.
    fn from_str(text: &str) -> Result<Self, String> {
        let host = text
            .split("://")
            .nth(1)
            .and_then(|rest| rest.split('/').next());
        if host.is_some_and(|host| host.contains('@')) {
            // Not echoed: it holds a password.
            return Err("expected an address without a user and a password".to_owned());
        }
        let (scheme, address) = match text.split_once("://") {
            Some((scheme @ ("http" | "https"), address)) => (Some(scheme), address),
            Some(_) | None => (None, text),
        };
        let on_hub = HUBS.iter().find_map(|hub| address.strip_prefix(hub));
        let source = match (Path::new(text).exists(), on_hub, scheme) {
            (true, ..) | (false, None, None) => return Ok(Self::File(text.into())),
            (false, Some(place), _) => hub_file(place)
                .map(|source| ModelSource {
                    hugging_face: Some(source),
                    ..nowhere()
                })
                .ok_or_else(|| format!("{text:?}: {EXPECTED}"))?,
            (false, None, Some(_)) => ModelSource {
                url: Some(UrlSource {
                    url: text.to_owned(),
                    sha256: None,
                    allow_full_download: true,
                }),
                ..nowhere()
            },
        };
        let name = source.file_name();
        if !name.ends_with(".gguf") {
            return Err(format!("{text:?}: {EXPECTED}"));
        }
        Ok(Self::Fetched(Box::new(FetchedName {
            text: text.to_owned(),
            source,
        })))
    }
}

fn nowhere() -> ModelSource {
    ModelSource {
        hugging_face: None,
        url: None,
        host_path: None,
        persistent_volume_claim: None,
    }
}

/// `OWNER/REPO/FILE.gguf`, or with `resolve/REVISION/` or `blob/REVISION/` before the file, as addresses of the hub have it.
fn hub_file(place: &str) -> Option<HuggingFaceSource> {
    let place = place.split(['?', '#']).next()?;
    let mut parts = place.splitn(3, '/');
    let (owner, repo, rest) = (parts.next()?, parts.next()?, parts.next()?);
    let named = ["resolve/", "blob/"];
    let named = named.iter().find_map(|way| rest.strip_prefix(way));
    let (revision, file) = match named {
        Some(named) => named.split_once('/')?,
        None => ("main", rest),
    };
    let all = [owner, repo, revision, file];
    all.iter()
        .all(|part| !part.is_empty())
        .then(|| HuggingFaceSource {
            repo: format!("{owner}/{repo}"),
            file: file.to_owned(),
            revision: revision.to_owned(),
            endpoint: None,
        })
}

impl FetchedName {
    /// As it was named, without what may be a secret.
    fn shown(&self) -> &str {
        self.text.split('?').next().unwrap_or(&self.text)
    }

    /// What clients call the model's file.
    pub fn file_name(&self) -> &str {
        self.source.file_name()
    }

    /// The model's (first) file, fetched now unless it is there.
    ///
    /// # Errors
    /// [`FetchError`]; what was fetched stays.
    pub async fn fetch(&self, screen: &Screen) -> Result<PathBuf, FetchError> {
        let folder = cache_folder().ok_or(FetchError::NoFolder)?.join("fetched");
        let name = || self.shown().to_owned();
        let keep = |source| FetchError::Cache {
            name: name(),
            source,
        };
        let cache = Cache::open(&folder).map_err(keep)?;
        let note = folder.join(format!("{:x}.json", Sha256::digest(&self.text)));
        if let Some(file) = noted(&note) {
            return Ok(file);
        }
        screen.status(&format!("looking for {}", self.shown()));
        let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let hub = set("HF_ENDPOINT").unwrap_or_else(|| PUBLIC_HUB.to_owned());
        let hub = Hub::new(&hub, set("HF_TOKEN").as_deref()).map_err(FetchError::Token)?;
        // Whoever types the address may ask whatever this machine reaches.
        let client = Client::new(Retry::default(), Reach::anywhere())?;
        let find = |source| FetchError::Find {
            name: name(),
            source: Box::new(source),
        };
        let source = hub.source(&self.source, None);
        let source = source.ok_or_else(|| FetchError::NoAddress { name: name() })?;
        let remote = RemoteModel::open(&client, &source).await.map_err(find)?;
        // Before gigabytes are fetched.
        model_profile(self.shown(), &remote.gguf).map_err(Box::new)?;
        let identities = identities(&remote.version, remote.gguf.file_len);
        let files = cache.files(&source, &identities).map_err(keep)?;
        let total: u64 = identities.iter().map(|identity| identity.size_bytes).sum();
        let failed = |source| FetchError::Download {
            name: name(),
            source: Box::new(source),
        };
        let each = remote.files.iter().zip(&files).map(|(remote, file)| {
            let whole = 0..file.identity().size_bytes;
            Download::new(remote, file, std::slice::from_ref(&whole)).allow_full_download(true)
        });
        let downloads: Vec<Download<'_>> = each.collect();
        Download::check_room(&downloads).map_err(failed)?;
        let mut before = 0;
        for (download, file) in downloads.into_iter().zip(&files) {
            let (tell, told) = watch::channel(Progress::default());
            let shown = follow(told, before, total, self, screen);
            let downloaded = tokio::select! {
                downloaded = download.run(&tell) => downloaded,
                never = shown => match never {},
            };
            downloaded.map_err(failed)?;
            before += file.identity().size_bytes;
        }
        let file = files.first().map(|file| file.path().to_owned());
        let file = file.unwrap_or_default();
        let content = Note { file: file.clone() };
        let written = serde_json::to_vec(&content).map_err(io::Error::from);
        let written = written.and_then(|content| std::fs::write(&note, content));
        written.map_err(|source| FetchError::Note {
            name: name(),
            source,
        })?;
        Ok(file)
    }
}

/// Shows how far a download is, whenever another hundredth of the model is there.
async fn follow(
    mut told: watch::Receiver<Progress>,
    before: u64,
    total: u64,
    name: impl Display,
    screen: &Screen,
) -> std::convert::Infallible {
    while told.changed().await.is_ok() {
        let done = before + told.borrow_and_update().done_bytes;
        let percent = 100 * done / total.max(1);
        screen.status(&format!(
            "fetching {name}: {percent} % of {}",
            rounded(total)
        ));
    }
    std::future::pending().await
}

impl Display for FetchedName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.file_name())
    }
}

/// The file that was fetched under this name, if all of its parts are still there.
fn noted(note: &Path) -> Option<PathBuf> {
    let note: Note = serde_json::from_slice(&std::fs::read(note).ok()?).ok()?;
    let there = part_paths(&note.file).iter().all(|part| part.is_file());
    there.then_some(note.file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(text: &str) -> Option<(String, String, String)> {
        match text.parse() {
            Ok(ModelName::Fetched(name)) => {
                let source = name.source.hugging_face?;
                Some((source.repo, source.revision, source.file))
            }
            _ => None,
        }
    }

    #[test]
    fn files_of_the_hub_are_named_as_people_find_them() {
        let expected = |revision: &str, file: &str| {
            Some(("o/r".to_owned(), revision.to_owned(), file.to_owned()))
        };
        for text in [
            "hf.co/o/r/m.gguf",
            "https://huggingface.co/o/r/resolve/main/m.gguf?download=true",
            "https://huggingface.co/o/r/blob/main/m.gguf",
            "huggingface.co/o/r/m.gguf",
        ] {
            assert_eq!(hub(text), expected("main", "m.gguf"), "{text}");
        }
        assert_eq!(
            hub("hf.co/o/r/resolve/v2/Q4/m-00001-of-00002.gguf"),
            expected("v2", "Q4/m-00001-of-00002.gguf")
        );
        for bad in [
            "hf.co/o/r",
            "hf.co/o/r/",
            "hf.co/o/r/README.md",
            "hf.co/o//m.gguf",
        ] {
            let error = bad.parse::<ModelName>().unwrap_err();
            assert!(error.contains("hf.co/OWNER/REPO/FILE.gguf"), "{error}");
        }
    }

    #[test]
    fn other_addresses_are_addresses_and_all_else_is_a_file() {
        let url = "http://nas.local:8000/models/m.gguf";
        let Ok(ModelName::Fetched(name)) = url.parse() else {
            panic!("{url}");
        };
        assert_eq!(
            name.source.url.as_ref().map(|source| &*source.url),
            Some(url)
        );
        assert_eq!(name.file_name(), "m.gguf");
        for file in [
            "m.gguf",
            "/models/m.gguf",
            "ftp://host/m.gguf",
            "hf.coo/m.gguf",
        ] {
            assert!(matches!(file.parse(), Ok(ModelName::File(_))), "{file}");
        }
        assert!("https://host/m.zip".parse::<ModelName>().is_err());
        let secret = "https://user:pw@host/m.gguf".parse::<ModelName>();
        assert!(secret.is_err_and(|error| !error.contains("pw")));
        let Ok(ModelName::Fetched(signed)) = "https://host/m.gguf?key=pw".parse() else {
            panic!("no address");
        };
        assert_eq!(signed.shown(), "https://host/m.gguf");
    }
}
