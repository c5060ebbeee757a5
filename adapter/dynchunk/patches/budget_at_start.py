"""DYNCHUNK_BUDGET=auto in an engine: what each rank reports, and the budget that all of them work out from it."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from typing import Any

from dynchunk.patches import cuda_device, cuda_memory, facts, score_limits
from dynchunk.policy import auto_budget
from dynchunk.policy.auto_budget import Derived, NoHeadroomError
from dynchunk.settings import SettingsError

# What memguard leaves untouched too.
GUARD_BYTES = 3 << 29
UNKNOWN_PATH = (
    "DYNCHUNK_BUDGET=auto: what a row and key of this model costs is not known; set a number such as 2.0e8, let "
    "memguard ramp it, and read the measured coefficient in ./dynchunk status"
)


def report(scheduler: Any) -> dict[str, Any]:
    """What this rank has to spare, and what a row and key costs here. Plain JSON values."""
    device = scheduler.tp_worker.model_runner.device
    cuda = cuda_memory.CudaMemory.of(scheduler) if device == "cuda" else None
    headroom = cuda_device.mem_available_bytes() - GUARD_BYTES if cuda is None else cuda.headroom_bytes(GUARD_BYTES)
    return {
        "headroom_bytes": max(0, headroom),
        # Ranks that share a host's memory share what it has to spare.
        "host": platform.node() if cuda is None or cuda.is_integrated else None,
        "path": facts.attention_path(scheduler),
        "score_limit_bytes": score_limits.in_force_bytes() or 0,
    }


def headrooms(everybody: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Bytes to spare by rank."""
    sharing = Counter(one["host"] for one in everybody.values() if one["host"] is not None)
    return {rank: one["headroom_bytes"] // max(1, sharing[one["host"]]) for rank, one in everybody.items()}


def derive(everybody: Mapping[str, Mapping[str, Any]]) -> Derived:
    """The budget for all ranks. Raises SettingsError with what to do instead."""
    if any(one["path"] is None for one in everybody.values()):
        raise SettingsError([UNKNOWN_PATH])
    costs = {rank: auto_budget.of_path(one["path"], one["score_limit_bytes"]) for rank, one in everybody.items()}
    try:
        return auto_budget.derive(headrooms(everybody), costs)
    except NoHeadroomError as error:
        raise SettingsError([str(error)]) from error
