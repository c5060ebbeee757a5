"""What the engine's own processes take, for a rehearsal on a machine that does other work meanwhile.

MemAvailable falls whoever takes memory. What a process and all it has started hold is theirs alone: of each,
/proc/PID/status counts the pages that are anonymous or shared memory, in memory or in swap. Files it maps are page
cache, which MemAvailable counts as available anyway. (A page that two of them share counts twice; as only what is
taken after the first reading is judged, that is a matter of what they share anew.)
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from scripts.verify.decide import ORDINARY_GUARD_BYTES
from scripts.verify.errors import MemguardError
from scripts.verify.host import PROC

_READ_BYTES = 16_384
_RESIDENT = b"\nRssAnon:"  # a process that has ended and is not yet reaped has no such line
_COUNTED = (_RESIDENT, b"\nRssShmem:", b"\nVmSwap:")


class OwnMemory:
    """The open files of a process and its descendants. `follow` from one thread, `judged_bytes` from another.

    Raises MemguardError where the process is gone or the kernel does not tell what it holds.
    """

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        file = _opened(pid, proc)
        if file is None:
            raise MemguardError(
                f"--own-memory: {proc / str(pid) / 'status'} does not tell what process {pid} holds: it has ended, or "
                "this kernel has no RssAnon (Linux 4.5 has); start the engine again, or leave --own-memory out"
            )
        self._proc = proc
        self._files = {pid: file}  # a file stays with its process, whoever gets the number later
        self._lock = threading.Lock()  # held while files are read or closed, never while one is opened
        self._without_engine_bytes: int | None = None
        self.follow()

    def follow(self) -> None:
        """Look for processes that the engine has started since, and let go of those that have ended.

        One that was found stays the engine's until it ends, also if the one that started it ends before.
        """
        held = {pid: file for pid, file in self._files.items() if _content(file) is not None}
        ended = [file for pid, file in self._files.items() if pid not in held]
        new = _descendants(set(held), self._proc) - held.keys()
        held |= {pid: file for pid in new if (file := _opened(pid, self._proc)) is not None}
        with self._lock:
            self._files = held
            for file in ended:
                os.close(file)

    def judged_bytes(self, host_available_bytes: int) -> int:
        """What MemAvailable would be if nobody but the engine had taken or given back memory since the first call."""
        with self._lock:
            held_bytes = sum(_held_bytes(file) for file in self._files.values())
        if self._without_engine_bytes is None:
            self._without_engine_bytes = host_available_bytes + held_bytes
        return judged_bytes(host_available_bytes, self._without_engine_bytes - held_bytes)

    def close(self) -> None:
        """Give the files back."""
        with self._lock:
            for file in self._files.values():
                os.close(file)
            self._files = {}


def judged_bytes(host_available_bytes: int, engine_leaves_bytes: int) -> int:
    """Which of both counts: what the engine leaves, but never more than a host has that is itself in danger."""
    if host_available_bytes < ORDINARY_GUARD_BYTES:
        return min(host_available_bytes, engine_leaves_bytes)
    return engine_leaves_bytes


def _opened(pid: int, proc: Path) -> int | None:
    """The status of a process; None where it has ended, or does not tell."""
    try:
        file = os.open(proc / str(pid) / "status", os.O_RDONLY)
    except OSError:
        return None
    if _content(file) is None:
        os.close(file)
        return None
    return file


def _held_bytes(file: int) -> int:
    content = _content(file) or b""
    return sum(_kib(content, name) for name in _COUNTED) * 1024


def _content(file: int) -> bytes | None:
    """What a process's status says; None where it has ended."""
    try:
        content = os.pread(file, _READ_BYTES, 0)
    except OSError:
        return None
    return content if _RESIDENT in content else None


def _kib(content: bytes, name: bytes) -> int:
    """The number of a line `Name: 123 kB`; 0 where there is none."""
    start = content.find(name)
    return int(content[start + len(name) : content.index(b"kB", start)]) if start >= 0 else 0


def _descendants(roots: set[int], proc: Path) -> set[int]:
    """The processes themselves and all that they have started."""
    parents = _parents(proc)
    found = roots & parents.keys()
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _parents(proc: Path) -> dict[int, int]:
    """Process -> the one that has started it."""
    parents = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
                # The name is in brackets and may hold any character; the fields follow the last one.
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
                )
    return parents
