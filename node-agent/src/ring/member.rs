//! Starts and ends a member: its windows, its thread and its streams to both neighbours. It decides the order of the
//! steps; `hop` does the member's work.

use std::future::pending;
use std::io;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use prima_crds::v1alpha1::ring_plan::{RingMember, RingPlanSpec};
use prima_engine::{Compute, EngineError, Gpu, Model};
use tokio::runtime::{self, Handle};
use tokio::sync::{mpsc, oneshot, watch};
use tonic::metadata::{AsciiMetadataValue, MetadataValue};

use super::client::RingClient;
use super::greeting::Greeting;
use super::held::Held;
use super::hop::{Hop, HopError, HopParts};
use super::identity::{Fingerprint, Identity};
use super::schedule::Schedule;
use super::session::SessionTable;
use super::signs_of_life::SignsOfLife;
use super::tls;
use super::transport::{self, Inbound, LinkOptions, NeighbourKeys, TransportError};
use super::wire::FrameLimits;
use super::worker::{Worker, WorkerError};
use crate::memory_watch::{MemoryLimits, MemoryWatch};
use crate::routing_trace::{self, TraceError};

/// One member of a ring, running on a thread of its own until it is dropped.
pub struct Member {
    thread: RingThread,
    held: Arc<Held>,
    client: Option<RingClient>,
    gpu: Option<Gpu>,
    _watch: MemoryWatch,
}

/// What a member is started with.
pub struct MemberOptions {
    /// Validated, and fits the model.
    pub plan: Arc<RingPlanSpec>,
    /// Of the plan's document. A plan with keys has one.
    pub uid: Option<String>,
    /// The key of this machine's agent, if the plan has keys.
    pub identity: Option<Identity>,
    pub rank: usize,
    pub model: Model,
    /// Compute threads.
    pub threads: usize,
    /// Where the predecessor connects. A ring of one does not use it.
    pub listener: TcpListener,
    pub memory: MemoryLimits,
    /// If true, weights that do not fit into memory are read ahead of their use; if false, all are left to the page
    /// cache.
    pub streaming: bool,
    /// A file to be written: which experts passes need.
    pub routing_trace: Option<PathBuf>,
}

/// Sessions that every member has room to count: those that run, twice as many that are kept for later requests, and those on their way
/// out.
pub fn session_capacity(plan: &RingPlanSpec) -> usize {
    4 * plan.max_concurrent_requests as usize
}

#[derive(Debug, thiserror::Error)]
pub enum MemberError {
    #[error("the plan has no member of rank {rank}")]
    Rank { rank: usize },
    #[error("the uid of the plan's document is no uid")]
    Uid,
    #[error("the plan's members have keys, but {lacking}; plan again")]
    Keys { lacking: &'static str },
    #[error("cannot start the compute threads")]
    Threads(#[source] Box<EngineError>),
    #[error("cannot open this member's part of the model")]
    Open(#[source] WorkerError),
    #[error(transparent)]
    Trace(TraceError),
    #[error("cannot start the ring's thread")]
    Thread(#[source] io::Error),
    #[error("the member cannot compute any more")]
    Hop(#[source] HopError),
    #[error("the member cannot be reached any more")]
    Transport(#[source] TransportError),
    #[error("the ring's thread has ended")]
    Stopped,
}

impl MemberError {
    /// What became of the machine's GPU, if that is why.
    pub fn without_gpu(&self) -> Option<&EngineError> {
        let (Self::Open(error) | Self::Hop(HopError::Lasting(error))) = self else {
            return None;
        };
        match error {
            WorkerError::Open { source, .. } | WorkerError::Compute { source, .. } => {
                Some(&**source).filter(|source| source.is_without_gpu())
            }
            WorkerError::NoCache { .. } | WorkerError::Position { .. } => None,
        }
    }
}

impl Member {
    /// Opens the windows of `rank` and joins the ring. Neighbours may start later, or come back: losing one ends the
    /// sessions, but not the member.
    pub fn start(options: MemberOptions) -> Result<Self, MemberError> {
        let MemberOptions {
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
        } = options;
        let schedule = Schedule::new(&plan, rank).ok_or(MemberError::Rank { rank })?;
        let uid = uid.map(|uid| MetadataValue::try_from(uid).map_err(|_| MemberError::Uid));
        let uid = uid.transpose()?;
        let keys = match plan.is_encrypted() && schedule.members > 1 {
            true if uid.is_none() => {
                return Err(MemberError::Keys {
                    lacking: "its document has no uid",
                });
            }
            true => Some(neighbour_keys(&plan, &schedule, identity)?),
            false => None,
        };
        let limits = FrameLimits::new(&plan, &schedule, model.spec().hidden);
        let link = link_options(&plan, &schedule, uid, keys, limits.max_message_bytes());
        let table = SessionTable::new(
            session_capacity(&plan),
            plan.context_length as usize,
            schedule.stages(),
        );
        let compute =
            Arc::new(Compute::new(threads).map_err(|error| MemberError::Threads(Box::new(error)))?);
        let worker =
            Worker::new(model, compute, &plan, &schedule, streaming).map_err(MemberError::Open)?;
        if let Some(file) = routing_trace {
            routing_trace::start(&file, worker.residency()).map_err(MemberError::Trace)?;
        }
        let gpu = worker.gpu().cloned();
        let watch =
            MemoryWatch::start(worker.residency().clone(), memory).map_err(MemberError::Thread)?;

        let (inbox, received) = mpsc::channel(link.buffered_frames);
        let (home, replies) = mpsc::unbounded_channel();
        let client = (rank == 0).then(|| RingClient::new(inbox.clone(), replies, schedule.members));
        let home = (rank == 0).then_some(home);
        let held = Arc::new(Held::new());
        let signs = Arc::new(SignsOfLife::new(rank, home.clone()));
        let streams = Streams {
            successor: (schedule.members > 1).then(|| plan.members[schedule.successor()].clone()),
            listener,
            link,
            inbox,
            signs,
        };
        let hop = Hop::new(HopParts {
            schedule,
            limits,
            table,
            worker,
            home,
            held: held.clone(),
            pressure: watch.pressure().clone(),
        });
        let thread = RingThread::start(hop, received, streams).map_err(MemberError::Thread)?;
        Ok(Self {
            thread,
            held,
            client,
            gpu,
            _watch: watch,
        })
    }

    /// The GPU that has what the plan has on a GPU here beside layers, if it uses any.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.gpu.as_ref()
    }

    /// Rank 0's handle on the ring; `None` on other ranks, and the second time.
    pub fn take_client(&mut self) -> Option<RingClient> {
        self.client.take()
    }

    /// The ring's thread. Rank 0 also decodes on it, which saves one wake-up per token.
    pub fn runtime(&self) -> &Handle {
        &self.thread.handle
    }

    /// Sessions with a KV cache on this member now.
    pub fn sessions(&self) -> usize {
        self.held.sessions()
    }

    /// How long ago the last pass ended.
    pub fn idle_for(&self) -> Duration {
        self.held.idle_for()
    }

    /// Waits until the member cannot go on, and says why.
    pub async fn ended(&self) -> Arc<MemberError> {
        let mut outcome = self.thread.outcome.clone();
        loop {
            if let Some(error) = outcome.borrow_and_update().clone() {
                return error;
            }
            if outcome.changed().await.is_err() {
                return Arc::new(MemberError::Stopped);
            }
        }
    }
}

fn link_options(
    plan: &RingPlanSpec,
    schedule: &Schedule,
    uid: Option<AsciiMetadataValue>,
    keys: Option<NeighbourKeys>,
    max_message_bytes: usize,
) -> LinkOptions {
    let greeting = |rank| Greeting {
        uid: uid.clone(),
        generation: plan.generation,
        rank,
    };
    LinkOptions {
        own: greeting(schedule.rank),
        predecessor: greeting(schedule.predecessor()),
        keys,
        max_message_bytes,
        // Each session has at most a few frames in flight, and a prompt one or two chunks per member.
        buffered_frames: 64 + 4 * (plan.max_concurrent_requests as usize + schedule.members),
    }
}

/// Which keys the plan has for this member, which must be its own, and for its neighbours.
fn neighbour_keys(
    plan: &RingPlanSpec,
    schedule: &Schedule,
    identity: Option<Identity>,
) -> Result<NeighbourKeys, MemberError> {
    let key = |rank: usize| -> Result<Fingerprint, MemberError> {
        let key = plan.members[rank].public_key_sha256.as_ref();
        let key = key.and_then(|key| key.parse().ok());
        key.ok_or(MemberError::Keys {
            lacking: "not all of them",
        })
    };
    let own = key(schedule.rank)?;
    match identity {
        Some(identity) if identity.fingerprint() == own => Ok(NeighbourKeys {
            own: tls::fixed(identity),
            predecessor: key(schedule.predecessor())?,
            successor: key(schedule.successor())?,
        }),
        _ => Err(MemberError::Keys {
            lacking: "this machine has not the key that is planned for it",
        }),
    }
}

/// The thread on which a hop works and its streams are kept, until it is dropped.
struct RingThread {
    handle: Handle,
    /// Dropped to stop the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
    /// Why it has ended by itself.
    outcome: watch::Receiver<Option<Arc<MemberError>>>,
}

impl RingThread {
    fn start(hop: Hop, received: mpsc::Receiver<Inbound>, streams: Streams) -> io::Result<Self> {
        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let (told, outcome) = watch::channel(None);
        let work = async move {
            tokio::select! {
                result = tokio::spawn(hop.run(received)) => match result {
                    Ok(Ok(())) => None,
                    Ok(Err(error)) => Some(MemberError::Hop(error)),
                    Err(panic) => Some(MemberError::Hop(HopError::Panicked(panic))),
                },
                error = keep(streams) => error,
                _ = stopped => None,
            }
        };
        let thread = thread::Builder::new().name("ring".into()).spawn(move || {
            let outcome = runtime.block_on(work);
            if let Some(error) = outcome {
                told.send_replace(Some(Arc::new(error)));
            }
        })?;
        Ok(Self {
            handle,
            stop: Some(stop),
            thread: Some(thread),
            outcome,
        })
    }
}

/// The streams to both neighbours.
struct Streams {
    /// `None` in a ring of one, which has no streams.
    successor: Option<RingMember>,
    /// Where the predecessor connects.
    listener: TcpListener,
    link: LinkOptions,
    inbox: mpsc::Sender<Inbound>,
    signs: Arc<SignsOfLife>,
}

/// Keeps the streams up, and tells that this member is there; ends only if that cannot be done.
async fn keep(streams: Streams) -> Option<MemberError> {
    let Streams {
        successor,
        listener,
        link,
        inbox,
        signs,
    } = streams;
    let Some(RingMember { name, address, .. }) = successor else {
        return pending().await;
    };
    tokio::select! {
        result = transport::serve(listener, link.clone(), inbox.clone(), signs.clone()) => {
            result.err().map(MemberError::Transport)
        }
        () = transport::connect(&name, &address, link, inbox.clone(), &signs) => None,
        never = signs.tell() => match never {},
    }
}

impl Drop for RingThread {
    /// Closes all connections at once. Neighbours see it as a loss.
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It ends by itself; a panic in it has been printed.
            let _ = thread.join();
        }
    }
}
