//! `images/release.sh` pushes an archive, lists of what is in it and the chart to a registry. Nodes and Helm get from there exactly what was
//! released, by name and by digest, and whoever looks for known vulnerabilities the list of each image.

use std::collections::BTreeSet;
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
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const SBOM: &str = "application/vnd.cyclonedx+json";
/// Where everything is in the registry: not where the chart of the repository looks for it.
const NAMESPACE: &str = "home/prima";

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
            for (name, ..) in IMAGES {
                let list = list_name(repository_and_tag(name).0, architecture);
                let content = format!("{{\"list\": \"{list}\"}}");
                fs::write(built.join(list), content).expect("a file");
            }
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
    /// Registry and namespace.
    namespace: String,
    /// What the release says: names and digests.
    digests: String,
}

impl Released {
    fn new() -> Self {
        let (tree, registry) = (Tree::new(), Registry::start());
        let namespace = format!("{}/{NAMESPACE}", registry.address());
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
    let (repository, tag) = repository_and_tag(name);
    (repository, tag, index["digest"].as_str().expect("a digest"))
}

fn repository_and_tag(name: &str) -> (&str, &str) {
    let own = name.strip_prefix("ghcr.io/prima-dev/").expect("our name");
    own.split_once(':').expect("a tag")
}

/// As a build calls the list of what an image has.
fn list_name(repository: &str, architecture: &str) -> String {
    format!("{repository}-{architecture}.cdx.json")
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
            let path = format!("/v2/{NAMESPACE}/{repository}/manifests/{reference}");
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
fn a_registry_has_the_list_of_what_each_image_has() {
    let released = Released::new();
    let layout = released.tree.layout();
    for (index, (name, ..)) in layout.names().iter().zip(IMAGES) {
        let (repository, _) = repository_and_tag(name);
        let get = |path: &str, media_type: &str| {
            let path = format!("/v2/{NAMESPACE}/{repository}/{path}");
            let answer = http::get_as(released.registry.address(), &path, media_type);
            let answer = answer.expect("an answer");
            assert_eq!(answer.status, 200, "{path}: {answer:?}");
            answer
        };
        for image in layout.images(index) {
            let text = |value: &Value| value.as_str().expect("a text").to_owned();
            let tag = text(&image["digest"]).replace(':', "-");
            let artifact = get(&format!("manifests/{tag}.sbom"), MANIFEST).json();
            assert_eq!(artifact["artifactType"], SBOM);
            for field in ["mediaType", "digest", "size"] {
                assert_eq!(artifact["subject"][field], image[field], "{artifact}");
            }
            let layers = artifact["layers"].as_array().expect("layers");
            assert_eq!(layers.len(), 1, "{artifact}");
            assert_eq!(layers[0]["mediaType"], SBOM);
            let list = list_name(repository, &text(&image["platform"]["architecture"]));
            let expected = released.tree.path(&format!("target/images/{list}"));
            let found = get(&format!("blobs/{}", text(&layers[0]["digest"])), SBOM);
            assert_eq!(found.body, fs::read_to_string(expected).expect("a list"));
        }
    }
}

#[test]
fn a_list_that_is_missing_is_named() {
    let tree = Tree::new();
    let list = tree.path("target/images/prima-operator-arm64.cdx.json");
    fs::remove_file(list).expect("a list");
    let output = tree.release(&format!("{}/{NAMESPACE}", free_address()));
    let said = String::from_utf8_lossy(&output.stderr);
    let named = "target/images/prima-operator-arm64.cdx.json is missing: images/build.sh makes it";
    assert!(!output.status.success() && said.contains(named), "{said}");
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
    let packaged = released
        .tree
        .path(&format!("target/images/prima-{version}.tgz"));
    // It is no release of the chart's own version.
    let (_, tag) = IMAGES[0].0.rsplit_once(':').expect("a tag");
    assert!(version.ends_with(&format!("-{tag}")), "{version}");
    // Installed, it asks for the images that were released with it; and it says so to whoever looks at it.
    let lines = released.digests.lines().take(IMAGES.len());
    let images: BTreeSet<&str> = lines.filter_map(|line| line.split('@').next()).collect();
    let helm = |arguments: &[&str]| {
        let mut helm = Command::new(program("helm"));
        helm.args(arguments).arg(&packaged);
        let output = released.tree.run(helm);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let gpus = "agent.gpus.nvidia.enabled=true";
    for arguments in [
        &["template", "prima", "--set", gpus][..],
        &["show", "chart"],
    ] {
        let said = helm(arguments);
        let named = said
            .lines()
            .filter_map(|line| line.trim().strip_prefix("image: "));
        assert_eq!(named.collect::<BTreeSet<_>>(), images, "{said}");
    }
    let packaged = fs::read(&packaged).expect("a chart");
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
    let output = tree.release(&format!("{nobody}/{NAMESPACE}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains(&nobody.to_string()), "{said}");
}
