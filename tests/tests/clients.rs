//! The clients that people have, against a ring of three: tests/clients/ holds what they do.

use prima_tests::machine_ring::MachineRing;
use prima_tests::python;

#[test]
fn clients_get_what_they_expect() {
    let ring = MachineRing::for_clients(1);
    python::run_suite("tests/clients", &ring, &[]);
    ring.stop();
}
