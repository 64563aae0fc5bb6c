//! Runs the planner beside the reconciles: searches take from milliseconds to many seconds, and no Model waits for another's. A reconcile
//! waits a moment for its answer; a search that takes longer goes on. When it ends, the Model is reconciled again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::runtime::reflector::ObjectRef;
use prima_crds::v1alpha1::model::Model;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinError, JoinHandle, spawn_blocking};
use tokio::time::timeout_at;

use super::decide::{Answer, Question};
use crate::cluster::metrics::Metrics;

pub struct Planner {
    search: fn(&Question) -> Answer,
    metrics: Arc<Metrics>,
    /// Limits searches that keep nobody waiting.
    leisurely: Arc<Semaphore>,
    answered: mpsc::UnboundedSender<ObjectRef<Model>>,
}

/// A search of one Model. If this is dropped before its turn has come, nobody searches.
pub struct Search {
    fingerprint: String,
    task: JoinHandle<Result<Answer, JoinError>>,
}

impl Drop for Search {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// How long a reconcile waits for its answers.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// Searches at the same time that are not urgent: each takes a processor, and all for its reasons.
const LEISURELY: usize = 2;

impl Planner {
    /// Also returns the Models that have an answer.
    pub fn new(
        search: fn(&Question) -> Answer,
        metrics: Arc<Metrics>,
    ) -> (Self, mpsc::UnboundedReceiver<ObjectRef<Model>>) {
        let (answered, models) = mpsc::unbounded_channel();
        let planner = Self {
            search,
            metrics,
            leisurely: Arc::new(Semaphore::new(LEISURELY)),
            answered,
        };
        (planner, models)
    }

    /// The answer, if it is there before `until`. `search`: the running search of the same Model, if any; once another question is asked,
    /// it is given up.
    ///
    /// # Errors
    /// If the search ended without an answer, which is a mistake in the planner.
    pub async fn answer(
        &self,
        model: ObjectRef<Model>,
        question: Question,
        search: &mut Option<Search>,
        until: Instant,
    ) -> Result<Option<Answer>, JoinError> {
        let mut current = match search.take() {
            Some(search) if search.fingerprint == question.fingerprint => search,
            _ => self.begin(model, question),
        };
        match timeout_at(until.into(), &mut current.task).await {
            Ok(ended) => ended?.map(Some),
            Err(_) => {
                *search = Some(current);
                Ok(None)
            }
        }
    }

    fn begin(&self, model: ObjectRef<Model>, question: Question) -> Search {
        let fingerprint = question.fingerprint.clone();
        let (search, metrics, answered) =
            (self.search, self.metrics.clone(), self.answered.clone());
        let turn = (!question.urgent).then(|| self.leisurely.clone());
        let task = tokio::spawn(async move {
            let turn = match turn {
                // The semaphore is never closed.
                Some(turn) => turn.acquire_owned().await.ok(),
                None => None,
            };
            let searched = spawn_blocking(move || {
                // One that is given up goes on to its end, and has its turn as long.
                let _turn = turn;
                let begun = Instant::now();
                let answer = search(&question);
                metrics
                    .planning_seconds
                    .observe(begun.elapsed().as_secs_f64());
                answer
            })
            .await;
            // If nobody listens any more, nobody need know.
            let _ = answered.send(model);
            searched
        });
        Search { fingerprint, task }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use tokio::task::yield_now;

    use super::*;
    use crate::model_controller::decide::NoRing;

    fn question(fingerprint: &str, urgent: bool) -> Question {
        Question::for_tests(fingerprint, urgent)
    }

    /// For an answer that comes some time.
    fn some_time() -> Instant {
        Instant::now() + Duration::from_secs(300)
    }

    /// Questions that may be answered; all others are searched for until they may.
    static ANSWERABLE: (Mutex<Vec<String>>, Condvar) = (Mutex::new(Vec::new()), Condvar::new());

    /// Questions that were searched for.
    static SEARCHED: Mutex<Vec<String>> = Mutex::new(Vec::new());

    fn search(question: &Question) -> Answer {
        SEARCHED.lock().unwrap().push(question.fingerprint.clone());
        let (answerable, more) = &ANSWERABLE;
        let waits = |known: &mut Vec<String>| !known.contains(&question.fingerprint);
        drop(more.wait_while(answerable.lock().unwrap(), waits).unwrap());
        Answer {
            fingerprint: question.fingerprint.clone(),
            plan: Err(NoRing {
                reason: "None",
                message: "there is none".to_owned(),
            }),
        }
    }

    fn let_answer(question: &str) {
        ANSWERABLE.0.lock().unwrap().push(question.to_owned());
        ANSWERABLE.1.notify_all();
    }

    /// A question that may be answered when this is dropped: also where a test fails, since its runtime waits for its searches.
    struct Withheld(&'static str);

    impl Drop for Withheld {
        fn drop(&mut self) {
            let_answer(self.0);
        }
    }

    #[tokio::test]
    async fn a_broken_ring_does_not_wait_for_other_plans() {
        let (planner, mut answered) = Planner::new(search, Arc::new(Metrics::new()));
        let long = Withheld("long");
        let_answer("urgent");
        let soon = || Instant::now() + Duration::from_millis(20);
        let mut others: Vec<Option<Search>> = (0..3).map(|_| None).collect();
        for (index, search) in others.iter_mut().enumerate() {
            let model = ObjectRef::new(&format!("slow-{index}"));
            let answer = planner.answer(model, question("long", false), search, soon());
            assert!(answer.await.unwrap().is_none());
        }
        // It has an answer before any of the others.
        let (model, search) = (ObjectRef::new("broken"), &mut None);
        let answer = planner.answer(model, question("urgent", true), search, some_time());
        assert_eq!(answer.await.unwrap().unwrap().fingerprint, "urgent");
        assert_eq!(answered.recv().await.unwrap().name, "broken");
        drop(long);

        // A search that nobody waited for is reported, and its answer is there.
        let late = answered.recv().await.unwrap().name;
        let index: usize = late.strip_prefix("slow-").unwrap().parse().unwrap();
        let model = ObjectRef::new(&late);
        let answer = planner.answer(
            model,
            question("long", false),
            &mut others[index],
            some_time(),
        );
        assert!(answer.await.unwrap().is_some());
        assert!(others[index].is_none());
    }

    #[tokio::test]
    async fn another_question_is_asked_anew() {
        let (planner, _answered) = Planner::new(search, Arc::new(Metrics::new()));
        let _first = Withheld("first");
        let_answer("second");
        let mut search = None;
        let (model, now) = (ObjectRef::new("m"), Instant::now());
        let none = planner.answer(model.clone(), question("first", true), &mut search, now);
        assert!(none.await.unwrap().is_none());
        let answer = planner.answer(model, question("second", true), &mut search, some_time());
        let answer = answer.await;
        assert_eq!(answer.unwrap().unwrap().fingerprint, "second");
    }

    #[tokio::test]
    async fn a_question_that_waits_gives_way_to_the_next() {
        let (planner, _answered) = Planner::new(search, Arc::new(Metrics::new()));
        let now = Instant::now();
        let taken = Withheld("taken");
        let mut others: Vec<Option<Search>> = (0..LEISURELY).map(|_| None).collect();
        for (index, search) in others.iter_mut().enumerate() {
            let model = ObjectRef::new(&format!("other-{index}"));
            let answer = planner.answer(model, question("taken", false), search, now);
            assert!(answer.await.unwrap().is_none());
        }
        let (model, mut search) = (ObjectRef::new("m"), None);
        for asked in ["oldest", "older", "newest"] {
            let_answer(asked);
            let question = question(asked, false);
            let answer = planner.answer(model.clone(), question, &mut search, now);
            assert!(answer.await.unwrap().is_none());
            // It begins to wait for its turn.
            yield_now().await;
        }
        drop(taken);
        let question = question("newest", false);
        let answer = planner.answer(model, question, &mut search, some_time());
        assert!(answer.await.unwrap().is_some());
        let searched = SEARCHED.lock().unwrap();
        let of_this: Vec<&String> = searched
            .iter()
            .filter(|asked| ["oldest", "older", "newest"].contains(&asked.as_str()))
            .collect();
        assert_eq!(of_this, ["newest"]);
    }
}
