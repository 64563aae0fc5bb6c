//! Memory of a GPU, and of the processor that a GPU sees.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use ash::vk;

use crate::error::VulkanError;
use crate::gpus::GpuKind;
use crate::raw_device::RawDevice;

/// Memory that its owner has to free.
pub(crate) struct Allocation {
    pub handle: vk::Buffer,
    memory: vk::DeviceMemory,
    pub bytes: u64,
    /// What the device counts of it.
    counted: u64,
    /// Where the processor sees it, if it does.
    mapped: Option<NonNull<u8>>,
}

// SAFETY: the pointer is to memory that only this allocation has, and it is used by whoever has the allocation for itself.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

/// What memory is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// What kernels read and write.
    Kernels,
    /// The same, for copies on another queue.
    Uploads,
    /// What passes through to the GPU.
    ToDevice,
    /// What passes through from it.
    FromDevice,
}

impl Allocation {
    pub fn new(device: &RawDevice, bytes: u64, purpose: Use) -> Result<Allocation, VulkanError> {
        // Words are read whole.
        let bytes = bytes.max(4).next_multiple_of(4);
        let usage = match purpose {
            Use::Kernels | Use::Uploads => vk::BufferUsageFlags::STORAGE_BUFFER,
            Use::ToDevice | Use::FromDevice => vk::BufferUsageFlags::empty(),
        };
        let info = vk::BufferCreateInfo::default()
            .size(bytes)
            .usage(usage | vk::BufferUsageFlags::TRANSFER_SRC | vk::BufferUsageFlags::TRANSFER_DST)
            .sharing_mode(vk::SharingMode::EXCLUSIVE);
        let families = device.found.families().into_iter();
        let families: Vec<u32> = families.map(|(family, _)| family).collect();
        let info = match purpose == Use::Uploads && families.len() > 1 {
            true => info
                .sharing_mode(vk::SharingMode::CONCURRENT)
                .queue_family_indices(&families),
            false => info,
        };
        let raw = &device.raw;
        // SAFETY: `info` is whole.
        let handle = unsafe { raw.create_buffer(&info, None) };
        let mut allocation = Allocation {
            handle: handle.map_err(|result| refused(device, bytes, result))?,
            memory: vk::DeviceMemory::null(),
            bytes,
            counted: 0,
            mapped: None,
        };
        match allocation.back(device, purpose) {
            Ok(()) => Ok(allocation),
            Err(error) => {
                // SAFETY: it is new.
                unsafe { allocation.destroy(device) };
                Err(error)
            }
        }
    }

    /// Puts memory behind the buffer.
    fn back(&mut self, device: &RawDevice, purpose: Use) -> Result<(), VulkanError> {
        let raw = &device.raw;
        let failed = |result| refused(device, self.bytes, result);
        // SAFETY: the buffer is the device's.
        let needs = unsafe { raw.get_buffer_memory_requirements(self.handle) };
        let allocate = |place: u32| {
            let allocation = vk::MemoryAllocateInfo::default()
                .allocation_size(needs.size)
                .memory_type_index(place);
            // SAFETY: the type is one of the device's.
            unsafe { raw.allocate_memory(&allocation, None) }
        };
        let found = &device.found;
        let allowed = needs.memory_type_bits;
        let places = memory_types(&found.memory, found.facts.kind, purpose, allowed);
        let none = Err(vk::Result::ERROR_FEATURE_NOT_PRESENT);
        let memory = places
            .into_iter()
            .fold(none, |memory, place| memory.or_else(|_| allocate(place)));
        self.memory = memory.map_err(failed)?;
        // SAFETY: both are new, and the memory is as large as the buffer needs.
        unsafe { raw.bind_buffer_memory(self.handle, self.memory, 0) }.map_err(failed)?;
        match purpose {
            Use::Kernels | Use::Uploads => {
                self.counted = needs.size;
                device.allocated.fetch_add(needs.size, Ordering::Relaxed);
            }
            Use::ToDevice | Use::FromDevice => {
                let flags = vk::MemoryMapFlags::empty();
                // SAFETY: the memory is host-visible by its type, and not mapped yet.
                let mapped = unsafe { raw.map_memory(self.memory, 0, vk::WHOLE_SIZE, flags) };
                self.mapped = NonNull::new(mapped.map_err(failed)?.cast());
            }
        }
        Ok(())
    }

    /// The bytes where the processor sees the buffer, to be written.
    ///
    /// # Panics
    /// When it is not mapped, or ends before.
    pub fn part(&mut self, bytes: Range<u64>) -> &mut [u8] {
        let first = self.mapped(&bytes);
        // SAFETY: as many bytes are mapped, and the GPU reads them only in what is submitted later.
        unsafe { std::slice::from_raw_parts_mut(first, (bytes.end - bytes.start) as usize) }
    }

    /// Copies from where the processor sees the buffer, from byte `at` on.
    ///
    /// # Panics
    /// When it is not mapped, or ends before.
    pub fn copy_to(&self, at: u64, bytes: &mut [u8]) {
        let first = self.mapped(&(at..at + bytes.len() as u64));
        // SAFETY: as many bytes are mapped, and what wrote them has ended.
        unsafe {
            bytes
                .as_mut_ptr()
                .copy_from_nonoverlapping(first, bytes.len())
        };
    }

    fn mapped(&self, bytes: &Range<u64>) -> *mut u8 {
        assert!(bytes.end <= self.bytes, "bytes {bytes:?} of {}", self.bytes);
        let mapped = self.mapped.map_or(std::ptr::null_mut(), NonNull::as_ptr);
        assert!(!mapped.is_null(), "a buffer that the processor sees");
        // SAFETY: as many bytes are mapped.
        unsafe { mapped.add(bytes.start as usize) }
    }

    /// Frees it.
    ///
    /// # Safety
    /// Nothing uses it any more.
    pub unsafe fn destroy(&self, device: &RawDevice) {
        // SAFETY: as the caller promises. Freeing memory also unmaps it, and null is allowed.
        unsafe {
            device.raw.destroy_buffer(self.handle, None);
            device.raw.free_memory(self.memory, None);
        }
        device.allocated.fetch_sub(self.counted, Ordering::Relaxed);
    }
}

fn refused(device: &RawDevice, bytes: u64, result: vk::Result) -> VulkanError {
    match result {
        vk::Result::ERROR_OUT_OF_DEVICE_MEMORY | vk::Result::ERROR_OUT_OF_HOST_MEMORY => {
            VulkanError::OutOfMemory {
                bytes,
                available: device.available_bytes(),
            }
        }
        result => VulkanError::of("set memory aside", result),
    }
}

/// Types of memory, in the order in which they are tried: the first among `allowed` that has what `purpose` asks for, else the first that will do.
/// Where a GPU shares the machine's memory, drivers may call a part of it not the GPU's own (RADV a third). It is as fast, and comes next.
fn memory_types(
    memory: &vk::PhysicalDeviceMemoryProperties,
    kind: GpuKind,
    purpose: Use,
    allowed: u32,
) -> Vec<u32> {
    use vk::MemoryPropertyFlags as Flags;
    let visible = Flags::HOST_VISIBLE | Flags::HOST_COHERENT;
    let (wanted, needed) = match purpose {
        Use::Kernels | Use::Uploads => (Flags::DEVICE_LOCAL, Flags::empty()),
        Use::ToDevice => (visible, visible),
        Use::FromDevice => (visible | Flags::HOST_CACHED, visible),
    };
    let types = memory.memory_types_as_slice();
    let with = |flags: Flags, without: Flags| {
        let mut places = 0..types.len();
        let fits = |place: &usize| {
            let has = types[*place].property_flags;
            allowed & (1 << place) != 0 && has.contains(flags) && !has.intersects(without)
        };
        places.find(fits).map(|place| place as u32)
    };
    let first = with(wanted, Flags::empty()).or_else(|| with(needed, Flags::empty()));
    let for_kernels = matches!(purpose, Use::Kernels | Use::Uploads);
    let next = match for_kernels && kind == GpuKind::Integrated {
        // The latter takes a feature that is not asked for.
        true => with(visible, Flags::DEVICE_LOCAL | Flags::DEVICE_COHERENT_AMD),
        false => None,
    };
    first
        .into_iter()
        .chain(next.filter(|next| first != Some(*next)))
        .collect()
}

#[cfg(test)]
mod tests {
    use vk::MemoryPropertyFlags as Flags;

    use super::*;

    const VISIBLE: Flags =
        Flags::from_raw(Flags::HOST_VISIBLE.as_raw() | Flags::HOST_COHERENT.as_raw());

    fn memory(types: &[(Flags, u32)]) -> vk::PhysicalDeviceMemoryProperties {
        let mut memory = vk::PhysicalDeviceMemoryProperties::default();
        for (place, &(property_flags, heap_index)) in types.iter().enumerate() {
            memory.memory_types[place] = vk::MemoryType {
                property_flags,
                heap_index,
            };
        }
        memory.memory_type_count = types.len() as u32;
        memory
    }

    /// As RADV has them on a GPU in the processor.
    #[test]
    fn what_is_not_called_a_shared_gpus_own_comes_next() {
        let (local, cached) = (Flags::DEVICE_LOCAL, Flags::HOST_CACHED);
        let uncached = Flags::DEVICE_COHERENT_AMD | Flags::DEVICE_UNCACHED_AMD;
        let radv = memory(&[
            (local, 1),
            (VISIBLE | uncached, 0),
            (VISIBLE, 0),
            (local | VISIBLE, 1),
            (VISIBLE | cached, 0),
        ]);
        let all = (1 << 5) - 1;
        let tried = |kind, purpose, allowed| memory_types(&radv, kind, purpose, allowed);
        for purpose in [Use::Kernels, Use::Uploads] {
            assert_eq!(tried(GpuKind::Integrated, purpose, all), [0, 2]);
            assert_eq!(tried(GpuKind::Discrete, purpose, all), [0]);
        }
        assert_eq!(
            tried(GpuKind::Integrated, Use::Kernels, all - 0b101),
            [3, 4]
        );
        assert_eq!(tried(GpuKind::Integrated, Use::Kernels, 0b100), [2]);
        assert_eq!(tried(GpuKind::Integrated, Use::Kernels, 0b11), [0]);
        assert_eq!(tried(GpuKind::Integrated, Use::Kernels, 0), [0_u32; 0]);
        assert_eq!(tried(GpuKind::Integrated, Use::ToDevice, all - 0b10), [2]);
        assert_eq!(tried(GpuKind::Integrated, Use::FromDevice, all), [4]);
        // As most have it there.
        let one = memory(&[(local | VISIBLE | cached, 0)]);
        assert_eq!(
            memory_types(&one, GpuKind::Integrated, Use::Kernels, 1),
            [0]
        );
    }
}
