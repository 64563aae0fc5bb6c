//! What a GPU of CUDA or Metal says of itself.

use candle_core::Result;

#[cfg(any(feature = "cuda", feature = "metal"))]
use crate::gpu::facts::GpuApi;
use crate::gpu::facts::GpuFacts;

#[cfg(feature = "cuda")]
pub(super) fn facts(device: &candle_core::Device) -> Result<GpuFacts> {
    let stream = device.as_cuda_device()?.cuda_stream();
    let context = stream.context();
    let name = context.name().map_err(candle_core::Error::wrap)?;
    let (available, total) = context.mem_get_info().map_err(candle_core::Error::wrap)?;
    Ok(GpuFacts {
        api: GpuApi::Cuda,
        name,
        pci: None,
        pci_address: None,
        unified_memory: false,
        total_bytes: total as u64,
        available_bytes: available as u64,
        most_buffer_bytes: None,
    })
}

#[cfg(all(feature = "metal", not(feature = "cuda")))]
pub(super) fn facts(device: &candle_core::Device) -> Result<GpuFacts> {
    let device = device.as_metal_device()?.metal_device();
    let total = device.recommended_max_working_set_size() as u64;
    let used = device.current_allocated_size() as u64;
    Ok(GpuFacts {
        api: GpuApi::Metal,
        name: device.architecture_name(),
        pci: None,
        pci_address: None,
        unified_memory: true,
        total_bytes: total,
        available_bytes: total.saturating_sub(used),
        most_buffer_bytes: None,
    })
}

#[cfg(not(any(feature = "cuda", feature = "metal")))]
pub(super) fn facts(_device: &candle_core::Device) -> Result<GpuFacts> {
    Err(candle_core::Error::Msg(
        "this is the CPU, in place of a GPU".to_owned(),
    ))
}
