"""A long prompt that takes nearly all of the cache, while streams beside it decode: on the real engine."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from scripts.reference import serving
from tests.engine import traffic
from tests.engine.traffic import Ask

pytestmark = pytest.mark.engine

PROMPT, STREAMS, STREAM = 24_000, 8, 160
BUDGET = 1_000_000
# In pages of 64: what the prompt and the streams take. Those who are admitted decode more than twice a page beside it.
CACHE = 64 * (PROMPT // 64 + 2 + STREAMS * (STREAM // 64 + 1))


def test_decoding_does_not_take_the_cache_of_an_open_prompt(tmp_path: Path) -> None:
    """The engine counts on a hundredth of what streams will decode; they wait then, and everybody comes to an end."""
    flags = ("--chunked-prefill-size", "2048", "--max-total-tokens", str(CACHE), "--context-length", "25000")
    long = Ask.of("long", PROMPT, 1)
    # Unless they ignore the end of a text, the engine sets no cache aside for what they will decode.
    streams = [Ask(f"s{n}", tuple(traffic.prompt(STREAM, 10 + n)), 300, ignore_eos=False) for n in range(STREAMS)]
    environ = {"DYNCHUNK_BUDGET": str(BUDGET), "DYNCHUNK_INTERLEAVE": "1", "DYNCHUNK_CHUNK_MIN": "128"}
    with serving(tmp_path, *flags, "--schedule-conservativeness", "0.01", **environ) as server:
        made: dict[str, dict] = {}
        prompt = threading.Thread(target=lambda: made.update(long=traffic.answer(server, long)))
        prompt.start()
        traffic.wait_until(lambda: len(server.batches()) > 3)
        made |= traffic.answer_all(server, streams)
        prompt.join()
        assert made.keys() == {long.rid, *(ask.rid for ask in streams)}
        ends = {rid: answer["meta_info"]["finish_reason"]["type"] for rid, answer in made.items()}
        assert set(ends.values()) <= {"length", "stop"}, ends
        state = server.state()
        assert state["counts"]["decoding_held_back"] > 0
        assert state["counts"]["passes_for_decoding"] > 0
        assert not state["degraded"]
