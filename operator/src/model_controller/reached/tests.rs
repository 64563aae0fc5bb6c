//! What is known of rings after answers and silence, and how they are asked.

use std::future;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;
use tokio::time::timeout;

use super::*;
use crate::model_controller::OURS;
use crate::model_controller::test_world::{no_api_server, serving};

const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

#[test]
fn nobody_is_judged_by_who_is_cut_off() {
    let start = Instant::now();
    let at = |milliseconds| start + Duration::from_millis(milliseconds);
    let reached = Reached::default();
    let (a, b) = (at_host("a", "10.0.0.1"), at_host("b", "10.0.0.2"));
    let neighbour = at_host("neighbour", "10.0.0.1");
    let comes = |ring: &Ring, health, begun, now| {
        let changed = reached.note(ring, health, at(begun), at(now));
        (changed, reached.unready().contains_key(&ring.uid))
    };
    // One machine may well be off.
    for ring in [&a, &neighbour] {
        assert_eq!(comes(ring, ready(), 0, 1), (false, false));
        assert_eq!(comes(ring, no_answer(), 500, 2500), (true, true));
        assert_eq!(comes(ring, ready(), 3000, 3001), (true, false));
    }
    // All fall silent at once.
    let answers = |ring: &Ring, times: &[u64]| {
        for &time in times {
            assert!(!comes(ring, ready(), time - 2, time).1);
        }
    };
    answers(&b, &[3002, 3502]);
    for ring in [&a, &b, &neighbour] {
        assert_eq!(comes(ring, no_answer(), 3500, 5500), (false, false));
    }
    // What is said when the link is back is no sign of what was asked before.
    answers(&b, &[5502, 6002]);
    assert_eq!(comes(&a, no_answer(), 5000, 7000), (false, false));
    // Nor is what was said before the second question.
    answers(&b, &[6502, 7002, 7502]);
    assert_eq!(comes(&a, no_answer(), 7004, 8004), (false, false));
    // Nor are answers with a gap, during which the link may have been gone.
    answers(&b, &[8802]);
    assert_eq!(comes(&a, no_answer(), 7504, 8804), (false, false));
    // It goes on answering, so they are silent.
    answers(&b, &[9302, 9802]);
    assert_eq!(comes(&a, no_answer(), 8802, 9804), (true, true));
    answers(&b, &[10_302, 10_802]);
    assert_eq!(comes(&neighbour, no_answer(), 8802, 10_804), (true, true));
    // Those that are known to be silent are no sign of anything.
    assert_eq!(comes(&b, no_answer(), 11_000, 13_000), (true, true));
}

#[test]
fn the_last_to_fall_silent_is_not_judged_alone() {
    let start = Instant::now();
    let at = |milliseconds| start + Duration::from_millis(milliseconds);
    let reached = Reached::default();
    let (a, b) = (at_host("a", "10.0.0.1"), at_host("b", "10.0.0.2"));
    reached.note(&a, ready(), at(0), at(1));
    reached.note(&b, ready(), at(0), at(8));
    // One's minute is over, the other's is not.
    for ring in [&a, &b] {
        assert!(!reached.note(ring, no_answer(), at(58_003), at(60_003)));
    }
    assert!(reached.unready().is_empty());
}

#[test]
fn rings_that_are_no_more_are_forgotten() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let reached = Reached::default();
    let rings = || ["a", "b", "new"].map(|uid| at_host(uid, "10.0.0.1"));
    let [a, b, _] = rings();
    reached.note(&b, ready(), at(0), at(0));
    reached.note(&a, ready(), at(1), at(1));
    reached.note(&a, no_answer(), at(2), at(4));
    let last_asked = [("b", 0), ("a", 2)].map(|(uid, second)| (uid.to_owned(), at(second)));
    let mut last_asked = HashMap::from(last_asked);
    let mut due = |rings: Vec<Ring>| {
        let plans = rings.iter().map(|ring| ring.uid.clone()).collect();
        let due = reached.due(rings, &plans, &mut last_asked, at(5));
        due.into_iter().map(|ring| ring.uid).collect::<Vec<_>>()
    };
    assert_eq!(due(rings().into()), ["new", "b", "a"]);
    assert_eq!(reached.unready().len(), 1);
    assert_eq!(due(vec![b]), ["b"]);
    assert!(reached.unready().is_empty());
    // It is asked as a new one.
    assert!(!reached.note(&a, no_answer(), at(6), at(8)));
}

#[test]
fn who_was_not_asked_for_a_while_is_judged_as_before() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let reached = Reached::default();
    let (a, b) = (at_host("a", "10.0.0.1"), at_host("b", "10.0.0.2"));
    let plans = HashSet::from(["a", "b"].map(str::to_owned));
    reached.note(&a, ready(), at(0), at(0));
    reached.note(&b, ready(), at(0), at(0));
    // Both have lost a member, and one has another by now.
    let mut last_asked = HashMap::new();
    let mut due = |rings, second| reached.due(rings, &plans, &mut last_asked, at(second));
    assert!(due(Vec::new(), 1).is_empty());
    assert_eq!(due(vec![at_host("a", "10.0.0.1")], 3).len(), 1);
    // The other one, which nobody asks, is no sign that the operator is cut off.
    assert!(reached.note(&a, no_answer(), at(3), at(5)));
    assert!(reached.unready().contains_key("a"));
    // Until it answers again.
    reached.note(&a, ready(), at(6), at(6));
    reached.note(&b, ready(), at(6), at(6));
    assert!(!reached.note(&a, no_answer(), at(7), at(9)));
}

#[test]
fn a_ring_is_asked_anew_whatever_is_under_way() {
    let start = Instant::now();
    let at = |milliseconds| start + Duration::from_millis(milliseconds);
    let reached = Reached::default();
    let a = || at_host("a", "10.0.0.1");
    let plans = HashSet::from(["a".to_owned()]);
    let mut last_asked = HashMap::new();
    let mut is_asked = |rings, milliseconds| {
        let due = reached.due(rings, &plans, &mut last_asked, at(milliseconds));
        let asked = due.into_iter().map(|ring| (ring.uid, at(milliseconds)));
        let before = last_asked.clone();
        last_asked.extend(asked);
        last_asked != before
    };
    // One that has never answered is asked seldom.
    assert!(is_asked(vec![a()], 0) && !is_asked(vec![a()], 4900));
    assert!(is_asked(vec![a()], 5000));
    reached.note(&a(), ready(), at(5000), at(5010));
    // On a slow link, nothing has come of the first when there are three more.
    assert!(!is_asked(vec![a()], 5400));
    for milliseconds in [5500, 6000, 6500] {
        assert!(is_asked(vec![a()], milliseconds));
    }
    // What comes of an older one says nothing any more.
    reached.note(&a(), ready(), at(6000), at(7400));
    assert!(!reached.note(&a(), no_answer(), at(5500), at(7500)));
    assert!(reached.unready().is_empty());
    assert!(reached.note(&a(), no_answer(), at(6500), at(8500)));
    assert!(!reached.note(&a(), ready(), at(6000), at(8600)));
    assert!(reached.unready().contains_key("a"));
    // One that was away is asked at once.
    assert!(is_asked(vec![a()], 8600) && !is_asked(Vec::new(), 8700));
    assert!(is_asked(vec![a()], 8800));
}

#[test]
fn a_ring_is_asked_before_it_is_ready() {
    let asked = |state: &str| {
        let mut plan = RingPlan::clone(&serving("m", 9400));
        let status = json!({"members": [{"name": "desk", "state": state}]});
        plan.status = Some(serde_json::from_value(status).unwrap());
        Ring::of(&Arc::new(plan)).is_some()
    };
    // While it loads, it may not listen yet.
    assert!(!asked("Loading") && !asked("Failed"));
    assert!(asked("Loaded") && asked("Ready"));
}

/// A ring whose rank 0 is on this host.
fn at_host(uid: &str, host: &str) -> Ring {
    Ring {
        uid: uid.to_owned(),
        model: ObjectRef::new("m"),
        http: SocketAddr::new(host.parse().unwrap(), 9400),
    }
}

fn ready() -> Health {
    Health::Ready {
        speed: None,
        expert_miss_percent: None,
    }
}

fn no_answer() -> Health {
    Health::NoAnswer("refused".to_owned())
}

#[test]
fn a_ring_that_says_that_it_is_not_ready_is_believed() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut ring = Asked::new(HOST);
    let not_ready = Health::NotReady {
        why: "it stands still".to_owned(),
        fails_at: None,
        missed_by: None,
    };
    let said = NotReady::Said("it stands still".to_owned());
    assert_eq!(ring.note(not_ready, false, at(1)), Known::NotReady(said));
    let not_reached = NotReady::NotReached("refused".to_owned());
    let is = ring.note(no_answer(), false, at(3));
    assert_eq!(is, Known::NotReady(not_reached));
    assert_eq!(ring.note(ready(), false, at(4)), Known::NothingAgainst);
}

#[test]
fn what_another_operator_found_silent_is_so_for_a_minute() {
    let reached = Reached::default();
    let mut plan = RingPlan::clone(&serving("m", 9400));
    let rank0 = plan.spec.members[0].name.clone();
    let mut says = |state: &str| {
        let status = json!({"members": [{"name": rank0, "state": state}]});
        plan.status = Some(serde_json::from_value(status).unwrap());
        Arc::new(plan.clone())
    };
    // One that loads says so itself.
    reached.believe_silent(&says("Loading"));
    assert!(reached.unready().is_empty());
    let plan = says("Ready");
    // This one has asked, too, while it waited to lead, but was never answered.
    let asked = at_host("plan-m", "127.0.0.1");
    reached.note(&asked, no_answer(), Instant::now(), Instant::now());
    reached.believe_silent(&plan);
    let is_silent = || of(&reached.unready(), &plan).is_some();
    // Nothing is known of one that does not say that it is ready.
    assert!(is_silent() && of(&reached.unready(), &says("Loading")).is_none());
    let start = Instant::now();
    let comes = |health, seconds| {
        let now = start + Duration::from_secs(seconds);
        reached.note(&asked, health, now, now);
    };
    comes(no_answer(), 1);
    assert!(is_silent());
    comes(no_answer(), 61);
    assert!(!is_silent(), "then its agent's word counts");
    // What is known here counts more.
    reached.believe_silent(&plan);
    assert!(!is_silent());
    comes(ready(), 62);
    assert!(!is_silent());
}

#[test]
fn only_who_has_answered_lately_is_not_reached() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut ring = Asked::new(HOST);
    let is_silent = |ring: &mut Asked, came: Health, second| {
        ring.note(came, false, at(second)) != Known::NothingAgainst
    };
    // One that never answered here is asked seldom.
    assert!(!is_silent(&mut ring, no_answer(), 4));
    assert_eq!(ring.pause(at(4)), SELDOM);
    assert!(!is_silent(&mut ring, ready(), 20));
    assert!(is_silent(&mut ring, no_answer(), 21));
    assert_eq!(ring.pause(at(21)), INTERVAL);
    // Then its agent's Lease tells.
    assert!(is_silent(&mut ring, no_answer(), 79));
    assert!(!is_silent(&mut ring, no_answer(), 80));
    assert_eq!(ring.pause(at(80)), SELDOM);
    // It is back.
    assert!(!is_silent(&mut ring, ready(), 94));
    assert!(is_silent(&mut ring, no_answer(), 95));
}

/// What a ring says of which this comes of each of two questions: it is closed at once, held without an answer, or answered; and how long that took.
async fn asked(first: &'static str, second: &'static str) -> (Health, bool, Duration) {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut ring = at_host("a", "127.0.0.1");
    ring.http = server.local_addr().unwrap();
    let serving = tokio::spawn(async move {
        let mut held = Vec::new();
        for comes in [first, second] {
            let (mut client, _) = server.accept().await.unwrap();
            if comes == "closed" {
                continue;
            }
            // Whoever asks may have given up.
            let _ = client.read(&mut [0; 1024]).await;
            if comes == "answered" {
                let _ = client.write_all(b"HTTP/1.0 200 OK\r\n\r\n{}").await;
            } else {
                held.push(client);
            }
        }
        future::pending::<()>().await;
    });
    let begun = Instant::now();
    let (came, is_late) = ring.health().await;
    let took = begun.elapsed();
    serving.abort();
    (came, is_late, took)
}

#[tokio::test]
async fn a_ring_is_silent_when_two_questions_fail() {
    for (first, second, least) in [
        ("answered", "answered", Duration::ZERO),
        ("held", "answered", AGAIN),
        ("closed", "answered", AGAIN),
        ("held", "held", AGAIN + DEADLINE),
    ] {
        let (came, is_late) = loop {
            let (came, is_late, took) = asked(first, second).await;
            assert!(took >= least, "{first}, {second}");
            // If this machine stood still, a question may have failed that was answered.
            if took < DEADLINE || second == "held" {
                break (came, is_late);
            }
        };
        let is_silent = matches!(came, Health::NoAnswer(_));
        assert_eq!(is_silent, second == "held", "{first}, {second}: {came:?}");
        // One that is closed got there.
        let expected = (first, second) == ("held", "answered");
        assert_eq!(is_late, expected, "{first}, {second}");
    }
    // Nobody listens there.
    let bound = TcpSocket::new_v4().unwrap();
    bound.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let mut ring = at_host("a", "127.0.0.1");
    ring.http = bound.local_addr().unwrap();
    let begun = Instant::now();
    assert!(matches!(ring.health().await, (Health::NoAnswer(_), false)));
    assert!(begun.elapsed() >= OTHERS_ANSWERED);
}

#[test]
fn a_ring_that_is_gone_has_no_lossy_way() {
    let reached = Reached::default();
    let a = at_host("a", "10.0.0.1");
    // Nothing is known of it.
    assert!(!reached.note_way(&a, true));
    let now = Instant::now();
    assert!(!reached.note(&a, ready(), now, now));
    let changes = (0..40).filter(|_| reached.note_way(&a, true)).count();
    assert_eq!((changes, reached.lossy()), (1, ["a".to_owned()].into()));
    let due = reached.due(Vec::new(), &HashSet::new(), &mut HashMap::new(), now);
    assert!(due.is_empty() && reached.lossy().is_empty());
}

const READY: &str = "HTTP/1.0 200 OK\r\n\r\n{}";
const NOT_READY: &str =
    "HTTP/1.0 503 Service Unavailable\r\n\r\n{\"error\":{\"message\":\"it stands still\"}}";

/// The port of a rank 0 that says this, or is silent if that is empty; how it is told to say something else; and how many questions came.
async fn rank0(first: &'static str) -> (u16, watch::Sender<&'static str>, Arc<AtomicUsize>) {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    let (tell, says) = watch::channel(first);
    let asked: Arc<AtomicUsize> = Arc::default();
    let count = asked.clone();
    tokio::spawn(async move {
        let mut held = Vec::new();
        loop {
            let (mut client, _) = server.accept().await.unwrap();
            count.fetch_add(1, Ordering::Relaxed);
            let says = *says.borrow();
            if says.is_empty() {
                held.push(client);
                continue;
            }
            // Whoever asks may have gone.
            let _ = client.read(&mut [0; 1024]).await;
            let _ = client.write_all(says.as_bytes()).await;
        }
    });
    (port, tell, asked)
}

/// Waits until it is told of the ring `a` that this is known of it. Something else may be told before, if this machine stands still.
async fn told_of_a(
    told: &mut mpsc::UnboundedReceiver<ObjectRef<Model>>,
    reached: &Reached,
    is_known: impl Fn(Option<&NotReady>) -> bool,
) {
    loop {
        assert_eq!(
            told.recv().await.unwrap(),
            ObjectRef::new("a").within("home")
        );
        let unready = reached.unready();
        let others = unready.keys().filter(|uid| *uid != "plan-a");
        assert_eq!(others.count(), 0, "{unready:?}");
        if is_known(unready.get("plan-a")) {
            return;
        }
    }
}

#[tokio::test]
async fn rings_are_asked_again_whoever_else_is_silent() {
    let (stores, _changes) = Stores::watch(&no_api_server(), ("prima", &[]), OURS);
    let (port, says, _) = rank0(NOT_READY).await;
    let (silent, _says_nothing, silent_asked) = rank0("").await;
    stores.add_plan(serving("a", port));
    stores.add_plan(serving("silent", silent));
    let reached = Reached::default();
    let (changed, mut told) = mpsc::unbounded_channel();
    let begun = Instant::now();
    let test = async {
        let said = NotReady::Said("it stands still".to_owned());
        for _ in 0..2 {
            told_of_a(&mut told, &reached, |known| known == Some(&said)).await;
            says.send_replace(READY);
            told_of_a(&mut told, &reached, |known| known.is_none()).await;
            says.send_replace(NOT_READY);
        }
        // One that has never answered is asked seldom, twice each time, and not judged.
        let times = 1 + begun.elapsed().as_secs() / SELDOM.as_secs();
        assert!(silent_asked.load(Ordering::Relaxed) as u64 <= 2 * times);
    };
    tokio::select! {
        () = keep(&stores, &reached, &changed) => panic!("it ended"),
        done = timeout(Duration::from_secs(300), test) => done.unwrap(),
    }
}

#[tokio::test]
async fn a_question_without_an_answer_keeps_no_other_waiting() {
    let (stores, _changes) = Stores::watch(&no_api_server(), ("prima", &[]), OURS);
    let (port, says, asked) = rank0(NOT_READY).await;
    stores.add_plan(serving("a", port));
    let reached = Reached::default();
    let (changed, mut told) = mpsc::unbounded_channel();
    let test = async {
        told_of_a(&mut told, &reached, |known| known.is_some()).await;
        // Again if this machine stood still.
        for _ in 0..5 {
            says.send_replace(READY);
            told_of_a(&mut told, &reached, |known| known.is_none()).await;
            let before = asked.load(Ordering::Relaxed);
            says.send_replace("");
            told_of_a(&mut told, &reached, |known| known.is_some()).await;
            // Each asks twice.
            if asked.load(Ordering::Relaxed) - before > 2 {
                return;
            }
        }
        panic!("one waits for the other");
    };
    tokio::select! {
        () = keep(&stores, &reached, &changed) => panic!("it ended"),
        done = timeout(Duration::from_secs(300), test) => done.unwrap(),
    }
}
