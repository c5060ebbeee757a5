"""The CUDA calls behind the cache release, and which release policy fits this engine's device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dynchunk import journal, settings
from dynchunk.cache_release import GIB, CacheRelease


def release_policy(scheduler: Any) -> CacheRelease | None:
    """The policy as configured; None where it is off or there is no CUDA device."""
    configured = settings.current()
    mode = configured.empty_cache
    if mode == "off":
        journal.record("cache_release", journal.NOT_IN_USE, "DYNCHUNK_EMPTY_CACHE=off")
        return None
    if scheduler.tp_worker.model_runner.device != "cuda" or not torch.cuda.is_available():
        journal.record("cache_release", journal.NO_DEVICE, "no CUDA device")
        return None
    device = CudaDevice(torch.cuda.current_device(), scheduler)
    if mode == "auto":
        mode = "always" if device.is_integrated else "low"
    journal.record("cache_release", journal.APPLIED, mode)
    return CacheRelease(
        device,
        mode,
        configured.empty_cache_min_tokens,
        int(configured.empty_cache_below_gib * GIB),
    )


class CudaDevice:
    """The CUDA calls behind cache_release.Device."""

    def __init__(self, index: int, scheduler: Any) -> None:
        self.index = index
        self.scheduler = scheduler
        # GPU memory is host memory there; CUDA's own "free" would count the page cache as taken.
        self.is_integrated = bool(torch.cuda.get_device_properties(index).is_integrated)

    def available_bytes(self) -> int:
        """MemAvailable on an integrated device, the driver's free memory on a discrete one."""
        if self.is_integrated:
            return _mem_available_bytes()
        free_bytes, _ = torch.cuda.mem_get_info(self.index)
        return int(free_bytes)

    def unused_reserved_bytes(self) -> int:
        """Reserved less allocated, from the allocator's own counters."""
        return int(torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index))

    def must_not_release(self) -> bool:
        """While a graph is captured, and while generation is paused (the engine guards its own releases so)."""
        return bool(self.scheduler._engine_paused) or torch.cuda.is_current_stream_capturing()

    def empty_cache(self) -> None:
        """Torch's own call. Not the platform's: on a CPU that is a full garbage collection."""
        torch.cuda.empty_cache()


def _mem_available_bytes() -> int:
    with Path("/proc/meminfo").open(encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")
