//! A model's header is read without its weights.

use prima_gguf::{Gguf, GgufError};
use prima_weights::{HeaderError, Remote};

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
        let (gguf, header) = remote.read_header().await.unwrap();
        let read = Gguf::parse(&remote.shown(), &file, file.len() as u64).unwrap();
        assert!(gguf == read);
        assert!(header == file[..gguf.data_offset as usize]);
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
    let (gguf, header) = remote.read_header().await.unwrap();
    assert!(header == setup.model[..gguf.data_offset as usize]);

    // Also from a server that sends all or nothing; its answer is not read to the end.
    setup.hub.control(|control| control.ignore_ranges = true);
    let remote = Remote::open(&setup.client, &setup.plain_source(None))
        .await
        .unwrap();
    assert!(!remote.accepts_ranges());
    assert!(remote.read_header().await.unwrap().1 == header);
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
