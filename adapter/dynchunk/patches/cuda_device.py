"""The CUDA calls behind cache_release.Device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


class CudaDevice:
    """One device of this process, and whether the engine is in a state that allows anything."""

    def __init__(self, index: int, scheduler: Any) -> None:
        self.index = index
        self.scheduler = scheduler
        properties = torch.cuda.get_device_properties(index)
        self.name = str(properties.name)
        # GPU memory is host memory there; CUDA's own "free" would count the page cache as taken.
        self.is_integrated = bool(properties.is_integrated)
        self.graph_pool_bytes = unused_in_graph_pools(index)

    def available_bytes(self) -> int:
        """MemAvailable on an integrated device, the driver's free memory on a discrete one."""
        if self.is_integrated:
            return mem_available_bytes()
        free_bytes, _ = torch.cuda.mem_get_info(self.index)
        return int(free_bytes)

    def unused_reserved_bytes(self) -> int:
        """Reserved less allocated, from the allocator's own counters, and without what graphs keep for themselves."""
        unused = torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
        return max(0, int(unused) - self.graph_pool_bytes)

    def must_not_release(self) -> bool:
        """While a graph is captured, and while generation is paused (the engine guards its own releases so)."""
        return bool(self.scheduler._engine_paused) or torch.cuda.is_current_stream_capturing()

    def empty_cache(self) -> None:
        """Torch's own call. Not the platform's: on a CPU that is a full garbage collection."""
        torch.cuda.empty_cache()


def unused_in_graph_pools(index: int) -> int:
    """What captured graphs hold and nothing else can have or give back. They are captured once, before serving."""
    try:
        segments = [s for s in torch.cuda.memory_snapshot() if s.get("device", index) == index]
    except RuntimeError:  # an allocator that is not torch's own keeps no such list
        return 0
    return sum(
        int(s["total_size"]) - int(s["allocated_size"])
        for s in segments
        if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)
    )


def mem_available_bytes() -> int:
    """The host's MemAvailable."""
    with Path("/proc/meminfo").open(encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")
