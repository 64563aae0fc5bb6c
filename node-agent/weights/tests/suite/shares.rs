//! Members fetch their shares: the right bytes, once, and no others.

use prima_crds::error_chain;
use prima_weights::tensors::total_bytes;
use prima_weights::{DownloadError, Progress};
use prima_weights::{LocalFile, Remote};

use crate::support::{LAYERS, Setup, download};

#[tokio::test]
async fn each_member_gets_its_share_and_nothing_else() {
    let setup = Setup::new().await;
    let remote = setup.open().await;
    let mut sent = 0;
    for (rank, layers) in [0..2, 2..3, 3..LAYERS].into_iter().enumerate() {
        let share = setup.share(layers, rank == 0);
        let file = setup.local(&format!("member-{rank}.gguf"), &remote);
        setup.hub.clear();
        let progress = download(&remote, &file, &share).await.unwrap();
        let bytes = total_bytes(&share);
        assert_eq!(
            progress,
            Progress {
                done_bytes: bytes,
                total_bytes: bytes
            }
        );
        assert_eq!(setup.hub.body_bytes(), bytes, "rank {rank}");
        setup.assert_same(file.path(), &share);
        // Nothing else: all bytes of the model's data that are not zero are counted.
        let present = std::fs::read(file.path())
            .unwrap()
            .iter()
            .filter(|byte| **byte != 0)
            .count();
        assert!(present as u64 <= bytes && bytes < setup.model.len() as u64);
        sent += bytes;
    }
    // The header and RoPE's divisors are everybody's; the rest came once.
    let shared = total_bytes(&setup.share(0..0, false));
    let padding = sent - 2 * shared;
    assert!(
        (setup.model.len() as u64).abs_diff(padding) < 64 * 30,
        "{sent} bytes in all"
    );
}

#[tokio::test]
async fn what_is_there_is_not_asked_for_again() {
    let setup = Setup::new().await;
    let remote = setup.open().await;
    let share = setup.share(1..3, false);
    download(&remote, &setup.local("m.gguf", &remote), &share)
        .await
        .unwrap();
    setup.hub.clear();
    let file = setup.local("m.gguf", &remote);
    assert!(file.missing(&share).unwrap().is_empty());
    let bytes = total_bytes(&share);
    assert_eq!(
        download(&remote, &file, &share).await.unwrap(),
        Progress {
            done_bytes: bytes,
            total_bytes: bytes
        }
    );
    assert_eq!(setup.hub.requests(), 0);

    // A plan that moves layers costs only the new ones.
    let moved = setup.share(2..4, false);
    let new = total_bytes(&file.missing(&moved).unwrap());
    download(&remote, &file, &moved).await.unwrap();
    assert_eq!(setup.hub.body_bytes(), new);
    assert!(new < total_bytes(&moved) * 2 / 3);
    setup.assert_same(file.path(), &moved);
}

#[tokio::test]
async fn two_members_on_one_machine_fetch_once() {
    let setup = Setup::new().await;
    setup
        .hub
        .control(|control| control.bytes_per_second = Some(4 << 20));
    let remote = setup.open().await;
    let (one, other) = (
        setup.local("m.gguf", &remote),
        setup.local("m.gguf", &remote),
    );
    let share = setup.share(0..4, true);
    setup.hub.clear();
    let both = tokio::join!(
        download(&remote, &one, &share),
        download(&remote, &other, &share)
    );
    assert_eq!(both.0.unwrap(), both.1.unwrap());
    assert_eq!(setup.hub.body_bytes(), total_bytes(&share));
    setup.assert_same(one.path(), &share);
}

#[tokio::test]
async fn a_whole_file_is_held_against_its_digest() {
    let setup = Setup::new().await;
    let right = setup.open().await.identity().sha256.clone().unwrap();
    for (name, sha256) in [
        ("right.gguf", right.as_str()),
        ("wrong.gguf", &"ab".repeat(32)),
    ] {
        let source = setup.plain_source(Some(sha256));
        let remote = Remote::open(&setup.client, &source).await.unwrap();
        let file = setup.local(name, &remote);
        // Parts of a file have no digest.
        download(&remote, &file, &setup.share(0..1, false))
            .await
            .unwrap();
        let whole = download(&remote, &file, &setup.whole()).await;
        let Err(error) = whole else {
            assert_eq!(sha256, right);
            setup.assert_same(file.path(), &setup.whole());
            continue;
        };
        assert_ne!(sha256, right);
        assert!(matches!(error, DownloadError::Sha256 { .. }), "{error}");
        for part in [sha256, &right, "wrong.gguf", "fetch it again"] {
            assert!(error.to_string().contains(part), "{error}");
        }
        assert!(!file.path().exists() && !file.path().with_extension("ledger").exists());
    }
    assert!(setup.path("right.gguf").exists());
}

#[tokio::test]
async fn ranges_past_the_file_are_refused() {
    let setup = Setup::new().await;
    let remote = setup.open().await;
    let file = setup.local("m.gguf", &remote);
    setup.hub.clear();
    let error = download(&remote, &file, &[0..setup.model.len() as u64 + 1])
        .await
        .unwrap_err();
    assert!(matches!(error, DownloadError::OutOfRange { .. }), "{error}");
    assert_eq!(setup.hub.requests(), 0);
}

#[tokio::test]
async fn a_version_that_the_disk_does_not_have_is_not_mixed_in() {
    let setup = Setup::new().await;
    let before = setup.open().await;
    let file = setup.local("m.gguf", &before);
    let first = setup.share(0..1, false);
    download(&before, &file, &first).await.unwrap();
    let mut changed = setup.model.clone();
    let last = changed.len() - 1;
    changed[last] ^= 1;
    setup.publish(crate::support::FILE, &changed);

    // The server's other version, met by an open connection, by a new one, and by a new one to a plain address.
    let during = download(&before, &file, &setup.whole()).await.unwrap_err();
    let during = error_chain(&during);
    assert!(
        during.contains("the file changed on the server: version (ETag) was"),
        "{during}"
    );
    let after = setup.open().await;
    let error = download(&after, &file, &setup.whole()).await.unwrap_err();
    assert!(error.to_string().contains("sha256 was"), "{error}");
    let error = LocalFile::open(file.path(), after.identity()).unwrap_err();
    assert!(
        error.to_string().contains("holds another version"),
        "{error}"
    );

    // What was there is there.
    assert!(file.missing(&first).unwrap().is_empty());
    setup.assert_same(file.path(), &first);
    assert!(!file.missing(&setup.whole()).unwrap().is_empty());
}

#[tokio::test]
async fn a_file_of_another_length_is_not_mixed_in() {
    let setup = Setup::new().await;
    setup.hub.control(|control| control.no_etag = true);
    let remote = Remote::open(&setup.client, &setup.plain_source(None))
        .await
        .unwrap();
    assert_eq!(remote.identity().etag, None);
    let file = setup.local("m.gguf", &remote);
    setup.publish(crate::support::FILE, &setup.model[..setup.model.len() - 32]);
    let error = error_chain(
        &download(&remote, &file, &setup.share(0..1, false))
            .await
            .unwrap_err(),
    );
    let sizes = format!(
        "size in bytes was {}, is {}",
        setup.model.len(),
        setup.model.len() - 32
    );
    assert!(error.contains(&sizes), "{error}");
}
