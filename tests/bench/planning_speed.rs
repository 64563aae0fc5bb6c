//! How long planning takes: 32 machines and a model of 80 layers, until the plan is proven to a thousandth. The machines are
//! the paper's six (operator/halda/tests/paper), each several times, with speeds that differ by up to a fifth.

use std::path::Path;
use std::time::Instant;

use prima_crds::v1alpha1::model_profile::ModelProfile;
use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_halda::greedy::first_answer;
use prima_halda::search::{Effort, search};
use prima_halda::{Options, PlanningInput};

use crate::Effort as Turns;
use crate::error::BenchError;
use prima_tests::statistics::Samples;

pub const MACHINES: usize = 32;
const MODEL: &str = "llama-3-70b";

pub struct PlanningSpeed {
    pub layers: usize,
    pub members: usize,
    /// Milliseconds until there is a first answer.
    pub first: Samples,
    /// How much longer its requests take than the best, in percent.
    pub first_worse_percent: f64,
    /// Seconds until the plan is proven.
    pub seconds: Samples,
}

pub fn measure(turns: &Turns) -> Result<PlanningSpeed, BenchError> {
    eprintln!("planning: {MODEL} on {MACHINES} machines");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../operator/halda/tests/paper");
    let read = |name: &str| {
        std::fs::read_to_string(folder.join(format!("{name}.yaml")))
            .map_err(|source| BenchError::Fixture { source })
    };
    let model = ModelProfile::from_yaml(MODEL, &read(MODEL)?)
        .map_err(|source| BenchError::Document { source })?;
    let nodes = (0..MACHINES)
        .map(|index| {
            let text = read(&format!("d{}", 1 + index % 6))?;
            let node = NodeProfile::from_yaml("machine", &text)
                .map_err(|source| BenchError::Document { source })?;
            Ok(machine(index, node))
        })
        .collect::<Result<Vec<_>, BenchError>>()?;
    let input = PlanningInput::new(&model, &nodes, &Options::default())
        .map_err(|source| BenchError::Planning { source })?;
    let mut speed = PlanningSpeed {
        layers: input.model.layers,
        members: 0,
        first: Samples::default(),
        first_worse_percent: f64::NAN,
        seconds: Samples::default(),
    };
    for _ in 0..turns.turns {
        let start = Instant::now();
        let first = first_answer(&input);
        speed.first.push(start.elapsed().as_secs_f64() * 1e3);
        let start = Instant::now();
        let found = search(&input, Effort::default());
        speed.seconds.push(start.elapsed().as_secs_f64());
        if let Some((first, found)) = first.zip(found) {
            speed.first_worse_percent = 100.0 * (first.seconds / found.seconds - 1.0);
            speed.members = found.assignment.ring.len();
        }
    }
    Ok(speed)
}

fn machine(index: usize, mut node: NodeProfile) -> NodeProfile {
    let name = |index: usize| format!("machine-{index}");
    node.metadata.name = Some(name(index));
    if let Some(status) = &mut node.status {
        let faster = 100 + (index as i64 * 7) % 21;
        for one in &mut status.cpu.throughput {
            one.decode_bytes_per_second = one.decode_bytes_per_second / 100 * faster;
        }
        if let Some(link) = status.links.first().cloned() {
            status.links = (0..MACHINES)
                .filter(|&other| other != index)
                .map(|other| {
                    let mut link = link.clone();
                    link.to = name(other);
                    link
                })
                .collect();
        }
    }
    node
}
