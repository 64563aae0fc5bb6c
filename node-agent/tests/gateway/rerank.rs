//! Documents by how well they answer a query.

use prima_node_agent::generation::Instead;
use serde_json::{Value, json};

use crate::client::{Reply, post};
use crate::server::{CONTEXT, MODEL, Server, TEMPLATE, options, text_with};

const RANKING: &str = "Q {query} D {document}?";

async fn ranking_server() -> Server {
    let text = text_with(&[("tokenizer.chat_template.rerank", RANKING)], &[]);
    Server::start_with(options(), Some(text)).await
}

/// Asks, and gives each document the score that stands in it. The prompts as they reached the ring come along.
async fn rank(server: &mut Server, route: &'static str, body: Value) -> (Reply, Vec<String>) {
    let address = server.address;
    let mut asking = tokio::spawn(async move { post(route, &body).send(address).await });
    let mut prompts = Vec::new();
    loop {
        tokio::select! {
            biased;
            reply = &mut asking => return (reply.unwrap(), prompts),
            accepted = server.accept() => {
                assert_eq!(accepted.request.instead, Some(Instead::Score));
                let prompt = accepted.prompt();
                let number = prompt.trim_end_matches('?').rsplit(' ').next().unwrap();
                accepted.score(number.parse().unwrap()).await;
                prompts.push(prompt);
            }
        }
    }
}

#[tokio::test]
async fn the_best_documents_come_first() {
    let mut server = ranking_server().await;
    let documents = json!(["0.25", {"text": "0.75"}, "0.5", "0.75"]);
    for route in ["/v1/rerank", "/rerank", "/v1/reranking", "/reranking"] {
        let body = json!({"model": MODEL, "query": "why", "documents": documents});
        let (reply, prompts) = rank(&mut server, route, body).await;
        assert_eq!(reply.status, 200);
        let asked = ["0.25", "0.75", "0.5", "0.75"].map(|text| format!("Q why D {text}?"));
        assert_eq!(prompts, asked);
        let count: usize = asked.iter().map(String::len).sum();
        let result = |index: usize, score: f64| json!({"index": index, "relevance_score": score});
        let results = [
            result(1, 0.75),
            result(3, 0.75),
            result(2, 0.5),
            result(0, 0.25),
        ];
        let whole = json!({
            "object": "list", "model": MODEL, "results": results,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        });
        assert_eq!(reply.json().await, whole);
    }
    let body =
        json!({"query": "why", "documents": documents, "top_n": 1, "return_documents": true});
    let (reply, prompts) = rank(&mut server, "/v1/rerank", body).await;
    assert_eq!(prompts.len(), 4);
    let best = json!({"index": 1, "relevance_score": 0.75, "document": {"text": "0.75"}});
    assert_eq!(reply.json().await["results"], json!([best]));
}

#[tokio::test]
async fn what_cannot_be_ranked_is_named() {
    let mut server = ranking_server().await;
    let long = "x".repeat(CONTEXT);
    for (body, param) in [
        (json!({"documents": ["a"]}), "query"),
        (json!({"query": "a"}), "documents"),
        (json!({"query": "a", "documents": []}), "documents"),
        (json!({"query": "a", "documents": ["b", 1]}), "documents"),
        (
            json!({"query": "a", "documents": vec!["b"; 1025]}),
            "documents",
        ),
        (json!({"query": "a", "documents": ["b", long]}), "documents"),
        (
            json!({"query": format!("{long}x"), "documents": ["b"]}),
            "query",
        ),
        (
            json!({"query": &long[..900], "documents": vec!["b"; 600]}),
            "documents",
        ),
        (
            json!({"query": "a", "documents": ["b"], "top_n": 0}),
            "top_n",
        ),
    ] {
        let reply = post("/v1/rerank", &body).send(server.address).await;
        assert_eq!(reply.status, 400);
        let error = reply.json().await["error"].clone();
        assert_eq!(error["param"], param, "{error}");
    }
    assert!(server.nothing_submitted());
}

#[tokio::test]
async fn a_model_that_ranks_nothing_says_so() {
    let text = text_with(&[("tokenizer.chat_template", TEMPLATE)], &[]);
    let server = Server::start_with(options(), Some(text)).await;
    let body = json!({"query": "a", "documents": ["b"]});
    let reply = post("/v1/rerank", &body).send(server.address).await;
    assert_eq!(reply.status, 400);
    let error = reply.json().await["error"].clone();
    assert_eq!(error["param"], "model");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("ranks no texts"), "{message}");
}
