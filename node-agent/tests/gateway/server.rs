//! A gateway on a real listener whose ring is the test: it receives the submissions and says what comes back.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use prima_gguf::{Array, Metadata, Value};
use prima_node_agent::gateway::{self, GatewayError, GatewayOptions, Limits, ModelText};
use prima_node_agent::generation::{
    Drafts, FinishReason, GenerationError, GenerationEvent, GenerationRequest, Generator, KvUse,
    MemberTotals, Readiness, RingStatus, SubmitError, TokenLogprob, Usage,
};
use prima_node_agent::ring::HopTiming;
use prima_text::{ChatTemplate, RankTemplate, Tokenizer};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

pub const MODEL: &str = "household/test-model";
pub const MODEL_BYTES: i64 = 1234;

pub struct Server {
    pub address: SocketAddr,
    pub status: watch::Sender<RingStatus>,
    pub text: watch::Sender<Option<Arc<ModelText>>>,
    pub serving: JoinHandle<Result<(), GatewayError>>,
    pub shutdown: Option<oneshot::Sender<()>>,
    submissions: mpsc::Receiver<prima_node_agent::generation::Submission>,
}

/// A request that the ring accepted, answered by the test.
pub struct Accepted {
    pub request: GenerationRequest,
    events: mpsc::Sender<GenerationEvent>,
}

impl Server {
    /// Ready to serve.
    pub async fn start() -> Self {
        Self::start_with(options(), Some(text(Some(TEMPLATE)))).await
    }

    pub async fn start_with(options: GatewayOptions, text: Option<ModelText>) -> Self {
        Self::start_within(Limits::default(), options, text).await
    }

    /// Ready to serve, within these limits.
    pub async fn limited(limits: Limits) -> Self {
        Self::start_within(limits, options(), Some(text(Some(TEMPLATE)))).await
    }

    async fn start_within(
        limits: Limits,
        options: GatewayOptions,
        text: Option<ModelText>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (submit, submissions) = mpsc::channel(8);
        let (status, status_receiver) = watch::channel(ring(Readiness::Ready));
        let (text, text_receiver) = watch::channel(text.map(Arc::new));
        let (shutdown, shut_down) = oneshot::channel::<()>();
        let generator = Generator::new(submit, status_receiver);
        let serving = tokio::spawn(gateway::serve(
            listener,
            options,
            generator,
            text_receiver,
            limits,
            async {
                let _ = shut_down.await;
            },
        ));
        Self {
            address,
            status,
            text,
            serving,
            shutdown: Some(shutdown),
            submissions,
        }
    }

    pub async fn accept(&mut self) -> Accepted {
        let submission = soon(self.submissions.recv()).await.unwrap();
        submission.accepted.send(Ok(())).unwrap();
        Accepted {
            request: submission.request,
            events: submission.events,
        }
    }

    pub async fn refuse(&mut self, error: SubmitError) {
        let submission = soon(self.submissions.recv()).await.unwrap();
        submission.accepted.send(Err(error)).unwrap();
    }

    /// Refuses all that is submitted, however long it is in coming; to be run beside what asks.
    pub async fn refuse_all(&mut self, error: SubmitError) -> std::convert::Infallible {
        loop {
            let submission = self.submissions.recv().await.unwrap();
            submission.accepted.send(Err(error.clone())).unwrap();
        }
    }

    pub fn nothing_submitted(&mut self) -> bool {
        self.submissions.try_recv().is_err()
    }
}

impl Accepted {
    pub async fn token(&self, choice: usize, text: &str) {
        self.token_with(choice, text, None).await;
    }

    pub async fn token_with(&self, choice: usize, text: &str, logprob: Option<TokenLogprob>) {
        let token = text.bytes().next().map_or(0, id_of);
        let text = text.to_string();
        self.send(GenerationEvent::Token {
            choice,
            token,
            text,
            logprob,
        })
        .await;
    }

    pub async fn finish(&self, choice: usize, reason: FinishReason, text: &str) {
        let text = text.to_string();
        self.send(GenerationEvent::Finished {
            choice,
            reason,
            text,
        })
        .await;
    }

    /// A fifth of the prompt had been computed before.
    pub async fn usage(&self, prompt_tokens: usize, completion_tokens: usize) {
        self.send(GenerationEvent::Usage(Usage {
            prompt_tokens,
            cached_tokens: prompt_tokens / 5,
            completion_tokens,
            reasoning_tokens: 0,
            drafts: Drafts {
                drafted: 2,
                accepted: 1,
            },
            prompt_seconds: 0.5,
            completion_seconds: 2.0,
        }))
        .await;
    }

    /// The vector of the prompt.
    pub async fn embedding(&self, vector: &[f32]) {
        self.send(GenerationEvent::Embedding(vector.to_vec())).await;
        self.usage(self.request.prompt.len(), 0).await;
    }

    /// How well what the prompt compares goes together.
    pub async fn score(&self, score: f32) {
        self.send(GenerationEvent::Score(score)).await;
        self.usage(self.request.prompt.len(), 0).await;
    }

    pub async fn fail(&self, error: GenerationError) {
        self.send(GenerationEvent::Failed(error)).await;
    }

    /// One token after the other until the gateway has let go of the request.
    pub async fn flood(&self, text: &str) {
        let token = || GenerationEvent::Token {
            choice: 0,
            token: text.bytes().next().map_or(0, id_of),
            text: text.to_string(),
            logprob: None,
        };
        soon(async { while self.events.send(token()).await.is_ok() {} }).await;
    }

    /// Returns once the gateway has let go of the request.
    pub async fn cancelled(&self) {
        soon(self.events.closed()).await;
    }

    /// The prompt as text.
    pub fn prompt(&self) -> String {
        text(None).tokenizer.decode(&self.request.prompt)
    }

    async fn send(&self, event: GenerationEvent) {
        self.events.send(event).await.unwrap();
    }
}

pub fn options() -> GatewayOptions {
    GatewayOptions {
        model_name: MODEL.into(),
        model_bytes: MODEL_BYTES,
        any_model_name: false,
        api_keys: Vec::new(),
        api_key_sha256: Vec::new(),
        named_api_keys: None,
        cors_origins: Vec::new(),
    }
}

/// Writes `role: content` lines, and refuses results of tools as real templates do what they were not trained for.
pub const TEMPLATE: &str = "{# <tool_call> #}{% for message in messages %}\
    {% if message['role'] == 'tool' %}{{ raise_exception('no tools, please') }}{% endif %}\
    {{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}";

/// A SentencePiece vocabulary of three special tokens, the 256 bytes and the space.
pub fn text(chat_template: Option<&str>) -> ModelText {
    let template = chat_template.map(|text| ("tokenizer.chat_template", text));
    text_with(template.as_slice(), &[])
}

/// With these templates, and with control tokens that follow the others.
pub fn text_with(templates: &[(&str, &str)], controls: &[&str]) -> ModelText {
    const NORMAL: i32 = 1;
    const UNKNOWN: i32 = 2;
    const CONTROL: i32 = 3;
    const BYTE: i32 = 6;
    let mut tokens = vec![
        ("<unk>".to_string(), UNKNOWN),
        ("<s>".into(), CONTROL),
        ("</s>".into(), CONTROL),
    ];
    tokens.extend((0..=255).map(|byte| (format!("<0x{byte:02X}>"), BYTE)));
    // SentencePiece writes a space so.
    tokens.push(("▁".into(), NORMAL));
    tokens.extend(controls.iter().map(|name| (name.to_string(), CONTROL)));
    let (tokens, kinds): (Vec<_>, Vec<_>) = tokens.into_iter().unzip();
    let scores = vec![0.0; tokens.len()];
    let mut entries = vec![
        (
            "tokenizer.ggml.model".to_string(),
            Value::String("llama".into()),
        ),
        ("tokenizer.ggml.tokens".into(), tokens.into()),
        (
            "tokenizer.ggml.scores".into(),
            Value::Array(Array::F32(scores)),
        ),
        (
            "tokenizer.ggml.token_type".into(),
            Value::Array(Array::I32(kinds)),
        ),
        ("tokenizer.ggml.bos_token_id".into(), Value::U32(1)),
        ("tokenizer.ggml.eos_token_id".into(), Value::U32(2)),
        ("tokenizer.ggml.add_space_prefix".into(), Value::Bool(false)),
    ];
    for (key, template) in templates {
        entries.push((key.to_string(), Value::String(template.to_string())));
    }
    let metadata = Metadata::new("test model", entries).unwrap();
    let tokenizer = Tokenizer::from_gguf(&metadata).unwrap();
    let chat_template = ChatTemplate::from_gguf(&metadata, &tokenizer).unwrap();
    let rank_template = RankTemplate::from_gguf(&metadata).unwrap();
    ModelText::new(
        tokenizer,
        chat_template,
        rank_template,
        CONTEXT,
        "llama".into(),
    )
}

/// Tokens of the context.
pub const CONTEXT: usize = 1000;

pub const VOCABULARY: u32 = 3 + 256 + 1;

pub fn id_of(byte: u8) -> u32 {
    u32::from(byte) + 3
}

pub fn ring(readiness: Readiness) -> RingStatus {
    let member = |name: &str, windows, seconds| MemberTotals {
        name: name.into(),
        address: "127.0.0.1:7000".into(),
        windows,
        frames: 12,
        network_seconds: seconds / 2.0,
        timing: HopTiming {
            rank: 0,
            compute_ns: (seconds * 1e9) as u64,
            wait_ns: 250_000_000,
            disk_ns: 500_000_000,
            read_bytes: 1 << 20,
            kv_bytes: 2048,
            resident_bytes: 3 << 20,
            streamed_bytes: 1 << 18,
            memory_pressure_ppm: 250_000,
            expert_hits: 0,
            expert_misses: 0,
            gpu_copied_bytes: 0,
            missing_experts_ppm: 0,
        },
        planned_read_bytes: Some(1 << 17),
        planned_kv_bytes: Some(1 << 19),
    };
    RingStatus {
        readiness,
        fails_at: None,
        missed_by: None,
        silent: None,
        late: false,
        looked: None,
        plan_generation: 3,
        rounds: 1,
        members: vec![
            member("desk\"top", vec![(0, 20)], 4.0),
            member("laptop", vec![(20, 30)], 8.0),
        ],
        running_requests: 2,
        waiting_requests: 1,
        kv_bytes: 4096,
        kv: KvUse {
            planned_positions: 8192,
            used_positions: 640,
            kept_positions: 512,
            sessions: 3,
        },
        drafts: Drafts {
            drafted: 60,
            accepted: 45,
        },
        expert_miss_percent: None,
    }
}

/// Guards a test against hanging; it never decides a test that works.
pub async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(300), future)
        .await
        .expect("nothing happened for 300 s")
}
