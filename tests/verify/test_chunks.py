"""Chunks rebuilt from DynChunk's trace and from the engine's log."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynchunk.trace import Trace
from scripts.verify import chunks
from scripts.verify.chunks import Launch, LogLine, SeenLine
from scripts.verify.follow import Follow
from scripts.verify.results import Chunk
from scripts.verify.sources import LOG, TRACE, ChunkSource
from tests.verify.fake_engine import log_line

# As SGLang 0.5.23 writes them: scheduler_components/metrics_reporter.report_prefill_stats.
PLAIN = (
    "[2026-11-29 12:00:01] Prefill batch, #new-seq: 1, #new-token: 2048, #cached-token: 64, token usage: 0.12, "
    "#running-req: 0, #queue-req: 0, #pending-token: 61952, cuda graph: False, input throughput (token/s): 4096.00"
)
RANKED = (
    "[2026-11-29 12:00:01.123 PP0 TP0] Prefill batch [17], #new-seq: 2, #new-token: 1536, #cached-token: 0, "
    "full token usage: 0.10, swa token usage: 0.98, #running-req: 3, #queue-req: 1, #pending-token: 0, "
    "#replay-token: 512, cpu graph: False, input throughput (token/s): 1024.00, est. prefill TFLOPS/s (per GPU): 3.21"
)


def test_the_line_that_dynchunk_writes_is_understood(tmp_path: Path) -> None:
    """A line of the adapter's own Trace comes back as the probe's prefix, tokens and times."""
    path = tmp_path / "trace.jsonl"
    Trace(str(path)).write(100.25, 1500.0, "mixed", [("other", 9, 1), ("probe", 4096, 2048)])
    assert chunks.parse_trace_line(path.read_text(), "probe") == Launch(4096, 2048, 100.25, 1.5)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "probe",
        '{"probe": 1}',
        '["probe"]',
        '{"t":1,"ms":null,"reqs":[["probe",1]]}',
        '{"t":1,"ms":null,"reqs":[["probe-2",1,2]]}',
        '{"t":1,"ms":null,"reqs":[["probe",1,0]]}',
        '{"t":null,"ms":null,"reqs":[["probe",1,2]]}',
    ],
)
def test_other_lines_are_no_chunks(line: str) -> None:
    """Broken lines and other requests are passed over, never an error."""
    assert chunks.parse_trace_line(line, "probe") is None


def test_the_engines_log_lines_are_understood() -> None:
    """Plain and with ranks, milliseconds, iteration, sliding-window pool, replayed tokens and a suffix."""
    assert chunks.parse_log_line(PLAIN) == LogLine("", 2048, 64, 0.5)
    assert chunks.parse_log_line(RANKED) == LogLine("PP0 TP0", 1536, 0, 2.0)
    assert chunks.parse_log_line("server-1  | " + PLAIN) == LogLine("", 2048, 64, 0.5)


@pytest.mark.parametrize(
    "line", ["", "[2026-11-29 12:00:01] Decode batch, #running-req: 1", "Prefill batch", PLAIN.replace("2048", "0")]
)
def test_other_log_lines_are_passed_over(line: str) -> None:
    """Only lines about prefill batches count."""
    assert chunks.parse_log_line(line) is None


def test_synchronous_chunks_end_where_the_next_begins() -> None:
    """Where a forward's time is known, the last chunk ends with it, others at the next launch."""
    launches = [Launch(0, 100, 10.0, 0.9), Launch(100, 100, 11.0, 0.9), Launch(200, 50, 12.0, 0.5)]
    assert chunks.from_trace(launches, 13.0) == [
        Chunk(0, 100, 10.0, 11.0),
        Chunk(100, 100, 11.0, 12.0),
        Chunk(200, 50, 12.0, 12.5),
    ]


def test_launches_that_run_ahead_are_put_right() -> None:
    """Where a forward's time is known the last chunk ends with it; the others end at the next launch."""
    # Forwards of 1.0, 1.1, ... s, one after the other, each launched when the one before the last is done.
    ends = list(itertools.accumulate(1 + 0.1 * index for index in range(8)))
    starts = [0.0, 0.01, *ends[:-2]]
    launches = [Launch(1000 * index, 1000, start, None) for index, start in enumerate(starts)]
    rebuilt = chunks.from_trace(launches, ends[-1])
    assert [chunk.end_s for chunk in rebuilt][:-2] == pytest.approx(ends[:-2])
    assert rebuilt[-1].end_s == pytest.approx(ends[-1])
    assert rebuilt[-2].end_s == pytest.approx(ends[-2], rel=0.02)
    assert [chunk.start_s for chunk in rebuilt] == [0.0, *(chunk.end_s for chunk in rebuilt[:-1])]


def test_launches_that_wait_are_taken_as_they_are() -> None:
    """Where the engine waits for each forward, as under a cache release, a chunk ends at the next launch."""
    launches = [Launch(1000 * index, 1000, 1.0 * index, None) for index in range(5)]
    assert [chunk.end_s for chunk in chunks.from_trace(launches, 5.0)] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_one_asynchronous_chunk_ends_with_its_request() -> None:
    """A prompt of one chunk: from its launch to the answer."""
    assert chunks.from_trace([Launch(0, 64, 1.0, None)], 3.0) == [Chunk(0, 64, 1.0, 3.0)]


@given(
    st.lists(st.tuples(st.floats(0.001, 5.0), st.integers(1, 8192)), min_size=1, max_size=30),
    st.booleans(),
    st.floats(0, 5),
)
def test_rebuilt_chunks_are_gapless(gaps: list[tuple[float, int]], synchronous: bool, rest_s: float) -> None:
    """Whatever the times are: every launch is a chunk, none ends before it starts, none starts before the last ends."""
    at_s = 0.0
    prefix = 0
    launches = []
    for gap_s, tokens in gaps:
        launches.append(Launch(prefix, tokens, at_s, gap_s if synchronous else None))
        prefix += tokens
        at_s += gap_s
    rebuilt = chunks.from_trace(launches, launches[-1].t_s + rest_s)
    assert [(c.prefix_tokens, c.tokens) for c in rebuilt] == [(n.prefix_tokens, n.tokens) for n in launches]
    assert all(c.start_s <= c.end_s for c in rebuilt)
    assert all(a.end_s == pytest.approx(b.start_s) for a, b in itertools.pairwise(rebuilt))


def seen(tokens: int, gap_s: float | None, at_s: float, *, cached: int = 0, rank: str = "") -> SeenLine:
    return SeenLine(LogLine(rank, tokens, cached, gap_s), at_s)


def test_log_lines_add_up() -> None:
    """The prefix of a chunk is what the lines before it add up to; its time is the engine's, not the reader's."""
    lines = [seen(100, 99.0, 1.30), seen(100, 1.5, 2.70), seen(50, 0.5, 3.05)]
    rebuilt = chunks.from_log(lines, 0.0, 250)
    assert [(c.prefix_tokens, c.tokens) for c in rebuilt] == [(0, 100), (100, 100), (200, 50)]
    # The last line was read 0.05 s late, the first 0.3 s: the ends are where the one read soonest puts them.
    assert [c.end_s for c in rebuilt] == pytest.approx([1.05, 2.55, 3.05])
    assert rebuilt[0].start_s == 0.0


def test_lines_that_come_late_are_put_right(tmp_path: Path) -> None:
    """On the CPU platform a chunk's line comes when the next chunk is done, the last two lines at once."""
    ends = [1.0, 2.1, 3.3, 4.6, 6.0]
    written = [*ends[1:], ends[-1] + 0.001]
    gaps = [None, *(later - earlier for earlier, later in itertools.pairwise(written))]
    lines = [seen(1000, gap_s, at_s) for gap_s, at_s in zip(gaps, written, strict=True)]
    assert chunks.lines_behind(lines, 5000) == 1
    rebuilt = chunks.from_log(lines, 0.0, 5000, behind=1)
    assert [c.end_s for c in rebuilt][1:] == pytest.approx(ends[1:])
    assert rebuilt[0].end_s == pytest.approx(ends[0], rel=0.06)


def test_lines_in_time_are_left_alone() -> None:
    """A short last chunk is no late line: what counts is the time for a token."""
    lines = [seen(1000, 1.0, float(n)) for n in range(1, 6)] + [seen(10, 0.02, 5.02)]
    assert chunks.lines_behind(lines, 5010) == 0


def test_an_aborted_prompt_is_read_as_the_one_before(tmp_path: Path) -> None:
    """How late the log is shows only at the end of a prompt; the next one, cut short, is shifted just as much."""
    log = tmp_path / "log"
    source = ChunkSource(None, log)
    source.begin("one", 5000, 0.0)
    rates = [1000.0] * 4 + [10_000_000.0]
    log.write_text("".join(log_line(1000, rate) + "\n" for rate in rates))
    source.poll(5.0)
    source.begin("two", 5000, 10.0)
    with log.open("a") as file:
        file.write(log_line(1000, 100.0) + "\n" + log_line(1000, 1000.0) + "\n")
    rebuilt = source.poll(13.0)
    assert [c.end_s for c in rebuilt] == pytest.approx([11.0, 12.0])


def test_a_cached_prefix_counts() -> None:
    """The first line says how much was found in the cache: the first chunk starts there."""
    assert chunks.from_log([seen(100, None, 1.0, cached=64), seen(36, 1.0, 2.0)], 0.0, 200)[1].prefix_tokens == 164


def test_health_checks_between_the_lines_are_passed_over() -> None:
    """A prefill of one token before the prompt is the engine's own health check; after it, somebody else's."""
    lines = [seen(1, None, 0.5), seen(100, 0.5, 1.0), seen(99, 1.0, 2.0), seen(1, 0.4, 2.4), seen(1, 0.1, 2.5)]
    assert [c.tokens for c in chunks.from_log(lines, 0.0, 200)] == [100, 99, 1]


def test_each_chunk_counts_once_however_many_stages_log_it() -> None:
    """With pipeline stages each of them logs every chunk."""
    lines = [seen(100, 1.0, 1.0, rank="PP0"), seen(100, 1.0, 1.1, rank="PP1"), seen(50, 1.0, 2.0, rank="PP0")]
    assert [c.tokens for c in chunks.from_log(lines, 0.0, 150)] == [100, 50]


def test_lines_beyond_the_prompt_are_somebody_elses() -> None:
    """What does not fit into the prompt is not the probe's."""
    assert [c.tokens for c in chunks.from_log([seen(100, 1.0, 1.0), seen(500, 1.0, 2.0)], 0.0, 150)] == [100]


def test_time_left_goes_by_the_last_chunks() -> None:
    """100 tokens a second lately and 500 to go: five seconds."""
    done = [Chunk(0, 1000, 0.0, 1.0), *(Chunk(1000 + 100 * n, 100, 1.0 + n, 2.0 + n) for n in range(5))]
    assert chunks.seconds_left(done, 2000) == pytest.approx(5.0)
    assert chunks.seconds_left([], 2000) is None


def test_following_a_file_gives_each_line_once(tmp_path: Path) -> None:
    """What was there before is skipped, half a line waits for its end, a truncated file starts again."""
    path = tmp_path / "log"
    path.write_text("old\n")
    follow = Follow(path)
    with path.open("a") as file:
        file.write("one\ntw")
    assert follow.lines() == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    assert follow.lines() == ["two"]
    path.write_text("a\n")
    assert follow.lines() == ["a"]
    path.unlink()
    assert follow.lines() == []


def test_a_file_that_comes_later_is_followed(tmp_path: Path) -> None:
    """The server may be the one that makes it."""
    follow = Follow(tmp_path / "later")
    assert follow.lines() == []
    (tmp_path / "later").write_text("one\n")
    assert follow.lines() == ["one"]


def test_a_pipe_is_no_file_to_follow(tmp_path: Path) -> None:
    """Opening a pipe that nobody writes to would wait for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert Follow(pipe).lines() == []


def test_the_trace_is_believed_before_the_log(tmp_path: Path) -> None:
    """The log alone is added up; once the trace names the request, it counts."""
    trace, log = tmp_path / "trace", tmp_path / "log"
    source = ChunkSource(trace, log)
    source.begin("probe", 4096, 0.0)
    log.write_text(PLAIN.replace("#cached-token: 64", "#cached-token: 0") + "\n")
    assert [c.tokens for c in source.poll(1.0)] == [2048]
    assert source.name == LOG
    trace.write_text(json.dumps({"t": 0.5, "ms": 100, "reqs": [["probe", 0, 1024]]}) + os.linesep)
    assert [c.tokens for c in source.poll(2.0)] == [1024]
    assert source.name == TRACE
