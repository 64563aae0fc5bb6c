//! Random faults against a whole Model: whatever fails, no answer is wrong, no ring stays broken, and the Model does not say for long that it
//! answers while it does not. And two machines that do not reach each other for good. `make faults` tries many more sequences, and others on a cluster.

use std::ops::Range;

use prima_tests::fault_sequences::{
    HEALING_GOAL, Machines, ON_NETWORKS, Sequence, Stage, shrunk, with_networks,
};

/// Together they have every kind of fault.
const SEEDS: [u64; 4] = [30, 151, 1205, 2491];

#[test]
fn every_kind_occurs() {
    let sequences = SEEDS.map(|seed| Sequence::from_seed(&ON_NETWORKS, seed));
    for kind in ON_NETWORKS.kinds {
        assert!(
            sequences.iter().any(|sequence| sequence.has(*kind)),
            "{}",
            kind.name()
        );
    }
}

#[test]
fn a_model_survives_faults() {
    with_networks(|networks| {
        let make = || Stage::on(Machines::new(networks));
        let stage = make();
        // Another machine takes the place of one.
        survives_a_cut(&stage, 2, 0..2);
        // No other ring has so many members, until the Model asks for fewer. Neither of the two is rank 0, and what goes back is not lost.
        survives_a_cut(&stage, 3, 0..1);
        for seed in SEEDS {
            let sequence = Sequence::from_seed(&ON_NETWORKS, seed);
            let report = stage.run(&sequence);
            eprintln!("seed {seed}: {sequence}\n  {report}");
            if !report.problems.is_empty() {
                let shortest = shrunk(stage, make, sequence);
                panic!("seed {seed}; the shortest sequence that fails: SEQUENCE='{shortest}'");
            }
        }
    });
}

/// Two of a ring of so many cannot reach each other for good, these ways.
fn survives_a_cut(stage: &Stage<Machines<'_>>, members: usize, ways: Range<usize>) {
    let kept = stage.keep_apart(members, ways.clone());
    eprintln!("a ring of {members} is cut, ways {ways:?}: {kept:?}");
    for after in [kept.named_after, kept.answered_after] {
        let in_time = after.is_some_and(|after| after <= HEALING_GOAL);
        assert!(in_time && kept.problems.is_empty(), "{kept:#?}");
    }
}
