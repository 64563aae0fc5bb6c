//! A model with content that can be told apart byte by byte, a hub that serves it, and a client that does not wait long.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use prima_gguf::writer::GgufWriter;
use prima_gguf::{GgmlType, Gguf};
use prima_test_hub::TestHub;
use prima_weights::{
    Client, Download, DownloadError, LocalFile, Location, Progress, Reach, Remote, Retry, Source,
    Token,
};
use tempfile::TempDir;
use tokio::sync::watch;

pub const LAYERS: usize = 6;
pub const REPO: &str = "owner/model-GGUF";
pub const FILE: &str = "Q4/model.gguf";

/// A hub with one model.
pub struct Setup {
    pub folder: TempDir,
    pub hub: TestHub,
    pub model: Vec<u8>,
    pub gguf: Gguf,
    pub client: Client,
}

impl Setup {
    pub async fn new() -> Setup {
        let folder = tempfile::tempdir().unwrap();
        let model = model(1000);
        let gguf = Gguf::parse("model", &model, model.len() as u64).unwrap();
        let setup = Setup {
            hub: TestHub::start(&folder.path().join("hub")).await.unwrap(),
            client: Client::new(quick(), Reach::anywhere()).unwrap(),
            folder,
            model,
            gguf,
        };
        setup.publish(FILE, &setup.model);
        setup
    }

    /// Puts `bytes` in the place of the hub's `file`.
    pub fn publish(&self, file: &str, bytes: &[u8]) {
        let path = self.folder.path().join("hub").join(REPO).join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        // In one step: otherwise a request could see a mixture of both.
        let new = path.with_extension("new");
        std::fs::write(&new, bytes).unwrap();
        std::fs::rename(new, path).unwrap();
    }

    /// The model in its repository.
    pub fn source(&self) -> Source {
        hub_source(&self.hub.endpoint(), REPO, "main", FILE)
    }

    /// The model at an address that says nothing about it but its ETag.
    pub fn plain_source(&self, sha256: Option<&str>) -> Source {
        let url = format!("{}/_files/{REPO}/{FILE}", self.hub.endpoint());
        let sha256 = sha256.map(str::to_owned);
        Source {
            location: Location::Url { url, sha256 },
            token: None,
        }
    }

    pub async fn open(&self) -> Remote {
        Remote::open(&self.client, &self.source()).await.unwrap()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn local(&self, name: &str, remote: &Remote) -> LocalFile {
        LocalFile::open(&self.path(name), remote.identity()).unwrap()
    }

    pub fn whole(&self) -> Vec<Range<u64>> {
        vec![0..self.model.len() as u64]
    }

    pub fn share(&self, layers: Range<usize>, rank0: bool) -> Vec<Range<u64>> {
        prima_weights::tensors::ranges(&self.gguf, &[layers], rank0).unwrap()
    }

    /// Checks the file at `path` against the model in `ranges`.
    pub fn assert_same(&self, path: &Path, ranges: &[Range<u64>]) {
        let file = std::fs::read(path).unwrap();
        assert_eq!(file.len(), self.model.len());
        assert!(!ranges.is_empty());
        for range in ranges {
            let range = range.start as usize..range.end as usize;
            assert!(
                file[range.clone()] == self.model[range.clone()],
                "{range:?} differ"
            );
        }
    }
}

/// Downloads `wanted` of `remote` into `file`, in pieces of 64 KiB.
pub async fn download(
    remote: &Remote,
    file: &LocalFile,
    wanted: &[Range<u64>],
) -> Result<Progress, DownloadError> {
    let (sender, receiver) = watch::channel(Progress::default());
    Download::new(remote, file, wanted)
        .piece_bytes(64 << 10)
        .run(&sender)
        .await?;
    let progress = *receiver.borrow();
    Ok(progress)
}

pub fn hub_source(endpoint: &str, repo: &str, revision: &str, file: &str) -> Source {
    let [endpoint, repo, revision, file] = [endpoint, repo, revision, file].map(str::to_owned);
    Source {
        location: Location::HuggingFace {
            endpoint,
            repo,
            revision,
            file,
        },
        token: None,
    }
}

pub fn with_token(source: Source, token: &str) -> Source {
    Source {
        token: Some(Token::new(token).unwrap()),
        ..source
    }
}

pub fn quick() -> Retry {
    Retry {
        attempts: 4,
        first_pause: Duration::from_millis(10),
        longest_pause: Duration::from_millis(50),
        ..Retry::default()
    }
}

/// A model of some 5 MB: its tensors in the order in which converters write them, and a vocabulary of `tokens`.
pub fn model(tokens: usize) -> Vec<u8> {
    let mut writer = GgufWriter::new();
    let tokens: Vec<String> = (0..tokens)
        .map(|token| format!("token number {token}"))
        .collect();
    writer
        .metadata("general.architecture", "llama")
        .metadata("tokenizer.ggml.tokens", tokens);
    let mut tensors = vec![
        ("rope_freqs.weight".to_owned(), vec![33]),
        ("token_embd.weight".to_owned(), vec![250, 1000]),
    ];
    for layer in 0..LAYERS {
        tensors.push((format!("blk.{layer}.attn_norm.weight"), vec![251]));
        tensors.push((format!("blk.{layer}.attn_q.weight"), vec![251, 300]));
        tensors.push((format!("blk.{layer}.ffn_up.weight"), vec![251, 400]));
    }
    tensors.push(("output_norm.weight".to_owned(), vec![251]));
    for (name, shape) in &tensors {
        writer.tensor(name, GgmlType::F32, shape);
    }
    let mut random = Random(7);
    let mut data = writer.write_header(Vec::new()).unwrap();
    for (_, shape) in &tensors {
        let bytes: Vec<u8> = (0..shape.iter().product::<u64>())
            .flat_map(|_| (random.next() as u32 | 1).to_le_bytes())
            .collect();
        data.tensor(&bytes).unwrap();
    }
    data.finish().unwrap()
}

/// Numbers that are the same in every run.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}
