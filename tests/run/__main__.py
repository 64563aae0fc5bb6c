"""`make test`: builds the tests, gets what they need, runs the suites whose inputs changed since they last passed here, and ends
with what that cost, what was not run again, and what could not run on this machine and why.

    make test SUITES="local_ring_answers cluster_* prima-halda"     only these, changed or not
    make test FRESH=1                                               every suite

A test never skips itself: it runs, or it is named at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import costs
import inputs
import machine
from inputs import ROOT, Suite

# Features that we do not need, such as updating itself, are a good part of its build.
NEXTEST = ["0.9.114", "--no-default-features", "--features", "default-no-update"]
JUNIT = ROOT / "target" / "nextest" / "default" / "junit.xml"
# What cargo makes a test program of.
KINDS = ("lib", "bin", "test")
# The suite that runs kernels on other processors, and their levels there.
EMULATED = "prima-tests::processors_kernels"
EMULATED_LEVELS = {"sse4.1", "avx2", "neon", "neon-dotprod", "neon-i8mm"}
# Programs for other processors, what was said while they were built, and what is locked meanwhile (tests/src/emulated.rs).
PROCESSORS = ROOT / "target" / "processors"
# Needs of some of a suite's tests, with those that cannot run where it is not met, though the others can; none() where they do less then.
PARTS = {
    "prima-weights::suite": [("small-disk", "test(/^no_room::/)")],
    "prima-tests::monitoring": [("memory-groups", "test(=memory_pressure_raises_an_alert)")],
    "prima-tests::api_server_chart": [
        ("chart-before", "test(=an_upgrade_from_the_chart_before_keeps_models)"),
        ("definitions", "test(=api_server_and_kubeconform_take_the_chart_and_samples)"),
    ],
    "prima-tests::cluster_prima": [("pods-before", "none()")],
    "prima-tests::images_archive": [("root-file-systems", "test(=a_root_file_system_runs_the_programs)")],
    "prima-tests::local_ring_lent": [
        ("networks", "(test(=machines_of_two_networks_make_a_ring) | test(=a_machine_that_is_cut_off_is_noticed_soon))"),
    ],
    "prima-engine": [("vulkan", "test(=gpu::vulkan::kv::tests::a_buffer_grows_to_what_a_driver_gives_and_no_further)")],
    "prima-engine::gpu_layers": [("vulkan", "all()")],
    "prima-node-agent": [
        (
            "vulkan",
            "(test(=profile::gpu::tests::everything_of_a_gpu_is_measured) | test(=profile::gpu::tests::each_gpu_of_a_machine_is_in_its_profile) | "
            "test(=decode::draft_model::tests::a_gpu_guesses_as_a_processor_does))",
        ),
    ],
    "prima-tests::processors_kernels": [("large-pages", "test(=weights_stream_on_a_raspberry_pi_5)")],
    "prima-tests::processors_rings": [("large-pages", "test(=a_raspberry_pi_5_has_large_pages)")],
}
# What no machine of ours runs in these tests.
ELSEWHERE = [
    "layers on a real GPU: `make check-gpu` on a machine that has one; the same kernels run here on a driver of Vulkan that computes on the processor",
    "layers on CUDA and Metal: they take such a GPU and a build for it (PRIMA_TEST_GPU=1); the same code runs here on candle's CPU device",
    "the CUDA build: `make check-cuda` compiles it, which takes 2 GB to download and 14 CPU minutes",
    "compiling for both processors in a container (images/build.sh, compile.sh): it takes a container engine and a registry of images to build on; root "
    "file systems, how the archive is put together, nodes that run what is in it, and releases to a registry are tested (images_archive, cluster_prima, "
    "processors_images, images_registry)",
    "programs of the profiles release and dist: the tests run what the profile dev compiles (`make run` and `make bench` run the others)",
    "the fuzz targets: `make fuzz`; the tests run the corpus of headers",
    "more than four random sequences of faults, and any on a cluster: `make faults`, `make faults CLUSTER=1`",
    "a thousand requests over upgrades and drains: `make faults CLUSTER=1 LOAD=1000`; one client asks over an upgrade and a drain here (cluster_prima)",
    "tests of kernels under QEMU that compute much: smaller ones of the same kind run there (tests/tests/processors_kernels.rs, SLOW)",
]


@dataclasses.dataclass
class Plan:
    """What becomes of each suite."""

    run: list[Suite] = dataclasses.field(default_factory=list)
    inputs: inputs.Digests | None = None
    # For each suite: what identifies its tools and what is left out of it, and the digest of all its inputs.
    others: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    unchanged: list[str] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)  # for people
    filters: dict[str, str] = dataclasses.field(default_factory=dict)  # of nextest, for suites of which a part is left out


def main() -> int:
    wanted = sys.argv[1:]
    # What was started ends with this, then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    spent, plan, results, status = costs.Costs(), Plan(), [], 1
    try:
        packages = inputs.Package.all()
        check_names(packages, wanted)
        machine.installed("npm", "npm")
        # Fetching mostly waits.
        with spent.phase("build, assets beside it") as phase, beside("python3", "tests/assets/fetch.py", "test"):
            suites, digests = build(packages)
            phase.remark = costs.slowest_crates(ROOT / "target" / "cargo-timings" / "cargo-timing.html")
        plan = decide(suites, digests, wanted, spent)
        if plan.run:
            with spent.phase("cargo-nextest"):
                tools = output("tests/tool.sh", "cargo-nextest", *NEXTEST)
            with spent.phase("suites") as phase, building_for_arm64(plan, phase):
                status, results = run_suites(plan, tools)
            remember(plan, results)
        else:
            status = 0
        if not wanted:
            with spent.phase("doc examples"):
                run("cargo", "test", "--doc", "--workspace", "--locked", "--quiet")
    except machine.Lack as lack:
        print(f"the tests cannot run here: {lack}", file=sys.stderr)
    except subprocess.CalledProcessError as error:
        print(f"`{' '.join(map(str, error.cmd))}` failed with status {error.returncode}", file=sys.stderr)
        status = 1
    report(plan, results, spent)
    return status


def check_names(packages: dict[str, inputs.Package], wanted: list[str]) -> None:
    """Before anything is built."""
    suites = [Suite(0, package, name, kind, Path()) for package in packages for name, kind in packages[package].targets if kind in KINDS]
    for pattern in wanted:
        if not any(is_called(suite, pattern) for suite in suites):
            sys.exit(f"no suite is called {pattern}; there are {', '.join(sorted({suite.name for suite in suites}))}")


def build(packages: dict[str, inputs.Package]) -> tuple[list[Suite], inputs.Digests]:
    """Builds the programs and the tests; what cargo says where its terminal is."""
    suites, programs = {}, Path()
    for build, options in enumerate(inputs.BUILDS):
        command = ["cargo", "build", *options, "--message-format=json-render-diagnostics"]
        if build == 0:
            command.append("--timings")
        for message in map(json.loads, output(*command).splitlines()):
            if not message.get("executable"):
                continue
            program, folder = Path(message["executable"]), str(Path(message["manifest_path"]).parent.relative_to(ROOT))
            package = next(name for name, package in packages.items() if package.folder == folder)
            target = message["target"]
            if message["profile"]["test"]:
                suite = Suite(build, package, target["name"], target["kind"][0], program)
                suites[suite.id] = suite
            else:
                programs = program.parent
    return list(suites.values()), inputs.Digests(packages, programs)


def decide(suites: list[Suite], digests: inputs.Digests, wanted: list[str], spent: costs.Costs) -> Plan:
    """Which suites run. Tools are built for those only that ask for them."""
    plan, before = Plan(), inputs.passed()
    plan.inputs = digests
    for suite in suites:
        if wanted and not any(is_called(suite, pattern) for pattern in wanted):
            continue
        identities = []
        try:
            for name in suite.listed("needs"):
                with spent.phase(f"tools: {name}"):
                    identities.append(machine.meet(name))
        except machine.Lack as lack:
            plan.left_out.append(str(lack))
            continue
        lacking = []
        for name, tests in PARTS.get(suite.id, []):
            try:
                with spent.phase(f"tools: {name}"):
                    identities.append(machine.meet(name))
            except machine.Lack as lack:
                plan.left_out.append(str(lack))
                lacking.append(tests)
        if lacking:
            plan.filters[suite.id] = f"(binary_id(={suite.id}) & ({' | '.join(lacking)}))"
            identities.append(plan.filters[suite.id])
        plan.others[suite.id] = identities
        digest = digests.of_suite(suite, plan.others[suite.id])
        plan.digests[suite.id] = digest
        known = before.get(suite.id, {})
        if digest and known.get("digest") == digest and not wanted and not os.environ.get("FRESH"):
            if known["tests"]:
                plan.unchanged.append(f"{suite.id} ({known['tests']} tests, {known['when']})")
            continue
        plan.run.append(suite)
    return plan


def is_called(suite: Suite, pattern: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for name in (suite.id, suite.name, suite.target))


@contextlib.contextmanager
def building_for_arm64(plan: Plan, phase: costs.Phase) -> Iterator[None]:
    """Compiles for arm64 what suites run there, beside others; those that need it wait for it, and fail with its log if it fails."""
    packages = sorted({package for suite in plan.run for package in suite.listed("sources")})
    if not packages:
        yield
        return
    run("cargo", "fetch", "--locked")
    PROCESSORS.mkdir(parents=True, exist_ok=True)
    with open(PROCESSORS / "lock", "w") as lock, open(PROCESSORS / "log", "w") as log:
        # As its input, the lock is the script's, too, until that has ended.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another run that compiles for arm64", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        script = ["nice", "-n", "10", "tests/processors/build.sh", *packages]
        # Not in a session of its own: there its priority would count for nothing beside the tests'.
        building = subprocess.Popen(script, cwd=ROOT, stdin=lock, stdout=log, stderr=log, process_group=0)
    try:
        yield
    finally:
        before = costs.cpu_seconds()
        # Only a run that was cancelled did not wait for it.
        if building.poll() is None:
            os.killpg(building.pid, signal.SIGTERM)
        building.wait()
        phase.remark = f"{costs.minutes(costs.cpu_seconds() - before)} CPU minutes of it compiled for arm64"


def run_suites(plan: Plan, tools: str) -> tuple[int, list[costs.SuiteResult]]:
    """nextest, which is in the folder `tools`, runs them, each build's by itself; all of them even if some fail. Tests that did not run failed."""
    status, results = 0, []
    variables = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    # Kernels that a driver of Vulkan has compiled stay where assets stay: compiling them takes minutes.
    variables.setdefault("MESA_SHADER_CACHE_DIR", str(inputs.CACHE / "vulkan"))
    chosen = {build: selection(plan, build) for build in sorted({suite.build for suite in plan.run})}
    expected = {build: count_tests(chosen[build], variables) for build in chosen}
    for build in chosen:
        JUNIT.unlink(missing_ok=True)
        threads = f"--test-threads={3 * (os.cpu_count() or 1)}"
        runner = f"target.'cfg(all())'.runner = [{json.dumps(str(ROOT / 'tests' / 'run' / 'timed.sh'))}]"
        command = ["cargo", "nextest", "run", *chosen[build], "--config", runner, "--no-fail-fast", "--no-tests=pass", threads]
        with tempfile.TemporaryDirectory() as noted:
            ended = subprocess.run(command, cwd=ROOT, env=variables | {"PRIMA_TEST_COSTS": noted}, check=False).returncode
            cpu_seconds = costs.read_cpu_seconds(Path(noted))
        reported = {result.suite: result for result in (costs.read_junit(JUNIT) if JUNIT.exists() else [])}
        for suite in (suite for suite in plan.run if suite.build == build):
            result = reported.get(suite.id, costs.SuiteResult(suite.id, 0, 0, 0.0, ""))
            # A run that was cancelled reports what had ended. Packages without tests give suites without tests, but not the second build.
            not_run = max(expected[build].get(suite.id, 0), int(build > 0)) - result.tests
            if not_run > 0:
                result.failed += not_run
                result.slowest = f"{result.slowest}, not run: {not_run}".removeprefix(", ")
            result.cpu_seconds = cpu_seconds.get(str(suite.program))
            results.append(result)
            status |= bool(ended) or bool(result.failed)
    return status, results


def selection(plan: Plan, build: int) -> list[str]:
    """nextest's arguments that say which tests of a build run."""
    chosen = [suite for suite in plan.run if suite.build == build]
    filters = " + ".join(f"binary_id(={suite.id})" for suite in chosen)
    filters = f"({filters})" + "".join(f" - {plan.filters[suite.id]}" for suite in chosen if suite.id in plan.filters)
    return [*inputs.BUILDS[build], "-E", filters]


def count_tests(chosen: list[str], variables: dict[str, str]) -> dict[str, int]:
    """How many tests of each suite nextest is to run."""
    command = ["cargo", "nextest", "list", *chosen, "--message-format=json"]
    listed = json.loads(subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return {suite: sum(test["filter-match"]["status"] == "matches" for test in facts["testcases"].values())
            for suite, facts in listed["rust-suites"].items()}


def remember(plan: Plan, results: list[costs.SuiteResult]) -> None:
    """Notes which suites passed whole, with what they depend on; a failed one is forgotten, and one whose inputs changed meanwhile."""
    known, today = inputs.passed(), datetime.date.today().isoformat()
    now = inputs.Digests(plan.inputs.packages, plan.inputs.programs)
    passed = {result.suite: result for result in results if not result.failed}
    for suite in plan.run:
        known.pop(suite.id, None)
        if suite.id in passed and now.of_suite(suite, plan.others[suite.id]) == plan.digests[suite.id]:
            known[suite.id] = {"digest": plan.digests[suite.id], "tests": passed[suite.id].tests, "when": today}
    inputs.write_passed(known)


def report(plan: Plan, results: list[costs.SuiteResult], spent: costs.Costs) -> None:
    """Tables and lists for people; what it cost also in target/costs.txt, and what was left out in target/skipped.txt."""
    cost = f"What it cost:\n{spent.table()}\n"
    results = sorted((result for result in results if result.tests or result.failed), key=lambda result: -result.seconds)
    if results:
        cost += f"\nSuites, the times of their tests added up:\n{costs.suites_table(results)}\n"
    print(f"\n{cost}", end="")
    (ROOT / "target").mkdir(exist_ok=True)
    (ROOT / "target" / "costs.txt").write_text(cost)
    if plan.unchanged:
        print("\nNot run again, as they passed here with the same inputs (FRESH=1 runs them):")
        print(*(f"  - {line}" for line in plan.unchanged), sep="\n")
    left_out = sorted(set(plan.left_out)) + levels_not_here(plan) + ELSEWHERE + halves()
    (ROOT / "target" / "skipped.txt").write_text("".join(f"{line}\n" for line in left_out))
    print("\nLeft out on this machine:")
    print(*(f"  - {line}" for line in left_out), sep="\n", flush=True)


def levels_not_here(plan: Plan) -> list[str]:
    """Kernels that neither this processor nor an emulated one can run."""
    agent = ROOT / "target" / "debug" / "prima-node-agent"
    if not agent.exists():
        return ["which kernels this processor lacks: unknown, as nothing had to be built"]
    shown = subprocess.run([agent, "inspect", "--cpu"], capture_output=True, text=True, check=True).stdout
    lacking = re.findall(r"^ *(\S+) .* no, it lacks (.*?) *$", shown, re.MULTILINE)
    if len(lacking) + len(re.findall(r" (yes|used) *$", shown, re.MULTILINE)) < 2:
        raise SystemExit(f"prima-node-agent inspect --cpu: expected a row for each level of instructions, found\n{shown}")
    # Now, or when it last passed here with the same inputs.
    ran = any(suite.id == EMULATED for suite in plan.run) or any(line.startswith(f"{EMULATED} ") for line in plan.unchanged)
    emulated = EMULATED_LEVELS if ran else set()
    return [f"kernels of the level {level}: compiled only, as this processor lacks {features}" for level, features in lacking if level not in emulated]


def halves() -> list[str]:
    """Tests that are marked as ignored: each says why."""
    found = machine.git("grep", "-n", "-A2", r"#\[ignore", "--", "*.rs")
    return [f"{name.split('.rs')[0]}.rs, {function}: {reason}" for name, reason, function in
            re.findall(r"^(\S+?):\d+: *#\[ignore = \"(.*)\"\]\n(?:.*\n)?.*fn (\w+)", found, re.MULTILINE)]


def run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


@contextlib.contextmanager
def beside(*command: str) -> Iterator[None]:
    """Runs it while something else is done, and waits for it."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield
    finally:
        status = process.wait()
    if status:
        raise subprocess.CalledProcessError(status, command)


def output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
