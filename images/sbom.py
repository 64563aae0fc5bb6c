#!/usr/bin/env python3
"""Lists what an image is made of, in CycloneDX 1.6 (JSON), for whoever looks for known vulnerabilities in it:

    sbom.py --program prima --version TAG --platform arm64 --compiled-in IMAGE --root root.tar > prima-operator-arm64.cdx.json

These are the Debian of the root file system, its packages, and the crates that Cargo.lock has for the program, with those that only build or
test it: a few too many rather than one too few. The same files make the same list.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tarfile
import tomllib
from email.parser import Parser
from pathlib import Path
from urllib.parse import quote

LOCK = Path(__file__).resolve().parent.parent / "Cargo.lock"
# Where a Debian says which one it is.
RELEASE = "usr/lib/os-release"
# Where images/root.sh notes each package, as scanners of images expect it where there is no dpkg.
STATUS = "var/lib/dpkg/status.d/"


def debian(root: Path) -> list[dict[str, object]]:
    """Of a root file system: which Debian it is, without which scanners pass over its packages, and these."""
    release, packages = {}, []
    with tarfile.open(root) as tar:
        for entry in tar:
            name = entry.name.removeprefix("./")
            if entry.isfile() and (name == RELEASE or name.startswith(STATUS)):
                text = tar.extractfile(entry).read().decode()
                if name == RELEASE:
                    # NAME="value", as a shell reads it.
                    release = dict(field.split("=", 1) for field in shlex.split(text, comments=True))
                else:
                    packages.append(Parser().parsestr(text))
    if not packages:
        raise SystemExit(f"{root} does not say which packages it has ({STATUS}): make it with images/root.sh")
    if "VERSION_CODENAME" not in release:
        raise SystemExit(f"{root} does not say which Debian it is ({RELEASE}): make it with images/root.sh")
    codename = release["VERSION_CODENAME"]
    # Before it is released, it has no number.
    number = release.get("VERSION_ID", codename)
    found = [{"type": "operating-system", "bom-ref": f"os:debian@{number}", "name": "debian", "version": number}]
    for fields in packages:
        name, version, architecture = fields["Package"], fields["Version"], fields["Architecture"]
        purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}&distro={codename}"
        found.append({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl})
    return found


def crates(program: str) -> list[dict[str, object]]:
    """All that the lock file has below a program's package."""
    packages = tomllib.loads(LOCK.read_text())["package"]
    named: dict[str, list[dict[str, object]]] = {}
    for package in packages:
        named.setdefault(package["name"], []).append(package)
    if program not in named:
        raise SystemExit(f"{LOCK} has no package {program}")
    reached, open_ends = {}, [named[program][0]]
    while open_ends:
        package = open_ends.pop()
        key = (package["name"], package["version"])
        if key in reached:
            continue
        reached[key] = package
        for dependency in package.get("dependencies", []):
            # With a version, where there are several.
            name, _, rest = dependency.partition(" ")
            version = rest.split(" ")[0]
            open_ends += [one for one in named[name] if version in ("", one["version"])]
    found = []
    for (name, version), package in reached.items():
        purl = f"pkg:cargo/{name}@{version}"
        component = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        if "checksum" in package:
            component["hashes"] = [{"alg": "SHA-256", "content": package["checksum"]}]
        found.append(component)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--version", required=True)
    parser.add_argument("--platform", required=True)
    parser.add_argument("--compiled-in", metavar="IMAGE", required=True)
    parser.add_argument("--root", type=Path, required=True)
    arguments = parser.parse_args()
    components = debian(arguments.root) + crates(arguments.program)
    image = {"type": "container", "name": arguments.program, "version": arguments.version}
    properties = {"platform": f"linux/{arguments.platform}", "compiled in": arguments.compiled_in}
    image["properties"] = [{"name": name, "value": value} for name, value in properties.items()]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": image},
        "components": sorted(components, key=lambda component: component["bom-ref"]),
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
