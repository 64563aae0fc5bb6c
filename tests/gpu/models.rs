//! The models: small ones of real weights, which lie in the bundle, and large ones of random weights, which are written here.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use prima_crds::error_chain;
use prima_tests::assets;

use crate::error::CheckError;
use crate::machine::{self, Machine};

/// Tell short stories, in two formats of weights. Measuring a disk takes the second's size.
const SMALL: [&str; 2] = ["stories15M-wide-Q4_K", "stories15M-wide-Q8_0"];
/// Shapes of Llama's models, and of mixtures of experts.
const SHAPES: [Shape; 4] = [
    Shape {
        name: "1b",
        vocabulary: "llama-bpe",
        file: "shape-1b-Q4_K_M",
        bytes: 1_000_000_000,
    },
    Shape {
        name: "8b",
        vocabulary: "llama-bpe",
        file: "shape-8b-Q4_K_M",
        bytes: 5_000_000_000,
    },
    Shape {
        name: "qwen3-30b-a3b",
        vocabulary: "qwen2",
        file: "shape-qwen3-30b-a3b-8-layers-Q4_K_M",
        bytes: 3_500_000_000,
    },
    Shape {
        name: "gpt-oss-20b",
        vocabulary: "llama-bpe",
        file: "shape-gpt-oss-20b-8-layers-MXFP4",
        bytes: 4_500_000_000,
    },
];

struct Shape {
    /// As `make_shape.py` calls it.
    name: &'static str,
    vocabulary: &'static str,
    file: &'static str,
    bytes: u64,
}

pub struct Model {
    pub name: String,
    pub path: PathBuf,
    pub bytes: u64,
}

pub struct Models {
    /// Whose answers are compared.
    pub small: PathBuf,
    /// Whose speed is measured: the small ones first.
    pub measured: Vec<Model>,
    /// For people: what is not here, and why.
    pub left_out: Vec<String>,
}

impl Models {
    pub fn find(machine: &Machine) -> Result<Models, CheckError> {
        let path = |name: &str| assets::path(&format!("models/{name}.gguf"));
        let mut measured = Vec::new();
        for name in SMALL {
            measured.push(Model::at(path(name)?)?);
        }
        let mut left_out = Vec::new();
        for shape in &SHAPES {
            match large(shape, machine) {
                Ok(path) => measured.push(Model::at(path)?),
                Err(reason) => left_out.push(format!(
                    "speed of a model in the shape of {}: {reason}",
                    shape.name
                )),
            }
        }
        Ok(Models {
            small: path(SMALL[0])?,
            measured,
            left_out,
        })
    }
}

impl Model {
    fn at(path: PathBuf) -> Result<Model, CheckError> {
        let bytes = match fs::metadata(&path) {
            Ok(facts) => facts.len(),
            Err(source) => return Err(CheckError::Read { path, source }),
        };
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Ok(Model {
            name: name.into_owned(),
            path,
            bytes,
        })
    }
}

/// The file of a model in a large shape, written now if it is not there; or why there is none, in words. Whoever wants one measured on a
/// driver in software puts it there.
fn large(shape: &Shape, machine: &Machine) -> Result<PathBuf, String> {
    let cache = assets::cache().map_err(|error| error_chain(&error))?;
    let path = cache.join(format!("models/{}.gguf", shape.file));
    if path.exists() {
        return Ok(path);
    }
    if machine.software {
        return Err("a driver in software takes too long for it".to_owned());
    }
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    for (whose, available) in [
        ("the GPU", machine.facts.available_bytes),
        ("the machine", machine::available_memory()),
    ] {
        // Keys, values and what passes through come to it.
        let needed = shape.bytes + shape.bytes / 8;
        if available < needed {
            let (available, needed) = (gigabytes(available), gigabytes(needed));
            return Err(format!(
                "{whose} has {available:.1} GB free, {needed:.1} GB are needed"
            ));
        }
    }
    println!("writing a model in the shape of {}", shape.name);
    write(shape, &path).map_err(|error| error_chain(&error))?;
    Ok(path)
}

fn write(shape: &Shape, path: &Path) -> Result<(), CheckError> {
    let partial = path.with_extension("partial");
    let mut command = Command::new("python3");
    command
        .arg(machine::beside_programs("make_shape.py"))
        .arg(shape.name)
        .arg(&partial)
        .arg("--vocabulary")
        .arg(assets::path(&format!(
            "vocab/ggml-vocab-{}.gguf",
            shape.vocabulary
        ))?);
    let written = machine::output(&mut command).and_then(|_| {
        fs::rename(&partial, path).map_err(|source| CheckError::Write {
            path: path.to_owned(),
            source,
        })
    });
    if written.is_err() {
        // Half a model only takes room; it may not be there at all.
        let _ = fs::remove_file(&partial);
    }
    written
}
