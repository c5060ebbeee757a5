"""Free memory of GPUs that have their own, read in a thread of its own: a driver's call may wait for many minutes.

Such a GPU answers a prompt that is too large with an error, so nothing is decided by this; it is in the report. Where
GPU memory is the host's the driver does not tell it, and /proc/meminfo does.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

POLL_S = 0.5


class Devices(threading.Thread):
    """The GPUs that report their memory; none where there is no driver."""

    def __init__(self) -> None:
        super().__init__(name="memguard-devices", daemon=True)
        self._nvml, self._handles = _gpus()
        self._low: list[int] = []
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to read, if there is anything to read."""
        if self._handles:
            super().start()

    @property
    def present(self) -> bool:
        """Whether there are any."""
        return bool(self._handles)

    def mark(self) -> None:
        """From now on the lowest count anew."""
        self._low = []

    def low_bytes(self) -> list[int]:
        """The least that was free on each GPU since the mark; empty where nothing was read since."""
        return list(self._low)

    def end(self) -> None:
        """Stop reading. Does not wait: the driver may not answer."""
        self._ended.set()

    def run(self) -> None:
        """The loop of the thread; a driver that fails ends it, and the report has no such figures from then on."""
        while not self._ended.wait(POLL_S):
            try:
                free = [int(self._nvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in self._handles]
            except Exception:
                self._low = []
                return
            self._low = list(map(min, self._low or free, free))


def _gpus() -> tuple[Any, list[Any]]:
    """(NVML, its handles of the GPUs that tell how much of their memory is free)."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except Exception:
        return None, []
    return nvml, [handle for handle in handles if _tells(nvml, handle)]


def _tells(nvml: Any, handle: Any) -> bool:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).free) > 0
    except Exception:
        return False
