//! Copies to the GPU that go on while a pass computes: on a queue of their own where the GPU has one.
//!
//! Decides: through how much of the processor's memory they go. While the GPU copies from one piece, the next is filled.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use ash::vk;

use crate::allocation::{Allocation, Use};
use crate::buffer::Slice;
use crate::device::Device;
use crate::error::VulkanError;
use crate::plain::{self, Plain};
use crate::timeline::{Running, Work};

/// Pieces of memory that copies pass through: some are filled while others are copied from.
const PIECES: usize = 12;
/// Bytes of one. Long enough for the link to reach its full rate, short enough that it soon has the first of a matrix.
const PIECE_BYTES: u64 = 2 << 20;
/// Bytes of the processor's memory that [`Uploads`] take. The planner counts as many.
pub const UPLOAD_BYTES: u64 = PIECES as u64 * PIECE_BYTES;

/// What copies beside passes are made with. Kept from pass to pass.
pub struct Uploads {
    device: Device,
    pool: vk::CommandPool,
    pieces: Vec<Piece>,
    /// The piece that is filled next.
    next: usize,
    /// What notes when pieces are filled and copied.
    timeline: Option<Arc<Running>>,
}

struct Piece {
    memory: Allocation,
    commands: vk::CommandBuffer,
    copied: vk::Fence,
    state: State,
    /// What the timeline knows it by.
    noted: Option<u32>,
}

#[derive(Clone, Copy)]
enum State {
    Free,
    /// So many bytes are.
    Filling(u64),
    Copying,
}

/// Copies that go on. Buffers that they write are borrowed until they have ended.
pub struct Uploading<'a> {
    uploads: &'a mut Uploads,
    bytes: u64,
    buffers: PhantomData<Slice<'a>>,
}

impl Device {
    /// # Errors
    /// [`VulkanError::OutOfMemory`], [`VulkanError::Driver`].
    pub fn uploads(&self) -> Result<Uploads, VulkanError> {
        let failed = |result| VulkanError::of("prepare copies", result);
        let raw = self.raw();
        raw.check()?;
        let info = vk::CommandPoolCreateInfo::default()
            .queue_family_index(raw.found.upload_queue.0)
            .flags(vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER);
        // SAFETY: the family is the device's; what is made, here and below, is destroyed with the uploads.
        let pool = unsafe { raw.raw.create_command_pool(&info, None) }.map_err(failed)?;
        let mut uploads = Uploads {
            device: self.clone(),
            pool,
            pieces: Vec::new(),
            next: 0,
            timeline: None,
        };
        for _ in 0..PIECES {
            let info = vk::CommandBufferAllocateInfo::default()
                .command_pool(pool)
                .level(vk::CommandBufferLevel::PRIMARY)
                .command_buffer_count(1);
            // SAFETY: as above.
            let commands = unsafe { raw.raw.allocate_command_buffers(&info) }.map_err(failed)?;
            let memory = Allocation::new(raw, PIECE_BYTES, Use::ToDevice)?;
            // SAFETY: as above.
            match unsafe { raw.raw.create_fence(&vk::FenceCreateInfo::default(), None) } {
                Ok(copied) => uploads.pieces.push(Piece {
                    memory,
                    commands: commands[0],
                    copied,
                    state: State::Free,
                    noted: None,
                }),
                Err(result) => {
                    // SAFETY: it is new.
                    unsafe { memory.destroy(raw) };
                    return Err(failed(result));
                }
            }
        }
        Ok(uploads)
    }
}

impl Uploads {
    /// Copies may begin.
    pub fn begin(&mut self) -> Uploading<'_> {
        self.timeline = self.device.raw().timelines.running();
        Uploading {
            uploads: self,
            bytes: 0,
            buffers: PhantomData,
        }
    }

    /// Copies at most `most` bytes, as `fill` writes them, to this place in a buffer. Returns how many.
    fn copy(
        &mut self,
        (to, offset): (vk::Buffer, u64),
        most: u64,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<u64, VulkanError> {
        self.wait_for(self.next)?;
        let raw = &self.device.raw().raw;
        let piece = &mut self.pieces[self.next];
        let at = match piece.state {
            State::Filling(at) => at,
            State::Free | State::Copying => {
                let begin = vk::CommandBufferBeginInfo::default()
                    .flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
                // SAFETY: what was recorded there before has run.
                let begun = unsafe { raw.begin_command_buffer(piece.commands, &begin) };
                begun.map_err(|result| VulkanError::of("begin a copy", result))?;
                piece.state = State::Filling(0);
                let running = self.timeline.as_ref();
                piece.noted = running.and_then(|running| running.begins(raw, piece.commands));
                0
            }
        };
        let bytes = most.min(piece.memory.bytes - at);
        let begun = self.timeline.as_ref().map(|_| Instant::now());
        fill(piece.memory.part(at..at + bytes));
        if let (Some(running), Some(begun)) = (&self.timeline, begun) {
            running.filled(begun);
        }
        let region = [vk::BufferCopy::default()
            .src_offset(at)
            .dst_offset(offset)
            .size(bytes)];
        // SAFETY: both ranges are within their buffers, which live until the copies have ended.
        unsafe { raw.cmd_copy_buffer(piece.commands, piece.memory.handle, to, &region) };
        let end = (at + bytes).next_multiple_of(16);
        piece.state = State::Filling(end);
        if end >= piece.memory.bytes {
            self.submit()?;
        }
        Ok(bytes)
    }

    /// Hands the piece that is being filled to the GPU, if there is one.
    fn submit(&mut self) -> Result<(), VulkanError> {
        let device = self.device.raw();
        let piece = &mut self.pieces[self.next];
        if !matches!(piece.state, State::Filling(_)) {
            return Ok(());
        }
        if let (Some(running), Some(noted)) = (&self.timeline, piece.noted.take()) {
            running.ends(&device.raw, piece.commands, noted, Work::Copy);
        }
        // SAFETY: what the commands use lives until they have run: whoever uploads waits. The fence is not in use.
        let submitted = unsafe {
            let raw = &device.raw;
            raw.end_command_buffer(piece.commands)
                .and_then(|()| raw.reset_fences(&[piece.copied]))
                .and_then(|()| device.submit(device.upload_queue, &[piece.commands], piece.copied))
        };
        piece.state = match submitted {
            Ok(()) => State::Copying,
            Err(_) => State::Free,
        };
        self.next = (self.next + 1) % self.pieces.len();
        submitted.map_err(|result| self.device.failed("copy weights", result))
    }

    /// Waits until the piece may be filled.
    fn wait_for(&mut self, piece: usize) -> Result<(), VulkanError> {
        let State::Copying = self.pieces[piece].state else {
            return Ok(());
        };
        let device = self.device.raw();
        device.check()?;
        let waited = device.wait(self.pieces[piece].copied, self.device.patience());
        waited.map_err(|result| self.device.failed("copy weights", result))?;
        self.pieces[piece].state = State::Free;
        Ok(())
    }
}

impl<'a> Uploading<'a> {
    /// Copies to these bytes of `to` what `fill` writes, part by part: it is given how many were written before, and those to write. What is
    /// there now must not be in use any more.
    ///
    /// # Errors
    /// [`VulkanError::Hung`], [`VulkanError::Lost`], [`VulkanError::Driver`].
    ///
    /// # Panics
    /// When `to` ends before.
    pub fn write(
        &mut self,
        to: Slice<'a>,
        bytes: Range<u64>,
        mut fill: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), VulkanError> {
        assert!(bytes.end <= to.bytes(), "bytes {bytes:?} of {}", to.bytes());
        let (all, mut done) = (bytes.end - bytes.start, 0);
        while done < all {
            let place = (to.handle(), to.offset() + bytes.start + done);
            let fill = |bytes: &mut [u8]| fill(done as usize, bytes);
            done += self.uploads.copy(place, all - done, fill)?;
        }
        self.bytes += all;
        Ok(())
    }

    /// Copies `numbers` to the beginning of `to`.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    ///
    /// # Panics
    /// As there.
    pub fn write_all<T: Plain>(&mut self, to: Slice<'a>, numbers: &[T]) -> Result<(), VulkanError> {
        let bytes = plain::bytes(numbers);
        self.write(to, 0..bytes.len() as u64, |done, out| {
            out.copy_from_slice(&bytes[done..][..out.len()]);
        })
    }

    /// Waits until all is there. Kernels that read it are recorded behind a barrier, in parts of a pass that are handed over later.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn wait(&mut self) -> Result<(), VulkanError> {
        self.uploads.submit()?;
        (0..self.uploads.pieces.len()).try_for_each(|piece| self.uploads.wait_for(piece))
    }

    /// Bytes that were written so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Uploading<'_> {
    fn drop(&mut self) {
        let device = self.uploads.device.raw();
        if !device.is_gone() && self.wait().is_err() {
            // What was not copied yet may still be.
            self.uploads.device.raw().give_up_lost();
        }
    }
}

impl Drop for Uploads {
    fn drop(&mut self) {
        let device = self.device.raw();
        if device.is_gone() {
            return;
        }
        // SAFETY: whoever uploaded has waited, so nothing uses them; command buffers go with their pool.
        unsafe {
            for piece in &self.pieces {
                device.raw.destroy_fence(piece.copied, None);
                piece.memory.destroy(device);
            }
            device.raw.destroy_command_pool(self.pool, None);
        }
    }
}
