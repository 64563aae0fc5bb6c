//! Vulkan's loader and the GPUs that it finds.

use std::ffi::CStr;
use std::sync::{Arc, Mutex, PoisonError};

use ash::vk;

use crate::error::VulkanError;
use crate::kernels::{BINDINGS, THREADS};

/// The loader, and what it found. Clones share it.
#[derive(Clone)]
pub struct Gpus {
    shared: Arc<Shared>,
}

struct Shared {
    instance: ash::Instance,
    found: Vec<Found>,
    /// Keeps the library open.
    _entry: ash::Entry,
}

/// One that Vulkan's drivers list.
#[derive(Clone)]
pub(crate) struct Found {
    pub physical: vk::PhysicalDevice,
    pub facts: Facts,
    pub limits: vk::PhysicalDeviceLimits,
    /// The most bytes of a piece of memory.
    pub most_allocated_bytes: u64,
    pub memory: vk::PhysicalDeviceMemoryProperties,
    pub queue_family: u32,
    /// Of the queue on which weights are copied while kernels run, and which of the family's it is.
    pub upload_queue: (u32, u32),
    /// How many bits of a time count that both queues tell; 0: there is none.
    pub timestamp_bits: u32,
    /// Whether it tells how much memory is left.
    pub tells_budget: bool,
    pub abilities: Abilities,
}

/// What some kernels take that not every GPU has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Abilities {
    /// Dot products of four bytes (VK_KHR_shader_integer_dot_product), and subgroups whose threads exchange numbers.
    pub byte_dot: bool,
    /// Units that multiply matrices of 16 x 16 (VK_KHR_cooperative_matrix): F16, summed in F32, in full subgroups of 32. NVIDIA's only: naga
    /// does not say which accesses the barriers of Vulkan's memory model are about, and no other GPU was tried.
    pub matrix_units: bool,
}

/// What a GPU says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    pub name: String,
    /// Vendor and device on the PCI bus.
    pub pci: (u32, u32),
    /// Where it is on that bus, as Linux writes it (`0000:01:00.0`), if its driver says so (VK_EXT_pci_bus_info).
    pub pci_address: Option<String>,
    pub kind: GpuKind,
    /// Bytes of memory that are its own, or that it shares with the processor.
    pub total_bytes: u64,
    /// Why our kernels do not run on it, if so.
    pub unfit: Option<String>,
}

/// How a GPU lies beside the processor. In the order in which they are preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GpuKind {
    /// With memory of its own.
    Discrete,
    /// In the processor, whose memory it shares.
    Integrated,
    /// Of a virtual machine.
    Virtual,
    /// A driver that computes on the processor, such as lavapipe.
    Software,
}

impl Gpus {
    /// Opens the loader and asks for all GPUs that can compute; once they are found, always the same, for as long as the process runs.
    ///
    /// # Errors
    /// [`VulkanError::NoLoader`] and [`VulkanError::NoDriver`] where there is nothing to use, [`VulkanError::Driver`].
    pub fn find() -> Result<Gpus, VulkanError> {
        // Closing the loader unloads the drivers. NVIDIA's leaves what threads call when they end, which is then gone (seen: a crash), and
        // cannot be loaded again and again (seen: no driver, after some tens of times).
        static FOUND: Mutex<Option<Gpus>> = Mutex::new(None);
        let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
        match &*found {
            Some(gpus) => Ok(gpus.clone()),
            None => {
                let gpus = Self::look_for()?;
                // A driver may come later.
                if !gpus.shared.found.is_empty() {
                    *found = Some(gpus.clone());
                }
                Ok(gpus)
            }
        }
    }

    fn look_for() -> Result<Gpus, VulkanError> {
        // SAFETY: the loader is Vulkan's own, found under its usual name; loading it has no further conditions.
        let entry =
            unsafe { ash::Entry::load() }.map_err(|source| VulkanError::NoLoader { source })?;
        let application = vk::ApplicationInfo::default()
            .application_name(c"prima")
            .api_version(vk::API_VERSION_1_3);
        let info = vk::InstanceCreateInfo::default().application_info(&application);
        // SAFETY: `info` and what it points to outlive the call.
        let instance =
            unsafe { entry.create_instance(&info, None) }.map_err(|source| match source {
                vk::Result::ERROR_INCOMPATIBLE_DRIVER => VulkanError::NoDriver { source },
                source => VulkanError::of("make an instance of Vulkan", source),
            })?;
        // SAFETY: the instance is alive.
        let physical = unsafe { instance.enumerate_physical_devices() };
        let found = physical.map(|all| {
            let mut found: Vec<Found> = all
                .into_iter()
                .filter_map(|physical| Found::new(&entry, &instance, physical))
                .collect();
            // Stable: drivers' own order within a kind.
            found.sort_by_key(|found| found.facts.kind);
            found
        });
        let (found, error) = match found {
            Ok(found) => (found, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        let gpus = Gpus {
            shared: Arc::new(Shared {
                instance,
                found,
                _entry: entry,
            }),
        };
        match error {
            None => Ok(gpus),
            Some(vk::Result::ERROR_INITIALIZATION_FAILED) => Err(VulkanError::NoDriver {
                source: vk::Result::ERROR_INITIALIZATION_FAILED,
            }),
            Some(error) => Err(VulkanError::of("list its GPUs", error)),
        }
    }

    /// What each says of itself, the best first.
    pub fn facts(&self) -> impl Iterator<Item = &Facts> {
        self.shared.found.iter().map(|found| &found.facts)
    }

    pub(crate) fn instance(&self) -> &ash::Instance {
        &self.shared.instance
    }

    pub(crate) fn found(&self, index: usize) -> Option<&Found> {
        self.shared.found.get(index)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: devices hold the `Gpus` that they are of, so none is left.
        unsafe { self.instance.destroy_instance(None) };
    }
}

impl Found {
    /// The families of queues that are used, one or two, and how many queues of each.
    pub fn families(&self) -> Vec<(u32, usize)> {
        let (family, place) = self.upload_queue;
        match family == self.queue_family {
            true => vec![(family, place as usize + 1)],
            false => vec![(self.queue_family, 1), (family, 1)],
        }
    }

    /// `None` if it cannot compute.
    fn new(
        entry: &ash::Entry,
        instance: &ash::Instance,
        physical: vk::PhysicalDevice,
    ) -> Option<Found> {
        // SAFETY: `physical` is the instance's, here and below.
        let properties = unsafe { instance.get_physical_device_properties(physical) };
        // SAFETY: as above.
        let families = unsafe { instance.get_physical_device_queue_family_properties(physical) };
        let computes = |family: &vk::QueueFamilyProperties| {
            family.queue_count > 0 && family.queue_flags.contains(vk::QueueFlags::COMPUTE)
        };
        // The first, which on most GPUs draws the desktop, too. What draws waits for a part of a pass at most. On families that only compute, AMD's GPUs
        // were measured to take up to 5 % longer for a token (RADV; ggml-org/llama.cpp#20551), and what was measured of prima on NVIDIA's was on this one.
        let queue_family = families.iter().position(computes)? as u32;
        // SAFETY: as above.
        let memory = unsafe { instance.get_physical_device_memory_properties(physical) };
        // SAFETY: as above. A driver that cannot say has no extensions.
        let extensions = unsafe { instance.enumerate_device_extension_properties(physical) };
        let extensions = extensions.unwrap_or_default();
        let has = |name: &CStr| {
            let mut names = extensions.iter();
            names.any(|extension| extension.extension_name_as_c_str() == Ok(name))
        };
        let name = properties.device_name_as_c_str().unwrap_or(c"GPU");
        let unfit = unfit(properties.api_version, &properties.limits);
        let upload_queue = upload_queue(&families, queue_family);
        let timestamp_bits = |family: u32| families[family as usize].timestamp_valid_bits;
        let kind = match properties.device_type {
            vk::PhysicalDeviceType::DISCRETE_GPU => GpuKind::Discrete,
            vk::PhysicalDeviceType::INTEGRATED_GPU => GpuKind::Integrated,
            vk::PhysicalDeviceType::CPU => GpuKind::Software,
            _ => GpuKind::Virtual,
        };
        Some(Found {
            physical,
            facts: Facts {
                name: CStr::to_string_lossy(name).into_owned(),
                pci: (properties.vendor_id, properties.device_id),
                // Asking takes Vulkan 1.1.
                pci_address: (unfit.is_none() && has(ash::ext::pci_bus_info::NAME))
                    .then(|| pci_address(instance, physical)),
                kind,
                total_bytes: local_heap(&memory).map_or(0, |(_, heap)| heap.size),
                unfit: unfit.clone(),
            },
            limits: properties.limits,
            most_allocated_bytes: match unfit {
                None => most_allocated_bytes(instance, physical),
                // Asking takes Vulkan 1.1.
                Some(_) => 0,
            },
            memory,
            queue_family,
            upload_queue,
            timestamp_bits: timestamp_bits(queue_family).min(timestamp_bits(upload_queue.0)),
            // In software, it is what the machine has left, of which others take and leave from one moment to the next. New drivers tell it, old
            // ones do not.
            tells_budget: kind != GpuKind::Software && has(ash::ext::memory_budget::NAME),
            abilities: match unfit {
                None => abilities(entry, instance, physical, has),
                // Asking takes Vulkan 1.1.
                Some(_) => Abilities::default(),
            },
        })
    }
}

/// The queue that copies beside the kernels, which run on the first of `kernels`: of a family that only copies, else of another that computes, else
/// the second of the same, else the same.
fn upload_queue(families: &[vk::QueueFamilyProperties], kernels: u32) -> (u32, u32) {
    use vk::QueueFlags as Flags;
    let others = || {
        let all = families.iter().zip(0_u32..);
        all.filter(|(family, number)| family.queue_count > 0 && *number != kernels)
    };
    let not_only = Flags::COMPUTE
        | Flags::GRAPHICS
        | Flags::VIDEO_DECODE_KHR
        | Flags::VIDEO_ENCODE_KHR
        | Flags::PROTECTED;
    let only_copies = |flags: Flags| flags.contains(Flags::TRANSFER) && !flags.intersects(not_only);
    let copies = others().find(|(family, _)| only_copies(family.queue_flags));
    let computes = || others().find(|(family, _)| family.queue_flags.contains(Flags::COMPUTE));
    match copies.or_else(computes) {
        Some((_, number)) => (number, 0),
        None => {
            let count = families[kernels as usize].queue_count;
            (kernels, u32::from(count > 1))
        }
    }
}

/// Why a GPU cannot run our kernels: its driver's version of Vulkan, and the buffers and the threads that a kernel may have there. (The memory that
/// threads share, every GPU has.)
fn unfit(version: u32, limits: &vk::PhysicalDeviceLimits) -> Option<String> {
    let (major, minor) = (
        vk::api_version_major(version),
        vk::api_version_minor(version),
    );
    if version < vk::API_VERSION_1_1 {
        return Some(format!(
            "its driver has Vulkan {major}.{minor}; a driver with 1.1 or later is needed"
        ));
    }
    let buffers = limits.max_per_stage_descriptor_storage_buffers;
    let [along, ..] = limits.max_compute_work_group_size;
    let threads = limits.max_compute_work_group_invocations.min(along);
    for (found, taken, what) in [
        (buffers, BINDINGS, "buffers"),
        (threads, THREADS, "threads in a group"),
    ] {
        if found < taken {
            return Some(format!(
                "its driver gives a kernel {found} {what}, and prima's kernels take {taken}"
            ));
        }
    }
    None
}

fn pci_address(instance: &ash::Instance, physical: vk::PhysicalDevice) -> String {
    let mut bus = vk::PhysicalDevicePCIBusInfoPropertiesEXT::default();
    let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut bus);
    // SAFETY: the device is the instance's and of Vulkan 1.1 at least; the structure is of an extension that it has.
    unsafe { instance.get_physical_device_properties2(physical, &mut properties) };
    format!(
        "{:04x}:{:02x}:{:02x}.{:x}",
        bus.pci_domain, bus.pci_bus, bus.pci_device, bus.pci_function
    )
}

fn most_allocated_bytes(instance: &ash::Instance, physical: vk::PhysicalDevice) -> u64 {
    let mut maintenance = vk::PhysicalDeviceMaintenance3Properties::default();
    let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut maintenance);
    // SAFETY: the device is the instance's and of Vulkan 1.1 at least, which has the structure.
    unsafe { instance.get_physical_device_properties2(physical, &mut properties) };
    maintenance.max_memory_allocation_size
}

/// What the driver says of the GPU's abilities.
fn abilities(
    entry: &ash::Entry,
    instance: &ash::Instance,
    physical: vk::PhysicalDevice,
    has: impl Fn(&CStr) -> bool,
) -> Abilities {
    let (dot, units) = (
        has(ash::khr::shader_integer_dot_product::NAME),
        has(ash::khr::cooperative_matrix::NAME)
            && has(ash::khr::shader_float16_int8::NAME)
            && has(ash::khr::vulkan_memory_model::NAME),
    );
    let mut byte_dot = vk::PhysicalDeviceShaderIntegerDotProductFeatures::default();
    let mut matrices = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default();
    let mut float16 = vk::PhysicalDeviceShaderFloat16Int8Features::default();
    let mut storage = vk::PhysicalDevice16BitStorageFeatures::default();
    let mut memory_model = vk::PhysicalDeviceVulkanMemoryModelFeatures::default();
    let mut features = vk::PhysicalDeviceFeatures2::default().push_next(&mut storage);
    if dot {
        features = features.push_next(&mut byte_dot);
    }
    if units {
        features = features
            .push_next(&mut matrices)
            .push_next(&mut float16)
            .push_next(&mut memory_model);
    }
    let mut subgroup = vk::PhysicalDeviceSubgroupProperties::default();
    let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut subgroup);
    // SAFETY: the device is the instance's and of Vulkan 1.1 at least; what is asked beyond that are structures of its extensions.
    unsafe {
        instance.get_physical_device_features2(physical, &mut features);
        instance.get_physical_device_properties2(physical, &mut properties);
    }
    let limits = properties.properties.limits;
    let roomy = limits.max_compute_shared_memory_size >= MATRIX_UNITS_SHARED;
    let halves = storage.storage_buffer16_bit_access
        & storage.uniform_and_storage_buffer16_bit_access
        & float16.shader_float16;
    let units = units
        && roomy
        && properties.properties.vendor_id == NVIDIA
        && subgroup.subgroup_size == 32
        && halves & matrices.cooperative_matrix & memory_model.vulkan_memory_model == vk::TRUE
        && has_shape(entry, instance, physical);
    Abilities {
        byte_dot: byte_dot.shader_integer_dot_product == vk::TRUE
            && (subgroup.supported_stages).contains(vk::ShaderStageFlags::COMPUTE)
            && (subgroup.supported_operations).contains(vk::SubgroupFeatureFlags::SHUFFLE),
        matrix_units: units,
    }
}

/// Its number on the PCI bus.
const NVIDIA: u32 = 0x10de;

/// Bytes of shared memory of `shaders/multiply_units.wgsl`.
const MATRIX_UNITS_SHARED: u32 = 2 * 128 * 10 * 8 + 8 * 256 * 4;

/// Whether its units multiply 16 x 16 by 16 x 16 numbers of F16 and sum in F32.
fn has_shape(entry: &ash::Entry, instance: &ash::Instance, physical: vk::PhysicalDevice) -> bool {
    let units = ash::khr::cooperative_matrix::Instance::new(entry, instance);
    // SAFETY: the device has the extension.
    let shapes = unsafe { units.get_physical_device_cooperative_matrix_properties(physical) };
    shapes.unwrap_or_default().iter().any(|shape| {
        let (half, single) = (vk::ComponentTypeKHR::FLOAT16, vk::ComponentTypeKHR::FLOAT32);
        (shape.m_size, shape.n_size, shape.k_size) == (16, 16, 16)
            && (shape.a_type, shape.b_type) == (half, half)
            && (shape.c_type, shape.result_type) == (single, single)
            && shape.scope == vk::ScopeKHR::SUBGROUP
    })
}

/// The largest heap of the device's own memory, and its place.
pub(crate) fn local_heap(
    memory: &vk::PhysicalDeviceMemoryProperties,
) -> Option<(usize, vk::MemoryHeap)> {
    let heaps = memory.memory_heaps_as_slice().iter().copied().enumerate();
    heaps
        .filter(|(_, heap)| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL))
        .max_by_key(|(_, heap)| heap.size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_copied_on_a_queue_of_their_own() {
        use vk::QueueFlags as Flags;
        let family = |flags, count| {
            vk::QueueFamilyProperties::default()
                .queue_flags(flags)
                .queue_count(count)
        };
        let all = family(Flags::GRAPHICS | Flags::COMPUTE | Flags::TRANSFER, 1);
        let computes = family(Flags::COMPUTE | Flags::TRANSFER, 4);
        let copies = family(Flags::TRANSFER | Flags::SPARSE_BINDING, 2);
        let video = family(Flags::VIDEO_DECODE_KHR | Flags::TRANSFER, 1);
        let several = family(all.queue_flags, 16);
        assert_eq!(upload_queue(&[all, video, computes, copies], 0), (3, 0));
        assert_eq!(upload_queue(&[all, video, computes], 0), (2, 0));
        assert_eq!(upload_queue(&[several, video], 0), (0, 1));
        assert_eq!(upload_queue(&[all], 0), (0, 0));
    }

    #[test]
    fn a_gpu_that_cannot_be_used_says_why() {
        let least = vk::PhysicalDeviceLimits::default()
            .max_per_stage_descriptor_storage_buffers(BINDINGS)
            .max_compute_work_group_invocations(THREADS)
            .max_compute_work_group_size([THREADS, 128, 64]);
        assert_eq!(unfit(vk::API_VERSION_1_1, &least), None);
        let many = least
            .max_per_stage_descriptor_storage_buffers(500_000)
            .max_compute_work_group_invocations(1024);
        assert_eq!(unfit(vk::API_VERSION_1_3, &many), None);
        let old = unfit(vk::API_VERSION_1_0, &least).unwrap();
        assert!(old.contains("Vulkan 1.0;"), "{old}");
        for (limits, told, taken) in [
            (
                least.max_per_stage_descriptor_storage_buffers(4),
                "4 buffers",
                BINDINGS,
            ),
            (
                least.max_compute_work_group_invocations(128),
                "128 threads",
                THREADS,
            ),
            (
                least.max_compute_work_group_size([128; 3]),
                "128 threads",
                THREADS,
            ),
        ] {
            let few = unfit(vk::API_VERSION_1_3, &limits).unwrap();
            assert!(
                few.contains(told) && few.contains(&taken.to_string()),
                "{few}"
            );
        }
    }
}
