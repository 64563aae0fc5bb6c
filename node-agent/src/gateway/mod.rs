//! The OpenAI-compatible HTTP API of rank 0: which routes exist, who may call them, and how their answers look.
//! It turns bodies into [`crate::generation::GenerationRequest`]s and events into JSON. It does not compute, sample,
//! queue or know of members beyond the [`crate::generation::RingStatus`] that it shows.
//!
//! It listens from the start, before the model file is open and before a token went round: the model list and the
//! probes answer at once, the generation routes answer 503 with `Retry-After` until the ring is ready.

mod answer;
mod auth;
mod batch;
mod chat;
mod chat_completions;
mod chunks;
mod completions;
mod conversation;
mod embeddings;
mod fill_in;
mod grammar;
mod in_flight;
mod infill;
mod intake;
mod key_account;
mod limits;
mod logprobs;
mod made_once;
mod messages;
mod metrics;
mod models;
mod ollama;
mod ollama_embed;
mod openai_error;
mod page;
mod probes;
mod prompts;
mod recent;
mod request;
mod request_id;
mod rerank;
mod responses;
mod said;
mod stream;
mod tokenization;
mod tools;
mod traced;
mod turns;

use std::future::Future;
use std::sync::Arc;

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use prima_crds::v1alpha1::api_keys::ApiKeys;
use prima_text::{
    ChatTemplate, Constraint, Grammar, GrammarError, GrammarReader, RankTemplate, Tokenizer,
};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::generation::{Generator, Readiness, SubmitError};

use self::auth::Access;
use self::intake::Intake;
pub use self::limits::Limits;
use self::made_once::MadeOnce;
use self::metrics::Metrics;
use self::models::ModelCard;
use self::openai_error::ApiError;
use self::said::Said;

/// What the person who starts the server decides.
#[derive(Clone, Debug)]
pub struct GatewayOptions {
    /// The name under which clients find the model.
    pub model_name: String,
    /// Of its file.
    pub model_bytes: i64,
    /// Whether a request may name any other model, too, and gets this one.
    pub any_model_name: bool,
    /// Any of these opens all that computes or tells of it. Empty: open to whoever reaches the listener.
    pub api_keys: Vec<String>,
    /// As `api_keys`, for keys that this process need not know: their SHA-256 in hexadecimal.
    pub api_key_sha256: Vec<String>,
    /// Keys that come and go. Where there is such a list, a key is asked for even while it is empty.
    pub named_api_keys: Option<watch::Receiver<ApiKeys>>,
    /// Web origins (`https://chat.example`) whose pages may call this server, beside its own page and pages served
    /// from localhost; `*` allows every origin.
    pub cors_origins: Vec<String>,
}

/// What turns a client's text into tokens and back; known once the model file is open.
pub struct ModelText {
    pub tokenizer: Tokenizer,
    /// `None`: the model was not trained for chat, or its file carries no template.
    pub chat_template: Option<ChatTemplate>,
    /// `None`: the model was not trained to rank texts.
    pub rank_template: Option<RankTemplate>,
    /// Tokens of a prompt and its answer together.
    pub context_length: usize,
    /// The family, as the model's file names it.
    pub architecture: String,
    grammars: MadeOnce<Result<GrammarReader, GrammarError>>,
}

impl ModelText {
    pub fn new(
        tokenizer: Tokenizer,
        chat_template: Option<ChatTemplate>,
        rank_template: Option<RankTemplate>,
        context_length: usize,
        architecture: String,
    ) -> Self {
        Self {
            tokenizer,
            chat_template,
            rank_template,
            context_length,
            architecture,
            grammars: MadeOnce::new(),
        }
    }

    /// What holds an answer to a grammar that `field` asks for. The first request takes some of a second longer.
    fn constraint(&self, grammar: Grammar, field: &str) -> Result<Constraint, ApiError> {
        let refused = |error: &GrammarError| refused_grammar(field, error);
        let reader = self
            .grammars
            .get_or_make(|| GrammarReader::new(&self.tokenizer));
        let reader = reader.as_ref().map_err(refused)?;
        reader.read(grammar).map_err(|error| refused(&error))
    }

    fn context_exceeded(&self) -> ApiError {
        let context = self.context_length;
        SubmitError::ContextExceeded { context }.into()
    }
}

/// No answer can be held to what `field` asks for.
fn refused_grammar(field: &str, error: &GrammarError) -> ApiError {
    ApiError::invalid(field, format!("{field}: {error}"))
}

#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    #[error(
        "an API key must be 1 to {} visible ASCII characters, but number {number} is not (an empty variable?)",
        auth::MAX_KEY_BYTES
    )]
    ApiKey { number: usize },
    #[error(
        "`{origin}` is no web origin; write it as scheme://host or scheme://host:port, or `*` for every origin"
    )]
    CorsOrigin { origin: String },
    #[error("reading the address that the HTTP server listens on")]
    ListenAddress(#[source] std::io::Error),
    #[error("starting the threads that read requests")]
    Threads(#[source] std::io::Error),
}

/// Serves HTTP on `listener` until `shutdown` completes and the requests in flight at that time are answered; the
/// caller limits how long that may take. `text` may hold `None` until the model file is open.
pub async fn serve(
    listener: TcpListener,
    options: GatewayOptions,
    generator: Generator,
    text: watch::Receiver<Option<Arc<ModelText>>>,
    limits: Limits,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), GatewayError> {
    let address = listener.local_addr().map_err(GatewayError::ListenAddress)?;
    let access = Access::new(&options, address.ip().is_loopback())?;
    let gateway = Gateway(Arc::new(Shared {
        metrics: Metrics::new(&options.model_name),
        model: ModelCard::new(
            options.model_name,
            options.model_bytes,
            options.any_model_name,
        ),
        access,
        intake: Intake::new(limits.clone())?,
        said: Said::default(),
        generator,
        text,
    }));
    let limits = limits.of_connections();
    prima_connections::serve(listener, router(gateway), &limits, shutdown).await;
    Ok(())
}

/// What every handler shares.
#[derive(Clone)]
struct Gateway(Arc<Shared>);

struct Shared {
    model: ModelCard,
    access: Access,
    intake: Intake,
    said: Said,
    metrics: Metrics,
    generator: Generator,
    text: watch::Receiver<Option<Arc<ModelText>>>,
}

impl Gateway {
    /// The tokenizer and chat template once the ring can serve, else why it cannot.
    fn ready(&self) -> Result<Arc<ModelText>, ApiError> {
        let status = self.0.generator.status();
        // Whoever would answer has gone.
        if status.has_changed().is_err() {
            return Err(ApiError::RingFailed {
                reason: "its decoding has ended".to_owned(),
            });
        }
        match &status.borrow().readiness {
            Readiness::Loading(awaited) => {
                return Err(ApiError::Loading {
                    awaited: awaited.clone(),
                });
            }
            Readiness::Failed(reason) => {
                return Err(ApiError::RingFailed {
                    reason: reason.clone(),
                });
            }
            Readiness::Ready => {}
        }
        let text = self.0.text.borrow().clone();
        text.ok_or_else(|| ApiError::Loading {
            awaited: "its vocabulary".to_owned(),
        })
    }
}

/// A refusal in the words of the API that the path belongs to.
fn refusal(path: &str, error: ApiError) -> Response {
    match path.trim_start_matches("/v1") {
        path if path.starts_with("/api/") => ollama::refusal(error),
        path if path.starts_with("/messages") => messages::refusal(error),
        _ => error.into_response(),
    }
}

fn router(gateway: Gateway) -> Router {
    let cors = gateway.0.access.cors();
    // Some clients leave the version out.
    let versioned = Router::new()
        .route("/models", get(models::list))
        .route("/models/{*id}", get(models::get))
        .route("/chat/completions", post(chat_completions::create))
        .route("/completions", post(completions::create))
        .route("/embeddings", post(embeddings::create))
        .route("/rerank", post(rerank::create))
        .route("/reranking", post(rerank::create))
        .route("/responses", post(responses::create))
        .route("/responses/{id}", get(responses::get))
        .route("/messages", post(messages::create))
        .route("/messages/count_tokens", post(messages::count_tokens));
    let protected = Router::new()
        .merge(versioned.clone())
        .nest("/v1", versioned)
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/api/embed", post(ollama_embed::create))
        .route("/api/embeddings", post(ollama_embed::create_one))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::ps))
        .route("/api/show", post(ollama::show))
        .route("/api/pull", post(ollama::pull))
        .route("/api/version", get(ollama::version))
        .route("/infill", post(infill::create))
        .route("/tokenize", post(tokenization::tokenize))
        .route("/detokenize", post(tokenization::detokenize))
        .route("/apply-template", post(tokenization::apply_template))
        .route("/ring", get(probes::ring))
        .method_not_allowed_fallback(openai_error::method_not_allowed)
        // Only whoever may call may have it traced.
        .layer(from_fn(traced::trace))
        .layer(from_fn_with_state(gateway.clone(), auth::require_key));
    Router::new()
        .route("/", get(page::chat))
        .route("/page/{part}", get(page::part))
        .route("/health", get(probes::health))
        .route("/livez", get(probes::live))
        .route("/readyz", get(probes::health))
        .route("/metrics", get(metrics::scrape))
        .method_not_allowed_fallback(openai_error::method_not_allowed)
        .merge(protected)
        .fallback(openai_error::no_such_route)
        .layer(from_fn_with_state(
            gateway.clone(),
            auth::require_known_host,
        ))
        .layer(cors)
        .layer(from_fn_with_state(gateway.clone(), metrics::count_request))
        .layer(from_fn(request_id::attach))
        .with_state(gateway)
}
