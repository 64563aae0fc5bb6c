//! A pass: copies and kernels, recorded in order. The GPU begins with the first while more are recorded; the host waits once, at the end, and
//! before where it asks to.

use std::marker::PhantomData;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use ash::vk;

use crate::allocation::{Allocation, Use};
use crate::buffer::{Buffer, Slice};
use crate::device::Device;
use crate::error::VulkanError;
use crate::kernels::{BINDINGS, Kernel, PARAMS_BYTES};
use crate::plain::{self, Plain};
use crate::raw_device::RawDevice;
use crate::recorder::{Part, Recorder, SETS};
use crate::timeline::{Running, Work};

/// Every device takes as many groups in each dimension.
pub(crate) const MOST_GROUPS: u32 = 65_535;

/// Kernels of a part of a pass: so few that recording a part takes no longer than running the one before.
const PART: u32 = 48;
/// Kernels of a pass's first part: the GPU has nothing to do until it is recorded.
const FIRST_PART: u32 = 8;

/// What is recorded of a part.
#[derive(Clone, Copy, Default)]
struct Recorded {
    kernels: u32,
    flop: u64,
}

/// How often it is looked whether a part has ended, while a GPU hangs. So that is known after an eighth more than it may take.
const LOOKS: u32 = 8;

/// Bytes that are copied to the GPU in one pass.
const PIECE: usize = 16 << 20;

/// Bytes of a piece of memory that copies to the GPU pass through.
const STAGE: u64 = 4 << 20;

/// A pass that is being recorded. Buffers that it uses are borrowed until it has run.
pub struct Pass<'a> {
    device: &'a Device,
    recorder: MutexGuard<'a, Option<Recorder>>,
    commands: vk::CommandBuffer,
    /// Parts handed to the GPU, and how many of them were waited for.
    submitted: usize,
    waited_for: usize,
    /// Kernels started.
    started: u32,
    /// Of the part that is being recorded.
    recorded: Recorded,
    /// How many parts were handed over when each mark was set last.
    marks: [usize; 2],
    /// The stage that is being filled, and up to where.
    stage: (usize, u64),
    /// What notes when its parts run, and what it knows the one by that is being recorded.
    timeline: (Option<Arc<Running>>, Option<u32>),
    buffers: PhantomData<Slice<'a>>,
}

impl Device {
    /// Begins a pass. Waits for the one before.
    ///
    /// # Errors
    /// [`VulkanError::Hung`] and [`VulkanError::Lost`] once it is, [`VulkanError::Driver`].
    pub fn pass(&self) -> Result<Pass<'_>, VulkanError> {
        Pass::begin(self, self.recorder()?)
    }

    /// Copies `numbers` to the beginning of `to`, and waits until they are there.
    ///
    /// # Errors
    /// Those of [`Pass::finish`].
    ///
    /// # Panics
    /// When there is no room.
    pub fn upload<T: Plain>(&self, to: Slice<'_>, numbers: &[T]) -> Result<(), VulkanError> {
        let bytes = plain::bytes(numbers);
        for (piece, at) in bytes.chunks(PIECE).zip((0..).step_by(PIECE)) {
            let mut pass = self.pass()?;
            pass.write(to.part(at..at + piece.len() as u64), piece)?;
            pass.finish()?;
        }
        Ok(())
    }
}

impl Recorded {
    /// Whether a kernel with so much to do begins a new part. One has at most `most`, where no kernel alone has more.
    fn is_full(self, is_first: bool, flop: u64, most: u64) -> bool {
        let kernels = if is_first { FIRST_PART } else { PART };
        let both_long = self.flop > 0 && flop > 0;
        self.kernels >= kernels || both_long && self.flop.saturating_add(flop) > most
    }

    fn add(&mut self, flop: u64) {
        self.kernels += 1;
        self.flop = self.flop.saturating_add(flop);
    }
}

impl<'a> Pass<'a> {
    fn begin(
        device: &'a Device,
        mut recorder: MutexGuard<'a, Option<Recorder>>,
    ) -> Result<Pass<'a>, VulkanError> {
        let failed = |result| VulkanError::of("begin a pass", result);
        let own = recorder.as_mut().ok_or(VulkanError::Lost)?;
        let raw = &device.raw().raw;
        // SAFETY: the pass before has ended, or was never submitted.
        let commands = unsafe {
            raw.reset_command_pool(own.pool, vk::CommandPoolResetFlags::empty())
                .map_err(failed)?;
            for pool in &own.descriptors {
                let flags = vk::DescriptorPoolResetFlags::empty();
                raw.reset_descriptor_pool(*pool, flags).map_err(failed)?;
            }
            own.begin(raw, 0)?
        };
        let mut pass = Pass {
            device,
            recorder,
            commands,
            submitted: 0,
            waited_for: 0,
            started: 0,
            recorded: Recorded::default(),
            marks: [0; 2],
            stage: (0, 0),
            timeline: (device.raw().timelines.running(), None),
            buffers: PhantomData,
        };
        pass.note_handed_over();
        pass.note_begin();
        Ok(pass)
    }

    /// Where somebody asks, notes how many parts were handed over and not waited for.
    fn note_handed_over(&self) {
        if let (Some(running), _) = &self.timeline {
            running.handed_over(self.submitted - self.waited_for);
        }
    }

    /// Where somebody asks, notes that a part begins.
    fn note_begin(&mut self) {
        if let (Some(running), part) = &mut self.timeline {
            *part = running.begins(&self.device.raw().raw, self.commands);
        }
    }

    /// Notes that it ends.
    fn note_end(&mut self) {
        if let (Some(running), part) = &mut self.timeline
            && let Some(part) = part.take()
        {
            running.ends(&self.device.raw().raw, self.commands, part, Work::Compute);
        }
    }

    pub(crate) fn device(&self) -> &'a Device {
        self.device
    }

    /// What comes next sees what came before. Without it, steps may run at once.
    pub fn barrier(&mut self) {
        use vk::{AccessFlags as Access, PipelineStageFlags as Stage};
        let stages = Stage::COMPUTE_SHADER | Stage::TRANSFER;
        let written = Access::SHADER_WRITE | Access::TRANSFER_WRITE;
        let read = Access::SHADER_READ | Access::TRANSFER_READ;
        self.wait_for((stages, written), (stages, written | read));
    }

    fn wait_for(
        &mut self,
        (from, written): (vk::PipelineStageFlags, vk::AccessFlags),
        (to, used): (vk::PipelineStageFlags, vk::AccessFlags),
    ) {
        let barrier = [vk::MemoryBarrier::default()
            .src_access_mask(written)
            .dst_access_mask(used)];
        let flags = vk::DependencyFlags::empty();
        let raw = &self.device.raw().raw;
        // SAFETY: the command buffer is being recorded, here and below.
        unsafe { raw.cmd_pipeline_barrier(self.commands, from, to, flags, &barrier, &[], &[]) };
    }

    /// Copies `numbers` to the beginning of `to`.
    ///
    /// # Errors
    /// [`VulkanError::OutOfMemory`].
    ///
    /// # Panics
    /// When there is no room.
    pub fn write<T: Plain>(&mut self, to: Slice<'a>, numbers: &[T]) -> Result<(), VulkanError> {
        let bytes = plain::bytes(numbers);
        let len = bytes.len() as u64;
        assert!(len <= to.bytes(), "{len} bytes into {}", to.bytes());
        if bytes.is_empty() {
            return Ok(());
        }
        let recorder = self.recorder.as_mut().ok_or(VulkanError::Lost)?;
        let (mut place, mut offset) = self.stage;
        while recorder
            .stages
            .get(place)
            .is_some_and(|stage| offset + len > stage.bytes)
        {
            (place, offset) = (place + 1, 0);
        }
        if place == recorder.stages.len() {
            let stage = Allocation::new(self.device.raw(), len.max(STAGE), Use::ToDevice)?;
            recorder.stages.push(stage);
        }
        let stage = &mut recorder.stages[place];
        stage.part(offset..offset + len).copy_from_slice(bytes);
        let from = stage.handle;
        self.stage = (place, (offset + len).next_multiple_of(16).min(stage.bytes));
        self.copy_raw((from, offset), (to.handle(), to.offset()), len);
        Ok(())
    }

    /// Copies all of `from` to the beginning of `to`.
    ///
    /// # Panics
    /// When there is no room.
    pub fn copy(&mut self, from: Slice<'a>, to: Slice<'a>) {
        let bytes = from.bytes();
        assert!(bytes <= to.bytes(), "{bytes} bytes into {}", to.bytes());
        self.copy_raw(
            (from.handle(), from.offset()),
            (to.handle(), to.offset()),
            bytes,
        );
    }

    fn copy_raw(&mut self, from: (vk::Buffer, u64), to: (vk::Buffer, u64), bytes: u64) {
        let region = [vk::BufferCopy::default()
            .src_offset(from.1)
            .dst_offset(to.1)
            .size(bytes)];
        let raw = &self.device.raw().raw;
        // SAFETY: both ranges are within their buffers, which live until the pass has run.
        unsafe { raw.cmd_copy_buffer(self.commands, from.0, to.0, &region) };
    }

    /// Starts `groups` groups of a kernel that has little to do: the same for each number that it reads.
    ///
    /// # Errors
    /// [`VulkanError::Driver`] when the kernel cannot be compiled.
    ///
    /// # Panics
    /// When a slice is larger than may be bound, or there are too many groups.
    pub(crate) fn start(
        &mut self,
        kernel: Kernel,
        slices: &[Slice<'a>],
        params: &[u32],
        groups: [u32; 2],
    ) -> Result<(), VulkanError> {
        self.start_long(kernel, slices, params, groups, 0)
    }

    /// As [`start`](Self::start), of a kernel that has so many floating-point operations to do. Where these are too many for a part that has others
    /// already, it begins a new one.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    pub(crate) fn start_long(
        &mut self,
        kernel: Kernel,
        slices: &[Slice<'a>],
        params: &[u32],
        groups: [u32; 2],
        flop: u64,
    ) -> Result<(), VulkanError> {
        if groups.contains(&0) {
            return Ok(());
        }
        let (is_first, most) = (self.submitted == 0, self.device.most_part_flop());
        if self.recorded.is_full(is_first, flop, most) {
            self.go_on()?;
        }
        let failed = |result| VulkanError::of("record a pass", result);
        let RawDevice { raw, kernels, .. } = self.device.raw();
        let pipeline = kernels.pipeline(raw, kernel)?;
        let params = plain::bytes(params);
        assert!(
            slices.len() <= BINDINGS as usize && params.len() <= PARAMS_BYTES,
            "too much for a kernel"
        );
        assert!(
            groups.iter().all(|&count| count <= MOST_GROUPS),
            "{groups:?} groups"
        );
        let recorder = self.recorder.as_mut().ok_or(VulkanError::Lost)?;
        let pool = (self.started / SETS) as usize;
        if pool == recorder.descriptors.len() {
            recorder.descriptor_pool(raw)?;
        }
        self.started += 1;
        self.recorded.add(flop);
        let layouts = [kernels.set_layout()];
        let info = vk::DescriptorSetAllocateInfo::default()
            .descriptor_pool(recorder.descriptors[pool])
            .set_layouts(&layouts);
        // SAFETY: the pool has room for as many sets as are counted.
        let sets = unsafe { raw.allocate_descriptor_sets(&info) }.map_err(failed)?;
        let most = self.device.most_bound_bytes();
        let bound: Vec<[vk::DescriptorBufferInfo; 1]> = slices
            .iter()
            .map(|slice| {
                assert!(
                    slice.bytes() <= most,
                    "{} bytes bound, at most {most}",
                    slice.bytes()
                );
                // Words are read whole; buffers are of whole words.
                [vk::DescriptorBufferInfo::default()
                    .buffer(slice.handle())
                    .offset(slice.offset())
                    .range(slice.bytes().next_multiple_of(4))]
            })
            .collect();
        let writes: Vec<vk::WriteDescriptorSet<'_>> = bound
            .iter()
            .zip(0..)
            .map(|(bound, binding)| {
                vk::WriteDescriptorSet::default()
                    .dst_set(sets[0])
                    .dst_binding(binding)
                    .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                    .buffer_info(bound)
            })
            .collect();
        let compute = vk::PipelineBindPoint::COMPUTE;
        let (layout, stages) = (kernels.layout(), vk::ShaderStageFlags::COMPUTE);
        // SAFETY: sets, layout and pipeline fit, since all kernels share one layout; buffers live until the pass has run.
        unsafe {
            raw.update_descriptor_sets(&writes, &[]);
            raw.cmd_bind_pipeline(self.commands, compute, pipeline);
            raw.cmd_bind_descriptor_sets(self.commands, compute, layout, 0, &sets, &[]);
            raw.cmd_push_constants(self.commands, layout, stages, 0, params);
            raw.cmd_dispatch(self.commands, groups[0], groups[1], 1);
        }
        Ok(())
    }

    /// Hands what is recorded to the GPU, and goes on in a new part. Barriers count across parts.
    ///
    /// # Errors
    /// [`VulkanError::Lost`], [`VulkanError::Driver`].
    pub fn go_on(&mut self) -> Result<(), VulkanError> {
        self.submit()?;
        let recorder = self.recorder.as_mut().ok_or(VulkanError::Lost)?;
        // SAFETY: the pass before has ended.
        self.commands = unsafe { recorder.begin(&self.device.raw().raw, self.submitted)? };
        self.recorded = Recorded::default();
        self.note_begin();
        Ok(())
    }

    fn submit(&mut self) -> Result<(), VulkanError> {
        self.note_end();
        let device = self.device.raw();
        let recorder = self.recorder.as_ref().ok_or(VulkanError::Lost)?;
        let ended = recorder.parts[self.submitted].ended;
        let commands = [self.commands];
        // SAFETY: all that the commands use lives until they have run: `run` waits, or else `drop`. (So no pass may be leaked, and none is.) The
        // fence was reset when the part was begun.
        let submitted = unsafe {
            let recorded = device.raw.end_command_buffer(self.commands);
            recorded.and_then(|()| device.submit(device.queue, &commands, ended))
        };
        submitted.map_err(|result| self.failed(result))?;
        self.submitted += 1;
        self.note_handed_over();
        Ok(())
    }

    /// What became of running it.
    fn failed(&self, result: vk::Result) -> VulkanError {
        self.device.failed("run a pass", result)
    }

    /// Hands what is recorded so far to the GPU, to be waited for: [`wait`](Self::wait) with the same `mark`, 0 or 1.
    ///
    /// # Errors
    /// [`VulkanError::Lost`], [`VulkanError::Driver`].
    ///
    /// # Panics
    /// When there is no such mark.
    pub fn mark(&mut self, mark: usize) -> Result<(), VulkanError> {
        self.go_on()?;
        self.marks[mark] = self.submitted;
        Ok(())
    }

    /// Waits until all has run that was recorded before this [`mark`](Self::mark) was set last in this pass.
    ///
    /// # Errors
    /// Those of [`finish`](Self::finish).
    ///
    /// # Panics
    /// When there is no such mark.
    pub fn wait(&mut self, mark: usize) -> Result<(), VulkanError> {
        let count = self.marks[mark];
        let waited = self.wait_for_parts(count);
        waited.map_err(|result| self.failed(result))?;
        self.waited_for = self.waited_for.max(count);
        self.note_handed_over();
        Ok(())
    }

    /// Waits until so many parts have run. A pass may be long: it hangs when no part of it has ended for as long as one may take.
    fn wait_for_parts(&self, count: usize) -> Result<(), vk::Result> {
        let device = self.device.raw();
        let recorder = self.recorder.as_ref();
        let parts: &[Part] = recorder.map_or(&[], |recorder| &recorder.parts[..count]);
        let Some(last) = parts.last() else {
            return Ok(());
        };
        let patience = self.device.patience();
        let (mut ended, mut since) = (0, Instant::now());
        loop {
            let waited = device.wait(last.ended, patience / LOOKS);
            if waited != Err(vk::Result::TIMEOUT) {
                return waited;
            }
            let before = ended;
            ended = 0;
            for part in parts {
                ended += usize::from(device.has_run(part.ended)?);
            }
            if ended > before {
                since = Instant::now();
            } else if since.elapsed() >= patience {
                return waited;
            }
        }
    }

    /// Copies all of `from` to `to`, from byte `at` on, where the processor sees it once that has run.
    ///
    /// # Panics
    /// When there is no room.
    pub fn copy_back(&mut self, from: Slice<'a>, to: &'a Buffer, at: u64) {
        let bytes = from.bytes();
        assert!(at + bytes <= to.bytes(), "{bytes} bytes at {at}");
        self.copy_raw((from.handle(), from.offset()), (to.handle(), at), bytes);
        self.show_host();
    }

    /// What was copied can be seen by the processor once it has run.
    fn show_host(&mut self) {
        let copied = (
            vk::PipelineStageFlags::TRANSFER,
            vk::AccessFlags::TRANSFER_WRITE,
        );
        let seen = (vk::PipelineStageFlags::HOST, vk::AccessFlags::HOST_READ);
        self.wait_for(copied, seen);
    }

    /// Runs the pass, and waits until it has ended.
    ///
    /// # Errors
    /// [`VulkanError::Hung`] and [`VulkanError::Lost`], after which the device cannot be used; [`VulkanError::Driver`].
    pub fn finish(mut self) -> Result<(), VulkanError> {
        self.run()
    }

    fn run(&mut self) -> Result<(), VulkanError> {
        let before = self.submitted;
        self.submit()?;
        let recorder = self.recorder.as_ref().ok_or(VulkanError::Lost)?;
        let last = recorder.parts[before].ended;
        let (device, patience) = (self.device.raw(), self.device.patience());
        let waited = self.wait_for_parts(before);
        let waited = waited.and_then(|()| device.wait_awake(last, patience));
        waited.map_err(|result| self.failed(result))?;
        (self.submitted, self.waited_for) = (0, 0);
        self.note_handed_over();
        Ok(())
    }

    /// As [`finish`](Self::finish), and copies the beginning of `from` to `numbers`.
    ///
    /// # Errors
    /// Those of [`finish`](Self::finish), and [`VulkanError::OutOfMemory`].
    ///
    /// # Panics
    /// When `from` has fewer bytes.
    pub fn finish_reading<T: Plain>(
        mut self,
        from: Slice<'a>,
        numbers: &mut [T],
    ) -> Result<(), VulkanError> {
        let bytes = plain::bytes_mut(numbers);
        let len = bytes.len() as u64;
        assert!(len <= from.bytes(), "{len} bytes of {}", from.bytes());
        let recorder = self.recorder.as_mut().ok_or(VulkanError::Lost)?;
        // Taken out while it is in use.
        let returns = match recorder.returns.take() {
            Some(returns) if returns.bytes >= len => returns,
            old => {
                if let Some(old) = old {
                    // SAFETY: the pass that used it has ended.
                    unsafe { old.destroy(self.device.raw()) };
                }
                Allocation::new(self.device.raw(), len, Use::FromDevice)?
            }
        };
        self.barrier();
        self.copy_raw((from.handle(), from.offset()), (returns.handle, 0), len);
        self.show_host();
        let run = self.run();
        if run.is_ok() {
            returns.copy_to(0, bytes);
        }
        if let Some(recorder) = self.recorder.as_mut() {
            recorder.returns = Some(returns);
        }
        run
    }
}

impl Drop for Pass<'_> {
    /// Waits for the parts of a pass that was not finished, but for no GPU that hangs.
    fn drop(&mut self) {
        let device = self.device.raw();
        if device.is_gone() {
            return;
        }
        if let Err(result) = self.wait_for_parts(self.submitted) {
            self.failed(result);
            // Whatever it was: these parts may still run.
            device.give_up_lost();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In how many kernels each part ends, of these operations each.
    fn parts(kernels: &[u64], most: u64) -> Vec<u32> {
        let (mut parts, mut recorded) = (Vec::new(), Recorded::default());
        for &flop in kernels {
            if recorded.is_full(parts.is_empty(), flop, most) {
                parts.push(recorded.kernels);
                recorded = Recorded::default();
            }
            recorded.add(flop);
        }
        parts.push(recorded.kernels);
        parts
    }

    #[test]
    fn a_part_has_so_many_kernels_and_so_much_to_do() {
        assert_eq!(parts(&[0; 110], 100), [8, 48, 48, 6]);
        // What is just as much fits. What alone is more is a part, with short kernels before or behind it.
        let kernels = [60, 40, 0, 1, 0, 200, 0, 30, 30, 50];
        assert_eq!(parts(&kernels, 100), [3, 2, 2, 2, 1]);
        assert_eq!(parts(&[0, 200, 0, 200], 100), [3, 1]);
    }
}
