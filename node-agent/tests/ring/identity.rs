//! The ring computes what one process computes, to the bit; and its sessions do not touch one another.

use prima_crds::v1alpha1::ring_plan::{ActivationDtype, KvDtype};
use prima_engine::KvFormat;
use prima_node_agent::ring::{Output, RingEvent};
use prima_node_agent::trace::Trace;

use crate::harness::{ModelFile, Ring, bits, fork, in_time, open, plan, tokens, until};
use prima_test_models::options::options;
use prima_test_models::{FAMILIES, MadeUpModel};

/// Members, and where windows end: even, uneven and empty windows, the whole model on one member, k of 1 to 3.
const SPLITS: &[(usize, &[usize])] = &[
    (1, &[5]),
    (1, &[2, 5]),
    (1, &[1, 1, 5]),
    (2, &[3, 5]),
    (2, &[0, 5]),
    (2, &[5, 5]),
    (2, &[1, 2, 4, 5]),
    (3, &[2, 4, 5]),
    (3, &[0, 5, 5]),
    (3, &[1, 1, 2, 3, 5, 5]),
    (3, &[0, 1, 1, 2, 3, 3, 4, 5, 5]),
    (5, &[1, 2, 3, 4, 5]),
    (5, &[0, 0, 5, 5, 5]),
    (5, &[1, 1, 1, 2, 2, 3, 3, 4, 5, 5]),
    (5, &[0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 5, 5, 5]),
];

#[tokio::test]
async fn any_split_gives_the_logits_of_one_process_to_the_bit() {
    let file = ModelFile::made_up();
    // Three chunks, then single tokens.
    let (prompt, answer) = (300, 4);
    let text = tokens(prompt + answer);
    let expected = file.logits(&text);
    for (members, ends) in SPLITS {
        let (ring, mut client) =
            Ring::start(&file.model, plan(&file.path, file.layers(), *members, ends));
        client.ready().await.unwrap();
        let session = open(&mut client).await;
        let logits = client.forward(session, &text[..prompt]).await.unwrap();
        assert!(
            bits(&logits) == bits(&expected[prompt - 1]),
            "prefill, {members} members, windows end at {ends:?}"
        );
        for position in prompt..prompt + answer {
            let logits = client
                .forward(session, &text[position..=position])
                .await
                .unwrap();
            assert!(
                bits(&logits) == bits(&expected[position]),
                "position {position}, {members} members, windows end at {ends:?}"
            );
        }
        drop(ring);
    }
}

#[tokio::test]
async fn a_larger_chunk_goes_round_in_one_frame() {
    let file = ModelFile::made_up();
    let text = tokens(400);
    let expected = file.logits(&text).pop().unwrap();
    let mut planned = plan(&file.path, file.layers(), 2, &[1, 2, 4, 5]);
    planned.plan.chunk_positions = 512;
    let (_ring, mut client) = Ring::start(&file.model, planned);
    client.ready().await.unwrap();
    let session = open(&mut client).await;
    client.send(session, &text, 1).await.unwrap();
    let output = loop {
        match in_time(client.next()).await.unwrap() {
            RingEvent::Answer { output, .. } => break output,
            RingEvent::Busy => {}
            other => panic!("{other:?}"),
        }
    };
    assert!(bits(&output) == bits(&expected));
}

#[tokio::test]
async fn a_q8_0_kv_cache_gives_the_bits_of_one_process() {
    let file = ModelFile::made_up();
    let text = tokens(160);
    let expected = file.logits_with(KvFormat::Q8_0, &text);
    assert!(expected != file.logits(&text), "F16 has other bits");
    for (members, ends) in [(1, &[5][..]), (2, &[3, 5]), (3, &[1, 1, 2, 3, 5, 5])] {
        let mut planned = plan(&file.path, file.layers(), members, ends);
        planned.plan.kv_dtype = KvDtype::Q8_0;
        let (_ring, mut client) = Ring::start(&file.model, planned);
        client.ready().await.unwrap();
        let parent = open(&mut client).await;
        let mut found = vec![client.forward(parent, &text[..150]).await.unwrap()];
        let child = fork(&mut client, parent).await;
        for token in &text[150..] {
            found.push(client.forward(child, &[*token]).await.unwrap());
        }
        for (position, logits) in (149..).zip(&found) {
            assert!(
                bits(logits) == bits(&expected[position]),
                "position {position}, {members} members, windows end at {ends:?}"
            );
        }
    }
}

#[tokio::test]
async fn every_family_goes_round_as_in_one_process() {
    for architecture in FAMILIES {
        let file = ModelFile::of(MadeUpModel::of(architecture));
        goes_round(architecture, &file).await;
    }
}

#[tokio::test]
async fn every_option_goes_round_as_in_one_process() {
    for variant in options() {
        goes_round(variant.name, &ModelFile::variant(&variant)).await;
    }
}

/// A prompt and some tokens have the bits that one process has, in rings of one, two and three.
async fn goes_round(name: &str, file: &ModelFile) {
    let (prompt, answer) = (140, 3);
    let text = tokens(prompt + answer);
    let expected = file.logits(&text);
    let layers = file.layers();
    // The last: three members, two rounds.
    let splits: [&[usize]; 4] = [
        &[layers],
        &[2, layers],
        &[1, 3, layers],
        &[1, 2, 3, 4, 5, layers],
    ];
    for (members, ends) in [1, 2, 3, 3].into_iter().zip(splits) {
        let (_ring, mut client) = Ring::start(&file.model, plan(&file.path, layers, members, ends));
        client.ready().await.unwrap();
        let session = open(&mut client).await;
        let mut found = vec![client.forward(session, &text[..prompt]).await.unwrap()];
        for token in &text[prompt..] {
            found.push(client.forward(session, &[*token]).await.unwrap());
        }
        for (position, logits) in (prompt - 1..).zip(&found) {
            assert!(
                bits(logits) == bits(&expected[position]),
                "{name}, position {position}, {members} members, windows end at {ends:?}"
            );
        }
    }
}

#[tokio::test]
async fn batched_sessions_do_not_touch_one_another() {
    let file = ModelFile::made_up();
    let (_ring, mut client) = Ring::start(
        &file.model,
        plan(&file.path, file.layers(), 3, &[1, 2, 3, 4, 5, 5]),
    );
    client.ready().await.unwrap();
    let texts: Vec<Vec<u32>> = (0..4).map(|index| tokens(20 + index)).collect();
    let mut sessions = Vec::new();
    for text in &texts {
        let session = open(&mut client).await;
        client.send(session, &text[..10], 0).await.unwrap();
        sessions.push(session);
    }
    // Every session has its chunk and all its tokens in flight at the same time.
    for position in 10..23 {
        for (text, session) in texts.iter().zip(&sessions) {
            if let Some(token) = text.get(position) {
                client.send(*session, &[*token], 1).await.unwrap();
            }
        }
    }
    let mut heard: Vec<Vec<Vec<f32>>> = vec![Vec::new(); texts.len()];
    while heard.iter().map(Vec::len).sum::<usize>()
        < texts.iter().map(|text| text.len() - 10 + 1).sum()
    {
        match client.next().await.unwrap() {
            RingEvent::Answer {
                session, output, ..
            } => {
                let index = sessions.iter().position(|other| *other == session).unwrap();
                heard[index].push(output);
            }
            other => panic!("{other:?}"),
        }
    }
    for (text, heard) in texts.iter().zip(&heard) {
        let expected = file.logits(text);
        assert!(heard[0].is_empty(), "no logits were asked for");
        for (position, logits) in heard.iter().skip(1).enumerate() {
            assert!(
                bits(logits) == bits(&expected[10 + position]),
                "position {}",
                10 + position
            );
        }
    }
}

#[tokio::test]
async fn forks_and_truncations_go_round_in_order() {
    let file = ModelFile::made_up();
    let (ring, mut client) = Ring::start(
        &file.model,
        plan(&file.path, file.layers(), 3, &[1, 2, 3, 4, 4, 5]),
    );
    client.ready().await.unwrap();
    let text = tokens(40);
    let parent = open(&mut client).await;
    client.forward(parent, &text[..30]).await.unwrap();
    let child = fork(&mut client, parent).await;
    // The parent goes back and elsewhere; the child goes on.
    client.truncate(parent, 10).await.unwrap();
    let other = [3, 1, 4, 1, 5];
    let parents = client.forward(parent, &other).await.unwrap();
    let childs = client.forward(child, &text[30..]).await.unwrap();
    let elsewhere: Vec<u32> = text[..10].iter().chain(&other).copied().collect();
    assert!(bits(&parents) == bits(file.logits(&elsewhere).last().unwrap()));
    assert!(bits(&childs) == bits(file.logits(&text).last().unwrap()));

    assert_eq!(ring.sessions(), [2, 2, 2]);
    for session in [parent, child] {
        client.release(session).await.unwrap();
        while !matches!(client.next().await.unwrap(), RingEvent::Released { session: released } if released == session)
        {
        }
    }
    assert_eq!(ring.sessions(), [0, 0, 0]);
}

#[tokio::test]
async fn refuted_frames_come_home_and_change_nothing() {
    let file = ModelFile::made_up();
    let (ring, mut client) = Ring::start(
        &file.model,
        plan(&file.path, file.layers(), 3, &[1, 2, 3, 4, 4, 5]),
    );
    client.ready().await.unwrap();
    let text = tokens(60);
    let expected = file.logits(&text);
    let session = open(&mut client).await;
    client.forward(session, &text[..10]).await.unwrap();
    let mut dropped = 0;
    for first in 10..50 {
        // Guesses, one behind the other, and then what is right from the second on.
        for guess in [[text[first], 5], [6, 7], [8, 9]] {
            client.send(session, &guess, 2).await.unwrap();
        }
        let right = &text[first + 1..first + 3];
        client
            .send_from(
                session,
                first + 1,
                right,
                2,
                Output::Logits,
                &Trace::default(),
            )
            .await
            .unwrap();
        let mut answers = Vec::new();
        while answers.len() < 4 {
            match in_time(client.next()).await.unwrap() {
                RingEvent::Answer { output, .. } => answers.push(output),
                other => panic!("{other:?}"),
            }
        }
        let vocabulary = expected[0].len();
        assert!(bits(&answers[0][..vocabulary]) == bits(&expected[first]));
        assert!(bits(&answers[3]) == bits(&expected[first + 1..first + 3].concat()));
        dropped += answers[1..3].iter().filter(|one| one.is_empty()).count();
        client.truncate(session, first + 1).await.unwrap();
    }
    assert!(dropped > 0, "every guess was computed");
    client.release(session).await.unwrap();
    until("every member has freed it", || ring.sessions() == [0, 0, 0]).await;
}

#[tokio::test]
async fn sixteen_bit_activations_stay_near_the_exact_answer() {
    let file = ModelFile::made_up();
    let text = tokens(20);
    let expected = file.logits(&text).pop().unwrap();
    let mut differences = Vec::new();
    for dtype in [ActivationDtype::F16, ActivationDtype::BF16] {
        let mut planned = plan(&file.path, file.layers(), 3, &[2, 4, 5]);
        planned.plan.activation_dtype = dtype;
        let (_ring, mut client) = Ring::start(&file.model, planned);
        client.ready().await.unwrap();
        let session = open(&mut client).await;
        let logits = client.forward(session, &text).await.unwrap();
        let difference = |(a, b): (&f32, &f32)| (a - b).abs();
        differences.push(
            logits
                .iter()
                .zip(&expected)
                .map(difference)
                .fold(0.0, f32::max),
        );
    }
    // F16 has three bits more than BF16; the logits are a few units wide.
    let [f16, bf16] = differences[..] else {
        panic!("{differences:?}");
    };
    assert!(0.0 < f16 && f16 < bf16 && bf16 < 0.5, "{differences:?}");
}
