//! What passes are recorded with.

use ash::vk;

use crate::allocation::Allocation;
use crate::error::VulkanError;
use crate::kernels::BINDINGS;
use crate::raw_device::RawDevice;

/// Descriptor sets of a pool; each kernel started takes one.
pub(crate) const SETS: u32 = 1024;

/// There is one for each device.
pub(crate) struct Recorder {
    pub pool: vk::CommandPool,
    /// Of a pass, in order.
    pub parts: Vec<Part>,
    pub descriptors: Vec<vk::DescriptorPool>,
    pub stages: Vec<Allocation>,
    /// What comes back passes through this.
    pub returns: Option<Allocation>,
}

/// What is handed to the GPU at once.
pub(crate) struct Part {
    pub commands: vk::CommandBuffer,
    /// Tells when it has run.
    pub ended: vk::Fence,
}

impl Recorder {
    /// # Errors
    /// [`VulkanError::Driver`].
    pub fn new(device: &RawDevice) -> Result<Recorder, VulkanError> {
        let (raw, family) = (&device.raw, device.found.queue_family);
        let info = vk::CommandPoolCreateInfo::default().queue_family_index(family);
        // SAFETY: the family is the device's; what is made is destroyed with the recorder.
        let pool = unsafe { raw.create_command_pool(&info, None) };
        let pool = pool.map_err(|result| VulkanError::of("prepare passes", result))?;
        Ok(Recorder {
            pool,
            parts: Vec::new(),
            descriptors: Vec::new(),
            stages: Vec::new(),
            returns: None,
        })
    }

    /// Begins the part of a pass with this number.
    ///
    /// # Errors
    /// [`VulkanError::Driver`].
    ///
    /// # Safety
    /// No pass that was recorded in it runs any more.
    pub unsafe fn begin(
        &mut self,
        raw: &ash::Device,
        part: usize,
    ) -> Result<vk::CommandBuffer, VulkanError> {
        let failed = |result| VulkanError::of("begin a pass", result);
        match self.parts.get(part) {
            Some(own) => {
                // SAFETY: as the caller promises, so nobody waits for the fence.
                unsafe { raw.reset_fences(&[own.ended]) }.map_err(failed)?;
            }
            None => self.add_part(raw).map_err(failed)?,
        }
        let commands = self.parts[part].commands;
        let begin = vk::CommandBufferBeginInfo::default()
            .flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
        // SAFETY: as the caller promises.
        unsafe { raw.begin_command_buffer(commands, &begin) }.map_err(failed)?;
        Ok(commands)
    }

    fn add_part(&mut self, raw: &ash::Device) -> Result<(), vk::Result> {
        let info = vk::CommandBufferAllocateInfo::default()
            .command_pool(self.pool)
            .level(vk::CommandBufferLevel::PRIMARY)
            .command_buffer_count(1);
        // SAFETY: the pool is the device's, here and below; what is made is destroyed with the recorder.
        let commands = unsafe { raw.allocate_command_buffers(&info) }?;
        // SAFETY: as above.
        let ended = unsafe { raw.create_fence(&vk::FenceCreateInfo::default(), None) }?;
        self.parts.push(Part {
            commands: commands[0],
            ended,
        });
        Ok(())
    }

    /// # Safety
    /// No pass runs.
    pub unsafe fn destroy(self, device: &RawDevice) {
        let raw = &device.raw;
        // SAFETY: as the caller promises; command buffers go with their pool.
        unsafe {
            for allocation in self.stages.iter().chain(&self.returns) {
                allocation.destroy(device);
            }
            for pool in self.descriptors {
                raw.destroy_descriptor_pool(pool, None);
            }
            for part in self.parts {
                raw.destroy_fence(part.ended, None);
            }
            raw.destroy_command_pool(self.pool, None);
        }
    }

    /// Adds room for [`SETS`] more.
    ///
    /// # Errors
    /// [`VulkanError::Driver`].
    pub fn descriptor_pool(&mut self, raw: &ash::Device) -> Result<(), VulkanError> {
        let sizes = [vk::DescriptorPoolSize::default()
            .ty(vk::DescriptorType::STORAGE_BUFFER)
            .descriptor_count(SETS * BINDINGS)];
        let info = vk::DescriptorPoolCreateInfo::default()
            .max_sets(SETS)
            .pool_sizes(&sizes);
        // SAFETY: `info` is whole; the pool is destroyed with the recorder.
        let pool = unsafe { raw.create_descriptor_pool(&info, None) };
        let pool = pool.map_err(|result| VulkanError::of("prepare passes", result))?;
        self.descriptors.push(pool);
        Ok(())
    }
}
