//! Finds the drivers of Vulkan, and opens a GPU.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prima_vulkan::{Device, Facts, GpuKind, Gpus, VulkanError};

use super::streamed::StreamRoom;
use super::workspace::Workspace;
use crate::error::EngineError;
use crate::gpu::backend::{GpuChoice, error};

/// An open GPU.
#[derive(Clone)]
pub(in crate::gpu) struct VulkanGpu {
    pub device: Device,
    /// Passes on it take turns.
    workspace: Arc<Mutex<Workspace>>,
    /// For layers whose weights do not stay, of all windows.
    room: Arc<Mutex<StreamRoom>>,
}

impl VulkanGpu {
    /// The first GPU of the kind that was asked for.
    pub fn open(choice: GpuChoice) -> Result<VulkanGpu, EngineError> {
        let gpus = find()?;
        let software = choice == GpuChoice::Software;
        let is_wanted = |facts: &Facts| (facts.kind == GpuKind::Software) == software;
        let index = gpus
            .facts()
            .position(|facts| is_wanted(facts) && facts.unfit.is_none());
        let index = index.ok_or_else(|| {
            let mut wanted = gpus.facts().filter(|facts| is_wanted(facts));
            let unfit = wanted.find_map(|facts| Some(format!("{}: {}", facts.name, facts.unfit.as_deref()?)));
            let none = match software {
                true => "Vulkan's drivers list none that computes on the processor (Debian: mesa-vulkan-drivers)",
                false => "Vulkan's drivers list no GPU",
            };
            EngineError::NoGpu {
                reason: unfit.unwrap_or_else(|| none.to_owned()),
            }
        })?;
        let device = Device::open(&gpus, index).map_err(|source| error("be opened", source))?;
        Ok(VulkanGpu {
            device,
            workspace: Arc::default(),
            room: Arc::default(),
        })
    }

    /// Waits for the pass that uses it.
    pub(super) fn workspace(&self) -> MutexGuard<'_, Workspace> {
        let workspace = self.workspace.lock();
        workspace.unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the pass that uses it.
    pub(super) fn room(&self) -> MutexGuard<'_, StreamRoom> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn with_most_bound_bytes(self, bytes: u64) -> VulkanGpu {
        VulkanGpu {
            device: self.device.with_most_bound_bytes(bytes),
            ..self
        }
    }
}

/// Vulkan's loader and what it lists.
pub(super) fn find() -> Result<Gpus, EngineError> {
    match Gpus::find() {
        Err(absent @ (VulkanError::NoLoader { .. } | VulkanError::NoDriver { .. })) => {
            Err(EngineError::NoGpu {
                reason: absent.to_string(),
            })
        }
        found => found.map_err(|source| error("be looked for", source)),
    }
}
