//! One member of a ring. Every member runs its layer windows and passes activations on (`ring`); rank 0 also owns
//! tokenizer, embedding, output head and sampling (`decode`) and serves HTTP (`gateway`).

pub mod gateway;
pub mod generation;
pub mod inspect;
