"""DYNCHUNK_TRACE: one JSON line for every prefill batch, for tools and for people who want to see each chunk.

`{"t": unix seconds at launch, "ms": milliseconds or null where the forward is asynchronous, "mode": "extend" or
"mixed", "rows": new tokens in the batch, "longest": longest prefix in it, "reqs": [[request id, prefix, new tokens],
...]}`; decodes that run along in a mixed batch are requests with one new token. A line is one write, so that readers
never see half of one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from dynchunk import journal


class Trace:
    """An append-only trace file. A write that fails is said once and ends the trace, never the server."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd: int | None = None
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            self._give_up(error)
        else:
            journal.record("trace", journal.APPLIED, path)

    def write(
        self,
        launched_s: float,
        took_ms: float | None,
        mode: str,
        reqs: Sequence[tuple[str, int, int]],
    ) -> None:
        """reqs: (request id, prefix tokens, new tokens) of each row of the batch."""
        if self._fd is None:
            return
        line = {
            "t": round(launched_s, 6),
            "ms": None if took_ms is None else round(took_ms, 3),
            "mode": mode,
            "rows": sum(new for _, _, new in reqs),
            "longest": max((prefix for _, prefix, _ in reqs), default=0),
            "reqs": reqs,
        }
        try:
            os.write(self._fd, (json.dumps(line, separators=(",", ":")) + "\n").encode())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        journal.record(
            "trace", journal.REFUSED, f"DYNCHUNK_TRACE={self.path}: {error.strerror}; serving goes on without it"
        )
