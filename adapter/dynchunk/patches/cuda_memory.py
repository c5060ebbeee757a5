"""The CUDA calls behind priming (prime_cache.Device), measuring (peak.Memory) and the automatic budget."""

from __future__ import annotations

from typing import Any

import torch

from dynchunk import journal, settings
from dynchunk.patches.cuda_device import CudaDevice
from dynchunk.policy import auto_budget

_ASK = "_accelerator_getAllocatorSettings"


class CudaMemory(CudaDevice):
    """One device's allocator. Counters only, nothing waits for the device."""

    @classmethod
    def of(cls, scheduler: Any) -> CudaMemory:
        """This scheduler's device."""
        return cls(torch.cuda.current_device(), scheduler)

    def reserved_peak_bytes(self) -> int:
        """The most held since the last mark, which is at least what is held now."""
        return self._counter("reserved_bytes", "peak")

    def allocate_and_free(self, size_bytes: int) -> None:
        """One block on the current stream; what it holds is never read or written."""
        torch.empty(size_bytes, dtype=torch.uint8, device=f"cuda:{self.index}")

    def mark(self) -> None:
        """Every peak counter of the allocator starts anew."""
        torch.cuda.reset_peak_memory_stats(self.index)

    def transient_bytes(self) -> int:
        """Allocated at the peak less allocated now."""
        return self._counter("allocated_bytes", "peak") - self._counter("allocated_bytes", "current")

    def headroom_bytes(self, guard_bytes: int) -> int:
        """What a chunk may take here; guard_bytes stay untouched where GPU memory is host memory."""
        free_bytes, _ = torch.cuda.mem_get_info(self.index)
        return auto_budget.headroom_bytes(
            driver_free=free_bytes,
            reserved=self._counter("reserved_bytes", "current") - self.graph_pool_bytes,
            allocated=self._counter("allocated_bytes", "current"),
            mem_available=self.available_bytes() if self.is_integrated else None,
            guard=guard_bytes,
        )

    def _counter(self, name: str, which: str) -> int:
        # The nested form: flattening all counters costs more than reading them.
        return int(torch.cuda.memory_stats_as_nested_dict(self.index)[name]["all"][which])


def record_memory_fraction() -> None:
    """Note whether torch runs under DYNCHUNK_MEMORY_FRACTION: `serve` hands it over, another start does not."""
    wanted = settings.current().memory_fraction
    if wanted is None:
        return
    in_force = torch._C._accelerator_getAllocatorSettings() if hasattr(torch._C, _ASK) else ""
    if f"per_process_memory_fraction:{wanted:g}" in in_force:
        journal.record("memory_fraction", journal.APPLIED, in_force)
    else:
        detail = f"only ./dynchunk serve hands it to torch, which runs under {in_force!r}"
        journal.record("memory_fraction", journal.NOT_IN_USE, detail)
