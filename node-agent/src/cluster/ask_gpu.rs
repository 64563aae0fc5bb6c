//! Asks the machine's GPUs, by opening them, each for itself. A driver may take its time, or hang: that stops neither the agent, nor whoever asks, nor
//! what another GPU says.

use std::collections::BTreeMap;
use std::sync::{self, Arc, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use prima_crds::v1alpha1::ring_plan::PlannedGpu;
use prima_engine::{EngineError, Gpu, GpuFacts, OpenedGpu, UsableGpu};
use tokio::sync::Mutex;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;

use crate::profile::gpu::{self, ANSWERS_WITHIN, AskedGpu};

/// A question that was not answered yet, if there is one. Who asks meanwhile waits for that answer first, so that a driver that hangs has one thread
/// and not one for each question.
type Asked<T> = Mutex<Option<JoinHandle<T>>>;

/// What the GPUs that the engine can use say of themselves, or why there is none. One that does not answer has that as its problem.
///
/// # Errors
/// Those of looking for them, and [`EngineError::NoGpu`] if that does not end.
pub async fn facts() -> Result<Vec<AskedGpu>, EngineError> {
    facts_of(|_| true).await
}

/// The same of those that `is_meant` says, as their drivers list them. No other is opened.
///
/// # Errors
/// As [`facts`].
pub async fn facts_of(is_meant: impl Fn(&GpuFacts) -> bool) -> Result<Vec<AskedGpu>, EngineError> {
    let usable = usable().await?.into_iter().enumerate();
    let meant = usable.filter(|(_, one)| is_meant(&one.facts));
    let opened = meant.map(|(place, one)| opened(place, one));
    Ok(join_all(opened).await)
}

/// Whether all GPUs that a plan names can be opened; the first, where it names none. No other is asked.
///
/// # Errors
/// Those of [`facts`] and of opening one, and [`EngineError::NotThere`].
pub async fn opens(planned: &[PlannedGpu]) -> Result<(), EngineError> {
    let names = planned.iter().map(|planned| planned.name.as_str());
    for (place, one) in UsableGpu::named(usable().await?, names)? {
        if let (_, Some(problem)) = opened(place, one).await {
            return Err(problem);
        }
    }
    Ok(())
}

async fn usable() -> Result<Vec<UsableGpu>, EngineError> {
    static ASKED: Asked<Result<Vec<UsableGpu>, EngineError>> = Mutex::const_new(None);
    ask(&ASKED, ANSWERS_WITHIN, Gpu::usable).await?
}

/// `place`: the GPU's among those that the engine can use, which are the same for as long as the agent runs.
async fn opened(place: usize, one: UsableGpu) -> AskedGpu {
    let asked = asked_of(place);
    let facts = one.facts.clone();
    answer_of(&asked, ANSWERS_WITHIN, facts, || gpu::asked(one.open())).await
}

fn asked_of(place: usize) -> Arc<Asked<AskedGpu>> {
    static ASKED: sync::Mutex<BTreeMap<usize, Arc<Asked<AskedGpu>>>> =
        sync::Mutex::new(BTreeMap::new());
    let mut asked = ASKED.lock().unwrap_or_else(PoisonError::into_inner);
    asked.entry(place).or_default().clone()
}

/// What a GPU answers, of which `facts` are known.
async fn answer_of(
    asked: &Asked<AskedGpu>,
    within: Duration,
    facts: GpuFacts,
    question: impl FnOnce() -> AskedGpu + Send + 'static,
) -> AskedGpu {
    match ask(asked, within, question).await {
        Ok(answer) => answer,
        Err(silent) => gpu::asked(OpenedGpu {
            facts,
            opened: Err(silent),
        }),
    }
}

/// Time counts from when the driver is asked, or waited for, and not while others ask.
async fn ask<T: Send + 'static>(
    asked: &Asked<T>,
    within: Duration,
    question: impl FnOnce() -> T + Send + 'static,
) -> Result<T, EngineError> {
    let mut asked = asked.lock().await;
    // What it said when nobody waited any more is of then.
    if asked.as_ref().is_some_and(JoinHandle::is_finished) {
        *asked = None;
    }
    let question = asked.get_or_insert_with(|| spawn_blocking(question));
    let Ok(ended) = timeout(within, question).await else {
        return Err(gpu::silent(within));
    };
    *asked = None;
    ended.map_err(|panic| EngineError::NoGpu {
        reason: format!("opening it ended: {panic}"),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use prima_engine::GpuApi;

    use super::*;

    const SOON: Duration = Duration::from_millis(10);

    #[tokio::test]
    async fn a_gpu_that_hangs_is_told_by_its_name() {
        let facts = GpuFacts {
            api: GpuApi::Vulkan,
            name: "twin".to_owned(),
            pci: None,
            pci_address: Some("0000:01:00.0".to_owned()),
            unified_memory: false,
            total_bytes: 2,
            available_bytes: 1,
            most_buffer_bytes: None,
        };
        let asked = Mutex::new(None);
        let (end, ended) = mpsc::channel::<()>();
        let late = (facts.clone(), None);
        let hangs = move || {
            let _ = ended.recv();
            late
        };
        let (said, problem) = answer_of(&asked, SOON, facts.clone(), hangs).await;
        assert_eq!(said, facts);
        let problem = prima_crds::error_chain(&problem.unwrap());
        let expected = "twin (0000:01:00.0): ";
        assert!(problem.starts_with(expected), "{problem}");
        assert!(problem.contains("not opened it within 0 s"), "{problem}");
        drop(end);
    }

    /// One that hangs has its own question, and keeps no other from being asked.
    #[test]
    fn each_gpu_has_one_question_at_a_time() {
        let (first, again, other) = (asked_of(700), asked_of(700), asked_of(701));
        assert!(Arc::ptr_eq(&first, &again) && !Arc::ptr_eq(&first, &other));
    }

    #[tokio::test]
    async fn a_driver_that_hangs_is_asked_once() {
        let asked: Asked<&'static str> = Mutex::new(None);
        let (end, ended) = mpsc::channel::<()>();
        let hangs = move || {
            let _ = ended.recv();
            "late"
        };
        let said = ask(&asked, SOON, hangs).await.unwrap_err().to_string();
        assert!(said.contains("not opened it within 0 s"), "{said}");
        let again = ask(&asked, SOON, || panic!("asked twice")).await;
        let said = again.unwrap_err().to_string();
        assert!(said.contains("not opened it within 0 s"), "{said}");
        drop(end);
        let said = ask(&asked, ANSWERS_WITHIN, || "now").await.unwrap();
        assert!(["late", "now"].contains(&said), "{said}");
        let said = ask(&asked, ANSWERS_WITHIN, || "now").await.unwrap();
        assert_eq!(said, "now");
    }
}
