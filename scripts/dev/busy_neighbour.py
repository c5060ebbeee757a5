"""A machine that does other work: processes that keep cores busy, and one that takes memory and gives it back.

`python -m scripts.dev.busy_neighbour --cores 2 --gib 1 -- COMMAND` runs COMMAND beside them and ends as it ends.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from scripts.ending import SIGNALS, end_once, undisturbed

STEP_BYTES, TAKES_S, RESTS_S = 16 * 2**20, 2.0, 1.0  # of a tooth of the saw


def burn(goes: Callable[[], bool]) -> None:
    """Keep one core busy."""
    while goes():
        sum(range(100_000))


def saw(goes: Callable[[], bool], most_bytes: int) -> None:
    """Take memory bit by bit and give it back at once, over and over."""
    while goes():
        with mmap.mmap(-1, most_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
            while goes() and taken.tell() < most_bytes:
                taken.write(b"\1" * min(STEP_BYTES, most_bytes - taken.tell()))
                time.sleep(TAKES_S * STEP_BYTES / most_bytes)
            time.sleep(RESTS_S)
        time.sleep(RESTS_S)


def _work(parent: int, until_s: float, work: Callable[..., None], *arguments: int) -> None:
    for number in SIGNALS:  # Ctrl-C is for the parent, which ends its children
        signal.signal(number, signal.SIG_IGN if number is signal.SIGINT else signal.SIG_DFL)
    work(lambda: os.getppid() == parent and time.monotonic() < until_s, *arguments)


def main() -> int:
    """Run the command (without one: wait) with the load beside it -> its exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.dev.busy_neighbour", description=__doc__)
    parser.add_argument("--cores", type=int, default=1, help="processes that compute without a pause (1)")
    parser.add_argument("--gib", type=float, default=1.0, help="memory taken and given back (1; 0: none)")
    parser.add_argument("--minutes", type=float, help="the load ends then (10, or with COMMAND)")
    parser.add_argument("command", nargs="*", help="behind --: what to run beside the load")
    wanted = parser.parse_args()
    until_s = time.monotonic() + 60 * (wanted.minutes or (float("inf") if wanted.command else 10.0))
    loads: list[tuple[object, ...]] = [(burn,)] * wanted.cores + [(saw, int(wanted.gib * 2**30))] * (wanted.gib > 0)
    fork = multiprocessing.get_context("fork").Process
    children = [fork(target=_work, args=(os.getpid(), until_s, *load), daemon=True) for load in loads]
    command, code = None, 0
    end_once()
    try:
        with undisturbed():
            for child in children:
                child.start()
            command = subprocess.Popen(wanted.command) if wanted.command else None
        if command is not None:
            code = command.wait()
        else:
            for child in children:
                child.join()
    except KeyboardInterrupt:
        code = 130
        if command is not None:
            command.terminate()
            command.wait()
    return code if code >= 0 else 128 - code  # the load ends with this process


if __name__ == "__main__":
    sys.exit(main())
