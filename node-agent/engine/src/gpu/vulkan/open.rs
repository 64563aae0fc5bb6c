//! Finds the drivers of Vulkan, and opens a GPU.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prima_vulkan::{Device, Facts, GpuKind, Gpus, VulkanError};

use super::streamed::StreamRoom;
use super::turns::Turns;
use super::workspace::Workspace;
use crate::error::EngineError;
use crate::gpu::backend::{GpuChoice, error};
use crate::gpu::facts::GpuFacts;

/// A GPU that is not open.
pub(in crate::gpu) struct ListedGpu {
    gpus: Gpus,
    index: usize,
}

/// An open GPU.
#[derive(Clone)]
pub(in crate::gpu) struct VulkanGpu {
    pub device: Device,
    /// Passes on it take turns.
    workspace: Arc<Turns<Workspace>>,
    /// For layers whose weights do not stay, of all windows.
    room: Arc<Mutex<StreamRoom>>,
}

impl VulkanGpu {
    /// The first GPU of the kind that was asked for.
    pub fn open(choice: GpuChoice) -> Result<VulkanGpu, EngineError> {
        let (gpus, indices) = Self::usable(choice)?;
        // There is one.
        let index = indices.first().copied().unwrap_or_default();
        ListedGpu { gpus, index }.open()
    }

    /// Those of the kind that was asked for that layers may be split among, and what is known of them: all that have memory of their own, else the
    /// first; all that compute on the processor. None is opened.
    pub fn listed(choice: GpuChoice) -> Result<Vec<(GpuFacts, ListedGpu)>, EngineError> {
        let (gpus, indices) = Self::usable(choice)?;
        let all = gpus.facts().enumerate();
        let listed = all.filter(|(index, _)| indices.contains(index));
        let listed = listed.map(|(index, facts)| {
            let described = super::described(facts, facts.total_bytes);
            let gpus = gpus.clone();
            (described, ListedGpu { gpus, index })
        });
        Ok(listed.collect())
    }

    /// The places of GPUs that may be used; one at least.
    fn usable(choice: GpuChoice) -> Result<(Gpus, Vec<usize>), EngineError> {
        let gpus = find()?;
        let software = choice == GpuChoice::Software;
        let indices = usable_of(gpus.facts(), software);
        if !indices.is_empty() {
            return Ok((gpus, indices));
        }
        Err(EngineError::NoGpu {
            reason: none_of(gpus.facts(), software),
        })
    }

    /// Waits for the pass that uses it, and for none that begins later.
    pub(super) fn workspace(&self) -> MutexGuard<'_, Workspace> {
        self.workspace.take()
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

    pub fn with_most_allocated_bytes(self, bytes: u64) -> VulkanGpu {
        VulkanGpu {
            device: self.device.with_most_allocated_bytes(bytes),
            ..self
        }
    }

    pub fn with_patience(self, patience: Duration) -> VulkanGpu {
        VulkanGpu {
            device: self.device.with_patience(patience),
            ..self
        }
    }
}

impl ListedGpu {
    pub fn open(&self) -> Result<VulkanGpu, EngineError> {
        let device = Device::open(&self.gpus, self.index);
        Ok(VulkanGpu {
            device: device.map_err(|source| error("be opened", source))?,
            workspace: Arc::default(),
            room: Arc::default(),
        })
    }
}

fn is_wanted(facts: &Facts, software: bool) -> bool {
    (facts.kind == GpuKind::Software) == software
}

/// Why none of these may be used.
fn none_of<'a>(all: impl Iterator<Item = &'a Facts>, software: bool) -> String {
    let mut wanted = all.filter(|facts| is_wanted(facts, software));
    let unfit =
        wanted.find_map(|facts| Some(format!("{}: {}", facts.name, facts.unfit.as_deref()?)));
    let none = match software {
        true => {
            "Vulkan's drivers list none that computes on the processor (Debian: mesa-vulkan-drivers)"
        }
        false => {
            "Vulkan's drivers list no GPU: look for /dev/dri (AMD, Intel), or for NVIDIA's file nvidia_icd.json, which its driver or its \
             container toolkit puts among Vulkan's drivers"
        }
    };
    unfit.unwrap_or_else(|| none.to_owned())
}

/// The places of those that fit: all that have memory of their own, else the first. Of those that compute on the processor, which only tests ask
/// for, all. One that several drivers list is that of the first of them: its memory is there once.
fn usable_of<'a>(all: impl Iterator<Item = &'a Facts>, software: bool) -> Vec<usize> {
    let mut fit: Vec<(usize, &Facts)> = Vec::new();
    for (index, facts) in all.enumerate() {
        let address = facts.pci_address.as_ref();
        let is_known = address.is_some()
            && fit
                .iter()
                .any(|(_, other)| other.pci_address.as_ref() == address);
        if is_wanted(facts, software) && facts.unfit.is_none() && !is_known {
            fit.push((index, facts));
        }
    }
    let mut own = Vec::new();
    for (index, facts) in &fit {
        if software || !super::described(facts, 0).unified_memory {
            own.push(*index);
        }
    }
    if own.is_empty() {
        own.extend(fit.first().map(|(index, _)| *index));
    }
    own
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

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(kind: GpuKind, address: Option<&str>) -> Facts {
        Facts {
            name: "GPU".to_owned(),
            pci: (1, 2),
            pci_address: address.map(str::to_owned),
            kind,
            total_bytes: 1,
            unfit: None,
        }
    }

    /// As in an image with Mesa's drivers, on a node whose GPU has none there.
    #[test]
    fn who_has_no_gpu_is_told_what_to_look_for() {
        let only_software = [listed(GpuKind::Software, None)];
        let none = none_of(only_software.iter(), false);
        assert!(none.contains("list no GPU"), "{none}");
        assert!(none.contains("nvidia_icd.json"), "{none}");
        let mut old = listed(GpuKind::Discrete, None);
        let none = none_of([&old].into_iter(), true);
        assert!(none.contains("mesa-vulkan-drivers"), "{none}");
        old.unfit = Some("it is too old".to_owned());
        let none = none_of([&only_software[0], &old].into_iter(), false);
        assert_eq!(none, "GPU: it is too old");
    }

    #[test]
    fn a_gpu_that_two_drivers_list_is_there_once() {
        let (first, second) = (Some("0000:01:00.0"), Some("0000:02:00.0"));
        let mut all = [
            listed(GpuKind::Discrete, first),
            listed(GpuKind::Discrete, second),
            listed(GpuKind::Discrete, first),
            listed(GpuKind::Integrated, None),
            listed(GpuKind::Software, None),
            listed(GpuKind::Software, None),
        ];
        assert_eq!(usable_of(all.iter(), false), [0, 1]);
        assert_eq!(usable_of(all.iter(), true), [4, 5]);
        // The other driver does.
        all[0].unfit = Some("it is too old".to_owned());
        assert_eq!(usable_of(all.iter(), false), [1, 2]);
        // Of those whose places are not known, nobody can say.
        for facts in &mut all[..3] {
            (facts.pci_address, facts.unfit) = (None, None);
        }
        assert_eq!(usable_of(all.iter(), false), [0, 1, 2]);
        assert_eq!(usable_of(all[3..].iter(), false), [0]);
    }
}
