//! Which machine this is: system, processor, container or not. What cannot be found out is called unknown; nothing here
//! is an error, and nothing of it is measured.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use prima_crds::v1alpha1::node_profile::{Os, SystemProfile};

/// Reads the files below `root` (`/`, except in tests), the environment and what the kernel says.
pub fn read(root: &Path) -> SystemProfile {
    let uname = rustix::system::uname();
    let os = if cfg!(target_os = "macos") {
        Os::MacOs
    } else if cfg!(target_os = "android") || root.join("system/build.prop").exists() {
        Os::Android
    } else {
        Os::Linux
    };
    let release = uname.release().to_string_lossy().into_owned();
    let os_name = ["etc/os-release", "usr/lib/os-release"]
        .iter()
        .find_map(|file| pretty_name(&fs::read_to_string(root.join(file)).ok()?))
        .unwrap_or_else(|| format!("{} {release}", uname.sysname().to_string_lossy()));
    SystemProfile {
        os,
        os_name,
        kernel: release,
        architecture: std::env::consts::ARCH.to_owned(),
        in_container: in_container(root),
    }
}

/// The processor's name.
pub fn cpu_model(root: &Path) -> String {
    fs::read_to_string(root.join("proc/cpuinfo"))
        .ok()
        .and_then(|text| model_in_cpuinfo(&text))
        .unwrap_or_else(|| format!("unknown {} processor", std::env::consts::ARCH))
}

/// This machine's name on the network, in the form that names in a cluster have.
pub fn host_name() -> String {
    as_name(&rustix::system::uname().nodename().to_string_lossy())
}

/// Checks that a text can name a machine: what a cluster allows (RFC 1123 subdomain), which is also a valid file name.
pub fn check_name(text: &str) -> Result<String, String> {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let well_formed = !text.is_empty()
        && text.len() <= 253
        && text.chars().all(|c| inner(c) || matches!(c, '-' | '.'))
        && text.starts_with(inner)
        && text.ends_with(inner);
    match well_formed {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "expected lower-case letters, digits, '-' and '.', a letter or digit first and last, found {text:?}"
        )),
    }
}

fn as_name(host: &str) -> String {
    let name: String = host
        .to_lowercase()
        .chars()
        .map(|c| match c {
            'a'..='z' | '0'..='9' | '.' => c,
            _ => '-',
        })
        .collect();
    match check_name(name.trim_matches(['-', '.'])) {
        Ok(name) => name,
        Err(_) => "this-machine".to_owned(),
    }
}

/// os-release(5): shell assignments.
fn pretty_name(text: &str) -> Option<String> {
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
    let name = value.trim().trim_matches(['"', '\'']);
    (!name.is_empty()).then(|| name.to_owned())
}

/// x86 names its model. Arm gives implementer and part numbers for every core; boards give their own name below.
fn model_in_cpuinfo(text: &str) -> Option<String> {
    let fields = || {
        text.lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(key, value)| (key.trim(), value.trim()))
    };
    let first = |wanted: &str| {
        fields()
            .find(|(key, value)| *key == wanted && !value.is_empty())
            .map(|(_, value)| value.to_owned())
    };
    if let Some(name) = first("model name") {
        return Some(name);
    }
    let mut cores = BTreeMap::<String, usize>::new();
    let mut implementer = "";
    for (key, value) in fields() {
        match key {
            "CPU implementer" => implementer = value,
            "CPU part" => *cores.entry(arm_core(implementer, value)).or_default() += 1,
            _ => {}
        }
    }
    let cores: Vec<String> = cores
        .into_iter()
        .map(|(name, count)| format!("{count} x {name}"))
        .collect();
    let board = first("Model").or_else(|| first("Hardware"));
    match (board, cores.is_empty()) {
        (Some(board), true) => Some(board),
        (Some(board), false) => Some(format!("{board}, {}", cores.join(" + "))),
        (None, false) => Some(cores.join(" + ")),
        (None, true) => None,
    }
}

/// The core's name by the numbers in its MIDR register, as Linux's arch/arm64/include/asm/cputype.h lists them.
fn arm_core(implementer: &str, part: &str) -> String {
    let name = match (implementer, part) {
        ("0x41", "0xd03") => "Cortex-A53",
        ("0x41", "0xd04") => "Cortex-A35",
        ("0x41", "0xd05") => "Cortex-A55",
        ("0x41", "0xd07") => "Cortex-A57",
        ("0x41", "0xd08") => "Cortex-A72",
        ("0x41", "0xd09") => "Cortex-A73",
        ("0x41", "0xd0a") => "Cortex-A75",
        ("0x41", "0xd0b") => "Cortex-A76",
        ("0x41", "0xd0c") => "Neoverse-N1",
        ("0x41", "0xd0d") => "Cortex-A77",
        ("0x41", "0xd40") => "Neoverse-V1",
        ("0x41", "0xd41") => "Cortex-A78",
        ("0x41", "0xd44") => "Cortex-X1",
        ("0x41", "0xd46") => "Cortex-A510",
        ("0x41", "0xd47") => "Cortex-A710",
        ("0x41", "0xd48") => "Cortex-X2",
        ("0x41", "0xd49") => "Neoverse-N2",
        ("0x41", "0xd4f") => "Neoverse-V2",
        _ => return format!("Arm core {implementer}/{part}"),
    };
    name.to_owned()
}

fn in_container(root: &Path) -> bool {
    ["KUBERNETES_SERVICE_HOST", "container"]
        .iter()
        .any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()))
        || ["run/.containerenv", ".dockerenv"]
            .iter()
            .any(|file| root.join(file).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_named_on_x86_and_arm() {
        let x86 = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9354P\n";
        assert_eq!(model_in_cpuinfo(x86).unwrap(), "AMD EPYC 9354P");
        let core =
            "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd08\nCPU revision\t: 3\n\n";
        let pi = format!("{core}{core}Model\t\t: Raspberry Pi 4 Model B Rev 1.1\n");
        assert_eq!(
            model_in_cpuinfo(&pi).unwrap(),
            "Raspberry Pi 4 Model B Rev 1.1, 2 x Cortex-A72"
        );
        let phone = "CPU implementer : 0x41\nCPU part : 0xd05\n\nCPU implementer : 0x48\nCPU part : 0xd40\n";
        assert_eq!(
            model_in_cpuinfo(phone).unwrap(),
            "1 x Arm core 0x48/0xd40 + 1 x Cortex-A55"
        );
        assert_eq!(model_in_cpuinfo("processor : 0\n"), None);
    }

    #[test]
    fn systems_and_containers_are_told_by_their_files() {
        assert_eq!(
            pretty_name("NAME=x\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n").unwrap(),
            "Debian GNU/Linux 12 (bookworm)"
        );
        let root = tempfile::tempdir().unwrap();
        // No os-release: the kernel's own name, which is never empty.
        assert!(
            read(root.path())
                .os_name
                .contains(&read(root.path()).kernel)
        );
        fs::write(root.path().join(".dockerenv"), "").unwrap();
        assert!(read(root.path()).in_container);
    }

    #[test]
    fn names_are_those_of_a_cluster() {
        for good in ["desk", "node-1.lan", "7"] {
            assert_eq!(check_name(good).unwrap(), good);
        }
        for bad in ["", "Desk", "-x", "x.", "a/b", "../x", &"x".repeat(254)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
        assert_eq!(as_name("My_PC.local"), "my-pc.local");
        assert_eq!(as_name("--"), "this-machine");
    }
}
