//! What a process holds of the machine's memory through the drivers of GPUs: layers on a GPU that shares it, most of all. It counts as memory of no
//! process, and is free again when this one ends.
//!
//! Drivers tell it for each file that a process has open of them (/proc/PID/fdinfo, <https://docs.kernel.org/gpu/drm-usage-stats.html>). What is
//! asked is the kernel, not the process: it alone knows what lies in the machine's memory and what in memory that was set aside for the GPU, and it
//! counts what a driver takes for itself, too. Those that do not tell hold nothing by this: kernels and drivers of before, and drivers that are not
//! the kernel's.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;

/// A process has some hundred files open, most of them connections.
const MOST_FILES: usize = 4096;
/// A driver tells some kilobytes of one.
const MOST_BYTES: u64 = 64 << 10;

/// In bytes, by the files below `root` (`/`, except in tests). 0 where they cannot be read.
pub fn held_bytes(root: &Path, pid: u32) -> u64 {
    let folder = root.join(format!("proc/{pid}/fdinfo"));
    let Ok(files) = fs::read_dir(folder) else {
        return 0;
    };
    // One that is closed meanwhile holds nothing.
    let texts = files.flatten().take(MOST_FILES);
    memory_of(texts.filter_map(|file| text(&file.path())))
}

fn text(path: &Path) -> Option<String> {
    let mut text = Vec::new();
    let file = File::open(path).ok()?;
    file.take(MOST_BYTES).read_to_end(&mut text).ok()?;
    String::from_utf8(text).ok()
}

/// Of all clients of drivers together. Several files may be of one.
fn memory_of(texts: impl Iterator<Item = String>) -> u64 {
    let clients: HashMap<String, u64> = texts.filter_map(|text| client(&text)).collect();
    clients.into_values().fold(0, u64::saturating_add)
}

/// Which client of a driver a file is of, and the bytes of the machine's memory that this one holds; `None` if it is of no driver that tells.
fn client(text: &str) -> Option<(String, u64)> {
    let (mut device, mut id) = ("", None);
    let mut regions = BTreeMap::new();
    for line in text.lines() {
        let Some((key, value)) = line.split_once(':') else {
            continue;
        };
        let value = value.trim();
        match key {
            "drm-pdev" => device = value,
            "drm-client-id" => id = Some(value),
            _ => {}
        }
        let region = key
            .strip_prefix("drm-resident-")
            .or_else(|| key.strip_prefix("drm-memory-"));
        if let Some(region) = region.filter(|region| is_of_the_machine(region))
            && let Some(held) = bytes(value)
        {
            // amdgpu tells both, and they are the same.
            regions.insert(region, held);
        }
    }
    let held = regions.into_values().fold(0, u64::saturating_add);
    // Numbers may be of one device each.
    Some((format!("{device} {}", id?), held))
}

/// Whether a region of a driver is memory of the machine, as any other. Not so memory of a GPU (`vram`, `local0`), and what was set aside for one when
/// the machine started: `vram` of one in the processor, `stolen-system0`.
fn is_of_the_machine(region: &str) -> bool {
    // `memory` is what most call it, the next two are amdgpu's; `gtt` is xe's, too, as `system` is, and `system0` i915's.
    matches!(region, "memory" | "gtt" | "cpu" | "system" | "system0")
}

/// A number, of bytes if no unit follows.
fn bytes(value: &str) -> Option<u64> {
    let mut words = value.split_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    let unit = match words.next() {
        None => 1,
        Some("KiB") => 1 << 10,
        Some("MiB") => 1 << 20,
        Some(_) => return None,
    };
    number.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;

    /// Of a Ryzen's GPU: what was set aside for it is full, the rest lies in the machine's memory.
    const AMDGPU: &str = "pos:\t0\nflags:\t02400002\nmnt_id:\t26\nino:\t1103\ndrm-driver:\tamdgpu\ndrm-client-id:\t41\n\
        drm-pdev:\t0000:c4:00.0\npasid:\t32779\ndrm-total-vram:\t524288 KiB\ndrm-shared-vram:\t0\ndrm-resident-vram:\t524288 KiB\n\
        drm-purgeable-vram:\t0\ndrm-total-gtt:\t9961472 KiB\ndrm-shared-gtt:\t0\ndrm-resident-gtt:\t9961472 KiB\ndrm-total-cpu:\t16 KiB\n\
        drm-resident-cpu:\t16 KiB\ndrm-total-doorbell:\t0\ndrm-resident-doorbell:\t0\ndrm-memory-vram:\t524288 KiB\n\
        drm-memory-gtt: \t9961472 KiB\ndrm-memory-cpu: \t16 KiB\namd-evicted-vram:\t0 KiB\namd-requested-vram:\t524288 KiB\n\
        amd-requested-gtt:\t9961472 KiB\ndrm-engine-compute:\t81002441 ns\n";
    /// As kernels of before have it.
    const OLDER_AMDGPU: &str = "drm-driver:\tamdgpu\ndrm-client-id:\t7\ndrm-pdev:\t0000:04:00.0\npasid:\t32770\ndrm-memory-vram:\t1024 KiB\n\
        drm-memory-gtt: \t2048 KiB\ndrm-memory-cpu: \t0 KiB\ndrm-engine-gfx:\t55 ns\n";
    const I915: &str = "pos:\t0\ndrm-driver:\ti915\ndrm-client-id:\t39\ndrm-pdev:\t0000:00:02.0\ndrm-total-system0:\t6044 KiB\n\
        drm-shared-system0:\t0\ndrm-active-system0:\t0\ndrm-resident-system0:\t6000 KiB\ndrm-purgeable-system0:\t1688 KiB\n\
        drm-total-stolen-system0:\t512 KiB\ndrm-resident-stolen-system0:\t512 KiB\ndrm-engine-render:\t346249 ns\n\
        drm-engine-capacity-video:\t2\n";
    /// Of a card, which has memory of its own.
    const XE: &str = "pos:\t0\ndrm-driver:\txe\ndrm-client-id:\t3\ndrm-pdev:\t0000:03:00.0\ndrm-total-system:\t8 MiB\n\
        drm-resident-system:\t4 MiB\ndrm-total-gtt:\t192 KiB\ndrm-resident-gtt:\t192 KiB\ndrm-total-vram0:\t23992 KiB\n\
        drm-shared-vram0:\t16 MiB\ndrm-resident-vram0:\t23992 KiB\ndrm-resident-stolen:\t64 KiB\ndrm-total-cycles-rcs:\t7655183225\n";
    const PANFROST: &str = "pos:\t0\ndrm-driver:\tpanfrost\ndrm-client-id:\t14\ndrm-engine-fragment:\t1846584880 ns\n\
        drm-maxfreq-fragment:\t799999987 Hz\ndrm-total-memory:\t290 MiB\ndrm-shared-memory:\t0 MiB\ndrm-active-memory:\t226 MiB\n\
        drm-resident-memory:\t36496 KiB\ndrm-purgeable-memory:\t128 KiB\n";
    const V3D: &str = "pos:\t0\ndrm-driver:\tv3d\ndrm-client-id:\t5\ndrm-engine-csd:\t4171 ns\ndrm-total-memory:\t81920\n\
        drm-shared-memory:\t0\ndrm-resident-memory:\t81920\n";

    fn held(texts: &[&str]) -> u64 {
        memory_of(texts.iter().map(|text| (*text).to_owned()))
    }

    #[test]
    fn drivers_tell_what_lies_in_the_machines_memory() {
        for (text, expected) in [
            (AMDGPU, (9_961_472 + 16) * KIB),
            (OLDER_AMDGPU, 2048 * KIB),
            (I915, 6000 * KIB),
            (XE, (4096 + 192) * KIB),
            (PANFROST, 36_496 * KIB),
            (V3D, 81_920),
            // A file, and NVIDIA's card, of which the kernel's part of the driver tells no memory.
            ("pos:\t0\nflags:\t0100000\nmnt_id:\t29\nino:\t7\n", 0),
            ("pos:\t0\ndrm-driver:\tnvidia-drm\ndrm-client-id:\t9\n", 0),
            ("", 0),
        ] {
            assert_eq!(held(&[text]), expected, "{text}");
        }
    }

    #[test]
    fn a_client_counts_once() {
        let own = 36_496 * KIB;
        assert_eq!(held(&[PANFROST, V3D, PANFROST]), own + 81_920);
        // Numbers are of one device each, or of all.
        let other_device = I915.replace("0000:00:02.0", "0000:00:03.0");
        assert_eq!(held(&[I915, &other_device, I915]), 2 * 6000 * KIB);
        let other_client = PANFROST.replace("id:\t14", "id:\t15");
        assert_eq!(held(&[PANFROST, &other_client]), 2 * own);
        // Without a number, nobody knows whether it was counted.
        assert_eq!(held(&[&PANFROST.replace("drm-client-id", "id")]), 0);
    }

    #[test]
    fn what_is_no_number_of_bytes_does_not_count() {
        let with = |value: &str| {
            let text = format!("drm-client-id: 1\ndrm-resident-memory: {value}\n");
            held(&[&text])
        };
        assert_eq!(with("7"), 7);
        assert_eq!(with("3 MiB"), 3 << 20);
        for wrong in ["", "-1", "x", "7 GB", "1.5 MiB", "18446744073709551615 KiB"] {
            assert_eq!(with(wrong), 0, "{wrong}");
        }
        let most = format!(
            "drm-client-id: 1\ndrm-resident-memory: {}\ndrm-resident-gtt: 9\n",
            u64::MAX
        );
        assert_eq!(held(&[&most]), u64::MAX);
    }

    #[test]
    fn all_files_of_a_process_are_looked_at() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("proc/7/fdinfo");
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in [("0", ""), ("5", V3D), ("11", PANFROST), ("12", V3D)] {
            fs::write(folder.join(name), text).unwrap();
        }
        fs::write(folder.join("13"), [0xff, 0xfe]).unwrap();
        assert_eq!(held_bytes(root.path(), 7), 36_496 * KIB + 81_920);
        assert_eq!(held_bytes(root.path(), 8), 0);
    }
}
