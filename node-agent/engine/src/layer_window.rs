//! A range of a model's layers, ready to run: the executors that have them, one after the other.
//!
//! Decides: what a batch must look like. Refuses: what the caches of its sequences cannot go on with; a pass that fails leaves no rows behind.

use std::ops::Range;

use crate::batch::{BatchEntry, Sequence};
use crate::by_rows::ByRows;
use crate::cpu::{Compute, CpuLayers};
use crate::device::{LayerDevices, ManyRows, OnGpu};
use crate::error::EngineError;
use crate::executor::Executor;
use crate::kernels::KvShape;
use crate::kv_cache::LayerKv;
use crate::layer::kv_shape;
use crate::model::Model;
use crate::residency::Residency;

/// A contiguous range of a model's layers.
pub struct LayerWindow {
    layers: Range<usize>,
    /// Width of the activation.
    hidden: usize,
    /// In the order of their layers.
    executors: Vec<Box<dyn Executor>>,
    gpu_layers: usize,
    kv_shape: KvShape,
}

impl LayerWindow {
    /// The layers `layers` of the model, on the devices that `devices` says, with weights where `residency` has them.
    ///
    /// # Errors
    /// [`EngineError::Window`] for a range that is empty or not of this model, [`EngineError::TensorValue`] when a layer is not in the
    /// bytes of a sparse file, [`EngineError::NotOnGpu`] and [`EngineError::Gpu`] when a GPU does not
    /// take its layers.
    pub fn open(
        model: &Model,
        layers: Range<usize>,
        devices: &LayerDevices,
        residency: &Residency,
    ) -> Result<LayerWindow, EngineError> {
        let spec = model.spec();
        if layers.is_empty() || layers.end > spec.layers.len() {
            return Err(EngineError::Window {
                window: layers,
                layers: spec.layers.len(),
            });
        }
        let attention = &spec.layers[layers.start].attention;
        let on_gpus = devices.on_gpus(layers.len());
        let gpu_layers = on_gpus.iter().map(|on_gpu| on_gpu.layers).sum::<usize>();
        let on_cpu = layers.len() - gpu_layers;
        let first_on_gpu = layers.start + on_cpu;
        let mut executors: Vec<Box<dyn Executor>> = Vec::new();
        if on_cpu > 0 {
            let layers = layers.start..first_on_gpu;
            let cpu = CpuLayers::load(model, layers.clone(), residency)?;
            executors.push(match devices.many_rows() {
                None => Box::new(cpu),
                Some(ManyRows { gpu, rows }) => Box::new(ByRows {
                    few: cpu,
                    many: gpu.stream(model, layers, residency, devices.most_rows())?,
                    from: *rows,
                }),
            });
        }
        let mut first = first_on_gpu;
        for on_gpu in on_gpus {
            let OnGpu {
                gpu,
                layers: count,
                kv_positions,
            } = on_gpu;
            let own = first..first + count;
            let place = first - layers.start;
            let most_rows = devices.most_rows();
            executors.push(gpu.load(model, own, place, kv_positions, most_rows)?);
            first += count;
        }
        Ok(LayerWindow {
            hidden: spec.hidden,
            executors,
            gpu_layers,
            kv_shape: kv_shape(attention),
            layers,
        })
    }

    /// The layers of this window.
    pub fn layers(&self) -> Range<usize> {
        self.layers.clone()
    }

    /// Runs the rows of `batch` through the window's layers and adds their keys and values to the caches. `activation` is rows x
    /// hidden, row-major, entry after entry; it is updated in place.
    ///
    /// # Errors
    /// An activation of another size than the batch; an entry whose cache does not cover the window, does not hold exactly
    /// `first_position` positions, or would exceed its context length; weights that cannot be read any more; a failure of the
    /// gpu. The caches are then as they were before.
    pub fn forward(
        &self,
        compute: &Compute,
        activation: &mut [f32],
        batch: &mut [BatchEntry<'_>],
    ) -> Result<(), EngineError> {
        let mut sequences = self.check(activation, batch)?;
        let mut executors = self.executors.iter();
        let result =
            executors.try_for_each(|part| part.forward(compute, activation, &mut sequences));
        if result.is_err() {
            sequences.iter_mut().for_each(Sequence::undo);
        }
        result
    }

    /// How many of the window's layers run on GPUs.
    pub fn gpu_layers(&self) -> usize {
        self.gpu_layers
    }

    fn check<'a>(
        &self,
        activation: &[f32],
        batch: &'a mut [BatchEntry<'_>],
    ) -> Result<Vec<Sequence<'a>>, EngineError> {
        let rows = batch
            .iter()
            .try_fold(0_usize, |sum, entry| sum.checked_add(entry.rows))
            .unwrap_or(usize::MAX);
        let expected = rows.saturating_mul(self.hidden);
        if activation.len() != expected {
            return Err(EngineError::Length {
                what: "the activation (rows x hidden)",
                expected,
                found: activation.len(),
            });
        }
        batch
            .iter_mut()
            .enumerate()
            .map(|(index, entry)| self.check_entry(index, entry))
            .collect()
    }

    fn check_entry<'a>(
        &self,
        index: usize,
        entry: &'a mut BatchEntry<'_>,
    ) -> Result<Sequence<'a>, EngineError> {
        let BatchEntry {
            kv,
            first_position,
            rows,
        } = entry;
        let context_length = kv.context_length();
        let same_shape = kv.shape() == self.kv_shape;
        let layers = kv
            .window(self.layers.clone())
            .filter(|layers| same_shape && self.fit_devices(layers))
            .ok_or_else(|| EngineError::KvLayers {
                entry: index,
                window: self.layers.clone(),
            })?;
        let sequence = Sequence {
            layers,
            context_length,
            first_position: *first_position,
            rows: *rows,
        };
        sequence.check(index)?;
        Ok(sequence)
    }

    /// Whether the cache of each layer lies where the layer runs.
    fn fit_devices(&self, layers: &[LayerKv]) -> bool {
        let mut executors = self.executors.iter();
        executors.all(|part| {
            let mut own = layers[part.places()].iter();
            own.all(|kv| part.can_continue(kv))
        })
    }
}
