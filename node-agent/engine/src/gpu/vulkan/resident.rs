//! Matrices that stay on the GPU. Large ones have buffers of their own, since drivers limit what one may have.

use std::ops::Range;

use prima_vulkan::{Buffer, Device, Matrix, Pass, Slice, VulkanError};

use super::placed::{Experts, Matrices, PlacedLayer, Projection};
use super::step::StepError;
use super::workspace::Layout;

/// From so many bytes on, a matrix has a buffer of its own. Vulkan promises buffers of 1 GiB, and layers with experts have more.
const LARGE: u64 = 64 << 20;

/// The matrices of a layer.
pub(super) struct Resident {
    /// The first has all that are small.
    buffers: Vec<Buffer>,
    /// Of each, by its number: in which buffer, and where.
    places: Vec<(usize, Range<u64>)>,
}

impl Resident {
    /// Copies the matrices of `layer` to the GPU.
    ///
    /// # Errors
    /// [`VulkanError::OutOfMemory`], [`VulkanError::Driver`].
    pub fn load(device: &Device, layer: &PlacedLayer) -> Result<Resident, VulkanError> {
        let mut layouts = vec![Layout::new(device)];
        let places = layer.tensors().iter().map(|tensor| {
            let bytes = tensor.matrix().bytes().len() as u64;
            let buffer = match bytes < LARGE {
                true => 0,
                false => {
                    layouts.push(Layout::new(device));
                    layouts.len() - 1
                }
            };
            (buffer, layouts[buffer].bytes(bytes))
        });
        let places = places.collect();
        let buffers = layouts.iter().map(|layout| device.buffer(layout.end()));
        let resident = Resident {
            buffers: buffers.collect::<Result<_, _>>()?,
            places,
        };
        for (number, tensor) in layer.tensors().iter().enumerate() {
            device.upload(resident.slice(number), tensor.matrix().bytes())?;
        }
        Ok(resident)
    }

    fn slice(&self, number: usize) -> Slice<'_> {
        let (buffer, place) = &self.places[number];
        self.buffers[*buffer].slice(place.clone())
    }
}

impl<'a> Matrices<'a> for &'a Resident {
    fn matrix(
        &mut self,
        _pass: &mut Pass<'a>,
        projection: &'a Projection,
    ) -> Result<Matrix<'a>, StepError> {
        Ok(projection.with(self.slice(projection.number)))
    }

    fn experts(
        &mut self,
        pass: &mut Pass<'a>,
        experts: &'a Experts,
    ) -> Result<[Matrix<'a>; 3], StepError> {
        let [gate, up, down] = experts.of_experts();
        Ok([
            self.matrix(pass, gate)?,
            self.matrix(pass, up)?,
            self.matrix(pass, down)?,
        ])
    }
}
