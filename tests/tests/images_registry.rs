//! `images/release.sh` pushes an archive and the chart to a registry. Nodes and Helm get from there exactly what was released, by name and
//! by digest.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::thread;
use std::time::Duration;

use prima_tests::containerd::Containerd;
use prima_tests::free_ports::free_address;
use prima_tests::image_archive::{ARCHITECTURES, IMAGES, Layout, assemble, build, files_below};
use prima_tests::programs::program;
use prima_tests::registry::Registry;
use prima_tests::{http, inputs};
use serde_json::Value;
use tempfile::TempDir;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// The repository's folders that a release takes, after a build.
struct Tree(TempDir);

impl Tree {
    fn new() -> Self {
        let tree = Self(tempfile::tempdir().expect("a folder"));
        fs::create_dir(tree.path("charts")).expect("a folder");
        for folder in ["charts/prima", "images"] {
            let mut copy = Command::new("cp");
            copy.arg("--archive");
            copy.arg(inputs::file(folder)).arg(tree.path(folder));
            assert!(copy.status().expect("cp").success());
        }
        let built = tree.path("target/images");
        for architecture in ARCHITECTURES {
            build(&built, architecture);
        }
        let assembled = assemble(&built, "prima.tar", &["amd64=amd64", "arm64=arm64"]);
        assert!(assembled.status.success(), "{assembled:?}");
        tree
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn release(&self, namespace: &str) -> Output {
        let helm = program("helm");
        let mut path = vec![helm.parent().expect("its folder").to_owned()];
        path.extend(std::env::split_paths(
            &std::env::var_os("PATH").expect("a path"),
        ));
        let mut release = Command::new(self.path("images/release.sh"));
        release
            .arg(namespace)
            .env("PLAIN_HTTP", "1")
            .env("PATH", std::env::join_paths(path).expect("a path"));
        self.run(release)
    }

    /// Where nobody is logged in to a registry.
    fn run(&self, mut command: Command) -> Output {
        command
            .current_dir(self.0.path())
            .env("HOME", self.0.path())
            .env_remove("XDG_RUNTIME_DIR");
        command.output().expect("a program that is there")
    }

    fn layout(&self) -> Layout {
        Layout::read(
            &self.path("target/images/prima.tar"),
            &self.path("target/layout"),
        )
    }
}

/// A registry to which a tree was released.
struct Released {
    tree: Tree,
    registry: Registry,
    /// Where everything is below.
    namespace: String,
    /// What the release says: names and digests.
    digests: String,
}

impl Released {
    fn new() -> Self {
        let (tree, registry) = (Tree::new(), Registry::start());
        let namespace = format!("{}/prima-dev", registry.address());
        let digests = digests(&tree, &namespace);
        Self {
            tree,
            registry,
            namespace,
            digests,
        }
    }
}

/// Releases, and returns what that says; it is in a file, too.
fn digests(tree: &Tree, namespace: &str) -> String {
    let output = tree.release(namespace);
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{errors}");
    let digests = fs::read_to_string(tree.path("target/images/digests.txt")).expect("digests");
    assert!(said.ends_with(&digests), "{said}");
    digests
}

/// Repository, tag and digest of an image of the archive.
fn parts<'a>(name: &'a str, index: &'a Value) -> (&'a str, &'a str, &'a str) {
    let own = name.strip_prefix("ghcr.io/prima-dev/").expect("our name");
    let (repository, tag) = own.split_once(':').expect("a tag");
    (repository, tag, index["digest"].as_str().expect("a digest"))
}

#[test]
fn a_release_says_what_the_registry_has() {
    let released = Released::new();
    let address = released.registry.address();
    let layout = released.tree.layout();
    let mut lines = released.digests.lines();
    for (index, (name, ..)) in layout.names().iter().zip(IMAGES) {
        let (repository, tag, digest) = parts(name, index);
        let line = format!("{}/{repository}:{tag}@{digest}", released.namespace);
        assert_eq!(lines.next(), Some(&*line));
        for reference in [tag, digest] {
            let path = format!("/v2/prima-dev/{repository}/manifests/{reference}");
            let answer = http::get_as(address, &path, INDEX).expect("an index");
            assert_eq!(answer.body.as_bytes(), layout.blob(index), "{path}");
            let images = answer.json()["manifests"].as_array().map(Vec::len);
            assert_eq!(images, Some(ARCHITECTURES.len()));
        }
    }
    let chart = lines.next().expect("the chart");
    let (name, _) = chart.split_once("@sha256:").expect("a digest");
    assert!(name.starts_with(&format!("{}/charts/prima:", released.namespace)));
    assert_eq!(lines.next(), None);

    // A chart that is packaged in another second is the same one.
    thread::sleep(Duration::from_millis(1100));
    let again = digests(&released.tree, &released.namespace);
    assert_eq!(again, released.digests);
}

#[test]
fn containerd_pulls_by_name_and_by_digest() {
    let released = Released::new();
    let layout = released.tree.layout();
    for by_digest in [false, true] {
        // It has nothing of the other way's.
        let node = Containerd::start();
        let folder = tempfile::tempdir().expect("a folder");
        for (index, (name, program, _)) in layout.names().iter().zip(IMAGES) {
            let (repository, tag, digest) = parts(name, index);
            let reference = match by_digest {
                true => format!("{repository}@{digest}"),
                false => format!("{repository}:{tag}"),
            };
            for image in layout.images(index) {
                let architecture = image["platform"]["architecture"].as_str();
                let architecture = architecture.expect("a processor");
                let own = folder.path().join(format!("{repository}-{architecture}"));
                let expected = layout.files(&image, &own.with_extension("expected"));
                let pulled = node.pull(
                    &format!("{}/{reference}", released.namespace),
                    &format!("linux/{architecture}"),
                    &own,
                );
                pulled.unwrap_or_else(|error| panic!("{error}"));
                assert_eq!(files_below(&own), expected, "{reference}, {architecture}");
                let program = &expected[&format!("usr/local/bin/{program}")];
                assert!(program.ends_with(architecture.as_bytes()));
            }
        }
    }
}

#[test]
fn helm_pulls_the_chart() {
    let released = Released::new();
    let chart = released.digests.lines().last().expect("the chart");
    let (name, digest) = chart.split_once('@').expect("a digest");
    let (repository, version) = name.rsplit_once(':').expect("a version");
    let packaged = format!("target/images/prima-{version}.tgz");
    // Installed, it asks for the images that were released with it; it is no release of the chart's own version.
    let (_, tag) = IMAGES[0].0.rsplit_once(':').expect("a tag");
    assert!(version.ends_with(&format!("-{tag}")), "{version}");
    let mut show = Command::new(program("helm"));
    show.args(["show", "chart"])
        .arg(released.tree.path(&packaged));
    let shown = released.tree.run(show);
    let shown = String::from_utf8_lossy(&shown.stdout);
    let expected = format!("appVersion: {tag}");
    assert!(shown.lines().any(|line| line == expected), "{shown}");
    let packaged = fs::read(released.tree.path(&packaged)).expect("a chart");
    for (reference, version) in [
        (repository.to_owned(), Some(version)),
        (format!("{repository}@{digest}"), None),
    ] {
        let into = tempfile::tempdir().expect("a folder");
        let mut pull = Command::new(program("helm"));
        pull.arg("pull")
            .arg(format!("oci://{reference}"))
            .args(version.map(|version| format!("--version={version}")))
            .arg("--plain-http")
            .arg("--destination")
            .arg(into.path());
        let pulled = released.tree.run(pull);
        assert!(pulled.status.success(), "{pulled:?}");
        let files = files_below(into.path());
        let files: Vec<_> = files.values().collect();
        assert!(files == [&packaged], "{reference} is another chart");
    }
}

#[test]
fn a_registry_that_is_not_there_is_named() {
    let (tree, nobody) = (Tree::new(), free_address());
    let output = tree.release(&format!("{nobody}/prima-dev"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains(&nobody.to_string()), "{said}");
}
