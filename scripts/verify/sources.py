"""Follows the trace and the server's log while a probe runs. The trace is believed first: it names the request."""

from __future__ import annotations

from pathlib import Path

from scripts.verify import chunks
from scripts.verify.follow import Follow
from scripts.verify.report import NO_CHUNKS
from scripts.verify.results import Chunk

TRACE = "DynChunk's trace"
LOG = "the server's log, whose lines were added up"


class ChunkSource:
    """Both files, either of them, or none."""

    def __init__(self, trace: Path | None, server_log: Path | None) -> None:
        self.name = NO_CHUNKS
        self._trace = Follow(trace) if trace else None
        self._log = Follow(server_log) if server_log else None
        self.followed = " or ".join(str(path) for path in (trace, server_log) if path)
        self._behind = 0
        self._begin("", 0, 0.0)

    def begin(self, rid: str, prompt_tokens: int, now_s: float) -> None:
        """A probe starts now; what was written before is not its own."""
        for follow in (self._trace, self._log):
            if follow is not None:
                follow.lines()
        self._begin(rid, prompt_tokens, now_s)

    def poll(self, now_s: float) -> list[Chunk]:
        """Read on. -> the chunks of the probe so far, the last one up to now_s."""
        if self._trace is not None:
            parsed = (chunks.parse_trace_line(line, self._rid) for line in self._trace.lines())
            self._launches += [launch for launch in parsed if launch is not None]
        if self._log is not None:
            lines = (chunks.parse_log_line(line) for line in self._log.lines())
            self._seen += [chunks.SeenLine(line, now_s) for line in lines if line is not None]
        if self._launches:
            self.name = TRACE
            return chunks.from_trace(self._launches, now_s)
        if self._seen:
            self.name = LOG
            found = chunks.from_log(self._seen, self._start_s, self._prompt_tokens, self._behind)
            if chunks.tokens_at(found) < self._prompt_tokens:
                return found
            # Only a finished prompt shows how late the lines are; one that is aborted is read as the last one was.
            self._behind = chunks.lines_behind(self._seen, self._prompt_tokens)
            return chunks.from_log(self._seen, self._start_s, self._prompt_tokens, self._behind)
        return []

    def _begin(self, rid: str, prompt_tokens: int, start_s: float) -> None:
        self._rid = rid
        self._prompt_tokens = prompt_tokens
        self._start_s = start_s
        self._launches: list[chunks.Launch] = []
        self._seen: list[chunks.SeenLine] = []
