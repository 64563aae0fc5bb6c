//! Rings for tests: a made-up model, a plan cut anywhere, members on free ports.

use std::fmt::Debug;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prima_crds::v1alpha1::ring_plan::{PlannedModel, RingPlanSpec};
use prima_engine::{KvFormat, Model};
use prima_gguf::writer::GgufWriter;
use prima_gguf::{Array, Value};
use prima_node_agent::memory_watch::MemoryLimits;
use prima_node_agent::ring::{Identity, Member, MemberOptions, RingClient, SessionId};
use tempfile::TempDir;

use prima_test_models::options::Variant;
use prima_test_models::{MadeUpModel, Random, Runner};

pub const CONTEXT: usize = 512;
pub const GENERATION: i64 = 7;
/// Of the document of an encrypted ring's plan.
pub const UID: &str = "1c4e2f0a-plan";

/// A model in a folder that lives as long as this.
pub struct ModelFile {
    _folder: TempDir,
    pub path: PathBuf,
    pub model: Model,
}

impl ModelFile {
    pub fn made_up() -> Self {
        Self::of(MadeUpModel::default())
    }

    pub fn of(made_up: MadeUpModel) -> Self {
        Self::pooled(made_up, None)
    }

    /// With this `pooling_type` in its header.
    pub fn pooled(made_up: MadeUpModel, pooling: Option<u32>) -> Self {
        let pooling = pooling.map(|pooling| ("pooling_type", pooling.into()));
        Self::variant(&Variant {
            name: made_up.architecture,
            model: made_up,
            keys: pooling.into_iter().collect(),
            change: |_| {},
        })
    }

    /// With what only some files of its family have.
    pub fn variant(variant: &Variant) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = Self::write(variant, folder.path());
        let model = Model::open(&path).unwrap();
        Self {
            _folder: folder,
            path,
            model,
        }
    }

    /// Into `folder`; returns the file.
    pub fn write(variant: &Variant, folder: &Path) -> PathBuf {
        let path = folder.join("made-up.gguf");
        variant.write(&path, tokenizer);
        path
    }

    pub fn layers(&self) -> usize {
        self.model.spec().layers.len()
    }

    /// What one process computes without any ring, in one pass: the logits behind each of `tokens`.
    pub fn logits(&self, tokens: &[u32]) -> Vec<Vec<f32>> {
        self.logits_with(KvFormat::F16, tokens)
    }

    /// The same, with a KV cache of another format.
    pub fn logits_with(&self, kv_format: KvFormat, tokens: &[u32]) -> Vec<Vec<f32>> {
        let whole = Runner {
            kv_format,
            ..Runner::split(&self.model, &[self.layers()], 2)
        };
        whole.logits(&mut whole.kv_cache(), tokens)
    }
}

/// Every token one character, but for one that is two and the last, which ends a text.
fn tokenizer(writer: &mut GgufWriter) {
    let characters = (b'!'..=b'}').map(|byte| char::from(byte).to_string());
    let tokens: Vec<String> = characters
        .chain(["Ġ", "ab", "<end>"].map(String::from))
        .collect();
    let kinds: Vec<i32> = (0..tokens.len())
        .map(|id| if id == 95 { 3 } else { 1 })
        .collect();
    writer.metadata("tokenizer.ggml.model", "gpt2");
    writer.metadata("tokenizer.ggml.pre", "gpt-2");
    writer.metadata("tokenizer.ggml.tokens", tokens);
    writer.metadata("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)));
    writer.metadata("tokenizer.ggml.merges", vec!["a b".to_owned()]);
    writer.metadata("tokenizer.ggml.eos_token_id", 95u32);
}

/// An address of this machine that only this process uses: nobody else is given the port of a member that is gone for a while. (All of
/// 127.0.0.0/8 is this machine on Linux.)
fn own_address() -> Ipv4Addr {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    match cfg!(target_os = "linux") {
        true => Ipv4Addr::new(127, 128 | high, middle, low),
        false => Ipv4Addr::LOCALHOST,
    }
}

/// A plan over free ports, and the listeners that hold them.
pub struct Planned {
    pub plan: RingPlanSpec,
    pub listeners: Vec<TcpListener>,
}

impl Planned {
    /// Names a new key for each member in the plan.
    pub fn give_keys(&mut self) -> Vec<Identity> {
        let members = self.plan.members.iter_mut();
        let identities = members.map(|member| {
            let identity = Identity::generate().unwrap().0;
            member.public_key_sha256 = Some(identity.fingerprint().to_string());
            identity
        });
        identities.collect()
    }
}

/// `ends`: where each window ends, in the order in which a token meets them (round by round, member by member).
pub fn plan(file: &Path, layers: usize, members: usize, ends: &[usize]) -> Planned {
    let listeners: Vec<_> = (0..members)
        .map(|_| TcpListener::bind((own_address(), 0)).unwrap())
        .collect();
    let addresses: Vec<_> = listeners
        .iter()
        .map(|listener| listener.local_addr().unwrap().to_string())
        .collect();
    let ends: Vec<i32> = ends.iter().map(|&end| end as i32).collect();
    let size = file.metadata().unwrap().len() as i64;
    let model = PlannedModel::new("made-up", file.display().to_string(), size, layers as i32);
    let plan = RingPlanSpec {
        generation: GENERATION,
        max_concurrent_requests: 4,
        kv_contexts: 2,
        ..RingPlanSpec::cut(model, CONTEXT as i32, &addresses, &ends)
    };
    plan.validate().unwrap();
    Planned { plan, listeners }
}

/// A running ring.
pub struct Ring {
    pub members: Vec<Member>,
    pub plan: Arc<RingPlanSpec>,
}

impl Ring {
    pub fn start(model: &Model, planned: Planned) -> (Self, RingClient) {
        Self::start_each(planned, |plan, rank, listener| {
            member(model, plan, rank, listener)
        })
    }

    /// Over TLS: each member has a key of its own, which the plan names.
    pub fn start_encrypted(model: &Model, mut planned: Planned) -> (Self, RingClient) {
        let identities = planned.give_keys();
        Self::start_each(planned, |plan, rank, listener| {
            keyed_member(model, plan, rank, listener, &identities[rank])
        })
    }

    pub fn start_each(
        planned: Planned,
        start: impl Fn(&Arc<RingPlanSpec>, usize, TcpListener) -> Member,
    ) -> (Self, RingClient) {
        let plan = Arc::new(planned.plan);
        let listeners = planned.listeners.into_iter().enumerate();
        let mut members: Vec<Member> = listeners
            .map(|(rank, listener)| start(&plan, rank, listener))
            .collect();
        let client = members[0].take_client().unwrap();
        (Self { members, plan }, client)
    }

    pub fn sessions(&self) -> Vec<usize> {
        self.members.iter().map(Member::sessions).collect()
    }
}

/// Opens an empty session.
pub async fn open(client: &mut RingClient) -> SessionId {
    let session = new_session();
    client.create(session).await.unwrap();
    session
}

/// Opens a session that continues where `parent` stands.
pub async fn fork(client: &mut RingClient, parent: SessionId) -> SessionId {
    let child = new_session();
    client.fork(parent, child).await.unwrap();
    child
}

/// Ids grow; those of several rings may share one count.
fn new_session() -> SessionId {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

pub fn member(
    model: &Model,
    plan: &Arc<RingPlanSpec>,
    rank: usize,
    listener: TcpListener,
) -> Member {
    start(model, plan, rank, listener, (None, None))
}

/// A member of a plan whose members have keys.
pub fn keyed_member(
    model: &Model,
    plan: &Arc<RingPlanSpec>,
    rank: usize,
    listener: TcpListener,
    identity: &Identity,
) -> Member {
    let known_by = (Some(UID.to_owned()), Some(identity.clone()));
    start(model, plan, rank, listener, known_by)
}

fn start(
    model: &Model,
    plan: &Arc<RingPlanSpec>,
    rank: usize,
    listener: TcpListener,
    (uid, identity): (Option<String>, Option<Identity>),
) -> Member {
    Member::start(MemberOptions {
        plan: plan.clone(),
        uid,
        identity,
        rank,
        model: model.clone(),
        threads: 1,
        listener,
        memory: MemoryLimits::default(),
        streaming: false,
        routing_trace: None,
    })
    .unwrap()
}

/// Tokens of the made-up vocabulary that look like no pattern.
pub fn tokens(count: usize) -> Vec<u32> {
    let mut random = Random(count as u64);
    (0..count).map(|_| random.within(0..96) as u32).collect()
}

pub fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// No test waits for ever; far longer than anything here takes, on a slow machine that others use, too.
const PATIENCE: Duration = Duration::from_secs(300);

pub async fn in_time<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what)
        .await
        .expect("nothing may hang")
}

/// The same of one among many, which has a name.
pub async fn named_in_time<T>(name: impl Debug, what: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(PATIENCE, what).await;
    done.unwrap_or_else(|_| panic!("nothing may hang, and {name:?} does"))
}

/// Waits until a condition holds that nothing signals.
pub async fn until(what: &str, condition: impl Fn() -> bool) {
    let waited = tokio::time::timeout(PATIENCE, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(waited.await.is_ok(), "never happened: {what}");
}
