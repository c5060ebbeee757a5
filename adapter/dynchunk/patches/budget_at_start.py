"""DYNCHUNK_BUDGET=auto in an engine: what each rank reports, and the budget that all of them work out from it."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynchunk import journal, measured_before, settings
from dynchunk.patches import attention_path, cuda_device, cuda_memory, facts
from dynchunk.policy import auto_budget
from dynchunk.policy.auto_budget import Coefficient, Derived, NoHeadroomError
from dynchunk.settings import SettingsError

# What memguard leaves untouched too.
GUARD_BYTES = 3 << 29
MEASURED_BEFORE = "measured by an earlier run on this engine and device"
UNKNOWN_PATH = (
    "DYNCHUNK_BUDGET=auto: what a row and key of this model costs is not known; set a number such as 2.0e8, let "
    "memguard ramp it, and name the report in DYNCHUNK_REPORT"
)


def report(scheduler: Any) -> dict[str, Any]:
    """What this rank has to spare, and what a row and key costs here. Plain JSON values."""
    device = scheduler.tp_worker.model_runner.device
    cuda = cuda_memory.CudaMemory.of(scheduler) if device == "cuda" else None
    path, limit_bytes = attention_path.path_and_limit(scheduler)
    headroom = cuda_device.mem_available_bytes() - GUARD_BYTES if cuda is None else cuda.headroom_bytes(GUARD_BYTES)
    return {
        "headroom_bytes": max(0, headroom - attention_path.workspace_bytes(scheduler)),
        # Ranks that share a host's memory share what it has to spare.
        "host": platform.node() if cuda is None or cuda.is_integrated else None,
        "path": path,
        "score_limit_bytes": limit_bytes,
        "measured": _measured_before(scheduler),
    }


def _measured_before(scheduler: Any) -> dict[str, Any] | None:
    """What DYNCHUNK_REPORT holds for this engine, as plain JSON values. The journal says why it does not count."""
    path, outcome = settings.current().report, journal.APPLIED
    if path is None:
        return None
    found = None
    try:
        found = measured_before.of_this_engine(Path(path), facts.cost_identity(scheduler))
        detail = f"{path}: {found.millibytes / 1000:g} B for a row and key above {found.base_bytes:,} bytes"
    except measured_before.ReportError as error:
        outcome, detail = journal.NOT_IN_USE, f"{path}: {error}"
    if found is not None and settings.current().budget != "auto":
        outcome, detail = journal.NOT_IN_USE, f"{detail}; DYNCHUNK_BUDGET is not auto"
    journal.record("report", outcome, detail)
    return None if found is None else found._asdict()


def headrooms(everybody: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Bytes to spare by rank."""
    sharing = Counter(one["host"] for one in everybody.values() if one["host"] is not None)
    return {rank: one["headroom_bytes"] // max(1, sharing[one["host"]]) for rank, one in everybody.items()}


def derive(everybody: Mapping[str, Mapping[str, Any]], own_rows: int) -> Derived:
    """The budget for all ranks. own_rows: token^2 that a chunk's rows add to it.

    Raises SettingsError with what to do instead.
    """
    costs = {rank: _cost(one) for rank, one in everybody.items()}
    try:
        return auto_budget.derive(headrooms(everybody), costs, own_rows)
    except NoHeadroomError as error:
        raise SettingsError([str(error)]) from error


def _cost(one: Mapping[str, Any]) -> Coefficient:
    if one["measured"] is not None:
        return Coefficient(**one["measured"], source=MEASURED_BEFORE)
    if one["path"] is None:
        raise SettingsError([UNKNOWN_PATH])
    return auto_budget.of_path(one["path"], one["score_limit_bytes"])
