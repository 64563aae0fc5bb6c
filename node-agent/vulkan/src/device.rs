//! An open GPU, and its limits.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prima_gguf::GgmlType;

use crate::error::VulkanError;
use crate::gpus::{Abilities, Facts, Gpus};
use crate::kernels::Kernel;
use crate::raw_device::RawDevice;
use crate::recorder::Recorder;

/// An open GPU. Clones share it; passes take turns.
#[derive(Clone)]
pub struct Device {
    shared: Arc<Shared>,
    most_bound_bytes: u64,
    abilities: Abilities,
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
            abilities: raw.found.abilities,
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

    /// The same GPU, with none of the abilities that not every GPU has.
    #[must_use]
    pub fn without_abilities(self) -> Device {
        Device {
            abilities: Abilities::default(),
            ..self
        }
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

    /// What offsets into buffers are multiples of.
    pub fn alignment(&self) -> u64 {
        let limits = &self.raw().found.limits;
        limits.min_storage_buffer_offset_alignment.max(16)
    }

    /// The most bytes of a buffer that kernels see at once.
    pub fn most_bound_bytes(&self) -> u64 {
        self.most_bound_bytes
    }

    /// Makes the kernels ready for weights of these formats, and for those of experts, which takes seconds where a driver sees them for the
    /// first time. Others are made ready when a pass starts them.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] for a format without kernels, [`VulkanError::Driver`].
    pub fn make_ready(
        &self,
        formats: &[GgmlType],
        of_experts: &[GgmlType],
    ) -> Result<(), VulkanError> {
        let raw = self.raw();
        let kernels = Kernel::all(formats, of_experts, self.abilities);
        kernels
            .into_iter()
            .try_for_each(|kernel| raw.kernels.pipeline(&raw.raw, kernel).map(drop))
    }

    pub(crate) fn raw(&self) -> &RawDevice {
        &self.shared.raw
    }

    /// What passes are recorded with, for one of them. Waits for the one before.
    ///
    /// # Errors
    /// [`VulkanError::Driver`].
    pub(crate) fn recorder(&self) -> Result<MutexGuard<'_, Option<Recorder>>, VulkanError> {
        let recorder = self.shared.recorder.lock();
        let mut recorder = recorder.unwrap_or_else(PoisonError::into_inner);
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
        if let (Some(recorder), false) = (recorder, self.raw.is_lost()) {
            // SAFETY: passes borrow the device, so they have ended.
            unsafe { recorder.destroy(&self.raw.raw) };
        }
    }
}
