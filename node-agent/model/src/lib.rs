//! What a model is, from the header of its file alone: the parts of its layers, the tensors that hold them, and how they are computed.
//!
//! Decides: which families of models, and which of their options, prima computes. Everything else is refused here, by the key or the tensor
//! at fault, before a byte of weights is fetched. Nobody else knows a tensor's name.
//!
//! Refuses: to touch weights; to guess at families that it does not list; to know of devices, machines or plans.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let gguf = prima_gguf::Gguf::open("model.gguf".as_ref())?;
//! let model = prima_model::ModelSpec::read("model.gguf", &gguf)?;
//! println!("{} layers, {} wide", model.layers.len(), model.hidden);
//! # Ok(())
//! # }
//! ```

mod error;
mod experts;
mod families;
mod keys;
mod layer;
mod parts;
mod read;
mod rope;
mod shape;
mod spec;
mod tensor_rows;
mod tensors;

pub use error::ModelError;
pub use families::names as architectures;
pub use parts::ModelPart;
pub use rope::{Divisors, Rope, RopePairing, Yarn};
pub use spec::{
    ActivationFunction, Attention, Direct, ExpertGroups, Experts, FeedForward, Gating, HeadNorms,
    KvFormat, Latent, LayerSpec, Mlp, ModelSpec, Pooling, Projection, Projections, QueryLatent,
    Temperature,
};
pub use tensor_rows::TensorRows;
pub use tensors::{MATRIX_FORMATS, Place, layer_of};
