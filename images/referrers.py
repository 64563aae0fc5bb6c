#!/usr/bin/env python3
"""Makes an archive of the lists of what images have, for a registry, where whoever has an image finds its list:

    referrers.py --images prima.tar --lists FOLDER --output lists.tar

FOLDER has IMAGE-PLATFORM.cdx.json for each image of prima.tar and each of its platforms. Each becomes an artifact whose subject is the image
(manifest.md of the OCI image specification 1.1): a registry with the referrers API says itself what refers to an image. In others, such as
ghcr.io, it is found by its tag, NAMESPACE/IMAGE:sha256-DIGEST.sbom, which is cosign's for lists. The same files make the same bytes.

Where that API is missing, other clients look for an index with the tag sha256-DIGEST. It is not made: skopeo before 1.16 (Debian 12 and Ubuntu
24.04 have such) forgets of what kind the artifacts of an index are, and so refuses to push it unchanged.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tarfile
from pathlib import Path

from assemble import MANIFEST, Layout

SBOM = "application/vnd.cyclonedx+json"
# What an artifact has in the place of a configuration.
EMPTY = "application/vnd.oci.empty.v1+json"


def artifact(layout: Layout, image: dict[str, object], content: Path) -> dict[str, object]:
    """The descriptor of the artifact that has a list of what is in an image, of which this is the descriptor."""
    # oras calls the file so when it pulls it.
    layer = {**layout.add(content.read_bytes(), SBOM), "annotations": {"org.opencontainers.image.title": content.name}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": SBOM,
        "config": layout.add(b"{}", EMPTY),
        "layers": [layer],
        "subject": {field: image[field] for field in ("mediaType", "digest", "size")},
    }
    return layout.add_json(manifest, MANIFEST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--lists", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    work = arguments.output.with_suffix(".layout")
    shutil.rmtree(work, ignore_errors=True)
    layout, artifacts = Layout(work, compression=0), []
    with tarfile.open(arguments.images) as archive:
        for named in json.load(archive.extractfile("index.json"))["manifests"]:
            repository, _, _ = named["annotations"]["org.opencontainers.image.ref.name"].rpartition(":")
            blob = named["digest"].replace(":", "/")
            for image in json.load(archive.extractfile(f"blobs/{blob}"))["manifests"]:
                content = arguments.lists / f"{repository.rpartition('/')[2]}-{image['platform']['architecture']}.cdx.json"
                if not content.is_file():
                    sys.exit(f"{content} is missing: images/build.sh makes it")
                name = f"{repository}:{image['digest'].replace(':', '-')}.sbom"
                artifacts.append({**artifact(layout, image, content), "annotations": {"org.opencontainers.image.ref.name": name}})
    layout.write(artifacts, arguments.output)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
