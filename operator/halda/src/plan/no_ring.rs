//! Why there is no ring, and what would help: the search is asked again with what may be lacking.

use prima_crds::quantity::rounded;
use serde::Serialize;

use super::{GIB, for_reasons, with_chunks};
use crate::input::{HopCost, InputError, PlanningInput};
use crate::search::search;

#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error("{model} does not fit: {0}", model = .0.model)]
    Infeasible(Infeasible),
    /// There are rings, but none whose first token comes as soon as it must.
    #[error(
        "{model}: no ring has the first token within {most_seconds} s of a prompt of {prompt_tokens} tokens; the soonest takes about {soonest_seconds:.1} s"
    )]
    TooLate {
        model: String,
        most_seconds: f64,
        prompt_tokens: usize,
        soonest_seconds: f64,
    },
    /// There would be rings if all machines reached each other.
    #[error(
        "{model}: in every ring, two machines would be neighbours that do not reach each other ({})",
        joined(pairs)
    )]
    Apart {
        model: String,
        pairs: Vec<[String; 2]>,
    },
}

/// Pairs that are named. Where a Wi-Fi keeps many machines apart, all pairs of them are too many to read, and for a status.
const NAMED_PAIRS: usize = 8;

fn joined(pairs: &[[String; 2]]) -> String {
    let named = pairs.iter().take(NAMED_PAIRS);
    let named: Vec<String> = named.map(|pair| pair.join(" and ")).collect();
    let named = named.join(", ");
    match pairs.len().saturating_sub(NAMED_PAIRS) {
        0 => named,
        more => format!("{named}, and {more} more pairs"),
    }
}

/// Which constraint binds, by how much, and what would help.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Infeasible {
    pub model: String,
    /// Weights, KV cache and buffers, and a draft model.
    pub needed_bytes: u64,
    /// Memory that the machines offer, GPUs included.
    pub available_bytes: u64,
    /// So much more memory on one machine would do; `None` if no amount would.
    pub missing_bytes: Option<u64>,
    pub binding: String,
    pub helps: Vec<String>,
}

impl std::fmt::Display for Infeasible {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}; it needs {} of memory in all, and the machines offer {}",
            self.binding,
            gibibytes(self.needed_bytes as f64),
            gibibytes(self.available_bytes as f64)
        )?;
        if let Some(missing) = self.missing_bytes {
            write!(f, " ({} are missing on one machine)", rounded(missing))?;
        }
        for help in &self.helps {
            write!(f, "; {help}")?;
        }
        Ok(())
    }
}

/// Of inputs for none of which the search finds a ring, and which differ in the size of chunks.
pub(super) fn why(inputs: &[PlanningInput]) -> PlanError {
    let input = &inputs[0];
    apart(input)
        .or_else(|| too_late(inputs))
        .unwrap_or_else(|| PlanError::Infeasible(infeasible(input)))
}

fn infeasible(input: &PlanningInput) -> Infeasible {
    let model = &input.model;
    let layers = model.layers as f64;
    let kv = layers * model.layer_kv_bytes;
    let beside = model.head_bytes + model.rank0_bytes + model.buffer_bytes;
    let needed = layers * model.layer_bytes + kv + beside;
    let available: f64 = input
        .devices
        .iter()
        .map(|device| {
            let gpu = device.gpu.as_ref().and_then(|gpu| gpu.memory_bytes);
            device.memory_bytes + gpu.unwrap_or(0.0)
        })
        .sum();
    let possible = |change: &dyn Fn(&mut PlanningInput)| {
        let mut changed = input.clone();
        // Memory is lacking, however late the first token may come.
        changed.first_token_seconds = None;
        change(&mut changed);
        search(&changed, for_reasons(1)).is_some()
    };
    let mut helps = Vec::new();
    let with_kv = |factor: f64| {
        possible(&|input| {
            input.model.layer_kv_bytes *= factor;
            input.model.gpu_layer_kv_bytes *= factor;
        })
    };
    let by_kv = with_kv(0.0);
    if by_kv {
        let factor = bisect(0.0, 1.0, with_kv);
        let fewer = match input.kv_contexts {
            1 => "",
            _ => ", or that share of the whole contexts,",
        };
        helps.push(format!(
            "a context {:.0} % as long{fewer} would fit",
            (100.0 * factor).floor()
        ));
    }
    let streaming = possible(&|input| {
        for device in &mut input.devices {
            device.disk_bytes_per_second.get_or_insert(1e9);
        }
    });
    if streaming {
        let names: Vec<&str> = input
            .devices
            .iter()
            .filter(|device| device.disk_bytes_per_second.is_none())
            .map(|device| device.name.as_str())
            .collect();
        helps.push(format!(
            "reading weights from disk would do, but is not allowed or too slow on {}",
            names.join(", ")
        ));
    }
    let largest = (0..input.devices.len())
        .max_by(|&a, &b| {
            let bytes = |index: usize| input.devices[index].memory_bytes;
            bytes(a).total_cmp(&bytes(b))
        })
        .unwrap_or(0);
    let with = |bytes: f64| possible(&|input| input.devices[largest].memory_bytes += bytes);
    let missing = with(needed).then(|| needed - bisect(0.0, needed, |less| with(needed - less)));
    if let Some(missing) = missing {
        helps.push(format!(
            "{} more memory in {} would do",
            gibibytes(missing),
            input.devices[largest].name
        ));
    }
    let binding = match (by_kv, streaming, missing) {
        (true, ..) => format!(
            "the KV cache of {} does not fit beside the rest",
            gibibytes(kv)
        ),
        (false, true, _) => {
            "the weights do not fit into memory, and no disk may be read".to_owned()
        }
        (false, false, Some(_)) => "the weights do not fit".to_owned(),
        (false, false, None) => "not every machine that must take part can hold a layer".to_owned(),
    };
    Infeasible {
        model: model.name.clone(),
        needed_bytes: needed as u64,
        available_bytes: available as u64,
        missing_bytes: missing.map(|bytes| bytes.ceil() as u64),
        binding,
        helps,
    }
}

/// `None`: there is no ring either if all machines reach each other, or they do.
fn apart(input: &PlanningInput) -> Option<PlanError> {
    let mut together = input.clone();
    let mut pairs = Vec::new();
    for (from, hops) in together.hops.iter_mut().enumerate() {
        for (to, hop) in hops.iter_mut().enumerate() {
            if hop.is_way() {
                continue;
            }
            *hop = HopCost {
                decode_seconds: 0.0,
                chunk_seconds: 0.0,
            };
            if from < to {
                pairs.push([from, to].map(|index| input.devices[index].name.clone()));
            }
        }
    }
    if pairs.is_empty() {
        return None;
    }
    search(&together, for_reasons(1))?;
    Some(PlanError::Apart {
        model: input.model.name.clone(),
        pairs,
    })
}

/// `None`: there is no ring, whenever the first token may come.
fn too_late(inputs: &[PlanningInput]) -> Option<PlanError> {
    let input = inputs.first()?;
    let most_seconds = input.first_token_seconds?;
    let mut any = inputs.to_vec();
    for input in &mut any {
        input.first_token_seconds = None;
        // The prompt counts, and hardly anything else.
        input.workload.answer_tokens = 1;
    }
    let found = with_chunks(&any, for_reasons(1)).into_iter().flatten();
    let seconds = found.map(|found| found.latency.prompt_seconds);
    Some(PlanError::TooLate {
        model: input.model.name.clone(),
        most_seconds,
        prompt_tokens: input.workload.prompt_tokens,
        soonest_seconds: seconds.reduce(f64::min)?,
    })
}

/// The largest number in `low..=high`, to a thousandth, for which `holds` is true. It is true from `low` up to some number.
fn bisect(mut low: f64, mut high: f64, holds: impl Fn(f64) -> bool) -> f64 {
    for _ in 0..10 {
        let middle = (low + high) / 2.0;
        match holds(middle) {
            true => low = middle,
            false => high = middle,
        }
    }
    low
}

fn gibibytes(bytes: f64) -> String {
    format!("{:.2} GiB", bytes / GIB)
}
