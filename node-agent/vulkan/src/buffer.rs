//! Memory of a GPU.

use std::ops::Range;

use ash::vk;

use crate::allocation::{Allocation, Use};
use crate::device::Device;
use crate::error::VulkanError;
use crate::plain::{self, Plain};

/// A piece of a GPU's memory. Its bytes are whatever was there before, until they are written.
pub struct Buffer {
    device: Device,
    own: Allocation,
}

/// A part of a buffer, from a multiple of [`Device::alignment`] on.
#[derive(Clone, Copy)]
pub struct Slice<'a> {
    buffer: &'a Buffer,
    offset: u64,
    bytes: u64,
}

impl Device {
    /// Memory for kernels.
    ///
    /// # Errors
    /// [`VulkanError::OutOfMemory`], [`VulkanError::Driver`], [`VulkanError::Hung`] and [`VulkanError::Lost`] once it is.
    pub fn buffer(&self, bytes: u64) -> Result<Buffer, VulkanError> {
        self.set_aside(bytes, Use::Kernels)
    }

    /// Memory for kernels, to which [`Uploads`](crate::Uploads) copy.
    ///
    /// # Errors
    /// As [`buffer`](Self::buffer).
    pub fn upload_buffer(&self, bytes: u64) -> Result<Buffer, VulkanError> {
        self.set_aside(bytes, Use::Uploads)
    }

    /// Memory to which passes copy what the processor then reads.
    ///
    /// # Errors
    /// As [`buffer`](Self::buffer).
    pub fn host_buffer(&self, bytes: u64) -> Result<Buffer, VulkanError> {
        self.set_aside(bytes, Use::FromDevice)
    }

    fn set_aside(&self, bytes: u64, purpose: Use) -> Result<Buffer, VulkanError> {
        let raw = self.raw();
        raw.check()?;
        self.check_buffer(bytes)?;
        Ok(Buffer {
            own: Allocation::new(raw, bytes, purpose)?,
            device: self.clone(),
        })
    }
}

impl Buffer {
    /// Of a [host buffer](Device::host_buffer), once the copies to it have run: what lies from byte `at` on.
    ///
    /// # Panics
    /// When it ends before, or the processor does not see it.
    pub fn read<T: Plain>(&self, at: u64, numbers: &mut [T]) {
        self.own.copy_to(at, plain::bytes_mut(numbers));
    }

    pub(crate) fn handle(&self) -> vk::Buffer {
        self.own.handle
    }

    /// The GPU that it is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes; a multiple of 4.
    pub fn bytes(&self) -> u64 {
        self.own.bytes
    }

    /// All of it.
    pub fn whole(&self) -> Slice<'_> {
        self.slice(0..self.own.bytes)
    }

    /// A part of it.
    ///
    /// # Panics
    /// When it does not begin at a multiple of [`Device::alignment`], or ends behind the buffer.
    pub fn slice(&self, bytes: Range<u64>) -> Slice<'_> {
        assert!(
            bytes.start.is_multiple_of(self.device.alignment()) && bytes.end <= self.own.bytes,
            "bytes {bytes:?} of {}",
            self.own.bytes
        );
        Slice {
            buffer: self,
            offset: bytes.start,
            bytes: bytes.end - bytes.start,
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // What a GPU that hangs may still use stays for as long as the process.
        let raw = self.device.raw();
        if !raw.is_gone() {
            // SAFETY: passes borrow their buffers until they have ended, so nothing uses this one.
            unsafe { self.own.destroy(raw) };
        }
    }
}

impl<'a> Slice<'a> {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A part of it.
    ///
    /// # Panics
    /// As [`Buffer::slice`].
    pub fn part(self, bytes: Range<u64>) -> Slice<'a> {
        assert!(bytes.end <= self.bytes, "bytes {bytes:?} of {}", self.bytes);
        self.buffer
            .slice(self.offset + bytes.start..self.offset + bytes.end)
    }

    /// Its first bytes.
    ///
    /// # Panics
    /// When it has fewer.
    pub fn first(self, bytes: u64) -> Slice<'a> {
        self.part(0..bytes)
    }

    pub(crate) fn handle(&self) -> vk::Buffer {
        self.buffer.own.handle
    }

    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }
}
