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
    /// Of the parts of a pass, in order.
    pub commands: Vec<vk::CommandBuffer>,
    /// Of all parts of a pass but the last, and of the last.
    pub fences: [vk::Fence; 2],
    /// Of parts that a pass marks.
    pub marks: [vk::Fence; 2],
    pub descriptors: Vec<vk::DescriptorPool>,
    pub stages: Vec<Allocation>,
    /// What comes back passes through this.
    pub returns: Option<Allocation>,
}

impl Recorder {
    /// # Errors
    /// [`VulkanError::Driver`].
    pub fn new(device: &RawDevice) -> Result<Recorder, VulkanError> {
        let (raw, family) = (&device.raw, device.found.queue_family);
        let failed = |result| VulkanError::of("prepare passes", result);
        let info = vk::CommandPoolCreateInfo::default().queue_family_index(family);
        // SAFETY: the family is the device's, here and below; what is made is destroyed with the recorder.
        let pool = unsafe { raw.create_command_pool(&info, None) }.map_err(failed)?;
        let mut recorder = Recorder {
            pool,
            commands: Vec::new(),
            fences: [vk::Fence::null(); 2],
            marks: [vk::Fence::null(); 2],
            descriptors: Vec::new(),
            stages: Vec::new(),
            returns: None,
        };
        let fences = recorder.fences.iter_mut().chain(&mut recorder.marks);
        let made = fences.into_iter().try_for_each(|place| {
            // SAFETY: as above.
            *place = unsafe { raw.create_fence(&vk::FenceCreateInfo::default(), None) }?;
            Ok(())
        });
        match made {
            Ok(()) => Ok(recorder),
            Err(error) => {
                // SAFETY: it is new. Null fences are destroyed by doing nothing.
                unsafe { recorder.destroy(raw) };
                Err(failed(error))
            }
        }
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
        if part == self.commands.len() {
            let info = vk::CommandBufferAllocateInfo::default()
                .command_pool(self.pool)
                .level(vk::CommandBufferLevel::PRIMARY)
                .command_buffer_count(1);
            // SAFETY: the pool is the device's.
            let made = unsafe { raw.allocate_command_buffers(&info) };
            self.commands.extend(made.map_err(failed)?);
        }
        let commands = self.commands[part];
        let begin = vk::CommandBufferBeginInfo::default()
            .flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
        // SAFETY: as the caller promises.
        unsafe { raw.begin_command_buffer(commands, &begin) }.map_err(failed)?;
        Ok(commands)
    }

    /// # Safety
    /// No pass runs.
    pub unsafe fn destroy(self, raw: &ash::Device) {
        // SAFETY: as the caller promises; command buffers go with their pool.
        unsafe {
            for allocation in self.stages.iter().chain(&self.returns) {
                allocation.destroy(raw);
            }
            for pool in self.descriptors {
                raw.destroy_descriptor_pool(pool, None);
            }
            for fence in self.fences.into_iter().chain(self.marks) {
                raw.destroy_fence(fence, None);
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
