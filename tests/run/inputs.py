"""What a suite depends on, as one digest: its own program and the programs that it starts, the files that it reads, the assets,
the tools, and this machine. A suite that passed with the same digest here need not run again.

A suite's program holds its sources and those of all crates that it uses, compiled, so the program's bytes stand for them. What it
reaches beside that is listed in suites.json; the harness refuses whatever is not (tests/src/inputs.rs). Suites of other packages
than prima-tests reach the files of their own package, too.

What is not in a git checkout cannot be told from what was left there, so without one every suite runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import machine

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "assets"))
import fetch  # noqa: E402

CACHE = fetch.CACHE
SUITES: dict[str, dict[str, list[str]]] = json.loads((ROOT / "tests" / "suites.json").read_text())
PASSED = CACHE / "passed.json"
# Beginnings of the names of variables that change what tests do, or what they compare with.
VARIABLES = ("PRIMA_", "RUST_", "NEXTEST", "PROPTEST_", "PYTEST", "PYTHON", "HF_", "OTEL_", "UPDATE_GOLDEN", "HTTP_PROXY", "HTTPS_PROXY",
             "ALL_PROXY", "NO_PROXY")


# What cargo compiles in one resolution of features, by its options and nextest's: all packages as they ship; and the code for CUDA and Metal,
# which candle computes on a CPU here, with candle's own models to compare with. Candle turns on features that compile the kernels anew: there
# with the checks that the first leaves out (Cargo.toml), and so their own tests run there. What both have runs in the last.
BUILDS = [
    ["--workspace", "--bins", "--tests", "--locked"],
    ["--package=prima-engine", "--package=prima-kernels", "--features=prima-engine/candle-oracle", "--test=gpu_layers_candle", "--test=candle_families",
     "--test=kernels", "--test=internals", "--locked",
     "--config=profile.dev.package.prima-kernels.debug-assertions=true", "--config=profile.dev.package.prima-kernels.overflow-checks=true"],
]


@dataclasses.dataclass(frozen=True)
class Suite:
    """One test program."""

    build: int  # which of BUILDS
    package: str
    target: str  # as cargo calls it
    kind: str  # lib, bin or test
    program: Path

    @property
    def id(self) -> str:
        """As nextest calls it."""
        match self.kind:
            case "test":
                return f"{self.package}::{self.target}"
            case "bin":
                return f"{self.package}::bin/{self.target}"
            case _:
                return self.package

    def listed(self, what: str) -> list[str]:
        """What suites.json says of it."""
        return SUITES.get(self.name, {}).get(what, [])

    @property
    def name(self) -> str:
        """In suites.json: suites that use the harness of prima-tests by their own name, others by their package's."""
        return self.target if self.package in ("prima-tests", "prima-bench") else self.package


@dataclasses.dataclass(frozen=True)
class Package:
    """One of the workspace; paths are relative to the repository's root."""

    folder: str
    dependencies: list[str]  # of the workspace
    test_dependencies: list[str]  # those of its tests only
    targets: list[tuple[str, str]]  # as cargo calls them, and their kinds

    @staticmethod
    def all() -> dict[str, Package]:
        """By name, as cargo has them."""
        listed = subprocess.run(["cargo", "metadata", "--no-deps", "--format-version=1", "--locked"], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                                check=True).stdout
        return {
            package["name"]: Package(
                str(Path(package["manifest_path"]).parent.relative_to(ROOT)),
                [dependency["name"] for dependency in package["dependencies"] if dependency.get("path") and dependency["kind"] != "dev"],
                [dependency["name"] for dependency in package["dependencies"] if dependency.get("path") and dependency["kind"] == "dev"],
                [(target["name"], target["kind"][0]) for target in package["targets"]],
            )
            for package in json.loads(listed)["packages"]
        }


class Digests:
    """Digests of what several suites share are made once."""

    def __init__(self, packages: dict[str, Package], programs: Path) -> None:
        self.packages = packages
        self.programs = programs  # where cargo puts what is not a test
        self.known: dict[str, str] = {}
        self.tracked: list[str] | None = None

    def of_suite(self, suite: Suite, others: list[str]) -> str:
        """`others`: what identifies the tools that it needs, and which of its tests do not run here. Empty if it cannot be told."""
        if not self.repository():
            return ""
        parts = [suite.id, self.machine(), self.assets(), self.file(suite.program), *others]
        parts += [self.file(self.programs / program) for program in suite.listed("programs")]
        files = list(suite.listed("files"))
        if suite.package != "prima-tests":
            files.append(self.packages[suite.package].folder)
        parts += [self.tree(path) for path in sorted(files)]
        parts += [self.sources(package) for package in suite.listed("sources")]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def file(self, path: Path) -> str:
        key = str(path)
        if key not in self.known:
            with open(path, "rb") as file:
                self.known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return self.known[key]

    def tree(self, path: str) -> str:
        """Names and contents of the repository's files at or below `path`, but for Rust's, which are in programs."""
        return self.contents([name for name in self.below(path) if not name.endswith(".rs")])

    def sources(self, package: str) -> str:
        """What a package's programs are made of, or its tests if it has no programs: files of it and of those that it depends on, and what cargo
        builds them by."""
        tested = not any(kind == "bin" for _, kind in self.packages[package].targets)
        found, waiting = set(), [package, *(self.packages[package].test_dependencies if tested else [])]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self.packages[name].dependencies
        names = {name for other in found for name in self.of_package(other, with_tests=tested and other == package)}
        return self.contents(sorted(names | {"Cargo.toml", "Cargo.lock"}))

    def of_package(self, package: str, with_tests: bool) -> list[str]:
        """The files of a package, without those of other packages in its folder."""
        folder = self.packages[package].folder
        left_out = [other.folder for other in self.packages.values() if other.folder.startswith(f"{folder}/")]
        left_out += [] if with_tests else [f"{folder}/tests", f"{folder}/benches"]
        return [name for name in self.below(folder) if not any(name.startswith(f"{other}/") for other in left_out)]

    def contents(self, names: list[str]) -> str:
        return hashlib.sha256("".join(f"{name} {self.file(ROOT / name)}\n" for name in names).encode()).hexdigest()

    def below(self, path: str) -> list[str]:
        """The repository's files at or below `path`; all for an empty one."""
        return [name for name in self.repository() if not path or name == path or name.startswith(path + "/")]

    def repository(self) -> list[str]:
        """The files that git tracks, and new ones that it does not ignore; none without git."""
        if self.tracked is None:
            listed = machine.git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
            self.tracked = sorted(name for name in listed.split("\0") if name and (ROOT / name).is_file())
        return self.tracked

    def assets(self) -> str:
        """What fetch.py wrote beside each asset: the checksums of all that it was made of."""
        if "assets" not in self.known:
            stamps = [CACHE / "stamps" / f"{name}.json" for name in fetch.SETS["test"]]
            text = "".join(f"{stamp.name} {stamp.read_text()}\n" for stamp in stamps)
            self.known["assets"] = hashlib.sha256(text.encode()).hexdigest()
        return self.known["assets"]

    def machine(self) -> str:
        """Its processor, its kernel, what runs the tests, and who."""
        if "machine" not in self.known:
            try:
                processor = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("model name", "flags", "Features"))]
            except OSError:
                processor = [platform.processor()]
            facts = [*sorted(set(processor)), platform.release(), sys.version, str(os.cpu_count()), str(os.getuid()),
                     self.file(ROOT / ".config" / "nextest.toml"),
                     *sorted(f"{name}={value}" for name, value in os.environ.items() if name.upper().startswith(VARIABLES))]
            self.known["machine"] = hashlib.sha256("\n".join(facts).encode()).hexdigest()
        return self.known["machine"]


def passed() -> dict[str, dict[str, object]]:
    """Of each suite that passed here: the digest, how many tests, and when."""
    try:
        return json.loads(PASSED.read_text())
    except (OSError, ValueError):
        return {}


def write_passed(known: dict[str, dict[str, object]]) -> None:
    partial = PASSED.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(known, indent=1, sort_keys=True))
    os.replace(partial, PASSED)
