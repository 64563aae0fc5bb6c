//! The clients that people have, against a ring of three: tests/clients/ holds what they do.

use prima_tests::local_ring::LocalRing;
use prima_tests::python;

#[test]
fn clients_get_what_they_expect() {
    let ring = LocalRing::for_clients().start();
    python::run_suite("tests/clients", &ring, &[]);
    ring.stop();
}
