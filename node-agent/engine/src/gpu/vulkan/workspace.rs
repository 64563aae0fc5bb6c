//! What the steps of a pass hand to one another on the GPU, in one buffer that grows to the largest pass seen and is then reused.

use std::ops::Range;

use prima_vulkan::{Buffer, Device, Slice, VulkanError};

#[derive(Default)]
pub(super) struct Workspace {
    buffer: Option<Buffer>,
}

/// Where the parts of a workspace lie.
pub(super) struct Layout {
    alignment: u64,
    end: u64,
}

impl Layout {
    pub fn new(device: &Device) -> Layout {
        Layout {
            alignment: device.alignment(),
            end: 0,
        }
    }

    /// Room for so many numbers of 4 bytes.
    pub fn numbers(&mut self, count: usize) -> Range<u64> {
        self.bytes(4 * count as u64)
    }

    /// Room for so many bytes.
    pub fn bytes(&mut self, count: u64) -> Range<u64> {
        let first = self.end.next_multiple_of(self.alignment);
        self.end = first + count;
        first..self.end
    }

    pub fn end(&self) -> u64 {
        self.end
    }
}

impl Workspace {
    /// The buffer, with room for what was laid out.
    pub fn with_room(&mut self, device: &Device, layout: &Layout) -> Result<&Buffer, VulkanError> {
        let fits = |buffer: &Buffer| buffer.bytes() >= layout.end;
        match self.buffer.take().filter(fits) {
            Some(buffer) => Ok(self.buffer.insert(buffer)),
            // The old one is freed before.
            None => Ok(self.buffer.insert(device.buffer(layout.end)?)),
        }
    }
}

/// Places in a buffer as slices of it.
pub(super) fn slice<'a>(buffer: &'a Buffer, place: &Range<u64>) -> Slice<'a> {
    buffer.slice(place.clone())
}
