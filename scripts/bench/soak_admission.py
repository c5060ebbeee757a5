"""Hold the real PrefillAdder of every supported engine to the budget, for as many passes as you like.

`python -m scripts.bench.soak_admission [--passes N] [--seed S] [--versions 0.5.20,...]`: seeded queues (lengths to a
million tokens, cached and host prefixes, loads that bring more or nothing, decoding rows, pages 1 to 256, truncation
alignments, budgets down to one token^2, passes for waiting requests) run through each version's own adder with
DynChunk's hooks in place. Needs an environment with SGLang 0.5.23; older versions are imported from their wheels.
Exit code 1 at the first violation, lost chunk or livelock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from scripts.engine_wheels import VERSIONS, unpacked
from scripts.provenance import provenance

ROOT = Path(__file__).resolve().parent.parent.parent


class ViolationError(Exception):
    """A promise was broken; the message is one JSON line with what it takes to see it again."""


def soak(passes: int, seed: int) -> Counter[str]:
    """Run seeded queues through the adder of the SGLang that this process finds. -> what was counted.

    Raises ViolationError at the first violation, lost chunk or livelock.
    """
    import random

    from scripts.bench.admission_world import random_world

    seen: Counter[str] = Counter()
    while seen["passes"] < passes:
        draw = random.Random(f"{seed}/{seen['queues']}")  # noqa: S311 - reproducible, not secret
        world = random_world(draw)
        try:
            world.run()
        except AssertionError as error:
            failed = {"failed": str(error), "queue": seen["queues"], "seed": seed, "setting": repr(world.setting)}
            raise ViolationError(json.dumps(failed)) from error
        seen += world.seen
        seen["queues"] += 1
    return seen


def worker(passes: int, seed: int, *, hooks: bool) -> None:
    """Soak in this process; print one JSON line. hooks: False takes DynChunk's away."""
    import sglang.srt.managers.schedule_policy as engine

    from dynchunk import journal

    assert hasattr(engine.PrefillAdder.add_one_req, "__dynchunk__"), "the hooks are not in place"
    if not hooks:
        for name in ("__init__", "add_chunked_req", "add_one_req"):
            setattr(engine.PrefillAdder, name, getattr(engine.PrefillAdder, name).__wrapped__)
    start = time.perf_counter()
    try:
        seen = soak(passes, seed)
    except ViolationError as error:
        print(error)
        sys.exit(1)
    took_s = time.perf_counter() - start
    print(json.dumps({"version": journal.engine_version(), "seconds": round(took_s, 1), **seen}))


def run_version(version: str, passes: int, seed: int, *, hooks: bool = True) -> dict[str, object]:
    """Run the worker against one version. Raises RuntimeError with its words if it fails."""
    path = [str(ROOT / "adapter" / "boot"), str(unpacked(version)), str(ROOT / "adapter"), str(ROOT)]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("DYNCHUNK_")}
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "scripts.bench.soak_admission", "--worker"),
            *("--passes", str(passes), "--seed", str(seed), "--hooks" if hooks else "--no-hooks"),
        ],
        env=environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{version}: {lines[-1] if lines else done.stderr[-3000:]}")
    found: dict[str, object] = json.loads(lines[-1])
    return found


def main(
    passes: Annotated[int, typer.Option(help="Passes for each version.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Where the random queues start.")] = 1,
    versions: Annotated[str, typer.Option(help="Versions, by commas.")] = ",".join(VERSIONS),
    in_this_process: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
    hooks: Annotated[bool, typer.Option(hidden=True)] = True,
) -> None:
    """Soak every version's adder; see the module's text."""
    if in_this_process:
        worker(passes, seed, hooks=hooks)
        return
    print(provenance())
    failed = False
    for version in versions.split(","):
        try:
            seen = run_version(version, passes, seed)
        except RuntimeError as error:
            print(f"FAILED {error}")
            failed = True
            continue
        print(f"{version}: violations 0, lost chunks 0, livelocks 0 in {seen.pop('passes'):,} passes: {seen}")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
