//! `prima run`: a ring without a cluster, on this machine and on those that are lent to it (`prima agent`). It writes the same RingPlan that a cluster would carry,
//! starts one agent per member, waits until a token went round, and ends everything when the user or a member ends.
//!
//! This file decides the order of these steps and which ports are used. `split` decides how layers are split, `lent` knows other machines,
//! `agents` how processes start and end, `screen` what people see. No part of this runs a layer.

mod agents;
mod fetched;
mod lent;
mod planned;
mod screen;
mod split;

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use prima_crds::quantity::Quantity;
use prima_crds::v1alpha1::model_profile::{OtherVocabulary, same_vocabulary};
use prima_crds::v1alpha1::ring_plan::{
    CHUNK_POSITIONS, DEFAULT_CONCURRENT_REQUESTS, KvDtype, PlannedDraft, PlannedWindow, RingMember,
    RingPlan, RingPlanError, RingPlanSpec,
};
use prima_halda::input::windowed_sequences;
use prima_halda::{Options, PlanReport};
use prima_member_process::{Borrowed, Health, health};

pub use agents::{AgentsError, program};

use agents::{AgentOptions, Agents, MemberExit};
use fetched::{FetchError, ModelName};
use lent::LentError;
use planned::{PlannedError, Wishes};
use screen::{Ready, Screen};
use split::SplitError;

use crate::model_file::{ModelFile, ModelFileError};
use crate::plan;
use crate::stop_signals::StopSignals;

#[derive(clap::Args)]
pub struct RunArgs {
    /// The model: a GGUF file, or one to fetch, as hf.co/OWNER/REPO/FILE.gguf (HF_TOKEN if it asks for one) or by its address
    #[arg(value_name = "MODEL.gguf")]
    model: ModelName,
    /// Agents to start, each with a part of this machine's memory [default: as many as --split names, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    members: Option<u16>,
    /// Another machine that takes part, as `prima agent` shows it there; may be repeated. The word is needed only at the first time, and the
    /// port only if it is not 9190
    #[arg(
        long = "member",
        value_name = "HOST:PORT#WORD",
        conflicts_with = "members"
    )]
    lenders: Vec<String>,
    /// Layers of each member, in ring order, in all rounds together; 0 is allowed [default: as planned]
    #[arg(long, value_name = "LAYERS,..", value_delimiter = ',')]
    split: Option<Vec<u16>>,
    /// How often a token goes round the ring; every member's layers are spread over the rounds [default: 1]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u16).range(1..=1024))]
    rounds: Option<u16>,
    /// Plan with this NodeProfile, instead of measuring the machine (seconds, once a week)
    #[arg(long, value_name = "YAML")]
    profile: Option<PathBuf>,
    /// Address of this machine at which to serve HTTP; 0.0.0.0 and :: are all of them, for which --api-key is needed
    #[arg(long, value_name = "IP", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    host: IpAddr,
    /// Port of the HTTP endpoint, 0 for any free one [default: 8080, or the next free one]
    #[arg(long, value_name = "P")]
    port: Option<u16>,
    /// Tokens that prompt and answer may have together [default: what the model was trained for, at most 8192]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    context: Option<u32>,
    /// Number format of the KV cache, F16 or Q8_0; Q8_0 takes 0.53 of the memory and changes answers a little
    #[arg(long, value_name = "DTYPE", default_value = "F16", value_parser = plan::kv_dtype)]
    kv_dtype: KvDtype,
    /// Threads of each member on this machine [default: all cores; a member that waits uses none]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Memory of this machine that stays free for other programs, such as 2Gi [default: 5 % of what is available at the start]
    #[arg(long, value_name = "SIZE")]
    reserve_memory: Option<Quantity>,
    /// On this machine, leave all weights to the system's page cache, even when they do not fit into memory
    #[arg(long, conflicts_with = "reserve_memory")]
    no_streaming: bool,
    /// A small model of the same vocabulary, which guesses what comes next; the model verifies several guesses at a time
    #[arg(long, value_name = "DRAFT.gguf", conflicts_with = "no_speculation")]
    draft: Option<PathBuf>,
    /// Compute one token at a time: no drafts of what may follow
    #[arg(long)]
    no_speculation: bool,
    /// Whatever model a request names, answer with this one
    #[arg(long)]
    any_model_name: bool,
    /// Ask clients for this key
    #[arg(
        long,
        value_name = "KEY",
        env = "PRIMA_API_KEY",
        hide_env_values = true
    )]
    api_key: Option<String>,
}

/// Why `prima run` ended with an error.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    #[error(transparent)]
    Model(#[from] ModelFileError),
    #[error("--draft {}", path.display())]
    Draft {
        path: PathBuf,
        #[source]
        source: OtherVocabulary,
    },
    #[error(transparent)]
    Split(#[from] SplitError),
    #[error(transparent)]
    Planned(#[from] PlannedError),
    #[error(transparent)]
    Lent(#[from] LentError),
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error(
        "cannot listen on {address} (--host, --port); choose an address of this machine and a free port, or port 0 for any"
    )]
    Port {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("no free port in {first}..{last} on {host}; choose one with --port")]
    NoFreePort { host: IpAddr, first: u16, last: u16 },
    #[error(
        "--host {host}: whoever reaches this machine could use the model; ask for a key with --api-key or PRIMA_API_KEY"
    )]
    Open { host: IpAddr },
    #[error("the planner named a member {name:?} that there is not, which is a mistake")]
    Nobody { name: String },
    #[error("cannot make a plan from these arguments")]
    Plan(#[source] RingPlanError),
    #[error("cannot write the ring's plan to {}", path.display())]
    WritePlan {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot turn the ring's plan into YAML")]
    SerializePlan(#[source] serde_saphyr::ser::Error),
    #[error("cannot wait for signals")]
    Signals(#[source] io::Error),
    #[error(transparent)]
    Agents(#[from] AgentsError),
    #[error("{0}")]
    MemberDied(MemberExit),
}

const DEFAULT_PORT: u16 = 8080;
/// How many ports above the default are tried.
const PORTS_TRIED: u16 = 100;
const HEALTH_INTERVAL: Duration = Duration::from_millis(100);

/// Runs a ring until Ctrl-C, SIGTERM or, unless it is ignored, SIGHUP (`Ok`), or until a member on this machine dies (`Err`). When a machine
/// that is lent leaves, the others make another ring. No agent outlives it.
pub async fn run(args: RunArgs) -> Result<(), LocalError> {
    if !args.host.is_loopback() && args.api_key.is_none() {
        return Err(LocalError::Open { host: args.host });
    }
    // One that is here is refused at once, if it is; one that is not is fetched when all else is known to be well.
    let present = match &args.model {
        ModelName::File(path) => Ok(ModelFile::read(path)?),
        ModelName::Fetched(name) => Err(name),
    };
    let http = http_address(args.host, args.port)?;
    let screen = Screen::new();
    // Before the first agent starts, so that no signal finds agents that nobody would end.
    let mut stop = StopSignals::install().map_err(LocalError::Signals)?;
    let mut borrowed = tokio::select! {
        found = lent::look(&args.lenders, false, &screen) => found?,
        () = stop.received() => return Ok(()),
    };
    let model = match present {
        Ok(model) => model,
        Err(name) => tokio::select! {
            path = name.fetch(&screen) => ModelFile::read(&path?)?.named(name.file_name()),
            () = stop.received() => return Ok(()),
        },
    };
    let draft = match &args.draft {
        Some(path) => Some(draft_model(path, &model)?),
        None => None,
    };
    let default_context = plan::default_context(&model.profile.spec);
    let wanted = Wanted {
        context: args.context.unwrap_or(default_context),
        args: &args,
        model,
        draft,
        http,
    };
    let mut lenders = args.lenders.clone();
    let mut ever_served = false;
    loop {
        let served = Cell::new(false);
        let end = {
            let returned = lent::returned(&lenders, borrowed.as_ref(), here(http), &screen);
            ring(
                &wanted,
                borrowed.as_ref(),
                returned,
                &served,
                &screen,
                &mut stop,
            )
            .await?
        };
        ever_served |= served.get();
        match end {
            End::Asked => return Ok(()),
            End::Returned(lender) => screen.status(&format!("{lender} is back: planning with it")),
            // A split that was told is for these machines, and what never served may never do.
            End::Died(exit) => match exit.lender() {
                Some(lender) if ever_served && args.split.is_none() => {
                    screen.status(&format!("{exit}\nplanning with those that are there"));
                    if !served.get() {
                        // It would only end again.
                        lenders.retain(|other| lent::address_of(other) != lender);
                    }
                }
                _ => {
                    screen.finish();
                    return Err(LocalError::MemberDied(exit));
                }
            },
        }
        // Whoever cannot be used is left out.
        borrowed = tokio::select! {
            found = lent::look(&lenders, true, &screen) => found?,
            () = stop.received() => return Ok(()),
        };
    }
}

/// What a ring is to be.
struct Wanted<'a> {
    args: &'a RunArgs,
    model: ModelFile,
    draft: Option<ModelFile>,
    context: u32,
    http: SocketAddr,
}

/// Why a ring has ended.
enum End {
    /// The user asked for it.
    Asked,
    /// A member did.
    Died(MemberExit),
    /// A machine that took no part is there again, `HOST:PORT`.
    Returned(String),
}

/// Runs one ring until it ends, for example because a machine has `returned`. Says when it has `served`.
async fn ring(
    wanted: &Wanted<'_>,
    borrowed: Option<&Borrowed>,
    returned: impl Future<Output = String>,
    served: &Cell<bool>,
    screen: &Screen,
    stop: &mut StopSignals,
) -> Result<End, LocalError> {
    let Wanted {
        args, model, http, ..
    } = wanted;
    let split = match &args.split {
        Some(split) => Split::as_told(split, args, model, borrowed)?,
        None => tokio::select! {
            split = Split::planned(wanted, borrowed, screen) => split?,
            () = stop.received() => return Ok(End::Asked),
        },
    };
    let members = match borrowed {
        Some(borrowed) => lent::members(borrowed),
        None => members_here(split.members.len())?,
    };
    let mut plan = ring_plan(wanted, &split, members)?;
    // Members on several machines say which plan they follow.
    plan.metadata.uid = borrowed.map(|_| format!("{:032x}", rand::random::<u128>()));
    let directory = tempfile::Builder::new()
        .prefix("prima-run-")
        .tempdir()
        .map_err(|source| LocalError::WritePlan {
            path: std::env::temp_dir(),
            source,
        })?;
    let plan_file = directory.path().join("ring-plan.yaml");
    write_plan(&plan, &plan_file)?;

    let options = AgentOptions {
        plan_file: &plan_file,
        borrowed,
        http: *http,
        threads: args.threads.map(usize::from),
        reserve_memory: split.reserve_memory,
        no_streaming: args.no_streaming,
        no_speculation: args.no_speculation,
        any_model_name: args.any_model_name,
        api_key: args.api_key.as_deref(),
    };
    let mut agents = Agents::start(&plan.spec, &options, screen)?;
    let ready = Ready {
        plan: &plan.spec,
        bytes: model.bytes_per_member(&plan.spec),
        predicted: split.report.as_ref(),
        faster_alone: split.faster_alone,
        http: *http,
        pids: agents.pids(),
        needs_key: args.api_key.is_some(),
    };
    let end = tokio::select! {
        exit = agents.first_exit() => End::Died(exit),
        () = stop.received() => End::Asked,
        lender = returned => End::Returned(lender),
        never = announce(ready, served, screen) => match never {},
    };
    match &end {
        End::Asked => {
            screen.status(
                "shutting down: what runs may finish, for some seconds; Ctrl-C again ends it now",
            );
            screen.mute_agents();
        }
        End::Returned(_) => {}
        End::Died(_) => screen.status("a member ended, shutting down"),
    }
    let asked = tokio::select! {
        () = agents.shut_down() => matches!(end, End::Asked),
        // Whoever asks twice does not want to wait.
        () = stop.received() => {
            agents.kill().await;
            true
        }
    };
    if !asked {
        return Ok(end);
    }
    screen.finish();
    match end {
        End::Died(exit) => Err(LocalError::MemberDied(exit)),
        End::Asked | End::Returned(_) => Ok(End::Asked),
    }
}

/// The model that guesses for `model`.
fn draft_model(path: &Path, model: &ModelFile) -> Result<ModelFile, LocalError> {
    let draft = ModelFile::read(path)?;
    let marks = |file: &ModelFile| file.profile.spec.vocabulary_marks.clone();
    same_vocabulary(&marks(&draft), &marks(model)).map_err(|source| LocalError::Draft {
        path: path.to_owned(),
        source,
    })?;
    Ok(draft)
}

/// Who runs which layers.
struct Split {
    rounds: i32,
    /// Of the plan.
    windowed_sequences: i32,
    chunk_positions: i32,
    /// In ring order: the name of each member, and its layers.
    members: Vec<(String, Vec<PlannedWindow>)>,
    /// What was planned, if it was.
    report: Option<PlanReport>,
    /// If this machine alone would be faster: tokens per second then.
    faster_alone: Option<f64>,
    reserve_memory: Option<u64>,
}

impl Split {
    /// As `--split` says.
    fn as_told(
        split: &[u16],
        args: &RunArgs,
        model: &ModelFile,
        borrowed: Option<&Borrowed>,
    ) -> Result<Self, LocalError> {
        let machines = borrowed.map(lent::members);
        let count = machines.as_ref().map(Vec::len);
        let count = count.or(args.members.map(usize::from));
        let layers = model.profile.spec.layers as usize;
        let shares = split::shares(layers, count, split)?;
        let rounds = args.rounds.unwrap_or(1);
        let name = |rank: usize| match &machines {
            Some(machines) => machines[rank].name.clone(),
            None => name_here(rank),
        };
        let windows = split::windows(&shares, usize::from(rounds))?.into_iter();
        let lent = borrowed.iter().flat_map(|borrowed| &borrowed.lent);
        let lent = lent.map(|lent| &lent.profile);
        let sequences = windowed_sequences(&model.profile.spec, lent, &Options::default());
        Ok(Self {
            rounds: rounds.into(),
            windowed_sequences: sequences as i32,
            chunk_positions: CHUNK_POSITIONS as i32,
            members: windows
                .enumerate()
                .map(|(rank, windows)| (name(rank), windows))
                .collect(),
            report: None,
            faster_alone: None,
            reserve_memory: args.reserve_memory.map(Quantity::bytes),
        })
    }

    async fn planned(
        wanted: &Wanted<'_>,
        borrowed: Option<&Borrowed>,
        screen: &Screen,
    ) -> Result<Self, LocalError> {
        let Wanted {
            args, model, draft, ..
        } = wanted;
        let wishes = Wishes {
            members: args.members.map(usize::from),
            rounds: args.rounds.map(usize::from),
            context: wanted.context as usize,
            kv_dtype: args.kv_dtype,
            threads: args.threads.map(usize::from),
            reserve_memory: args.reserve_memory.map(Quantity::bytes),
            draft: draft.as_ref().map(|draft| &draft.profile.spec),
            profile: args.profile.as_deref(),
            borrowed,
        };
        let planned = planned::plan(model, &wishes, screen).await?;
        let plan = planned.plan;
        let members = &plan.report.members;
        // What the page cache does with weights that do not fit is not predicted.
        let unknown = args.no_streaming && members.iter().any(|member| member.overflow_bytes > 0);
        let members = plan.members.iter().enumerate();
        let name = |rank, planned: &str| match borrowed {
            Some(_) => planned.to_owned(),
            // One machine's members are alike, so their names follow the ring's order.
            None => name_here(rank),
        };
        Ok(Self {
            rounds: plan.rounds as i32,
            windowed_sequences: plan.windowed_sequences as i32,
            chunk_positions: plan.report.chunk_positions as i32,
            members: members
                .map(|(rank, member)| (name(rank, &member.name), plan::windows(&member.windows)))
                .collect(),
            report: (!unknown).then_some(plan.report),
            faster_alone: planned.faster_alone,
            reserve_memory: planned.reserve_memory,
        })
    }
}

/// What the member of this rank is called, if all are on this machine.
fn name_here(rank: usize) -> String {
    format!("m{rank}")
}

/// Members on this machine, in ring order, without layers.
fn members_here(count: usize) -> Result<Vec<RingMember>, LocalError> {
    let ports = ring_ports(count)?.into_iter().enumerate();
    let members = ports.map(|(rank, port)| {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port)).to_string();
        RingMember {
            members_on_machine: count as i32,
            ..RingMember::new(name_here(rank), address, Vec::new())
        }
    });
    Ok(members.collect())
}

/// The plan of `members`, in the order of the split.
fn ring_plan(
    wanted: &Wanted<'_>,
    split: &Split,
    members: Vec<RingMember>,
) -> Result<RingPlan, LocalError> {
    let (model, context) = (&wanted.model, wanted.context);
    let mut ring = Vec::new();
    for (rank, (name, windows)) in split.members.iter().enumerate() {
        let place = members.iter().find(|member| member.name == *name);
        // Names come from the same list.
        let place = place.ok_or_else(|| LocalError::Nobody { name: name.clone() })?;
        let member = RingMember {
            windows: windows.clone(),
            ..place.clone()
        };
        ring.push(match &split.report {
            Some(report) => plan::with_report(member, &report.members[rank]),
            None => member,
        });
    }
    let spec = RingPlanSpec {
        max_concurrent_requests: DEFAULT_CONCURRENT_REQUESTS,
        windowed_sequences: split.windowed_sequences,
        chunk_positions: split.chunk_positions,
        draft: wanted.draft.as_ref().map(|draft| PlannedDraft {
            model: draft.planned(),
            memory_bytes: draft.profile.spec.whole_bytes(context.into()),
        }),
        kv_dtype: wanted.args.kv_dtype,
        rounds: split.rounds,
        predicted: split.report.as_ref().map(plan::speed),
        ..RingPlanSpec::new(model.planned(), context as i32, ring)
    };
    spec.validate().map_err(LocalError::Plan)?;
    Ok(RingPlan::new("local", spec))
}

/// Waits until rank 0 answers that a token went round, tells the user how to use the ring, and then waits for ever.
async fn announce(
    ring: Ready<'_>,
    served: &Cell<bool>,
    screen: &Screen,
) -> std::convert::Infallible {
    screen.status(&format!(
        "starting {}",
        screen::counted(ring.plan.members.len(), "agent")
    ));
    loop {
        match health(here(ring.http)).await {
            Health::Ready { .. } => break,
            Health::NotReady { why, .. } => screen.status(&why),
            // It has not begun to listen.
            Health::NoAnswer(_) => {}
        }
        tokio::time::sleep(HEALTH_INTERVAL).await;
    }
    served.set(true);
    screen.ready(&ring);
    std::future::pending().await
}

fn write_plan(plan: &RingPlan, path: &Path) -> Result<(), LocalError> {
    let yaml = serde_saphyr::to_string(plan).map_err(LocalError::SerializePlan)?;
    std::fs::write(path, yaml).map_err(|source| LocalError::WritePlan {
        path: path.to_owned(),
        source,
    })
}

/// A port that was asked for must be free; the default gives way to the next free one.
fn http_address(host: IpAddr, asked: Option<u16>) -> Result<SocketAddr, LocalError> {
    let refused = |port: u16| {
        let address = SocketAddr::new(host, port);
        move |source| LocalError::Port { address, source }
    };
    if let Some(port) = asked {
        return listen_once(host, port).map_err(refused(port));
    }
    // An address that is not this machine's has no port that is free.
    listen_once(host, 0).map_err(refused(0))?;
    let last = DEFAULT_PORT + PORTS_TRIED;
    let free = (DEFAULT_PORT..last).find_map(|port| listen_once(host, port).ok());
    free.ok_or(LocalError::NoFreePort {
        host,
        first: DEFAULT_PORT,
        last,
    })
}

/// Where this machine itself reaches what listens at `address`.
fn here(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        ip if !ip.is_unspecified() => address,
        IpAddr::V4(_) => (Ipv4Addr::LOCALHOST, address.port()).into(),
        IpAddr::V6(_) => (Ipv6Addr::LOCALHOST, address.port()).into(),
    }
}

/// Ports for the members' ring services. They lie below the range from which Linux takes ports of outgoing
/// connections, and where the search starts depends on the process id: so neither such a connection nor another
/// `prima run` started at the same moment is likely to take a port before its agent does. If one does, the agent
/// says so and the run ends.
fn ring_ports(count: usize) -> Result<Vec<u16>, LocalError> {
    const FIRST: u16 = 10_000;
    const LAST: u16 = 30_000;
    const SPAN: u32 = (LAST - FIRST) as u32;
    let start = std::process::id().wrapping_mul(16) % SPAN;
    let ports: Vec<u16> = (0..SPAN)
        .map(|step| FIRST + ((start + step) % SPAN) as u16)
        .filter(|&port| listen_once(Ipv4Addr::LOCALHOST.into(), port).is_ok())
        .take(count)
        .collect();
    if ports.len() < count {
        return Err(LocalError::NoFreePort {
            host: Ipv4Addr::LOCALHOST.into(),
            first: FIRST,
            last: LAST,
        });
    }
    Ok(ports)
}

/// Whether one can listen on this port (0: any), and the address then.
fn listen_once(host: IpAddr, port: u16) -> io::Result<SocketAddr> {
    TcpListener::bind((host, port))?.local_addr()
}
