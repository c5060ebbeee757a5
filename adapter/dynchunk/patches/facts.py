"""What DynChunk reads off a live scheduler, with the names that each engine version has for it."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_parallel


def rank_name(scheduler: Any) -> str:
    """This scheduler's place, such as `pp0tp1`, or `dp1pp0tp0` where there are several replicas."""
    place = _place(scheduler)
    dp = place.dp_rank
    return (f"dp{dp}" if dp is not None else "") + f"pp{place.pp_rank}tp{place.tp_rank}"


def is_entry_rank(scheduler: Any) -> bool:
    """Whether requests of this replica enter here: the rank that answers /server_info."""
    place = _place(scheduler)
    return not (place.pp_rank or place.attn_tp_rank or place.attn_cp_rank)


def _place(scheduler: Any) -> Any:
    # 0.5.20 keeps the ranks on the scheduler; later versions in the runtime context.
    return getattr(scheduler, "ps", None) or get_parallel()
