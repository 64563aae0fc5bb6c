//! What the driver gave for an open GPU.

use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ash::vk;

use crate::error::VulkanError;
use crate::gpus::{Found, GpuKind, Gpus, local_heap};
use crate::kernels::Kernels;
use crate::timeline::Timelines;

/// An open GPU, which is closed with this.
pub(crate) struct RawDevice {
    pub raw: ash::Device,
    /// Kernels run here.
    pub queue: vk::Queue,
    /// Weights are copied here while kernels run; the same queue where the GPU has no other.
    pub upload_queue: vk::Queue,
    /// Held while something is handed to a queue.
    submitting: Mutex<()>,
    pub found: Found,
    pub timelines: Timelines,
    pub kernels: Kernels,
    /// Once nothing is asked of it any more.
    gone: OnceLock<Gone>,
    /// Bytes of what kernels read and write.
    pub allocated: AtomicU64,
    /// Keeps the instance.
    gpus: Gpus,
}

/// Why a GPU cannot be used any more.
enum Gone {
    Hung { patience: Duration },
    Lost,
}

impl Gone {
    fn error(&self) -> VulkanError {
        match self {
            Gone::Hung { patience } => VulkanError::Hung {
                seconds: patience.as_secs(),
            },
            Gone::Lost => VulkanError::Lost,
        }
    }
}

impl RawDevice {
    /// As [`Device::open`](crate::Device::open).
    pub fn open(gpus: &Gpus, index: usize) -> Result<RawDevice, VulkanError> {
        let failed = |result| VulkanError::of("open the GPU", result);
        let found = gpus.found(index).ok_or(failed(vk::Result::ERROR_UNKNOWN))?;
        let families = found.families();
        let queues: Vec<_> = families
            .iter()
            .map(|&(family, count)| {
                vk::DeviceQueueCreateInfo::default()
                    .queue_family_index(family)
                    .queue_priorities(&[1.0, 1.0][..count])
            })
            .collect();
        let mut extensions = Vec::new();
        if found.tells_budget {
            extensions.push(ash::ext::memory_budget::NAME);
        }
        let mut byte_dot = vk::PhysicalDeviceShaderIntegerDotProductFeatures::default()
            .shader_integer_dot_product(true);
        let mut matrices =
            vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default().cooperative_matrix(true);
        let mut float16 =
            vk::PhysicalDeviceShaderFloat16Int8Features::default().shader_float16(true);
        let mut storage = vk::PhysicalDevice16BitStorageFeatures::default()
            .storage_buffer16_bit_access(true)
            .uniform_and_storage_buffer16_bit_access(true);
        let mut memory_model =
            vk::PhysicalDeviceVulkanMemoryModelFeatures::default().vulkan_memory_model(true);
        let mut info = vk::DeviceCreateInfo::default().queue_create_infos(&queues);
        if found.abilities.byte_dot {
            extensions.push(ash::khr::shader_integer_dot_product::NAME);
            info = info.push_next(&mut byte_dot);
        }
        if found.abilities.matrix_units {
            extensions.extend([
                ash::khr::cooperative_matrix::NAME,
                ash::khr::shader_float16_int8::NAME,
                ash::khr::vulkan_memory_model::NAME,
            ]);
            info = info
                .push_next(&mut matrices)
                .push_next(&mut float16)
                .push_next(&mut storage)
                .push_next(&mut memory_model);
        }
        let extensions: Vec<_> = extensions.iter().map(|name| name.as_ptr()).collect();
        let info = info.enabled_extension_names(&extensions);
        // SAFETY: the device is the instance's, and `info` and what it points to outlive the call.
        let raw = unsafe { gpus.instance().create_device(found.physical, &info, None) }
            .map_err(failed)?;
        // SAFETY: the families have these queues, which were asked for above.
        let [queue, upload_queue] = [(found.queue_family, 0), found.upload_queue]
            .map(|(family, place)| unsafe { raw.get_device_queue(family, place) });
        let kernels = match Kernels::new(&raw) {
            Ok(kernels) => kernels,
            Err(error) => {
                // SAFETY: nothing of the device is left.
                unsafe { raw.destroy_device(None) };
                return Err(error);
            }
        };
        Ok(RawDevice {
            raw,
            queue,
            upload_queue,
            submitting: Mutex::default(),
            found: found.clone(),
            timelines: Timelines::default(),
            kernels,
            gone: OnceLock::new(),
            allocated: AtomicU64::new(0),
            gpus: gpus.clone(),
        })
    }

    /// As [`Device::available_bytes`](crate::Device::available_bytes).
    pub fn available_bytes(&self) -> u64 {
        let found = &self.found;
        let Some((place, heap)) = local_heap(&found.memory) else {
            return 0;
        };
        if !found.tells_budget {
            return heap.size;
        }
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut properties = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        let instance = self.gpus.instance();
        // SAFETY: the device has the extension whose structure is asked to be filled.
        unsafe { instance.get_physical_device_memory_properties2(found.physical, &mut properties) };
        budget.heap_budget[place].saturating_sub(budget.heap_usage[place])
    }

    /// Hands `commands` to a queue; `fence` tells when they and all before have run.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// All that the commands use lives until they have run, and the fence is not in use.
    pub unsafe fn submit(
        &self,
        queue: vk::Queue,
        commands: &[vk::CommandBuffer],
        fence: vk::Fence,
    ) -> Result<(), vk::Result> {
        let info = [vk::SubmitInfo::default().command_buffers(commands)];
        let submitting = self.submitting.lock();
        let _submitting = submitting.unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as the caller promises; nobody else uses the queue meanwhile.
        unsafe { self.raw.queue_submit(queue, &info, fence) }
    }

    /// Waits for a fence. Who has no patience does not even ask.
    ///
    /// # Errors
    /// `TIMEOUT` after `patience`, and what else the driver says.
    pub fn wait(&self, fence: vk::Fence, patience: Duration) -> Result<(), vk::Result> {
        if patience.is_zero() {
            return Err(vk::Result::TIMEOUT);
        }
        let nanoseconds = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: the fence is the device's, here and below.
        unsafe { self.raw.wait_for_fences(&[fence], true, nanoseconds) }
    }

    /// As [`wait`](Self::wait), for what ends soon: asks again and again at first, since being woken up can take longer than that, in virtual
    /// machines above all. A driver that computes on the processor needs it for itself.
    pub fn wait_awake(&self, fence: vk::Fence, patience: Duration) -> Result<(), vk::Result> {
        const SOON: Duration = Duration::from_millis(1);
        let begun = Instant::now();
        let soon = SOON.min(patience);
        while self.found.facts.kind != GpuKind::Software && begun.elapsed() < soon {
            if self.has_run(fence)? {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        self.wait(fence, patience)
    }

    /// Whether a fence tells that what it is of has run.
    ///
    /// # Errors
    /// What the driver says.
    pub fn has_run(&self, fence: vk::Fence) -> Result<bool, vk::Result> {
        // SAFETY: the fence is the device's.
        unsafe { self.raw.get_fence_status(fence) }
    }

    pub fn is_gone(&self) -> bool {
        self.gone.get().is_some()
    }

    /// # Errors
    /// [`VulkanError::Hung`] and [`VulkanError::Lost`] once it is.
    pub fn check(&self) -> Result<(), VulkanError> {
        match self.gone.get() {
            Some(gone) => Err(gone.error()),
            None => Ok(()),
        }
    }

    /// What became of `action`, which ended with `result` (`TIMEOUT`: after this `patience`). After a loss, or if it took too long, it is given up.
    pub fn failed(
        &self,
        action: &'static str,
        result: vk::Result,
        patience: Duration,
    ) -> VulkanError {
        match result {
            vk::Result::TIMEOUT => self.give_up(Gone::Hung { patience }),
            vk::Result::ERROR_DEVICE_LOST => self.give_up_lost(),
            result => VulkanError::of(action, result),
        }
    }

    /// Gives it up, as what was handed to it may never end.
    pub fn give_up_lost(&self) -> VulkanError {
        self.give_up(Gone::Lost)
    }

    /// After this nothing is asked of it any more, and what it may still use stays for as long as the process. The first reason stands.
    fn give_up(&self, why: Gone) -> VulkanError {
        self.gone.get_or_init(|| why).error()
    }
}

impl Drop for RawDevice {
    fn drop(&mut self) {
        if self.is_gone() {
            return;
        }
        // SAFETY: buffers and recorders hold the device, so none is left.
        unsafe {
            self.kernels.destroy(&self.raw);
            self.timelines.destroy(&self.raw);
            self.raw.destroy_device(None);
        }
    }
}
