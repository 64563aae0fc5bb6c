"""What this machine has for the tests: tools that are built or installed when a suite asks for them, and what it lacks.

Suites say in suites.json what they need, by the names of NEEDS. A need that this machine cannot meet leaves its suites out, with
the reason. One that it meets has an identity, which is part of what its suites depend on.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"


class Lack(Exception):
    """Why a need cannot be met here, for people."""


@dataclasses.dataclass(frozen=True)
class Need:
    """`meet` makes it available, and returns what identifies it; or raises Lack."""

    what: str  # for people: the suites that need it
    meet: Callable[[], str]


def api_server() -> str:
    """The API server, its stores, kubectl and Helm."""
    return built(TESTS / "control-plane" / "build.sh", "api-server")


def nodes() -> str:
    """What makes this machine several nodes of a cluster."""
    root()
    groups = cgroups()
    namespaces("--uts", "--ipc", "--net", "--pid", "--cgroup", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt")
    packages = {"ip": "iproute2", "containerd": "containerd", "runc": "runc", "/usr/lib/cni/ptp": "containernetworking-plugins",
                "iptables": "iptables", "conntrack": "conntrack", "mmdebstrap": "mmdebstrap"}
    identity = [groups, *(installed(command, package) for command, package in packages.items())]
    identity += [built(TESTS / "control-plane" / "build.sh", "nodes"), built(TESTS / "cluster" / "images.sh")]
    return "\n".join(identity)


def cgroups() -> str:
    """That a node can have cgroups of its own, of version 1 or 2, with all that the kubelet asks for."""
    if Path("/sys/fs/cgroup/memory").is_dir():
        return "cgroups of version 1"
    try:
        hand_on("+cpu +cpuset +io +memory +pids")
    except OSError as error:
        raise Lack("they take cgroups of version 1, or of version 2 whose topmost one lets those below it have all controllers") from error
    return "cgroups of version 2"


def hand_on(controllers: str) -> None:
    """Lets the groups below the topmost one of version 2 have these. Raises OSError where it cannot, or there is no version 2."""
    # The file is not to be made: where no cgroups are mounted, it would be one like any other.
    with Path("/sys/fs/cgroup/cgroup.subtree_control").open("r+") as handed_on:
        handed_on.write(controllers)


def chromium() -> str:
    """A browser."""
    return installed("chromium", "chromium")


def node() -> str:
    """Node, with which npm is installed anyway."""
    return f"{installed('node', 'nodejs')} {first_line('node', '--version')}"


def memory_groups() -> str:
    """Whether a memory cgroup can be made, of version 1 or 2."""
    top, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    try:
        if not top.is_dir():
            top, limit = Path("/sys/fs/cgroup"), "memory.max"
            hand_on("+memory")
        group = top / f"prima-run-{os.getpid()}"
        group.mkdir()
        try:
            (group / limit).write_text(str(1 << 30))
        finally:
            group.rmdir()
    except OSError as error:
        raise Lack("memory limits take root and a writable memory cgroup") from error
    return limit


def small_disk() -> str:
    """Whether a tmpfs can be mounted."""
    with tempfile.TemporaryDirectory() as folder:
        if not succeeds(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]):
            raise Lack("mounting a small disk takes root")
        subprocess.run(["umount", folder], check=True)
    return "tmpfs"


def chart_before(*parts: str) -> str:
    """The chart as it was before its last change, or before these parts' last; the tests choose the same commit (tests/src/operator.rs)."""
    parts = parts or ("charts/prima",)
    for commit in git("log", "--format=%H", "--", *parts).split():
        if not succeeds(["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", *parts]):
            return commit
    raise Lack("git has no commit in which it was another, as in a shallow clone")


def pods_before() -> str:
    """The same for what a cluster is upgraded from (tests/src/cluster/prima.rs, OF_BEFORE)."""
    return chart_before("charts/prima/templates", "charts/prima/values.yaml", ":(exclude,glob)charts/prima/templates/*/rbac.yaml")


def definitions() -> str:
    """Other projects' definitions of kinds that the chart makes objects of."""
    try:
        return built(TESTS / "definitions" / "fetch.sh")
    except subprocess.CalledProcessError as error:
        raise Lack("they could not be fetched") from error


def prometheus() -> str:
    """Prometheus and promtool, from Debian's package."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise Lack("they are fetched as a package of Debian's")
    try:
        return built(TESTS / "monitoring" / "fetch.sh")
    except subprocess.CalledProcessError as error:
        raise Lack("Debian's Prometheus could not be fetched") from error


def emulation() -> str:
    """QEMU, and a compiler for arm64 in a root of its own."""
    if platform.machine() != "x86_64":
        raise Lack("they are emulated on x86-64 only")
    root()
    namespaces("true")
    identity = [installed("mmdebstrap", "mmdebstrap"), installed("qemu-aarch64-static", "qemu-user-static")]
    try:
        return "\n".join([*identity, built(TESTS / "processors" / "build.sh", "root")])
    except subprocess.CalledProcessError as error:
        raise Lack("Debian's compiler and libraries for arm64 could not be fetched") from error


def large_pages() -> str:
    """Whether QEMU takes pages of another size than this machine's, as it did before its version 9."""
    said = first_line("qemu-aarch64-static", "--version")
    if int(said.split("version ")[1].split(".")[0]) >= 9:
        raise Lack(f"this QEMU has the pages of this machine only ({said})")
    return said


def registry() -> str:
    """A registry, what pushes to it, and what pulls from it as a node does."""
    root()
    namespaces("true")
    identity = [installed("skopeo", "skopeo"), installed("containerd", "containerd")]
    return "\n".join([*identity, built(TESTS / "registry" / "build.sh")])


def root_file_systems() -> str:
    """Debian's packages, unpacked into a root file system, and programs in it."""
    root()
    namespaces("true")
    return installed("mmdebstrap", "mmdebstrap")


def networks() -> str:
    """Whether networks can be made, with `ip`."""
    root()
    identity = installed("ip", "iproute2")
    name = f"prima-run-{os.getpid()}"
    if not succeeds(["ip", "netns", "add", name]):
        raise Lack("namespaces of its own are not allowed here")
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return identity


def faulty_machines() -> str:
    """Networks whose packets can be dropped and slowed down, disks that can fail, and clocks that can be wrong."""
    identity = [networks(), installed("iptables", "iptables"), installed("mkfs.ext4", "e2fsprogs"), installed("cc", "gcc")]
    namespaces("true")
    if not Path("/dev/loop-control").exists():
        raise Lack("the kernel has no loop devices")
    name = f"prima-run-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        inside = ["ip", "netns", "exec", name]
        if not succeeds([*inside, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "512kbit", "burst", "8k", "latency", "1s"]):
            raise Lack("the kernel cannot limit the rate of a link (tbf)")
        if not succeeds([*inside, "iptables", "-t", "raw", "-A", "OUTPUT", "-m", "statistic", "--mode", "random", "--probability", "0.2", "-j", "DROP"]):
            raise Lack("the kernel cannot drop packets by chance (xt_statistic)")
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return "\n".join(identity)


def vulkan() -> str:
    """A driver of Vulkan that computes on the processor (lavapipe): a newer one than is installed, where that is slow."""
    drivers = ["/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d"]
    if not any(path.name.startswith("lvp_icd") for folder in drivers for path in Path(folder).glob("*.json")):
        install("mesa-vulkan-drivers")
    identity = [version(package) for package in ("mesa-vulkan-drivers", "libvulkan1")]
    if manifest := newer_lavapipe():
        # Vulkan's loader looks there for what is started from here.
        os.environ["VK_DRIVER_FILES"] = manifest
        identity.append(manifest)
    return "\n".join(identity)


def newer_lavapipe() -> str:
    """The manifest of another than is installed; empty where that is used."""
    fetched = subprocess.run(TESTS / "gpu" / "lavapipe.sh", stdout=subprocess.PIPE, text=True, check=False)
    if fetched.returncode:
        print("no newer lavapipe could be fetched: tests of GPUs take longer with the one that is installed", file=sys.stderr)
    return fetched.stdout.strip()


NEEDS = {
    "api-server": Need("a real API server", api_server),
    "nodes": Need("clusters of real nodes", nodes),
    "chromium": Need("the chat page in a real browser", chromium),
    "node": Need("clients for Node", node),
    "memory-groups": Need("machines with limits of memory and processors", memory_groups),
    "small-disk": Need("downloads to a disk that is full", small_disk),
    "chart-before": Need("an upgrade from the chart before", chart_before),
    "pods-before": Need("an upgrade of a cluster from the chart before", pods_before),
    "definitions": Need("the chart with other projects' definitions", definitions),
    "vulkan": Need("layers on a GPU, which is Vulkan on the processor", vulkan),
    "prometheus": Need("alerts and the dashboard in Prometheus", prometheus),
    "root-file-systems": Need("programs in the images' root file systems", root_file_systems),
    "registry": Need("releases to a registry, and clusters that pull from one", registry),
    "networks": Need("a ring of machines in two networks", networks),
    "faulty-machines": Need("machines whose links, disks and clocks fail", faulty_machines),
    "large-pages": Need("a Raspberry Pi 5 with its pages of 16 KiB", large_pages),
    "emulation": Need("older and other processors, emulated", emulation),
}


@functools.cache
def meet(name: str) -> str:
    """The identity of a need, made available now, or a Lack that says whose it is."""
    need = NEEDS[name]
    try:
        return need.meet()
    except Lack as lack:
        raise Lack(f"{need.what}: {lack}") from lack


def installed(command: str, package: str) -> str:
    """The version of Debian's package, after installing it if root can; elsewhere that the command is there."""
    if shutil.which(command) is None:
        install(package)
        if shutil.which(command) is None:
            raise Lack(f"{package} is installed, but has no {command}")
    return version(package) or command


def install(package: str) -> None:
    """Installs Debian's package, if root can."""
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        raise Lack(f"{package} is not installed, and only root can install it here")
    print(f"installing Debian's {package}", file=sys.stderr, flush=True)
    quiet = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package]
    if not (succeeds(["apt-get", "update", "-qq"]) and succeeds(quiet)):
        raise Lack(f"{package} is not installed, and apt-get could not install it")


def version(package: str) -> str:
    """Debian's package with its version; empty where Debian does not say."""
    if shutil.which("dpkg-query") is None:
        return ""
    return subprocess.run(["dpkg-query", "--show", package], capture_output=True, text=True, check=False).stdout.strip()


def first_line(*command: str) -> str:
    """What a program says of itself."""
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return said.partition("\n")[0]


def built(script: Path, *arguments: str) -> str:
    """What a script says that it made (its last line, a folder named after what it was made of), and the script."""
    made = subprocess.run([script, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout
    return f"{made.strip().splitlines()[-1]} {hashlib.sha256(script.read_bytes()).hexdigest()}"


def root() -> None:
    if os.getuid() != 0:
        raise Lack("they take root")


def namespaces(*command: str) -> None:
    if not succeeds(["unshare", "--mount", *command]):
        raise Lack("namespaces of its own are not allowed here")


def git(*arguments: str) -> str:
    """What git says of this repository; nothing where it is none, or git is not installed."""
    try:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def succeeds(command: list[str]) -> bool:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def main() -> int:
    """Meets the needs that are named, for programs that are not run by `make test`."""
    try:
        for name in sys.argv[1:]:
            meet(name)
    except Lack as lack:
        print(f"this cannot run here: {lack}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
