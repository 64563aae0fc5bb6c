//! Text into tokens and back, conversations into prompts, logits into the next token. Everything a model's file says about its
//! text is read here, from GGUF metadata.
//!
//! Decides: which tokens a text is made of ([`Tokenizer`]), when bytes of an answer are whole characters ([`Detokenizer`]), what
//! prompt a conversation becomes ([`ChatTemplate`]), which token comes next ([`Sampler`]), and which may come next in an answer of a given
//! form ([`Grammar`]).
//!
//! Refuses: to guess. A tokenizer, pre-tokenizer or template construct that is not known is an error that names it. Knows nothing
//! of models, rings, files or HTTP.

mod answer_form;
mod answer_part;
mod answer_reader;
mod bare_value;
mod bpe;
mod call_body;
mod call_grammar;
mod channel_grammar;
mod channel_reader;
mod channels;
mod character_bpe;
mod chat_template;
mod detokenizer;
mod gbnf;
mod gemma_grammar;
mod grammar;
mod grammar_error;
mod keyed_arguments;
mod keyed_grammar;
mod lark;
mod merge;
mod pre_tokenizer;
mod random;
mod rank_template;
mod reasoning_limit;
mod sampler;
mod sampling_error;
mod sampling_params;
mod schema_object;
mod sentencepiece;
mod softmax;
mod special_tokens;
mod template_memory;
mod template_python;
#[cfg(test)]
mod test_vocabulary;
mod tokenizer;
mod tokenizer_error;
mod tokens;
mod tool;
mod turns;
mod vocabulary;

pub use answer_form::{AnswerForm, Reasoning};
pub use answer_part::{AnswerPart, unfinished};
pub use answer_reader::AnswerReader;
pub use call_grammar::{after_reasoning, calls};
pub use chat_template::{ChatTemplate, ChatTemplateError};
pub use detokenizer::Detokenizer;
pub use grammar::{Constraint, Grammar, GrammarReader};
pub use grammar_error::GrammarError;
pub use rank_template::RankTemplate;
pub use reasoning_limit::ReasoningLimit;
pub use sampler::{Sample, Sampler, most_likely};
pub use sampling_error::SamplingError;
pub use sampling_params::SamplingParams;
pub use softmax::log_sum_exp;
pub use template_memory::TemplateAllocator;
pub use template_python::python_json;
pub use tokenizer::Tokenizer;
pub use tokenizer_error::TokenizerError;
pub use tool::{Calls, Tool, WantedAnswer};
pub use turns::Turns;
pub use vocabulary::FillIn;
