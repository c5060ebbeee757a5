"""The host's memory, read from files that were opened once and stay open: it may be about to freeze.

/proc/meminfo there must be. What else there is depends on kernel and rights: /proc/vmstat (swap-ins, kills),
/proc/pressure/memory, and /dev/kmsg, whose lines only an administrator may read.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from scripts.verify.errors import MemguardError

PROC = Path("/proc")
KMSG = Path("/dev/kmsg")

_READ_BYTES = 16_384
_MOST_KERNEL_LINES = 256  # at one reading: a kernel that talks without end must not hold it up
# The kernel's own words, and the ones of NVIDIA's driver where GPU memory is host memory.
_OUT_OF_MEMORY = (b"Out of memory", b"oom-kill:", b"NV_ERR_NO_MEMORY")


class Reading(NamedTuple):
    """One moment. swap_in_pages and kernel_oom count from some time before; None: this kernel does not say."""

    available_bytes: int
    free_bytes: int
    swap_in_pages: int
    psi_full_avg10: float | None
    kernel_oom: int


class Host:
    """The open files. Raises MemguardError where there is no MemAvailable."""

    def __init__(self, proc: Path = PROC, kmsg: Path = KMSG) -> None:
        meminfo = proc / "meminfo"
        try:
            self._meminfo = os.open(meminfo, os.O_RDONLY)
        except OSError as error:
            raise MemguardError(f"cannot read {meminfo}: {error.strerror}; memguard needs Linux") from None
        self._vmstat = _opened(proc / "vmstat")
        self._pressure = _opened(proc / "pressure" / "memory")
        self._kmsg = _opened(kmsg, os.O_NONBLOCK)
        if self._kmsg is not None:
            with contextlib.suppress(OSError):  # what was said before is none of ours
                os.lseek(self._kmsg, 0, os.SEEK_END)
        self._kernel_lines = 0
        try:
            self.read()
        except ValueError:
            self.close()
            raise MemguardError(f"{meminfo} has no MemAvailable; memguard needs Linux 3.14 or later") from None

    def read(self) -> Reading:
        """Read everything anew. Raises OSError or ValueError where /proc/meminfo can no longer be read."""
        memory = os.pread(self._meminfo, _READ_BYTES, 0)
        vmstat = _content(self._vmstat)
        self._kernel_lines += _kernel_lines(self._kmsg)
        return Reading(
            _number(memory, b"MemAvailable:", b"kB") * 1024,
            _number(memory, b"MemFree:", b"kB") * 1024,
            _number(vmstat, b"\npswpin ", b"\n") if b"\npswpin " in vmstat else 0,
            _pressure(_content(self._pressure)),
            self._kernel_lines + (_number(vmstat, b"\noom_kill ", b"\n") if b"\noom_kill " in vmstat else 0),
        )

    def close(self) -> None:
        """Give the files back."""
        for fd in (self._meminfo, self._vmstat, self._pressure, self._kmsg):
            if fd is not None:
                os.close(fd)


def _kernel_lines(kmsg: int | None) -> int:
    """How many of the kernel's lines since the last call are about memory that ran out."""
    found = 0
    if kmsg is None:
        return found
    for _ in range(_MOST_KERNEL_LINES):
        try:
            line = os.read(kmsg, _READ_BYTES)  # one read is one line
        except BrokenPipeError:
            continue  # lines were overwritten before they were read
        except OSError:
            break
        if not line:
            break
        found += any(words in line for words in _OUT_OF_MEMORY)
    return found


def _opened(path: Path, flags: int = 0) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | flags)
    except OSError:
        return None


def _content(fd: int | None) -> bytes:
    if fd is None:
        return b""
    try:
        return os.pread(fd, _READ_BYTES, 0)
    except OSError:
        return b""


def _pressure(content: bytes) -> float | None:
    """avg10 of the line `full avg10=0.12 avg60=...`."""
    start = content.find(b"full avg10=")
    if start < 0:
        return None
    return float(content[start + len(b"full avg10=") :].split(None, 1)[0])


def _number(data: bytes, name: bytes, until: bytes) -> int:
    start = data.index(name) + len(name)
    return int(data[start : data.index(until, start)])
