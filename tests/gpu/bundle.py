"""Makes target/gpu-check.tar.xz: all that `check` needs on a machine with a GPU, which may lack network, compiler and this repository.

The programs are compiled for the processor and the libc of this machine: they run where the libc is not older.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "assets"))
import fetch  # noqa: E402

BUNDLE = ROOT / "target" / "gpu-check.tar.xz"
MOST_BYTES = 60_000_000  # what is carried by mail and slow links
PROGRAMS = [["build", "-p", "prima", "-p", "prima-node-agent"], ["build", "-p", "prima-tests", "--bin", "gpu_check"],
            ["test", "--no-run", "-p", "prima-vulkan", "--test", "shaders"], ["test", "--no-run", "-p", "prima-engine", "--test", "gpu_layers"]]
# Of the cache of assets. The vocabularies are what models of random weights are given.
ASSETS = ["models/stories15M-wide-Q4_K.gguf", "models/stories15M-wide-Q8_0.gguf", "vocab/ggml-vocab-llama-bpe.gguf", "vocab/ggml-vocab-qwen2.gguf"]


def main() -> int:
    folder = ROOT / "target" / "gpu-check.new" / "gpu-check"
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    for command in PROGRAMS:
        for name, program in built(*command):
            subprocess.run(["strip", "-o", folder / name, program], check=True)
    for name in ASSETS:
        copy(fetch.CACHE / name, folder / "cache" / name)
    copy(ROOT / "tests" / "gpu" / "check", folder / "check")
    copy(ROOT / "tests" / "assets" / "make_shape.py", folder / "make_shape.py")
    # Python looks for packages beside the script that it runs.
    (package,) = (fetch.CACHE / "venv").glob("lib/python3*/site-packages/gguf")
    shutil.copytree(package, folder / "gguf", ignore=shutil.ignore_patterns("__pycache__", "scripts"))
    (folder / "revision").write_text(revision() + "\n")
    subprocess.run(["tar", "-C", folder.parent, "--use-compress-program=xz -T0", "-cf", BUNDLE, folder.name], check=True)
    shutil.rmtree(folder.parent)
    size = BUNDLE.stat().st_size
    print(f"{BUNDLE}: {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        print(f"that is over {MOST_BYTES / 1e6:.0f} MB", file=sys.stderr)
    return int(size > MOST_BYTES)


def built(*command: str) -> list[tuple[str, str]]:
    """Names and paths of the programs that cargo builds."""
    options = ["--release", "--locked", "--message-format=json-render-diagnostics"]
    lines = subprocess.run(["cargo", *command, *options], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    messages = [json.loads(line) for line in lines]
    return [(message["target"]["name"], message["executable"]) for message in messages if message.get("executable")]


def copy(source: Path, to: Path) -> None:
    if not source.exists():
        raise SystemExit(f"{source} is not there: run `python3 tests/assets/fetch.py gpu`")
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, to)


def revision() -> str:
    """The commit, and whether anything was changed since."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "an unknown commit"
    return f"commit {commit} with changes that are not committed" if git("status", "--porcelain") else f"commit {commit}"


if __name__ == "__main__":
    sys.exit(main())
