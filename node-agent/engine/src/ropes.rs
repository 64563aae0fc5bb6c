//! The rotations of a window's layers. Most models have one for all layers; some turn differently in layers that see only the last positions.

use prima_model::Rope;

use crate::error::EngineError;
use crate::kernels::{self, RopeAngles};
use crate::model::Model;

/// Each rotation once.
#[derive(Default)]
pub(crate) struct Ropes {
    known: Vec<Rope>,
    ropes: Vec<kernels::Rope>,
}

impl Ropes {
    /// The place of this rotation, which is added if it is new.
    ///
    /// # Errors
    /// [`EngineError::TensorValue`] when the file's factors are none, or not in the bytes of a sparse file.
    pub fn place(&mut self, model: &Model, rope: &Rope) -> Result<usize, EngineError> {
        if let Some(place) = self.known.iter().position(|known| known == rope) {
            return Ok(place);
        }
        self.ropes.push(model.rope(rope)?);
        self.known.push(rope.clone());
        Ok(self.known.len() - 1)
    }

    /// For rows at these positions, the angles of each rotation in its place.
    pub fn angles(&self, positions: impl Iterator<Item = usize> + Clone) -> Vec<RopeAngles> {
        let ropes = self.ropes.iter();
        ropes.map(|rope| rope.angles(positions.clone())).collect()
    }
}
