//! A borrower's member on this machine: takes the part of the model that is not here yet, runs the member as a process, and ends it when the
//! borrower's stream of orders does.

use std::io::{self, Write as _};
use std::ops::Range;
use std::path::Path;
use std::slice::from_mut;
use std::sync::Arc;
use std::time::Duration;

use prima_crds::printable;
use prima_crds::quantity::rounded;
use prima_crds::v1alpha1::ring_plan::{RingPlan, RingPlanError};
use prima_member_process::{Launch, MemberProcess, Serve, StartError};
use prima_weights::{
    CacheError, FileIdentity, KeptRoom, LocalFile, LocalFileError, Room, Writer, tensors,
};
use tokio::sync::mpsc;
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::timeout;
use tonic::{Status, Streaming};

use super::CONTENT_BYTES;
use super::lend::Lender;
use super::proto::event::Event as Happened;
use super::proto::order::Order as Ordered;
use super::proto::{Content, Event, FileRanges, ModelFile, Order, Start, Wanted};

type Events = mpsc::Sender<Result<Event, Status>>;

/// Why a member does not run. The borrower reads it.
#[derive(Debug, thiserror::Error)]
enum GuestError {
    #[error("the borrower's orders: expected {0}")]
    Orders(&'static str),
    #[error("the borrower's orders ended")]
    Gone,
    #[error("the ring's plan cannot be used")]
    Plan(#[from] RingPlanError),
    #[error("the ring's plan has no member {member:?}")]
    NotAMember { member: String },
    #[error("the ring's plan: expected members with keys, and this machine's for {member:?}")]
    OtherKey { member: String },
    #[error("the ring's plan: expected the borrower at rank 0, found {member:?} there")]
    RankZero { member: String },
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    File(#[from] LocalFileError),
    #[error("{name} is written to by another program; try again when that has ended")]
    Written { name: String },
    #[error(
        "what is missing here of the model takes {}, and there is room for {}, since 2 GiB of the disk stay free; make room there",
        rounded(*.wanted),
        rounded(*.room)
    )]
    NoRoom { wanted: u64, room: u64 },
    #[error("cannot write the model's file")]
    Write(#[source] io::Error),
    #[error("cannot keep the ring's plan")]
    PlanFile(#[source] io::Error),
    #[error("cannot turn the ring's plan into YAML")]
    Yaml(#[source] serde_saphyr::ser::Error),
    #[error("cannot find out where this program lies")]
    OwnPath(#[source] io::Error),
    #[error(transparent)]
    Process(#[from] StartError),
    #[error("a part of the work ended")]
    Panicked(#[from] JoinError),
}

/// Between two orders before the member runs. A borrower's disk may take long for some megabytes.
const SILENCE: Duration = Duration::from_secs(120);
/// For what runs when the borrower ends the ring: rank 0 has finished its requests by then.
const GRACE: Duration = Duration::from_secs(5);
/// For ending at once.
const LAST_GRACE: Duration = Duration::from_secs(2);
/// For telling a borrower that does not read.
const LAST_WORD: Duration = Duration::from_secs(2);
/// So many lines of the member may wait for the borrower; more are lost.
const WAITING_LINES: usize = 256;
/// Parts of a model, and ranges of all of them together: more than any has.
const MAX_FILES: usize = 1024;
const MAX_RANGES: usize = 1 << 17;
/// Content is written in pieces of this size, each of which waits for the disk.
const PIECE_BYTES: usize = 8 << 20;

/// Until the member has ended and the borrower was told.
pub async fn run(lender: Arc<Lender>, mut orders: Streaming<Order>, events: Events) {
    let prepared = prepare(&lender, &mut orders, &events).await;
    let ended = match prepared {
        Ok(member) => {
            lender.free_ring_port();
            let ended = member.run(&lender, orders, &events).await;
            if let Err(error) = lender.answer_measurements() {
                let problem = prima_crds::error_chain(&error);
                tracing::error!(problem, "nobody can measure the link to this machine");
            }
            ended
        }
        Err(error) => Err(error),
    };
    let last = match ended {
        Ok(status) => Ok(happened(Happened::Ended(status))),
        Err(error) => {
            let problem = prima_crds::error_chain(&error);
            tracing::warn!(problem, "the ring's member does not run");
            Err(Status::failed_precondition(problem))
        }
    };
    // A borrower that has gone does not want to know, nor does one that does not read.
    let _ = timeout(LAST_WORD, events.send(last)).await;
}

fn happened(event: Happened) -> Event {
    Event { event: Some(event) }
}

/// The next order; an end is an error.
async fn next(orders: &mut Streaming<Order>) -> Result<Ordered, GuestError> {
    match timeout(SILENCE, orders.message()).await {
        Ok(Ok(Some(Order { order: Some(order) }))) => Ok(order),
        Ok(Ok(Some(_))) => Err(GuestError::Orders("one of those that this version knows")),
        Ok(Ok(None) | Err(_)) => Err(GuestError::Gone),
        Err(_) => Err(GuestError::Orders("something within two minutes")),
    }
}

/// A member with all that it needs.
struct Member {
    name: String,
    plan: RingPlan,
    /// In use until the member has ended.
    _files: Vec<LocalFile>,
}

async fn prepare(
    lender: &Arc<Lender>,
    orders: &mut Streaming<Order>,
    events: &Events,
) -> Result<Member, GuestError> {
    let Ordered::Start(Start {
        plan,
        member,
        files,
    }) = next(orders).await?
    else {
        return Err(GuestError::Orders("a start first"));
    };
    let mut plan = RingPlan::from_yaml("the plan", &plan)?;
    check(&plan, &member, &lender.key.to_string())?;
    let files = {
        let lender = lender.clone();
        // Opening many files, and removing others, takes its time.
        spawn_blocking(move || Files::open(&lender, &files)).await??
    };
    let missing = files.missing.iter().map(|ranges| FileRanges {
        ranges: ranges.iter().cloned().map(Into::into).collect(),
    });
    let wanted = Wanted {
        files: missing.collect(),
    };
    let _ = events.send(Ok(happened(Happened::Wanted(wanted)))).await;
    let files = files.receive(orders).await?;
    if let Some(first) = files.first() {
        plan.spec.model.file = first.path().display().to_string();
    }
    Ok(Member {
        name: member,
        plan,
        _files: files,
    })
}

/// Whether the machine with the key `own` can be this member. What the model's file must be, `serve` finds out.
fn check(plan: &RingPlan, member: &str, own: &str) -> Result<(), GuestError> {
    let member = || member.to_owned();
    let rank = plan.spec.rank_of(&member());
    let rank = rank.ok_or_else(|| GuestError::NotAMember { member: member() })?;
    if plan.spec.members[rank].public_key_sha256.as_deref() != Some(own) {
        return Err(GuestError::OtherKey { member: member() });
    }
    match rank {
        0 => Err(GuestError::RankZero { member: member() }),
        _ => Ok(()),
    }
}

/// The files of the model, and what of them is not here yet.
struct Files {
    files: Vec<LocalFile>,
    missing: Vec<Vec<Range<u64>>>,
    writers: Vec<Writer>,
    /// For what is missing, if anything is.
    _room: Option<KeptRoom>,
}

impl Files {
    fn open(lender: &Lender, sent: &[ModelFile]) -> Result<Self, GuestError> {
        let count: usize = sent.iter().map(|file| file.ranges.len()).sum();
        if sent.is_empty() || sent.len() > MAX_FILES || count > MAX_RANGES {
            return Err(GuestError::Orders("the files of a model"));
        }
        let wanted = sent.iter().map(ranges).collect::<Result<Vec<_>, _>>()?;
        let identities: Vec<FileIdentity> = sent
            .iter()
            .map(|file| FileIdentity {
                size_bytes: file.size_bytes,
                etag: Some(file.version.clone()),
                sha256: None,
                revision_commit: None,
            })
            .collect();
        let files = lender.cache.sent_files(&sent[0].name, &identities)?;
        let missing = files.iter().zip(&wanted);
        let missing: Vec<_> = missing
            .map(|(file, wanted)| file.missing(wanted))
            .collect::<Result<_, _>>()?;
        let room = match make_room(lender, &files, &missing) {
            Ok(room) => room,
            Err(error) => {
                // What was made for nothing goes again.
                lender.cache.give_back_empty(files)?;
                return Err(error);
            }
        };
        let names = files.iter().zip(sent);
        let writers = names
            .map(|(file, sent)| {
                let name = || sent.name.clone();
                file.writer()?
                    .ok_or_else(|| GuestError::Written { name: name() })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            files,
            missing,
            writers,
            _room: room,
        })
    }

    /// Takes what is missing, which must come in order.
    async fn receive(self, orders: &mut Streaming<Order>) -> Result<Vec<LocalFile>, GuestError> {
        for (at, missing) in self.missing.into_iter().enumerate() {
            for range in missing {
                let writer = &self.writers[at];
                let mut piece = Piece::new(range.start);
                while piece.end() < range.end {
                    let added = match next(orders).await {
                        Ok(Ordered::Content(content)) => piece.add(content, at, range.end),
                        Ok(_) => Err(GuestError::Orders("the content of the model's files")),
                        Err(error) => Err(error),
                    };
                    if let Err(error) = added {
                        // What came stays, for the next try.
                        piece.write(writer).await?;
                        return Err(error);
                    }
                    if piece.bytes.len() >= PIECE_BYTES || piece.end() == range.end {
                        piece = piece.write(writer).await?;
                    }
                }
            }
        }
        Ok(self.files)
    }
}

/// The ranges of a file, in order and within it.
fn ranges(file: &ModelFile) -> Result<Vec<Range<u64>>, GuestError> {
    let mut end = 0;
    let mut checked = Vec::with_capacity(file.ranges.len());
    for range in &file.ranges {
        if range.start < end || range.start >= range.end || range.end > file.size_bytes {
            return Err(GuestError::Orders("ranges in order, within their file"));
        }
        end = range.end;
        checked.push(range.start..range.end);
    }
    Ok(checked)
}

/// What stays free of a disk of so many bytes: it is its owner's.
fn kept_free(total: u64) -> u64 {
    (total / 20).min(2 << 30)
}

/// Removes what was not used for longest, if what is missing does not fit beside it.
fn make_room(
    lender: &Lender,
    files: &[LocalFile],
    missing: &[Vec<Range<u64>>],
) -> Result<Option<KeptRoom>, GuestError> {
    let (mut wanted, mut to_fetch) = (0_u64, Vec::new());
    for (file, missing) in files.iter().zip(missing) {
        wanted = wanted.saturating_add(tensors::total_bytes(missing));
        to_fetch.push((file.clone(), file.room_for(missing)?));
    }
    if wanted == 0 {
        return Ok(None);
    }
    let budget = lender.cache.budget_bytes(kept_free)?;
    match lender.cache.make_room(budget, &to_fetch)? {
        Room::Made { kept, .. } => Ok(Some(kept)),
        Room::Short { lacking_bytes, .. } => Err(GuestError::NoRoom {
            wanted,
            room: wanted.saturating_sub(lacking_bytes),
        }),
    }
}

/// Content that is not written yet.
struct Piece {
    start: u64,
    bytes: Vec<u8>,
}

impl Piece {
    fn new(start: u64) -> Self {
        Self {
            start,
            bytes: Vec::new(),
        }
    }

    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// Content of the file at the place `file`, of which bytes up to `end` are wanted.
    fn add(&mut self, content: Content, file: usize, end: u64) -> Result<(), GuestError> {
        let Content {
            file: of,
            offset,
            data,
        } = content;
        let room = end - self.end();
        let expected = of as usize == file
            && offset == self.end()
            && !data.is_empty()
            && data.len() <= CONTENT_BYTES
            && data.len() as u64 <= room;
        if !expected {
            return Err(GuestError::Orders("content in the order that was wanted"));
        }
        if self.bytes.is_empty() {
            let most = (PIECE_BYTES + CONTENT_BYTES) as u64;
            self.bytes.reserve_exact(room.min(most) as usize);
        }
        self.bytes.extend_from_slice(&data);
        Ok(())
    }

    /// Writes it, and begins the next.
    async fn write(self, writer: &Writer) -> Result<Self, GuestError> {
        if self.bytes.is_empty() {
            return Ok(self);
        }
        let (next, writer) = (self.end(), writer.clone());
        let written = spawn_blocking(move || writer.write(self.start, &self.bytes));
        written.await?.map_err(GuestError::Write)?;
        Ok(Self::new(next))
    }
}

impl Member {
    /// Until its process ends or the orders do. Returns how it ended.
    async fn run(
        self,
        lender: &Lender,
        mut orders: Streaming<Order>,
        events: &Events,
    ) -> Result<String, GuestError> {
        let folder = tempfile::tempdir().map_err(GuestError::PlanFile)?;
        let plan_file = folder.path().join("ring-plan.yaml");
        let yaml = serde_saphyr::to_string(&self.plan).map_err(GuestError::Yaml)?;
        std::fs::write(&plan_file, yaml).map_err(GuestError::PlanFile)?;
        let (tell, mut lines) = mpsc::channel(WAITING_LINES);
        let mut process = self.start(lender, &plan_file, tell)?;
        let outcome = loop {
            tokio::select! {
                status = process.ended() => break Some(status),
                // A borrower that does not read loses lines.
                Some(line) = lines.recv() => {
                    let _ = events.try_send(Ok(happened(Happened::Line(line))));
                }
                order = orders.message() => match order {
                    // There is no order for a running member.
                    Ok(Some(_)) => {}
                    Ok(None) | Err(_) => break None,
                }
            }
        };
        let Some(status) = outcome else {
            prima_member_process::end(from_mut(&mut process), &[GRACE, LAST_GRACE]).await;
            return Ok("its ring ended".to_owned());
        };
        // The last lines say why.
        while let Ok(line) = lines.try_recv() {
            let line = Ok(happened(Happened::Line(line)));
            if timeout(LAST_WORD, events.send(line)).await.is_err() {
                break;
            }
        }
        Ok(match status {
            Ok(status) => status.to_string(),
            Err(error) => format!("how is unknown ({error})"),
        })
    }

    fn start(
        &self,
        lender: &Lender,
        plan_file: &Path,
        tell: mpsc::Sender<String>,
    ) -> Result<MemberProcess, GuestError> {
        let program = std::env::current_exe().map_err(GuestError::OwnPath)?;
        let serve = Serve {
            identity: Some(&lender.identity_file),
            listen: Some(lender.ring),
            threads: lender.threads.map(usize::from),
            reserve_memory: lender.reserve_memory,
            ..Serve::new(plan_file, &self.name)
        };
        Ok(MemberProcess::start(
            &program,
            &Launch::Serve(serve),
            move |line| {
                // The line has its own time and level.
                let _ = writeln!(io::stderr(), "member | {}", printable(line));
                // A borrower that does not read loses lines rather than filling this machine's memory.
                let _ = tell.try_send(line.to_owned());
            },
        )?)
    }
}
