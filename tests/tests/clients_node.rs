//! The clients that people have for Node, against a ring of three: tests/clients_node/ holds what they do.

use prima_tests::machine_ring::MachineRing;
use prima_tests::node;

#[test]
fn node_clients_get_what_they_expect() {
    let ring = MachineRing::for_clients(1);
    node::run_suite("tests/clients_node", &ring);
    ring.stop();
}
