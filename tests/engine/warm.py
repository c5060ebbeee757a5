"""Python processes that start in seconds: forks of one that has imported what every engine imports of others.

The test worker's side; what forks and why that is the same start is in warm_process.py.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts import reference
from tests.engine.warm_process import LENGTH, Request, read, send

WARM = "WARM_PROCESS"
PROGRAM = Path(__file__).with_name("warm_process.py")


class Process:
    """The part of subprocess.Popen that tests use, for a process that somebody else has forked."""

    def __init__(self, talk: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._talk = talk

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Signal it, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._talk, select.POLLIN)
            if poll.poll(None if timeout_s is None else timeout_s * 1000):
                self.returncode = os.waitstatus_to_exitcode(LENGTH.unpack(read(self._talk, LENGTH.size))[0])
                self._talk.close()
        return self.returncode


def start(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdout: Any,
    stderr: Any = subprocess.STDOUT,
    start_new_session: bool = True,
) -> Process:
    """subprocess.Popen for `python -m MODULE ...` and `python -c CODE ...`, always in a session of its own."""
    assert start_new_session
    talk = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    talk.connect(address())
    out = stdout.fileno()
    send(
        talk,
        Request([str(word) for word in argv], dict(env), str(cwd), [1, 2]),
        [out, out if stderr == subprocess.STDOUT else stderr.fileno()],
    )
    return Process(talk, LENGTH.unpack(read(talk, LENGTH.size))[0])


def run(
    argv: Sequence[str | Path], *, env: Mapping[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """subprocess.run with captured text. Raises subprocess.TimeoutExpired, and ends the process then."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = start(argv, env=env, cwd=cwd, stdout=out, stderr=err)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(map(str, argv)), code, out.read(), err.read())


def serving(folder: Path, *flags: str, **settings: Any) -> contextlib.AbstractContextManager[reference.Server]:
    """scripts.reference.serving, started warm and ended without the five seconds that the engine's own end takes."""
    return reference.running(*reference.engine(folder, *flags, **settings), start=start, end=kill)


def kill(process: Process) -> None:
    """End it and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@functools.cache
def address() -> str:
    """Where to reach this worker's warm process. It ends with the worker: its standard input does.

    Checks that run in a process of their own use that of the worker that started them.
    """
    if WARM in os.environ:
        return os.environ[WARM]
    folder = tempfile.mkdtemp(prefix="warm")
    listens = f"{folder}/s"
    environ = reference.outer_environ() | reference.platform_environ() | {"PYTHONPATH": ""}
    # No flags: spawned children would have them too.
    command = [sys.executable, PROGRAM, listens]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, env=environ)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            said.seek(0)
            raise AssertionError(f"the warm process did not come up: {said.read()[-3000:]}")
    atexit.register(process.communicate)  # the pipe ends with the worker in any case; this way without a warning
    return listens
