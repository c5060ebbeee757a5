"""Which chunks a probe ran in: from DynChunk's trace, or from the engine's own log.

The trace names the request and its prefix. The log names neither: a continuation chunk logs 0 cached tokens, so
the prefix is what the lines before it add up to, which is right only while the probe has the server to itself.

Neither says when a chunk ended. Where forwards are asynchronous the trace has the moment of each launch, and the engine
launches ahead by one (more with pipeline stages): `_run_ahead` finds by how many. A log line comes when the result is
in (`lines_behind`: or later), and its throughput is its tokens over the time since the line before, which gives that
time to a fraction of a millisecond where the line's clock gives seconds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from dynchunk.values import parsed
from scripts.verify.results import Chunk

_TINY_GAP = 0.2  # a launch gap below this share of the usual one did not wait for the forward before
_MOST_AHEAD = 8


class Launch(NamedTuple):
    """The probe's part of one trace line. took_s: None where the forward is asynchronous."""

    prefix_tokens: int
    tokens: int
    t_s: float
    took_s: float | None


class LogLine(NamedTuple):
    """One 'Prefill batch' line. rank: 'PP0 TP0' or empty. gap_s: since the rank's line before, None where not said."""

    rank: str
    tokens: int
    cached_tokens: int
    gap_s: float | None


class SeenLine(NamedTuple):
    """A log line, and when it was read."""

    line: LogLine
    seen_s: float


_LOG_LINE = re.compile(
    r"(?:\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?(?P<rank>[^\]]*)\] )?"
    r"Prefill batch(?: \[\d+\])?, #new-seq: \d+, #new-token: (?P<new>\d+), #cached-token: (?P<cached>\d+),"
    r"(?P<rest>.*)"
)
_REPLAYED = re.compile(r"#replay-token: (\d+)")
_THROUGHPUT = re.compile(r"input throughput \(token/s\): ([\d.]+)")


def parse_trace_line(line: str, rid: str) -> Launch | None:
    """The rows of request `rid` in one line of the trace; None where it has none or is no trace line."""
    if rid not in line:
        return None
    try:
        batch = parsed(line)
        took_s = None if batch["ms"] is None else float(batch["ms"]) / 1000
        for name, prefix_tokens, tokens in batch["reqs"]:
            if name == rid and int(tokens) > 0:
                return Launch(int(prefix_tokens), int(tokens), float(batch["t"]), took_s)
    except (ValueError, KeyError, TypeError):
        return None
    return None


def parse_log_line(line: str) -> LogLine | None:
    """One line of the server's log; None where it is about something else."""
    match = _LOG_LINE.search(line)
    tokens = int(match["new"]) if match else 0
    if match is None or tokens == 0:
        return None
    replayed = _REPLAYED.search(match["rest"])
    throughput = _THROUGHPUT.search(match["rest"])
    rate = float(throughput[1]) if throughput else 0.0
    worked = tokens + (int(replayed[1]) if replayed else 0)
    return LogLine((match["rank"] or "").strip(), tokens, int(match["cached"]), worked / rate if rate > 0 else None)


def from_trace(launches: Sequence[Launch], end_s: float) -> list[Chunk]:
    """The chunks of one request that ended, or is still running, at end_s."""
    if not launches:
        return []
    starts = [launch.t_s for launch in launches]
    ahead = 0 if launches[0].took_s is not None else _run_ahead(starts)
    last = launches[-1]
    last_s = max(end_s, last.t_s) if last.took_s is None else last.t_s + last.took_s
    ends = starts[1 + ahead :]
    # Nothing was launched after the last ones: they share the time that is left by their tokens.
    rest = launches[len(ends) :]
    from_s = ends[-1] if ends else starts[0]
    total_tokens = sum(launch.tokens for launch in rest)
    done_tokens = 0
    for launch in rest:
        done_tokens += launch.tokens
        ends.append(from_s + (last_s - from_s) * done_tokens / total_tokens)
    began = [starts[0], *ends] if ahead else starts
    return [
        Chunk(launch.prefix_tokens, launch.tokens, start, end)
        for launch, start, end in zip(launches, began, ends, strict=False)
    ]


def from_log(seen: Sequence[SeenLine], start_s: float, prompt_tokens: int, behind: int = 0) -> list[Chunk]:
    """The chunks of one request that was sent at start_s and had the server to itself.

    behind: by how many chunks the lines come late, as `lines_behind` finds out.
    """
    lines = _of_one_rank(seen, prompt_tokens)
    if not lines:
        return []
    times = _written_at(lines)
    behind = min(behind, len(lines) - 1)
    # The first line is about chunk 0 and came when chunk `behind` was done: those share the time by their tokens.
    first = [item.line.tokens for item in lines[: behind + 1]]
    ends = [start_s + max(0.0, times[0] - start_s) * done / sum(first) for done in itertools.accumulate(first)]
    ends += times[1 : len(lines) - behind]
    chunks: list[Chunk] = []
    prefix_tokens = lines[0].line.cached_tokens
    began_s = start_s
    for (line, _), end_s in zip(lines, ends, strict=True):
        chunks.append(Chunk(prefix_tokens, line.tokens, began_s, max(began_s, end_s)))
        prefix_tokens += line.tokens
        began_s = chunks[-1].end_s
    return chunks


def lines_behind(seen: Sequence[SeenLine], prompt_tokens: int) -> int:
    """By how many chunks the lines of a finished request come late.

    An engine whose launch does the work (on a CPU) and that launches ahead writes about a chunk when the next is done;
    the last lines then come all at once.
    """
    lines = [item.line for item in _of_one_rank(seen, prompt_tokens)]
    costs = [line.gap_s / line.tokens for line in lines[1:] if line.gap_s is not None]
    if len(costs) < 3 or len(costs) < len(lines) - 1:
        return 0
    usual = sorted(costs)[len(costs) // 2]
    behind = 0
    while behind < min(_MOST_AHEAD, len(costs) - 1) and costs[-1 - behind] < _TINY_GAP * usual:
        behind += 1
    return behind


def tokens_at(chunks: Sequence[Chunk]) -> int:
    """How far the prompt is: prefix and new tokens of its last chunk."""
    return chunks[-1].prefix_tokens + chunks[-1].tokens if chunks else 0


def seconds_left(chunks: Sequence[Chunk], prompt_tokens: int) -> float | None:
    """How long the rest takes at the pace of the last chunks; too little while chunks still become slower."""
    recent = chunks[-5:]
    if not recent or recent[-1].end_s <= recent[0].start_s:
        return None
    pace = sum(chunk.tokens for chunk in recent) / (recent[-1].end_s - recent[0].start_s)
    return max(0, prompt_tokens - tokens_at(chunks)) / pace


def _run_ahead(starts: Sequence[float]) -> int:
    """How many forwards the engine launches before it waits: that many gaps at the front are next to nothing."""
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    if len(gaps) < 2:
        return 0
    usual = sorted(gaps)[len(gaps) // 2]
    ahead = 0
    while ahead < min(_MOST_AHEAD, len(gaps) - 1) and gaps[ahead] < _TINY_GAP * usual:
        ahead += 1
    return ahead


def _of_one_rank(seen: Sequence[SeenLine], prompt_tokens: int) -> list[SeenLine]:
    """Every pipeline stage logs every chunk; with data parallelism one rank has the probe. The fullest one is it.

    A line of one token is the engine's health check, unless it is the rest of the prompt. What goes beyond the prompt
    is somebody else's.
    """
    by_rank: dict[str, list[SeenLine]] = {}
    for item in seen:
        by_rank.setdefault(item.line.rank, []).append(item)
    fullest = max(by_rank.values(), key=lambda items: sum(item.line.tokens for item in items), default=[])
    lines: list[SeenLine] = []
    done = 0
    for item in fullest:
        until = done + item.line.tokens if lines else item.line.cached_tokens + item.line.tokens
        if until > prompt_tokens:
            break
        if item.line.tokens > 1 or until == prompt_tokens:
            lines.append(item)
            done = until
    return lines


def _written_at(lines: Sequence[SeenLine]) -> list[float]:
    """When each line was written. One is read after it was written: the one read soonest says where all of them are."""
    times: list[float] = []
    for line, seen_s in lines:
        times.append(times[-1] + line.gap_s if times and line.gap_s is not None else seen_s)
    late_s = min(0.0, *(seen_s - time_s for (_, seen_s), time_s in zip(lines, times, strict=True)))
    return [time_s + late_s for time_s in times]
