//! A server of model files for tests: it answers as the Hugging Face hub and its CDN do, counts what it sends, and fails as it is told.
//!
//! Files lie in a folder as `owner/name/path`. `/owner/name/resolve/REVISION/path` redirects to a signed address under `/_cdn/`, which
//! has another port and expires; `/_files/owner/name/path` is the file itself. `POST /_control` sets a [`Control`] (JSON),
//! `GET /_counters` tells what was sent, `DELETE /_counters` begins anew.
//!
//! Refuses: to be a hub for anything but tests; it holds no secret and checks signatures only for their age.

mod model_hub;

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::body::Body;
use axum::extract::{ConnectInfo, Path as UrlPath, State};
use axum::http::header::{
    ACCEPT_RANGES, AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HOST, LOCATION, RANGE,
    RETRY_AFTER,
};
use axum::http::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use axum::routing::{any, get, post};
use axum::{Json, Router};
use bytes::Bytes;
use futures::stream;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

pub use model_hub::ModelHub;

/// Bodies are sent in such pieces, so that counts are close to what arrives.
const CHUNK_BYTES: u64 = 16 << 10;
/// The commit of every repository.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// How the hub behaves; the default is a hub without faults.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct Control {
    /// What gated and private repositories ask for.
    pub token: Option<String>,
    pub gated: Vec<String>,
    pub private: Vec<String>,
    /// Old names of repositories, and where they are now.
    pub renamed: BTreeMap<String, String>,
    /// How long a signed address is good for.
    pub signed_for_millis: u64,
    /// Whether repositories know digests and sizes, as they do of large files.
    pub linked: bool,
    pub ignore_ranges: bool,
    pub no_etag: bool,
    /// The size that answers with bytes say every file has, whatever it has. What they promise of it beyond the file's end does not come.
    pub claims: Option<u64>,
    /// Of each answer.
    pub bytes_per_second: Option<u64>,
    /// The next answers with bytes end early, after this many.
    pub cut: Option<Cut>,
    /// How the next requests for bytes fail.
    pub fail: Option<Fail>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Cut {
    pub after_bytes: u64,
    pub times: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Fail {
    pub status: u16,
    pub retry_after_seconds: Option<u64>,
    pub times: u32,
}

impl Default for Control {
    fn default() -> Self {
        Control {
            token: None,
            gated: Vec::new(),
            private: Vec::new(),
            renamed: BTreeMap::new(),
            signed_for_millis: 3_600_000,
            linked: true,
            ignore_ranges: false,
            no_etag: false,
            claims: None,
            bytes_per_second: None,
            cut: None,
            fail: None,
        }
    }
}

/// What one client got of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Counter {
    pub client: IpAddr,
    /// The path of the request, without its query: redirects count as well as what they lead to.
    pub path: String,
    pub requests: u64,
    /// Those of them that brought a token.
    pub with_token: u64,
    pub body_bytes: u64,
    /// One past the farthest of them in the file.
    pub end: u64,
}

/// A hub that serves until it is dropped.
pub struct TestHub {
    address: SocketAddr,
    shared: Arc<Shared>,
    servers: Vec<JoinHandle<()>>,
}

struct Shared {
    folder: PathBuf,
    /// Where redirects lead to.
    cdn_port: u16,
    start: Instant,
    control: Mutex<Control>,
    counters: Mutex<BTreeMap<(IpAddr, String), Counter>>,
    /// Digests by path, valid while a file's length and time of change stay.
    digests: Mutex<HashMap<PathBuf, (u64, SystemTime, String)>>,
}

impl TestHub {
    /// Serves the files in `folder` from free ports of this machine.
    ///
    /// # Errors
    /// When no port can be had.
    pub async fn start(folder: &Path) -> io::Result<TestHub> {
        let any_port = || TcpListener::bind("127.0.0.1:0");
        TestHub::serve(folder, any_port().await?, any_port().await?)
    }

    /// Serves the files in `folder`; redirects lead to the port of `cdn`.
    ///
    /// # Errors
    /// When the listeners have no address.
    pub fn serve(folder: &Path, hub: TcpListener, cdn: TcpListener) -> io::Result<TestHub> {
        let shared = Arc::new(Shared {
            folder: folder.to_owned(),
            cdn_port: cdn.local_addr()?.port(),
            start: Instant::now(),
            control: Mutex::default(),
            counters: Mutex::default(),
            digests: Mutex::default(),
        });
        let router = Router::new()
            .route("/_control", post(set_control).get(get_control))
            .route("/_counters", get(get_counters).delete(clear_counters))
            .route("/_cdn/{*path}", any(cdn_file))
            .route("/_files/{*path}", any(plain_file))
            .route("/{owner}/{name}/resolve/{revision}/{*file}", any(resolve))
            .with_state(shared.clone());
        let address = hub.local_addr()?;
        let servers = [hub, cdn].map(|listener| {
            let service = router
                .clone()
                .into_make_service_with_connect_info::<SocketAddr>();
            tokio::spawn(async move {
                if let Err(error) = axum::serve(listener, service).await {
                    tracing::error!(%error, "the test hub ended");
                }
            })
        });
        Ok(TestHub {
            address,
            shared,
            servers: servers.into(),
        })
    }

    /// `http://address:port`: the endpoint of a source.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Changes how the hub behaves from now on.
    pub fn control(&self, change: impl FnOnce(&mut Control)) {
        change(&mut lock(&self.shared.control));
    }

    /// What was sent since the last call of [`clear`](Self::clear).
    pub fn counters(&self) -> Vec<Counter> {
        lock(&self.shared.counters).values().cloned().collect()
    }

    /// Bytes of files sent.
    pub fn body_bytes(&self) -> u64 {
        self.counters()
            .iter()
            .map(|counter| counter.body_bytes)
            .sum()
    }

    /// Requests of any kind.
    pub fn requests(&self) -> u64 {
        self.counters().iter().map(|counter| counter.requests).sum()
    }

    /// Begins to count anew.
    pub fn clear(&self) {
        lock(&self.shared.counters).clear();
    }

    /// Serves until the process ends.
    pub async fn run(mut self) {
        for server in std::mem::take(&mut self.servers) {
            let _ = server.await;
        }
    }
}

impl Drop for TestHub {
    fn drop(&mut self) {
        for server in &self.servers {
            server.abort();
        }
    }
}

/// A request that is not answered with the file.
type Refusal = Box<Response<Body>>;

async fn set_control(State(shared): State<Arc<Shared>>, Json(control): Json<Control>) {
    *lock(&shared.control) = control;
}

async fn get_control(State(shared): State<Arc<Shared>>) -> Json<Control> {
    Json(lock(&shared.control).clone())
}

async fn get_counters(State(shared): State<Arc<Shared>>) -> Json<Vec<Counter>> {
    Json(lock(&shared.counters).values().cloned().collect())
}

async fn clear_counters(State(shared): State<Arc<Shared>>) {
    lock(&shared.counters).clear();
}

/// The hub's side: who may have the file, and where it is.
async fn resolve(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(client): ConnectInfo<SocketAddr>,
    UrlPath((owner, name, revision, file)): UrlPath<(String, String, String, String)>,
    uri: Uri,
    headers: HeaderMap,
) -> Response<Body> {
    shared.count(client, uri.path(), &headers);
    let control = lock(&shared.control).clone();
    let repo = format!("{owner}/{name}");
    if let Some(new) = control.renamed.get(&repo) {
        let location = format!("/{new}/resolve/{revision}/{file}");
        return answer(
            StatusCode::TEMPORARY_REDIRECT,
            &[(LOCATION.as_str(), location)],
            Body::empty(),
        );
    }
    let bearer = control
        .token
        .as_ref()
        .map(|token| format!("Bearer {token}"));
    let given = headers
        .get(AUTHORIZATION)
        .and_then(|value| value.to_str().ok());
    let allowed = bearer.is_some() && given == bearer.as_deref();
    if !allowed && control.private.contains(&repo) || !shared.folder.join(&repo).is_dir() {
        return error(
            StatusCode::UNAUTHORIZED,
            "RepoNotFound",
            "Invalid username or password.",
        );
    }
    if !allowed && control.gated.contains(&repo) {
        let message = format!(
            "Access to model {repo} is restricted. You must be authenticated to access it."
        );
        return error(StatusCode::UNAUTHORIZED, "GatedRepo", &message);
    }
    if revision != "main" && revision != COMMIT {
        return error(
            StatusCode::NOT_FOUND,
            "RevisionNotFound",
            &format!("Invalid rev id: {revision}"),
        );
    }
    let path = format!("{repo}/{file}");
    let Some(known) = shared.file(&path) else {
        return error(StatusCode::NOT_FOUND, "EntryNotFound", "Entry not found");
    };
    let host = headers
        .get(HOST)
        .and_then(|host| host.to_str().ok())
        .unwrap_or_default();
    let host = host.rsplit_once(':').map_or(host, |(host, _)| host);
    let expires = shared.start.elapsed().as_millis() as u64 + control.signed_for_millis;
    let mut fields = vec![
        (
            LOCATION.as_str(),
            format!(
                "http://{host}:{}/_cdn/{path}?expires={expires}&signature=secret",
                shared.cdn_port
            ),
        ),
        ("x-repo-commit", COMMIT.to_owned()),
    ];
    if control.linked {
        fields.push(("x-linked-etag", format!("\"{}\"", known.sha256)));
        fields.push(("x-linked-size", known.length.to_string()));
    }
    answer(StatusCode::FOUND, &fields, Body::empty())
}

/// The CDN's side: the file, to whoever has a signed address.
async fn cdn_file(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(client): ConnectInfo<SocketAddr>,
    UrlPath(path): UrlPath<String>,
    request: Request<Body>,
) -> Response<Body> {
    let query = request.uri().query().unwrap_or_default();
    let expires = query
        .split('&')
        .find_map(|field| field.strip_prefix("expires=")?.parse::<u64>().ok());
    if expires.is_none_or(|expires| expires < shared.start.elapsed().as_millis() as u64) {
        shared.count(client, request.uri().path(), request.headers());
        return answer(
            StatusCode::FORBIDDEN,
            &[],
            Body::from("the address has expired"),
        );
    }
    plain_file(State(shared), ConnectInfo(client), UrlPath(path), request).await
}

async fn plain_file(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(client): ConnectInfo<SocketAddr>,
    UrlPath(path): UrlPath<String>,
    request: Request<Body>,
) -> Response<Body> {
    let counted = shared.count(client, request.uri().path(), request.headers());
    shared
        .send(&path, counted, &request)
        .unwrap_or_else(|refusal| *refusal)
}

/// A file of the folder as it is now.
struct Known {
    file: File,
    length: u64,
    sha256: String,
}

impl Shared {
    /// Counts a request. Returns the key under which its bytes are counted.
    fn count(&self, client: SocketAddr, path: &str, headers: &HeaderMap) -> (IpAddr, String) {
        let key = (client.ip(), path.to_owned());
        let mut counters = lock(&self.counters);
        let counter = counters.entry(key.clone()).or_insert(Counter {
            client: client.ip(),
            path: path.to_owned(),
            requests: 0,
            with_token: 0,
            body_bytes: 0,
            end: 0,
        });
        counter.requests += 1;
        counter.with_token += u64::from(headers.contains_key(AUTHORIZATION));
        key
    }

    fn file(&self, path: &str) -> Option<Known> {
        if path.split('/').any(|part| part.is_empty() || part == "..") {
            return None;
        }
        let path = self.folder.join(path);
        let file = File::open(&path).ok()?;
        let metadata = file.metadata().ok().filter(fs::Metadata::is_file)?;
        let (length, modified) = (metadata.len(), metadata.modified().ok()?);
        let mut digests = lock(&self.digests);
        let sha256 = match digests.get(&path) {
            Some((known_length, known_modified, sha256))
                if (*known_length, *known_modified) == (length, modified) =>
            {
                sha256.clone()
            }
            _ => {
                let sha256 = sha256(&file).ok()?;
                digests.insert(path, (length, modified, sha256.clone()));
                sha256
            }
        };
        Some(Known {
            file,
            length,
            sha256,
        })
    }

    fn send(
        self: Arc<Self>,
        path: &str,
        counted: (IpAddr, String),
        request: &Request<Body>,
    ) -> Result<Response<Body>, Refusal> {
        let known = self
            .file(path)
            .ok_or_else(|| Box::new(answer(StatusCode::NOT_FOUND, &[], Body::empty())))?;
        let (control, cut) = self.next_fault()?;
        let length = control.claims.unwrap_or(known.length);
        let mut fields = Vec::new();
        if !control.no_etag {
            fields.push((ETAG.as_str(), format!("\"{}\"", known.sha256)));
        }
        let asked = request
            .headers()
            .get(RANGE)
            .and_then(|range| range.to_str().ok())
            .filter(|_| !control.ignore_ranges);
        let (status, range) = match asked {
            None => (StatusCode::OK, 0..length),
            Some(asked) => {
                let range = byte_range(asked, length).ok_or_else(|| {
                    let size = format!("bytes */{length}");
                    Box::new(answer(
                        StatusCode::RANGE_NOT_SATISFIABLE,
                        &[(CONTENT_RANGE.as_str(), size)],
                        Body::empty(),
                    ))
                })?;
                let content = format!("bytes {}-{}/{length}", range.start, range.end - 1);
                fields.push((CONTENT_RANGE.as_str(), content));
                (StatusCode::PARTIAL_CONTENT, range)
            }
        };
        if !control.ignore_ranges {
            fields.push((ACCEPT_RANGES.as_str(), "bytes".to_owned()));
        }
        fields.push((
            CONTENT_LENGTH.as_str(),
            (range.end - range.start).to_string(),
        ));
        if request.method() == Method::HEAD {
            return Ok(answer(status, &fields, Body::empty()));
        }
        let cut_at = cut.map_or(u64::MAX, |bytes| range.start.saturating_add(bytes));
        let sent = Sent {
            shared: self,
            counted,
            file: known.file,
            cut_at: cut_at.min(known.length).max(range.start),
            left: range,
            bytes_per_second: control.bytes_per_second,
        };
        Ok(answer(
            status,
            &fields,
            Body::from_stream(stream::unfold(sent, Sent::next)),
        ))
    }

    /// The hub's behaviour towards this request for bytes, and after how many of them to break off.
    fn next_fault(&self) -> Result<(Control, Option<u64>), Refusal> {
        let mut control = lock(&self.control);
        if let Some(fail) = control.fail.as_mut().filter(|fail| fail.times > 0) {
            fail.times -= 1;
            let status =
                StatusCode::from_u16(fail.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            let after = fail
                .retry_after_seconds
                .map(|seconds| (RETRY_AFTER.as_str(), seconds.to_string()));
            return Err(Box::new(answer(status, after.as_slice(), Body::empty())));
        }
        let cut = control.cut.as_mut().filter(|cut| cut.times > 0).map(|cut| {
            cut.times -= 1;
            cut.after_bytes
        });
        Ok((control.clone(), cut))
    }
}

/// A body under way.
struct Sent {
    shared: Arc<Shared>,
    counted: (IpAddr, String),
    file: File,
    left: Range<u64>,
    cut_at: u64,
    bytes_per_second: Option<u64>,
}

impl Sent {
    async fn next(mut self) -> Option<(io::Result<Bytes>, Self)> {
        if self.left.is_empty() {
            return None;
        }
        let start = self.left.start;
        // Four times a second, where it takes time.
        let chunk = self
            .bytes_per_second
            .map_or(CHUNK_BYTES, |rate| (rate / 4).clamp(1, CHUNK_BYTES));
        let end = self.left.end.min(start + chunk).min(self.cut_at);
        if start == end {
            // What came before the cut shall arrive: nobody learns of it while the connection is busy.
            tokio::time::sleep(Duration::from_millis(20)).await;
            return Some((Err(io::Error::other("cut off, as was asked")), self));
        }
        if let Some(rate) = self.bytes_per_second {
            tokio::time::sleep(Duration::from_secs_f64(
                (end - start) as f64 / rate.max(1) as f64,
            ))
            .await;
        }
        let mut chunk = vec![0; (end - start) as usize];
        let read = self.file.read_exact_at(&mut chunk, start);
        self.left.start = end;
        if let Some(counter) = lock(&self.shared.counters).get_mut(&self.counted) {
            counter.body_bytes += end - start;
            counter.end = counter.end.max(end);
        }
        Some((read.map(|()| chunk.into()), self))
    }
}

/// `bytes=FIRST-LAST` or `bytes=FIRST-`, the only forms that anyone here sends.
fn byte_range(text: &str, length: u64) -> Option<Range<u64>> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let first = first.parse().ok()?;
    let end = match last {
        "" => length,
        last => last.parse::<u64>().ok()?.saturating_add(1).min(length),
    };
    (first < end).then_some(first..end)
}

fn sha256(file: &File) -> io::Result<String> {
    let mut hash = Sha256::new();
    io::copy(&mut &*file, &mut hash)?;
    Ok(format!("{:x}", hash.finalize()))
}

fn error(status: StatusCode, code: &str, message: &str) -> Response<Body> {
    let fields = [
        ("x-error-code", code.to_owned()),
        ("x-error-message", message.to_owned()),
    ];
    answer(status, &fields, Body::from(message.to_owned()))
}

fn answer(status: StatusCode, fields: &[(&str, String)], body: Body) -> Response<Body> {
    let mut response = Response::builder().status(status);
    for (name, value) in fields {
        response = response.header(*name, value);
    }
    response.body(body).unwrap_or_default()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
