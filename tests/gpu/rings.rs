//! Rings of real processes whose members have layers on the one GPU, beside a ring on the processor alone. Answers are greedy; they may
//! part only where the processor's own best tokens are near, to one of these, and then go on from what the processor said.

use std::fs;
use std::path::Path;
use std::time::Duration;

use prima_crds::v1alpha1::ring_plan::{PlannedModel, RingPlan, RingPlanSpec};
use prima_tests::machine_ring::{MachineRing, Node, ThisMachine};
use prima_tests::patience::wait_until;
use prima_tests::{Endpoint, http};
use serde_json::{Value, json};

use crate::Finding;
use crate::error::CheckError;

/// Of the small models.
const LAYERS: i32 = 6;
/// The second is longer than a block of positions.
const PROMPTS: [&str; 2] = [
    "Once upon a time",
    "Once upon a time there was a little girl called Lily. She lived in a small house near a big forest with her mom, her dad and a dog. \
     Every day she played in the garden with the dog. One day the dog saw a red ball under a tree, and Lily said:",
];
const TOKENS: usize = 24;
const CONTEXT: i32 = 256;
/// For an answer from a driver in software.
const PATIENCE: Duration = Duration::from_secs(300);
/// Log probabilities that rounding may turn: weights and activations of a few bits are multiplied here, each device in its own order.
const NEAR: f64 = 0.5;

/// How many tokens of an answer may change places with others at most.
const MOST_TURNED: usize = 6;

/// A ring, by where its windows end, in the order in which a token meets them.
pub struct Ring {
    pub what: &'static str,
    members: usize,
    ends: &'static [i32],
    /// Layers on the GPU, of each window.
    on_gpu: &'static [i32],
    head_on_gpu: bool,
    /// Passes of so many rows are on the GPU through all layers.
    gpu_from_rows: Option<i32>,
}

const ON_PROCESSOR: Ring = Ring {
    what: "a ring on the processor alone",
    members: 1,
    ends: &[LAYERS],
    on_gpu: &[0],
    head_on_gpu: false,
    gpu_from_rows: None,
};

pub const ON_GPU: [Ring; 4] = [
    Ring {
        what: "a ring of one member, all layers and the output head on the GPU",
        members: 1,
        ends: &[LAYERS],
        on_gpu: &[LAYERS],
        head_on_gpu: true,
        gpu_from_rows: None,
    },
    Ring {
        what: "a ring of two members, two rounds: windows on both, on the GPU, on the processor",
        members: 2,
        ends: &[2, 3, 5, LAYERS],
        on_gpu: &[1, 0, 2, 0],
        head_on_gpu: false,
        gpu_from_rows: None,
    },
    Ring {
        what: "a ring of three members, all on the one GPU",
        members: 3,
        ends: &[2, 4, LAYERS],
        on_gpu: &[2, 2, 2],
        head_on_gpu: false,
        gpu_from_rows: None,
    },
    Ring {
        what: "a ring of two members, whose prompts are on the GPU through all layers",
        members: 2,
        ends: &[3, LAYERS],
        on_gpu: &[0, 1],
        head_on_gpu: false,
        gpu_from_rows: Some(2),
    },
];

/// A token, by how much it was more likely than the next, and those that were nearly as likely.
struct Chosen {
    token: String,
    apart: f64,
    near: Vec<String>,
}

/// The answers to all prompts.
pub struct Answers(Vec<Vec<Chosen>>);

impl Finding for Answers {
    fn told(&self) -> String {
        let first = self.0[0].iter().map(|chosen| chosen.token.as_str());
        format!("“{} ...{}”", PROMPTS[0], first.collect::<String>())
    }
}

/// What a ring without a GPU answers.
pub fn on_processor(model: &Path) -> Result<Answers, CheckError> {
    let ring = ON_PROCESSOR.start(model)?;
    let answers = PROMPTS.iter().map(|prompt| answer(&ring, prompt, TOKENS));
    Ok(Answers(answers.collect::<Result<_, _>>()?))
}

impl Ring {
    /// Compares what it answers with what was `expected`.
    pub fn check(&self, model: &Path, expected: &Answers) -> Result<String, CheckError> {
        let ring = self.start(model)?;
        let mut turned = 0;
        for (prompt, expected) in PROMPTS.iter().zip(&expected.0) {
            turned += compare(&ring, prompt, expected)?;
        }
        if self.gpu_from_rows.is_some() {
            wait_until("both members copied weights for prompts", || {
                let metrics = http::get(ring.address(), "/metrics").map(|answer| answer.body);
                let metrics = metrics.unwrap_or_default();
                let copied = metrics
                    .lines()
                    .filter(|line| line.starts_with("prima_member_gpu_copied_bytes_total"));
                copied.filter(|line| !line.ends_with(" 0")).count() == self.members
            });
        }
        let tokens = PROMPTS.len() * TOKENS;
        Ok(match turned {
            0 => format!("the same {tokens} tokens"),
            _ => format!(
                "the same {tokens} tokens but {turned}, where the processor's best are near"
            ),
        })
    }

    /// An agent that lacks the GPU of its plan refuses to serve, so a ring that answers has it.
    fn start(&self, model: &Path) -> Result<MachineRing, CheckError> {
        let size = fs::metadata(model).map_err(|source| CheckError::Read {
            path: model.to_owned(),
            source,
        })?;
        let planned = PlannedModel::new("stories", "", size.len() as i64, LAYERS);
        // The harness finds free ports.
        let addresses = vec![String::new(); self.members];
        let mut spec = RingPlanSpec::cut(planned, CONTEXT, &addresses, self.ends);
        for (rank, member) in spec.members.iter_mut().enumerate() {
            let on_gpu = self.on_gpu.iter().skip(rank).step_by(self.members);
            for (window, layers) in member.windows.iter_mut().zip(on_gpu) {
                window.gpu_layers = *layers;
            }
            member.gpu_from_rows = self.gpu_from_rows;
        }
        spec.members[0].output_head_on_gpu = self.head_on_gpu;
        let nodes: Vec<Node<'_>> = (0..self.members)
            .map(|_| Node {
                machine: &ThisMachine,
                model: model.to_owned(),
            })
            .collect();
        Ok(MachineRing::start(
            RingPlan::new("check", spec),
            &nodes,
            &[],
        ))
    }
}

/// Follows the processor's answer to `prompt`. Gives how often two tokens that are near changed places.
fn compare(ring: &impl Endpoint, prompt: &str, expected: &[Chosen]) -> Result<usize, CheckError> {
    let (mut begun, mut turned) = (0, 0);
    while begun < expected.len() {
        let said: String = expected[..begun]
            .iter()
            .map(|chosen| chosen.token.as_str())
            .collect();
        let left = &expected[begun..];
        let found = answer(ring, &format!("{prompt}{said}"), left.len())?;
        let mut pairs = left.iter().zip(&found);
        let Some(place) = pairs.position(|(expected, found)| expected.token != found.token) else {
            break;
        };
        let Chosen { token, apart, near } = &left[place];
        let other = &found[place].token;
        turned += 1;
        if !near.contains(other) || turned > MOST_TURNED {
            return Err(CheckError::Different {
                position: begun + place,
                expected: token.clone(),
                found: other.clone(),
                apart: *apart,
            });
        }
        begun += place + 1;
    }
    Ok(turned)
}

/// The most likely `count` tokens after `prompt`.
fn answer(ring: &impl Endpoint, prompt: &str, count: usize) -> Result<Vec<Chosen>, CheckError> {
    let body = json!({
        "model": ring.model(), "prompt": prompt, "max_tokens": count, "temperature": 0, "logprobs": 5,
    });
    let answer = http::post_within(PATIENCE, ring.address(), "/v1/completions", &body)
        .map_err(|source| CheckError::Http { source })?;
    let json: Value = serde_json::from_str(&answer.body).unwrap_or_default();
    let at = |name: &str| {
        json.pointer(&format!("/choices/0/logprobs/{name}"))?
            .as_array()
    };
    let (Some(tokens), Some(tops)) = (at("tokens"), at("top_logprobs")) else {
        let answer = answer.body;
        return Err(CheckError::Answer { answer });
    };
    if tokens.len() != count {
        let answer = format!("{} tokens, not {count}", tokens.len());
        return Err(CheckError::Answer { answer });
    }
    let chosen = tokens.iter().zip(tops).map(|(token, top)| {
        let token = token.as_str().unwrap_or_default();
        let logprob = |(name, value): (&String, &Value)| Some((name.clone(), value.as_f64()?));
        let top = top.as_object().into_iter().flatten();
        let mut others: Vec<(String, f64)> = top.filter_map(logprob).collect();
        let own = others.iter().position(|(name, _)| name == token);
        let own = own.map_or(0.0, |own| others.swap_remove(own).1);
        let apart = others.iter().map(|(_, logprob)| own - logprob);
        Chosen {
            apart: apart.fold(f64::INFINITY, f64::min),
            near: others
                .into_iter()
                .filter_map(|(name, logprob)| (own - logprob < NEAR).then_some(name))
                .collect(),
            token: token.to_owned(),
        }
    });
    Ok(chosen.collect())
}
