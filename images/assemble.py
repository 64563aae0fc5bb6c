#!/usr/bin/env python3
"""Puts programs onto root file systems: images for several processors, in one archive, without a container engine.

    assemble.py --output prima.tar --name REGISTRY/prima-operator:TAG --program prima --root root.tar --title 'prima operator' \
                --platform amd64=FOLDER --platform arm64=FOLDER [--name ... --program ... --root ... --title ...]

Each FOLDER holds the root file systems for that processor, and the programs. The archive is an OCI image layout
(image-layout.md of the OCI image specification 1.1): an index that has, for each name, an index of one image for each
platform. `ctr images import`, `skopeo`, `podman load` and `crane` read it. The same files make the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import shutil
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
# For whatever takes a time: images that differ only in when they were made are the same.
EPOCH = "1970-01-01T00:00:00Z"
# As the chart has it: a user without rights.
USER = "65532:65532"
PLATFORMS = ("amd64", "arm64")
CHUNK = 1 << 20


class Layout:
    """Blobs by their digest, in a folder that becomes the archive."""

    def __init__(self, folder: Path, compression: int) -> None:
        self.folder = folder
        self.compression = compression
        self.blobs = folder / "blobs" / "sha256"
        self.blobs.mkdir(parents=True)

    def add(self, content: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        (self.blobs / digest).write_bytes(content)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    def add_json(self, content: object, media_type: str) -> dict[str, object]:
        return self.add(json.dumps(content, sort_keys=True).encode(), media_type)

    def add_layer(self, tar: Path) -> tuple[dict[str, object], str]:
        """The layer's descriptor, and the digest of what it unpacks to."""
        unfinished = self.folder / "layer"
        unpacked = hashlib.sha256()
        with open(tar, "rb") as source, open(unfinished, "wb") as target:
            with gzip.GzipFile(filename="", mode="wb", compresslevel=self.compression, fileobj=target, mtime=0) as packed:
                while chunk := source.read(CHUNK):
                    unpacked.update(chunk)
                    packed.write(chunk)
        with open(unfinished, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = unfinished.stat().st_size
        unfinished.replace(self.blobs / digest)
        return {"mediaType": LAYER, "digest": f"sha256:{digest}", "size": size}, f"sha256:{unpacked.hexdigest()}"

    def write(self, manifests: list[dict[str, object]], archive: Path) -> None:
        (self.folder / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}
        (self.folder / "index.json").write_text(json.dumps(index, sort_keys=True))
        partial = archive.with_suffix(".partial")
        with tarfile.open(partial, "w") as tar:
            for path in sorted(self.folder.rglob("*")):
                tar.add(path, arcname=path.relative_to(self.folder), recursive=False, filter=plain)
        partial.replace(archive)


def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Of nobody, at no time."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
    return entry


def program_layer(program: Path, folder: Path) -> Path:
    """A layer with the program alone, in /usr/local/bin."""
    layer = folder / "program.tar"
    with tarfile.open(layer, "w") as tar:
        entry = tarfile.TarInfo(f"usr/local/bin/{program.name}")
        entry.size, entry.mode = program.stat().st_size, 0o755
        with open(program, "rb") as file:
            tar.addfile(entry, file)
    return layer


def image(layout: Layout, base: tuple[dict[str, object], str], program: Path, title: str, platform: str, labels: dict[str, str]) -> dict[str, object]:
    """The descriptor of one image, for one platform."""
    layer, unpacked = layout.add_layer(program_layer(program, layout.folder))
    (layout.folder / "program.tar").unlink()
    config = {
        "created": EPOCH,
        "architecture": platform,
        "os": "linux",
        "config": {
            "User": USER,
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "Entrypoint": [f"/usr/local/bin/{program.name}"],
            "Labels": labels,
        },
        "rootfs": {"type": "layers", "diff_ids": [base[1], unpacked]},
        "history": [
            {"created": EPOCH, "created_by": "Debian: libraries and certificates"},
            {"created": EPOCH, "created_by": title},
        ],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": layout.add_json(config, CONFIG),
        "layers": [base[0], layer],
        "annotations": labels,
    }
    described = layout.add_json(manifest, MANIFEST)
    return {**described, "platform": {"architecture": platform, "os": "linux"}}


def assemble(
    output: Path, images: Iterable[tuple[str, str, str, str]], platforms: dict[str, Path], labels: dict[str, str], compression: int
) -> list[str]:
    """Writes the archive. `images`: name, program, root and title of each. Returns name and digest of each."""
    work = output.with_suffix(".layout")
    shutil.rmtree(work, ignore_errors=True)
    layout = Layout(work, compression)
    # Images of a platform share its roots.
    roots: dict[Path, tuple[dict[str, object], str]] = {}
    manifests, told = [], []
    for name, program, root, title in images:
        own = {**labels, "org.opencontainers.image.title": title}
        of_platforms = []
        for platform, folder in platforms.items():
            if folder / root not in roots:
                roots[folder / root] = layout.add_layer(folder / root)
            of_platforms.append(image(layout, roots[folder / root], folder / program, title, platform, own))
        index = layout.add_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": of_platforms, "annotations": own}, INDEX)
        # containerd names an image by the first; others, such as skopeo, by the second.
        named = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
        manifests.append({**index, "annotations": named})
        told.append(f"{name}@{index['digest']}")
    layout.write(manifests, output)
    shutil.rmtree(work)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--platform", action="append", required=True, metavar="ARCHITECTURE=FOLDER")
    parser.add_argument("--name", action="append", required=True)
    parser.add_argument("--program", action="append", required=True)
    parser.add_argument("--root", action="append", required=True)
    parser.add_argument("--title", action="append", required=True)
    parser.add_argument("--label", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--compression", type=int, choices=range(10), default=6, help="0: for an archive that is read once, on this machine")
    arguments = parser.parse_args()
    platforms = {}
    for text in arguments.platform:
        architecture, _, folder = text.partition("=")
        if architecture not in PLATFORMS or not folder:
            sys.exit(f"--platform {text}: expected one of {', '.join(PLATFORMS)}, then = and a folder")
        platforms[architecture] = Path(folder)
    if not len(arguments.name) == len(arguments.program) == len(arguments.root) == len(arguments.title):
        sys.exit("--name, --program, --root and --title belong together: give all four for each image")
    for folder in platforms.values():
        for name in (*arguments.root, *arguments.program):
            if not (folder / name).is_file():
                sys.exit(f"{folder / name} is missing")
    labels = dict(text.split("=", 1) for text in arguments.label)
    images = zip(arguments.name, arguments.program, arguments.root, arguments.title, strict=True)
    for line in assemble(arguments.output, images, platforms, labels, arguments.compression):
        print(line)


if __name__ == "__main__":
    main()
