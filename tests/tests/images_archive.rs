//! `images/assemble.py` makes an archive that says what is in it: every digest and size is right, each name has an image for each
//! processor, and the same files make the same bytes.

use std::env;
use std::fs;
use std::iter;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use prima_tests::image_archive::{
    ARCHITECTURES, IMAGES, Layout, assemble, build, own_architecture, unpack,
};
use prima_tests::local_ring::smollm2;
use prima_tests::machine_ring::{Host, MachineRing, Node, cut};
use prima_tests::{Endpoint, http, inputs, software_gpu};
use serde_json::{Value, json};

#[test]
fn an_archive_has_an_image_for_each_name_and_processor() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    for architecture in ARCHITECTURES {
        build(folder, architecture);
    }
    let platforms = ["amd64=amd64", "arm64=arm64"];
    let told = assemble(folder, "prima.tar", &platforms);
    assert!(
        told.status.success(),
        "{}",
        String::from_utf8_lossy(&told.stderr)
    );
    assemble(folder, "again.tar", &platforms);
    let [first, again] =
        ["prima.tar", "again.tar"].map(|name| fs::read(folder.join(name)).expect("an archive"));
    assert!(first == again, "the same files make other bytes");

    let layout = Layout::read(&folder.join("prima.tar"), &folder.join("layout"));
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    let names = layout.names();
    assert_eq!(names.len(), IMAGES.len());
    for (descriptor, (name, program, root)) in names.iter().zip(IMAGES) {
        let annotations = &descriptor["annotations"];
        assert_eq!(annotations["io.containerd.image.name"], name);
        assert_eq!(annotations["org.opencontainers.image.ref.name"], name);
        let digest = descriptor["digest"].as_str().expect("a digest");
        assert!(told.contains(&format!("{name}@{digest}")), "{told}");
        let images = layout.images(descriptor);
        assert_eq!(images.len(), ARCHITECTURES.len());
        for (image, architecture) in images.iter().zip(ARCHITECTURES) {
            assert_eq!(image["platform"]["architecture"], architecture);
            let config = layout.json(&layout.json(image)["config"]);
            assert_eq!(config["architecture"], architecture);
            assert_eq!(config["config"]["User"], "65532:65532");
            let entry = &config["config"]["Entrypoint"][0];
            assert_eq!(*entry, format!("/usr/local/bin/{program}"));

            let into = folder.join(format!("{program}-{root}-{architecture}"));
            let found = layout.files(image, &into);
            assert_eq!(
                found["etc/root"],
                format!("{root} for {architecture}").as_bytes()
            );
            let content = format!("{program} for {architecture}");
            assert_eq!(
                found[&format!("usr/local/bin/{program}")],
                content.as_bytes()
            );
            assert_eq!(found.len(), 2, "nothing else: {found:?}");
        }
    }
}

/// A machine that has the files in a root file system, and beside them what the kernel tells, the tests' folders and the model.
struct Root {
    files: PathBuf,
    model: PathBuf,
}

impl Host for Root {
    fn program(&self, name: &str) -> Command {
        // What is put there is there for this process alone.
        let enter = r#"
            root=$3
            for folder in /dev /proc "$1" "$2"; do
                mkdir -p "$root$folder" && mount --rbind "$folder" "$root$folder" || exit
            done
            shift 2
            exec chroot "$@"
        "#;
        let temporary = env::temp_dir();
        let models = self.model.parent().expect("a folder");
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", enter, "sh"])
            .args([&*temporary, models, &*self.files])
            .arg(format!("/usr/{name}"));
        command
    }
}

/// As images have them: the links, libraries and certificates that programs find, what scanners look for, and Vulkan in one of the two.
#[test]
fn a_root_file_system_runs_the_programs() {
    let folder = tempfile::tempdir().expect("a folder");
    let vulkan = "libvulkan1,mesa-vulkan-drivers,libegl1,libgl1,libglx0";
    for (name, packages, found) in [
        ("root", "", "this machine has no Vulkan loader"),
        ("root-gpu", vulkan, "layers run on it"),
    ] {
        let tar = folder.path().join(format!("{name}.tar"));
        let mut script = Command::new(inputs::file("images/root.sh"));
        script
            .args(["trixie", own_architecture()])
            .arg(&tar)
            .arg(packages);
        assert!(script.status().expect("bash").success());
        let root = folder.path().join(name);
        unpack(&tar, &root);
        let listed = list("prima", &tar);
        for package in ["pkg:deb/debian/libc6@2.", "pkg:deb/debian/ca-certificates@"] {
            assert!(
                listed.iter().any(|one| one.starts_with(package)),
                "{listed:?}"
            );
        }
        let vulkan = listed
            .iter()
            .any(|one| one.contains("/mesa-vulkan-drivers@"));
        assert_eq!(vulkan, name == "root-gpu");
        let release = fs::read_to_string(root.join("etc/os-release")).expect("a release");
        let named = release
            .lines()
            .any(|line| line == "VERSION_CODENAME=trixie");
        assert!(named, "{release}");
        let certificates = fs::read_to_string(root.join("etc/ssl/certs/ca-certificates.crt"));
        let certificates = certificates.expect("certificates");
        assert!(certificates.matches("BEGIN CERTIFICATE").count() > 100);
        let run = |program: &str, arguments: &[&str]| {
            fs::copy(inputs::program(program), root.join("usr").join(program)).expect("a program");
            let mut chroot = Command::new("chroot");
            chroot
                .args(["--userspec=65532:65532".as_ref(), root.as_os_str()])
                .arg(format!("/usr/{program}"))
                .args(arguments)
                // Its own drivers: another may be told for all tests.
                .env_remove(software_gpu::DRIVERS)
                .env(software_gpu::GPU, software_gpu::SOFTWARE);
            let output = chroot.output().expect("chroot");
            let said = [output.stdout, output.stderr].concat();
            let said = String::from_utf8_lossy(&said).into_owned();
            assert!(output.status.success(), "{said}");
            said
        };
        assert!(run("prima", &["--version"]).starts_with("prima "));
        let said = run("prima-node-agent", &["inspect", "--gpu"]);
        assert!(said.contains(found), "{name}: {said}");
        if vulkan {
            continue;
        }
        // Where there is no loader of Vulkan, rings compute all the same.
        let machine = Root {
            files: root,
            model: smollm2(),
        };
        let node = || Node {
            machine: &machine,
            model: machine.model.clone(),
        };
        let planned = cut(&machine.model, 512, 2, 1);
        let ring = MachineRing::start(planned, &[node(), node()], &[]);
        let body = json!({
            "model": ring.model(),
            "prompt": "The capital of France is",
            "max_tokens": 8,
            "temperature": 0,
        });
        let answer = http::post(ring.address(), "/v1/completions", &body).expect("an answer");
        assert!(answer.body.contains("Paris"), "{}", answer.body);
    }
}

/// The image that programs are said to be compiled in.
const RUST: &str = "docker.io/library/rust@sha256:9999";

/// What `images/sbom.py` says is in an image of a program and a root file system.
fn list(program: &str, root: &Path) -> Vec<String> {
    let output = sbom(program, root);
    assert!(output.status.success(), "{output:?}");
    let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(document["bomFormat"], "CycloneDX");
    let properties = &document["metadata"]["component"]["properties"];
    let compiled_in = json!({"name": "compiled in", "value": RUST});
    assert_eq!(properties[1], compiled_in);
    let components = document["components"].as_array().expect("components");
    let (system, packages) = components.split_first().expect("components");
    let debian = json!({"type": "operating-system", "bom-ref": "os:debian@13", "name": "debian", "version": "13"});
    assert_eq!(*system, debian);
    let of = |one: &Value| one["purl"].as_str().expect("a purl").to_owned();
    packages.iter().map(of).collect()
}

fn sbom(program: &str, root: &Path) -> Output {
    let mut python = Command::new("python3");
    python.arg(inputs::file("images/sbom.py"));
    python.args([
        "--program",
        program,
        "--version",
        "9.9.9",
        "--platform",
        "amd64",
        "--compiled-in",
        RUST,
    ]);
    python.arg("--root").arg(root).output().expect("python3")
}

#[test]
fn contents_are_listed_package_by_package() {
    let folder = tempfile::tempdir().expect("a folder");
    let status = folder.path().join("root/var/lib/dpkg/status.d");
    fs::create_dir_all(&status).expect("a folder");
    let fields = "Package: libc6\nVersion: 2.41-12+deb13u1\nArchitecture: amd64\nDescription: C library\n more\n";
    let tar = folder.path().join("root.tar");
    let pack = || {
        let mut pack = Command::new("tar");
        pack.arg("-cf")
            .arg(&tar)
            .arg("-C")
            .arg(folder.path().join("root"));
        assert!(pack.arg(".").status().expect("tar").success());
    };
    let refused = |missing: &str| {
        pack();
        let output = sbom("prima", &tar);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(missing), "{said}");
    };
    refused("does not say which packages it has");
    fs::write(status.join("libc6"), fields).expect("a file");
    refused("does not say which Debian it is");

    let library = folder.path().join("root/usr/lib");
    fs::create_dir_all(&library).expect("a folder");
    let release = "NAME=\"Debian GNU/Linux\"\nVERSION_ID=\"13\"\nVERSION_CODENAME=trixie\n";
    fs::write(library.join("os-release"), release).expect("a file");
    pack();
    let (operator, agent) = (list("prima", &tar), list("prima-node-agent", &tar));
    let libc = "pkg:deb/debian/libc6@2.41-12%2Bdeb13u1?arch=amd64&distro=trixie".to_owned();
    let has = |list: &[String], name: &str| {
        list.iter()
            .any(|one| one.starts_with(&format!("pkg:cargo/{name}@")))
    };
    for listed in [&operator, &agent] {
        assert!(listed.contains(&libc), "{listed:?}");
        assert!(
            has(listed, "tokio") && has(listed, "prima-crds"),
            "{listed:?}"
        );
        let mut once = listed.clone();
        once.dedup();
        assert_eq!(once.len(), listed.len());
    }
    assert!(has(&operator, "highs") && !has(&agent, "highs"));
    assert!(has(&agent, "candle-core") && !has(&operator, "candle-core"));
}

#[test]
fn what_is_missing_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    build(folder.path(), "amd64");
    for (platform, named) in [
        ("arm64=arm64", "arm64/root.tar is missing"),
        (
            "riscv64=amd64",
            "--platform riscv64=amd64: expected one of amd64, arm64",
        ),
    ] {
        let output = assemble(folder.path(), "prima.tar", &[platform]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(named), "{said}");
        assert!(!folder.path().join("prima.tar").exists());
    }
}

/// It would be noticed half an hour later, when all is compiled.
#[test]
fn a_build_asks_for_python_before_it_compiles() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |path: &str| folder.path().join(path);
    for path in ["images", "target/images", "tools"] {
        fs::create_dir_all(at(path)).expect("a folder");
    }
    for name in ["images/build.sh", "images/Containerfile"] {
        fs::copy(inputs::file(name), at(name)).expect("a copy");
    }
    let built_before = at("target/images/prima.tar");
    fs::write(&built_before, "").expect("a file");
    // None of them works here, neither Python nor what would compile.
    for program in ["python3", "docker", "podman", "buildah"] {
        symlink("/bin/false", at("tools").join(program)).expect("a link");
    }
    let usual = env::var_os("PATH").expect("PATH");
    let path = env::join_paths(iter::once(at("tools")).chain(env::split_paths(&usual)));
    let output = Command::new("bash")
        .arg(at("images/build.sh"))
        .env("PATH", path.expect("a search path"))
        .env("TAG", "9.9.9")
        .output()
        .expect("bash");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("Python 3.11 or later"),
        "{said}"
    );
    assert!(built_before.exists());
}
