//! Vulkan on the processor (lavapipe) as the GPU of a machine. To measure it takes minutes, and would find it slower than the processor: so machines
//! are given what a fast GPU would have measured.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use prima_crds::v1alpha1::node_profile::{CpuProfile, GpuProfile};
use serde_json::{Deserializer, Value, json};

use crate::command::run;
use crate::{http, inputs, measurements};

/// The variable by which programs are told which GPUs to use; with this value this one, with `none` none.
pub const GPU: &str = "PRIMA_GPU";
pub const SOFTWARE: &str = "software";

/// The variable by which the loader is told the manifests of drivers, instead of those in [`MANIFESTS`]. `make test` may have set it.
pub const DRIVERS: &str = "VK_DRIVER_FILES";

/// Its driver, and where drivers have the manifests by which the loader finds them.
const LIBRARY: &str = "libvulkan_lvp";
const MANIFESTS: [&str; 3] = [
    "/usr/share/vulkan/icd.d",
    "/usr/local/share/vulkan/icd.d",
    "/etc/vulkan/icd.d",
];

/// What is clear how to continue.
pub const PROMPT: &str = "The capital of France is";
/// Tokens of an answer: few, since rounding may turn what is not clear.
const TOKENS: usize = 3;

/// The most likely continuation of `prompt`.
///
/// # Errors
/// What came instead.
pub fn complete(address: SocketAddr, model: &str, prompt: &str) -> Result<String, String> {
    let body = json!({"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0});
    let answer =
        http::post(address, "/v1/completions", &body).map_err(|error| error.to_string())?;
    if answer.status != 200 {
        return Err(answer.body);
    }
    let text = answer.json()["choices"][0]["text"]
        .as_str()
        .map(str::to_owned);
    text.ok_or(answer.body)
}

/// Whether a process has lavapipe in it.
pub fn is_in(pid: u32) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("a process of ours");
    maps.contains(LIBRARY)
}

/// How many layers of the plan with this `spec` run on GPUs.
pub fn gpu_layers(spec: &Value) -> u64 {
    let members = spec["members"].as_array().expect("members").iter();
    let windows = members.flat_map(|member| member["windows"].as_array().expect("windows"));
    let layers = windows.filter_map(|window| window["gpuLayers"].as_u64());
    layers.sum()
}

/// What a GPU called `name` would have measured that is ten times as fast as the processor `cpu`, with memory for some layers of SmolLM2.
pub fn fast_gpu(name: &str, cpu: &CpuProfile) -> GpuProfile {
    let mut throughput = cpu.throughput.clone();
    for one in &mut throughput {
        one.decode_bytes_per_second *= 10;
        one.prefill_flop_per_second *= 10;
    }
    let gpu = json!({
        "name": name, "backend": "Vulkan",
        "measured": {
            "unifiedMemory": false, "totalBytes": 64 << 20, "availableBytes": 64 << 20,
            "readBytesPerSecond": 200_000_000_000_i64, "kvAppendBytesPerSecond": 200_000_000_000_i64,
            "toGpuBytesPerSecond": 10_000_000_000_i64, "fromGpuBytesPerSecond": 10_000_000_000_i64,
            "copyOverheadNanoseconds": 10_000, "layerOverheadNanoseconds": 10_000,
            "throughput": throughput,
        },
    });
    serde_json::from_value(gpu).expect("a GPU")
}

/// What lavapipe is called here. Agents find what was measured of a GPU by its name.
pub fn name() -> String {
    used_gpu(&inspected())
}

/// Bytes of its memory. As it tells nobody how many of them are left, all count as free.
pub fn memory_bytes() -> i64 {
    let bytes = used(&inspected())["memoryBytes"].as_i64();
    bytes.expect("a number")
}

fn inspected() -> String {
    inputs::need("vulkan");
    let mut inspect = Command::new(inputs::program("prima-node-agent"));
    inspect
        .args(["inspect", "--gpu", "--output", "json"])
        .env(GPU, SOFTWARE);
    run(inspect, "").unwrap_or_else(|error| panic!("{error}"))
}

/// With this value of [`DRIVERS`], Vulkan's loader finds lavapipe twice: by its own manifest, and by the same in `folder`.
pub fn listed_twice(folder: &Path) -> OsString {
    inputs::need("vulkan");
    let own = env::var_os(DRIVERS).map_or_else(installed_manifest, PathBuf::from);
    let other = folder.join("again.json");
    fs::copy(&own, &other).expect("write a manifest");
    env::join_paths([own, other]).expect("paths without colons")
}

fn installed_manifest() -> PathBuf {
    let folders = MANIFESTS.iter().filter_map(|path| fs::read_dir(path).ok());
    let mut files = folders.flatten().flatten().map(|file| file.path());
    let lavapipes = files.find(|path| {
        let manifest = fs::read_to_string(path);
        manifest.is_ok_and(|manifest| manifest.contains(LIBRARY))
    });
    lavapipes.expect("a manifest of lavapipe")
}

/// The name of the GPU that layers run on, of what `prima-node-agent inspect --gpu --output json` says.
pub(crate) fn used_gpu(said: &str) -> String {
    let name = used(said)["name"].as_str().map(str::to_owned);
    name.expect("a name")
}

/// That GPU. Drivers may say something, too.
fn used(said: &str) -> Value {
    let begins = said.find('{').unwrap_or_default();
    let mut listed = Deserializer::from_str(&said[begins..]).into_iter::<Value>();
    let listed = listed.next().and_then(Result::ok);
    let listed = listed.unwrap_or_else(|| panic!("expected JSON, got {said}"));
    let mut gpus = listed["gpus"].as_array().expect("a list").iter();
    let used = gpus.find(|gpu| gpu["unused"].is_null()).cloned();
    used.unwrap_or_else(|| panic!("no GPU is used: {said}"))
}

/// Has the next agent that keeps what it measured in `file`, where another has kept what it measured, find a [`fast_gpu`] of this name there.
pub fn declare(file: &Path, name: &str) {
    measurements::change(file, |entry| {
        let cpu = entry["status"]["cpu"].clone();
        let cpu: CpuProfile = serde_json::from_value(cpu).expect("what a processor does");
        entry["key"]["gpu"] = json!(name);
        entry["status"]["gpus"] = json!([fast_gpu(name, &cpu)]);
        // Else it would soon measure again.
        entry["others_percent"] = json!(0);
    });
}
