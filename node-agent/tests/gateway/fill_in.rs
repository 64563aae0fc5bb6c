//! What is missing in the middle of a text: `suffix` of /v1/completions, and llama.cpp's /infill.

use prima_node_agent::generation::FinishReason;
use serde_json::{Value, json};

use crate::client::post;
use crate::server::{CONTEXT, Server, VOCABULARY, id_of, options, text_with};

const CODING: [&str; 5] = [
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|repo_name|>",
    "<|file_sep|>",
];
const BOS: u32 = 1;
const BEFORE: u32 = VOCABULARY;
const AFTER: u32 = VOCABULARY + 1;
const BETWEEN: u32 = VOCABULARY + 2;
const REPOSITORY: u32 = VOCABULARY + 3;
const FILE: u32 = VOCABULARY + 4;

async fn coding_server(marks: usize) -> Server {
    let text = text_with(&[], &CODING[..marks]);
    Server::start_with(options(), Some(text)).await
}

fn ids(text: &str) -> Vec<u32> {
    let id = |byte| match byte {
        b' ' => VOCABULARY - 1,
        byte => id_of(byte),
    };
    text.bytes().map(id).collect()
}

/// The prompt that the ring gets for this body.
async fn prompt(server: &mut Server, route: &'static str, body: Value) -> Vec<u32> {
    let address = server.address;
    let asking = tokio::spawn(async move { post(route, &body).send(address).await });
    let accepted = server.accept().await;
    let prompt = accepted.request.prompt.to_vec();
    accepted.token(0, "x").await;
    accepted.finish(0, FinishReason::Stop, "").await;
    accepted.usage(prompt.len(), 1).await;
    assert_eq!(asking.await.unwrap().status, 200);
    prompt
}

#[tokio::test]
async fn a_suffix_stands_behind_the_gap() {
    let mut server = coding_server(3).await;
    let body = json!({"prompt": "f(", "suffix": ")"});
    let asked = prompt(&mut server, "/v1/completions", body).await;
    let expected = [
        &[BOS, BEFORE][..],
        &ids("f("),
        &[AFTER],
        &ids(")"),
        &[BETWEEN],
    ];
    assert_eq!(asked, expected.concat());
    for (body, status, param) in [
        (json!({"prompt": [5], "suffix": ")"}), 400, "suffix"),
        (
            json!({"prompt": "x".repeat(CONTEXT - 5), "suffix": "abc"}),
            0,
            "",
        ),
    ] {
        let reply = post("/v1/completions", &body).send(server.address).await;
        let error = reply.json().await["error"].clone();
        match status {
            0 => assert_eq!(error["code"], "context_length_exceeded"),
            _ => assert_eq!(error["param"], param),
        }
    }
}

#[tokio::test]
async fn an_editor_sends_other_files_too() {
    let mut server = coding_server(5).await;
    let body = json!({
        "input_prefix": "a\n", "prompt": "b", "input_suffix": "c",
        "input_extra": [{"filename": "x.rs", "text": "one"}, {"filename": "y.rs", "text": "two"}],
    });
    let asked = prompt(&mut server, "/infill", body.clone()).await;
    let other = |name: &str| [&[FILE][..], &ids(name)].concat();
    let around = [&[BEFORE][..], &ids("a\nb"), &[AFTER], &ids("c"), &[BETWEEN]].concat();
    let expected = [
        vec![BOS, REPOSITORY],
        ids("repository\n"),
        other("x.rs\none"),
        other("y.rs\ntwo"),
        other("this file\n"),
        around.clone(),
    ];
    assert_eq!(asked, expected.concat());
    // A model that knows no files.
    let mut plain = coding_server(3).await;
    let asked = prompt(&mut plain, "/infill", body).await;
    let expected = [
        vec![BOS],
        ids("\n\n--- x.rs ---\n\none"),
        ids("\n\n--- y.rs ---\n\ntwo"),
        around,
    ];
    assert_eq!(asked, expected.concat());
}

#[tokio::test]
async fn what_is_far_from_the_gap_is_left_out() {
    let mut server = coding_server(5).await;
    let before = "b".repeat(CONTEXT) + "|";
    let after = "|".to_owned() + &"a".repeat(CONTEXT);
    let body = json!({
        "input_prefix": before, "input_suffix": after, "n_predict": 96,
        "input_extra": [{"filename": "x", "text": "y"}],
    });
    let asked = prompt(&mut server, "/infill", body).await;
    // 904 tokens, of which four are no text: 675 before and 225 after.
    assert_eq!(asked.len(), CONTEXT - 96);
    assert_eq!(asked[..2], [BOS, BEFORE]);
    assert_eq!(asked[2 + 674], id_of(b'|'));
    assert_eq!(asked[2 + 675..2 + 675 + 2], [AFTER, id_of(b'|')]);
    assert_eq!(asked.last(), Some(&BETWEEN));
    // What one part leaves is the other's, and then the other files'.
    let body = json!({
        "input_prefix": "b", "input_suffix": after, "n_predict": 96,
        "input_extra": [{"filename": "x", "text": "y"}],
    });
    let asked = prompt(&mut server, "/infill", body).await;
    assert_eq!(asked.len(), CONTEXT - 96);
    let body = json!({
        "input_prefix": "b", "input_suffix": "c", "n_predict": 500,
        "input_extra": [
            {"filename": "far", "text": "x".repeat(400)},
            {"filename": "near", "text": "y".repeat(400)},
        ],
    });
    let asked = prompt(&mut server, "/infill", body).await;
    let files = asked.iter().filter(|token| **token == FILE).count();
    assert_eq!(files, 2, "the nearer one and the file itself");
    assert!(asked.contains(&id_of(b'y')) && asked.len() <= 500);
}

#[tokio::test]
async fn an_infill_is_answered_as_llama_cpp_does() {
    let mut server = coding_server(5).await;
    let address = server.address;
    for stream in [false, true] {
        let body = json!({
            "input_prefix": "f(", "input_suffix": ")", "n_predict": 7, "temperature": 0.5,
            "stop": [";"], "stream": stream,
        });
        let asking = tokio::spawn(async move { post("/infill", &body).send(address).await });
        let accepted = server.accept().await;
        assert_eq!(accepted.request.max_tokens, 7);
        assert_eq!(accepted.request.sampling.temperature, 0.5);
        accepted.token(0, "a\n").await;
        accepted.token(0, "b").await;
        accepted.finish(0, FinishReason::StopString(0), "").await;
        accepted.usage(6, 2).await;
        let reply = asking.await.unwrap();
        let last = if stream {
            let mut reply = reply;
            let mut events: Vec<Value> = Vec::new();
            while let Some(event) = reply.event().await {
                events.push(serde_json::from_str(&event).unwrap());
            }
            let said: String = events
                .iter()
                .map(|event| event["content"].as_str().unwrap())
                .collect();
            assert_eq!(said, "a\nb");
            let (last, before) = events.split_last().unwrap();
            assert!(before.iter().all(|event| event["stop"] == false));
            last.clone()
        } else {
            let answer = reply.json().await;
            assert_eq!(answer["content"], "a\nb");
            answer
        };
        assert_eq!(last["stop"], true);
        assert_eq!(last["stop_type"], "word");
        assert_eq!(last["stopping_word"], ";");
        assert_eq!(last["has_new_line"], true);
        assert_eq!(last["tokens_predicted"], 2);
        assert_eq!(last["tokens_evaluated"], 6);
        assert_eq!(last["timings"]["predicted_n"], 2);
    }
}

#[tokio::test]
async fn what_cannot_be_filled_in_is_named() {
    let server = coding_server(5).await;
    let around =
        |extra: Value| json!({"input_prefix": "", "input_suffix": "", "input_extra": extra});
    for (body, param) in [
        (json!({"input_suffix": ""}), "input_prefix"),
        (json!({"input_prefix": ""}), "input_suffix"),
        (around(json!([1])), "input_extra[0]"),
        (around(json!([{"filename": "a"}])), "input_extra[0].text"),
        (around(json!(vec![json!({"text": ""}); 257])), "input_extra"),
    ] {
        let reply = post("/infill", &body).send(server.address).await;
        assert_eq!(reply.status, 400);
        assert_eq!(reply.json().await["error"]["param"], param);
    }
    let plain = coding_server(0).await;
    let body = json!({"input_prefix": "a", "input_suffix": "b"});
    let reply = post("/infill", &body).send(plain.address).await;
    assert_eq!(reply.status, 400);
    let error = reply.json().await["error"].clone();
    assert_eq!(error["param"], "input_suffix");
}
