//! What is known of a GPU.

/// What a GPU says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuFacts {
    /// Through what it is used.
    pub api: GpuApi,
    pub name: String,
    /// Its numbers on the PCI bus, vendor and device, where they are known.
    pub pci: Option<(u32, u32)>,
    /// Shares its memory with the CPU.
    pub unified_memory: bool,
    pub total_bytes: u64,
    /// Vulkan and CUDA: free. Metal: what is left of the recommended working set.
    pub available_bytes: u64,
}

/// What makes a GPU compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuApi {
    Vulkan,
    Cuda,
    Metal,
}
