//! A member's part of its model's file: found on the machine, or fetched into the cache, and held there for as long as the
//! member runs.
//!
//! Decides which layers are fetched (the plan's; on rank 0 also the model's ends, embedding and output head, and all of a draft model), and
//! never uses a file of another version than the plan's. Refuses to use the network, and to ask for a token, where everything is on the disk
//! and was checked. How much of the disk that may take: `room.rs`.

mod mismatches;
mod own_file;
mod room;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::path::PathBuf;
use std::pin::pin;
use std::slice::from_ref;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use prima_crds::quantity::rounded;
use prima_crds::v1alpha1::model_source::ModelSource;
use prima_crds::v1alpha1::ring_plan::{FileVersion, PlannedModel, RingPlanSpec};
use prima_gguf::FilePart;
use prima_kubernetes::{HubTokenError, HubTokens};
use prima_weights::{
    AllowedServer, Cache, CacheError, Client, ClientError, Download, DownloadError, HeaderError,
    HeaderTurns, Hub, LocalFile, LocalFileError, Progress, Reach, RemoteError, RemoteModel,
    RemoteModelError, Retry, SourceError, holding, identities, tensors,
};
use prometheus_client::metrics::counter::Counter;
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use self::mismatches::Mismatches;
use self::own_file::own_file;
use self::room::{Looks, Slowest};
use crate::local_header::{self, LocalHeaderError};

/// For the header of one model, all parts together, and the pauses that its server asks for: the largest come in that time to twelve machines at
/// once that share a line of 2 Mbit/s. A large one keeps the next large one waiting for as long.
const HEADER_DEADLINE: Duration = Duration::from_secs(30 * 60);
/// Who has waited so long for another member's header reads its own beside it: the other's volume may hang.
const LONGEST_TURN: Duration = Duration::from_secs(30);

/// How much of a member's part of the file is on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub fetched_bytes: u64,
    pub total_bytes: u64,
}

impl Share {
    /// Of several files, those of which anything is fetched.
    pub fn of_all(files: impl IntoIterator<Item = Option<Share>>) -> Option<Share> {
        files.into_iter().flatten().reduce(|one, other| Share {
            fetched_bytes: one.fetched_bytes + other.fetched_bytes,
            total_bytes: one.total_bytes + other.total_bytes,
        })
    }
}

/// The agent's store of model files. Clones share it.
#[derive(Clone)]
pub struct Weights(Arc<Store>);

struct Store {
    cache: Cache,
    /// `None`: what keeps a fifth of the file system free.
    budget_bytes: Option<u64>,
    client: Client,
    hub_tokens: HubTokens,
    /// For headers of files on servers.
    header_turns: HeaderTurns,
    /// For those of people's own files on this machine: one at a time, as each takes several times its bytes.
    local_headers: Semaphore,
    /// The same for those of files that were fetched: they wait for no volume of people's, which may hang.
    fetched_headers: Semaphore,
    slowest: Slowest,
    /// When somebody last found no room that will be there later.
    room_wanted: Mutex<Option<Instant>>,
    mismatches: Mismatches,
    fetched_bytes: Counter,
}

/// What a member reads of a model's file.
pub struct WantedWeights<'a> {
    pub model: &'a PlannedModel,
    pub layers: Vec<Range<usize>>,
    /// Embedding and output head, too.
    pub ends: bool,
    /// Whether an earlier plan of the same Model uses files here, which goes when this one's ring serves.
    pub replaces: bool,
    /// How often in a row this was fetched until others' turn came ([`WeightsError::gives_way`]).
    pub gave_way: u32,
    /// A model that is fetched next, of which all is: without room for that, too, nothing is fetched.
    pub then: Option<&'a PlannedModel>,
}

impl<'a> WantedWeights<'a> {
    /// What the member of `rank` reads of the ring's model.
    pub fn of_member(plan: &'a RingPlanSpec, rank: usize) -> Self {
        let windows = plan.members[rank].windows.iter();
        Self {
            model: &plan.model,
            layers: windows.map(|window| window.layers()).collect(),
            ends: rank == 0,
            replaces: false,
            gave_way: 0,
            then: None,
        }
    }

    /// All of a model. Only for one of a validated plan, whose counts are not negative.
    pub fn whole(model: &'a PlannedModel) -> Self {
        let all = 0..model.layers as usize;
        Self {
            model,
            layers: vec![all],
            ends: true,
            replaces: false,
            gave_way: 0,
            then: None,
        }
    }
}

/// A file with a member's part in it, in use until this is dropped.
pub struct HeldFile {
    pub path: PathBuf,
    /// `None` for people's own files, of which nothing was fetched.
    pub share: Option<Share>,
    _files: Vec<LocalFile>,
}

#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("cannot use the cache of model files")]
    Cache(#[from] CacheError),
    #[error("cannot set up fetching")]
    Client(#[from] ClientError),
    #[error("HF_TOKEN cannot be used")]
    Token(#[source] SourceError),
    #[error(transparent)]
    HubToken(#[from] HubTokenError),
    #[error(
        "model.version: expected the version of a file that is to be fetched, found none; plan again"
    )]
    NoVersion,
    #[error("model.source: expected one of huggingFace, url, hostPath, persistentVolumeClaim")]
    NoSource,
    #[error(
        "{path} is not on this machine: copy it there, or leave this machine out (spec.nodeSelector of the Model)"
    )]
    NotHere { path: String },
    /// What is in the cache may have been fetched with a token that not everybody has who may write Models.
    #[error(
        "{path} is one of the files that agents fetched for Models, which cannot be named by a path: name the source that it was fetched from, or copy it to a folder of your own"
    )]
    KeptForOthers { path: String },
    #[error("cannot use the model's file")]
    LocalHeader(#[source] LocalHeaderError),
    #[error(
        "{file} is another file than the plan was made for: the checksum of its header is {found}, expected {expected}; copy the same file to all machines, or plan again"
    )]
    OtherHeader {
        file: String,
        expected: String,
        found: String,
    },
    #[error(
        "{file} has {found} bytes, the plan was made for a file of {expected}: it is another file, or an incomplete copy; copy it again, or plan again"
    )]
    OtherSize {
        file: String,
        expected: i64,
        found: u64,
    },
    #[error("the model does not have the layers of the plan; plan again")]
    Layers(#[source] tensors::TensorsError),
    #[error("cannot reach the model's file")]
    Remote(#[source] RemoteError),
    #[error("cannot fetch the model's header")]
    RemoteHeader(#[source] HeaderError),
    #[error(
        "{} of the model are still to be fetched, and the disk has room for {}: a fifth of it stays free, unless the chart's agent.cacheBudget says how much fetched models may take; free some of it, change that, or leave this machine out (spec.nodeSelector of the Model)",
        rounded(*.wanted),
        rounded(*.room)
    )]
    NoRoom { wanted: u64, room: u64 },
    #[error(
        "{} of the model are still to be fetched, and beside model files in use the disk has room for {}: tried again until it has more; suspend a Model whose files are there, free some of the disk, let fetched models take more (the chart's agent.cacheBudget), or leave this machine out (spec.nodeSelector of the Model)",
        rounded(*.wanted),
        rounded(*.room)
    )]
    NoRoomYet { wanted: u64, room: u64 },
    #[error(
        "only {} of the model came in {} s, and another model waits for the room on the disk that is kept for it: tried again in some minutes; look at the model's server, and at this machine's line",
        rounded(*.bytes),
        .within.as_secs()
    )]
    TooSlow { bytes: u64, within: Duration },
    #[error("cannot fetch this machine's part of the model")]
    Download(#[source] DownloadError),
    #[error(
        "{file}: expected sha256 {expected}, found {found}: correct the digest (url.sha256 of the Model's source), or the file on its server; this machine fetches no third time what the server calls the same version, unless its agent starts again"
    )]
    OtherDigest {
        file: String,
        expected: String,
        found: String,
    },
    #[error("cannot use what was fetched before")]
    LocalFile(#[from] LocalFileError),
    #[error("reading a file was cut short")]
    Panicked(#[source] tokio::task::JoinError),
}

impl From<RemoteModelError> for WeightsError {
    fn from(error: RemoteModelError) -> Self {
        match error {
            RemoteModelError::File(error) => Self::Remote(error),
            RemoteModelError::Header(error) => Self::RemoteHeader(error),
        }
    }
}

impl WeightsError {
    /// Whether others are to have the room on the disk first.
    pub fn gives_way(&self) -> bool {
        matches!(self, Self::TooSlow { .. })
    }

    /// Whether the machine cannot honour the plan at all, rather than just not now.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::NoVersion
            | Self::NoSource
            | Self::NotHere { .. }
            | Self::KeptForOthers { .. }
            | Self::OtherHeader { .. }
            | Self::OtherSize { .. }
            | Self::Layers(_)
            | Self::NoRoom { .. }
            | Self::OtherDigest { .. }
            | Self::LocalHeader(LocalHeaderError::Header(_)) => true,
            Self::Remote(error) => {
                !error.is_transient() && !matches!(error, RemoteError::GaveUp { .. })
            }
            Self::Download(error) => matches!(
                error,
                DownloadError::Changed { .. }
                    | DownloadError::OutOfRange { .. }
                    | DownloadError::NoRoom { .. }
            ),
            Self::NoRoomYet { .. }
            | Self::TooSlow { .. }
            | Self::Cache(_)
            | Self::Client(_)
            | Self::Token(_)
            | Self::HubToken(_)
            | Self::LocalHeader(LocalHeaderError::Read { .. })
            | Self::RemoteHeader(_)
            | Self::LocalFile(_)
            | Self::Panicked(_) => false,
        }
    }
}

/// From where and how much is fetched.
pub struct WeightsOptions {
    /// For what is fetched.
    pub folder: PathBuf,
    pub budget_bytes: Option<u64>,
    /// The hub for plans that name none.
    pub hub: String,
    /// What the hub gets for plans of namespaces that have no token of their own.
    pub token: Option<String>,
    /// Which knows of those that have one.
    pub api_server: kube::Client,
    /// Servers beside the hub that plans may name although they are not on the internet.
    pub allowed_servers: Vec<AllowedServer>,
    pub fetched_bytes: Counter,
}

impl Weights {
    pub fn open(options: WeightsOptions) -> Result<Self, WeightsError> {
        let WeightsOptions {
            folder,
            budget_bytes,
            hub,
            token,
            api_server,
            allowed_servers,
            fetched_bytes,
        } = options;
        let reach = Reach::internet_and(&hub, &allowed_servers);
        let hub = Hub::new(&hub, token.as_deref()).map_err(WeightsError::Token)?;
        Ok(Self(Arc::new(Store {
            cache: Cache::open(&folder)?,
            budget_bytes,
            client: Client::new(Retry::default(), reach)?,
            hub_tokens: HubTokens::new(api_server, hub),
            header_turns: HeaderTurns::new(HEADER_DEADLINE),
            local_headers: Semaphore::new(1),
            fetched_headers: Semaphore::new(1),
            slowest: Slowest::default(),
            room_wanted: Mutex::default(),
            mismatches: Mismatches::default(),
            fetched_bytes,
        })))
    }

    /// What was fetched.
    pub fn cache(&self) -> &Cache {
        &self.0.cache
    }

    /// Gets what is wanted of a model for a plan of `namespace`. `progress` is called with what is fetched.
    pub async fn obtain(
        &self,
        namespace: &str,
        wanted: WantedWeights<'_>,
        progress: impl FnMut(Share),
    ) -> Result<HeldFile, WeightsError> {
        let model = wanted.model;
        let local = match &model.source {
            None => Some(model.file.clone()),
            Some(source) => source.local_path(),
        };
        match (local, &model.source) {
            (Some(path), _) => {
                let _turn = header_turn(&self.0.local_headers).await;
                own_file(model, path, self.cache().clone()).await
            }
            (None, Some(source)) => {
                let version = model.version.as_ref().ok_or(WeightsError::NoVersion)?;
                let origin = Origin {
                    namespace,
                    version,
                    source,
                };
                self.fetched(wanted, origin, progress).await
            }
            (None, None) => Err(WeightsError::NoSource),
        }
    }

    async fn fetched(
        &self,
        wanted: WantedWeights<'_>,
        origin: Origin<'_>,
        mut progress: impl FnMut(Share),
    ) -> Result<HeldFile, WeightsError> {
        let WantedWeights {
            model,
            layers,
            ends,
            replaces,
            gave_way,
            then,
        } = wanted;
        let Origin {
            namespace,
            version,
            source,
        } = origin;
        let commit = version.commit.as_deref();
        let files = self.files_of(model).await?;
        let held = |files: Vec<LocalFile>, wanted: &[Range<u64>]| {
            let total_bytes = tensors::total_bytes(wanted);
            HeldFile {
                path: files[0].path().to_owned(),
                share: Some(Share {
                    fetched_bytes: total_bytes,
                    total_bytes,
                }),
                _files: files,
            }
        };
        let expected = version.header_sha256.clone();
        let there = {
            let (files, layers, expected) = (files.clone(), layers.clone(), expected.clone());
            let _turn = header_turn(&self.0.fetched_headers).await;
            blocking(move || complete(&files, &layers, ends, &expected)).await?
        };
        if let Some(wanted) = there {
            return Ok(held(files, &wanted));
        }

        // The header itself is not kept while its weights are fetched.
        let wanted_of = move |remote: RemoteModel| -> Result<_, WeightsError> {
            let RemoteModel {
                files,
                gguf,
                version,
            } = remote;
            same_header(&files[0].shown(), &expected, version.header_sha256)?;
            let wanted = tensors::ranges(&gguf, &layers, ends).map_err(WeightsError::Layers)?;
            let parts = gguf.parts.iter();
            let parts = parts.map(|part| tensors::of_part(part, &wanted));
            let parts: Vec<Vec<Range<u64>>> = parts.collect();
            Ok((files, wanted, parts))
        };
        let (remotes, wanted, parts) = {
            let turns = &self.0.header_turns;
            let turn = turns.of(namespace).await;
            let opened = async {
                let fetched = self.0.hub_tokens.source(namespace, source, commit);
                let fetched = fetched.await?.ok_or(WeightsError::NoSource)?;
                turns.open(&self.0.client, &fetched, wanted_of).await?
            };
            holding(Arc::new(turn), opened).await?
        };
        let total_bytes = tensors::total_bytes(&wanted);
        let url = source.url.as_ref();
        let allow_full_download = url.is_some_and(|url| url.allow_full_download);
        let (mut downloads, mut missing_bytes, mut to_fetch) = (Vec::new(), 0, Vec::new());
        for ((remote, file), wanted) in remotes.iter().zip(&files).zip(&parts) {
            self.0.mismatches.check(remote, file)?;
            let download =
                Download::new(remote, file, wanted).allow_full_download(allow_full_download);
            let so_far = download.so_far()?;
            missing_bytes += so_far.missing_bytes();
            to_fetch.push((file.clone(), download.room_bytes()?));
            downloads.push((download, so_far.done_bytes));
        }
        let next = match then {
            Some(model) if missing_bytes > 0 => self.files_of(model).await?,
            _ => Vec::new(),
        };
        for file in &next {
            let whole = 0..file.identity().size_bytes;
            missing_bytes += tensors::total_bytes(&file.missing(from_ref(&whole))?);
            to_fetch.push((file.clone(), file.room_for(from_ref(&whole))?));
        }
        let _room = match missing_bytes {
            0 => None,
            _ => match self.make_room(missing_bytes, to_fetch, replaces).await {
                Ok(room) => Some(room),
                Err(error) => {
                    drop(downloads);
                    let files = files.into_iter().chain(next).collect();
                    let store = self.0.clone();
                    // What was made for nothing goes again.
                    blocking(move || store.cache.give_back_empty(files)).await??;
                    return Err(error);
                }
            },
        };
        let mut looks = Looks::new(self.0.slowest.after(gave_way), missing_bytes);
        let mut before = 0;
        for (at, (download, there_bytes)) in downloads.into_iter().enumerate() {
            let ended = self.download(download, there_bytes, &mut looks, |done_bytes| {
                progress(Share {
                    // A server that sends only whole files sends more than was wanted.
                    fetched_bytes: (before + done_bytes).min(total_bytes),
                    total_bytes,
                });
            });
            let (remote, file) = (&remotes[at], &files[at]);
            self.0.mismatches.note(remote, file, ended.await)?;
            before += tensors::total_bytes(&parts[at]);
        }
        Ok(held(files, &wanted))
    }

    /// Where a model is kept that is fetched; in use until dropped.
    async fn files_of(&self, model: &PlannedModel) -> Result<Vec<LocalFile>, WeightsError> {
        let version = model.version.as_ref().ok_or(WeightsError::NoVersion)?;
        let source = model.source.as_ref().ok_or(WeightsError::NoSource)?;
        let identities = identities(version, model.size_bytes as u64);
        // Where files are kept does not depend on whose token fetches them.
        let place = self.0.hub_tokens.shared();
        let place = place.source(source, version.commit.as_deref());
        let (store, place) = (self.0.clone(), place.ok_or(WeightsError::NoSource)?);
        Ok(blocking(move || store.cache.files(&place, &identities)).await??)
    }

    /// Runs a download; `progress` is called with the bytes of its file that are there, at first `there_bytes`. It fails if too little comes from
    /// look to look, of all files of the model together, and somebody waits for its room.
    async fn download(
        &self,
        download: Download<'_>,
        there_bytes: u64,
        looks: &mut Looks,
        mut progress: impl FnMut(u64),
    ) -> Result<(), WeightsError> {
        let (tell, mut told) = watch::channel(Progress::default());
        // What was there before is not fetched now.
        let mut counted = there_bytes;
        let mut note = |now: Progress| {
            if now.total_bytes == 0 {
                return;
            }
            let new = now.done_bytes.saturating_sub(counted);
            self.0.fetched_bytes.inc_by(new);
            counted += new;
            progress(now.done_bytes);
        };
        let came = |now: Progress| now.done_bytes.saturating_sub(there_bytes);
        let outcome = {
            let mut download = pin!(download.run(&tell));
            loop {
                tokio::select! {
                    outcome = &mut download => break outcome.map_err(WeightsError::Download),
                    Ok(()) = told.changed() => note(*told.borrow_and_update()),
                    () = looks.next() => {
                        let now = *told.borrow();
                        // Not while another writes the file, nor while the whole is held against its digest.
                        let runs = now.missing_bytes() > 0;
                        let too_few = looks.too_few(runs.then(|| came(now)));
                        if let Some(bytes) = too_few
                            && self.room_is_wanted()
                        {
                            let within = looks.within;
                            break Err(WeightsError::TooSlow { bytes, within });
                        }
                    }
                }
            }
        };
        let last = *told.borrow_and_update();
        looks.ended(came(last));
        note(last);
        outcome
    }
}

/// Which file is fetched, and for whom.
struct Origin<'a> {
    namespace: &'a str,
    version: &'a FileVersion,
    source: &'a ModelSource,
}

/// A turn to read the header of a file on this machine.
async fn header_turn(turns: &Semaphore) -> Option<SemaphorePermit<'_>> {
    let turn = timeout(LONGEST_TURN, turns.acquire()).await;
    // They are never closed.
    turn.ok()?.ok()
}

fn same_header(file: &str, expected: &str, found: String) -> Result<(), WeightsError> {
    if found.eq_ignore_ascii_case(expected) {
        return Ok(());
    }
    Err(WeightsError::OtherHeader {
        file: file.to_owned(),
        expected: expected.to_owned(),
        found,
    })
}

/// The ranges that the member needs, if all of them are on the disk, and no file is yet to be held against its digest.
fn complete(
    files: &[LocalFile],
    layers: &[Range<usize>],
    ends: bool,
    expected: &str,
) -> Option<Vec<Range<u64>>> {
    // Where the headers were not fetched yet there are zeros.
    let header = local_header::read(files.first()?.path()).ok()?;
    let wanted = tensors::ranges(&header.gguf, layers, ends).ok()?;
    let same =
        header.sha256.eq_ignore_ascii_case(expected) && header.gguf.parts.len() == files.len();
    let is_there = |(file, part): (&LocalFile, &FilePart)| {
        let missing = file.missing(&tensors::of_part(part, &wanted));
        missing.is_ok_and(|missing| missing.is_empty()) && matches!(file.is_unchecked(), Ok(false))
    };
    let there = same && files.iter().zip(&header.gguf.parts).all(is_there);
    there.then_some(wanted)
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, WeightsError> {
    spawn_blocking(work).await.map_err(WeightsError::Panicked)
}
