"""What the scheduler asks for the size of the next chunk of a request: the object behind `dynamic_chunk_sizer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynchunk import in_force
from dynchunk.policy import admission
from dynchunk.policy.admission import Cut, Load
from dynchunk.policy.budget import end_aligned


class BudgetSizer:
    """Answers `predict(prefix)`, the engine's interface for sizers, from what is in force in this process.

    The engine admits whatever comes back, verbatim: too large overruns buffers sized for the static chunk, unaligned
    breaks paging, zero stalls the request, an exception ends the server. So: at least one token, at most the static
    size, the absolute end a multiple of the page and of what the engine aligns truncations to, and None (the static
    size) if anything is wrong.
    """

    def __init__(self, engine_sizer: Any | None, cut: Callable[[], Cut]) -> None:
        """engine_sizer: the engine's own sizer where it made one; the smaller answer counts. cut: where to cut, now."""
        self.engine_sizer = engine_sizer
        self.cut = cut

    def predict(self, history_len: int) -> int | None:
        """New tokens for the next chunk of a request with `history_len` tokens computed; None for the static size."""
        limits = in_force.active()
        if limits is None or type(history_len) is not int or history_len < 0:
            return None
        try:
            cut = self.cut()
            # One more than any chunk: the sizer does not know how much is left, the engine takes the smaller.
            chunk = admission.continue_chunk(limits, Load(), history_len, limits.chunk_max + 1, cut).tokens
            if self.engine_sizer is not None:
                engine_chunk = self.engine_sizer.predict(history_len)
                if engine_chunk is not None and engine_chunk < chunk:
                    aligned = end_aligned(engine_chunk, history_len, cut.align)
                    chunk = aligned if aligned >= cut.floor else min(chunk, admission.aligned_floor(cut, history_len))
        except Exception as error:
            in_force.degrade(repr(error))
            return None
        return min(chunk, limits.chunk_max)
