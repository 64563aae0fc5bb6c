//! Rings and llama.cpp's own llama-server as users have them: the same model file, as many threads, as much context, and the same requests
//! over HTTP. Both run with their defaults, in new processes for each turn.
//!
//! Rings have one member, since llama-server has one machine, where options do not say otherwise.

use std::path::PathBuf;

use prima_engine::Compute;
use prima_tests::assets;
use prima_tests::local_ring::LocalRing;
use prima_tests::one_process::{OneProcess, OneProcessError, end_tokens};

use crate::client::Client;
use crate::error::BenchError;
use crate::peer::Programs;

/// Positions of all requests together, where the model was trained for as many.
const MOST_CONTEXT: usize = 8192;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Contender {
    Prima,
    LlamaCpp,
}

impl Contender {
    pub fn name(self) -> &'static str {
        match self {
            Self::Prima => "prima",
            Self::LlamaCpp => "llama.cpp",
        }
    }
}

/// The same of both.
#[derive(Default)]
pub struct Both<T> {
    pub prima: T,
    pub llama_cpp: T,
}

/// A model that both can run.
pub struct Contenders<'a> {
    pub engine: OneProcess,
    pub threads: usize,
    path: PathBuf,
    context: usize,
    /// Tokens that would end an answer early.
    never: Vec<u32>,
    peer: &'a Programs,
}

impl<T> Both<T> {
    /// Has both measured once. Who begins alternates: whoever comes second finds a warmer processor.
    pub fn take_turn(
        &mut self,
        turn: usize,
        mut measure: impl FnMut(Contender, &mut T) -> Result<(), BenchError>,
    ) -> Result<(), BenchError> {
        let mut order = [
            (Contender::Prima, &mut self.prima),
            (Contender::LlamaCpp, &mut self.llama_cpp),
        ];
        if turn.is_multiple_of(2) {
            order.reverse();
        }
        order
            .into_iter()
            .try_for_each(|(contender, measured)| measure(contender, measured))
    }
}

impl<'a> Contenders<'a> {
    pub fn open(model: &str, peer: &'a Programs) -> Result<Contenders<'a>, BenchError> {
        let path = assets::path(&format!("models/{model}.gguf"))?;
        let engine = OneProcess::open(&path, 1)?;
        Ok(Contenders {
            never: end_tokens(&engine),
            context: MOST_CONTEXT.min(engine.model.spec().context_length),
            threads: Compute::available_threads(),
            engine,
            path,
            peer,
        })
    }

    /// Starts one with further options of its own, and has it answer something.
    pub fn start(&self, contender: Contender, options: &[&str]) -> Result<Client, BenchError> {
        const WARM_UP: &str = "Once upon a time";
        let client = match contender {
            Contender::Prima => {
                let ring = LocalRing::builder()
                    .model(&self.path)
                    .arg("--threads")
                    .arg(self.threads.to_string())
                    .arg("--context")
                    .arg(self.context.to_string());
                let ring = options.iter().fold(ring, |ring, option| ring.arg(option));
                Client::of(ring.start(), &self.never)
            }
            Contender::LlamaCpp => {
                let (path, context) = (&self.path, self.context);
                let server = self.peer.server(path, self.threads, context, options)?;
                Client::of(server, &self.never)
            }
        };
        client.seconds_per_token(WARM_UP, 8)?;
        Ok(client)
    }

    pub fn tokens(&self, text: &str) -> Result<Vec<u32>, BenchError> {
        let tokens = self.engine.tokenizer.encode(text, false, false);
        Ok(tokens.map_err(OneProcessError::from)?)
    }
}

/// A long text.
pub fn moby_dick() -> Result<String, BenchError> {
    let path = assets::path("text/moby-dick.txt")?;
    std::fs::read_to_string(&path).map_err(|source| BenchError::Read { path, source })
}
