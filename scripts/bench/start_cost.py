"""What the adapter adds to the start of a Python process that never imports SGLang.

`python -m scripts.bench.start_cost [RUNS]`: starts `python -c pass` with and without the boot folder on PYTHONPATH,
in alternation, and prints the user + system CPU time of the whole process (from the operating system's accounting).
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Annotated

import typer

from scripts.provenance import provenance

ROOT = Path(__file__).resolve().parent.parent.parent
ARMS = {
    "bare": {},
    "with DynChunk": {"PYTHONPATH": str(ROOT / "adapter" / "boot")},
    "with DynChunk, off": {"PYTHONPATH": str(ROOT / "adapter" / "boot"), "DYNCHUNK_MODE": "off"},
}


def cpu_ms(environ: dict[str, str]) -> float:
    """User + system CPU milliseconds of one `python -c pass`."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "DYNCHUNK_"))}
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "pass"], base | environ)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"python -c pass ended with status {status}")
    return (usage.ru_utime + usage.ru_stime) * 1000


def main(runs: Annotated[int, typer.Argument(help="Processes started of each kind.")] = 60) -> None:
    """Print one row an arm, and the median of the paired differences."""
    taken: dict[str, list[float]] = {name: [] for name in ARMS}
    for turn in range(runs + 2):
        for name, environ in ARMS.items():
            ms = cpu_ms(environ)
            if turn >= 2:  # the first two turns warm the file cache
                taken[name].append(ms)
    print(provenance())
    print(f"CPU ms of `python -c pass`, {runs} runs each, in alternation")
    for name, samples in taken.items():
        added = statistics.median(a - b for a, b in zip(samples, taken["bare"], strict=True))
        print(
            f"{name:20} min {min(samples):6.1f}  median {statistics.median(samples):6.1f}  "
            f"max {max(samples):6.1f}  added (median of pairs) {added:+.2f}"
        )


if __name__ == "__main__":
    typer.run(main)
