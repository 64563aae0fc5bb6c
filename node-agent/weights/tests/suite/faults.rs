//! Connections and servers that fail: what is tried again, what is kept, and when it ends.

use std::time::{Duration, Instant};

use prima_crds::error_chain;
use prima_test_hub::{Cut, Fail, TestHub};
use prima_weights::tensors::total_bytes;
use prima_weights::{Client, Download, DownloadError, Progress, Reach, Remote, Retry};
use tokio::net::TcpSocket;
use tokio::sync::watch;

use crate::support::{FILE, REPO, Setup, download, quick};

#[tokio::test]
async fn bodies_that_break_off_are_gone_on_with() {
    let setup = Setup::new().await;
    let remote = setup.open().await;
    let file = setup.local("m.gguf", &remote);
    setup.hub.clear();
    let cuts = 20;
    setup.hub.control(|control| {
        control.cut = Some(Cut {
            after_bytes: 20_000,
            times: cuts,
        })
    });
    download(&remote, &file, &setup.whole()).await.unwrap();
    setup.assert_same(file.path(), &setup.whole());
    // What came before a cut is kept, but for what was in the buffers of the connection.
    let size = setup.model.len() as u64;
    let sent = setup.hub.body_bytes();
    assert!(
        (size..=size + u64::from(cuts) * 20_000).contains(&sent),
        "{sent} of {size}"
    );
}

#[tokio::test]
async fn a_server_that_breaks_off_at_once_is_given_up() {
    let setup = Setup::new().await;
    let remote = setup.open().await;
    // A few bytes are no progress.
    for after_bytes in [0, 100] {
        let file = setup.local("m.gguf", &remote);
        setup.hub.control(|control| {
            control.cut = Some(Cut {
                after_bytes,
                times: 1000,
            })
        });
        let error = download(&remote, &file, &setup.whole()).await.unwrap_err();
        let error = error_chain(&error);
        assert!(error.contains("no answer after 4 tries"), "{error}");
    }
}

#[tokio::test]
async fn a_server_that_drips_is_given_up() {
    let setup = Setup::new().await;
    let impatient = Retry {
        patience: Duration::from_millis(500),
        ..quick()
    };
    let client = Client::new(impatient, Reach::anywhere()).unwrap();
    let remote = Remote::open(&client, &setup.source()).await.unwrap();
    let file = setup.local("m.gguf", &remote);
    let sends = |rate| {
        setup
            .hub
            .control(|control| control.bytes_per_second = Some(rate));
    };
    sends(1000);
    let error = download(&remote, &file, &setup.whole()).await.unwrap_err();
    let error = error_chain(&error);
    assert!(error.contains("no answer after 4 tries"), "{error}");
    assert!(error.contains("bytes came in 0 s"), "{error}");
    // Slow is not too slow.
    sends(1 << 20);
    download(&remote, &file, &setup.whole()).await.unwrap();
    setup.assert_same(file.path(), &setup.whole());
}

#[tokio::test]
async fn failures_of_the_server_are_waited_out() {
    let setup = Setup::new().await;
    for status in [500, 503] {
        setup.hub.control(|control| {
            control.fail = Some(Fail {
                status,
                retry_after_seconds: None,
                times: 3,
            })
        });
        let remote = setup.open().await;
        setup.hub.control(|control| {
            control.fail = Some(Fail {
                status,
                retry_after_seconds: None,
                times: 3,
            })
        });
        let file = setup.local(&format!("{status}.gguf"), &remote);
        download(&remote, &file, &setup.whole()).await.unwrap();
        setup.assert_same(file.path(), &setup.whole());
    }
    setup.hub.control(|control| {
        control.fail = Some(Fail {
            status: 502,
            retry_after_seconds: None,
            times: 1000,
        })
    });
    let error = error_chain(
        &Remote::open(&setup.client, &setup.source())
            .await
            .unwrap_err(),
    );
    assert!(
        error.contains("no answer after 4 tries") && error.contains("502"),
        "{error}"
    );
}

#[tokio::test]
async fn the_pause_that_a_server_asks_for_is_kept() {
    let setup = Setup::new().await;
    for status in [429, 503] {
        setup.hub.control(|control| {
            control.fail = Some(Fail {
                status,
                retry_after_seconds: Some(1),
                times: 1,
            })
        });
        let start = Instant::now();
        setup.open().await;
        assert!(
            start.elapsed() >= Duration::from_secs(1),
            "{status}: {:?}",
            start.elapsed()
        );
    }
}

#[tokio::test]
async fn a_server_that_nobody_reaches_is_named() {
    let setup = Setup::new().await;
    // Nobody else is given its port while it is bound, and it does not listen.
    let silent = TcpSocket::new_v4().unwrap();
    silent.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let source = crate::support::hub_source(&endpoint, REPO, "main", FILE);
    let error = error_chain(&Remote::open(&setup.client, &source).await.unwrap_err());
    assert!(
        error.contains(&format!("cannot fetch {endpoint}")),
        "{error}"
    );
}

#[tokio::test]
async fn a_server_without_ranges_is_used_only_on_request() {
    let setup = Setup::new().await;
    setup.hub.control(|control| control.ignore_ranges = true);
    let remote = setup.open().await;
    assert!(!remote.accepts_ranges());
    let file = setup.local("m.gguf", &remote);
    let share = setup.share(0..1, false);
    setup.hub.clear();
    let error = error_chain(&download(&remote, &file, &share).await.unwrap_err());
    assert!(
        error.contains("the server cannot send parts of the file"),
        "{error}"
    );
    assert_eq!(setup.hub.requests(), 0);

    // One that breaks off in between is begun again from the start; what came counts.
    setup.hub.control(|control| {
        control.cut = Some(Cut {
            after_bytes: 1_000_000,
            times: 1,
        })
    });
    let (sender, receiver) = watch::channel(Progress::default());
    let whole = Download::new(&remote, &file, &share)
        .piece_bytes(64 << 10)
        .allow_full_download(true);
    whole.run(&sender).await.unwrap();
    setup.assert_same(file.path(), &setup.whole());
    let size = setup.model.len() as u64;
    assert_eq!(
        *receiver.borrow(),
        Progress {
            done_bytes: size,
            total_bytes: size
        }
    );
    assert!(setup.hub.body_bytes() > size);
}

#[tokio::test]
async fn a_server_that_stops_sending_ranges_is_told_so() {
    let setup = Setup::new().await;
    let remote = setup.open().await;
    let file = setup.local("m.gguf", &remote);
    setup.hub.control(|control| control.ignore_ranges = true);
    let error = error_chain(
        &download(&remote, &file, &setup.share(0..1, false))
            .await
            .unwrap_err(),
    );
    assert!(
        error.contains("the server cannot send parts of the file"),
        "{error}"
    );
}

#[tokio::test]
async fn an_address_that_expired_is_asked_for_again() {
    let setup = Setup::new().await;
    setup
        .hub
        .control(|control| control.signed_for_millis = 1000);
    let remote = setup.open().await;
    tokio::time::sleep(Duration::from_millis(1200)).await;
    setup
        .hub
        .control(|control| control.signed_for_millis = 60_000);
    setup.hub.clear();
    let file = setup.local("m.gguf", &remote);
    download(&remote, &file, &setup.whole()).await.unwrap();
    setup.assert_same(file.path(), &setup.whole());
    let asked: u64 = setup
        .hub
        .counters()
        .iter()
        .filter(|counter| counter.path.contains("/resolve/"))
        .map(|counter| counter.requests)
        .sum();
    assert_eq!(asked, 1, "all connections use the new address");
}

#[tokio::test]
async fn another_version_at_the_same_address_is_refused() {
    let setup = Setup::new().await;
    setup
        .hub
        .control(|control| control.signed_for_millis = 1000);
    let remote = setup.open().await;
    let file = setup.local("m.gguf", &remote);
    tokio::time::sleep(Duration::from_millis(1200)).await;
    let mut changed = setup.model.clone();
    changed[5000] ^= 1;
    setup.publish(FILE, &changed);
    setup
        .hub
        .control(|control| control.signed_for_millis = 60_000);
    let error = error_chain(&download(&remote, &file, &setup.whole()).await.unwrap_err());
    assert!(
        error.contains("the file changed on the server: sha256 was"),
        "{error}"
    );
}

#[tokio::test]
async fn dropping_a_download_cancels_it_and_keeps_what_was_noted() {
    let setup = Setup::new().await;
    setup
        .hub
        .control(|control| control.bytes_per_second = Some(400_000));
    let remote = setup.open().await;
    let file = setup.local("m.gguf", &remote);
    let whole = setup.whole();
    let missing = || total_bytes(&file.missing(&whole).unwrap());
    let noted = async {
        while missing() == total_bytes(&whole) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        ended = download(&remote, &file, &whole) => panic!("it ended before it could be canceled: {ended:?}"),
        () = noted => {}
    }
    // Pieces that are being written are noted before the next download begins, also one of nothing.
    download(&remote, &file, &[]).await.unwrap();
    let missing = missing();
    assert!(
        0 < missing && missing < total_bytes(&whole),
        "{missing} bytes"
    );
    // By another hub, which counts nothing of the answers that were canceled.
    let hub = TestHub::start(&setup.folder.path().join("hub"))
        .await
        .unwrap();
    let source = crate::support::hub_source(&hub.endpoint(), REPO, "main", FILE);
    let remote = Remote::open(&setup.client, &source).await.unwrap();
    hub.clear();
    download(&remote, &file, &whole).await.unwrap();
    assert_eq!(hub.body_bytes(), missing);
    setup.assert_same(file.path(), &whole);
}

#[tokio::test]
async fn other_errors_than_the_lines_are_not_tried_again() {
    let setup = Setup::new().await;
    let client = Client::new(quick(), Reach::anywhere()).unwrap();
    let remote = Remote::open(&client, &setup.plain_source(None))
        .await
        .unwrap();
    let file = setup.local("m.gguf", &remote);
    std::fs::remove_file(setup.folder.path().join("hub").join(REPO).join(FILE)).unwrap();
    setup.hub.clear();
    let error = download(&remote, &file, &setup.share(0..1, false))
        .await
        .unwrap_err();
    assert!(matches!(error, DownloadError::Fetch { .. }));
    assert!(
        error_chain(&error).contains("404"),
        "{}",
        error_chain(&error)
    );
    assert!(
        setup.hub.requests() <= 4,
        "{} requests",
        setup.hub.requests()
    );
}
