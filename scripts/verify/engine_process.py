"""The engine's process on this host: found, verified, and held, so that a signal can reach nothing else.

It is found and opened while all is well. A pidfd stays with its process: a number that the system gives to another one
later is never hit. Without a process that is certainly the engine, nothing is signalled.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import weakref
from collections.abc import Sequence
from pathlib import Path

import psutil

from launcher.address import DEFAULT_PORT
from launcher.flags import value_of
from scripts.verify.host import PROC

_MODULE = "sglang.launch_server"


class EngineProcess:
    """One process and what it has started since. what: for the log. is_head: whether it is the host that answers."""

    def __init__(self, pid: int, what: str, *, is_head: bool = True) -> None:
        """Raises OSError where there is no such process, it may not be signalled, or the kernel has no pidfds."""
        self.pid = pid
        self.what = what
        self.is_head = is_head
        self._fd = os.pidfd_open(pid)
        # Not before nobody can use it any more: its number may be another process's then.
        weakref.finalize(self, os.close, self._fd)
        signal.pidfd_send_signal(self._fd, 0)  # nothing is sent; only whether it may be

    def send(self, number: signal.Signals) -> str:
        """Signal it -> what was done, in words. SIGKILL goes to everything it has started as well."""
        children = _children(self.pid) if number is signal.SIGKILL and not self.ended() else []
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            return f"{number.name} was not sent: {self.what} has ended"
        except OSError as error:
            return f"{number.name} to {self.what} failed: {error.strerror}"
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.send_signal(number)  # psutil compares when it started first
        return f"{number.name} was sent to {self.what}"

    def ended(self) -> bool:
        """Whether it is gone."""
        return self.wait(0)

    def wait(self, at_most_s: float) -> bool:
        """Wait for it to end -> whether it has. From any thread."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(at_most_s * 1000))


def find(port: int, *, here: bool | None, proc: Path = PROC) -> EngineProcess | str:
    """The one SGLang server of this host that was started for `port`, or why there is none that could be signalled.

    here: whether the address that is asked is one of this host's: then it is the head, else one of the other hosts that
    serve with it. None: not known, as in a container.
    """
    found = []
    for entry in sorted(proc.iterdir(), key=lambda path: path.name):
        words = _command(entry) if entry.name.isdigit() else []
        if _is_server(words) and _number(words, "--port", DEFAULT_PORT) == port:
            is_head = _number(words, "--node-rank", 0) == 0
            if here is None or here == is_head:
                found.append((int(entry.name), words))
    if not found:
        return f"no SGLang server for port {port} runs where memguard can see it"
    if len(found) > 1:
        return f"{len(found)} SGLang servers here were started for port {port}: which is meant is not certain"
    pid, words = found[0]
    try:
        engine = EngineProcess(pid, f"the engine (process {pid})", is_head=_number(words, "--node-rank", 0) == 0)
    except OSError as error:
        return f"process {pid} cannot be signalled: {error.strerror}"
    # Read again, now that the number cannot come to mean another process unnoticed.
    if _command(proc / str(pid)) != words or engine.ended():
        return f"process {pid} ended while it was looked at"
    return engine


def _is_server(words: Sequence[str]) -> bool:
    """`python -m sglang.launch_server ...` or `sglang serve ...`, not something that only mentions them."""
    rest = list(words)
    if rest and Path(rest[0]).name.startswith("python"):
        rest = rest[1:]
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            rest = rest[1:]
    return rest[:2] == ["-m", _MODULE] or (rest[1:2] == ["serve"] and Path(rest[0]).name == "sglang")


def _number(words: Sequence[str], flag: str, default: int) -> int:
    """The value of a flag; -1 where it is no number, which no server listens on."""
    value = value_of(words, flag)
    if value is None:
        return default
    return int(value) if value.isascii() and value.isdigit() else -1


def _command(entry: Path) -> list[str]:
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
