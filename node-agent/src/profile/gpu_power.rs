//! Whether a GPU sleeps, which the kernel tells without waking it. Refuses to ask drivers: they do wake it.

use std::fs;
use std::path::Path;

use prima_engine::{GpuApi, GpuFacts};

/// PCI's class of display controllers.
const DISPLAY: u32 = 0x03;
const NVIDIA: u32 = 0x10de;

/// Whether the GPU that says this sleeps: the kernel has suspended it, as nobody uses it. `false` where that is not known.
pub fn sleeps(root: &Path, facts: &GpuFacts) -> bool {
    let devices = fs::read_dir(root.join("sys/bus/pci/devices"));
    let mut own = devices.into_iter().flatten().flatten().filter_map(|entry| {
        let number = |file: &str| {
            let text = fs::read_to_string(entry.path().join(file)).ok()?;
            u32::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
        };
        let (vendor, device) = (number("vendor")?, number("device")?);
        let is_own = match (&facts.pci_address, facts.pci) {
            (Some(address), _) => entry.file_name() == address.as_str(),
            (None, Some(pci)) => pci == (vendor, device),
            (None, None) => facts.api == GpuApi::Cuda && vendor == NVIDIA,
        };
        (is_own && number("class")? >> 16 == DISPLAY).then(|| entry.path())
    });
    let is_suspended = |device: &Path| {
        let status = fs::read_to_string(device.join("power/runtime_status"));
        status.is_ok_and(|status| status.trim() == "suspended")
    };
    // Without its place, of several of a kind it is not known which of them it is.
    own.next().is_some_and(|first| is_suspended(&first)) && own.all(|other| is_suspended(&other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_sleeps_where_the_kernel_has_suspended_all_of_its_kind() {
        let folder = tempfile::tempdir().unwrap();
        let device = |address: &str, vendor: &str, device: &str, class: &str, status: &str| {
            let path = folder.path().join("sys/bus/pci/devices").join(address);
            fs::create_dir_all(path.join("power")).unwrap();
            for (file, text) in [
                ("vendor", vendor),
                ("device", device),
                ("class", class),
                ("power/runtime_status", status),
            ] {
                fs::write(path.join(file), format!("{text}\n")).unwrap();
            }
        };
        let gpu = |api, pci| GpuFacts {
            api,
            name: "a GPU".to_owned(),
            pci,
            pci_address: None,
            unified_memory: false,
            total_bytes: 2,
            available_bytes: 1,
            most_buffer_bytes: None,
        };
        let amd = gpu(GpuApi::Vulkan, Some((0x1002, 0x73bf)));
        let nvidia = gpu(GpuApi::Cuda, None);
        let asleep = || [&amd, &nvidia].map(|gpu| sleeps(folder.path(), gpu));
        assert_eq!(asleep(), [false, false], "nothing is known of them");

        device("0000:00:02.0", "0x8086", "0x9a49", "0x030000", "active");
        device("0000:03:00.0", "0x1002", "0x73bf", "0x030000", "suspended");
        device("0000:01:00.0", "0x10de", "0x2484", "0x030200", "active");
        assert_eq!(asleep(), [true, false]);
        device("0000:01:00.0", "0x10de", "0x2484", "0x030200", "suspended");
        // Its sound.
        device("0000:01:00.1", "0x10de", "0x228b", "0x040300", "active");
        assert_eq!(asleep(), [true, true]);
        device("0000:04:00.0", "0x1002", "0x73bf", "0x030000", "active");
        assert_eq!(asleep(), [false, true]);
        let at = |address: &str| GpuFacts {
            pci_address: Some(address.to_owned()),
            ..amd.clone()
        };
        assert!(sleeps(folder.path(), &at("0000:03:00.0")));
        assert!(!sleeps(folder.path(), &at("0000:04:00.0")));
    }
}
