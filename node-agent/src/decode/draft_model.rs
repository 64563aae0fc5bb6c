//! A small model at rank 0 that guesses what the ring's model will say, on threads of its own, so that no pass of the ring waits for it.
//! What it has computed of a text stays for the next guess, within the memory that the plan has for it.
//!
//! Its guesses decide nothing: the ring's model verifies each.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::model_profile::{OtherVocabulary, same_vocabulary};
use prima_crds::v1alpha1::ring_plan::CHUNK_POSITIONS;
use prima_engine::{BatchEntry, Compute, EngineError, KvCache, KvFormat, Model, WholeModel};
use prima_gguf::GgufError;
use prima_text::most_likely;
use prima_weights::vocabulary_marks;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::scheduler::{RequestId, common_prefix};

/// The model, and what it has computed.
pub struct DraftModel {
    whole: WholeModel,
    compute: Compute,
    /// Tokens that both models know: the first so many.
    vocabulary: usize,
    context_length: usize,
    /// Positions that all texts together may hold.
    positions: usize,
    /// The least recently used first.
    texts: Vec<Text>,
}

struct Text {
    tokens: Vec<u32>,
    kv: KvCache,
}

/// Why a model cannot guess for another.
#[derive(Debug, thiserror::Error)]
pub enum DraftModelError {
    #[error(transparent)]
    Engine(#[from] Box<EngineError>),
    #[error("cannot read the vocabulary")]
    Vocabulary(#[from] Box<GgufError>),
    #[error(transparent)]
    OtherVocabulary(#[from] OtherVocabulary),
    #[error("cannot start its thread")]
    Thread(#[source] std::io::Error),
}

impl DraftModel {
    /// `model` guesses for `target`. `contexts` texts of `context_length` tokens fit into its memory.
    ///
    /// # Errors
    /// [`DraftModelError`]; another vocabulary than the target's.
    pub fn new(
        model: Model,
        target: &Model,
        threads: usize,
        context_length: usize,
        contexts: usize,
    ) -> Result<Self, DraftModelError> {
        let marks = |model: &Model| vocabulary_marks(&model.gguf().metadata).map_err(Box::new);
        same_vocabulary(&marks(&model)?, &marks(target)?)?;
        Ok(Self {
            vocabulary: model.spec().vocabulary.min(target.spec().vocabulary),
            whole: WholeModel::open(model).map_err(Box::new)?,
            compute: Compute::new(threads).map_err(Box::new)?,
            context_length,
            positions: contexts * context_length,
            texts: Vec::new(),
        })
    }

    /// Takes in `text`, and says how it goes on: at most `count` tokens, fewer at the end of the context; none if it knows too little of the
    /// text to do that soon, or a token of it is not in its vocabulary. Returns also how much of the text it has taken in.
    ///
    /// # Errors
    /// Those of computing it; what was kept of the text is gone then.
    pub fn guess(&mut self, text: &[u32], count: usize) -> Result<(usize, Vec<u32>), EngineError> {
        let count = count.min(self.context_length.saturating_sub(text.len()));
        let unknown = |token: &u32| *token as usize >= self.vocabulary;
        if text.is_empty() || text.iter().any(unknown) {
            return Ok((text.len(), Vec::new()));
        }
        // To guess, the last token's row must be computed.
        let known = &text[..text.len() - usize::from(count > 0)];
        let mut own = self.take_longest(known);
        let missing = &text[own.tokens.len()..];
        if count > 0 && missing.len() > CHUNK_POSITIONS {
            let taken_in = own.tokens.len();
            self.texts.push(own);
            return Ok((taken_in, Vec::new()));
        }
        self.make_room(text.len() + count);
        let mut activation = Vec::new();
        for chunk in missing.chunks(CHUNK_POSITIONS) {
            activation = self.append(&mut own, chunk)?;
        }
        let hidden = self.whole.model().spec().hidden;
        let mut guesses = Vec::with_capacity(count);
        while guesses.len() < count {
            let row = &activation[activation.len() - hidden..];
            let logits = self.whole.logits(&self.compute, row)?;
            guesses.push(most_likely(&logits[..self.vocabulary]));
            if guesses.len() < count {
                activation = self.append(&mut own, &guesses[guesses.len() - 1..])?;
            }
        }
        self.texts.push(own);
        Ok((text.len(), guesses))
    }

    /// Forgets the least recently used until a text of so many tokens fits beside the others.
    fn make_room(&mut self, tokens: usize) {
        let held = |texts: &[Text]| texts.iter().map(|one| one.tokens.len()).sum::<usize>();
        while !self.texts.is_empty() && held(&self.texts) + tokens > self.positions {
            self.texts.remove(0);
        }
    }

    /// What is there of the beginning of `text`.
    fn take_longest(&mut self, text: &[u32]) -> Text {
        let shared = |one: &Text| common_prefix(&one.tokens, text);
        let longest = (0..self.texts.len()).max_by_key(|&place| shared(&self.texts[place]));
        // One that shares little is another conversation, which goes on later.
        let same = longest.filter(|&place| {
            let one = &self.texts[place];
            2 * shared(one) > one.tokens.len()
        });
        if let Some(place) = same {
            let mut one = self.texts.remove(place);
            let shared = shared(&one);
            one.kv.truncate(shared);
            one.tokens.truncate(shared);
            // Layers with a window may have given back what the next token would see.
            if one.kv.len() == shared {
                return one;
            }
        }
        Text {
            tokens: Vec::new(),
            kv: self.whole.sequence(self.context_length, KvFormat::F16),
        }
    }

    /// The activation after each of `tokens`.
    fn append(&self, text: &mut Text, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        let entry = BatchEntry {
            first_position: text.tokens.len(),
            kv: &mut text.kv,
            rows: tokens.len(),
        };
        let activation = self.whole.forward(&self.compute, tokens, &mut [entry])?;
        text.tokens.extend(tokens);
        Ok(activation)
    }
}

/// A draft model at work.
pub struct DraftThread {
    jobs: mpsc::Sender<Job>,
    guesses: UnboundedReceiver<DraftGuess>,
}

/// What is to be guessed.
pub struct Job {
    pub request: RequestId,
    pub choice: usize,
    pub text: Vec<u32>,
    pub count: usize,
}

/// How a text goes on.
#[derive(Debug)]
pub struct DraftGuess {
    pub request: RequestId,
    pub choice: usize,
    /// Of the text, what the model has taken in.
    pub taken_in: usize,
    pub tokens: Vec<u32>,
    /// How long it took.
    pub took: Duration,
}

impl DraftThread {
    pub fn start(model: DraftModel) -> Result<Self, DraftModelError> {
        let (jobs, received) = mpsc::channel();
        let (tell, guesses) = unbounded_channel();
        thread::Builder::new()
            .name("draft".into())
            .spawn(move || work(model, &received, &tell))
            .map_err(DraftModelError::Thread)?;
        Ok(Self { jobs, guesses })
    }

    /// [`Self::next`] brings the answer; after an error nothing comes.
    pub fn ask(&self, job: Job) {
        // Fails when the thread has ended, which `next` tells.
        let _ = self.jobs.send(job);
    }

    /// The next guess; `None` when the model cannot guess any more.
    pub async fn next(&mut self) -> Option<DraftGuess> {
        self.guesses.recv().await
    }
}

/// Until nobody asks any more, or it cannot compute.
fn work(mut model: DraftModel, jobs: &mpsc::Receiver<Job>, tell: &UnboundedSender<DraftGuess>) {
    while let Ok(job) = jobs.recv() {
        let begun = Instant::now();
        match model.guess(&job.text, job.count) {
            Ok((taken_in, tokens)) => {
                let guess = DraftGuess {
                    request: job.request,
                    choice: job.choice,
                    taken_in,
                    tokens,
                    took: begun.elapsed(),
                };
                if tell.send(guess).is_err() {
                    return;
                }
            }
            Err(error) => {
                let cause = prima_crds::error_chain(&error);
                tracing::warn!(
                    cause,
                    "the draft model cannot compute; answers go on without it"
                );
                return;
            }
        }
    }
}
