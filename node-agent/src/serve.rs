//! `prima-node-agent serve`: one member of a ring, from its plan to its end. Decides the order of starting (on rank 0
//! HTTP first, so that clients hear that the model is loading) and of ending (what runs is finished, within a limit).

use std::io::{self, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use prima_crds::quantity::Quantity;
use prima_crds::v1alpha1::ring_plan::{PlannedDraft, RingPlanSpec};
use prima_engine::{Compute, EngineError, Gpu, Model};
use prima_member_process::{ALIVE, ALIVE_INTERVAL, JOINED, cut_off_line, without_gpu_line};
use prima_text::{ChatTemplate, ChatTemplateError, RankTemplate, Tokenizer, TokenizerError};
use prima_traces::Traces;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::api_key_file::{self, ApiKeyFileError};
use crate::decode::{self, Decode, DecodeOptions, DraftModel, DraftModelError, DraftThread};
use crate::gateway::{self, GatewayError, GatewayOptions, Limits, ModelText};
use crate::generation::{Generator, RingStatus, Submission};
use crate::hidden::{self, HideError};
use crate::memory_watch::MemoryLimits;
use crate::plan_source::{self, MemberPlan, PlanSourceError};
use crate::ring::{Identity, IdentityError, Member, MemberError, MemberOptions};
use crate::stop_signal::StopSignal;

#[derive(clap::Args)]
pub struct ServeArgs {
    /// The ring's plan: a RingPlan document in YAML
    #[arg(long, value_name = "FILE")]
    plan: PathBuf,
    /// Which of the plan's members this process is
    #[arg(long, value_name = "NAME")]
    member: String,
    /// Compute threads [default: all cores; a member that waits uses none]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Where the ring's predecessor connects [default: the member's address in the plan]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// The key of this machine's agent, where the plan's members have keys
    #[arg(long, value_name = "FILE")]
    identity: Option<PathBuf>,
    /// Whatever model a request names, answer with this one
    #[arg(long)]
    any_model_name: bool,
    /// Where rank 0 serves HTTP; other members ignore it
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8080")]
    http: SocketAddr,
    /// Ask HTTP clients for this key; may be repeated
    #[arg(
        long = "api-key",
        value_name = "KEY",
        env = "PRIMA_API_KEY",
        hide_env_values = true
    )]
    api_keys: Vec<String>,
    /// Ask HTTP clients for one of the keys in this file, which the agent writes; read again when it changes
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Memory that stays free for the machine's owner, such as 2Gi [default: 5 % of what is available at the start]
    #[arg(long, value_name = "SIZE")]
    reserve_memory: Option<Quantity>,
    /// Memory that weights take at most, such as 8Gi [default: what is available, less the reserve]
    #[arg(long, value_name = "SIZE")]
    weights_memory: Option<Quantity>,
    /// Leave all weights to the system's page cache, even when they do not fit into memory
    #[arg(long, conflicts_with_all = ["reserve_memory", "weights_memory"])]
    no_streaming: bool,
    /// Compute one token at a time: no drafts of what may follow
    #[arg(long)]
    no_speculation: bool,
    /// Send no draft before the one before it is verified
    #[arg(long, conflicts_with = "no_speculation")]
    no_run_ahead: bool,
    /// Seconds that requests wait for a member that was lost, where somebody starts it again; 0: they fail
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    outlast_losses: u64,
    /// Add to a file in this folder, named after the member, which experts each pass needs in each layer
    #[arg(long, value_name = "FOLDER", env = "PRIMA_ROUTING_TRACE")]
    routing_trace: Option<PathBuf>,
    /// A folder that this process must not read; nor may it look into other processes then (on Linux)
    #[arg(long, value_name = "FOLDER")]
    hide: Option<PathBuf>,
    /// Say on stdout, every few seconds, that this process is alive
    #[arg(long)]
    say_alive: bool,
    /// End when the process with this id, which started this one, ends for any reason (on Linux)
    #[arg(long, value_name = "PID")]
    exit_with_parent: Option<i32>,
    /// Let web pages of this origin call the HTTP endpoint (`*`: any); may be repeated
    #[arg(long = "cors-origin", value_name = "ORIGIN")]
    cors_origins: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(transparent)]
    Plan(#[from] PlanSourceError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    ApiKeyFile(#[from] ApiKeyFileError),
    #[error("the plan asks HTTP clients for API keys; --api-key-file names the file with them")]
    NoApiKeyFile,
    #[error("cannot listen on {address} ({what}); is another process using it?")]
    Listen {
        address: String,
        what: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("--exit-with-parent {parent}: that process has ended, or did not start this one")]
    ParentEnded { parent: i32 },
    #[error("--hide")]
    Hide(#[from] HideError),
    #[error("cannot start")]
    Start(#[source] io::Error),
    #[error("cannot read the model's tokenizer")]
    Tokenizer(#[source] TokenizerError),
    #[error("cannot read the model's chat template")]
    ChatTemplate(#[source] ChatTemplateError),
    #[error("cannot read the model's template for ranking")]
    RankTemplate(#[source] prima_gguf::GgufError),
    #[error("cannot use the draft model {file}")]
    DraftModel {
        file: String,
        #[source]
        source: DraftModelError,
    },
    #[error("cannot run this member")]
    Member(#[source] Arc<MemberError>),
    #[error("decoding has ended, so nothing can be answered")]
    Decoding(#[source] io::Error),
    #[error("cannot serve HTTP")]
    Gateway(#[source] GatewayError),
}

impl ServeError {
    /// What became of the machine's GPU, if that is why.
    fn without_gpu(&self) -> Option<&EngineError> {
        match self {
            Self::Member(error) => error.without_gpu(),
            Self::DraftModel {
                source: DraftModelError::Engine(error),
                ..
            } => Some(&**error).filter(|error| error.is_without_gpu()),
            _ => None,
        }
    }
}

const DRAIN_INTERVAL: Duration = Duration::from_millis(50);
const LAST_WORD: Duration = Duration::from_secs(1);
/// When no pass has come for this long, or for the time of four tokens if that is longer, nothing runs.
const QUIET: Duration = Duration::from_secs(5);
/// Requests on their way from the gateway to `decode`, which answers each at once.
const SUBMISSIONS: usize = 64;

/// Runs the member until SIGTERM or SIGINT (`Ok`), or until it cannot go on.
pub fn run(args: ServeArgs) -> Result<(), ServeError> {
    if let Some(parent) = args.exit_with_parent {
        exit_with_parent(parent)?;
    }
    // Before there are other threads, which it would not bind.
    if let Some(folder) = &args.hide {
        hidden::hide(folder)?;
    }
    // For HTTP and signals; the ring has its own thread.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(ServeError::Start)?;
    if args.say_alive {
        runtime.spawn(say_alive());
    }
    let result = runtime.block_on(async {
        // Often the variables are those of other programs.
        let traces = Traces::start("prima-member", &args.member).unwrap_or_else(|error| {
            tracing::warn!(
                "{}; requests are not traced",
                prima_crds::error_chain(&error)
            );
            None
        });
        let result = serve(args).await;
        if let Err(error) = &result
            && let Some(gpu) = error.without_gpu()
        {
            // Whoever started this process can go on without the GPU.
            let line = without_gpu_line(&prima_crds::error_chain(gpu));
            let _ = writeln!(io::stdout(), "{line}");
        }
        if let Some(Err(error)) = traces.as_ref().map(Traces::flush) {
            tracing::warn!(error, "some traces were not exported");
        }
        result
    });
    // What is still being opened or answered is not waited for.
    runtime.shutdown_background();
    result
}

/// For whoever started this process.
async fn say_alive() {
    loop {
        // Nobody may be listening any more.
        let _ = writeln!(io::stdout(), "{ALIVE}");
        tokio::time::sleep(ALIVE_INTERVAL).await;
    }
}

async fn serve(args: ServeArgs) -> Result<(), ServeError> {
    let mut stop = StopSignal::new().map_err(ServeError::Start)?;
    let MemberPlan { spec, uid, rank } = plan_source::read(&args.plan, &args.member)?;
    let plan = Arc::new(spec);
    // Read now: while this member runs, the agent may get another key.
    let identity = args.identity.as_deref().map(Identity::load).transpose()?;
    let address = args
        .listen
        .unwrap_or_else(|| plan.members[rank].address.clone());
    let listener = TcpListener::bind(&address).map_err(|source| ServeError::Listen {
        address,
        what: "address in the plan, or --listen",
        source,
    })?;
    let threads = args
        .threads
        .map_or_else(Compute::available_threads, usize::from);

    let mut front = match rank {
        0 => {
            // A ring that should ask for keys must not serve without.
            if plan.api_key_required && args.api_key_file.is_none() {
                return Err(ServeError::NoApiKeyFile);
            }
            let options = GatewayOptions {
                model_name: plan.model.name.clone(),
                model_bytes: plan.model.size_bytes,
                any_model_name: args.any_model_name,
                api_keys: args.api_keys,
                api_key_sha256: plan.api_key_sha256.clone(),
                named_api_keys: args.api_key_file.map(api_key_file::follow).transpose()?,
                cors_origins: args.cors_origins,
            };
            Some(Front::start(args.http, options, &plan).await?)
        }
        _ => None,
    };
    // On a GPU it takes no memory of the machine.
    let draft_here = rank == 0 && !plan.members[rank].draft_on_gpu;
    let draft = plan.draft.as_ref().filter(|_| draft_here);
    let memory = MemoryLimits {
        reserve_bytes: args.reserve_memory.map(Quantity::bytes),
        cap_bytes: args.weights_memory.map(Quantity::bytes),
        draft_bytes: draft.map_or(0, |draft| draft.memory_bytes as u64),
        members: plan.members[rank].members_on_machine as u64,
    };
    let streaming = !args.no_streaming;
    let routing_trace = args
        .routing_trace
        .map(|folder| folder.join(format!("{}.routing", args.member)));
    let decoding = DecodeOptions {
        speculate: !args.no_speculation,
        run_ahead: !args.no_run_ahead,
        outlast: Duration::from_secs(args.outlast_losses),
        ..DecodeOptions::default()
    };
    let opening = tokio::task::spawn_blocking({
        let (plan, front) = (
            plan.clone(),
            front.as_mut().and_then(|front| front.back.take()),
        );
        move || {
            let model = plan_source::open_model(&plan.model, plan.context_length as usize)?;
            let options = MemberOptions {
                plan,
                uid,
                identity,
                rank,
                model,
                threads,
                listener,
                memory,
                streaming,
                routing_trace,
            };
            open(options, front, decoding)
        }
    });
    let (member, mut decoding) = tokio::select! {
        opened = opening => opened.map_err(|panic| ServeError::Start(io::Error::other(panic)))??,
        () = stop.received() => return Ok(()),
    };
    // On stdout and in a fixed form: whoever started this process reads it.
    let _ = writeln!(io::stdout(), "{JOINED} as {} (rank {rank})", args.member);

    tokio::select! {
        biased;
        // Decoding ends with its member.
        error = member.ended() => return Err(ServeError::Member(error)),
        error = ended_unasked(&mut decoding) => {
            // A member that ends says why a moment later.
            let member = timeout(LAST_WORD, member.ended()).await;
            return Err(member.map_or(error, ServeError::Member));
        }
        error = Front::failed(&mut front) => return Err(error),
        () = stop.received() => {}
    }
    let limit = plan.drain_limit();
    tracing::info!(
        "asked to end: finishing what runs, for at most {} s; a second signal ends at once",
        limit.as_secs()
    );
    let quiet = QUIET.max(4 * plan.token_time());
    let status = front.as_ref().map(|front| front.status.clone());
    let drained = async {
        match front.take() {
            Some(front) => front.finish().await,
            // Sessions also stay for later requests; where none is in use, no activation comes.
            None => {
                while member.sessions() > 0 && member.idle_for() < quiet {
                    tokio::time::sleep(DRAIN_INTERVAL).await;
                }
            }
        }
    };
    tokio::select! {
        () = drained => return Ok(()),
        () = tokio::time::sleep(limit) => tracing::warn!("some requests did not finish in time"),
        () = stop.received() => {}
    }
    if let Some(status) = status {
        let status = status.borrow();
        let answers = status.running_requests + status.waiting_requests;
        if answers > 0 {
            // Whoever started this process counts them.
            let _ = writeln!(io::stdout(), "{}", cut_off_line(answers));
        }
    }
    Ok(())
}

/// Has the kernel kill this process when its parent ends, so that no agent outlives a killed `prima run`.
pub(crate) fn exit_with_parent(parent: i32) -> Result<(), ServeError> {
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| ServeError::Start(error.into()))?;
    // The parent may have ended before the kernel was asked.
    if rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(parent) {
        return Err(ServeError::ParentEnded { parent });
    }
    Ok(())
}

/// Rank 0's HTTP side.
struct Front {
    gateway: JoinHandle<Result<(), GatewayError>>,
    shutdown: oneshot::Sender<()>,
    status: watch::Receiver<RingStatus>,
    back: Option<Back>,
}

/// What rank 0's model side gets once it is open.
struct Back {
    submissions: mpsc::Receiver<Submission>,
    status: watch::Sender<RingStatus>,
    text: watch::Sender<Option<Arc<ModelText>>>,
}

impl Front {
    async fn start(
        address: SocketAddr,
        options: GatewayOptions,
        plan: &RingPlanSpec,
    ) -> Result<Self, ServeError> {
        let listener = tokio::net::TcpListener::bind(address)
            .await
            .map_err(|source| ServeError::Listen {
                address: address.to_string(),
                what: "--http",
                source,
            })?;
        let (sender, submissions) = mpsc::channel(SUBMISSIONS);
        let (status, seen) = watch::channel(decode::initial_status(plan));
        let (text, known) = watch::channel(None);
        let (shutdown, asked) = oneshot::channel();
        let gateway = tokio::spawn(gateway::serve(
            listener,
            options,
            Generator::new(sender, seen.clone()),
            known,
            Limits::of_context(plan.context_length as usize),
            async move {
                // Also when this process ends without asking.
                let _ = asked.await;
            },
        ));
        Ok(Self {
            gateway,
            shutdown,
            status: seen,
            back: Some(Back {
                submissions,
                status,
                text,
            }),
        })
    }

    /// Waits until HTTP cannot be served any more; for ever where there is no HTTP.
    async fn failed(front: &mut Option<Self>) -> ServeError {
        let Some(front) = front else {
            return std::future::pending().await;
        };
        match (&mut front.gateway).await {
            Ok(Ok(())) => ServeError::Start(io::Error::other("the HTTP server ended unasked")),
            Ok(Err(error)) => ServeError::Gateway(error),
            Err(panic) => ServeError::Start(io::Error::other(panic)),
        }
    }

    /// Takes no more requests and answers those that run.
    async fn finish(self) {
        let _ = self.shutdown.send(());
        if let Ok(Err(error)) = self.gateway.await {
            tracing::warn!(%error, "HTTP did not end cleanly");
        }
    }
}

/// Rank 0's decoding.
type Decoding = Option<JoinHandle<()>>;

/// Waits until decoding has ended, which it does not by itself; for ever where there is none.
async fn ended_unasked(decoding: &mut Decoding) -> ServeError {
    let Some(decoding) = decoding else {
        return std::future::pending().await;
    };
    let why = match decoding.await {
        Ok(()) => io::Error::other("it ended unasked"),
        Err(panic) => io::Error::other(panic),
    };
    ServeError::Decoding(why)
}

/// Starts the member, and on rank 0 the decoding behind `back`.
fn open(
    options: MemberOptions,
    back: Option<Back>,
    decode_options: DecodeOptions,
) -> Result<(Member, Decoding), ServeError> {
    let text = match &back {
        Some(_) => Some(model_text(&options)?),
        None => None,
    };
    let plan = options.plan.clone();
    let model = options.model.clone();
    let threads = options.threads;
    let mut member = Member::start(options).map_err(|error| ServeError::Member(Arc::new(error)))?;
    let mut decoding = None;
    if let (Some(back), Some(text), Some(client)) = (back, text, member.take_client()) {
        let tokenizer = text.tokenizer.clone();
        back.text.send_replace(Some(Arc::new(text)));
        let draft_model = match &plan.draft {
            Some(draft) if decode_options.speculate => {
                let on_gpu = plan.members[0].draft_on_gpu;
                let gpu = member.gpu().filter(|_| on_gpu);
                draft_thread(draft, &plan, &model, threads, gpu)?
            }
            _ => None,
        };
        let options = DecodeOptions {
            draft_model,
            ..decode_options
        };
        let (spec, status) = (model.spec(), back.status);
        let decode = Decode::new(client, plan, spec, tokenizer, status, options);
        decoding = Some(member.runtime().spawn(async move {
            decode.run(back.submissions).await;
            // The gateway keeps its view of the text for as long as it answers.
            drop(back.text);
        }));
    }
    Ok((member, decoding))
}

/// The plan's draft model, ready to guess for `model`, on `gpu` if there is one; `None` where that refuses it.
fn draft_thread(
    draft: &PlannedDraft,
    plan: &RingPlanSpec,
    model: &Model,
    threads: usize,
    gpu: Option<&Gpu>,
) -> Result<Option<DraftThread>, ServeError> {
    let (context, contexts) = (plan.context_length as usize, plan.kv_contexts as usize);
    let small = plan_source::open_model(&draft.model, context)?;
    let opened = DraftModel::new(small, model, gpu, threads, context, contexts);
    unless_refused(opened.and_then(DraftThread::start)).map_err(|error| ServeError::DraftModel {
        file: draft.model.file.clone(),
        source: of_gpu(error, gpu),
    })
}

/// The error with the GPU that computes no more, if that is why: the machine may have others.
fn of_gpu(error: DraftModelError, gpu: Option<&Gpu>) -> DraftModelError {
    match (error, gpu.map(Gpu::facts)) {
        (DraftModelError::Engine(source), Some(Ok(facts))) if source.is_without_gpu() => {
            let gpu = facts.label();
            DraftModelError::Engine(Box::new(EngineError::OneGpu { gpu, source }))
        }
        (error, _) => error,
    }
}

/// Answers need no draft model, so one for which there is no room on a GPU is done without. A GPU that is there no more is missed by all.
fn unless_refused<T>(opened: Result<T, DraftModelError>) -> Result<Option<T>, DraftModelError> {
    match opened {
        Err(DraftModelError::Engine(error))
            if matches!(*error, EngineError::Gpu { .. }) && !error.is_without_gpu() =>
        {
            let cause = prima_crds::error_chain(&*error);
            tracing::warn!(
                cause,
                "the GPU does not take the draft model; answers come without it"
            );
            Ok(None)
        }
        opened => opened.map(Some),
    }
}

fn model_text(options: &MemberOptions) -> Result<ModelText, ServeError> {
    let metadata = &options.model.gguf().metadata;
    let tokenizer = Tokenizer::from_gguf(metadata).map_err(ServeError::Tokenizer)?;
    let chat_template =
        ChatTemplate::from_gguf(metadata, &tokenizer).map_err(ServeError::ChatTemplate)?;
    let rank_template = RankTemplate::from_gguf(metadata).map_err(ServeError::RankTemplate)?;
    let context_length = options.plan.context_length as usize;
    let architecture = options.model.spec().architecture.to_owned();
    Ok(ModelText::new(
        tokenizer,
        chat_template,
        rank_template,
        context_length,
        architecture,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_model_is_done_without_but_a_lost_gpu_is_told() {
        let of = |error: EngineError| Err::<(), _>(DraftModelError::Engine(Box::new(error)));
        let full = of(EngineError::Gpu {
            action: "take layers",
            source: "it is full".into(),
        });
        assert!(matches!(unless_refused(full), Ok(None)));
        assert!(matches!(unless_refused(Ok(())), Ok(Some(()))));

        let told = |error: EngineError| {
            let source = unless_refused(of(error)).unwrap_err();
            let file = "small.gguf".to_owned();
            let error = ServeError::DraftModel { file, source };
            error.without_gpu().map(ToString::to_string)
        };
        let reason = "it hangs".to_owned();
        let said = told(EngineError::NoGpu { reason }).unwrap();
        assert!(said.contains("it hangs"), "{said}");
        // Its file is at fault.
        let path = "small.gguf".into();
        assert_eq!(told(EngineError::Damaged { path }), None);
    }

    #[tokio::test]
    async fn decoding_that_ends_is_an_error_with_its_cause() {
        let panics = tokio::spawn(async { panic!("a defect") });
        let error = ended_unasked(&mut Some(panics)).await;
        assert!(
            prima_crds::error_chain(&error).contains("a defect"),
            "{error:?}"
        );
        let ends = tokio::spawn(async {});
        let error = ended_unasked(&mut Some(ends)).await;
        assert!(matches!(error, ServeError::Decoding(_)));
    }
}
