//! The GPUs of this machine: the one that the engine can use, measured; every other one that is seen, with the reason why
//! it cannot be used. Refuses to estimate: what was not measured is left out.

use std::fs;
use std::path::Path;

use prima_crds::v1alpha1::node_profile::{GpuBackend, GpuProfile};

/// What is seen of GPUs in the files below `root` (`/`, but in tests), none of them measured.
pub fn seen(root: &Path) -> Vec<GpuProfile> {
    let mut gpus = nvidia(root);
    let with_driver = !gpus.is_empty();
    for (vendor, device) in display_devices(root) {
        let (name, backend, reason) = match vendor.as_str() {
            "0x10de" if with_driver => continue,
            "0x10de" => (
                "NVIDIA",
                GpuBackend::Cuda,
                "NVIDIA's driver is not loaded".to_owned(),
            ),
            "0x1002" => ("AMD", GpuBackend::Other, no_backend("AMD")),
            "0x8086" => ("Intel", GpuBackend::Other, no_backend("Intel")),
            // What virtual machines have to show a screen.
            _ => continue,
        };
        gpus.push(GpuProfile {
            name: format!("{name} GPU, device {device}"),
            backend,
            unusable: Some(reason),
            measured: None,
        });
    }
    gpus
}

fn no_backend(vendor: &str) -> String {
    format!("the engine has no code for GPUs of {vendor}")
}

/// What NVIDIA's driver lists.
fn nvidia(root: &Path) -> Vec<GpuProfile> {
    let mut names: Vec<String> = folders(&root.join("proc/driver/nvidia/gpus"))
        .filter_map(|folder| fs::read_to_string(folder.join("information")).ok())
        .map(|text| {
            let model = text.lines().find_map(|line| line.strip_prefix("Model:"));
            model.map_or("NVIDIA GPU", str::trim).to_owned()
        })
        .collect();
    names.sort();
    let unusable = "this agent was built without CUDA: build it with the feature `cuda`";
    names
        .into_iter()
        .map(|name| GpuProfile {
            name,
            backend: GpuBackend::Cuda,
            unusable: Some(unusable.to_owned()),
            measured: None,
        })
        .collect()
}

/// PCI vendor and device of every card that the kernel's graphics drivers list, not of the cards' connectors.
fn display_devices(root: &Path) -> Vec<(String, String)> {
    let mut found: Vec<_> = folders(&root.join("sys/class/drm"))
        .filter(|folder| {
            let name = folder.file_name().and_then(|name| name.to_str());
            let number = name.and_then(|name| name.strip_prefix("card"));
            number.is_some_and(|number| number.parse::<u32>().is_ok())
        })
        .filter_map(|folder| {
            let text = |file| fs::read_to_string(folder.join("device").join(file)).ok();
            Some((
                text("vendor")?.trim().to_owned(),
                text("device")?.trim().to_owned(),
            ))
        })
        .collect();
    found.sort();
    found
}

fn folders(path: &Path) -> impl Iterator<Item = std::path::PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn card(root: &Path, number: u32, vendor: &str, device: &str) {
        file(
            root,
            &format!("sys/class/drm/card{number}/device/vendor"),
            vendor,
        );
        file(
            root,
            &format!("sys/class/drm/card{number}/device/device"),
            device,
        );
    }

    #[test]
    fn every_gpu_is_listed_once_with_the_reason_why_it_cannot_be_used() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        assert_eq!(seen(root), []);
        card(root, 0, "0x8086\n", "0x46a6\n");
        card(root, 1, "0x10de\n", "0x2484\n");
        card(root, 2, "0x1af4\n", "0x1050\n");
        file(root, "sys/class/drm/card0-eDP-1/device/vendor", "0x8086\n");
        file(root, "sys/class/drm/renderD128/device/vendor", "0x8086\n");
        let describe = |gpus: &[GpuProfile]| -> Vec<(String, String)> {
            let one = |gpu: &GpuProfile| (gpu.name.clone(), gpu.unusable.clone().unwrap());
            gpus.iter().map(one).collect()
        };
        let without_driver = describe(&seen(root));
        assert_eq!(without_driver.len(), 2, "{without_driver:?}");
        assert!(
            without_driver[0].1.contains("driver is not loaded"),
            "{without_driver:?}"
        );
        assert!(
            without_driver[1].0.contains("Intel GPU, device 0x46a6"),
            "{without_driver:?}"
        );

        let information = "Model: \t\t NVIDIA GeForce RTX 3070\nIRQ:   \t\t 80\n";
        file(
            root,
            "proc/driver/nvidia/gpus/0000:01:00.0/information",
            information,
        );
        let with_driver = describe(&seen(root));
        assert_eq!(with_driver.len(), 2, "{with_driver:?}");
        assert_eq!(with_driver[0].0, "NVIDIA GeForce RTX 3070");
        assert!(with_driver[0].1.contains("`cuda`"), "{with_driver:?}");
    }
}
