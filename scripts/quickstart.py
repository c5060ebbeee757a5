"""The main job on a machine without GPU or Docker: the same ramp against a static chunk and against DynChunk.

Started by scripts/quickstart.sh, which has installed what is needed. Serves the reference platform twice on the real
SGLang scheduler, first stock and then with the budget sizer, lets memguard ramp prompts against both with one guard,
and checks that the static run trips it and the budget run does not. One report holds both runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import psutil
import typer

from scripts import reference
from scripts.ending import end_once, undisturbed

ROOT = Path(__file__).resolve().parent.parent
SERVE = (ROOT / "dynchunk", "serve", "--env-file", os.devnull)
CACHE = Path(".cache", "quickstart")
LOGS = Path("logs")
EXIT_PASSED, EXIT_GUARD, EXIT_INTERRUPTED = 0, 2, 130
MEMGUARD_ENDS_S = 60.0  # memguard aborts its request, and draws what it has measured


@dataclass(frozen=True)
class Arm:
    """One of the two runs. `expected`: memguard's exit code."""

    label: str
    mode: str
    expected: int
    story: str


ARMS = (
    Arm("static", "off", EXIT_GUARD, "the stock engine with its static chunk: expected to trip the guard"),
    Arm("budget", "on", EXIT_PASSED, "the same engine with DynChunk: expected to pass"),
)


def main(
    sizes: Annotated[str, typer.Option(help="Prompt sizes of the ramp.")] = "8k,16k,24k,32k,48k",
    headroom_gib: Annotated[float, typer.Option(help="The guard: this much below the memory available at rest.")] = 1.4,
    budget: Annotated[str, typer.Option(help="DYNCHUNK_BUDGET of the second run, token^2.")] = "16M",
    chunk: Annotated[int, typer.Option(help="The engine's chunk size in both runs.")] = 2048,
) -> None:
    """Serve the reference platform twice and ramp prompts against both. Exit code 0 if the story holds."""
    end_once()  # whoever ends this gets its servers ended too
    os.chdir(ROOT)
    started = time.monotonic()
    _enough_memory(headroom_gib)
    step("writing the tiny model")
    reference.make_model()
    report = _new_report_folder()
    # The guard shall be seen tripping, also where the sizes before tell that it will.
    # Other programs on this machine are no matter of either engine.
    ramp = ["--sizes", sizes, "--headroom-gib", str(headroom_gib), "--own-memory", "--past-projection"]
    codes = {}
    for number, arm in enumerate(ARMS, start=1):
        step(f"run {number} of {len(ARMS)}: {arm.story}")
        into = ["--out" if number == 1 else "--append", str(report)]
        with serving(arm, budget=budget, chunk=chunk) as server:
            codes[arm.label] = _memguard(
                "--url", server.url, "--label", arm.label, "--server-log", str(server.log), *ramp, *into
            )
    step(f"done in {(time.monotonic() - started) / 60:.1f} minutes; the report: {report / 'REPORT.md'}")
    wrong = [
        f"{arm.label}: memguard ended with {codes[arm.label]}, expected {arm.expected}"
        for arm in ARMS
        if codes[arm.label] != arm.expected
    ]
    if wrong:
        print("The runs did not go as expected:\n  " + "\n  ".join(wrong))
        print("The report shows what the engine took over time, and MemAvailable of the host beside it.")
        raise typer.Exit(1)
    print(f"The static chunk tripped the guard at {headroom_gib:g} GiB of headroom; DynChunk passed the same ramp.")


def step(what: str) -> None:
    """One progress line."""
    print(f"\n==> [{time.strftime('%H:%M:%S')}] {what}", flush=True)


def _memguard(*arguments: str) -> int:
    """Run memguard to its end -> its exit code. Interrupted, it gets the time to write down what it has."""
    environ = reference.outer_environ() | {"PYTHONPATH": os.pathsep.join((str(ROOT / "adapter"), str(ROOT)))}
    command = [sys.executable, "-m", "scripts.verify.memguard", *arguments]
    process = None
    try:
        # In a session of its own: Ctrl-C comes to this process alone, which hands it on.
        with undisturbed():
            process = subprocess.Popen(command, env=environ, cwd=ROOT, start_new_session=True)
        return process.wait()
    except KeyboardInterrupt:
        step("interrupted: memguard writes what it has, then the engine ends (up to a minute)")
        if process is not None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=MEMGUARD_ENDS_S)
        raise
    finally:
        if process is not None:
            process.kill()
            process.wait()


def _enough_memory(headroom_gib: float) -> None:
    needed_gib = headroom_gib + 6  # the engine's processes take about 3 GiB, and the guard must not be the host's end
    available_gib = psutil.virtual_memory().available / 2**30
    if available_gib < needed_gib:
        sys.exit(
            f"quickstart: {available_gib:.1f} GiB of memory are available, about {needed_gib:.1f} are needed; close "
            "other programs, or lower --headroom-gib together with --sizes"
        )


def _new_report_folder() -> Path:
    """logs/profile-DATE, with a number behind it where that exists: nothing is overwritten."""
    base = LOGS / f"profile-{datetime.now().astimezone():%Y-%m-%d}"
    for number in range(1, 1000):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if not folder.exists():
            return folder
    sys.exit(f"quickstart: {base.parent} holds a thousand reports of today; move some away")


@contextlib.contextmanager
def serving(arm: Arm, *, budget: str, chunk: int) -> Iterator[reference.Server]:
    """A server for one run, started as a user would: `./dynchunk serve` and settings in the environment."""
    CACHE.mkdir(parents=True, exist_ok=True)
    trace = CACHE / f"{arm.label}.jsonl"
    trace.unlink(missing_ok=True)
    log = CACHE / f"{arm.label}.log"
    port = reference.free_port()
    settings = {
        "DYNCHUNK_MODE": arm.mode,
        "DYNCHUNK_BUDGET": budget,
        "DYNCHUNK_TRACE": str(trace),
        "MODEL_PATH": str(reference.MODEL),
        "CHUNKED_PREFILL_SIZE": str(chunk),
        "CONTEXT_LENGTH": "131072",
        "MAX_TOTAL_TOKENS": "140000",
        "PAGE_SIZE": "64",
        "HOST": "127.0.0.1",
        "PORT": str(port),
    }
    environ = reference.outer_environ() | reference.platform_environ() | settings
    step(f"the engine starts (20 s to 1 minute; its log: {log})")
    with reference.running(SERVE, environ, log, trace, port) as server:
        yield server


def run() -> None:
    """The program."""
    try:
        typer.run(main)
    except reference.EngineEndedError as error:
        sys.exit(f"quickstart: {error}")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    run()
