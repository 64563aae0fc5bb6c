"""`make fuzz`: gives each target made-up input for some time, two targets at a time, starting from the committed corpus.

    make fuzz                                    each target for an hour
    make fuzz SECONDS_EACH=60 TARGETS="header frame"  these, for a minute each

It takes a stable Rust and a C++ compiler. What reaches something new stays in target/fuzz, from where the next run goes on; an input that
breaks something lies there, too. Neither is committed: a fault that is mended gets a test where it was.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
TARGETS = sorted(path.stem for path in (FOLDER / "targets").glob("*.rs"))
# What is found, and what breaks something.
OUTPUT = ROOT / "target" / "fuzz"
AN_HOUR = 3600
# Some way above what the targets take: what an input makes them take on top is a fault.
MEMORY_MIB = 1024
# Seconds for one input: a template may take millions of steps, which take long in this build.
PATIENCE = 120
# A program that ends with this has done what it should.
NO_FAULT = "error: the model's chat template takes more than 512 MiB"
LONGEST_INPUT = 8192


def main() -> int:
    seconds = int(os.environ.get("SECONDS_EACH") or AN_HOUR)
    chosen = sys.argv[1:] or TARGETS
    unknown = set(chosen) - set(TARGETS)
    if unknown:
        print(f"no target is called {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    print("building the targets", file=sys.stderr)
    # The targets compute nothing with the kernels, which would take a good part of the build.
    plain = "--config=profile.dev.package.prima-kernels.opt-level=0"
    build = ["cargo", "build", "--locked", "--quiet", "--package", "prima-fuzz", "--features", "run", plain]
    subprocess.run(build, cwd=ROOT, env=os.environ | {"RUSTC_WORKSPACE_WRAPPER": str(FOLDER / "instrumented.sh")}, check=True)
    programs = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug"
    minutes = seconds * -(-len(chosen) // 2) / 60
    print(f"fuzzing {', '.join(chosen)}: about {minutes:.0f} minutes", file=sys.stderr)
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        results = list(pool.map(lambda target: fuzz(programs / f"fuzz-{target}", target, seconds), chosen))
    print(f"\n{'target':<10} {'inputs':>12} {'new':>7} {'places':>7}  result")
    for row in results:
        print("{target:<10} {inputs:>12,} {new:>7,} {places:>7,}  {result}".format(**row))
    return int(any(row["result"] != "ok" for row in results))


def fuzz(program: Path, target: str, seconds: int) -> dict[str, object]:
    """One target, and what came of it."""
    found, log = OUTPUT / target, OUTPUT / f"{target}.log"
    found.mkdir(parents=True, exist_ok=True)
    begun, stat, places = time.monotonic(), {}, 0
    while (left := seconds - int(time.monotonic() - begun)) > 0:
        command = [program, found, FOLDER / "corpus" / target, f"-artifact_prefix={OUTPUT}/{target}-", f"-max_total_time={left}",
                   f"-rss_limit_mb={MEMORY_MIB}", f"-timeout={PATIENCE}", f"-max_len={LONGEST_INPUT}", "-print_final_stats=1"]
        with log.open("w") as said:
            status = subprocess.run(command, stdout=said, stderr=said, check=False).returncode
        text = log.read_text(errors="replace")
        for name, number in re.findall(r"stat::(\w+): +(\d+)", text):
            stat[name] = stat.get(name, 0) + int(number)
        places = max(places, *map(int, re.findall(r" cov: (\d+)", text)), 0)
        if status and NO_FAULT not in text:
            break
        status = 0
    row = {"target": target, "inputs": stat.get("number_of_executed_units", 0), "new": stat.get("new_units_added", 0),
           "places": places, "result": "ok"}
    if status:
        broken = re.findall(r"Test unit written to (\S+)", text)
        row["result"] = f"FAILED: {program} {broken[-1]}" if broken else f"FAILED with status {status}: see {log}"
        print("\n".join(text.splitlines()[-30:]), file=sys.stderr)
    print(f"{target}: {row['result']} after {time.monotonic() - begun:.0f} s", file=sys.stderr)
    return row


if __name__ == "__main__":
    sys.exit(main())
