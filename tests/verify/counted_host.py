"""A host that says how often its memory has been read, so that a fake engine can hold each dip until it was seen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from scripts.verify.host import KMSG, PROC, Host, Reading

_BYTES = 8
_CLOSED = 2**60  # nobody reads any more


class CountedHost(Host):
    """Keeps the number of readings in a file beside the made-up meminfo: the engine may be another process."""

    def __init__(self, proc: Path = PROC, kmsg: Path = KMSG) -> None:
        self._readings = 0
        self._counter = os.open(_counter(proc), os.O_WRONLY | os.O_CREAT)
        super().__init__(proc, kmsg)

    def read(self) -> Reading:
        reading = super().read()
        self._readings += 1
        self._write(self._readings)
        return reading

    def close(self) -> None:
        self._write(_CLOSED)
        os.close(self._counter)
        super().close()

    def _write(self, number: int) -> None:
        os.pwrite(self._counter, number.to_bytes(_BYTES, "little"), 0)


def until_read(folder: Path, over: Callable[[], bool]) -> None:
    """Wait until what stands in the made-up meminfo now has been read, where a counted host reads it."""
    before = _readings(folder)
    # One that had begun before may have come in between: the second one after now is certainly of now.
    while before <= (now := _readings(folder)) < before + 2 and now < _CLOSED and not over():
        time.sleep(0.002)


def _counter(folder: Path) -> Path:
    return folder / "readings"


def _readings(folder: Path) -> int:
    """How many; as if nobody read any more where nobody ever has."""
    try:
        found = _counter(folder).read_bytes()
    except FileNotFoundError:
        return _CLOSED
    return int.from_bytes(found, "little") if found else _CLOSED
