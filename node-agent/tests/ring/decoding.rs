//! Requests on a whole ring: what concurrent clients, stop rules, cancellations and losses come to.

use std::time::Duration;

use prima_engine::Model;
use prima_node_agent::decode::{self, Decode, DecodeOptions, DraftModel, DraftThread};
use prima_node_agent::generation::{
    FinishReason, GenerationError, GenerationEvent, GenerationRequest, Generator, Readiness,
    Submission, SubmitError, TokenLogprob, Usage,
};
use prima_node_agent::ring::RingClient;
use prima_node_agent::trace::Trace;
use prima_text::{SamplingParams, Tokenizer};
use tokio::sync::{mpsc, oneshot, watch};

use crate::harness::{CONTEXT, ModelFile, Planned, Ring, in_time, member, plan, tokens, until};
use prima_test_models::{Runner, greedy};

/// A ring of three members in two rounds with decoding in front, as rank 0 has it behind its gateway.
pub struct Served {
    pub ring: Ring,
    pub generator: Generator,
    submissions: mpsc::Sender<Submission>,
}

impl Served {
    pub async fn start(file: &ModelFile) -> Self {
        Self::over_plan(
            file,
            plan(&file.path, file.layers(), 3, &[1, 2, 3, 4, 4, 5]),
        )
        .await
    }

    pub async fn over_plan(file: &ModelFile, planned: Planned) -> Self {
        let served = Self::loading(&file.model, planned);
        served.ready().await;
        served
    }

    /// One that computes token by token.
    pub async fn without_drafts(file: &ModelFile, planned: Planned) -> Self {
        let (ring, client) = Ring::start(&file.model, planned);
        let options = DecodeOptions {
            speculate: false,
            ..DecodeOptions::default()
        };
        let served = Self::decoding(ring, client, &file.model, options);
        served.ready().await;
        served
    }

    /// One whose drafts are another model's, too.
    pub async fn with_draft_model(file: &ModelFile, planned: Planned, draft: &ModelFile) -> Self {
        let contexts = planned.plan.kv_contexts as usize;
        let (ring, client) = Ring::start(&file.model, planned);
        let model = Model::open(&draft.path).unwrap();
        let model = DraftModel::new(model, &file.model, None, 1, CONTEXT, contexts).unwrap();
        let options = DecodeOptions {
            draft_model: Some(DraftThread::start(model).unwrap()),
            ..DecodeOptions::default()
        };
        let served = Self::decoding(ring, client, &file.model, options);
        served.ready().await;
        served
    }

    fn loading(model: &Model, planned: Planned) -> Self {
        let (ring, client) = Ring::start(model, planned);
        Self::over(ring, client, model)
    }

    pub fn over(ring: Ring, client: RingClient, model: &Model) -> Self {
        Self::decoding(ring, client, model, DecodeOptions::default())
    }

    pub fn decoding(ring: Ring, client: RingClient, model: &Model, options: DecodeOptions) -> Self {
        let tokenizer = Tokenizer::from_gguf(&model.gguf().metadata).unwrap();
        let (submissions, received) = mpsc::channel(8);
        let (status, seen) = watch::channel(decode::initial_status(&ring.plan));
        let decode = Decode::new(
            client,
            ring.plan.clone(),
            model.spec(),
            tokenizer,
            status,
            options,
        );
        ring.members[0].runtime().spawn(decode.run(received));
        Self {
            ring,
            generator: Generator::new(submissions.clone(), seen),
            submissions,
        }
    }

    pub async fn ready(&self) {
        let mut status = self.generator.status();
        in_time(status.wait_for(|status| status.readiness == Readiness::Ready))
            .await
            .unwrap();
    }

    /// With a reader that takes in no event, and has room for so many.
    pub async fn generate_unread(
        &self,
        request: GenerationRequest,
        room: usize,
    ) -> mpsc::Receiver<GenerationEvent> {
        let (events, unread) = mpsc::channel(room);
        let (accepted, answer) = oneshot::channel();
        let submission = Submission {
            trace: Trace::default(),
            request,
            events,
            accepted,
        };
        self.submissions.send(submission).await.ok().unwrap();
        answer.await.unwrap().unwrap();
        unread
    }

    pub async fn generate(&self, request: GenerationRequest) -> Answer {
        Answer::read(self.generator.submit(request).await.unwrap()).await
    }

    /// Nothing is computed any more, and every member holds what rank 0 keeps for later requests and nothing else.
    pub async fn only_keeps(&self) {
        let status = self.generator.status();
        until("every member holds what is kept and nothing else", || {
            let status = status.borrow();
            let kept = status.kv.used_positions == status.kv.kept_positions;
            let members = self.ring.sessions();
            let same = members.iter().all(|held| *held == status.kv.sessions);
            kept && same && status.running_requests + status.waiting_requests == 0
        })
        .await;
    }
}

/// All that came back, sorted by choice.
#[derive(Debug, Default)]
pub struct Answer {
    pub choices: Vec<ChoiceAnswer>,
    pub vector: Option<Vec<f32>>,
    pub score: Option<f32>,
    pub usage: Option<Usage>,
    pub error: Option<GenerationError>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChoiceAnswer {
    pub tokens: Vec<u32>,
    pub text: String,
    pub reason: Option<FinishReason>,
    pub logprobs: Vec<TokenLogprob>,
}

impl Answer {
    pub async fn read(mut events: mpsc::Receiver<GenerationEvent>) -> Self {
        let mut answer = Self::default();
        while let Some(event) = in_time(events.recv()).await {
            assert!(
                answer.usage.is_none() && answer.error.is_none(),
                "nothing follows the last event: {event:?}"
            );
            match event {
                GenerationEvent::Token {
                    choice,
                    token,
                    text,
                    logprob,
                } => {
                    let choice = answer.choice(choice);
                    assert_eq!(choice.reason, None);
                    choice.tokens.push(token);
                    choice.text += &text;
                    choice.logprobs.extend(logprob);
                }
                GenerationEvent::Finished {
                    choice,
                    reason,
                    text,
                } => {
                    let choice = answer.choice(choice);
                    assert_eq!(choice.reason.replace(reason), None);
                    choice.text += &text;
                }
                GenerationEvent::Embedding(vector) => answer.vector = Some(vector),
                GenerationEvent::Score(score) => answer.score = Some(score),
                GenerationEvent::Usage(usage) => answer.usage = Some(usage),
                GenerationEvent::Failed(error) => answer.error = Some(error),
            }
        }
        answer
    }

    fn choice(&mut self, index: usize) -> &mut ChoiceAnswer {
        if self.choices.len() <= index {
            self.choices.resize(index + 1, ChoiceAnswer::default());
        }
        &mut self.choices[index]
    }
}

pub fn request(prompt: &[u32], max_tokens: usize) -> GenerationRequest {
    GenerationRequest {
        prompt: prompt.into(),
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        max_tokens,
        stop: Vec::new(),
        constraint: None,
        reasoning: None,
        shown: Vec::new(),
        logprobs: None,
        choices: 1,
        instead: None,
        keyspace: 0,
        client: 0,
    }
}

/// What one process without a ring answers greedily, up to the end-of-generation token.
pub fn alone(file: &ModelFile, prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let runner = Runner::split(&file.model, &[file.layers()], 1);
    let tokenizer = Tokenizer::from_gguf(&file.model.gguf().metadata).unwrap();
    let mut kv = runner.kv_cache();
    let mut logits = runner.logits(&mut kv, prompt).pop().unwrap();
    let mut answer = Vec::new();
    while answer.len() < max_tokens {
        let token = greedy(&logits);
        if tokenizer.is_end_of_generation(token) {
            break;
        }
        answer.push(token);
        logits = runner.logits(&mut kv, &[token]).pop().unwrap();
    }
    answer
}

#[tokio::test]
async fn answers_to_many_at_once_equal_the_answers_alone() {
    let file = ModelFile::made_up();
    let served = Served::start(&file).await;
    // More requests than sessions, prompts of one to three chunks: some wait, all are mixed.
    let prompts: Vec<Vec<u32>> = [3, 200, 17, 300, 1, 129, 64, 5].map(tokens).into();
    let answers = futures::future::join_all(
        prompts
            .iter()
            .map(|prompt| served.generate(request(prompt, 24))),
    )
    .await;
    for (prompt, answer) in prompts.iter().zip(&answers) {
        assert_eq!(
            answer.choices[0].tokens,
            alone(&file, prompt, 24),
            "prompt of {} tokens",
            prompt.len()
        );
        let usage = answer.usage.unwrap();
        assert_eq!(
            (usage.prompt_tokens, usage.completion_tokens),
            (prompt.len(), answer.choices[0].tokens.len())
        );
        assert!(usage.prompt_seconds > 0.0);
    }
    served.only_keeps().await;
    let status = served.generator.status().borrow().clone();
    assert_eq!((status.running_requests, status.waiting_requests), (0, 0));
    for member in &status.members {
        assert!(
            member.frames > 0 && member.network_seconds > 0.0,
            "{member:?}"
        );
    }
    assert!(status.members[0].timing.compute_ns > 0);
}

#[tokio::test]
async fn choices_share_a_prompt_and_then_go_their_own_ways() {
    let file = ModelFile::made_up();
    let served = Served::start(&file).await;
    let prompt = tokens(150);
    let sampled = |choices, seed| GenerationRequest {
        choices,
        sampling: SamplingParams {
            temperature: 1.5,
            seed,
            ..SamplingParams::default()
        },
        ..request(&prompt, 12)
    };
    let together = served.generate(sampled(3, 40)).await;
    assert_eq!(together.choices.len(), 3);
    for (index, choice) in together.choices.iter().enumerate() {
        let single = served.generate(sampled(1, 40 + index as u64)).await;
        assert_eq!(choice, &single.choices[0], "choice {index}");
    }
    assert_ne!(together.choices[0].tokens, together.choices[1].tokens);
    let total: usize = together
        .choices
        .iter()
        .map(|choice| choice.tokens.len())
        .sum();
    assert_eq!(together.usage.unwrap().completion_tokens, total);
    served.only_keeps().await;
}

#[tokio::test]
async fn a_text_ends_before_its_stop_string_and_after_its_last_token() {
    let file = ModelFile::made_up();
    let served = Served::start(&file).await;
    let prompt = tokens(9);
    let whole = served
        .generate(request(&prompt, 30))
        .await
        .choices
        .remove(0);
    assert_eq!(
        (whole.tokens.len(), whole.reason),
        (30, Some(FinishReason::Length))
    );
    assert_eq!(
        whole.text.len(),
        30,
        "the made-up tokens are characters: {}",
        whole.text
    );

    // Two tokens long, and not where the text began to repeat itself.
    let stop = whole.text[10..13].to_owned();
    let expected = whole.text.split(&stop).next().unwrap();
    let stopped = served
        .generate(GenerationRequest {
            stop: vec!["never".into(), stop.clone()],
            ..request(&prompt, 30)
        })
        .await;
    assert_eq!(stopped.choices[0].text, expected);
    assert_eq!(stopped.choices[0].reason, Some(FinishReason::StopString(1)));

    // What only began like a stop string is text after all.
    let beginning = format!("{}#", &whole.text[28..]);
    let held = served
        .generate(GenerationRequest {
            stop: vec![beginning],
            ..request(&prompt, 30)
        })
        .await;
    assert_eq!(held.choices[0], whole);

    // The end of the context ends the text, too: the last token needs no position.
    let long = tokens(508);
    let end = served.generate(request(&long, 100)).await.choices.remove(0);
    assert_eq!(
        (end.tokens.len(), end.reason),
        (5, Some(FinishReason::Length))
    );
    served.only_keeps().await;
}

#[tokio::test]
async fn logprobs_are_the_models_own() {
    let file = ModelFile::made_up();
    let served = Served::start(&file).await;
    let prompt = tokens(20);
    let answer = served
        .generate(GenerationRequest {
            logprobs: Some(3),
            ..request(&prompt, 4)
        })
        .await;
    let choice = &answer.choices[0];
    assert_eq!(choice.logprobs.len(), 4);
    let text: Vec<u32> = prompt.iter().chain(&choice.tokens).copied().collect();
    let logits = file.logits(&text);
    for (index, logprob) in choice.logprobs.iter().enumerate() {
        let logits = &logits[prompt.len() - 1 + index];
        let largest = logits.iter().copied().fold(f32::MIN, f32::max);
        let sum: f32 = logits.iter().map(|logit| (logit - largest).exp()).sum();
        let expected = logits[choice.tokens[index] as usize] - largest - sum.ln();
        assert!(
            (logprob.logprob - expected).abs() < 1e-4,
            "{logprob:?}, expected {expected}"
        );
        assert_eq!(logprob.top.len(), 3);
        assert_eq!(
            logprob.top[0].0, choice.tokens[index],
            "greedy takes the most likely"
        );
    }
}

#[tokio::test]
async fn a_client_that_hangs_up_stops_its_sessions_on_every_member() {
    let file = ModelFile::made_up();
    let served = Served::start(&file).await;
    // One of two choices in the middle of its answer, and one that has more than a chunk of prompt.
    let mut answering = served
        .generator
        .submit(GenerationRequest {
            choices: 2,
            ..request(&tokens(5), 500)
        })
        .await
        .unwrap();
    in_time(answering.recv()).await.unwrap();
    let prefilling = request(&tokens(500), 300);
    let prefilling = served.generator.submit(prefilling).await.unwrap();
    until("every member has a session of each choice", || {
        served.ring.sessions() == [3, 3, 3]
    })
    .await;
    drop(prefilling);
    drop(answering);
    served.only_keeps().await;
    // And one that is gone as soon as it was taken.
    drop(served.generator.submit(request(&tokens(500), 5)).await);
    served.only_keeps().await;
    let mut status = served.generator.status();
    in_time(status.wait_for(|status| status.running_requests == 0))
        .await
        .unwrap();
    // All sessions can be had again, and nothing of those before is in them.
    let expected = alone(&file, &tokens(3), 3);
    let answers =
        futures::future::join_all((0..4).map(|_| served.generate(request(&tokens(3), 3)))).await;
    for answer in &answers {
        assert!(answer.error.is_none(), "{answer:?}");
        assert_eq!(answer.choices[0].tokens, expected);
    }
}

#[tokio::test]
async fn what_cannot_be_taken_is_refused_at_once_with_the_field() {
    let file = ModelFile::made_up();
    let served = Served::start(&file).await;
    let field = async |request| match served.generator.submit(request).await {
        Err(SubmitError::Invalid { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(field(request(&[], 1)).await, "prompt");
    assert_eq!(field(request(&[96], 1)).await, "prompt");
    assert_eq!(field(request(&[1], 0)).await, "max_tokens");
    assert_eq!(
        field(GenerationRequest {
            choices: 5,
            ..request(&[1], 1)
        })
        .await,
        "n"
    );
    let mut hot = request(&[1], 1);
    hot.sampling.temperature = -1.0;
    assert_eq!(field(hot).await, "temperature");
    let mut biased = request(&[1], 1);
    biased.sampling.logit_bias = vec![(96, 1.0)];
    assert_eq!(field(biased).await, "logit_bias");
    let long = served.generator.submit(request(&tokens(513), 1)).await;
    assert_eq!(
        long.err(),
        Some(SubmitError::ContextExceeded { context: 512 })
    );

    // Four sessions, sixteen places to wait.
    let mut running = Vec::new();
    let full = loop {
        match served
            .generator
            .submit(GenerationRequest {
                choices: 4,
                ..request(&tokens(4), 400)
            })
            .await
        {
            Ok(events) => running.push(events),
            Err(full) => break full,
        }
    };
    let SubmitError::Full {
        waiting,
        retry_after,
        ..
    } = full
    else {
        panic!("{full}");
    };
    assert_eq!(waiting, 16);
    assert!(retry_after >= Duration::from_secs(1));
    drop(running);
    served.only_keeps().await;
}

#[tokio::test]
async fn a_member_lost_in_mid_stream_is_named_and_may_come_back() {
    let file = ModelFile::made_up();
    let mut served = Served::start(&file).await;
    let prompt = tokens(40);
    let mut running = Vec::new();
    for _ in 0..6 {
        running.push(
            served
                .generator
                .submit(request(&prompt, 470))
                .await
                .unwrap(),
        );
    }
    in_time(running[0].recv()).await.unwrap();
    drop(served.ring.members.remove(1));
    for events in running {
        let answer = Answer::read(events).await;
        match answer.error {
            Some(GenerationError::MemberLost { member, .. }) => assert_eq!(member, "m1"),
            other => panic!("{other:?}"),
        }
    }
    until("the others have released their sessions", || {
        served.ring.sessions() == [0, 0]
    })
    .await;
    let refused = served.generator.submit(request(&prompt, 1)).await.err();
    assert!(
        matches!(&refused, Some(SubmitError::NotReady { reason }) if reason.contains("m1")),
        "{refused:?}"
    );

    let plan = served.ring.plan.clone();
    let listener = std::net::TcpListener::bind(&plan.members[1].address).unwrap();
    served
        .ring
        .members
        .insert(1, member(&file.model, &plan, 1, listener));
    served.ready().await;
    let answer = served.generate(request(&prompt, 10)).await;
    assert_eq!(answer.choices[0].tokens, alone(&file, &prompt, 10));
}

#[tokio::test]
async fn nothing_is_taken_until_all_members_are_there() {
    let file = ModelFile::made_up();
    let mut planned = plan(&file.path, file.layers(), 3, &[1, 2, 5]);
    // Its place is taken by nobody.
    let missing = planned.listeners.remove(2);
    drop(missing);
    let served = Served::loading(&file.model, planned);
    let mut status = served.generator.status();
    let named = status.wait_for(
        |status| matches!(&status.readiness, Readiness::Loading(reason) if reason.contains("m2")),
    );
    in_time(named).await.unwrap();
    let refused = served.generator.submit(request(&[1], 1)).await.err();
    assert!(
        matches!(refused, Some(SubmitError::NotReady { .. })),
        "{refused:?}"
    );
}

/// Its last word was that it is ready, and its streams are whole.
#[tokio::test]
async fn a_rank_0_that_stands_still_is_told_from_one_that_waits() {
    let file = ModelFile::made_up();
    let served = Served::start(&file).await;
    let status = served.generator.status();
    let stands_still = || status.borrow().stands_still();
    // Something else has its thread.
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let rank_0 = served.ring.members[0].runtime();
    rank_0.spawn(async move { ended.recv() });
    until("rank 0 is known to stand still", stands_still).await;
    assert_eq!(status.borrow().readiness, Readiness::Ready);
    drop(end);
    until("it is known to go on", || !stands_still()).await;
}

#[tokio::test]
async fn decoding_ends_when_its_last_client_has_gone() {
    let file = ModelFile::made_up();
    let Served {
        ring, generator, ..
    } = Served::start(&file).await;
    let events = generator.submit(request(&tokens(4), 20)).await.unwrap();
    let mut status = generator.status();
    drop(generator);
    // What had been accepted is finished first.
    assert!(Answer::read(events).await.usage.is_some());
    in_time(async { while status.changed().await.is_ok() {} }).await;
    drop(ring);
}

#[tokio::test]
async fn a_reader_that_is_too_far_behind_counts_as_gone() {
    let file = ModelFile::made_up();
    let served = Served::start(&file).await;
    let mut unread = served.generate_unread(request(&tokens(20), 400), 10).await;
    // Before the first token, too, the members only keep what they have.
    until("the reader has no room left", || unread.len() == 10).await;
    served.only_keeps().await;
    let mut told = 0;
    while let Some(event) = unread.recv().await {
        assert!(matches!(event, GenerationEvent::Token { .. }), "{event:?}");
        told += 1;
    }
    // What it had room for, and no end.
    assert_eq!(told, 10);
    // Others are answered.
    let answer = served.generate(request(&tokens(20), 30)).await;
    assert_eq!(answer.choices[0].tokens, alone(&file, &tokens(20), 30));
}
