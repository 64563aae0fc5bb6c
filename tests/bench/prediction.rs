//! What the planner predicts of rings on this machine, from a profile measured just before, beside what they then take.

use prima_tests::assets;
use prima_tests::local_ring::LocalRing;
use prima_tests::one_process::{OneProcess, end_tokens};

use crate::Effort;
use crate::client::Client;
use crate::error::BenchError;
use prima_tests::statistics::Samples;

/// Model, members, rounds.
const SETTINGS: [(&str, usize, usize); 6] = [
    ("SmolLM2-135M-Instruct-Q4_1", 1, 1),
    ("SmolLM2-135M-Instruct-Q4_1", 3, 1),
    ("SmolLM2-135M-Instruct-Q4_1", 3, 4),
    ("TinyLlama-1.1B-Chat-Q4_K_M", 1, 1),
    ("TinyLlama-1.1B-Chat-Q4_K_M", 3, 1),
    ("TinyLlama-1.1B-Chat-Q4_K_M", 2, 2),
];
const PROMPT: &str = "Once upon a time";
/// Rings of each setting; each is started anew.
const TURNS: usize = 3;

/// Tokens per second of one setting.
pub struct Prediction {
    pub model: &'static str,
    pub members: usize,
    pub rounds: usize,
    pub predicted: Samples,
    pub measured: Samples,
}

pub fn measure(effort: &Effort) -> Result<Vec<Prediction>, BenchError> {
    let mut predictions = Vec::new();
    for (model, members, rounds) in SETTINGS {
        eprintln!("prediction: {model}, {members} members x {rounds} rounds");
        let path = assets::path(&format!("models/{model}.gguf"))?;
        let never = end_tokens(&OneProcess::open(&path, 1)?);
        let mut prediction = Prediction {
            model,
            members,
            rounds,
            predicted: Samples::default(),
            measured: Samples::default(),
        };
        for _ in 0..effort.turns.min(TURNS) {
            let ring = LocalRing::builder()
                .model(&path)
                .measured()
                .members(members)
                .rounds(rounds)
                .start();
            prediction.predicted.push(predicted(&ring)?);
            let client = Client::of(ring, &never);
            client.seconds_per_token(PROMPT, 8)?;
            let seconds = client.seconds_per_token(PROMPT, effort.decode)?;
            prediction.measured.push(1.0 / seconds);
        }
        predictions.push(prediction);
    }
    Ok(predictions)
}

/// Tokens per second that `prima run` printed.
pub fn predicted(ring: &LocalRing) -> Result<f64, BenchError> {
    ring.predicted().ok_or(BenchError::NoPrediction)
}
