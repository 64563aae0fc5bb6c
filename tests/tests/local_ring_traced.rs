//! One trace per request: what the gateway, rank 0 and every member tell of it is one tree, whoever asks for it.

use std::collections::{BTreeMap, BTreeSet};

use prima_tests::local_ring::{LocalRing, LocalRingBuilder, smollm2};
use prima_tests::trace_collector::{CollectedSpan, TraceCollector};
use prima_tests::{Endpoint as _, http, wait_until};
use rustix::process::Signal;
use serde_json::{Value, json};

/// The client's own span.
const CLIENT: &str = "b7ad6b7169203331";
const COMPLETIONS: &str = "/v1/completions";
/// Of three members, in two rounds.
const WINDOWS: usize = 6;
/// Clocks of one machine, read by several processes.
const PRECISION: u64 = 2_000_000;

/// A ring of three in two rounds that sends spans at once.
fn traced(collector: &TraceCollector) -> LocalRingBuilder {
    let ring = LocalRing::builder().model(&smollm2()).rounds(2);
    ring.split(&[10, 10, 10])
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint())
        .env("OTEL_BSP_SCHEDULE_DELAY", "100")
}

fn asks(prompt: &str, max_tokens: usize) -> Value {
    json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true})
}

fn traceparent(trace: &str, flags: &str) -> String {
    format!("00-{trace}-{CLIENT}-{flags}")
}

/// The spans of a trace, once the request's own has come, all others have their parents, and each pass its window of every member and round.
/// Members send theirs when they like.
fn spans_of(collector: &TraceCollector, trace: &str) -> Vec<CollectedSpan> {
    let of_trace = || {
        let mut spans = collector.spans();
        spans.retain(|span| span.trace == trace);
        spans
    };
    let whole = |spans: &[CollectedSpan]| {
        let ids: BTreeSet<&str> = spans.iter().map(|span| span.id.as_str()).collect();
        let layers = |pass: &CollectedSpan| {
            let windows = spans.iter().filter(|window| window.parent == pass.id);
            windows.filter(|window| !is_head(window)).count()
        };
        spans.iter().any(|span| span.parent == CLIENT)
            && spans
                .iter()
                .all(|span| span.parent == CLIENT || ids.contains(span.parent.as_str()))
            && named(spans, "pass")
                .into_iter()
                .all(|pass| layers(pass) == WINDOWS)
    };
    wait_until("a whole trace", || whole(&of_trace()));
    of_trace()
}

fn is_head(window: &CollectedSpan) -> bool {
    window.attributes["prima.layers"] == "output head"
}

fn named<'a>(spans: &'a [CollectedSpan], name: &str) -> Vec<&'a CollectedSpan> {
    spans.iter().filter(|span| span.name == name).collect()
}

fn the_one<'a>(spans: &'a [CollectedSpan], name: &str) -> &'a CollectedSpan {
    match named(spans, name).as_slice() {
        [span] => span,
        found => panic!("one {name}, not {found:#?}"),
    }
}

fn is_within(span: &CollectedSpan, whole: &CollectedSpan) -> bool {
    span.begun + PRECISION >= whole.begun && span.ended <= whole.ended + PRECISION
}

fn number(span: &CollectedSpan, key: &str) -> usize {
    let text = &span.attributes[key];
    text.parse().unwrap_or_else(|_| panic!("{key}: {text}"))
}

#[test]
fn a_request_is_one_trace_through_all_members() {
    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    let collector = TraceCollector::start();
    let ring = traced(&collector).arg("--no-speculation").start();
    let parent = traceparent(TRACE, "01");
    // More than one frame carries.
    let prompt = "All work and no play makes Jack a dull boy. ".repeat(80);
    let body = asks(&prompt, 6);
    let answer = http::post_traced(ring.address(), COMPLETIONS, &parent, &body).expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.body);
    let id = answer
        .headers
        .iter()
        .find(|(name, _)| name == "x-request-id");
    let prompt_tokens = answer.json()["usage"]["prompt_tokens"].as_u64();
    let prompt_tokens = prompt_tokens.expect("a count") as usize;
    let spans = spans_of(&collector, TRACE);

    let request = the_one(&spans, "POST /v1/completions");
    assert_eq!(request.parent, CLIENT);
    assert_eq!(request.attributes["http.response.status_code"], "200");
    assert_eq!(
        Some(&request.attributes["prima.request_id"]),
        id.map(|(_, id)| id)
    );
    let [queued, asked, answered] =
        ["queued", "prompt", "answer"].map(|name| the_one(&spans, name));
    assert!(queued.ended <= asked.ended && asked.ended <= answered.begun + PRECISION);
    assert_eq!(number(asked, "prima.prompt_tokens"), prompt_tokens);
    for phase in [queued, asked, answered] {
        assert_eq!(phase.parent, request.id);
        assert!(is_within(phase, request), "{phase:#?} in {request:#?}");
    }

    let passes = named(&spans, "pass");
    let of = |phase: &CollectedSpan| passes.iter().filter(|pass| pass.parent == phase.id).count();
    assert!(of(asked) >= 2, "chunks: {}", of(asked));
    assert_eq!(of(asked) + of(answered), passes.len());
    // The sixth token goes round no more.
    assert_eq!(of(answered), 5);
    let rows: usize = passes.iter().map(|pass| number(pass, "prima.rows")).sum();
    assert_eq!(rows, prompt_tokens + 5);
    let sampled = named(&spans, "sample");
    let tokens: usize = sampled.iter().map(|one| number(one, "prima.tokens")).sum();
    assert!((5..=6).contains(&tokens), "{tokens}");

    let windows = named(&spans, "window");
    for pass in &passes {
        let of_pass = windows.iter().filter(|window| window.parent == pass.id);
        let mut layers: BTreeMap<&str, &str> = BTreeMap::new();
        for window in of_pass {
            assert!(is_within(window, pass), "{window:#?} in {pass:#?}");
            assert_eq!(number(window, "prima.rows"), number(pass, "prima.rows"));
            let member = window.attributes["service.instance.id"].as_str();
            layers.insert(window.attributes["prima.layers"].as_str(), member);
        }
        layers.remove("output head");
        let expected = [
            ("0..5", "m0"),
            ("5..10", "m1"),
            ("10..15", "m2"),
            ("15..20", "m0"),
            ("20..25", "m1"),
            ("25..30", "m2"),
        ];
        assert_eq!(layers, BTreeMap::from(expected));
    }
    let with_logits =
        |span: &CollectedSpan| span.trace == TRACE && span.name == "window" && is_head(span);
    wait_until("what the output head computed", || {
        collector
            .spans()
            .iter()
            .filter(|span| with_logits(span))
            .count()
            >= 6
    });
    ring.stop();
}

#[test]
fn whatever_computes_is_traced() {
    let collector = TraceCollector::start();
    // What runs ahead may come home after the answer.
    let ring = traced(&collector).arg("--no-speculation").start();
    let chat = json!([{"role": "user", "content": "Count to three."}]);
    let cases = [
        (
            "/v1/chat/completions",
            json!({"messages": chat, "max_tokens": 4, "stream": true}),
        ),
        (
            "/v1/messages",
            json!({"model": ring.model(), "messages": chat, "max_tokens": 4}),
        ),
        (
            "/api/chat",
            json!({"model": ring.model(), "messages": chat, "options": {"num_predict": 4}}),
        ),
        (
            "/v1/embeddings",
            json!({"input": ["one text", "another text"]}),
        ),
        (
            COMPLETIONS,
            json!({"prompt": ["one", "two"], "n": 2, "max_tokens": 4}),
        ),
    ];
    for (number, (path, body)) in cases.iter().enumerate() {
        let trace = format!("{:032x}", number + 1);
        let parent = traceparent(&trace, "01");
        let answer = http::post_traced(ring.address(), path, &parent, body).expect("an answer");
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        let spans = spans_of(&collector, &trace);
        let request = the_one(&spans, &format!("POST {path}"));
        let queued = match body["input"].is_array() || body["prompt"].is_array() {
            true => 2,
            false => 1,
        };
        assert_eq!(named(&spans, "queued").len(), queued, "{path}");
        assert!(
            spans.iter().all(|span| is_within(span, request)),
            "{path}: {spans:#?}"
        );
        let members: BTreeSet<&str> = named(&spans, "window")
            .iter()
            .map(|window| window.attributes["service.instance.id"].as_str())
            .collect();
        assert_eq!(members, BTreeSet::from(["m0", "m1", "m2"]), "{path}");
    }
    ring.stop();
}

#[test]
fn only_what_is_sampled_is_traced() {
    let collector = TraceCollector::start();
    let ring = traced(&collector)
        .env("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        .start();
    ring.complete("Nobody asked for a trace of this", 2);
    let body = asks("Nor of this", 2);
    let unsampled = traceparent(&"1".repeat(32), "00");
    let answer = http::post_traced(ring.address(), COMPLETIONS, &unsampled, &body);
    assert_eq!(answer.expect("an answer").status, 200);
    let sampled = "2".repeat(32);
    let parent = traceparent(&sampled, "01");
    let refused = json!({"prompt": 7.5});
    let answer = http::post_traced(ring.address(), COMPLETIONS, &parent, &refused);
    assert_eq!(answer.expect("an answer").status, 400);
    let spans = spans_of(&collector, &sampled);
    let request = the_one(&spans, "POST /v1/completions");
    assert_eq!(request.attributes["http.response.status_code"], "400");
    assert_eq!(collector.spans().len(), 1, "{:#?}", collector.spans());
    ring.stop();
}

#[test]
fn a_collector_that_says_nothing_holds_up_nobody() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("its address");
    let ring = LocalRing::builder().model(&smollm2()).members(2);
    let ring = ring
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{address}"))
        .env("OTEL_BSP_SCHEDULE_DELAY", "100")
        .start();
    assert!(!ring.complete("The capital of France is", 4).is_empty());
    let asked = silent.accept().expect("whoever has spans to send");
    assert!(!ring.complete("The capital of Spain is", 4).is_empty());
    let ended = ring.end_by(Signal::INT);
    drop(asked);
    assert!(ended.status.success(), "{ended:#?}");
    assert!(!ended.stderr.contains("killed"), "{ended:#?}");
}

#[test]
fn variables_of_other_programs_do_no_harm() {
    let ring = LocalRing::builder().model(&smollm2()).members(2);
    let ring = ring
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", "https://127.0.0.1:1")
        .start();
    assert!(!ring.complete("The capital of France is", 4).is_empty());
    assert!(
        ring.logged().contains("requests are not traced"),
        "{}",
        ring.logged()
    );
    ring.stop();
}
