//! API keys, web origins, host names and request ids.

use prima_crds::v1alpha1::api_keys::ApiKeys;
use prima_crds::v1alpha1::model::ApiKeyLimits;
use prima_node_agent::gateway::{GatewayError, GatewayOptions};
use prima_node_agent::generation::{FinishReason, SubmitError};
use serde_json::json;
use tokio::sync::watch;

use crate::client::{Request, get, post, post_bytes, request};
use crate::server::{Accepted, MODEL, Server, options, text};

fn keyed() -> GatewayOptions {
    GatewayOptions {
        api_keys: vec!["first-key".into(), "second-key".into()],
        ..options()
    }
}

#[tokio::test]
async fn keys_open_the_api_and_nothing_else_needs_one() {
    let mut server = Server::start_with(keyed(), Some(text(None))).await;
    let with = |name: &str, value: &str| get("/v1/models").header(name, value);
    for good in [
        with("authorization", "Bearer first-key"),
        with("authorization", "bearer second-key"),
        with("x-api-key", "second-key"),
    ] {
        assert_eq!(good.send(server.address).await.status, 200);
    }
    for bad in [
        get("/v1/models"),
        with("authorization", "Bearer first-ke"),
        with("authorization", "Bearer first-key2"),
        with("authorization", "Bearer"),
        with("authorization", "Basic first-key"),
        with("x-api-key", "FIRST-KEY"),
        get("/ring"),
        get("/v1/models/x"),
        post("/v1/completions", &json!({"prompt": "a"})),
        post("/v1/chat/completions", &json!({})),
    ] {
        let reply = bad.send(server.address).await;
        assert_eq!(
            (reply.status, reply.header("www-authenticate")),
            (401, Some("Bearer"))
        );
        let body = reply.text().await;
        assert!(
            body.contains("invalid_api_key") && !body.contains("first-key"),
            "{body}"
        );
    }
    for open in ["/", "/health", "/livez", "/readyz", "/metrics"] {
        assert_eq!(get(open).send(server.address).await.status, 200, "{open}");
    }
    assert!(server.nothing_submitted());
}

#[tokio::test]
async fn refusals_are_in_the_words_of_the_api_that_was_called() {
    let server = Server::start_with(keyed(), Some(text(None))).await;
    for (route, status, kind, message) in [
        ("/v1/chat/completions", 401, "/error/code", "/error/message"),
        ("/v1/messages", 401, "/error/type", "/error/message"),
        ("/messages/count_tokens", 401, "/type", "/error/message"),
        ("/api/chat", 401, "", "/error"),
        ("/api/blobs/a", 404, "", "/error"),
        ("/v1/messages/batches", 404, "/type", "/error/message"),
        ("/v1/audio", 404, "/error/code", "/error/message"),
    ] {
        let reply = post(route, &json!({})).send(server.address).await;
        assert_eq!(reply.status, status, "{route}");
        let body = reply.json().await;
        let text = |pointer| body.pointer(pointer).and_then(|value| value.as_str());
        assert!(text(message).is_some(), "{route}: {body}");
        assert!(kind.is_empty() || text(kind).is_some(), "{route}: {body}");
    }
    let wrong = get("/api/chat").send(server.address).await;
    assert_eq!(wrong.status, 401);
    let known = get("/api/chat").header("x-api-key", "first-key");
    let reply = known.send(server.address).await;
    assert_eq!(reply.status, 405);
    assert!(reply.json().await["error"].is_string());
}

#[tokio::test]
async fn requests_of_different_keys_share_nothing() {
    let mut server = Server::start_with(keyed(), Some(text(None))).await;
    let mut keyspaces = Vec::new();
    for key in ["first-key", "second-key", "first-key"] {
        let asked = post("/v1/completions", &json!({"prompt": "a"}));
        let asked = asked.header("authorization", &format!("Bearer {key}"));
        let sending = tokio::spawn(asked.send(server.address));
        keyspaces.push(server.accept().await.request.keyspace);
        sending.abort();
    }
    assert_eq!(keyspaces[0], keyspaces[2]);
    assert_ne!(keyspaces[0], keyspaces[1]);
}

/// All of 127.0.0.0/8 is this machine on Linux.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_client_is_its_key_or_else_its_address() {
    let mut open = Server::start().await;
    let mut keyed = Server::start_with(keyed(), Some(text(None))).await;
    for (server, keys, same) in [
        (&mut open, [""; 2], false),
        (&mut keyed, ["first-key"; 2], true),
    ] {
        let mut clients = Vec::new();
        for (key, own) in keys.into_iter().zip(["127.0.0.1", "127.0.0.2"]) {
            let asked = post("/v1/completions", &json!({"prompt": "a"}));
            let asked = asked.header("authorization", &format!("Bearer {key}"));
            let sending = tokio::spawn(asked.send_from(own.parse().unwrap(), server.address));
            clients.push(server.accept().await.request.client);
            sending.abort();
        }
        assert_eq!(clients[0] == clients[1], same, "{clients:?}");
    }
}

#[tokio::test]
async fn a_key_known_by_its_digest_opens_too() {
    let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    for digest in [abc.to_owned(), abc.to_uppercase()] {
        let digested = GatewayOptions {
            api_key_sha256: vec![digest],
            ..keyed()
        };
        let server = Server::start_with(digested, Some(text(None))).await;
        for (key, status) in [("abc", 200), ("first-key", 200), ("abd", 401), ("", 401)] {
            let reply = get("/v1/models")
                .header("authorization", &format!("Bearer {key}"))
                .send(server.address)
                .await;
            assert_eq!(reply.status, status, "{key:?}");
        }
    }
}

fn named(keys: &[(&str, &str)], tokens_per_minute: Option<i32>) -> ApiKeys {
    let digest = |key: &str| ApiKeys::digest("salt", key.as_bytes());
    let keys = keys
        .iter()
        .map(|(name, key)| (name.to_string(), digest(key)));
    ApiKeys {
        salt: "salt".into(),
        sha256: keys.collect(),
        limits: ApiKeyLimits { tokens_per_minute },
    }
}

fn with_key(asked: Request, key: &str) -> Request {
    asked.header("authorization", &format!("Bearer {key}"))
}

#[tokio::test]
async fn named_keys_come_and_go_while_the_server_runs() {
    let (tell, told) = watch::channel(named(&[], None));
    let options = GatewayOptions {
        named_api_keys: Some(told),
        ..options()
    };
    let mut server = Server::start_with(options, Some(text(None))).await;
    let address = server.address;
    let statuses = async || {
        let mut statuses = Vec::new();
        for key in ["abc", "abd"] {
            let asked = with_key(get("/v1/models"), key);
            statuses.push(asked.send(address).await.status);
        }
        statuses
    };
    // A list without keys lets nobody in, with a key or without.
    assert_eq!(statuses().await, [401, 401]);
    assert_eq!(get("/v1/models").send(address).await.status, 401);
    tell.send_replace(named(&[("alice", "abc")], None));
    assert_eq!(statuses().await, [200, 401]);
    let mut keyspaces = Vec::new();
    for keys in [
        [("alice", "abc"), ("bob", "abd")],
        // Others before it change nothing of a key, nor does its name.
        [("aaron", "abd"), ("zoe", "abc")],
        [("alice", "abd"), ("bob", "abe")],
    ] {
        tell.send_replace(named(&keys, None));
        let key = if keys[0].0 == "alice" {
            keys[0].1
        } else {
            "abc"
        };
        let asked = with_key(post("/v1/completions", &json!({"prompt": "a"})), key);
        let sending = tokio::spawn(asked.send(address));
        keyspaces.push(server.accept().await.request.keyspace);
        sending.abort();
    }
    assert_eq!(keyspaces[0], keyspaces[1]);
    // The key under the same name is another one now.
    assert_ne!(keyspaces[0], keyspaces[2]);
    assert_eq!(statuses().await, [401, 200]);
}

async fn two_tokens(accepted: Accepted) {
    for token in ["a", "b"] {
        accepted.token(0, token).await;
    }
    accepted.finish(0, FinishReason::Stop, "").await;
    accepted.usage(accepted.request.prompt.len(), 2).await;
}

#[tokio::test]
async fn a_key_that_used_its_tokens_waits_and_others_do_not() {
    let keys = [("alice", "abc"), ("bob", "abd")];
    let (_tell, told) = watch::channel(named(&keys, Some(6)));
    let options = GatewayOptions {
        named_api_keys: Some(told),
        ..options()
    };
    let mut server = Server::start_with(options, Some(text(None))).await;
    let address = server.address;
    let ask = |key: &str| {
        let body = json!({"prompt": "some words", "max_tokens": 4});
        tokio::spawn(with_key(post("/v1/completions", &body), key).send(address))
    };
    let first = ask("abc");
    let accepted = server.accept().await;
    two_tokens(accepted).await;
    assert_eq!(first.await.unwrap().status, 200);
    let refused = ask("abc").await.unwrap();
    assert_eq!(refused.status, 429);
    let pause: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((30..=600).contains(&pause), "{pause}");
    let said = refused.text().await;
    assert!(
        said.contains("rate_limit_exceeded")
            && said.contains("the API key alice has used the 6 tokens"),
        "{said}"
    );
    let other = ask("abd");
    two_tokens(server.accept().await).await;
    assert_eq!(other.await.unwrap().status, 200);
    // What asks for no tokens is not limited.
    let listed = with_key(get("/v1/models"), "abc").send(address).await;
    assert_eq!(listed.status, 200);
    let metrics = get("/metrics").send(address).await.text().await;
    for counted in [
        r#"prima_api_key_requests_total{key="alice"} 3.0"#,
        r#"prima_api_key_generated_tokens_total{key="alice"} 2.0"#,
        r#"prima_api_key_requests_total{key="bob"} 1.0"#,
    ] {
        assert!(metrics.contains(counted), "{counted}: {metrics}");
    }
}

/// Vectors are charged, too.
#[tokio::test]
async fn a_limit_counts_whatever_is_computed() {
    let (_tell, told) = watch::channel(named(&[("alice", "abc")], Some(10)));
    let options = GatewayOptions {
        named_api_keys: Some(told),
        ..options()
    };
    let mut server = Server::start_with(options, Some(text(None))).await;
    let address = server.address;
    let ask =
        |route: &'static str, body| tokio::spawn(with_key(post(route, &body), "abc").send(address));
    let long = "a".repeat(40);
    let vector = ask("/v1/embeddings", json!({"input": long}));
    server.accept().await.embedding(&[1.0]).await;
    assert_eq!(vector.await.unwrap().status, 200);
    for (route, body) in [
        ("/v1/embeddings", json!({"input": "a"})),
        ("/v1/completions", json!({"prompt": "a"})),
    ] {
        assert_eq!(ask(route, body).await.unwrap().status, 429, "{route}");
    }
}

#[tokio::test]
async fn options_that_protect_nothing_are_refused_at_the_start() {
    let empty_key = GatewayOptions {
        api_keys: vec![String::new()],
        ..options()
    };
    let server = Server::start_with(empty_key, None).await;
    let refused = server.serving.await.unwrap();
    assert!(matches!(refused, Err(GatewayError::ApiKey { number: 1 })));
}

#[tokio::test]
async fn a_name_that_was_rebound_to_loopback_is_refused() {
    let server = Server::start().await;
    let reply = get("/v1/models")
        .header("host", "evil.example")
        .send(server.address)
        .await;
    assert_eq!(reply.status, 403);
    assert_eq!(reply.json().await["error"]["code"], "unknown_host");
    let reply = get("/v1/models")
        .header("host", "localhost:1")
        .send(server.address)
        .await;
    assert_eq!(reply.status, 200);
}

#[tokio::test]
async fn pages_of_other_origins_need_permission() {
    let listed = GatewayOptions {
        cors_origins: vec!["https://chat.example".into()],
        ..keyed()
    };
    let any = GatewayOptions {
        cors_origins: vec!["*".into()],
        ..keyed()
    };
    let (by_default, listed, any) = (
        Server::start_with(keyed(), None).await,
        Server::start_with(listed, None).await,
        Server::start_with(any, None).await,
    );
    for (server, origin, allowed) in [
        (
            &by_default,
            "http://localhost:3000",
            Some("http://localhost:3000"),
        ),
        (&by_default, "https://chat.example", None),
        (&by_default, "http://localhost.evil.example", None),
        (&by_default, "null", None),
        (
            &listed,
            "https://chat.example",
            Some("https://chat.example"),
        ),
        (&listed, "http://chat.example", None),
        (&listed, "https://evil.example", None),
        (&any, "https://evil.example", Some("*")),
    ] {
        // A browser asks first, without the key.
        let asked = request("OPTIONS", "/v1/chat/completions")
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header(
                "access-control-request-headers",
                "authorization,content-type",
            )
            .send(server.address)
            .await;
        assert_eq!(asked.status, 200);
        assert_eq!(
            asked.header("access-control-allow-origin"),
            allowed,
            "{origin}"
        );
        let mirrored = asked.header("access-control-allow-headers");
        assert_eq!(mirrored, Some("authorization,content-type"));
        // Refusals are readable to the page too.
        let reply = get("/v1/models")
            .header("origin", origin)
            .send(server.address)
            .await;
        assert_eq!(reply.status, 401);
        assert_eq!(
            reply.header("access-control-allow-origin"),
            allowed,
            "{origin}"
        );
    }
}

#[tokio::test]
async fn only_pages_must_declare_their_json() {
    let mut server = Server::start().await;
    let address = server.address;
    let own = format!("http://{address}");
    let chat = json!({"model": MODEL, "messages": [{"role": "user", "content": "a"}]}).to_string();
    let json = ("content-type", "application/json; charset=utf-8");
    let form = ("content-type", "application/x-www-form-urlencoded");
    let page = ("origin", "http://evil.example");
    let site = ("sec-fetch-site", "cross-site");
    let busy = SubmitError::NotReady {
        reason: "it is busy".into(),
    };
    for (headers, taken) in [
        (vec![], true),
        (vec![form], true),
        (vec![("content-type", "text/plain")], true),
        (vec![json, ("origin", own.as_str())], true),
        (vec![page], false),
        (vec![page, form], false),
        (vec![page, ("content-type", "text/plain")], false),
        (vec![("origin", "null")], false),
        (vec![("origin", own.as_str())], false),
        (vec![site], false),
        (vec![site, form], false),
    ] {
        for route in [
            "/v1/chat/completions",
            "/v1/messages/count_tokens",
            "/api/chat",
        ] {
            let request = headers
                .iter()
                .fold(post_bytes(route, chat.clone()), |request, (name, value)| {
                    request.header(name, value)
                });
            let reply = tokio::select! {
                reply = request.send(address) => reply,
                never = server.refuse_all(busy.clone()) => match never {},
            };
            let refused = reply.status == 415;
            assert_eq!(refused, !taken, "{} to {route}: {headers:?}", reply.status);
        }
    }
}

#[tokio::test]
async fn request_ids_are_echoed_or_made() {
    let server = Server::start().await;
    let sent = get("/livez")
        .header("x-request-id", "abc-123")
        .send(server.address)
        .await;
    assert_eq!(sent.header("x-request-id"), Some("abc-123"));
    assert_eq!(sent.header("request-id"), Some("abc-123"));
    let mut made = Vec::new();
    for odd in ["a b".to_string(), "x".repeat(129)] {
        let reply = get("/nowhere")
            .header("x-request-id", &odd)
            .send(server.address)
            .await;
        made.push(reply.header("x-request-id").unwrap().to_string());
    }
    assert!(
        made.iter()
            .all(|id| id.starts_with("req-") && id.len() == 36),
        "{made:?}"
    );
    assert_ne!(made[0], made[1]);
}

#[tokio::test]
async fn any_name_reaches_the_model_only_where_that_is_allowed() {
    let any = GatewayOptions {
        any_model_name: true,
        ..options()
    };
    let strict = Server::start().await;
    let open = Server::start_with(any, Some(text(None))).await;
    for (route, body) in [
        ("/tokenize", json!({"content": "a"})),
        ("/v1/rerank", json!({"model": "claude-x", "query": "a"})),
        ("/v1/completions", json!({"model": "gpt-x"})),
        ("/api/show", json!({"model": "llama3:8b"})),
        (
            "/v1/messages",
            json!({"model": "claude-x", "max_tokens": 1, "messages": []}),
        ),
    ] {
        let named = body.get("model").is_some();
        let refused = post(route, &body).send(strict.address).await.status;
        assert_eq!(refused == 404, named, "{route}");
        let taken = post(route, &body).send(open.address).await.status;
        assert_ne!(taken, 404, "{route}");
    }
    // It is listed by its own name.
    let listed = get("/v1/models").send(open.address).await.json().await;
    assert_eq!(listed["data"][0]["id"], crate::server::MODEL);
}
