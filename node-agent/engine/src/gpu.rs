//! GPUs of this machine, and what they do: layers of a window, the output head, and single operations for measuring them. However a
//! pass is cut, the CPU's results are the same bit for bit; a GPU's are the same up to rounding.
//!
//! Decides: which of them are used: all that have memory of their own, else the first. Every build finds GPUs through Vulkan. Drivers that
//! compute on the processor are no gain, and used only on request, but then all. A build for CUDA or Metal uses that instead. Refuses: to use the
//! CPU when a GPU was asked for.

mod backend;
#[cfg(feature = "candle")]
mod candle;
mod facts;
mod parts;
mod self_check;
mod vulkan;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use prima_model::ModelPart;
use prima_vulkan::GpuKind;

use crate::device::KvPositions;
use crate::error::EngineError;
use crate::executor::{Executor, ManyRowsExecutor};
use crate::kernels::{Matrix, ThreadPool};
use crate::model::Model;
use crate::residency::Residency;
use backend::{Backend, GpuChoice};
pub(crate) use backend::{DeviceHead, HeadWeights};
pub use backend::{DeviceMatrix, DeviceRows};
pub use facts::{GpuApi, GpuFacts};
pub use prima_vulkan::{
    LATENT_QUERIES as GPU_LATENT_QUERIES, PATIENCE as GPU_PATIENCE, Timeline, UPLOAD_BYTES,
};
pub use vulkan::GPU_HEAD_ROWS;

/// A GPU of this machine. Clones share it.
#[derive(Clone)]
pub struct Gpu(Arc<dyn Backend>);

/// A GPU that layers may be split among, not opened yet.
pub struct UsableGpu {
    /// As its driver lists it: only an open one knows how much of its memory is free.
    pub facts: GpuFacts,
    open: Box<dyn FnOnce() -> Result<Gpu, EngineError> + Send>,
}

/// A GPU that layers may be split among, and what it says of itself.
#[derive(Debug)]
pub struct OpenedGpu {
    pub facts: GpuFacts,
    pub opened: Result<Gpu, EngineError>,
}

impl UsableGpu {
    /// Its driver may take its time, or hang. One that cannot be opened says of itself what its driver lists.
    #[must_use]
    pub fn open(self) -> OpenedGpu {
        let Self { facts, open } = self;
        match open().and_then(|gpu| gpu.facts().map(|facts| (gpu, facts))) {
            Ok((gpu, facts)) => OpenedGpu {
                facts,
                opened: Ok(gpu),
            },
            Err(error) => OpenedGpu {
                facts,
                opened: Err(error),
            },
        }
    }

    /// Those of `usable` that a plan names, in its order, each with its place there: by their places on the PCI bus, or by their names. Without
    /// names, the first.
    ///
    /// # Errors
    /// [`EngineError::NotThere`].
    pub fn named<'a>(
        usable: Vec<UsableGpu>,
        names: impl IntoIterator<Item = &'a str>,
    ) -> Result<Vec<(usize, UsableGpu)>, EngineError> {
        let mut names = names.into_iter().peekable();
        let mut usable: Vec<(usize, UsableGpu)> = usable.into_iter().enumerate().collect();
        if names.peek().is_none() {
            usable.truncate(1);
            return Ok(usable);
        }
        let named = names.map(|name| {
            let place = usable.iter().position(|(_, gpu)| gpu.facts.is_named(name));
            let found = place.map(|place| usable.remove(place));
            found.ok_or_else(|| EngineError::NotThere {
                gpu: name.to_owned(),
            })
        });
        named.collect()
    }
}

impl Gpu {
    /// Opens the first GPU that layers run on, of those that `PRIMA_GPU` allows.
    ///
    /// # Errors
    /// [`EngineError::NoGpu`] when there is none, [`EngineError::Gpu`] when its driver refuses, [`EngineError::GpuChoice`].
    pub fn open() -> Result<Gpu, EngineError> {
        let choice = Self::choice()?;
        #[cfg(any(feature = "cuda", feature = "metal"))]
        if choice == GpuChoice::Real {
            return Ok(Gpu(Arc::new(candle::CandleGpu::open()?)));
        }
        Ok(Gpu(Arc::new(vulkan::VulkanGpu::open(choice)?)))
    }

    /// All GPUs that layers may be split among, in the order in which they get layers: those with memory of their own, else the first that shares
    /// the processor's. None is opened, but for that of a build for CUDA or Metal, which has one.
    ///
    /// # Errors
    /// [`EngineError::NoGpu`] when there is none, [`EngineError::Gpu`] when they cannot be looked for, [`EngineError::GpuChoice`].
    pub fn usable() -> Result<Vec<UsableGpu>, EngineError> {
        let choice = Self::choice()?;
        #[cfg(any(feature = "cuda", feature = "metal"))]
        if choice == GpuChoice::Real {
            let gpu = Self::open()?;
            return Ok(vec![UsableGpu {
                facts: gpu.facts()?,
                open: Box::new(move || Ok(gpu)),
            }]);
        }
        let listed = vulkan::VulkanGpu::listed(choice)?.into_iter();
        let usable = listed.map(|(facts, listed)| UsableGpu {
            facts,
            open: Box::new(move || listed.open().map(|gpu| Gpu(Arc::new(gpu)))),
        });
        Ok(usable.collect())
    }

    /// Opens all of them.
    ///
    /// # Errors
    /// As [`usable`](Self::usable).
    pub fn open_all() -> Result<Vec<OpenedGpu>, EngineError> {
        let usable = Self::usable()?.into_iter();
        Ok(usable.map(UsableGpu::open).collect())
    }

    /// Opens those of them that a plan names, and no other, which may hang: in its order, by their places on the PCI bus, or by their names. Without
    /// names, the first.
    ///
    /// # Errors
    /// Those of [`usable`](Self::usable); [`EngineError::NotThere`], [`EngineError::OneGpu`] when one cannot be opened.
    pub fn open_named<'a>(
        names: impl IntoIterator<Item = &'a str>,
    ) -> Result<Vec<Gpu>, EngineError> {
        let named = UsableGpu::named(Self::usable()?, names)?;
        let opened = named.into_iter().map(|(_, gpu)| {
            let OpenedGpu { facts, opened } = gpu.open();
            opened.map_err(|source| EngineError::OneGpu {
                gpu: facts.label(),
                source: Box::new(source),
            })
        });
        opened.collect()
    }

    /// What the environment allows, if that is any.
    fn choice() -> Result<GpuChoice, EngineError> {
        match GpuChoice::from_environment()? {
            GpuChoice::None => Err(EngineError::NoGpu {
                reason: format!("{} is `none`", GpuChoice::VARIABLE),
            }),
            choice => Ok(choice),
        }
    }

    /// What there is, those that layers run on first, and why each other is not used.
    ///
    /// # Errors
    /// As [`open_all`](Self::open_all).
    pub fn list() -> Result<Vec<(GpuFacts, Option<String>)>, EngineError> {
        let opened = match Gpu::open_all() {
            Err(error @ EngineError::GpuChoice { .. }) => return Err(error),
            opened => opened,
        };
        let mut listed: Vec<(GpuFacts, Option<String>)> = Vec::new();
        for one in opened.iter().flatten() {
            let problem = one.opened.as_ref().err().map(ToString::to_string);
            listed.push((one.facts.clone(), problem));
        }
        // Equal GPUs whose places are not known are told apart by their number.
        let mut known: Vec<_> = listed.iter().map(|(facts, _)| identity(facts)).collect();
        for (facts, kind, unfit) in vulkan::list()? {
            if let Some(place) = known.iter().position(|one| *one == identity(&facts)) {
                known.remove(place);
                continue;
            }
            let is_same = |(one, _): &(GpuFacts, Option<String>)| {
                one.pci_address.is_some() && one.pci_address == facts.pci_address
            };
            let reason = match (unfit, kind, &opened) {
                (Some(unfit), ..) => unfit,
                _ if listed.iter().any(is_same) => {
                    "another driver of the same GPU is used".to_owned()
                }
                (None, GpuKind::Software, _) => {
                    "it computes on the processor, which is no gain".to_owned()
                }
                (None, _, Ok(_)) => {
                    "others are used: those with memory of their own, else the first".to_owned()
                }
                (None, _, Err(error)) => error.to_string(),
            };
            listed.push((facts, Some(reason)));
        }
        match (listed.is_empty(), opened) {
            (true, Err(error)) => Err(error),
            _ => Ok(listed),
        }
    }

    /// A driver of Vulkan that computes on the processor, such as lavapipe, as a GPU: for tests on machines without one.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn software() -> Result<Gpu, EngineError> {
        Ok(Gpu(Arc::new(vulkan::VulkanGpu::open(GpuChoice::Software)?)))
    }

    /// The same, of whose buffers kernels see at most `bytes` at once: for tests of tensors that are larger.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn software_with_most_bound_bytes(bytes: u64) -> Result<Gpu, EngineError> {
        let gpu = vulkan::VulkanGpu::open(GpuChoice::Software)?;
        Ok(Gpu(Arc::new(gpu.with_most_bound_bytes(bytes))))
    }

    /// The same, whose driver gives at most `bytes` at once: for tests of what is larger together.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn software_with_most_allocated_bytes(bytes: u64) -> Result<Gpu, EngineError> {
        let gpu = vulkan::VulkanGpu::open(GpuChoice::Software)?;
        Ok(Gpu(Arc::new(gpu.with_most_allocated_bytes(bytes))))
    }

    /// The same twice, the second without patience: with the first thing that it is asked to do, the GPU counts as hanging for both. For tests of that.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn software_that_hangs() -> Result<(Gpu, Gpu), EngineError> {
        let gpu = vulkan::VulkanGpu::open(GpuChoice::Software)?;
        let hangs = gpu.clone().with_patience(Duration::ZERO);
        Ok((Gpu(Arc::new(gpu)), Gpu(Arc::new(hangs))))
    }

    /// What candle does on a GPU, done on the CPU: for tests on machines without one.
    #[cfg(feature = "candle")]
    pub fn candle_on_cpu() -> Gpu {
        Gpu(Arc::new(candle::CandleGpu::on_cpu()))
    }

    /// Parts of models of which layers may be on a GPU that is used through `api`.
    pub fn model_parts(api: GpuApi) -> impl Iterator<Item = ModelPart> {
        let all = ModelPart::ALL.iter().copied();
        all.filter(move |&part| api.computes(part))
    }

    /// # Errors
    /// [`EngineError::Gpu`] when the driver refuses.
    pub fn facts(&self) -> Result<GpuFacts, EngineError> {
        self.0.facts()
    }

    /// Whether it computes, or would with more memory. `false` once it hangs or is lost, which is then known at once.
    #[must_use]
    pub fn answers(&self) -> bool {
        let copied = self.0.copy_rows(&[0.0], 1);
        !copied.is_err_and(|error| error.is_without_gpu())
    }

    /// Bytes of its memory that layers, keys and values, the output head and passes have now; `None` where that is not counted (candle's GPUs).
    pub fn allocated_bytes(&self) -> Option<u64> {
        self.0.allocated_bytes()
    }

    /// Copies the layers `layers` of `model` there, once the first, and the first with experts, computed the same there as on the processor, in passes
    /// of up to `most_rows`. The first has the place `first_place` in its window. Memory for the keys and values of `kv_positions` is set aside.
    ///
    /// # Errors
    /// [`EngineError::TensorValue`] when a layer is not in the bytes of a sparse file, [`EngineError::Gpu`]: no memory, no kernels for
    /// what is in the layers, or wrong results.
    pub(crate) fn load(
        &self,
        model: &Model,
        layers: Range<usize>,
        first_place: usize,
        kv_positions: KvPositions,
        most_rows: usize,
    ) -> Result<Box<dyn Executor>, EngineError> {
        let none = KvPositions::default();
        Self::check(model, &layers, most_rows, |layer| {
            self.0.load(model, layer, 0, none)
        })?;
        self.0.load(model, layers, first_place, kv_positions)
    }

    /// Makes ready to compute the layers `layers` of `model`, the first of a window, without keeping them there: for each pass their matrices are
    /// copied from where `residency` has them, the next while one is computed with. Keys and values stay in memory. What is checked is that of
    /// [`load`](Self::load).
    ///
    /// # Errors
    /// As there.
    pub(crate) fn stream(
        &self,
        model: &Model,
        layers: Range<usize>,
        residency: &Residency,
        most_rows: usize,
    ) -> Result<Box<dyn ManyRowsExecutor>, EngineError> {
        Self::check(model, &layers, most_rows, |layer| {
            Ok(self.0.stream(model, layer, &Residency::mapped())?)
        })?;
        self.0.stream(model, layers, residency)
    }

    /// That the first layer, and the first with experts, are computed as on the processor; `alone` makes ready a layer.
    fn check(
        model: &Model,
        layers: &Range<usize>,
        most_rows: usize,
        alone: impl Fn(Range<usize>) -> Result<Box<dyn Executor>, EngineError>,
    ) -> Result<(), EngineError> {
        let has_experts =
            |layer: &usize| model.spec().layers[*layer].feed_forward.experts.is_some();
        let with_experts = layers.clone().find(has_experts);
        let mut compared = vec![layers.start];
        compared.extend(with_experts.filter(|layer| *layer != layers.start));
        compared.into_iter().try_for_each(|layer| {
            self_check::check(&*alone(layer..layer + 1)?, model, layer, most_rows)
        })
    }

    /// Copies the output norm and the output head there, once some rows of the matrix have computed there what they compute on the processor.
    ///
    /// # Errors
    /// [`EngineError::Gpu`]: no memory, no kernels for the format, or wrong results.
    pub(crate) fn load_head(
        &self,
        weights: HeadWeights<'_>,
    ) -> Result<Box<dyn DeviceHead>, EngineError> {
        let part = self_check::part_of_head(weights);
        self_check::check_head(&*self.0.load_head(part)?, part)?;
        self.0.load_head(weights)
    }

    /// Copies a matrix there, as layers are copied.
    ///
    /// # Errors
    /// [`EngineError::Gpu`]: no memory, or no kernels for the format.
    pub fn copy_matrix(&self, matrix: Matrix<'_>) -> Result<DeviceMatrix, EngineError> {
        self.0.copy_matrix(matrix)
    }

    /// Copies `rows` rows of numbers there, as activations are copied.
    ///
    /// # Errors
    /// [`EngineError::Gpu`], also when the numbers are not whole rows.
    pub fn copy_rows(&self, numbers: &[f32], rows: usize) -> Result<DeviceRows, EngineError> {
        self.0.copy_rows(numbers, rows)
    }

    /// Copies weights there by all threads of `pool`, as for a pass of layers that do not stay there, to where nobody needs them.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub fn copy_weights(&self, pool: &ThreadPool, weights: &[u8]) -> Result<(), EngineError> {
        self.0.copy_weights(pool, weights)
    }

    /// Copies the numbers back.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub fn copy_back(&self, rows: &DeviceRows) -> Result<Vec<f32>, EngineError> {
        self.0.copy_back(rows)
    }

    /// Multiplies `rows` by each matrix, with the kernels of layers. Nobody needs what comes out.
    ///
    /// # Errors
    /// [`EngineError::Gpu`], also when the rows have another length than a matrix.
    pub fn multiply(
        &self,
        matrices: &[&DeviceMatrix],
        rows: &DeviceRows,
    ) -> Result<(), EngineError> {
        self.0.multiply(matrices, rows)
    }

    /// Reads every number once.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub fn read(&self, rows: &DeviceRows) -> Result<(), EngineError> {
        self.0.read(rows)
    }

    /// Overwrites `to` with `rows` (as many), the way keys and values are appended.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub fn append(&self, rows: &DeviceRows, to: &DeviceRows) -> Result<(), EngineError> {
        self.0.append(rows, to)
    }

    /// From now on notes when it computes, and when weights are copied there for a pass, until [`end_timeline`](Self::end_timeline).
    ///
    /// # Errors
    /// [`EngineError::Gpu`], also where it has no clock that can be read.
    pub fn start_timeline(&self) -> Result<(), EngineError> {
        self.0.start_timeline()
    }

    /// What was noted since [`start_timeline`](Self::start_timeline).
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub fn end_timeline(&self) -> Result<Timeline, EngineError> {
        self.0.end_timeline()
    }
}

/// By which a GPU that is listed twice is known.
fn identity(facts: &GpuFacts) -> (String, Option<(u32, u32)>, Option<String>) {
    (facts.name.clone(), facts.pci, facts.pci_address.clone())
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.facts().map(|facts| facts.name);
        f.debug_tuple("Gpu").field(&name.ok()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plans_gpus_are_found_in_its_order_and_others_left_alone() {
        let twin = |address: &str| UsableGpu {
            facts: GpuFacts {
                api: GpuApi::Vulkan,
                name: "twin".to_owned(),
                pci: None,
                pci_address: Some(address.to_owned()),
                unified_memory: false,
                total_bytes: 2,
                available_bytes: 1,
                most_buffer_bytes: None,
            },
            open: Box::new(|| panic!("it is opened")),
        };
        let (first, second) = ("0000:01:00.0", "0000:02:00.0");
        let found = |names: &[&str]| {
            let named = UsableGpu::named(vec![twin(first), twin(second)], names.iter().copied());
            let places = named.map(|named| {
                let places = named.iter().map(|(place, _)| *place);
                places.collect::<Vec<usize>>()
            });
            places.map_err(|error| error.to_string())
        };
        assert_eq!(found(&[second]), Ok(vec![1]));
        assert_eq!(found(&[second, first]), Ok(vec![1, 0]));
        assert_eq!(found(&["twin", "twin"]), Ok(vec![0, 1]));
        // Of an operator of an earlier version.
        assert_eq!(found(&[]), Ok(vec![0]));
        let absent = found(&[first, "0000:03:00.0"]).unwrap_err();
        assert!(absent.contains("0000:03:00.0 is not there"), "{absent}");
    }
}
