"""How long forwards take, without ever waiting for one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import torch


class ForwardTimer(Protocol):
    """start and stop bracket a forward; finished() yields (what was given to stop, ms) of those that are through."""

    def start(self) -> None:
        """Called right before the launch."""

    def stop(self, forward: Any) -> None:
        """Called right after the launch, or not at all: then the forward was not to be timed."""

    def finished(self) -> Iterator[tuple[Any, float]]:
        """Each forward once, in the order of launches."""


class CpuTimer:
    """On the CPU a forward is over when it returns."""

    def __init__(self) -> None:
        self._start_s = 0.0
        self._done: deque[tuple[Any, float]] = deque()

    def start(self) -> None:
        """Remember the time."""
        self._start_s = time.perf_counter()

    def stop(self, forward: Any) -> None:
        """Note what it took."""
        self._done.append((forward, (time.perf_counter() - self._start_s) * 1000))

    def finished(self) -> Iterator[tuple[Any, float]]:
        """All that were stopped."""
        while self._done:
            yield self._done.popleft()


class CudaTimer:
    """Events in the stream of the forward: they bracket it on the device, so work queued before does not count."""

    def __init__(self) -> None:
        self._spare: list[Any] = []
        self._start: Any = None
        self._waiting: deque[tuple[Any, Any, Any]] = deque()

    def start(self) -> None:
        """Record an event before the launch."""
        self._start = self._start or self._event()
        self._start.record()

    def stop(self, forward: Any) -> None:
        """Record one after it."""
        end = self._event()
        end.record()
        self._waiting.append((forward, self._start, end))
        self._start = None

    def finished(self) -> Iterator[tuple[Any, float]]:
        """Those the device has passed; asked, never waited for."""
        while self._waiting and self._waiting[0][2].query():
            forward, start, end = self._waiting.popleft()
            yield forward, start.elapsed_time(end)
            self._spare += [start, end]

    def _event(self) -> Any:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)


def for_device(device: str) -> ForwardTimer:
    """The timer for an engine's device, by torch's name for it."""
    return CudaTimer() if device == "cuda" else CpuTimer()
