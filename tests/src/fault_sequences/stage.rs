//! What many sequences are tried on, and what must hold of each sequence.

use std::fmt::{self, Display, Formatter};
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::ListParams;
use kube::{Api, Client};
use prima_crds::v1alpha1::ring_plan::RingPlan;
use serde_json::json;
use tokio::runtime::Runtime;

use super::client::{Asking, PATIENCE, PROMPTS, SetOnDrop, TOKENS, View, complete};
use super::faults::sleep_until;
use super::observed::Observed;
use super::sequence::{Fault, MACHINES, Sequence, Setting};
use crate::api_server::ApiServer;
use crate::operator::NAMESPACE;
use crate::patience::pause;
use crate::stopwatch::Stopwatch;
use crate::{declared_machines, wait_for, wait_until};

/// Answers one after the other, until a ring counts as healed.
pub(super) const IN_A_ROW: usize = 5;

/// Members of a Model's ring, so that another machine can take the place of one.
const LEAST: usize = MACHINES - 1;

/// A control plane and machines with agents, two operators, and a copy of the model's file on each machine. Ends on drop.
pub trait Place: Sync {
    /// What can be done to it.
    const SETTING: Setting;

    /// Does `work` in a network from where rings and the API server are reached, whatever is broken.
    fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T;

    fn api(&self) -> &ApiServer;

    /// The model's file, as machines call it.
    fn model(&self) -> PathBuf;

    /// Brings a fault about, and lifts it at `end`. Returns for how much longer than its kind says a broken ring may go unseen, since nobody
    /// leads meanwhile.
    fn carry_out(&self, fault: &Fault, roles: &Roles, end: Instant) -> Duration;

    /// Until it is over, starts again what ends by itself, and notes it, where nobody else does.
    fn keep_up(&self, over: &AtomicBool, ended: &Mutex<Vec<String>>);

    /// How many members of rings run.
    fn members(&self) -> usize;

    /// Deletes what belonged to a Model that is gone, where nobody else does.
    fn collect_garbage(&self, model: &str);

    /// Whether all is there again that faults take away.
    ///
    /// # Errors
    /// What is not.
    fn is_whole(&self) -> Result<(), String>;

    /// What programs of ours wrote, as far as it is there.
    fn logs(&self) -> Vec<PathBuf>;

    /// Keeps the logs of all programs, and tells where.
    fn keep_logs(self) -> PathBuf;
}

/// How long a Model may say falsely that it answers. What takes longer, but not too long for its faults, is shown.
pub const FALSE_READY_GOAL: Duration = Duration::from_secs(5);
/// How soon a ring should be back after the last fault, wherever it runs.
pub const HEALING_GOAL: Duration = Duration::from_secs(60);

/// Made once for many sequences. Ends on drop.
pub struct Stage<P> {
    pub(super) expected: [String; 3],
    pub(super) runtime: Runtime,
    pub(super) client: Client,
    pub(super) place: P,
    sequences: AtomicU32,
}

/// Who has which part.
pub struct Roles {
    /// Of the newest ring, by rank.
    pub(super) members: Vec<String>,
    /// The operator that leads, or led last.
    pub(super) leader: String,
}

impl Roles {
    /// Places in a list of machines: those of the ring first, by rank.
    pub(super) fn order<'a>(&self, machines: impl Iterator<Item = &'a str>) -> Vec<usize> {
        let rank = |name: &str| self.members.iter().position(|member| member == name);
        let ranks = machines.map(|name| rank(name).unwrap_or(self.members.len()));
        let mut order: Vec<(usize, usize)> = ranks.zip(0..).collect();
        order.sort();
        order.into_iter().map(|(_, index)| index).collect()
    }
}

/// What came of a sequence.
#[derive(Debug)]
pub struct Report {
    /// From the Model's creation, before all faults.
    pub ready_after: Duration,
    pub answers: usize,
    pub failures: usize,
    pub longest_false_ready: Duration,
    /// What was said and what failed, if that is longer than it should be.
    pub story: Option<String>,
    /// After the last fault was lifted.
    pub healed_after: Option<Duration>,
    /// Programs that ended by themselves, as a leader does that finds another one.
    pub ended: Vec<String>,
    /// What must not be.
    pub problems: Vec<String>,
}

impl<P: Place> Stage<P> {
    /// Waits until a Model answers there.
    pub fn on(place: P) -> Stage<P> {
        let (runtime, client) = place.within(|| {
            // Its threads stay in this network.
            let runtime = Runtime::new().expect("a runtime");
            let client = runtime.block_on(declared_machines::client(place.api()));
            (runtime, client)
        });
        let mut stage = Stage {
            expected: Default::default(),
            runtime,
            client,
            place,
            sequences: AtomicU32::default(),
        };
        stage.expected = stage.place.within(|| stage.undisturbed());
        stage
    }

    /// A Model, from its creation to its end, with these faults in between.
    pub fn run(&self, sequence: &Sequence) -> Report {
        self.place.within(|| self.run_here(sequence))
    }

    fn run_here(&self, sequence: &Sequence) -> Report {
        let heals_within = P::SETTING.heals_within;
        let panics_before = self.panics();
        let model = self.next_model();
        let created = Instant::now();
        self.create(&model, LEAST);
        let view = View::of(&model, &self.client, &self.runtime);
        let (over, in_a_row, ended) = (AtomicBool::new(false), Mutex::default(), Mutex::default());
        let mut problems = Vec::new();
        let mut nobody_leads = Duration::ZERO;
        let (ready_after, healed_after, (observed, wrong)) = thread::scope(|threads| {
            let end = SetOnDrop(&over);
            threads.spawn(|| self.place.keep_up(&over, &ended));
            let is_ready = || view.ready().is_some();
            let ready_after = within(heals_within, is_ready).then(|| created.elapsed());
            let begin = Instant::now();
            let asking = Asking {
                view: &view,
                model: &model,
                expected: &self.expected,
                begin,
                stop: &over,
                in_a_row: &in_a_row,
            };
            let asking = threads.spawn(move || asking.run());
            let faults = sequence.0.iter();
            let faults: Vec<_> = faults
                .map(|fault| threads.spawn(move || self.carry_out(fault, begin)))
                .collect();
            for fault in faults {
                nobody_leads = nobody_leads.max(fault.join().expect("a fault"));
            }
            let lifted = Instant::now();
            let mut answered_from = None;
            let healed = within(heals_within, || {
                let in_a_row = in_a_row.lock().unwrap();
                let mut since = in_a_row.iter().filter(|at| **at >= lifted);
                answered_from = since.next().copied();
                view.ready().is_some() && since.count() + 1 >= IN_A_ROW
            });
            let healed_after = answered_from
                .filter(|_| healed)
                .map(|at: Instant| at - lifted);
            drop(end);
            (ready_after, healed_after, asking.join().expect("a client"))
        });
        if ready_after.is_none() {
            problems.push(format!(
                "the ring was not ready within {heals_within:?}, before any fault"
            ));
        } else if healed_after.is_none() {
            problems.push(format!(
                "the ring did not come back within {heals_within:?}: {}",
                self.state(&model)
            ));
        }
        problems.extend(wrong);
        let (silent_since, longest_false_ready) = observed.longest_false_ready();
        let bound = sequence.unseen(&P::SETTING) + nobody_leads;
        if longest_false_ready > bound {
            problems.push(format!(
                "said for {longest_false_ready:.1?} that it answers, and did not (bound: {bound:?})"
            ));
        }
        let story = longest_false_ready > bound.min(FALSE_READY_GOAL);
        let story = story.then(|| told(&observed, silent_since));
        problems.extend(self.end(&model, &panics_before));
        Report {
            ready_after: ready_after.unwrap_or_default(),
            answers: observed.asked.len() - observed.failed(),
            failures: observed.failed(),
            longest_false_ready,
            story,
            healed_after,
            ended: ended.into_inner().expect("programs that ended"),
            problems,
        }
    }

    /// Deletes the Model. What is left of it then, and what must not be.
    pub(super) fn end(&self, model: &str, panics_before: &[String]) -> Vec<String> {
        let Setting {
            heals_within,
            ends_within,
            ..
        } = P::SETTING;
        let mut problems = Vec::new();
        self.delete(model);
        let mut left = Vec::new();
        let ends = within(ends_within, || {
            left = self.left_behind(model);
            left.is_empty()
        });
        if !ends {
            problems.push(format!("left behind: {}", left.join(", ")));
        }
        let mut lacks = None;
        let whole = within(heals_within, || {
            lacks = self.place.is_whole().err();
            lacks.is_none()
        });
        problems.extend(lacks.filter(|_| !whole));
        let panics = self.panics().into_iter();
        problems.extend(panics.filter(|line| !panics_before.contains(line)));
        problems
    }

    /// Keeps the logs of all programs, and tells where.
    pub fn keep_logs(self) -> PathBuf {
        self.place.keep_logs()
    }

    /// Waits until the fault begins, and until it has been lifted. Returns what [`Place::carry_out`] does.
    fn carry_out(&self, fault: &Fault, begin: Instant) -> Duration {
        sleep_until(begin + fault.at);
        let end = begin + fault.at + fault.lasts;
        self.place.carry_out(fault, &self.roles(), end)
    }

    /// As the API server has it; while it is away, it is waited for.
    pub(super) fn roles(&self) -> Roles {
        let plans = Api::<RingPlan>::default_namespaced(self.client.clone());
        let all = ListParams::default();
        let plans = wait_for("plans", || self.runtime.block_on(plans.list(&all)));
        let plans = plans.items.into_iter();
        let newest = plans.max_by_key(|plan| plan.spec.generation);
        let members = newest.map(|plan| plan.spec.members).unwrap_or_default();
        let leases = Api::<Lease>::namespaced(self.client.clone(), NAMESPACE);
        let lease = wait_for("the Lease of who leads", || {
            self.runtime.block_on(leases.get("prima-operator"))
        });
        let leader = lease.spec.and_then(|spec| spec.holder_identity);
        Roles {
            members: members.into_iter().map(|member| member.name).collect(),
            leader: leader.unwrap_or_default(),
        }
    }

    /// Answers while nothing is wrong.
    fn undisturbed(&self) -> [String; 3] {
        let model = "undisturbed";
        self.create(model, LEAST);
        let view = View::of(model, &self.client, &self.runtime);
        let address = wait_for("a ring", || view.ready().ok_or_else(|| self.state(model)));
        let ask = |prompt| complete(PATIENCE, address, model, prompt, TOKENS);
        let answers = PROMPTS.map(|prompt| wait_for("an answer", || ask(prompt)));
        self.delete(model);
        wait_until("nothing is left", || self.left_behind(model).is_empty());
        answers
    }

    /// What the next Model is called.
    pub(super) fn next_model(&self) -> String {
        let sequence = self.sequences.fetch_add(1, Ordering::Relaxed);
        format!("sequence-{sequence}")
    }

    /// A Model of so many members at least.
    pub(super) fn create(&self, model: &str, least: usize) {
        let object = json!({
            "apiVersion": "prima.dev/v1alpha1",
            "kind": "Model",
            "metadata": {"name": model, "namespace": "default"},
            "spec": {
                "source": {"hostPath": {"path": self.place.model()}},
                "contextLength": 512,
                "minNodes": least,
            },
        });
        self.place
            .api()
            .apply(&object.to_string())
            .expect("a Model");
    }

    fn delete(&self, model: &str) {
        let deleted = self.place.api().kubectl(&["delete", "model", model]);
        deleted.expect("deleted");
    }

    /// What there is of a Model that was deleted: members, whosever they are, or else objects. These are collected at each look, as a cluster
    /// does: an operator that was at work on the Model may have written some after it was gone.
    fn left_behind(&self, model: &str) -> Vec<String> {
        let label = format!("prima.dev/model={model}");
        let kinds = "ringplans,services,endpointslices";
        let get = ["get", kinds, "-l", &label, "-o", "name"];
        let objects = self.place.api().kubectl(&get);
        if objects.as_ref().is_ok_and(|objects| !objects.is_empty()) {
            self.place.collect_garbage(model);
        }
        let members = self.place.members();
        if members > 0 {
            return vec![format!("{members} members")];
        }
        let objects = objects.unwrap_or_else(|error| error.to_string());
        objects.lines().map(str::to_owned).collect()
    }

    /// What the cluster says of it, for people.
    pub(super) fn state(&self, model: &str) -> String {
        let conditions =
            "{range .status.conditions[*]}{.type}={.status} {.reason}: {.message}\n{end}";
        let conditions = format!("jsonpath={conditions}");
        let members = "{range .items[*]}{.metadata.name}: {range .status.members[*]}{.name} {.state} ({.message}), {end}\n{end}";
        let members = format!("jsonpath={members}");
        let asked = [
            &["model", model, "-o", &conditions][..],
            &["ringplans", "--all-namespaces", "-o", &members],
            &["pods", "--all-namespaces", "-o", "wide"],
        ];
        let said = asked.map(|asked| {
            self.place
                .api()
                .kubectl(&[&["get"], asked].concat())
                .unwrap_or_else(|error| error.to_string())
        });
        said.concat()
    }

    /// Lines of all logs.
    pub(super) fn panics(&self) -> Vec<String> {
        let logs = self.place.logs().into_iter();
        let logs = logs.filter_map(|file| fs::read(file).ok());
        let lines = logs.flat_map(|log| {
            let log = String::from_utf8_lossy(&log).into_owned();
            let panics = log.lines().filter(|line| line.contains("panicked at"));
            panics.map(str::to_owned).collect::<Vec<_>>()
        });
        lines.collect()
    }
}

/// Says where the logs of a stage are in which a sequence failed, and tries shorter ones, each on a stage of its own. Returns the shortest that
/// fails.
pub fn shrunk<P: Place>(
    failed: Stage<P>,
    make: impl Fn() -> Stage<P>,
    sequence: Sequence,
) -> Sequence {
    eprintln!("logs: {}", failed.keep_logs().display());
    sequence.shrink(|shorter| {
        let report = make().run(shorter);
        eprintln!("without one: {shorter}\n  {report}");
        !report.problems.is_empty()
    })
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let healed = match self.healed_after {
            Some(after) => format!("healed after {:.1} s", after.as_secs_f64()),
            None => "not healed".to_owned(),
        };
        let (ready, lie) = (
            self.ready_after.as_secs_f64(),
            self.longest_false_ready.as_secs_f64(),
        );
        write!(
            f,
            "ready after {ready:.1} s; {} answers, {} failures, false Ready for {lie:.1} s; {healed}",
            self.answers, self.failures
        )?;
        if !self.ended.is_empty() {
            write!(f, "; ended by themselves: {}", self.ended.join(", "))?;
        }
        let problems = self.problems.iter();
        problems
            .map(|problem| format!("PROBLEM: {problem}"))
            .chain(self.story.clone())
            .try_for_each(|line| write!(f, "\n  {line}"))
    }
}

/// When it said what, what failed, and since when nobody heard anything for longest, for people.
fn told(observed: &Observed, silent_since: Duration) -> String {
    let said = observed
        .said
        .iter()
        .map(|(at, said)| (*at, format!("says that it answers: {said}")));
    let failed = observed.asked.iter().filter_map(|asked| {
        let (_, why) = asked.given_up.clone()?;
        Some((asked.last_heard(), why))
    });
    let silent = (silent_since, "nobody hears anything".to_owned());
    let mut lines: Vec<_> = said.chain(failed).chain([silent]).collect();
    lines.sort();
    let lines: Vec<String> = lines
        .iter()
        .map(|(at, line)| format!("{:5.1} s: {line}", at.as_secs_f64()))
        .collect();
    lines.join("\n  ")
}

/// Whether it holds within this time, by a clock that stands while programs wait for a processor.
pub(super) fn within(bound: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let clock = Stopwatch::start();
    loop {
        let begun = Instant::now();
        match holds() {
            true => return true,
            false if clock.elapsed() > bound => return false,
            false => pause(begun.elapsed()),
        }
    }
}
