//! Runs the planner beside the reconciles: searches take from milliseconds to many seconds, and no Model waits for another's. A reconcile
//! waits a moment for its answer; a search that takes longer goes on. When it ends, the Model is reconciled again.
//!
//! A search that has begun cannot be stopped. So a Model has one of a kind at a time, whatever becomes of the Model meanwhile: its newest question
//! waits until the search for an older one has ended. One that is urgent waits for none that is not, of any Model.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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
    /// Limits searches that keep nobody waiting,
    leisurely: Arc<Semaphore>,
    /// and those of Models whose ring is broken, and none of whose rings answers.
    urgent: Arc<Semaphore>,
    answered: mpsc::UnboundedSender<ObjectRef<Model>>,
}

/// The searches of one Model.
pub struct Searches {
    /// The last one, which has no answer yet.
    last: Option<Search>,
    /// What a search that is not urgent holds from its turn to its end,
    leisurely: Arc<Semaphore>,
    /// and what one holds that is.
    urgent: Arc<Semaphore>,
}

impl Default for Searches {
    fn default() -> Self {
        Self {
            last: None,
            leisurely: Arc::new(Semaphore::new(1)),
            urgent: Arc::new(Semaphore::new(1)),
        }
    }
}

/// If this is dropped before its turn has come, nobody searches.
struct Search {
    fingerprint: String,
    urgent: bool,
    /// It has had its turn.
    begun: Arc<AtomicBool>,
    task: JoinHandle<Result<Answer, JoinError>>,
}

impl Search {
    /// Whether this search answers the question, as soon as any would.
    fn is_for(&self, question: &Question) -> bool {
        let soon = self.urgent || !question.urgent || self.begun.load(Ordering::Relaxed);
        self.fingerprint == question.fingerprint && soon
    }
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
/// Beside them, those that are: when a machine goes, the rings of many Models may break.
const URGENT: usize = 4;

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
            urgent: Arc::new(Semaphore::new(URGENT)),
            answered,
        };
        (planner, models)
    }

    /// The answer, if it is there before `until`. `searches`: those of the same Model; once another question is asked, the last one is given up, and
    /// the next one of its kind begins when it has ended.
    ///
    /// # Errors
    /// If the search ended without an answer, which is a mistake in the planner.
    pub async fn answer(
        &self,
        model: ObjectRef<Model>,
        question: Question,
        searches: &mut Searches,
        until: Instant,
    ) -> Result<Option<Answer>, JoinError> {
        let mut current = match searches.last.take() {
            Some(search) if search.is_for(&question) => search,
            _ => self.begin(model, question, searches),
        };
        match timeout_at(until.into(), &mut current.task).await {
            Ok(ended) => ended?.map(Some),
            Err(_) => {
                searches.last = Some(current);
                Ok(None)
            }
        }
    }

    fn begin(&self, model: ObjectRef<Model>, question: Question, searches: &Searches) -> Search {
        let (fingerprint, urgent) = (question.fingerprint.clone(), question.urgent);
        let (search, metrics, answered) =
            (self.search, self.metrics.clone(), self.answered.clone());
        let (only, turns) = match urgent {
            true => (&searches.urgent, &self.urgent),
            false => (&searches.leisurely, &self.leisurely),
        };
        let (only, turns) = (only.clone(), turns.clone());
        let begun = Arc::new(AtomicBool::new(false));
        let begins = begun.clone();
        let task = tokio::spawn(async move {
            // No turn is taken while the Model's last search of this kind goes on. The semaphores are never closed.
            let only = only.acquire_owned().await.ok();
            let turn = turns.acquire_owned().await.ok();
            begins.store(true, Ordering::Relaxed);
            let searched = spawn_blocking(move || {
                // One that is given up goes on to its end, and has its turn as long.
                let _turns = (only, turn);
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
        Search {
            fingerprint,
            urgent,
            begun,
            task,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use tokio::task::yield_now;
    use tokio::time::sleep;

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

    /// Questions that were searched for, and again each with `ended`.
    static SEARCHED: Mutex<Vec<String>> = Mutex::new(Vec::new());

    /// What was searched for of these questions, in order.
    fn searched_of(questions: &[&str]) -> Vec<String> {
        let searched = SEARCHED.lock().unwrap();
        let is_of = |done: &&String| {
            let question = done.strip_suffix(" ended").unwrap_or(done);
            questions.contains(&question)
        };
        searched.iter().filter(is_of).cloned().collect()
    }

    /// In which a search that has its turn begins, and one that may be answered is.
    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    fn search(question: &Question) -> Answer {
        SEARCHED.lock().unwrap().push(question.fingerprint.clone());
        let (answerable, more) = &ANSWERABLE;
        let waits = |known: &mut Vec<String>| !known.contains(&question.fingerprint);
        drop(more.wait_while(answerable.lock().unwrap(), waits).unwrap());
        let ended = format!("{} ended", question.fingerprint);
        SEARCHED.lock().unwrap().push(ended);
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
        let mut others: Vec<Searches> = (0..3).map(|_| Searches::default()).collect();
        for (index, searches) in others.iter_mut().enumerate() {
            let model = ObjectRef::new(&format!("slow-{index}"));
            let answer = planner.answer(model, question("long", false), searches, soon());
            assert!(answer.await.unwrap().is_none());
        }
        // It has an answer before any of the others.
        let (model, searches) = (ObjectRef::new("broken"), &mut Searches::default());
        let answer = planner.answer(model, question("urgent", true), searches, some_time());
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
        assert!(others[index].last.is_none());
    }

    #[tokio::test]
    async fn the_newest_question_waits_for_the_search_under_way() {
        let (planner, _answered) = Planner::new(search, Arc::new(Metrics::new()));
        let first = Withheld("first");
        let mut searches = Searches::default();
        let model = ObjectRef::new("m");
        let none = planner.answer(
            model.clone(),
            question("first", true),
            &mut searches,
            soon(),
        );
        assert!(none.await.unwrap().is_none());
        while searched_of(&["first"]).is_empty() {
            sleep(Duration::from_millis(1)).await;
        }
        for asked in ["second", "third"] {
            let_answer(asked);
            let question = question(asked, true);
            let answer = planner.answer(model.clone(), question, &mut searches, soon());
            assert!(answer.await.unwrap().is_none());
        }
        drop(first);
        let question = question("third", true);
        let answer = planner.answer(model, question, &mut searches, some_time());
        assert_eq!(answer.await.unwrap().unwrap().fingerprint, "third");
        let searched = searched_of(&["first", "second", "third"]);
        assert_eq!(searched, ["first", "first ended", "third", "third ended"]);
    }

    #[tokio::test]
    async fn a_broken_ring_waits_for_no_leisurely_search_of_its_own() {
        let (planner, _answered) = Planner::new(search, Arc::new(Metrics::new()));
        let own = Withheld("own");
        let (model, mut searches) = (ObjectRef::new("m"), Searches::default());
        let leisurely = question("own", false);
        let none = planner.answer(model.clone(), leisurely, &mut searches, soon());
        assert!(none.await.unwrap().is_none());
        while searched_of(&["own"]).is_empty() {
            sleep(Duration::from_millis(1)).await;
        }
        let_answer("lost");
        let urgent = question("lost", true);
        let answer = planner.answer(model.clone(), urgent, &mut searches, some_time());
        assert_eq!(answer.await.unwrap().unwrap().fingerprint, "lost");
        assert_eq!(searched_of(&["own"]), ["own"]);
        // The next one that is not urgent waits for it still.
        let_answer("later");
        let leisurely = question("later", false);
        let none = planner.answer(model.clone(), leisurely, &mut searches, soon());
        assert!(none.await.unwrap().is_none());
        assert!(searched_of(&["later"]).is_empty());
        drop(own);
        let leisurely = question("later", false);
        let answer = planner.answer(model, leisurely, &mut searches, some_time());
        assert_eq!(answer.await.unwrap().unwrap().fingerprint, "later");
        let searched = searched_of(&["own", "later"]);
        assert_eq!(searched, ["own", "own ended", "later", "later ended"]);
    }

    #[tokio::test]
    async fn few_urgent_ones_are_searched_for_at_once() {
        let (planner, _answered) = Planner::new(search, Arc::new(Metrics::new()));
        let held = Withheld("held");
        let mut others: Vec<Searches> = (0..URGENT).map(|_| Searches::default()).collect();
        for (index, searches) in others.iter_mut().enumerate() {
            let model = ObjectRef::new(&format!("broken-{index}"));
            let answer = planner.answer(model, question("held", true), searches, soon());
            assert!(answer.await.unwrap().is_none());
        }
        let_answer("one more");
        let_answer("calm");
        let (model, mut searches) = (ObjectRef::new("m"), Searches::default());
        let question_of_this = || question("one more", true);
        let answer = planner.answer(model.clone(), question_of_this(), &mut searches, soon());
        assert!(answer.await.unwrap().is_none());
        // Others have turns of their own.
        let (calm, own) = (ObjectRef::new("calm"), &mut Searches::default());
        let answer = planner.answer(calm, question("calm", false), own, some_time());
        assert!(answer.await.unwrap().is_some());
        assert!(searched_of(&["one more"]).is_empty());
        drop(held);
        let answer = planner.answer(model, question_of_this(), &mut searches, some_time());
        assert!(answer.await.unwrap().is_some());
    }

    #[tokio::test]
    async fn a_question_that_becomes_urgent_waits_no_longer() {
        let (planner, _answered) = Planner::new(search, Arc::new(Metrics::new()));
        let _slow = Withheld("slow");
        let mut others: Vec<Searches> = (0..LEISURELY).map(|_| Searches::default()).collect();
        for (index, searches) in others.iter_mut().enumerate() {
            let model = ObjectRef::new(&format!("other-{index}"));
            let answer = planner.answer(model, question("slow", false), searches, soon());
            assert!(answer.await.unwrap().is_none());
        }
        let_answer("breaks");
        let (model, mut searches) = (ObjectRef::new("m"), Searches::default());
        let answer = planner.answer(
            model.clone(),
            question("breaks", false),
            &mut searches,
            soon(),
        );
        assert!(answer.await.unwrap().is_none());
        let answer = planner.answer(model, question("breaks", true), &mut searches, some_time());
        assert!(answer.await.unwrap().is_some());
        assert_eq!(searched_of(&["breaks"]), ["breaks", "breaks ended"]);
    }

    #[tokio::test]
    async fn a_question_that_waits_gives_way_to_the_next() {
        let (planner, _answered) = Planner::new(search, Arc::new(Metrics::new()));
        let now = Instant::now();
        let taken = Withheld("taken");
        let mut others: Vec<Searches> = (0..LEISURELY).map(|_| Searches::default()).collect();
        for (index, searches) in others.iter_mut().enumerate() {
            let model = ObjectRef::new(&format!("other-{index}"));
            let answer = planner.answer(model, question("taken", false), searches, now);
            assert!(answer.await.unwrap().is_none());
        }
        let (model, mut searches) = (ObjectRef::new("m"), Searches::default());
        for asked in ["oldest", "older", "newest"] {
            let_answer(asked);
            let question = question(asked, false);
            let answer = planner.answer(model.clone(), question, &mut searches, now);
            assert!(answer.await.unwrap().is_none());
            // It begins to wait for its turn.
            yield_now().await;
        }
        drop(taken);
        let question = question("newest", false);
        let answer = planner.answer(model, question, &mut searches, some_time());
        assert!(answer.await.unwrap().is_some());
        let searched = searched_of(&["oldest", "older", "newest"]);
        assert_eq!(searched, ["newest", "newest ended"]);
    }
}
