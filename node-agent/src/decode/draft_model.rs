//! A small model at rank 0 that guesses what the ring's model will say, on threads of its own. So no pass of the ring waits for it, but one on the
//! same GPU: for as long as a pass of the small model takes there.
//! What it has computed of a text stays for the next guess, within the memory that the plan has for it; for texts of the same key space only,
//! and for as long as the ring keeps a conversation.
//!
//! Its guesses decide nothing: the ring's model verifies each.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::model_profile::{OtherVocabulary, same_vocabulary};
use prima_crds::v1alpha1::ring_plan::CHUNK_POSITIONS;
use prima_engine::kernels::BLOCK_POSITIONS;
use prima_engine::{BatchEntry, Compute, EngineError, Gpu, KvCache, KvFormat, Model, WholeModel};
use prima_gguf::GgufError;
use prima_text::most_likely;
use prima_weights::vocabulary_marks;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::scheduler::{KEPT_FOR, RequestId, common_prefix};

/// The model, and what it has computed.
pub struct DraftModel {
    whole: WholeModel,
    compute: Compute,
    /// Tokens that both models know: the first so many.
    vocabulary: usize,
    /// The most tokens of a text.
    context_length: usize,
    /// Blocks of positions that all texts together may hold.
    blocks: usize,
    /// The least recently used first.
    texts: Vec<Text>,
}

struct Text {
    /// Only texts of the same key space go on from it.
    keyspace: u64,
    tokens: Vec<u32>,
    kv: KvCache,
    last_used: Instant,
}

/// When nobody asks: how often to look for texts that have been kept for long enough.
const LOOK_EVERY: Duration = Duration::from_secs(60);

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
    /// `model` guesses for `target`, on `gpu` or, without one, on the processor. `contexts` texts of `context_length` tokens fit into its memory.
    ///
    /// # Errors
    /// [`DraftModelError`]; another vocabulary than the target's.
    pub fn new(
        model: Model,
        target: &Model,
        gpu: Option<&Gpu>,
        threads: usize,
        context_length: usize,
        contexts: usize,
    ) -> Result<Self, DraftModelError> {
        let marks = |model: &Model| vocabulary_marks(&model.gguf().metadata).map_err(Box::new);
        same_vocabulary(&marks(&model)?, &marks(target)?)?;
        // A block that is begun takes all of its memory, so none is begun that does not fit whole.
        let blocks = contexts * context_length / BLOCK_POSITIONS;
        let vocabulary = model.spec().vocabulary.min(target.spec().vocabulary);
        let whole = match gpu {
            Some(gpu) => WholeModel::open_on(gpu, model, blocks * BLOCK_POSITIONS),
            None => WholeModel::open(model),
        };
        Ok(Self {
            vocabulary,
            whole: whole.map_err(Box::new)?,
            compute: Compute::new(threads).map_err(Box::new)?,
            context_length: context_length.min(blocks * BLOCK_POSITIONS),
            blocks,
            texts: Vec::new(),
        })
    }

    /// Takes in `text`, and says how it goes on: at most `count` tokens, fewer at the end of the context; none if it knows too little of the
    /// text to do that soon, the text is longer than the context, or a token of it is not in its vocabulary. Returns also how much of the text
    /// it has taken in.
    ///
    /// # Errors
    /// Those of computing it; what was kept of the text is gone then.
    pub fn guess(
        &mut self,
        keyspace: u64,
        text: &[u32],
        count: usize,
        now: Instant,
    ) -> Result<(usize, Vec<u32>), EngineError> {
        self.forget_idle(now);
        let unknown = |token: &u32| *token as usize >= self.vocabulary;
        if text.is_empty() || text.len() > self.context_length || text.iter().any(unknown) {
            return Ok((text.len(), Vec::new()));
        }
        let count = count.min(self.context_length - text.len());
        // To guess, the last token's row must be computed.
        let known = &text[..text.len() - usize::from(count > 0)];
        let mut own = self.take_longest(keyspace, known, now);
        let missing = &text[own.tokens.len()..];
        if count > 0 && missing.len() > CHUNK_POSITIONS {
            let taken_in = own.tokens.len();
            self.keep(own);
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
        self.keep(own);
        Ok((text.len(), guesses))
    }

    /// Forgets what the ring would not keep any longer either.
    fn forget_idle(&mut self, now: Instant) {
        self.texts
            .retain(|one| now.saturating_duration_since(one.last_used) <= KEPT_FOR);
    }

    fn keep(&mut self, text: Text) {
        if !text.tokens.is_empty() {
            self.texts.push(text);
        }
    }

    /// Forgets the least recently used until a text of so many tokens fits beside the others.
    fn make_room(&mut self, tokens: usize) {
        let of_one = |tokens: usize| tokens.div_ceil(BLOCK_POSITIONS);
        let held = |texts: &[Text]| {
            texts
                .iter()
                .map(|one| of_one(one.tokens.len()))
                .sum::<usize>()
        };
        while !self.texts.is_empty() && held(&self.texts) + of_one(tokens) > self.blocks {
            self.texts.remove(0);
        }
    }

    /// What is there of the beginning of `text`.
    fn take_longest(&mut self, keyspace: u64, text: &[u32], now: Instant) -> Text {
        let shared = |one: &Text| common_prefix(&one.tokens, text);
        let places = 0..self.texts.len();
        let own = places.filter(|&place| self.texts[place].keyspace == keyspace);
        let longest = own.max_by_key(|&place| shared(&self.texts[place]));
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
            one.last_used = now;
            // Layers with a window may have given back what the next token would see.
            if one.kv.len() == shared {
                return one;
            }
        }
        Text {
            keyspace,
            tokens: Vec::new(),
            kv: self.whole.sequence(self.context_length, KvFormat::F16),
            last_used: now,
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
    pub keyspace: u64,
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
    loop {
        let job = match jobs.recv_timeout(LOOK_EVERY) {
            Ok(job) => job,
            Err(RecvTimeoutError::Timeout) => {
                model.forget_idle(Instant::now());
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let begun = Instant::now();
        match model.guess(job.keyspace, &job.text, job.count, begun) {
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

#[cfg(test)]
mod tests {
    use prima_gguf::GgmlType;
    use prima_test_models::MadeUpModel;

    use super::*;

    fn written(made_up: &MadeUpModel) -> Model {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        made_up.write_for_ring(&path);
        Model::open(&path).unwrap()
    }

    /// Guesses for a model like itself, with room for so many contexts. Returns also the bytes of that room.
    fn draft_model(context_length: usize, contexts: usize) -> (DraftModel, u64) {
        let model = written(&MadeUpModel::default());
        let layers = model.spec().layers.iter();
        let position: usize = layers
            .map(|layer| layer.attention.kv_bytes(KvFormat::F16))
            .sum();
        let planned = position * context_length * contexts;
        let target = model.clone();
        let draft = DraftModel::new(model, &target, None, 1, context_length, contexts).unwrap();
        (draft, planned as u64)
    }

    fn text(first: u32, tokens: usize) -> Vec<u32> {
        (first..).map(|token| token % 90).take(tokens).collect()
    }

    #[test]
    fn many_short_texts_stay_within_the_planned_memory() {
        // Contexts of whole blocks, and others.
        for (context_length, at_once) in [(2 * BLOCK_POSITIONS, 4), (2 * BLOCK_POSITIONS - 1, 3)] {
            let (mut draft, planned) = draft_model(context_length, 2);
            let now = Instant::now();
            for first in 0..10 {
                let (taken_in, guesses) = draft.guess(0, &text(7 * first, 3), 2, now).unwrap();
                assert_eq!((taken_in, guesses.len()), (3, 2));
                let held: u64 = draft.texts.iter().map(|one| one.kv.bytes()).sum();
                assert!(held <= planned, "{held} of {planned} bytes");
            }
            assert_eq!(draft.texts.len(), at_once);
        }
    }

    #[test]
    fn a_gpu_guesses_as_a_processor_does() {
        // Floats, so that neither rounds activations.
        let model = written(&MadeUpModel {
            formats: vec![GgmlType::F32],
            ..MadeUpModel::default()
        });
        let gpu = Gpu::software().unwrap();
        let on = |gpu| DraftModel::new(model.clone(), &model, gpu, 1, 256, 1).unwrap();
        let (mut on_cpu, mut on_gpu) = (on(None), on(Some(&gpu)));
        let now = Instant::now();
        // The second goes on from the first, and for the last the first has to go.
        for (first, tokens) in [(0, 30), (0, 70), (40, 90), (7, 120)] {
            let text = text(first, tokens);
            let expected = on_cpu.guess(0, &text, 4, now).unwrap();
            assert_eq!(expected.1.len(), 4);
            assert_eq!(on_gpu.guess(0, &text, 4, now).unwrap(), expected);
            let kept = |draft: &DraftModel| -> Vec<usize> {
                draft.texts.iter().map(|one| one.tokens.len()).collect()
            };
            assert_eq!(kept(&on_gpu), kept(&on_cpu));
        }
        assert!(on_cpu.texts.len() < 3);
    }

    #[test]
    fn a_text_longer_than_the_memory_gets_no_guess() {
        let (mut draft, planned) = draft_model(2 * BLOCK_POSITIONS - 1, 1);
        let now = Instant::now();
        for (tokens, guessed) in [
            (BLOCK_POSITIONS - 1, 1),
            (BLOCK_POSITIONS, 0),
            (BLOCK_POSITIONS + 1, 0),
        ] {
            let (taken_in, guesses) = draft.guess(0, &text(0, tokens), 5, now).unwrap();
            assert_eq!((taken_in, guesses.len()), (tokens, guessed));
            let held: u64 = draft.texts.iter().map(|one| one.kv.bytes()).sum();
            assert!(held <= planned, "{held} of {planned} bytes");
        }
    }

    #[test]
    fn a_text_serves_its_own_key_space_only() {
        let (mut draft, _) = draft_model(256, 2);
        let now = Instant::now();
        // More than it takes in at once for a guess.
        let long = text(0, CHUNK_POSITIONS + 10);
        assert_eq!(draft.guess(7, &long, 0, now).unwrap(), (long.len(), vec![]));
        assert_eq!(draft.guess(8, &long, 2, now).unwrap(), (0, vec![]));
        let (taken_in, guesses) = draft.guess(7, &long, 2, now).unwrap();
        assert_eq!((taken_in, guesses.len()), (long.len(), 2));
    }

    #[test]
    fn a_text_is_forgotten_when_the_ring_forgets_it() {
        let (mut draft, _) = draft_model(256, 2);
        let begun = Instant::now();
        draft.guess(0, &text(0, 10), 0, begun).unwrap();
        draft.guess(0, &text(50, 10), 0, begun).unwrap();
        // The first is used again.
        draft.guess(0, &text(0, 11), 0, begun + KEPT_FOR).unwrap();
        assert_eq!(draft.texts.len(), 2);
        draft.forget_idle(begun + KEPT_FOR + Duration::from_secs(1));
        assert_eq!(draft.texts.len(), 1);
        assert_eq!(draft.texts[0].tokens, text(0, 11));
        draft.forget_idle(begun + 3 * KEPT_FOR);
        assert!(draft.texts.is_empty());
    }
}
