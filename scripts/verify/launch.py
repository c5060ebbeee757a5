"""Starts the engine with the guard already armed, and ends it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from scripts.ending import stop, undisturbed
from scripts.verify.decide import LOAD, START
from scripts.verify.engine_process import EngineProcess
from scripts.verify.errors import MemguardError

LOOK_S = 0.5
_HEALTH_ANSWER_S = 2.0
_SCHEDULER = "sglang::scheduler"  # how the engine's processes call themselves once they load


@contextlib.contextmanager
def launched(command: Sequence[str], log: Path | None, niceness: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command, its output in a new file `log` (None: where ours goes); in the end stop all it started.

    niceness: what it runs with. Ours is memguard's alone.
    """
    process = None
    try:
        with undisturbed():
            process = _started(command, log)
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
        yield process
    finally:
        if process is not None:
            stop(process)


def _started(command: Sequence[str], log: Path | None) -> subprocess.Popen[bytes]:
    with contextlib.ExitStack() as stack:
        try:
            output = stack.enter_context(log.open("xb")) if log else None
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise MemguardError(f"--launch: cannot start {command[0]}: {error.strerror}") from None


def held(process: subprocess.Popen[bytes]) -> EngineProcess | str:
    """The process as one that may be signalled: memguard has started it itself."""
    try:
        return EngineProcess(process.pid, f"the engine (process {process.pid}, started by memguard)")
    except OSError as error:
        return f"process {process.pid} cannot be signalled: {error.strerror}"


def phase(process: subprocess.Popen[bytes]) -> str:
    """`load` once the engine has a process that loads the model, before that `start`."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
        commands = ["".join(child.cmdline()[:1]) for child in children]
    except psutil.Error:
        return START
    return LOAD if any(command.startswith(_SCHEDULER) for command in commands) else START


def wait_until_serving(
    process: subprocess.Popen[bytes],
    healthy: Callable[[float], bool],
    *,
    tripped: Callable[[], bool],
    tick: Callable[[str], None],
    at_most_s: float,
    log: Path | None,
) -> None:
    """Until the engine answers or the guard has tripped. Raises MemguardError when it ends, or takes too long.

    tick: called every LOOK_S with the phase; healthy: asks the server, and gives it so many seconds.
    """
    where = f"; its log: {log}" if log else ""
    deadline_s = time.monotonic() + at_most_s
    while not tripped():
        if process.poll() is not None:
            raise MemguardError(f"the engine ended with exit code {process.returncode} before it served{where}")
        if healthy(_HEALTH_ANSWER_S):
            return
        if time.monotonic() > deadline_s:
            raise MemguardError(f"the engine did not serve within {at_most_s:g} s{where}")
        tick(phase(process))
        time.sleep(LOOK_S)
