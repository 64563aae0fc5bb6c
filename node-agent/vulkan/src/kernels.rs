//! The kernels, compiled by the build (`shaders/`), and made ready for the device when they are first used.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use ash::vk;
use prima_gguf::GgmlType;

use crate::error::VulkanError;
use crate::gpus::Abilities;

include!(concat!(env!("OUT_DIR"), "/spirv.rs"));

/// Buffers that a kernel has at most. (Vulkan promises 4, and WebGPU 8.)
pub(crate) const BINDINGS: u32 = 8;

/// Bytes of a kernel's parameters at most; every device allows as many.
pub(crate) const PARAMS_BYTES: usize = 128;

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kernel {
    Multiply(Shape, GgmlType),
    /// Of rows that are grouped by expert, or by head.
    MultiplyExperts(Shape, GgmlType),
    Pack,
    Norm,
    NormPack,
    Heads,
    /// For so many rows of queries: [`FEW_QUERIES`] or [`QUERIES`].
    Attention(usize),
    LatentHeads,
    LatentAttention,
    HeadsToRows,
    Combine,
    Gate,
    GatePack,
    Route,
    GroupExperts,
    MixExperts,
}

/// For how many rows a product is made, and with what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Shape {
    One,
    /// Few rows, four at a time.
    Four,
    /// As the two before, for quantized formats, by [`Abilities::byte_dot`].
    OneByDot,
    FourByDot,
    Tile,
    /// As `Tile`, by [`Abilities::matrix_units`].
    Units,
}

impl Shape {
    /// The one for so many rows (not 0) of weights of this format.
    pub fn of(rows: usize, format: GgmlType, abilities: Abilities) -> Shape {
        match rows {
            1 => Shape::one(format, abilities),
            _ if rows <= few_rows(format) => Shape::four(format, abilities),
            _ if abilities.matrix_units && fits_f16(format) => Shape::Units,
            _ => Shape::Tile,
        }
    }

    pub fn one(format: GgmlType, abilities: Abilities) -> Shape {
        match takes_bytes(format) && abilities.byte_dot {
            true => Shape::OneByDot,
            false => Shape::One,
        }
    }

    pub fn four(format: GgmlType, abilities: Abilities) -> Shape {
        match takes_bytes(format) && abilities.byte_dot {
            true => Shape::FourByDot,
            false => Shape::Four,
        }
    }

    /// As `build.rs` calls it.
    fn name(self) -> &'static str {
        match self {
            Shape::One => "1",
            Shape::Four => "4",
            Shape::OneByDot => "1_dot",
            Shape::FourByDot => "4_dot",
            Shape::Tile => "tile",
            Shape::Units => "units",
        }
    }

    /// Rows, and rows of the matrix, of a group of threads.
    pub fn group(self) -> (usize, usize) {
        match self {
            Shape::One | Shape::OneByDot => (1, 4),
            Shape::Four | Shape::FourByDot => (4, 4),
            Shape::Tile => (64, 64),
            Shape::Units => (128, 128),
        }
    }
}

/// The most rows that are rounded to bytes. For them quantized weights are loaded anew for every four rows. With 16 rows and the matrices of an
/// 8B on an H200, that takes half the time of the kernels for many rows: these have too few groups.
pub const FEW_ROWS: usize = 16;
/// The same of other weights, which take more to load.
const FEW_ROWS_OF_FLOATS: usize = 8;

/// The most rows for which weights of this format are loaded anew for every four.
pub(crate) fn few_rows(format: GgmlType) -> usize {
    match takes_bytes(format) {
        true => FEW_ROWS,
        false => FEW_ROWS_OF_FLOATS,
    }
}

/// Rows of queries that a group of threads has at most (`shaders/attention.wgsl`), and where they are few.
pub(crate) const QUERIES: usize = 8;
pub(crate) const FEW_QUERIES: usize = 4;
/// Rows of queries that a group of threads has at most where keys are latents: heads that read a position's latent together.
pub const LATENT_QUERIES: usize = 4;

/// Whether weights of this format are about the same in F16.
fn fits_f16(format: GgmlType) -> bool {
    !matches!(format, GgmlType::F32 | GgmlType::BF16)
}

/// Whether products of few rows with weights of this format take the rows as bytes (`shaders/pack.wgsl`).
pub(crate) fn takes_bytes(format: GgmlType) -> bool {
    !matches!(format, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16)
}

/// Whether there are kernels for weights of this format.
pub fn has_kernels(format: GgmlType) -> bool {
    Kernel::Multiply(Shape::One, format).spirv().is_some()
}

impl Kernel {
    /// All that passes over weights of these formats may start, of all rows', and of experts' or heads'; with those for latents.
    pub fn all(
        formats: &[GgmlType],
        of_parts: &[GgmlType],
        with_latents: bool,
        abilities: Abilities,
    ) -> Vec<Kernel> {
        let products = formats.iter().flat_map(|&format| {
            [1, 2, FEW_ROWS + 1]
                .map(|rows| Kernel::Multiply(Shape::of(rows, format, abilities), format))
        });
        let products_of_parts = of_parts.iter().flat_map(|&format| {
            let (one, four) = (
                Shape::one(format, abilities),
                Shape::four(format, abilities),
            );
            [one, four, Shape::Tile].map(|shape| Kernel::MultiplyExperts(shape, format))
        });
        let experts = [Kernel::Route, Kernel::GroupExperts, Kernel::MixExperts];
        let experts = experts.into_iter().filter(|_| !of_parts.is_empty());
        let latents = [
            Kernel::LatentHeads,
            Kernel::LatentAttention,
            Kernel::HeadsToRows,
        ];
        let latents = latents.into_iter().filter(|_| with_latents);
        let others = [
            Kernel::Pack,
            Kernel::Norm,
            Kernel::NormPack,
            Kernel::Heads,
            Kernel::Attention(FEW_QUERIES),
            Kernel::Attention(QUERIES),
            Kernel::Combine,
            Kernel::Gate,
            Kernel::GatePack,
        ];
        let of_parts = experts.chain(products_of_parts);
        others
            .into_iter()
            .chain(products)
            .chain(of_parts)
            .chain(latents)
            .collect()
    }

    /// As `build.rs` calls it.
    fn name(self) -> String {
        match self {
            Kernel::Multiply(shape, format) => {
                format!("multiply_{}_{}", shape.name(), format.name().to_lowercase())
            }
            Kernel::MultiplyExperts(shape, format) => {
                let format = format.name().to_lowercase();
                format!("multiply_{}_of_experts_{format}", shape.name())
            }
            Kernel::Pack => "pack".to_owned(),
            Kernel::Norm => "norm".to_owned(),
            Kernel::NormPack => "norm_pack".to_owned(),
            Kernel::Heads => "heads".to_owned(),
            Kernel::Attention(queries) => format!("attention_{queries}"),
            Kernel::LatentHeads => "latent_heads".to_owned(),
            Kernel::LatentAttention => "latent_attention".to_owned(),
            Kernel::HeadsToRows => "heads_to_rows".to_owned(),
            Kernel::Combine => "combine".to_owned(),
            Kernel::Gate => "gate".to_owned(),
            Kernel::GatePack => "gate_pack".to_owned(),
            Kernel::Route => "route".to_owned(),
            Kernel::GroupExperts => "group_experts".to_owned(),
            Kernel::MixExperts => "mix_experts".to_owned(),
        }
    }

    fn spirv(self) -> Option<Vec<u32>> {
        let name = self.name();
        let (_, bytes) = SPIRV.iter().find(|(known, _)| *known == name)?;
        let (words, _) = bytes.as_chunks::<4>();
        Some(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }
}

/// A device's kernels.
pub(crate) struct Kernels {
    set_layout: vk::DescriptorSetLayout,
    layout: vk::PipelineLayout,
    ready: Mutex<HashMap<Kernel, vk::Pipeline>>,
}

impl Kernels {
    pub fn new(raw: &ash::Device) -> Result<Kernels, VulkanError> {
        let failed = |result| VulkanError::of("lay out kernels", result);
        let bindings = [0, 1, 2, 3, 4, 5, 6, 7].map(|binding| {
            vk::DescriptorSetLayoutBinding::default()
                .binding(binding)
                .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                .descriptor_count(1)
                .stage_flags(vk::ShaderStageFlags::COMPUTE)
        });
        const { assert!(BINDINGS == 8) };
        let info = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
        // SAFETY: `info` is whole, here and below; both are destroyed with the device.
        let set_layout =
            unsafe { raw.create_descriptor_set_layout(&info, None) }.map_err(failed)?;
        let set_layouts = [set_layout];
        let params = [vk::PushConstantRange::default()
            .stage_flags(vk::ShaderStageFlags::COMPUTE)
            .size(PARAMS_BYTES as u32)];
        let info = vk::PipelineLayoutCreateInfo::default()
            .set_layouts(&set_layouts)
            .push_constant_ranges(&params);
        // SAFETY: as above.
        let layout = unsafe { raw.create_pipeline_layout(&info, None) };
        let layout = layout.map_err(|result| {
            // SAFETY: it is new, and nothing uses it.
            unsafe { raw.destroy_descriptor_set_layout(set_layout, None) };
            failed(result)
        })?;
        Ok(Kernels {
            set_layout,
            layout,
            ready: Mutex::default(),
        })
    }

    pub fn set_layout(&self) -> vk::DescriptorSetLayout {
        self.set_layout
    }

    pub fn layout(&self) -> vk::PipelineLayout {
        self.layout
    }

    /// The kernel, made ready if it is not yet.
    pub fn pipeline(&self, raw: &ash::Device, kernel: Kernel) -> Result<vk::Pipeline, VulkanError> {
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = ready.get(&kernel) {
            return Ok(*pipeline);
        }
        let failed = |result| VulkanError::of("compile a kernel", result);
        let words = kernel.spirv().ok_or_else(|| VulkanError::NoKernel {
            what: match kernel {
                Kernel::Multiply(_, format) | Kernel::MultiplyExperts(_, format) => {
                    format!("weights of format {format}")
                }
                other => other.name(),
            },
        })?;
        let info = vk::ShaderModuleCreateInfo::default().code(&words);
        // SAFETY: the words are SPIR-V that naga made and validated.
        let module = unsafe { raw.create_shader_module(&info, None) }.map_err(failed)?;
        let stage = vk::PipelineShaderStageCreateInfo::default()
            .stage(vk::ShaderStageFlags::COMPUTE)
            .module(module)
            .name(c"main");
        let info = [vk::ComputePipelineCreateInfo::default()
            .stage(stage)
            .layout(self.layout)];
        // SAFETY: module and layout are the device's. The module is not needed afterwards.
        let made = unsafe {
            let made = raw.create_compute_pipelines(vk::PipelineCache::null(), &info, None);
            raw.destroy_shader_module(module, None);
            made
        };
        let pipeline = made.map_err(|(_, result)| failed(result))?[0];
        ready.insert(kernel, pipeline);
        Ok(pipeline)
    }

    /// # Safety
    /// No pass runs, and none is begun any more.
    pub unsafe fn destroy(&self, raw: &ash::Device) {
        let ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as the caller promises.
        unsafe {
            for pipeline in ready.values() {
                raw.destroy_pipeline(*pipeline, None);
            }
            raw.destroy_pipeline_layout(self.layout, None);
            raw.destroy_descriptor_set_layout(self.set_layout, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_compiled() {
        let formats = GgmlType::ALL.iter().copied();
        let formats: Vec<GgmlType> = formats.filter(|&format| has_kernels(format)).collect();
        let dot_only = Abilities {
            byte_dot: true,
            ..Abilities::default()
        };
        for abilities in [Abilities::default(), dot_only] {
            for kernel in Kernel::all(&formats, &formats, true, abilities) {
                assert!(kernel.spirv().is_some(), "{kernel:?}");
            }
        }
        let of = |shape| {
            let formats = GgmlType::ALL.iter().copied();
            let compiled =
                formats.filter(|&format| Kernel::Multiply(shape, format).spirv().is_some());
            compiled.collect::<Vec<_>>()
        };
        assert_eq!(of(Shape::One).len(), 16);
        assert_eq!(of(Shape::One), of(Shape::Four));
        assert_eq!(of(Shape::One), of(Shape::Tile));
        let formats = of(Shape::One).into_iter();
        let in_f16 = formats.filter(|&format| fits_f16(format));
        assert_eq!(of(Shape::Units), in_f16.collect::<Vec<_>>());
        assert_eq!(of(Shape::OneByDot), of(Shape::FourByDot));
        let formats = of(Shape::One).into_iter();
        let in_bytes = formats.filter(|&format| takes_bytes(format));
        assert_eq!(of(Shape::OneByDot), in_bytes.collect::<Vec<_>>());
    }
}
