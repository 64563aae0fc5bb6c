//! A first token that must come soon.

use prima_halda::input::HopCost;
use prima_halda::latency::Violation;
use prima_halda::search::{Effort, search};

use crate::{device, equal, input, latency, violation};

/// Of 4 chunks, the first takes 64 * (4 + 4) * 0.001 s, and each further one the half.
#[test]
fn a_first_token_may_come_too_late() {
    let mut input = input(vec![device(0.010), device(0.010)]);
    input.devices[0].head_seconds = 0.004;
    let taken = 0.512 + 3.0 * 0.256 + 0.004;
    input.first_token_seconds = Some(taken);
    equal(latency(&input, 1, &[(4, 0), (4, 0)]).prompt_seconds, taken);
    input.first_token_seconds = Some(taken - 0.1);
    let Violation::FirstToken { excess_seconds } = violation(&input, &[(4, 0), (4, 0)]) else {
        panic!("it is in time");
    };
    equal(excess_seconds, 0.1);
}

/// In a layer, the first machine takes 0.001 s for a token and 0.064 s for a chunk, the others 0.1 s and 0.0064 s. So it gets as many layers as the
/// bound allows, x. From each machine, a chunk's hop to one of the others takes 0.1 s, to the other one 0.1015 s, which counts as one kind of link. No
/// ring has cheap hops only. With these, a prompt of 4 chunks would take 4 (0.064 x + 0.1) + 0.0064 (8 - x) + 0.2 = 0.6512 + 0.2496 x seconds.
#[test]
fn a_first_token_waits_for_the_hops_that_a_ring_has() {
    let mut input = input(vec![device(0.001), device(0.1), device(0.1)]);
    for (device, prefill) in input.devices.iter_mut().zip([0.001, 0.0001, 0.0001]) {
        device.required = true;
        device.cpu.prefill_seconds = prefill;
    }
    (input.rank0, input.rounds) = (Some(0), Some(1));
    let hop = |seconds: f64| HopCost {
        decode_seconds: seconds / 100.0,
        chunk_seconds: seconds,
    };
    let (none, cheap, dear) = (hop(0.0), hop(0.1), hop(0.1015));
    input.hops = vec![
        vec![none, cheap, dear],
        vec![cheap, none, dear],
        vec![cheap, dear, none],
    ];
    // With 4 layers it would be 1.6496 s. The hop from the second to the third machine makes that 1.6511 s.
    input.first_token_seconds = Some(1.65);
    let found = search(&input, Effort::default()).unwrap();
    assert_eq!(found.assignment.ring, [0, 1, 2]);
    assert_eq!(found.assignment.shares[0].cpu_layers, 3);
    equal(found.latency.prompt_seconds, 0.6512 + 3.0 * 0.2496 + 0.0015);
}
