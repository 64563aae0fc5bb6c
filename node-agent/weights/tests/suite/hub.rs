//! The hub's ways: redirects, what it says along with them, tokens, and what it refuses.

use prima_test_hub::COMMIT;
use prima_weights::{AllowedServer, Client, Reach, Remote, RemoteError};

use crate::support::{FILE, REPO, Setup, download, hub_source, quick, with_token};

#[tokio::test]
async fn what_the_hub_knows_of_a_file_is_its_identity() {
    let setup = Setup::new().await;
    let remote = setup.open().await;
    let identity = remote.identity();
    assert_eq!(identity.size_bytes, setup.model.len() as u64);
    assert_eq!(identity.revision_commit.as_deref(), Some(COMMIT));
    assert_eq!(identity.sha256, identity.etag);
    assert!(identity.sha256.is_some() && remote.accepts_ranges());
    setup.hub.control(|control| control.linked = false);
    assert_eq!(setup.open().await.identity().sha256, None);
}

#[tokio::test]
async fn the_token_goes_to_the_hub_and_not_to_where_it_redirects() {
    let setup = Setup::new().await;
    setup.hub.control(|control| {
        control.token = Some("hf_right".to_owned());
        control.private = vec![REPO.to_owned()];
    });
    let source = with_token(setup.source(), "hf_right");
    let remote = Remote::open(&setup.client, &source).await.unwrap();
    let file = setup.local("m.gguf", &remote);
    download(&remote, &file, &setup.share(0..1, false))
        .await
        .unwrap();
    let counters = setup.hub.counters();
    let (cdn, hub): (Vec<_>, Vec<_>) = counters
        .iter()
        .partition(|counter| counter.path.starts_with("/_cdn/"));
    assert!(hub.iter().any(|counter| counter.with_token > 0));
    assert!(cdn.iter().any(|counter| counter.requests > 1));
    assert!(cdn.iter().all(|counter| counter.with_token == 0), "{cdn:?}");
}

#[tokio::test]
async fn a_renamed_repository_is_found() {
    let setup = Setup::new().await;
    setup.hub.control(|control| {
        control.token = Some("hf_right".to_owned());
        control.gated = vec![REPO.to_owned()];
        control
            .renamed
            .insert("owner/old".to_owned(), REPO.to_owned());
    });
    // The redirect stays on the hub, so the token goes along.
    let source = with_token(
        hub_source(&setup.hub.endpoint(), "owner/old", "main", FILE),
        "hf_right",
    );
    let remote = Remote::open(&setup.client, &source).await.unwrap();
    assert_eq!(remote.identity().size_bytes, setup.model.len() as u64);
}

#[tokio::test]
async fn refusals_say_what_to_do() {
    let setup = Setup::new().await;
    let endpoint = setup.hub.endpoint();
    let hub = |repo, revision, file| hub_source(&endpoint, repo, revision, file);
    setup
        .hub
        .control(|control| control.token = Some("hf_right".to_owned()));
    let gate = |gated: bool| {
        setup.hub.control(|control| {
            control.gated = if gated { vec![REPO.to_owned()] } else { vec![] };
        })
    };
    for (gated, source, parts) in [
        (
            true,
            setup.source(),
            vec![
                "repo owner/model-GGUF is gated",
                "accept its licence at http://127.0.0.1",
                "give a token",
            ],
        ),
        (
            true,
            with_token(setup.source(), "hf_wrong"),
            vec!["is gated", "token of the account"],
        ),
        (
            false,
            hub("owner/none", "main", FILE),
            vec![
                "repo owner/none: not found",
                "if it is private, give a token",
            ],
        ),
        (
            false,
            hub(REPO, "v9", FILE),
            vec![
                "revision v9 of repo owner/model-GGUF: not found",
                "check the name of the branch",
            ],
        ),
        (
            false,
            hub(REPO, "main", "none.gguf"),
            vec!["file none.gguf in repo owner/model-GGUF at revision main: not found"],
        ),
        (
            false,
            hub("../x", "main", FILE),
            vec!["repo: expected owner/name"],
        ),
        (
            false,
            hub_source(&format!("{endpoint}/nowhere"), REPO, "main", FILE),
            vec!["404"],
        ),
    ] {
        gate(gated);
        let error = Remote::open(&setup.client, &source).await.unwrap_err();
        assert!(!error.is_transient());
        let text = error.to_string();
        for part in parts {
            assert!(text.contains(part), "{part:?} in {text:?}");
        }
        assert!(!text.contains("hf_wrong"), "{text}");
        // The hub's own words.
        assert!(!text.contains("Invalid rev id"), "{text}");
    }
    gate(true);
    Remote::open(&setup.client, &with_token(setup.source(), "hf_right"))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_digest_given_with_the_address_must_be_the_hubs() {
    let setup = Setup::new().await;
    let location = prima_weights::Location::Url {
        url: format!("{}/{REPO}/resolve/main/{FILE}", setup.hub.endpoint()),
        sha256: Some("ab".repeat(32)),
    };
    let source = prima_weights::Source {
        location,
        token: None,
    };
    let error = Remote::open(&setup.client, &source).await.unwrap_err();
    assert!(matches!(error, RemoteError::OtherSha256 { .. }), "{error}");
}

#[tokio::test]
async fn a_server_that_is_not_on_the_internet_must_be_named() {
    let setup = Setup::new().await;
    let client = |allowed: &[&str]| {
        let allowed = allowed.iter().map(|text| text.parse().unwrap());
        let allowed: Vec<AllowedServer> = allowed.collect();
        Client::new(
            quick(),
            Reach::internet_and("https://hub.example", &allowed),
        )
        .unwrap()
    };
    let by_address = setup.hub.endpoint();
    let by_name = by_address.replace("127.0.0.1", "localhost");
    assert_ne!(by_address, by_name);
    for endpoint in [&by_address, &by_name] {
        let source = hub_source(endpoint, REPO, "main", FILE);
        let error = Remote::open(&client(&["192.168.0.0/16"]), &source)
            .await
            .unwrap_err();
        assert!(matches!(error, RemoteError::OutOfReach { .. }), "{error}");
    }
    assert_eq!(setup.hub.requests(), 0);

    let allowed = client(&["127.0.0.1"]);
    Remote::open(&allowed, &setup.source()).await.unwrap();
    // It sends the client on to another one.
    setup.hub.control(|control| {
        let other = "/127.0.0.2:80/x".to_owned();
        control.renamed.insert("owner/old".to_owned(), other);
    });
    let source = hub_source(&by_address, "owner/old", "main", FILE);
    let error = Remote::open(&allowed, &source).await.unwrap_err();
    let RemoteError::OutOfReach { url } = error else {
        panic!("{error}");
    };
    // Its path is the redirecting server's text.
    assert_eq!(url, "http://127.0.0.2");
}
