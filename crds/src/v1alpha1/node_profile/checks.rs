//! What the planner relies on in a NodeProfile: the checks of each part of a machine.

use std::ops::RangeInclusive;

use super::super::document::{self, Checks, DocumentError};
use super::{
    CpuProfile, DiskProfile, GpuProfile, LinkProfile, MemoryProfile, NodeProfile, NodeProfileSpec,
    NodeProfileStatus, Throughput,
};

const SECOND: i64 = 1_000_000_000;
const OVERHEAD: RangeInclusive<i64> = 0..=SECOND;
/// Bytes per second of what computes: from less than any machine does to 100 TB/s.
const RATE: RangeInclusive<i64> = 100_000..=MAX_RATE;
/// Disks and links may be slower.
const DISK_RATE: RangeInclusive<i64> = 1000..=MAX_RATE;
const LINK_RATE: RangeInclusive<i64> = 100..=MAX_RATE;
const MAX_RATE: i64 = 100_000_000_000_000;
/// Up to 100 PFLOP/s.
const FLOPS: RangeInclusive<i64> = 100_000..=100_000_000_000_000_000;
/// Up to 1 PiB.
const MEMORY: RangeInclusive<i64> = 0..=1 << 50;
const WHOLE_MEMORY: RangeInclusive<i64> = 1 << 20..=1 << 50;
/// Drivers of Vulkan give 128 MiB at least.
const BUFFER: RangeInclusive<i64> = 1 << 20..=i64::MAX;

impl NodeProfile {
    /// Checks everything that the planner relies on. `name`, a path, is used in errors.
    ///
    /// # Errors
    /// [`DocumentError::Field`] for the first value that is missing or out of its bounds.
    pub fn validate(&self, name: &str) -> Result<(), DocumentError> {
        let checks = Checks { name };
        if self.metadata.name.as_deref().unwrap_or("").is_empty() {
            return Err(checks.error("metadata.name", "must name the machine"));
        }
        owner(&checks, &self.spec)?;
        let Some(status) = &self.status else {
            return Err(checks.error("status", "is missing: nothing was measured"));
        };
        let NodeProfileStatus {
            conditions: _,
            measured_at: _,
            agent_version: _,
            architectures: _,
            parts: _,
            reads_windowed_sequences: _,
            reads_gpus: _,
            reads_chunk_positions: _,
            system: _,
            cpu: on_cpu,
            memory: in_memory,
            disk: on_disk,
            gpus,
            links,
            agent,
        } = status;
        cpu(&checks, on_cpu)?;
        memory(&checks, in_memory)?;
        disk(&checks, on_disk)?;
        for (i, one) in gpus.iter().enumerate() {
            gpu(&checks, &format!("status.gpus[{i}]"), one)?;
        }
        for (i, one) in links.iter().enumerate() {
            link(&checks, &format!("status.links[{i}]"), one)?;
        }
        let key = agent
            .as_ref()
            .and_then(|agent| agent.public_key_sha256.as_deref());
        if !key.is_none_or(document::is_sha256) {
            let problem =
                "must be 64 hexadecimal digits in lower case, the SHA-256 of a public key";
            return Err(checks.error("status.agent.publicKeySha256", problem));
        }
        Ok(())
    }
}

fn owner(checks: &Checks<'_>, spec: &NodeProfileSpec) -> Result<(), DocumentError> {
    for (field, twice) in [
        (
            "reservedMemory",
            spec.reserved_memory.is_some() && spec.reserved_memory_bytes.is_some(),
        ),
        (
            "memoryCap",
            spec.memory_cap.is_some() && spec.memory_cap_bytes.is_some(),
        ),
    ] {
        if twice {
            let problem = format!("is the same as {field}Bytes: set one of them");
            return Err(checks.error(&format!("spec.{field}"), problem));
        }
    }
    let reserved = spec.reserved_bytes().unwrap_or(0);
    let cap = spec.cap_bytes().unwrap_or(0);
    checks.fields(
        "spec",
        [
            ("reservedMemory", reserved, MEMORY),
            ("memoryCap", cap, MEMORY),
        ],
    )
}

fn cpu(checks: &Checks<'_>, cpu: &CpuProfile) -> Result<(), DocumentError> {
    let threads = cpu.threads.into();
    checks.fields("status.cpu", [("threads", threads, 1..=4096)])?;
    throughput(checks, "status.cpu.throughput", &cpu.throughput)?;
    let overhead = cpu.layer_overhead_nanoseconds;
    checks.fields(
        "status.cpu",
        [("layerOverheadNanoseconds", overhead, OVERHEAD)],
    )
}

fn memory(checks: &Checks<'_>, memory: &MemoryProfile) -> Result<(), DocumentError> {
    let total = memory.total_bytes;
    let kv_append = memory.kv_append_bytes_per_second;
    checks.fields(
        "status.memory",
        [
            ("totalBytes", total, WHOLE_MEMORY),
            ("availableBytes", memory.available_bytes, 0..=total),
            ("swappableBytes", memory.swappable_bytes, MEMORY),
            ("readBytesPerSecond", memory.read_bytes_per_second, RATE),
            ("kvAppendBytesPerSecond", kv_append, RATE),
        ],
    )
}

fn disk(checks: &Checks<'_>, disk: &DiskProfile) -> Result<(), DocumentError> {
    let (sequential, random) = (
        disk.sequential_read_bytes_per_second,
        disk.random_read_bytes_per_second,
    );
    let (read, compute) = (
        disk.read_while_computing_percent.into(),
        disk.compute_while_reading_percent.into(),
    );
    // Where it was not measured, nothing more is checked.
    let experts = disk.expert_read_bytes_per_second.unwrap_or(sequential);
    checks.fields(
        "status.disk",
        [
            ("sequentialReadBytesPerSecond", sequential, DISK_RATE),
            ("randomReadBytesPerSecond", random, DISK_RATE),
            ("expertReadBytesPerSecond", experts, DISK_RATE),
            ("readWhileComputingPercent", read, 1..=100),
            ("computeWhileReadingPercent", compute, 1..=100),
        ],
    )
}

fn gpu(checks: &Checks<'_>, path: &str, gpu: &GpuProfile) -> Result<(), DocumentError> {
    let measured = match (&gpu.measured, &gpu.unusable) {
        (Some(measured), None) => measured,
        (None, Some(_)) => return Ok(()),
        _ => {
            let problem = "must have either measured or the reason why it is unusable";
            return Err(checks.error(path, problem));
        }
    };
    let path = format!("{path}.measured");
    throughput(checks, &format!("{path}.throughput"), &measured.throughput)?;
    let total = measured.total_bytes;
    let kv_append = measured.kv_append_bytes_per_second;
    let (to_gpu, from_gpu) = (
        measured.to_gpu_bytes_per_second,
        measured.from_gpu_bytes_per_second,
    );
    // Nothing is copied where memory is shared.
    let copy_rate = match measured.unified_memory {
        true => 0..=MAX_RATE,
        false => RATE,
    };
    // Where it is not known, nothing is checked.
    let most_buffer = measured.most_buffer_bytes.unwrap_or(i64::MAX);
    let copy_overhead = measured.copy_overhead_nanoseconds;
    let layer_overhead = measured.layer_overhead_nanoseconds;
    checks.fields(
        &path,
        [
            ("totalBytes", total, WHOLE_MEMORY),
            ("availableBytes", measured.available_bytes, 0..=total),
            ("mostBufferBytes", most_buffer, BUFFER),
            ("readBytesPerSecond", measured.read_bytes_per_second, RATE),
            ("kvAppendBytesPerSecond", kv_append, RATE),
            ("toGpuBytesPerSecond", to_gpu, copy_rate.clone()),
            ("fromGpuBytesPerSecond", from_gpu, copy_rate),
            ("copyOverheadNanoseconds", copy_overhead, OVERHEAD),
            ("layerOverheadNanoseconds", layer_overhead, OVERHEAD),
        ],
    )
}

fn throughput(
    checks: &Checks<'_>,
    path: &str,
    throughput: &[Throughput],
) -> Result<(), DocumentError> {
    if throughput.is_empty() {
        return Err(checks.error(path, "is empty: no weight format was measured"));
    }
    for (i, one) in throughput.iter().enumerate() {
        let (decode, prefill) = (one.decode_bytes_per_second, one.prefill_flop_per_second);
        checks.fields(
            &format!("{path}[{i}] ({})", one.format),
            [
                ("decodeBytesPerSecond", decode, RATE),
                ("prefillFlopPerSecond", prefill, FLOPS),
            ],
        )?;
    }
    Ok(())
}

fn link(checks: &Checks<'_>, path: &str, link: &LinkProfile) -> Result<(), DocumentError> {
    if link.to.is_empty() {
        return Err(checks.error(&format!("{path}.to"), "must name a machine"));
    }
    let latency = link.latency_nanoseconds;
    checks.fields(
        path,
        [
            ("latencyNanoseconds", latency, 1..=10 * SECOND),
            ("bytesPerSecond", link.bytes_per_second, LINK_RATE),
        ],
    )
}
