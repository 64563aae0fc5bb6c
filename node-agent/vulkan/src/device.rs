//! An open GPU, and its limits.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ash::vk;
use prima_gguf::GgmlType;

use crate::error::VulkanError;
use crate::gpus::{Abilities, Facts, GpuKind, Gpus};
use crate::kernels::Kernel;
use crate::raw_device::RawDevice;
use crate::recorder::Recorder;

/// Floating-point operations of a part of a pass at most, where no kernel alone has more. Drivers that watch over GPUs give up what takes too long:
/// AMD's after ten seconds, and since Linux 7.0 after two. The slowest integrated GPUs do 0.05 to 0.1 Tflop/s with our kernels (estimated: an eighth
/// to a quarter of the 0.4 that 24 units of Intel's do at best). So a part takes them one to two seconds, and others a fraction of that.
const PART_FLOP: u64 = 100_000_000_000;
/// The same of a GPU with memory of its own, of which the slowest do 0.25 Tflop/s (estimated in the same way, of 1 to 2 at best). Large ones need as
/// much to be busy. Attention of 256 rows to 65,536 positions in a layer of a 32B is two parts of these. It would be six of the others, each with too few
/// groups of threads for a hundred processors.
const DISCRETE_PART_FLOP: u64 = 5 * PART_FLOP;

/// So long a part of a pass may take before the GPU counts as hanging: many times what it may have to do (`PART_FLOP`). Others may use the GPU, too, and
/// some drivers do not watch over it.
pub const PATIENCE: Duration = Duration::from_secs(15);
/// The same where the processor computes: that takes its time.
const SOFTWARE_PATIENCE: Duration = Duration::from_secs(600);

/// An open GPU. Clones share it; passes take turns.
#[derive(Clone)]
pub struct Device {
    shared: Arc<Shared>,
    most_bound_bytes: u64,
    /// Where it gives less at once than its driver.
    most_allocated_bytes: Option<u64>,
    most_part_flop: u64,
    abilities: Abilities,
    patience: Duration,
}

struct Shared {
    /// `None` before the first pass.
    recorder: Mutex<Option<Recorder>>,
    raw: RawDevice,
}

impl Device {
    /// Opens the GPU of this place in [`Gpus::facts`].
    ///
    /// # Errors
    /// [`VulkanError::Driver`] when its driver refuses, or there is none in this place.
    pub fn open(gpus: &Gpus, index: usize) -> Result<Device, VulkanError> {
        let raw = RawDevice::open(gpus, index)?;
        Ok(Device {
            most_bound_bytes: u64::from(raw.found.limits.max_storage_buffer_range),
            most_allocated_bytes: None,
            most_part_flop: match raw.found.facts.kind {
                GpuKind::Discrete => DISCRETE_PART_FLOP,
                GpuKind::Integrated | GpuKind::Virtual | GpuKind::Software => PART_FLOP,
            },
            abilities: raw.found.abilities,
            patience: match raw.found.facts.kind {
                GpuKind::Software => SOFTWARE_PATIENCE,
                GpuKind::Discrete | GpuKind::Integrated | GpuKind::Virtual => PATIENCE,
            },
            shared: Arc::new(Shared {
                recorder: Mutex::new(None),
                raw,
            }),
        })
    }

    /// The same GPU, of whose buffers kernels are shown at most `bytes` at once. Tensors that are larger are computed in parts.
    #[must_use]
    pub fn with_most_bound_bytes(self, bytes: u64) -> Device {
        Device {
            most_bound_bytes: bytes.min(self.most_bound_bytes),
            ..self
        }
    }

    /// The same GPU, which gives no buffer of more than `bytes`, as if that was what its driver allocates at most.
    #[must_use]
    pub fn with_most_allocated_bytes(self, bytes: u64) -> Device {
        Device {
            most_allocated_bytes: Some(bytes),
            ..self
        }
    }

    /// The same GPU, to which passes are handed in parts of at most `flop` floating-point operations, where no kernel alone has more.
    #[must_use]
    pub fn with_most_part_flop(self, flop: u64) -> Device {
        Device {
            most_part_flop: flop,
            ..self
        }
    }

    /// The same GPU, with none of the abilities that not every GPU has.
    #[must_use]
    pub fn without_abilities(self) -> Device {
        Device {
            abilities: Abilities::default(),
            ..self
        }
    }

    /// The same GPU, which counts as hanging when a part of a pass takes longer than this. For all who share it then: it is used no more.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Device {
        Device { patience, ..self }
    }

    /// What it has that not every GPU has.
    pub fn abilities(&self) -> Abilities {
        self.abilities
    }

    pub fn facts(&self) -> &Facts {
        &self.raw().found.facts
    }

    /// Bytes of memory that are free, as the driver says; all of it where it does not say.
    pub fn available_bytes(&self) -> u64 {
        self.raw().available_bytes()
    }

    /// Bytes of its memory that buffers have, as the driver rounds them up; without those that passes and [`Uploads`](crate::Uploads) copy
    /// through, which are the processor's.
    pub fn allocated_bytes(&self) -> u64 {
        self.raw().allocated.load(Ordering::Relaxed)
    }

    /// What offsets into buffers are multiples of.
    pub fn alignment(&self) -> u64 {
        let limits = &self.raw().found.limits;
        limits.min_storage_buffer_offset_alignment.max(16)
    }

    /// The most bytes of a buffer that kernels see at once.
    pub fn most_bound_bytes(&self) -> u64 {
        self.most_bound_bytes
    }

    /// The most bytes of a buffer of which kernels see all at once.
    pub fn most_buffer_bytes(&self) -> u64 {
        let allocated = self.raw().found.most_allocated_bytes;
        let allocated = self.most_allocated_bytes.unwrap_or(allocated);
        self.most_bound_bytes.min(allocated)
    }

    /// That a buffer is not larger than this one gives. What drivers say of themselves is not asked: some allocate more.
    ///
    /// # Errors
    /// [`VulkanError::OutOfMemory`].
    pub(crate) fn check_buffer(&self, bytes: u64) -> Result<(), VulkanError> {
        match self.most_allocated_bytes {
            Some(available) if bytes > available => {
                Err(VulkanError::OutOfMemory { bytes, available })
            }
            _ => Ok(()),
        }
    }

    /// Floating-point operations of a part of a pass at most, where no kernel alone has more.
    pub(crate) fn most_part_flop(&self) -> u64 {
        self.most_part_flop
    }

    /// Makes the kernels ready for weights of these formats, for those of experts or heads, and for latents, which takes seconds where a driver sees
    /// them for the first time. Others are made ready when a pass starts them.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] for a format without kernels, [`VulkanError::Driver`].
    pub fn make_ready(
        &self,
        formats: &[GgmlType],
        of_parts: &[GgmlType],
        with_latents: bool,
    ) -> Result<(), VulkanError> {
        let raw = self.raw();
        let kernels = Kernel::all(formats, of_parts, with_latents, self.abilities);
        kernels
            .into_iter()
            .try_for_each(|kernel| raw.kernels.pipeline(&raw.raw, kernel).map(drop))
    }

    pub(crate) fn raw(&self) -> &RawDevice {
        &self.shared.raw
    }

    pub(crate) fn patience(&self) -> Duration {
        self.patience
    }

    /// What became of `action`, which ended with `result`; it may be that the GPU is used no more.
    pub(crate) fn failed(&self, action: &'static str, result: vk::Result) -> VulkanError {
        self.raw().failed(action, result, self.patience)
    }

    /// What passes are recorded with, for one of them. Waits for the one before.
    ///
    /// # Errors
    /// [`VulkanError::Hung`] and [`VulkanError::Lost`] once it is, [`VulkanError::Driver`].
    pub(crate) fn recorder(&self) -> Result<MutexGuard<'_, Option<Recorder>>, VulkanError> {
        let recorder = self.shared.recorder.lock();
        let mut recorder = recorder.unwrap_or_else(PoisonError::into_inner);
        self.raw().check()?;
        if recorder.is_none() {
            *recorder = Some(Recorder::new(self.raw())?);
        }
        Ok(recorder)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let recorder = self.recorder.get_mut();
        let recorder = recorder.unwrap_or_else(PoisonError::into_inner).take();
        if let (Some(recorder), false) = (recorder, self.raw.is_gone()) {
            // SAFETY: passes borrow the device, so they have ended.
            unsafe { recorder.destroy(&self.raw) };
        }
    }
}
