"""Where the time of the test command goes, and whether it stays green: logs/tests-DATE.md.

`python -m scripts.dev.suite_times [--runs 3] [--beside-cores 2] [-- --fast ...]` runs scripts/test.sh so often, with
so many cores kept busy beside it, and writes what took how long. Exit code 1 if a run was red.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from scripts.provenance import provenance

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "logs"
SLOWEST = 40
NAME_SHOWN = 100  # characters: a case may be named for its input
PART = re.compile(r"^==> (.+)$")
DURATION = re.compile(r"^(\d+\.\d\d)s (setup|call|teardown)\s+(\S+?)(::.+)?$")
COUNTS = re.compile(r"^=*\s*(\d+ (?:passed|failed).*) in [\d.]+s")


class Run(NamedTuple):
    """One run. parts: seconds of each `==>` of its output. durations: (seconds, phase, file, test)."""

    code: int
    seconds: float
    parts: dict[str, float]
    counts: str
    durations: list[tuple[float, str, str, str]]


def run(arguments: list[str], beside_cores: int, beside_gib: float) -> Run:
    """Run scripts/test.sh once, showing what it says."""
    command = [str(ROOT / "scripts" / "test.sh"), *arguments, "--durations=0", "--durations-min=0.05"]
    if beside_cores:
        beside = ["--cores", str(beside_cores), "--gib", str(beside_gib)]
        command = [sys.executable, "-m", "scripts.dev.busy_neighbour", *beside, "--", *command]
    started = part_since = time.monotonic()
    part, parts, counts = "", defaultdict[str, float](float), ""
    durations = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := DURATION.match(line):
                durations.append((float(found[1]), found[2], found[3], (found[4] or "").removeprefix("::").strip()))
                continue
            print(line, end="", flush=True)
            if found := PART.match(line):
                parts[part] += time.monotonic() - part_since
                part, part_since = found[1], time.monotonic()
            elif found := COUNTS.match(line):
                counts = found[1]
    parts[part] += time.monotonic() - part_since
    return Run(process.returncode, time.monotonic() - started, {k: v for k, v in parts.items() if k}, counts, durations)


def markdown(runs: list[Run], beside: str) -> str:
    """The page: each run as a row, then files and tests of the last one."""
    last = runs[-1]
    lines = ["# How long the tests take", "", f"{provenance()}{beside}.", ""]
    lines += ["| run | exit code | tests | whole, s | " + " | ".join(f"{part}, s" for part in last.parts) + " |"]
    lines += ["|---" * (4 + len(last.parts)) + "|"]
    for number, one in enumerate(runs, 1):
        cells = " | ".join(f"{one.parts.get(part, 0):.0f}" for part in last.parts)
        lines.append(f"| {number} | {one.code} | {one.counts} | {one.seconds:.0f} | {cells} |")
    by_file = defaultdict[str, float](float)
    for seconds, _, file, _ in last.durations:
        by_file[file] += seconds
    lines += ["", "Two workers: a second of one of them is half a second of the whole, at best.", ""]
    lines += ["| file, in the last run | s of one worker |", "| --- | --- |"]
    lines += [f"| {file} | {by_file[file]:.1f} |" for file in sorted(by_file, key=by_file.__getitem__, reverse=True)]
    lines += ["", f"The {SLOWEST} slowest parts; a server that tests share is in the setup of the first.", ""]
    lines += ["| s | phase | test |", "| --- | --- | --- |"]
    slowest = sorted(last.durations, reverse=True)[:SLOWEST]
    lines += [
        f"| {seconds:.1f} | {phase} | {file}::{test.replace('|', ' ')[:NAME_SHOWN]} |"
        for seconds, phase, file, test in slowest
    ]
    return "\n".join(lines) + "\n"


def main(
    arguments: Annotated[list[str] | None, typer.Argument(help="Behind --: arguments of scripts/test.sh.")] = None,
    runs: Annotated[int, typer.Option(help="So many runs in a row.", min=1)] = 1,
    beside_cores: Annotated[int, typer.Option(help="Cores kept busy beside it.", min=0)] = 0,
    beside_gib: Annotated[float, typer.Option(help="Memory taken and given back beside it.", min=0)] = 1.0,
    out: Annotated[Path | None, typer.Option(help="The page.", show_default="logs/tests-DATE.md")] = None,
) -> None:
    """Run the tests and write where their time went."""
    done = []
    page = out or LOGS / f"tests-{datetime.now().astimezone():%Y-%m-%d}.md"
    beside = (
        f", with {beside_cores} cores kept busy and {beside_gib:g} GiB taken and given back" if beside_cores else ""
    )
    for _ in range(runs):
        done.append(run(arguments or [], beside_cores, beside_gib))
        page.write_text(markdown(done, beside), encoding="utf-8")  # after each: what is done is not lost
    print(f"written: {page}")
    raise typer.Exit(any(one.code for one in done))


if __name__ == "__main__":
    typer.run(main)
