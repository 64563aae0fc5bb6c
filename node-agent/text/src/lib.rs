//! Text in and out of a model: tokenizers and chat templates from GGUF metadata, and sampling.

pub mod sampler;

pub use sampler::SamplingParams;
