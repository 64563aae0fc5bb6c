//! Rings without a cluster over several machines: one lends itself (`prima agent`), another borrows it (`prima run --member`). The machines
//! are addresses of the loopback network, which real networks between namespaces replace in two tests.

use std::fs;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use prima_gguf::part_paths;
use prima_test_hub::{Cut, TestHub};
use prima_tests::lending::{Lender, User};
use prima_tests::local_ring::{LocalRing, LocalRingBuilder, assert_none_left, smollm2};
use prima_tests::network::Networks;
use prima_tests::process::send_signal;
use prima_tests::stopwatch::Stopwatch;
use prima_tests::{Endpoint as _, http, split_model, wait_until};
use rustix::process::Signal;

const PROMPT: &str = "The capital of France is";
const TOKENS: usize = 24;

/// Of this process, that asked for an address.
static TESTS: AtomicU8 = AtomicU8::new(0);

/// An address of this machine that no other test has.
fn loopback() -> String {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let test = 1 + TESTS.fetch_add(1, Ordering::Relaxed);
    format!("127.{}.{low}.{test}:9190", 64 + high % 128)
}

fn borrowing(user: &User, member: &str) -> LocalRingBuilder {
    user.borrowing(LocalRing::builder().model(&smollm2()), member)
}

fn alone() -> String {
    let ring = LocalRing::builder().model(&smollm2()).split(&[30]).start();
    ring.complete(PROMPT, TOKENS)
}

/// The lender has no member any more.
fn wait_until_given_back(lender: &Lender, times: usize) {
    wait_until("the lender has its machine back", || {
        lender
            .logged()
            .matches("has given this machine back")
            .count()
            == times
    });
}

#[test]
fn a_lent_machine_runs_its_layers_and_keeps_no_more() {
    let (owner, user, address) = (User::default(), User::default(), loopback());
    let lender = owner.lend("desk", &address, None);
    let ring = borrowing(&user, &lender.invitation())
        .split(&[20, 10])
        .start();
    let printed = ring.printed();
    assert!(
        printed.contains("desk") && printed.contains("20-29"),
        "{printed}"
    );
    let expected = alone();
    assert_eq!(
        ring.complete(PROMPT, TOKENS),
        expected,
        "as one machine answers"
    );

    let model_bytes = smollm2().metadata().unwrap().len();
    let sent = owner.sent_files();
    let [(size, there)] = sent[..] else {
        panic!("one file: {sent:?}");
    };
    assert_eq!(size, model_bytes);
    // A third of the layers, and the header; not the embedding.
    assert!(
        there > model_bytes / 10 && there < model_bytes / 2,
        "{there} of {model_bytes}"
    );

    // A second ring would share the machine's memory with this one.
    let second = borrowing(&user, &lender.address)
        .split(&[20, 10])
        .run_to_end();
    assert!(
        second.stderr.contains("it runs a member of another ring"),
        "{second:?}"
    );
    ring.stop();
    wait_until_given_back(&lender, 1);

    // Known now: no word, and nothing is sent again. Killed, it leaves nothing running there.
    let ring = borrowing(&user, &lender.address).split(&[20, 10]).start();
    assert!(!ring.logged().contains("of the model"), "{}", ring.logged());
    let members = ring.members().to_vec();
    ring.end_by(Signal::KILL);
    wait_until_given_back(&lender, 2);
    assert_none_left(&members);

    // A lender that dies ends the ring, which names it.
    let ring = borrowing(&user, &lender.address).split(&[20, 10]).start();
    lender.kill();
    let ended = ring.wait_for_end();
    assert!(!ended.status.success(), "{ended:?}");
    assert!(
        ended.stderr.contains("member desk (rank 1, lent by"),
        "{ended:?}"
    );

    // Started again it knows its borrower, and shows another word.
    let again = owner.lend("desk", &address, None);
    assert!(
        again.word.is_none() && again.printed().contains("Known already"),
        "{}",
        again.printed()
    );
    borrowing(&user, &again.address)
        .split(&[20, 10])
        .start()
        .stop();
    assert!(again.stop().status.success());
}

#[test]
fn a_model_of_a_hub_is_fetched_once_and_sent_on() {
    let files = tempfile::tempdir().unwrap();
    let folder = files.path().join("people/models");
    fs::create_dir_all(&folder).unwrap();
    let first = split_model::in_three_files(&smollm2(), &folder);
    let parts = part_paths(&first);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let hub = runtime.block_on(TestHub::start(files.path())).unwrap();
    hub.control(|control| {
        control.cut = Some(Cut {
            after_bytes: 1 << 20,
            times: 2,
        });
    });
    let (owner, user) = (User::default(), User::default());
    let lender = owner.lend("desk", &loopback(), None);
    let name = first.file_name().unwrap().to_str().unwrap();
    let ring = |endpoint: &str, member: &str| {
        let ring = LocalRing::builder().arg(format!("hf.co/people/models/{name}"));
        user.borrowing(ring, member)
            .env("HF_ENDPOINT", endpoint)
            .split(&[20, 10])
            .start()
    };
    let first = ring(&hub.endpoint(), &lender.invitation());
    assert_eq!(first.model(), "SmolLM2-135M-Instruct-Q4_1");
    assert_eq!(first.complete(PROMPT, TOKENS), alone());
    // Once, but for what was cut off; the lender asked nobody.
    let model_bytes: u64 = parts
        .iter()
        .map(|part| part.metadata().unwrap().len())
        .sum();
    let fetched = hub.body_bytes();
    assert!(
        (model_bytes..model_bytes * 3 / 2).contains(&fetched),
        "{fetched} of {model_bytes}"
    );
    assert_eq!(owner.sent_files().len(), 3);
    first.stop();

    // Nobody is asked again, also where there is nobody.
    drop(hub);
    let again = ring("http://127.0.0.1:9", &lender.address);
    assert_eq!(again.complete(PROMPT, TOKENS), alone());
}

#[test]
fn a_ring_goes_on_without_a_machine_and_takes_it_in_again() {
    let user = User::default();
    let (desk_owner, laptop_owner) = (User::default(), User::default());
    let address = loopback();
    let desk = desk_owner.lend("desk", &address, None);
    let laptop = laptop_owner.lend("laptop", &loopback(), None);
    let ring = borrowing(&user, &desk.invitation());
    let ring = ring.arg("--member").arg(laptop.invitation()).start();
    assert!(ring.predicted().is_some_and(|rate| rate > 0.0));
    let expected = ring.complete(PROMPT, TOKENS);
    assert_eq!(expected, alone());

    desk.kill();
    wait_until("a ring without the desk", || {
        ring.printed().matches("is ready").count() == 2
    });
    assert!(
        ring.logged().contains("going on without"),
        "{}",
        ring.logged()
    );
    let table = ring.printed();
    let (_, second) = table.rsplit_once("is ready").unwrap();
    assert!(
        second.contains("laptop") && !second.contains("desk"),
        "{second}"
    );
    assert_eq!(ring.complete(PROMPT, TOKENS), expected);

    // And on its own in the end.
    laptop.kill();
    wait_until("a ring of one", || {
        ring.printed().matches("is ready").count() == 3
    });
    assert_eq!(ring.complete(PROMPT, TOKENS), expected);
    ring.stop();
}

#[test]
fn strangers_and_those_who_guess_get_nothing() {
    let (owner, user, stranger) = (User::default(), User::default(), User::default());
    let address = loopback();
    let lender = owner.lend("desk", &address, None);
    let refused = |who: &User, member: &str| {
        let ended = borrowing(who, member).split(&[20, 10]).run_to_end();
        assert!(
            !ended.status.success() && ended.stdout.is_empty(),
            "{ended:?}"
        );
        ended.stderr
    };
    let why = refused(&stranger, &lender.address);
    assert!(
        why.contains("is not known here: run `prima agent`"),
        "{why}"
    );
    // Its first letters say which key is expected, its last are the invitation.
    let invitation = lender.invitation();
    let (_, word) = invitation.split_once('#').unwrap();
    let why = refused(&stranger, &format!("{}#aaaa{}", lender.address, &word[4..]));
    assert!(why.contains("has another key than the word says"), "{why}");
    let why = refused(&stranger, &lender.guessed("aaaa"));
    assert!(why.contains("the word is another"), "{why}");
    for (typed, expected) in [
        ("0.0.0.0:9190", "expected HOST:PORT#WORD"),
        (
            "desk#tulip",
            "desk: expected the word that `prima agent` shows",
        ),
    ] {
        let why = refused(&stranger, typed);
        assert!(why.contains(expected) && !why.contains("tulip"), "{why}");
    }

    // Who knows the agent's key, but is not known to it, gets no further.
    borrowing(&user, &lender.invitation())
        .split(&[20, 10])
        .start()
        .stop();
    let known = fs::read(user.remembered("lenders.json")).unwrap();
    fs::write(stranger.remembered("lenders.json"), known).unwrap();
    let why = refused(&stranger, &lender.address);
    assert!(why.contains("does not take this machine in"), "{why}");
    let why = refused(&stranger, &lender.invitation());
    assert!(why.contains("does not take this machine in"), "{why}");

    // Guessing closes the door for the right word, and not for those who are known.
    lender.stop();
    let lender = owner.lend_enrolling("desk", &address);
    for letter in "abcdefghijklmnopqrst".chars() {
        refused(&stranger, &lender.guessed(&letter.to_string().repeat(4)));
    }
    let why = refused(&stranger, &lender.invitation());
    assert!(why.contains("does not take this machine in"), "{why}");
    let logged = lender.logged();
    assert!(
        logged.contains("the word was guessed at too often"),
        "{logged}"
    );
    let ring = borrowing(&user, &lender.address).split(&[20, 10]).start();
    ring.stop();

    // A machine that is found at another address is known by its key.
    lender.stop();
    let lender = owner.lend("desk", &loopback(), None);
    assert_ne!(lender.address, address);
    let ring = borrowing(&user, &lender.address).split(&[20, 10]).start();
    ring.stop();

    // Another machine at its address is not taken for it, nor is one machine taken for two.
    let twice = borrowing(&user, &lender.address)
        .arg("--member")
        .arg(&lender.address);
    let twice = twice.run_to_end().stderr;
    assert!(twice.contains("are one machine"), "{twice}");
    lender.stop();
    let impostor = stranger.lend("desk", &address, None);
    let why = refused(&user, &impostor.address);
    assert!(why.contains("has another key than it had"), "{why}");
}

/// Pings need six seconds or more. That a machine is gone, the silence of its system tells before. (Until then, the ring stands still.)
#[test]
fn a_machine_that_is_cut_off_is_noticed_soon() {
    let networks = Networks::new(2);
    let [desk, laptop] = &networks.each[..] else {
        panic!("two networks");
    };
    let (owner, user) = (User::default(), User::default());
    let lender = owner.lend("desk", "0.0.0.0:9190", Some(desk));
    let ring = borrowing(&user, &lender.invitation())
        .split(&[20, 10])
        .start_in(laptop);
    let answers = || laptop.within(|| http::get(ring.address(), "/health"));
    // A rank 0 that gets no processor for seconds does not.
    wait_until("it answers", || {
        answers().is_ok_and(|answer| answer.status == 200)
    });
    let cut = Stopwatch::start();
    desk.cut_off();
    wait_until("it is noticed", || {
        !answers()
            .is_ok_and(|answer| answer.status == 200 || answer.body.contains("no sign of life"))
    });
    let noticed = cut.elapsed();
    eprintln!("noticed after {noticed:?}");
    assert!(noticed < Duration::from_millis(5900), "{noticed:?}");
}

#[test]
fn machines_of_two_networks_make_a_ring() {
    let networks = Networks::new(3);
    let [desk, laptop, guest] = &networks.each[..] else {
        panic!("three networks");
    };
    let (owner, user, stranger) = (User::default(), User::default(), User::default());
    let lender = owner.lend("desk", "0.0.0.0:9190", Some(desk));
    assert_eq!(lender.address, format!("{}:9190", desk.address));
    let guess = borrowing(&stranger, &lender.guessed("aaaa"));
    let guess = guess.split(&[20, 10]).run_to_end_in(guest);
    assert!(guess.stderr.contains("the word is another"), "{guess:?}");

    let ring = borrowing(&user, &lender.invitation())
        .split(&[20, 10])
        .start_in(laptop);
    assert!(
        ring.printed().contains(&format!("{}:9191", laptop.address)),
        "{}",
        ring.printed()
    );
    let answer = laptop.within(|| ring.complete(PROMPT, TOKENS));
    assert_eq!(answer, alone());
    // Whoever only reaches the ports gets no connection: neither of the ring nor of the agent.
    let late = borrowing(&stranger, &lender.invitation())
        .split(&[20, 10])
        .run_to_end_in(guest);
    assert!(
        late.stderr.contains("does not take this machine in"),
        "{late:?}"
    );
    send_signal(ring.members()[0].pid, Signal::KILL);
    let ended = ring.wait_for_end();
    assert!(ended.stderr.contains("(rank 0, pid"), "{ended:?}");
    wait_until_given_back(&lender, 1);
}
