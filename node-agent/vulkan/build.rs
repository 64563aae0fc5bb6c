//! Compiles the kernels (`shaders/`) to SPIR-V. Kernels of products are compiled once for each format of weights.

#![allow(
    clippy::panic,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a build script ends with the reason"
)]

use std::collections::HashMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use naga::AddressSpace;
use naga::back::spv;
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::{Capabilities, ValidationFlags, Validator};

/// The formats of weights, and the files that each is made of.
const FORMATS: [(&str, &[&str]); 16] = [
    ("f32", &["sixteen_bytes", "floats", "f32"]),
    ("f16", &["sixteen_bytes", "floats", "f16"]),
    ("bf16", &["sixteen_bytes", "floats", "bf16"]),
    ("q4_0", &["any_byte", "quants", "parts_of_32", "q4_0"]),
    ("q4_1", &["any_byte", "quants", "parts_of_32", "q4_1"]),
    ("q5_0", &["any_byte", "quants", "parts_of_32", "q5_0"]),
    ("q5_1", &["any_byte", "quants", "parts_of_32", "q5_1"]),
    ("q8_0", &["any_byte", "quants", "parts_of_32", "q8_0"]),
    ("q2_k", &["any_byte", "quants", "parts_of_256", "q2_k"]),
    ("q3_k", &["any_byte", "quants", "parts_of_256", "q3_k"]),
    (
        "q4_k",
        &[
            "sixteen_bytes",
            "quants",
            "parts_of_256",
            "k_scales",
            "q4_k",
        ],
    ),
    (
        "q5_k",
        &[
            "sixteen_bytes",
            "quants",
            "parts_of_256",
            "k_scales",
            "q5_k",
        ],
    ),
    ("q6_k", &["any_byte", "quants", "parts_of_256", "q6_k"]),
    (
        "iq4_nl",
        &[
            "any_byte",
            "quants",
            "parts_of_32",
            "nibble_values",
            "iq4_values",
            "iq4_nl",
        ],
    ),
    (
        "iq4_xs",
        &[
            "any_byte",
            "quants",
            "parts_of_256",
            "nibble_values",
            "iq4_values",
            "iq4_xs",
        ],
    ),
    (
        "mxfp4",
        &[
            "any_byte",
            "quants",
            "parts_of_32",
            "nibble_values",
            "mxfp4",
        ],
    ),
];

/// Kernels without weights, and the files that each is made of.
const OTHERS: [(&str, &[&str]); 12] = [
    ("pack", &["packing", "pack"]),
    ("norm_pack", &["packing", "group_sum", "norm_pack"]),
    ("gate_pack", &["packing", "activations", "gate_pack"]),
    ("norm", &["group_sum", "norm"]),
    ("heads", &["kv", "group_sum", "new_rows", "heads"]),
    (
        "latent_heads",
        &["kv_latent", "group_sum", "new_rows", "latent_heads"],
    ),
    ("heads_to_rows", &["packing", "heads_to_rows"]),
    ("combine", &["packing", "combine"]),
    ("gate", &["activations", "gate"]),
    ("route", &["group_sum", "group_max", "route"]),
    ("group_experts", &["group_experts"]),
    ("mix_experts", &["mix_experts"]),
];

/// What a kernel takes that not every GPU has (`Abilities` in `src/gpus.rs`).
#[derive(Clone, Copy, PartialEq)]
enum Needs {
    None,
    ByteDot,
    MatrixUnits,
}

/// Memory that a group's threads share, as every device has it.
const SHARED_BYTES: u32 = 16 << 10;

/// Threads of a group at most. (Vulkan promises 128: `src/gpus.rs` asks for these.)
const THREADS: u32 = 256;

const ENABLE_UNITS: &str = "enable f16;\nenable wgpu_cooperative_matrix;\n";

fn main() {
    println!("cargo::rerun-if-changed=shaders");
    println!("cargo::rerun-if-changed=build.rs");
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let mut table = String::from("/// Each kernel by its name, in SPIR-V.\n");
    table += "pub(crate) static SPIRV: &[(&str, &[u8])] = &[\n";
    let mut compile = |name: &str, source: &str, needs: Needs| {
        let words = spirv(name, source, needs);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let file = folder.join(format!("{name}.spv"));
        fs::write(&file, bytes).expect("OUT_DIR is writable");
        writeln!(table, "    ({name:?}, include_bytes!({file:?})),").unwrap();
    };
    for (format, files) in FORMATS {
        let format_files = files.iter().map(|file| format!("formats/{file}"));
        let weights: Vec<String> = ["weights".to_owned()]
            .into_iter()
            .chain(format_files)
            .chain(["products".to_owned()])
            .collect();
        let kernel = |bodies: &[&str]| {
            let weights = weights.iter().map(String::as_str);
            source(weights.chain(bodies.iter().copied()))
        };
        let few: &[&str] = match files.contains(&"quants") {
            true => &["multiply_bytes"],
            false => &["x_floats", "multiply_rows"],
        };
        for (which, suffix) in [("all_rows", ""), ("expert_rows", "_of_experts")] {
            for rows in [1, 4] {
                let source = |sums: &str| {
                    let bodies = [which].into_iter().chain(few.iter().copied());
                    let bodies: Vec<&str> = bodies.chain(["sums", sums]).collect();
                    format!("const ROWS = {rows}u;\n{}", kernel(&bodies))
                };
                let name = format!("multiply_{rows}{suffix}_{format}");
                compile(&name, &source("sums_shared"), Needs::None);
                if files.contains(&"quants") {
                    let name = format!("multiply_{rows}_dot{suffix}_{format}");
                    compile(&name, &source("sums_subgroup"), Needs::ByteDot);
                }
            }
            let name = format!("multiply_tile{suffix}_{format}");
            compile(&name, &kernel(&[which, "multiply_tile"]), Needs::None);
        }
        // The others' weights may be too large for F16.
        if !["f32", "bf16"].contains(&format) {
            let name = format!("multiply_units_{format}");
            let source = format!("{ENABLE_UNITS}{}", kernel(&["all_rows", "multiply_units"]));
            compile(&name, &source, Needs::MatrixUnits);
        }
    }
    let rows = ["kv", "attention_rows", "attention"];
    let latents = ["kv_latent", "attention_latents", "attention"];
    for (name, queries, files) in [
        ("attention_4", 4, rows),
        ("attention_8", 8, rows),
        ("latent_attention", 4, latents),
    ] {
        let constants = format!("const QUERIES = {queries}u;\n");
        let source = constants + &source(files.into_iter());
        compile(name, &source, Needs::None);
    }
    for (name, files) in OTHERS {
        compile(name, &source(files.iter().copied()), Needs::None);
    }
    table += "];\n";
    writeln!(
        table,
        "/// Threads of a group at most.\npub(crate) const THREADS: u32 = {THREADS};"
    )
    .unwrap();
    fs::write(folder.join("spirv.rs"), table).expect("OUT_DIR is writable");
}

fn source<'a>(files: impl Iterator<Item = &'a str>) -> String {
    let read = |file: &str| {
        let path = Path::new("shaders").join(format!("{file}.wgsl"));
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    files.map(read).collect::<Vec<_>>().join("\n")
}

/// Writes out the loops that are marked for it, since drivers do not, and then keep the arrays in them in memory rather than in registers:
///
///     for (var i = 0u; i < COUNT; i++) { // unrolled
///
/// COUNT is a number, or the name of a constant.
fn unrolled(source: &str) -> String {
    let constants = constants(source);
    let lines: Vec<&str> = source.lines().collect();
    unrolled_lines(&lines, &constants)
}

/// The numbers that constants of these names have.
fn constants(source: &str) -> HashMap<&str, u32> {
    let definitions = source.lines().filter_map(|line| {
        let (name, value) = line.strip_prefix("const ")?.split_once(" = ")?;
        Some((name, number(value.strip_suffix(';')?)?))
    });
    definitions.collect()
}

fn number(text: &str) -> Option<u32> {
    text.strip_suffix('u')?.parse().ok()
}

fn unrolled_lines(lines: &[&str], constants: &HashMap<&str, u32>) -> String {
    let mut out = String::new();
    let mut rest = lines;
    while let [line, behind @ ..] = rest {
        rest = behind;
        let Some((variable, count)) = loop_header(line) else {
            out += line;
            out.push('\n');
            continue;
        };
        let count = number(count).or_else(|| constants.get(count).copied());
        let count = count.unwrap_or_else(|| panic!("no number of rounds: {line}"));
        let mut depth = 1_i32;
        let end = behind.iter().position(|line| {
            depth += line.matches('{').count() as i32 - line.matches('}').count() as i32;
            depth == 0
        });
        let end = end.unwrap_or_else(|| panic!("a loop without an end: {line}"));
        let body = unrolled_lines(&behind[..end], constants);
        for round in 0..count {
            out += &format!("{{\n{}}}\n", with_number(&body, variable, round));
        }
        rest = &behind[end + 1..];
    }
    out
}

/// The variable of a loop that is to be written out, and how many rounds it has.
fn loop_header(line: &str) -> Option<(&str, &str)> {
    let header = line.trim().strip_suffix(") { // unrolled")?;
    let (variable, rest) = header.strip_prefix("for (var ")?.split_once(" = 0u; ")?;
    let (_, rest) = rest.split_once(" < ")?;
    Some((variable, rest.split_once("; ")?.0))
}

/// `body` with a number wherever it names the variable.
fn with_number(body: &str, variable: &str, value: u32) -> String {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let mut out = String::new();
    let mut rest = body;
    while let Some(start) = rest.find(is_name) {
        let (before, from) = rest.split_at(start);
        let end = from.find(|c| !is_name(c)).unwrap_or(from.len());
        let (name, behind) = from.split_at(end);
        out += before;
        let member = before.ends_with('.');
        match name == variable && !member {
            true => out += &format!("{value}u"),
            false => out += name,
        }
        rest = behind;
    }
    out + rest
}

fn spirv(name: &str, source: &str, needs: Needs) -> Vec<u32> {
    let source = &unrolled(source);
    let module = naga::front::wgsl::parse_str(source)
        .unwrap_or_else(|error| panic!("{name}: {}", error.emit_to_string(source)));
    // (Vulkan has the second of these everywhere: F16 numbers that are unpacked.)
    let mut capabilities = Capabilities::IMMEDIATES | Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    if needs != Needs::None {
        capabilities |= Capabilities::SUBGROUP;
    }
    if needs == Needs::MatrixUnits {
        capabilities |= Capabilities::COOPERATIVE_MATRIX | Capabilities::SHADER_FLOAT16;
    }
    let mut checks = ValidationFlags::all();
    if name.contains("_of_experts_") {
        // That all threads of a group find the same tile is not seen.
        checks -= ValidationFlags::CONTROL_FLOW_UNIFORMITY;
    }
    let info = Validator::new(checks, capabilities)
        .validate(&module)
        .unwrap_or_else(|error| panic!("{name}: {}", error.emit_to_string(source)));
    let shared = module.global_variables.iter().map(|(_, variable)| variable);
    let shared = shared.filter(|variable| variable.space == AddressSpace::WorkGroup);
    let shared: u32 = shared
        .map(|variable| module.types[variable.ty].inner.size(module.to_ctx()))
        .sum();
    assert!(
        shared <= SHARED_BYTES || needs == Needs::MatrixUnits,
        "{name}: {shared} bytes of shared memory"
    );
    for size in module.entry_points.iter().map(|entry| entry.workgroup_size) {
        assert!(
            size[0] <= THREADS && size[1..] == [1, 1],
            "{name}: groups of {size:?} threads"
        );
    }
    // Kernels stay in their bounds by themselves: who starts them checks sizes.
    let unchecked = BoundsCheckPolicies {
        index: BoundsCheckPolicy::Unchecked,
        buffer: BoundsCheckPolicy::Unchecked,
        image_load: BoundsCheckPolicy::Unchecked,
        binding_array: BoundsCheckPolicy::Unchecked,
    };
    use spv::Capability as Used;
    // Without those for dot products of bytes naga writes them out.
    let used: &[Used] = match needs {
        Needs::None => &[Used::Shader],
        Needs::ByteDot => &[
            Used::Shader,
            Used::DotProduct,
            Used::DotProductInput4x8BitPacked,
            Used::GroupNonUniform,
            Used::GroupNonUniformShuffle,
        ],
        Needs::MatrixUnits => &[
            Used::Shader,
            Used::GroupNonUniform,
            Used::Float16,
            Used::StorageBuffer16BitAccess,
            Used::UniformAndStorageBuffer16BitAccess,
            Used::StorageInputOutput16,
            Used::VulkanMemoryModel,
            Used::CooperativeMatrixKHR,
        ],
    };
    let options = spv::Options {
        // What Vulkan 1.1 takes, and no more than every device has.
        lang_version: (1, 3),
        flags: spv::WriterFlags::empty(),
        capabilities: Some(used.iter().copied().collect()),
        bounds_check_policies: unchecked,
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: false,
        emit_int_div_checks: false,
        ..spv::Options::default()
    };
    let words = spv::write_vec(&module, &info, &options, None)
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    without_halves_between_stages(&words)
}

/// Naga declares with every F16 that stages hand such numbers to one another. Kernels have one stage, and NVIDIA's GPUs cannot.
fn without_halves_between_stages(words: &[u32]) -> Vec<u32> {
    let (header, mut rest) = words.split_at(5);
    let mut kept = header.to_vec();
    while let Some(first) = rest.first() {
        let (instruction, behind) = rest.split_at((first >> 16).max(1) as usize);
        let halves = [
            (2 << 16) | 17, // OpCapability
            spv::Capability::StorageInputOutput16 as u32,
        ];
        if instruction != halves {
            kept.extend(instruction);
        }
        rest = behind;
    }
    kept
}
