//! What is fetched from a server: how much of the disk it may take, and what becomes of it if its digest is another.

use std::fs;

use prima_gguf::GgmlType;
use prima_gguf::writer::GgufWriter;
use prima_test_hub::TestHub;
use prima_weights::{FileIdentity, Location, Source};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use super::*;

/// On the hub.
const FILE: &str = "people/models/m.gguf";

/// A hub with a model, and an agent's folder.
struct Stage {
    folder: TempDir,
    hub: TestHub,
    model: Vec<u8>,
}

impl Stage {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let files = folder.path().join("hub");
        fs::create_dir_all(files.join(FILE).parent().unwrap()).unwrap();
        let stage = Self {
            hub: TestHub::start(&files).await.unwrap(),
            folder,
            model: model(),
        };
        stage.publish(&stage.model);
        stage
    }

    fn publish(&self, file: &[u8]) {
        fs::write(self.folder.path().join("hub").join(FILE), file).unwrap();
    }

    /// A file of the same length that begins as the model does.
    fn similar(&self) -> Vec<u8> {
        let (_, all_but_last) = self.model.split_last().unwrap();
        [all_but_last, &[0]].concat()
    }

    /// The agent's store, with this budget.
    fn weights(&self, budget_bytes: u64) -> Weights {
        let _ = rustls::crypto::ring::default_provider().install_default();
        // Nobody is asked there: only a hub's own files take a token.
        let mut api_server = kube::Config::new("http://127.0.0.1:9".parse().unwrap());
        api_server.root_cert = Some(Vec::new());
        let options = WeightsOptions {
            folder: self.folder.path().join("cache"),
            budget_bytes: Some(budget_bytes),
            hub: self.hub.endpoint(),
            token: None,
            api_server: kube::Client::try_from(api_server).unwrap(),
            allowed_servers: Vec::new(),
            fetched_bytes: Counter::default(),
        };
        Weights::open(options).unwrap()
    }

    /// The same with room for the model and little else, for which every download is too slow.
    fn slow_for_all(&self) -> Weights {
        let mut weights = self.weights(self.model.len() as u64 + (256 << 10));
        Arc::get_mut(&mut weights.0).unwrap().slowest = Slowest {
            within: Duration::from_millis(100),
            bytes_per_second: 1 << 40,
        };
        weights
    }

    /// The same where another waits for the model's room, and the model takes many of these looks to come.
    async fn wanted_by_another(&self, model: &PlannedModel) -> Weights {
        let weights = self.slow_for_all();
        let in_use = fetched_before(&weights);
        let error = obtain(&weights, model).await.err().unwrap();
        assert!(matches!(error, WeightsError::NoRoomYet { .. }), "{error}");
        drop(in_use);
        self.hub
            .control(|control| control.bytes_per_second = Some(2_000_000));
        weights
    }

    fn url(&self) -> String {
        format!("{}/_files/{FILE}", self.hub.endpoint())
    }

    /// Where the model is, which is said to have this digest.
    fn source(&self, sha256: &str) -> Source {
        let location = Location::Url {
            url: self.url(),
            sha256: Some(sha256.to_owned()),
        };
        Source {
            location,
            token: None,
        }
    }

    /// As a plan has the model, if it is said to have this digest.
    async fn planned(&self, sha256: &str) -> PlannedModel {
        let client = Client::new(Retry::default(), Reach::anywhere()).unwrap();
        let remote = RemoteModel::open(&client, &self.source(sha256)).await;
        let remote = remote.unwrap();
        self.hub.clear();
        let source = json!({"url": {"url": self.url(), "sha256": sha256}});
        PlannedModel {
            source: Some(serde_json::from_value(source).unwrap()),
            version: Some(remote.version),
            ..PlannedModel::new("m", "m.gguf", self.model.len() as i64, 1)
        }
    }

    /// Where the agent keeps it.
    fn file(&self, weights: &Weights, model: &PlannedModel) -> LocalFile {
        let version = model.version.as_ref().unwrap();
        let source = self.source(version.sha256.as_ref().unwrap());
        let identities = identities(version, model.size_bytes as u64);
        let files = weights.cache().files(&source, &identities);
        files.unwrap().remove(0)
    }
}

/// More than the model takes.
const ENOUGH: u64 = 64 << 20;

/// One layer of three megabytes.
fn model() -> Vec<u8> {
    let mut writer = GgufWriter::new();
    writer.tensor("blk.0.attn_q.weight", GgmlType::F32, &[1024, 768]);
    let mut data = writer.write_header(Vec::new()).unwrap();
    data.tensor(&vec![1; 3 << 20]).unwrap();
    data.finish().unwrap()
}

fn sha256(file: &[u8]) -> String {
    format!("{:x}", Sha256::digest(file))
}

async fn obtain(weights: &Weights, model: &PlannedModel) -> Result<HeldFile, WeightsError> {
    let whole = WantedWeights::whole(model);
    weights.obtain("default", whole, |_| ()).await
}

/// A megabyte of another model, in use until this is dropped.
fn fetched_before(weights: &Weights) -> LocalFile {
    let identity = FileIdentity {
        size_bytes: 1 << 20,
        etag: Some("1".to_owned()),
        sha256: None,
        revision_commit: None,
    };
    let location = Location::Url {
        url: "https://elsewhere/n.gguf".to_owned(),
        sha256: None,
    };
    let source = Source {
        location,
        token: None,
    };
    let files = weights.cache().files(&source, &[identity]).unwrap();
    let file = files.into_iter().next().unwrap();
    let writer = file.writer().unwrap().unwrap();
    writer.write(0, &vec![1; 1 << 20]).unwrap();
    file
}

#[tokio::test]
async fn what_exceeds_the_budget_is_not_fetched_and_removes_nothing() {
    let stage = Stage::new().await;
    let model = stage.planned(&sha256(&stage.model)).await;
    let weights = stage.weights(1 << 20);
    let before = fetched_before(&weights).path().to_owned();
    let refused = obtain(&weights, &model).await.err().unwrap();
    assert!(matches!(refused, WeightsError::NoRoom { .. }), "{refused}");
    assert!(refused.is_refusal() && before.exists());
    let kept = weights.cache().entries().unwrap();
    assert_eq!(kept.len(), 1, "nothing is left of what was not fetched");
    // The beginning, in which a header is looked for.
    let sent = stage.hub.body_bytes();
    assert!(sent < 2 << 20, "{sent} bytes");

    let weights = stage.weights(stage.model.len() as u64 + (256 << 10));
    let held = obtain(&weights, &model).await.unwrap();
    assert!(fs::read(&held.path).unwrap() == stage.model);
    assert!(!before.exists(), "it was not used for longest");
}

/// Such as those of a ring that ends.
#[tokio::test]
async fn files_in_use_that_are_in_the_way_are_waited_for() {
    let stage = Stage::new().await;
    let model = stage.planned(&sha256(&stage.model)).await;
    let weights = stage.weights(stage.model.len() as u64 + (256 << 10));
    let in_use = fetched_before(&weights);
    // A budget that was given counts also while a plan replaces another.
    for replaces in [false, true] {
        let wanted = WantedWeights {
            replaces,
            ..WantedWeights::whole(&model)
        };
        let obtained = weights.obtain("default", wanted, |_| ()).await;
        let error = obtained.err().unwrap();
        assert!(matches!(error, WeightsError::NoRoomYet { .. }), "{error}");
        assert!(!error.is_refusal());
    }
    let path = in_use.path().to_owned();
    drop(in_use);
    let held = obtain(&weights, &model).await.unwrap();
    assert!(fs::read(&held.path).unwrap() == stage.model);
    assert!(!path.exists());
}

/// Whose server drips, for instance.
#[tokio::test]
async fn a_slow_download_gives_its_room_to_who_waits_for_it() {
    let stage = Stage::new().await;
    let model = stage.planned(&sha256(&stage.model)).await;
    let weights = stage.wanted_by_another(&model).await;
    let error = obtain(&weights, &model).await.err().unwrap();
    assert!(matches!(error, WeightsError::TooSlow { .. }), "{error}");
    assert!(error.gives_way() && !error.is_refusal());
    let other = fetched_before(&weights);
    let more = stage.model.len() as u64 - (1 << 20);
    let room = weights.make_room(more, vec![(other, more)], false).await;
    drop(room.unwrap());

    // Where nobody waits, it goes on as it is.
    let weights = stage.slow_for_all();
    let held = obtain(&weights, &model).await.unwrap();
    assert!(fs::read(&held.path).unwrap() == stage.model);
}

#[tokio::test]
async fn a_download_that_gave_way_often_has_time_to_end() {
    let stage = Stage::new().await;
    let model = stage.planned(&sha256(&stage.model)).await;
    let weights = stage.wanted_by_another(&model).await;
    let wanted = WantedWeights {
        gave_way: 10,
        ..WantedWeights::whole(&model)
    };
    let held = weights.obtain("default", wanted, |_| ()).await.unwrap();
    assert!(fs::read(&held.path).unwrap() == stage.model);
}

#[tokio::test]
async fn without_room_for_its_draft_model_a_model_is_not_fetched() {
    let stage = Stage::new().await;
    let model = stage.planned(&sha256(&stage.model)).await;
    let draft = PlannedModel {
        size_bytes: 2 << 20,
        ..model.clone()
    };
    let wanted = || WantedWeights {
        then: Some(&draft),
        ..WantedWeights::whole(&model)
    };
    let model_bytes = stage.model.len() as u64 + (256 << 10);
    let weights = stage.weights(model_bytes);
    let refused = weights.obtain("default", wanted(), |_| ()).await;
    let refused = refused.err().unwrap();
    assert!(matches!(refused, WeightsError::NoRoom { .. }), "{refused}");
    let sent = stage.hub.body_bytes();
    assert!(sent < 2 << 20, "{sent} bytes");

    let weights = stage.weights(model_bytes + (2 << 20));
    let held = weights.obtain("default", wanted(), |_| ()).await.unwrap();
    assert!(fs::read(&held.path).unwrap() == stage.model);
}

/// As on file systems without holes.
#[tokio::test]
async fn what_a_file_takes_without_content_is_counted_once() {
    let stage = Stage::new().await;
    let model = stage.planned(&sha256(&stage.model)).await;
    let file_bytes = stage.model.len() as u64;
    let weights = stage.weights(file_bytes - (1 << 20));
    let path = stage.file(&weights, &model).path().to_owned();
    fs::write(&path, vec![0; stage.model.len()]).unwrap();
    let refused = obtain(&weights, &model).await.err().unwrap();
    let WeightsError::NoRoom { wanted, room } = refused else {
        panic!("{refused}");
    };
    assert!(wanted == file_bytes && room < wanted, "{room} of {wanted}");

    drop(stage.file(&weights, &model));
    fs::write(&path, vec![0; stage.model.len()]).unwrap();
    let weights = stage.weights(file_bytes + (256 << 10));
    let held = obtain(&weights, &model).await.unwrap();
    assert_eq!(held.path, path);
    assert!(fs::read(&path).unwrap() == stage.model);
}

/// As an agent leaves it that is ended between the last byte and the digest.
#[tokio::test]
async fn a_whole_file_that_nobody_has_checked_is_not_used() {
    let stage = Stage::new().await;
    let model = stage.planned(&sha256(&stage.model)).await;
    let weights = stage.weights(ENOUGH);
    let write = |content: &[u8]| {
        let file = stage.file(&weights, &model);
        let writer = file.writer().unwrap().unwrap();
        writer.write(0, content).unwrap();
    };
    write(&stage.similar());
    let error = obtain(&weights, &model).await.err().unwrap();
    assert!(
        matches!(error, WeightsError::Download(DownloadError::Sha256 { .. })),
        "{error}"
    );

    // What is right is only read.
    write(&stage.model);
    stage.hub.clear();
    let held = obtain(&weights, &model).await.unwrap();
    assert!(fs::read(&held.path).unwrap() == stage.model);
    let sent = stage.hub.body_bytes();
    assert!(sent < 2 << 20, "{sent} bytes");
    // And once.
    stage.hub.clear();
    obtain(&weights, &model).await.unwrap();
    assert_eq!(stage.hub.requests(), 0);
}

#[tokio::test]
async fn what_was_fetched_does_not_wait_for_peoples_volumes() {
    let stage = Stage::new().await;
    let model = stage.planned(&sha256(&stage.model)).await;
    let weights = stage.weights(ENOUGH);
    obtain(&weights, &model).await.unwrap();
    // A header there is read for ever.
    let local_headers = &weights.0.local_headers;
    let _reads = local_headers.acquire().await.unwrap();
    tokio::select! {
        biased;
        held = obtain(&weights, &model) => drop(held.unwrap()),
        _ = header_turn(local_headers) => panic!("it waited for that one, too"),
    }
}

#[tokio::test]
async fn a_file_with_another_digest_is_fetched_twice_at_most() {
    let stage = Stage::new().await;
    let similar = stage.similar();
    let model = stage.planned(&sha256(&similar)).await;
    let weights = stage.weights(ENOUGH);
    let damaged = obtain(&weights, &model).await.err().unwrap();
    assert!(
        matches!(
            damaged,
            WeightsError::Download(DownloadError::Sha256 { .. })
        ),
        "{damaged}"
    );
    assert!(!damaged.is_refusal());
    for _ in 0..3 {
        let refused = obtain(&weights, &model).await.err().unwrap();
        assert!(refused.is_refusal());
        let said = refused.to_string();
        for part in [&*sha256(&similar), &sha256(&stage.model), "url.sha256"] {
            assert!(said.contains(part), "{said}");
        }
    }
    // For each of the four, a header was looked for in a megabyte.
    let sent = stage.hub.body_bytes();
    let file_bytes = stage.model.len() as u64;
    assert!(sent < 2 * file_bytes + (5 << 20), "{sent} bytes");

    // The server has another version at last.
    stage.publish(&similar);
    let held = obtain(&weights, &model).await.unwrap();
    assert!(fs::read(&held.path).unwrap() == similar);
}
