//! Random faults against a whole Model: whatever fails, no answer is wrong, no ring stays broken, and the Model does not say for long that it
//! answers while it does not. `make faults` tries many more sequences, and others on a cluster.

use prima_tests::fault_sequences::{Machines, ON_NETWORKS, Sequence, Stage, shrunk, with_networks};

/// Together they have every kind of fault.
const SEEDS: [u64; 4] = [121_244, 121_245, 121_246, 121_247];

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
fn a_model_survives_random_faults() {
    with_networks(|networks| {
        let make = || Stage::on(Machines::new(networks));
        let stage = make();
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
