//! What is known of a GPU.

/// What a GPU says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuFacts {
    /// Through what it is used.
    pub api: GpuApi,
    pub name: String,
    /// Its numbers on the PCI bus, vendor and device, where they are known.
    pub pci: Option<(u32, u32)>,
    /// Where it is on the PCI bus (`0000:01:00.0`), where that is known: equal GPUs have one name.
    pub pci_address: Option<String>,
    /// Shares its memory with the CPU.
    pub unified_memory: bool,
    pub total_bytes: u64,
    /// Vulkan and CUDA: free. Metal: what is left of the recommended working set.
    pub available_bytes: u64,
    /// The most bytes of a buffer of which kernels see all at once, such as that of the keys and values of a layer; `None` where there is no such
    /// limit, or it was not asked for.
    pub most_buffer_bytes: Option<u64>,
}

impl GpuFacts {
    /// Whether a plan means this GPU by `name`: its place on the PCI bus, or its name.
    #[must_use]
    pub fn is_named(&self, name: &str) -> bool {
        self.pci_address.as_deref() == Some(name) || self.name == name
    }

    /// Its name, and its place where that is known: for people, and for who looks which GPU an error is about.
    #[must_use]
    pub fn label(&self) -> String {
        match &self.pci_address {
            Some(address) => format!("{} ({address})", self.name),
            None => self.name.clone(),
        }
    }
}

/// What makes a GPU compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuApi {
    Vulkan,
    Cuda,
    Metal,
}
