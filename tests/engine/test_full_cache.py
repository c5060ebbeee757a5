"""A cache that is nearly full, on the real engine: a long prompt beside streams, and streams that outgrow it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.engine import asks, stock, traffic
from tests.engine.traffic import Ask
from tests.engine.warm import serving

pytestmark = pytest.mark.engine

# The engine counts on a hundredth of what streams will decode.
HARDLY_COUNTED = ("--schedule-conservativeness", "0.01")
PROMPT, STREAMS, STREAM = 16_000, 8, 160
# In pages of 64: what the prompt and the streams take. Those who are admitted decode more than twice a page beside it.
CACHE = 64 * (PROMPT // 64 + 2 + STREAMS * (STREAM // 64 + 1))


@pytest.mark.xdist_group("full cache")
def test_decoding_does_not_take_the_cache_of_an_open_prompt(tmp_path: Path) -> None:
    """The streams wait where the rest of the prompt would no longer fit, and everybody comes to an end."""
    flags = (*asks.STATIC, *HARDLY_COUNTED, "--max-total-tokens", str(CACHE), "--context-length", "17000")
    # At the floor from the second chunk on: 120 chunks.
    environ = {"DYNCHUNK_BUDGET": "100000", "DYNCHUNK_INTERLEAVE": "1", "DYNCHUNK_CHUNK_MIN": "128"}
    long = Ask.of("long", PROMPT, 1)
    # Unless they ignore the end of a text, the engine sets no cache aside for what they will decode.
    streams = [Ask(f"s{n}", tuple(traffic.prompt(STREAM, 10 + n)), 300, ignore_eos=False) for n in range(STREAMS)]
    with serving(tmp_path, *flags, **environ) as server:
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


@pytest.mark.xdist_group("retraction")
def test_retraction_with_a_pool_that_is_too_small(tmp_path: Path) -> None:
    """Decoding requests that outgrow the cache are retracted and come back; nobody is lost or answered differently."""
    expected = stock.answers()
    flags = (*asks.STATIC, *HARDLY_COUNTED, "--max-total-tokens", "9984", "--context-length", "9000")
    budget = 500_000
    with serving(tmp_path, *flags, DYNCHUNK_BUDGET=str(budget), DYNCHUNK_CHUNK_MIN=str(asks.FLOOR)) as server:
        answers = traffic.answer_all(server, asks.GROWING)
        for rid, made in answers.items():
            traffic.assert_same(made, expected[rid])
        traffic.wait_until(lambda: "KV cache pool is full. Retract requests" in server.log.read_text())
        traffic.assert_every_batch_keeps_the_budget(server.batches(), budget, asks.FLOOR)
        traffic.assert_nothing_is_left(server)
