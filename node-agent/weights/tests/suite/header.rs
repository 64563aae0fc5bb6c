//! A model's header is read without its weights.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::join_all;
use prima_gguf::{Gguf, GgufError, MAX_HEADER_LEN};
use prima_weights::{
    Header, HeaderError, HeaderTurns, Remote, RemoteModel, RemoteModelError, holding,
};
use tokio::sync::oneshot;

use crate::support::{FILE, Setup, hub_source, model};

#[tokio::test]
async fn the_header_is_the_files_and_costs_little_more_than_itself() {
    let setup = Setup::new().await;
    // The second has a header of some 3.6 MB: more than is read at first.
    for (tokens, most_bytes) in [(1000, (1 << 20) + 4), (140_000, 8 << 20)] {
        let file = model(tokens);
        setup.publish(FILE, &file);
        setup.hub.clear();
        let remote = setup.open().await;
        let Header { gguf, bytes, .. } = remote.read_header().await.unwrap();
        let read = Gguf::parse(&remote.shown(), &file, file.len() as u64).unwrap();
        assert!(gguf == read);
        assert!(bytes == file[..gguf.data_offset as usize]);
        assert!(
            setup.hub.body_bytes() <= most_bytes,
            "{} bytes",
            setup.hub.body_bytes()
        );
    }
}

#[tokio::test]
async fn a_header_comes_in_spite_of_faults() {
    let setup = Setup::new().await;
    let remote = setup.open().await;
    setup.hub.control(|control| {
        control.cut = Some(prima_test_hub::Cut {
            after_bytes: 5000,
            times: 3,
        });
    });
    let Header { gguf, bytes, .. } = remote.read_header().await.unwrap();
    assert!(bytes == setup.model[..gguf.data_offset as usize]);

    // Also from a server that sends all or nothing; its answer is not read to the end.
    setup.hub.control(|control| control.ignore_ranges = true);
    let remote = Remote::open(&setup.client, &setup.plain_source(None))
        .await
        .unwrap();
    assert!(!remote.accepts_ranges());
    assert!(remote.read_header().await.unwrap().bytes == bytes);
}

#[tokio::test]
async fn what_is_no_model_is_known_by_four_bytes() {
    let setup = Setup::new().await;
    for (name, content, expected) in [
        (
            "page.gguf",
            [b"<!doctype html>".to_vec(), vec![b' '; 3 << 20]].concat(),
            "expected the magic \"GGUF\", found \"<!do\"",
        ),
        (
            "short.gguf",
            b"GG".to_vec(),
            "found the end of the file after 2 bytes",
        ),
        (
            "empty.gguf",
            vec![],
            "found the end of the file after 0 bytes",
        ),
    ] {
        setup.publish(name, &content);
        setup.hub.clear();
        let source = hub_source(&setup.hub.endpoint(), crate::support::REPO, "main", name);
        let remote = Remote::open(&setup.client, &source).await.unwrap();
        let Err(HeaderError::Gguf { source }) = remote.read_header().await else {
            panic!("{name} was taken")
        };
        assert!(source.to_string().contains(expected), "{source}");
        assert!(setup.hub.body_bytes() <= 4);
    }
    // A model file cut off in its header must be downloaded again; waiting does not help.
    setup.publish("cut.gguf", &setup.model[..1000]);
    let source = hub_source(
        &setup.hub.endpoint(),
        crate::support::REPO,
        "main",
        "cut.gguf",
    );
    let error = Remote::open(&setup.client, &source)
        .await
        .unwrap()
        .read_header()
        .await
        .unwrap_err();
    let HeaderError::Gguf {
        source: GgufError::EndOfFile { .. } | GgufError::Invalid { .. },
    } = error
    else {
        panic!("{error:?}")
    };
}

#[tokio::test]
async fn a_header_larger_than_any_models_is_not_fetched() {
    let setup = Setup::new().await;
    // One text of 40 MB.
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    for number in [0u64, 1, 1] {
        file.extend(number.to_le_bytes());
    }
    file.extend(b"a\x08\0\0\0");
    file.extend((40u64 << 20).to_le_bytes());
    file.resize(41 << 20, b' ');
    setup.publish(FILE, &file);
    setup.hub.clear();
    let error = setup.open().await.read_header().await.unwrap_err();
    assert!(matches!(error, HeaderError::TooLarge { .. }), "{error}");
    assert!(setup.hub.body_bytes() <= 4 + (1 << 20));
}

#[tokio::test]
async fn a_model_with_a_header_above_the_limit_is_not_opened() {
    let setup = Setup::new().await;
    setup.publish("large.gguf", &model(140_000));
    let source = |file| hub_source(&setup.hub.endpoint(), crate::support::REPO, "main", file);
    let within =
        async |file, limit| RemoteModel::open_within(&setup.client, &source(file), limit).await;
    assert!(within(FILE, 2 << 20).await.is_ok());
    let error = within("large.gguf", 2 << 20).await.unwrap_err();
    let RemoteModelError::Header(HeaderError::TooLarge { limit, needed, .. }) = error else {
        panic!("{error}");
    };
    assert!(limit == 2 << 20 && needed > limit);
    assert!(within("large.gguf", MAX_HEADER_LEN).await.is_ok());
}

#[tokio::test]
async fn large_headers_are_read_one_after_another_beside_small_ones() {
    let setup = Setup::new().await;
    setup.publish("large.gguf", &model(140_000));
    let large = hub_source(
        &setup.hub.endpoint(),
        crate::support::REPO,
        "main",
        "large.gguf",
    );
    let (turns, client) = (HeaderTurns::new(Duration::from_secs(300)), &setup.client);
    let taken = Arc::new(AtomicUsize::new(0));
    let three = (0..3).map(|_| {
        let taken = taken.clone();
        turns.open(client, &large, move |remote| {
            let others = taken.fetch_add(1, Ordering::SeqCst);
            // Long enough for the next to come, if it could.
            thread::sleep(Duration::from_millis(200));
            taken.fetch_sub(1, Ordering::SeqCst);
            (others, remote.gguf.data_offset > 2 << 20)
        })
    });
    for opened in join_all(three).await {
        assert_eq!(opened.unwrap(), (0, true));
    }

    // The large one is in use until a small one has been read.
    let (tell, told) = mpsc::channel::<()>();
    let used = turns.open(client, &large, move |_| told.recv().is_err());
    let small = async {
        let source = setup.source();
        let opened = turns.open(client, &source, |_| ()).await;
        drop(tell);
        opened
    };
    let (used, small) = tokio::join!(used, small);
    assert!(used.unwrap());
    small.unwrap();
}

#[tokio::test]
async fn a_header_that_takes_too_long_is_given_up() {
    let setup = Setup::new().await;
    setup
        .hub
        .control(|control| control.bytes_per_second = Some(1000));
    let turns = HeaderTurns::new(Duration::from_millis(300));
    let opened = turns.open(&setup.client, &setup.source(), |_| ()).await;
    let error = opened.unwrap_err();
    assert!(
        matches!(error, RemoteModelError::Header(HeaderError::TooLong { .. })),
        "{error}"
    );
}

#[tokio::test]
async fn a_turn_lasts_as_long_as_the_work_though_nobody_waits() {
    let setup = Setup::new().await;
    let turns = Arc::new(HeaderTurns::new(Duration::from_secs(300)));
    let (begins, begun) = oneshot::channel();
    let (ends, ended) = mpsc::channel::<()>();
    let (own, client, source) = (turns.clone(), setup.client.clone(), setup.source());
    let reading = async move {
        let turn = own.of("many").await;
        let opened = own.open(&client, &source, move |_| {
            let _ = begins.send(());
            let _ = ended.recv();
        });
        holding(Arc::new(turn), opened).await
    };
    let given_up = tokio::spawn(reading);
    begun.await.unwrap();
    given_up.abort();
    assert!(given_up.await.unwrap_err().is_cancelled());
    assert_eq!(HeaderTurns::OF_AN_OWNER, 2);
    let _other = turns.of("many").await;
    assert!(turns.of("many").now_or_never().is_none());
    drop(ends);
    assert!(turns.of("many").await.is_some());
}
