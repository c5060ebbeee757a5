"""What the scheduler asks for the size of the next chunk of a request: the object behind `dynamic_chunk_sizer`."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any

from dynchunk import journal
from dynchunk.policy import budget as rule


class BudgetSizer:
    """Answers `predict(prefix)`, the engine's interface for sizers.

    The engine admits whatever comes back, verbatim: too large overruns buffers sized for the static chunk, unaligned
    breaks paging, zero stalls the request, an exception ends the server. So: at least one token, at most the static
    size, the absolute end a multiple of the page and of what the engine aligns truncations to, and None (the static
    size) if anything is wrong.
    """

    def __init__(
        self,
        limits: rule.Budget,
        engine_sizer: Any | None,
        truncation_align: Callable[[], int | None],
    ) -> None:
        """engine_sizer: the engine's own sizer where it made one; the smaller answer counts.

        truncation_align: read at each call, because the engine sets it after the sizer.
        """
        self.limits = limits
        self.engine_sizer = engine_sizer
        self.truncation_align = truncation_align
        self._failed = False

    def predict(self, history_len: int) -> int | None:
        """New tokens for the next chunk of a request with `history_len` tokens computed; None for the static size."""
        try:
            return self._chunk(history_len)
        except Exception as error:
            if not self._failed:
                self._failed = True
                journal.say(f"the sizer failed, the engine's own chunk size counts from now on: {error!r}")
            return None

    def _chunk(self, prefix_tokens: int) -> int | None:
        if self._failed or type(prefix_tokens) is not int or prefix_tokens < 0:
            return None
        chunk = rule.chunk_tokens(self.limits, prefix_tokens)
        if self.engine_sizer is not None:
            engine_chunk = self.engine_sizer.predict(prefix_tokens)
            if engine_chunk is not None:
                chunk = min(chunk, engine_chunk)
        align = lcm(self.limits.page, self.truncation_align() or 1)
        aligned = rule.end_aligned(chunk, prefix_tokens, align)
        if aligned > 0:
            return aligned
        # The alignment is a floor of its own: run up to its next boundary, the engine can cut nowhere before.
        return min(rule.end_aligned(align, prefix_tokens, align) or align, self.limits.chunk_max)
