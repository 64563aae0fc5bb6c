//! Text into tokens and back, conversations into prompts, logits into the next token. Everything a model's file says about its
//! text is read here, from GGUF metadata.
//!
//! Decides: which tokens a text is made of ([`Tokenizer`]), when bytes of an answer are whole characters ([`Detokenizer`]), what
//! prompt a conversation becomes ([`ChatTemplate`]), and which token comes next ([`Sampler`]).
//!
//! Refuses: to guess. A tokenizer, pre-tokenizer or template construct that is not known is an error that names it. Knows nothing
//! of models, rings, files or HTTP.

mod bpe;
mod character_bpe;
mod chat_template;
mod detokenizer;
mod merge;
mod pre_tokenizer;
mod random;
mod sampler;
mod sampling_error;
mod sampling_params;
mod sentencepiece;
mod template_python;
mod tokenizer;
mod tokenizer_error;
mod tokens;
mod vocabulary;

pub use chat_template::{ChatTemplate, ChatTemplateError};
pub use detokenizer::Detokenizer;
pub use sampler::{Sample, Sampler};
pub use sampling_error::SamplingError;
pub use sampling_params::SamplingParams;
pub use tokenizer::Tokenizer;
pub use tokenizer_error::TokenizerError;
