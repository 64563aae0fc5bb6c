//! Two neighbours of a ring that do not reach each other, while everybody else reaches both. It lasts until the Model answers all the same, or says
//! what a person must do. How long that takes is told by a clock that stands while programs wait for a processor.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use kube::Api;
use prima_crds::v1alpha1::model::Model;

use super::client::{Asking, SetOnDrop, View};
use super::machines::Machines;
use super::sequence::Kind;
use super::stage::{IN_A_ROW, Place as _, Stage, within};
use crate::stopwatch::Stopwatch;
use crate::{PATIENCE, wait_for};

/// What came of it.
#[derive(Debug)]
pub struct KeptApart {
    /// The two.
    pub pair: [String; 2],
    /// After the cut, that the Model named them.
    pub named_after: Option<Duration>,
    /// That another ring answered: after the cut, or after the Model asked for fewer members, where there was none before.
    pub answered_after: Option<Duration>,
    pub longest_false_ready: Duration,
    /// What must not be.
    pub problems: Vec<String>,
}

/// The reason in a condition.
const REASON: &str = "MachinesApart";

impl Stage<Machines<'_>> {
    /// A Model of so many members at least. Of its ring, these ways between the last two are cut: from the one to the other is 0, back is 1. If the
    /// ring has all machines, and so no other one has as many members, the Model asks for one fewer when it has named the two.
    ///
    /// # Panics
    /// Where there is no ring before that.
    pub fn keep_apart(&self, least: usize, ways: Range<usize>) -> KeptApart {
        let panics_before = self.panics();
        let model = self.next_model();
        self.create(&model, least);
        let view = View::of(&model, &self.client, &self.runtime);
        wait_for("a ring", || view.ready().ok_or_else(|| self.state(&model)));
        let members = self.roles().members;
        let [.., one, other] = members.as_slice() else {
            panic!("a ring of {members:?}");
        };
        let pair = [one, other];
        let (over, in_a_row, ended) = (AtomicBool::new(false), Mutex::default(), Mutex::default());
        let mut problems = Vec::new();
        let (named_after, answered_after, (observed, wrong)) = thread::scope(|threads| {
            let end = SetOnDrop(&over);
            threads.spawn(|| self.place.keep_up(&over, &ended));
            let asking = Asking {
                view: &view,
                model: &model,
                expected: &self.expected,
                begin: Instant::now(),
                stop: &over,
                in_a_row: &in_a_row,
            };
            let asking = threads.spawn(move || asking.run());
            let (named, answered) = self.place.cut(self.indices(pair), ways, || {
                let (cut, mut begun) = (Instant::now(), Stopwatch::start());
                let named = within(PATIENCE, || self.names(&model, pair));
                let named = named.then(|| begun.elapsed());
                if members.len() == self.place.machines.len() {
                    self.ask_for(&model, least - 1);
                    begun = Stopwatch::start();
                }
                let answers = || {
                    let in_a_row = in_a_row.lock().unwrap().clone();
                    let since_cut = in_a_row.iter().filter(|at| **at >= cut).count();
                    let members = self.roles().members;
                    let has_both = pair.iter().all(|name| members.contains(*name));
                    since_cut >= IN_A_ROW && view.ready().is_some() && !has_both
                };
                (named, within(PATIENCE, answers).then(|| begun.elapsed()))
            });
            if named.is_none() || answered.is_none() {
                problems.push(self.state(&model));
            }
            drop(end);
            (named, answered, asking.join().expect("a client"))
        });
        problems.extend(wrong);
        let (_, longest_false_ready) = observed.longest_false_ready();
        let bound = Kind::Cut.unseen(true);
        if longest_false_ready > bound {
            problems.push(format!(
                "said for {longest_false_ready:.1?} that it answers, and did not (bound: {bound:?})"
            ));
        }
        problems.extend(self.end(&model, &panics_before));
        KeptApart {
            pair: pair.map(String::clone),
            named_after,
            answered_after,
            longest_false_ready,
            problems,
        }
    }

    fn indices(&self, names: [&String; 2]) -> [usize; 2] {
        names.map(|name| {
            let mut machines = self.place.machines.iter();
            let index = machines.position(|machine| machine.name == *name);
            index.expect("a machine of this stage")
        })
    }

    /// Whether a condition of the Model names both, and that they do not reach each other.
    fn names(&self, model: &str, pair: [&String; 2]) -> bool {
        let models = Api::<Model>::default_namespaced(self.client.clone());
        let status = self.runtime.block_on(models.get(model));
        let status = status.ok().and_then(|model| model.status);
        let mut conditions = status.iter().flat_map(|status| &status.conditions);
        conditions.any(|condition| {
            let names = pair.iter().all(|name| condition.message.contains(*name));
            condition.reason == REASON && names
        })
    }

    fn ask_for(&self, model: &str, least: usize) {
        let patch = format!("{{\"spec\": {{\"minNodes\": {least}}}}}");
        let patch = ["patch", "model", model, "--type=merge", "-p", &patch];
        self.place.api.kubectl(&patch).expect("another Model");
    }
}
