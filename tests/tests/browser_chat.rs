//! The chat page in Debian's Chromium, before a ring of three in two rounds: tests/browser/ holds what it does there.

use prima_tests::machine_ring::MachineRing;
use prima_tests::{assets, python};

#[test]
fn chat_page_works_in_a_browser() {
    let ring = MachineRing::for_clients(2);
    let members = ring.pids().len();
    let axe = assets::path("axe/axe.min.js").expect("axe-core");
    let more = [
        ("PRIMA_AXE", axe.display().to_string()),
        ("PRIMA_MEMBERS", members.to_string()),
        ("PRIMA_LAYERS", "30".to_string()),
    ];
    python::run_suite("tests/browser", &ring, &more);
    ring.stop();
}
