"""What a run of the tests cost: phase by phase and suite by suite, as a table at its end.

CPU time is that of all processes that this one started and waited for, whichever way they ended. A daemon that outlives its
parent is not in it; the tests leave none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree


@dataclasses.dataclass
class Phase:
    """One part of the run."""

    name: str
    seconds: float
    cpu_seconds: float
    remark: str = ""


class Costs:
    """The phases so far."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Measures what is done within; what fails is measured, too."""
        begun, cpu = time.monotonic(), cpu_seconds()
        phase = Phase(name, 0.0, 0.0)
        self.phases.append(phase)
        try:
            yield phase
        finally:
            phase.seconds, phase.cpu_seconds = time.monotonic() - begun, cpu_seconds() - cpu

    def table(self) -> str:
        """In minutes and CPU minutes; what was done in several parts is one row, and what took no time none."""
        rows = [("phase", "minutes", "CPU minutes", "")]
        for name in dict.fromkeys(phase.name for phase in self.phases):
            parts = [phase for phase in self.phases if phase.name == name]
            seconds, cpu = (sum(getattr(part, field) for part in parts) for field in ("seconds", "cpu_seconds"))
            if seconds >= 1.0:
                rows.append((name, minutes(seconds), minutes(cpu), " ".join(part.remark for part in parts)))
        seconds, cpu = (sum(getattr(phase, field) for phase in self.phases) for field in ("seconds", "cpu_seconds"))
        rows.append(("all", minutes(seconds), minutes(cpu), ""))
        return table(rows)


@dataclasses.dataclass
class SuiteResult:
    """What nextest reported of one suite."""

    suite: str
    tests: int
    failed: int
    seconds: float  # of its tests one after another
    slowest: str
    cpu_seconds: float | None = None  # of its tests and the processes that they started and waited for


def read_junit(path: Path) -> list[SuiteResult]:
    """The suites of nextest's report."""
    results = []
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        cases = sorted(suite.iter("testcase"), key=lambda case: float(case.get("time", "0")), reverse=True)
        failed = sum(any(case.find(kind) is not None for kind in ("failure", "error")) for case in cases)
        seconds = sum(float(case.get("time", "0")) for case in cases)
        slowest = f"{cases[0].get('name')} {float(cases[0].get('time', '0')):.1f}" if cases else ""
        results.append(SuiteResult(suite.get("name", ""), len(cases), failed, seconds, slowest))
    return results


def read_cpu_seconds(noted: Path) -> dict[str, float]:
    """Of each test program, by its path: what timed.sh noted in the folder. A test that was killed noted nothing."""
    programs: dict[str, float] = {}
    for file in noted.iterdir():
        lines = file.read_text().splitlines()
        for program, waited_for in zip(lines[::3], lines[2::3]):
            times = re.findall(r"(\d+)m([\d.]+)s", waited_for)
            programs[program] = programs.get(program, 0.0) + sum(60 * int(minutes) + float(seconds) for minutes, seconds in times)
    return programs


def suites_table(results: list[SuiteResult]) -> str:
    """One row a suite."""
    rows = [("suite", "tests", "failed", "seconds", "CPU seconds", "its slowest test, seconds")]
    for result in results:
        cpu = "" if result.cpu_seconds is None else f"{result.cpu_seconds:.1f}"
        numbers = (str(result.tests), str(result.failed or ""), f"{result.seconds:.1f}", cpu)
        rows.append((result.suite, *numbers, result.slowest))
    return table(rows)


def slowest_crates(timings: Path, most: int = 6) -> str:
    """The crates that took longest in cargo's own report (`--timings`), which has each unit's seconds."""
    try:
        units = json.loads(re.search(r"const UNIT_DATA = (\[.*?\]);", timings.read_text(), re.DOTALL).group(1))
    except (OSError, AttributeError, ValueError):
        return ""
    units = [unit for unit in units if unit["duration"] >= 5.0]
    units.sort(key=lambda unit: -unit["duration"])
    return ", ".join(f"{unit['name']}{unit['target']} {unit['duration']:.0f} s" for unit in units[:most])


def cpu_seconds() -> float:
    """Of this process's descendants that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}"


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: tuple[str, ...]) -> str:
        cells = [cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        return "  " + "  ".join(cells).rstrip()

    return "\n".join(line(row) for row in rows)
