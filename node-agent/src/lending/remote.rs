//! A member on a machine that is lent, as its borrower sees it: sends the part of the model that the lender lacks, shows what the member writes,
//! and has it end with the ring.

use std::error::Error as _;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::OptionFuture;
use prima_crds::printable;
use prima_crds::quantity::rounded;
use prima_crds::v1alpha1::ring_plan::RingPlan;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Streaming};

use super::borrow::{
    ANSWER_LIMIT, BorrowError, Contact, RunArgs, answered, not_taken_in, progress,
};
use super::known::Known;
use super::proto::event::Event as Happened;
use super::proto::order::Order as Ordered;
use super::proto::{Event, ModelFile, Order, Start};
use super::send::{self, SendError, Sending};
use crate::plan_source::{self, MemberPlan};
use crate::ring;
use crate::ring::connection::root_cause;
use crate::stop_signal::StopSignal;

/// Until a member on another machine has ended, when it was asked to: that one has 7 s.
const END_LIMIT: Duration = Duration::from_secs(8);
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// What an SD card writes in a second, and a slow disk.
const SLOW_DISK_BYTES: u64 = 4 << 20;
/// Orders that wait for the network.
const WAITING: usize = 4;

/// Runs the member until it ends, or until this process is asked to end.
///
/// # Errors
/// [`BorrowError`]; also when the member ends by itself.
pub(super) async fn run_member(args: &RunArgs) -> Result<(), BorrowError> {
    let mut stop = StopSignal::new().map_err(BorrowError::Start)?;
    let plan = plan_source::read(&args.plan, &args.member)?;
    let key = plan.spec.members[plan.rank].public_key_sha256.as_ref();
    let key = key.and_then(|key| key.parse().ok());
    let key = key.ok_or_else(|| BorrowError::NoKey {
        member: args.member.clone(),
    })?;
    let own = ring::fixed(Known::open()?.identity()?);
    let (spec, rank) = (plan.spec.clone(), plan.rank);
    let files = spawn_blocking(move || send::part_of(&spec, rank)).await??;

    let mut contact = Contact::known(&args.lender, &own, key).await?;
    let (orders, receiver) = mpsc::channel(WAITING);
    let start = Start {
        plan: plan_for_lender(&plan)?,
        member: args.member.clone(),
        files: files.clone(),
    };
    let start = Order {
        order: Some(Ordered::Start(start)),
    };
    // There is room for the first.
    let _ = orders.send(start).await;
    let running = contact
        .client
        .run(Request::new(ReceiverStream::new(receiver)));
    let events = answered(ANSWER_LIMIT, running)
        .await
        .map_err(|status| not_taken_in(&args.lender, &status))?;
    let mut member = Remote {
        lender: &args.lender,
        orders: Some(orders),
        events,
        sending: None.into(),
        sends: false,
    };
    let first = PathBuf::from(&plan.spec.model.file);
    tokio::select! {
        result = member.follow(&first, &files) => return result,
        () = stop.received() => {}
    }
    if member.sends {
        // The connection goes with this process, and the lender keeps what came.
        return Ok(());
    }
    // The lender ends its member when the orders do.
    member.orders = None;
    let ended = async { while let Ok(Some(_)) = next(&args.lender, &mut member.events).await {} };
    tokio::select! {
        _ = timeout(END_LIMIT, ended) => {}
        () = stop.received() => {}
    }
    Ok(())
}

/// The plan without what is of this machine only: where files lie, and the model that guesses. A lender refuses a plan with a field that it does not
/// know, so which GPUs other members use is left out, too.
fn plan_for_lender(plan: &MemberPlan) -> Result<String, BorrowError> {
    let mut spec = plan.spec.clone();
    let file = PathBuf::from(&spec.model.file);
    let name = file.file_name().unwrap_or_default();
    spec.model.file = name.to_string_lossy().into_owned();
    spec.draft = None;
    for (rank, member) in spec.members.iter_mut().enumerate() {
        // Without a draft model, no plan may have one on a GPU.
        member.draft_on_gpu = false;
        if rank != plan.rank {
            member.gpus.clear();
        }
    }
    let mut document = RingPlan::new("lent", spec);
    document.metadata.uid = plan.uid.clone();
    serde_saphyr::to_string(&document).map_err(BorrowError::Yaml)
}

/// A member on a machine that is lent.
struct Remote<'a> {
    lender: &'a str,
    /// Its end ends the member.
    orders: Option<mpsc::Sender<Order>>,
    events: Streaming<Event>,
    /// What sends the model, until all is sent.
    sending: OptionFuture<JoinHandle<Result<(), SendError>>>,
    sends: bool,
}

impl Remote<'_> {
    /// Sends what is wanted, and shows what the member writes, until it ends, which it should not.
    async fn follow(&mut self, first: &Path, files: &[ModelFile]) -> Result<(), BorrowError> {
        let sent = Arc::new(AtomicU64::new(0));
        let patience = patience(files);
        let mut headway = Headway::new(Instant::now(), patience);
        let (mut knows_wanted, mut total_bytes, mut shown) = (false, 0, 0);
        let mut ticks = interval(PROGRESS_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let event = tokio::select! {
                event = next(self.lender, &mut self.events) => event?,
                Some(ended) = &mut self.sending => {
                    (self.sending, self.sends) = (None.into(), false);
                    ended??;
                    show_progress(total_bytes, total_bytes);
                    continue;
                }
                // Once it has all, the member runs, and says nothing for as long as all goes well.
                _ = ticks.tick(), if self.sends || !knows_wanted => {
                    let sent = sent.load(Ordering::Relaxed);
                    if headway.has_ended(sent, Instant::now()) {
                        return Err(BorrowError::Lost {
                            lender: self.lender.to_owned(),
                            problem: format!(
                                "it has taken nothing of the model for {} s; look at its disk",
                                patience.as_secs()
                            ),
                        });
                    }
                    // Not a line each second, on links where it takes hours.
                    if self.sends && 20 * sent / total_bytes > shown {
                        shown = 20 * sent / total_bytes;
                        show_progress(sent, total_bytes);
                    }
                    continue;
                }
            };
            match event {
                Some(Happened::Wanted(_)) if knows_wanted => {
                    return Err(SendError::Wanted.into());
                }
                Some(Happened::Wanted(wanted)) => {
                    (knows_wanted, headway) = (true, Headway::new(Instant::now(), patience));
                    let wanted = Sending::new(first, files, wanted)?;
                    total_bytes = wanted.total_bytes;
                    if let (Some(orders), 1..) = (self.orders.clone(), total_bytes) {
                        let sent = sent.clone();
                        show_progress(0, total_bytes);
                        let sending = spawn_blocking(move || wanted.send(&orders, &sent));
                        (self.sending, self.sends) = (Some(sending).into(), true);
                    }
                }
                Some(Happened::Line(line)) => {
                    let _ = writeln!(io::stdout(), "{line}");
                }
                Some(Happened::Ended(how)) => {
                    return Err(BorrowError::Ended {
                        lender: self.lender.to_owned(),
                        how,
                    });
                }
                None => {}
            }
        }
    }
}

/// For how long a lender may take nothing of these files: as any answer may take, and as a slow disk takes to write the whole files.
/// Where a file system has no holes (FAT, exFAT), the system fills them with zeros before a byte is there, or before one at their end.
fn patience(files: &[ModelFile]) -> Duration {
    let bytes: u64 = files.iter().map(|file| file.size_bytes).sum();
    ANSWER_LIMIT + Duration::from_secs(bytes / SLOW_DISK_BYTES)
}

/// How much was sent, and when it became so much. A lender whose disk hangs answers pings, and takes nothing.
struct Headway {
    sent: u64,
    since: Instant,
    patience: Duration,
}

impl Headway {
    fn new(now: Instant, patience: Duration) -> Self {
        Self {
            sent: 0,
            since: now,
            patience,
        }
    }

    /// Whether it has stayed at `sent` for too long.
    fn has_ended(&mut self, sent: u64, now: Instant) -> bool {
        if sent > self.sent {
            (self.sent, self.since) = (sent, now);
        }
        now.duration_since(self.since) >= self.patience
    }
}

/// What the lender tells next.
async fn next(
    lender: &str,
    events: &mut Streaming<Event>,
) -> Result<Option<Happened>, BorrowError> {
    let lender = || lender.to_owned();
    match events.message().await {
        Ok(Some(event)) => Ok(event.event.map(as_shown)),
        Ok(None) => Err(BorrowError::Lost {
            lender: lender(),
            problem: "its agent ended the stream".to_owned(),
        }),
        Err(status) => Err(match status.source() {
            Some(_) => BorrowError::Lost {
                lender: lender(),
                problem: root_cause(&status),
            },
            None => BorrowError::NotRun {
                lender: lender(),
                problem: printable(status.message()),
            },
        }),
    }
}

/// What the lender wrote, as this machine's terminal may have it.
fn as_shown(event: Happened) -> Happened {
    match event {
        Happened::Line(line) => Happened::Line(printable(&line)),
        Happened::Ended(how) => Happened::Ended(printable(&how)),
        Happened::Wanted(wanted) => Happened::Wanted(wanted),
    }
}

fn show_progress(sent: u64, total: u64) {
    progress(&format!(
        "has {} of its {} of the model",
        rounded(sent),
        rounded(total)
    ));
}

#[cfg(test)]
mod tests {
    use prima_crds::v1alpha1::ring_plan::{PlannedDraft, PlannedGpu};

    use super::*;
    use crate::ring::test_plan::plan;

    #[test]
    fn a_lender_reads_a_plan_whose_draft_model_is_on_another_gpu() {
        let mut spec = plan(6, 3, 1, &[2, 4]);
        spec.model.file = "/models/test.gguf".to_owned();
        spec.draft = Some(PlannedDraft {
            model: spec.model.clone(),
            memory_bytes: 0,
        });
        spec.members[0].draft_on_gpu = true;
        for member in &mut spec.members {
            member.gpus = vec![PlannedGpu {
                name: format!("the GPU of {}", member.name),
                beside_layers_bytes: 0,
            }];
        }
        spec.validate().unwrap();
        let plan = MemberPlan {
            spec,
            uid: Some("a uid".to_owned()),
            rank: 1,
        };
        let text = plan_for_lender(&plan).unwrap();
        let told = RingPlan::from_yaml("the plan", &text).unwrap();
        let spec = told.spec;
        assert_eq!((told.metadata.uid, spec.draft), (plan.uid, None));
        assert_eq!(spec.model.file, "test.gguf");
        let gpus = spec.members.iter().map(|member| member.gpus.len());
        assert_eq!(gpus.collect::<Vec<_>>(), [0, 1, 0]);
        assert_eq!(spec.members[1].gpus, plan.spec.members[1].gpus);
        // A lender of before refuses a plan that has it at all.
        assert!(!text.contains("draftOnGpu"), "{text}");
    }

    #[test]
    fn a_lender_that_takes_nothing_for_long_is_lost() {
        let start = Instant::now();
        let after = |thirds: u32| start + thirds * ANSWER_LIMIT / 3;
        let mut headway = Headway::new(start, ANSWER_LIMIT);
        // Before it has said what it wants, too.
        assert!(!headway.has_ended(0, after(2)));
        assert!(headway.has_ended(0, after(3)));
        // However slowly it goes on.
        for thirds in 3..9 {
            assert!(!headway.has_ended(thirds.into(), after(thirds)));
        }
        assert!(!headway.has_ended(8, after(10)));
        assert!(headway.has_ended(8, after(11)));
    }

    #[test]
    fn no_word_of_a_lender_moves_the_cursor() {
        let word = || "\u{1b}[2J\rm0 | all is well\n".to_owned();
        let shown = "\u{fffd}[2J\u{fffd}m0 | all is well\u{fffd}".to_owned();
        for (event, expected) in [
            (Happened::Line(word()), Happened::Line(shown.clone())),
            (Happened::Ended(word()), Happened::Ended(shown)),
        ] {
            assert_eq!(as_shown(event), expected);
        }
    }

    #[test]
    fn a_lender_may_fill_whole_files_with_zeros_first() {
        let file = |size_bytes: u64| ModelFile {
            size_bytes,
            ..ModelFile::default()
        };
        assert_eq!(patience(&[]), ANSWER_LIMIT);
        // 40 GiB at 4 MiB/s.
        let more = patience(&[file(10 << 30), file(30 << 30)]) - ANSWER_LIMIT;
        assert_eq!(more, Duration::from_secs(10_240));
    }
}
