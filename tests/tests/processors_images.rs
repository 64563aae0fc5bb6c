//! Images for arm64 do what they are for on a Raspberry Pi 5: put together as those that ship, pushed to a registry, pulled from it as a node of
//! that kind does, and run by QEMU as its processor would run them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use prima_tests::containerd::Containerd;
use prima_tests::emulated::{CORTEX_A76, arm64_program, arm64_root};
use prima_tests::image_archive::assemble_for;
use prima_tests::local_ring::smollm2;
use prima_tests::machine_ring::{Host, MachineRing, Node, plan, usual_profile};
use prima_tests::registry::Registry;
use prima_tests::{Endpoint, http};
use serde_json::json;

/// One in each image.
const PROGRAMS: [&str; 2] = ["prima", "prima-node-agent"];

/// Where an image's files are.
struct Image(PathBuf);

/// A Raspberry Pi 5 that has the image.
impl Host for Image {
    fn program(&self, name: &str) -> Command {
        CORTEX_A76.run_image(&self.0, name)
    }
}

#[test]
fn images_for_arm64_run_on_a_raspberry_pi_5() {
    let folder = tempfile::tempdir().unwrap();
    let images = pulled(folder.path());
    for (image, program) in images.iter().zip(PROGRAMS) {
        let said = run(image.program(program).arg("--version"));
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(said, format!("{program} {version}\n"));
    }

    let [_, agent] = &images;
    let model = smollm2();
    let profiles = vec![usual_profile(), usual_profile()];
    let planned = plan(&model, profiles, &[]).plan;
    assert_eq!(planned.spec.members.len(), 2);
    let node = || Node {
        machine: agent,
        model: model.clone(),
    };
    let ring = MachineRing::start(planned, &[node(), node()], &[]);
    let body = json!({
        "model": ring.model(),
        "prompt": "The capital of France is",
        "max_tokens": 8,
        "temperature": 0,
    });
    let answer = http::post(ring.address(), "/v1/completions", &body).unwrap();
    assert!(answer.body.contains("Paris"), "{answer:?}");
}

/// The image of each program, from where a node gets it.
fn pulled(folder: &Path) -> [Image; 2] {
    let built = folder.join("built");
    fs::create_dir(&built).unwrap();
    fs::copy(arm64_root(), built.join("root.tar")).unwrap();
    let images = PROGRAMS.map(|program| {
        fs::copy(arm64_program(program), built.join(program)).unwrap();
        (format!("localhost/{program}:arm64"), program)
    });
    let archive = assemble_for("arm64", &built, "root.tar", &images);
    let (registry, node) = (Registry::start(), Containerd::start());
    images.map(|(name, program)| {
        let into = folder.join(program);
        let pushed = registry.push(&archive, &name);
        node.pull(&pushed, "linux/arm64", &into)
            .unwrap_or_else(|error| panic!("{error}"));
        Image(into)
    })
}

/// What it printed.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}
