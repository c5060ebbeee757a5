"""The promise for every batch, on the real engine: the budget holds, nobody is lost, answers are the stock engine's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynchunk.policy.budget import Budget, chunk_tokens
from scripts.reference import EngineEndedError, Server, serving
from tests.engine import traffic
from tests.engine.traffic import Ask

pytestmark = pytest.mark.engine

BUDGET = 8_000_000
FLOOR = 256
STATIC = ("--chunked-prefill-size", "2048")
SHARED = tuple(traffic.prompt(12_000, 99))
# A long prompt, a prefix hit on it, and short ones: what every configuration is asked.
LONG = Ask.of("long", 16_000, 1, prefix=SHARED)
HIT = Ask.of("hit", 3_000, 2, prefix=SHARED)
CROWD = (
    Ask.of("c1", 9_000, 3),
    Ask.of("c2", 400, 4),
    Ask.of("c3", 5_000, 5, prefix=SHARED),
    Ask.of("c4", 1_900, 6),
)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """The stock engine's answers."""
    with serving(tmp_path_factory.mktemp("stock"), *STATIC, DYNCHUNK_MODE="off") as server:
        asks = (LONG, HIT, *CROWD)
        return {ask.rid: traffic.answer(server, ask) for ask in asks}


CONFIGURATIONS = {
    "overlap": (),
    "no overlap": ("--disable-overlap-schedule",),
    "mixed": ("--enable-mixed-chunk",),
    "mixed, no overlap": ("--enable-mixed-chunk", "--disable-overlap-schedule"),
    "no radix": ("--disable-radix-cache",),
    "no radix, no overlap": ("--disable-radix-cache", "--disable-overlap-schedule"),
    "page 1": ("--page-size", "1"),
    "tp 2": ("--tp", "2"),
    "pp 2": ("--pp-size", "2"),
    "tp 2, mixed, no overlap": ("--tp", "2", "--enable-mixed-chunk", "--disable-overlap-schedule"),
    "pp 2, engine's sizer": ("--pp-size", "2", "--enable-dynamic-chunking"),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_budget_holds_and_answers_are_the_same(tmp_path: Path, stock: dict[str, dict], name: str) -> None:
    """Long prompts, hits on a cached prefix and a crowd: every batch keeps the budget, every answer is the stock one.

    The engine's rank consensus checker is on: it ends the server when ranks diverge.
    """
    flags = CONFIGURATIONS[name]
    rule = "sequence" if "no overlap" in name else "prefix"
    environ = {"DYNCHUNK_BUDGET": str(BUDGET), "DYNCHUNK_RULE": rule, "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
    with serving(tmp_path, *STATIC, *flags, **environ) as server:
        answers = {LONG.rid: traffic.answer(server, LONG)}
        answers[HIT.rid] = traffic.answer(server, HIT)
        answers |= traffic.answer_all(server, CROWD)
        for rid, made in answers.items():
            traffic.assert_same(made, stock[rid])
        batches = server.batches()
        traffic.assert_every_batch_keeps_the_budget(batches, BUDGET, FLOOR, rule)
        traffic.assert_chunks_follow_each_other(batches, answers)
        if "pp" not in name:  # stages log, and profile, each for itself
            traffic.assert_log_agrees(server.log, batches)
        if "radix" not in name:
            hit = answers[HIT.rid]["meta_info"]["cached_tokens"]
            assert hit >= len(SHARED) // 64 * 64
            first = server.chunks(HIT.rid)[0]
            # The first chunk on a cached prefix: what the engine never asks a sizer for.
            assert first[0] == hit
            assert first[1] * hit <= BUDGET
        for other in tmp_path.glob("trace.jsonl.*"):
            assert [b["reqs"] for b in server.batches(other)] == [b["reqs"] for b in batches], "ranks ran other batches"
        state = server.state()
        assert not state["degraded"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One engine for what follows. --enable-metrics for its counts of running and queued requests."""
    folder = tmp_path_factory.mktemp("guarded")
    with serving(folder, *STATIC, "--enable-metrics", DYNCHUNK_BUDGET=str(BUDGET)) as server:
        yield server


def test_a_short_request_does_not_wait_for_a_long_prompt(guarded: Server, stock: dict[str, dict]) -> None:
    """A request of 400 tokens that arrives while a long prompt is prefilled gets its pass after a few chunks."""
    guarded.flush()
    done: dict[str, dict] = {}
    long = threading.Thread(target=lambda: done.update(long=traffic.answer(guarded, LONG)))
    before = len(guarded.batches())
    long.start()
    traffic.wait_until(lambda: len(guarded.batches()) > before + 5)
    done["c2"] = traffic.answer(guarded, CROWD[1])
    assert "long" not in done, "the long prompt was through first"
    long.join()
    for rid in ("long", "c2"):
        traffic.assert_same(done[rid], stock[rid])
    counts = guarded.state()["counts"]
    assert counts["passes_for_waiting"] >= 1
    assert counts["passes_for_decoding"] >= CROWD[1].new_tokens - 1
    traffic.assert_every_batch_keeps_the_budget(guarded.batches(), BUDGET, FLOOR)


def test_a_second_long_prompt_does_not_stand_in_the_way(guarded: Server) -> None:
    """The engine stops at the first request that does not fit; a short one behind a second long prompt gets in."""
    guarded.flush()
    threads = [
        threading.Thread(target=guarded.generate, args=(traffic.prompt(20_000, seed),), kwargs={"rid": f"way{seed}"})
        for seed in (71, 72)
    ]
    before = len(guarded.batches())
    threads[0].start()
    traffic.wait_until(lambda: len(guarded.batches()) > before + 2)
    threads[1].start()
    time.sleep(0.3)
    guarded.generate(traffic.prompt(300, 73), rid="way-short")
    order = [rid for batch in guarded.batches()[before:] for rid, _, _ in batch["reqs"]]
    assert "way72" not in order, "the second long prompt ran before the short one"
    for thread in threads:
        thread.join()


def test_abort_of_a_long_prompt_gives_everything_back(guarded: Server, stock: dict[str, dict]) -> None:
    """Aborted in the middle of its chunks, with a short one in between: pool and counts return to the start."""
    guarded.flush()
    before = len(guarded.batches())
    aborted: list[dict] = []
    long = threading.Thread(target=lambda: aborted.append(traffic.answer(guarded, LONG)))
    long.start()
    traffic.wait_until(lambda: len(guarded.batches()) > before + 5)
    short = threading.Thread(target=traffic.answer, args=(guarded, CROWD[1]))
    short.start()
    time.sleep(0.2)
    guarded.client.post(f"{guarded.url}/abort_request", json={"rid": "long"}).raise_for_status()
    long.join()
    short.join()
    assert aborted[0]["meta_info"]["finish_reason"]["type"] == "abort"
    guarded.flush()  # refuses while anything is left
    assert_nothing_is_left(guarded)
    guarded.flush()
    traffic.assert_same(traffic.answer(guarded, HIT), stock["hit"])


def assert_nothing_is_left(server: Server) -> None:
    """Requests, queue and pool come to zero by the engine's own metrics.

    An idle engine publishes what it holds 30 s after its last report (metrics_reporter._maybe_log_idle_metrics).
    """
    gauges = ("sglang:num_running_reqs{", "sglang:num_queue_reqs{", "sglang:token_usage{")

    def values() -> list[float]:
        lines = server.client.get(f"{server.url}/metrics").text.splitlines()
        return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(gauges)]

    assert len(values()) >= len(gauges)
    traffic.wait_until(lambda: not any(values()), timeout_s=90)


def test_the_budget_changes_while_serving(guarded: Server) -> None:
    """A new budget is in force for the next chunks, without a restart; nonsense changes nothing."""
    wanted = {"server_args": {"dynchunk_budget": 4_000_000}}
    assert guarded.client.post(f"{guarded.url}/set_internal_state", json=wanted).json() == [True]
    guarded.flush()
    before = len(guarded.batches())
    guarded.generate(traffic.prompt(9_000, 55), rid="smaller")
    traffic.assert_every_batch_keeps_the_budget(guarded.batches()[before:], 4_000_000, FLOOR)
    smaller = Budget(4_000_000, "prefix", page=64, chunk_min=FLOOR, chunk_max=2048)
    for prefix, tokens in guarded.chunks("smaller"):
        assert tokens == min(chunk_tokens(smaller, prefix), 9_000 - prefix)
    for nonsense in (0, -5, 1.5):
        refused = {"server_args": {"dynchunk_budget": nonsense}}
        assert guarded.client.post(f"{guarded.url}/set_internal_state", json=refused).json() == [False]
    assert guarded.state()["budget_in_force"] == 4_000_000
    back = {"server_args": {"dynchunk_budget": BUDGET}}
    assert guarded.client.post(f"{guarded.url}/set_internal_state", json=back).json() == [True]


def test_retraction_with_a_pool_that_is_too_small(tmp_path: Path, stock: dict[str, dict]) -> None:
    """Decoding requests that outgrow the cache are retracted and come back; nobody is lost or answered differently."""
    asks = [Ask(f"t{i}", tuple(traffic.prompt(1_500, 200 + i)), 260, ignore_eos=False) for i in range(6)]
    flags = (*STATIC, "--schedule-conservativeness", "0.01", "--enable-metrics")
    with serving(tmp_path / "stock", *flags, DYNCHUNK_MODE="off") as server:
        expected = {ask.rid: traffic.answer(server, ask) for ask in asks}
    small = ("--max-total-tokens", "9984", "--context-length", "9000")
    with serving(tmp_path / "ours", *flags, *small, DYNCHUNK_BUDGET="500000") as server:
        answers = traffic.answer_all(server, asks)
        for rid, made in answers.items():
            traffic.assert_same(made, expected[rid])
        assert "KV cache pool is full. Retract requests" in server.log.read_text()
        traffic.assert_every_batch_keeps_the_budget(server.batches(), 500_000, FLOOR)
        server.flush()
        assert_nothing_is_left(server)


def test_deterministic_inference(tmp_path: Path) -> None:
    """Where the engine aligns its cuts for determinism, ours are aligned too, and the floor says so."""
    flags = ("--enable-deterministic-inference", "--chunked-prefill-size", "8192")
    try:
        with serving(tmp_path, *flags, DYNCHUNK_BUDGET=str(BUDGET)) as server:
            server.generate(traffic.prompt(20_000, 77), rid="d")
            sizes = [new for _, new in server.chunks("d")]
    except EngineEndedError as error:
        pytest.skip(f"this engine has no deterministic inference on a CPU: {str(error)[-300:]}")
    assert sum(sizes) == 20_000
