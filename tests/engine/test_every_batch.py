"""The promise for every batch, on the real engine: the budget holds, nobody is lost, answers are the stock engine's."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from dynchunk.policy.budget import Budget, chunk_tokens
from scripts.reference import EngineEndedError, Server
from tests.engine import asks, stock, traffic
from tests.engine.asks import BUDGET, CROWD, FLOOR, HIT, LONG, SHARED
from tests.engine.warm import serving

pytestmark = pytest.mark.engine
on_guarded = pytest.mark.xdist_group("guarded")

# In this order: overlap, mixed chunk, radix cache, page of one token, two ranks, two stages, the engine's own sizer.
SWITCHES = {
    "no overlap": ("--disable-overlap-schedule",),
    "mixed": ("--enable-mixed-chunk",),
    "no radix": ("--disable-radix-cache",),
    "page 1": ("--page-size", "1"),
    "tp 2": ("--tp", "2"),
    "pp 2": ("--pp-size", "2"),
    "engine's sizer": ("--enable-dynamic-chunking",),
}
# These and the default, which is the engine of the tests below, have every pair of values that the engine allows.
PAIRWISE = (
    "no overlap, no radix, tp 2",
    "mixed, no radix, page 1, tp 2",
    "mixed, page 1, pp 2",
    "mixed, no radix, pp 2, engine's sizer",
    "page 1, tp 2, pp 2, engine's sizer",
)
# One switch at a time, and a few more.
REST = (
    "no overlap",
    "mixed",
    "mixed, no overlap",
    "no radix",
    "no radix, no overlap",
    "page 1",
    "tp 2",
    "pp 2",
    "tp 2, mixed, no overlap",
    "pp 2, engine's sizer",
)


def values(name: str) -> tuple[bool, ...]:
    """Each switch, on or off, as the engine takes it: stages have no overlap."""
    on = {part for part in name.split(", ") if part} | ({"no overlap"} if "pp 2" in name else set())
    return tuple(switch in on for switch in SWITCHES)


def pairs(chosen: tuple[bool, ...]) -> set[tuple[int, bool, int, bool]]:
    return {(i, chosen[i], j, chosen[j]) for i, j in itertools.combinations(range(len(chosen)), 2)}


def test_every_pair_of_values_is_run() -> None:
    """Whatever two switches do to each other is seen. Five engines beside the default are the fewest that do."""
    possible = {
        values(", ".join(on))
        for n in range(len(SWITCHES) + 1)
        for on in itertools.combinations(SWITCHES, n)
        if "engine's sizer" not in on or "pp 2" in on  # the engine has it for stages only
    }
    wanted = set().union(*map(pairs, possible))
    assert set().union(*(pairs(values(name)) for name in ("", *PAIRWISE))) == wanted


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in PAIRWISE),
        *(pytest.param(name, marks=[pytest.mark.xdist_group(name), pytest.mark.more]) for name in REST),
    ],
)
def test_the_budget_holds_and_answers_are_the_same(tmp_path: Path, name: str) -> None:
    """Long prompts, hits on a cached prefix and a crowd: every batch keeps the budget, every answer is the stock one.

    The engine's rank consensus checker is on: it ends the server when ranks diverge.
    """
    expected = stock.answers()
    flags = [word for part in name.split(", ") for word in SWITCHES[part]]
    rule = "sequence" if "no overlap" in name or "sizer" in name else "prefix"
    ranks = ("tp 2" in name) + 1, ("pp 2" in name) + 1
    environ = {
        "DYNCHUNK_BUDGET": str(BUDGET),
        "DYNCHUNK_CHUNK_MIN": str(FLOOR),
        "DYNCHUNK_RULE": rule,
        "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
    }
    with serving(tmp_path, *asks.STATIC, *flags, **environ) as server:
        answers = ask_all(server)
        for rid, made in answers.items():
            traffic.assert_same(made, expected[rid])
        assert_promises(server, 0, answers, rule, radix="radix" not in name)
        if ranks[1] == 1:  # stages log, and profile, each for itself
            traffic.assert_log_agrees(server)
        traffic.assert_ranks_agree(server, ranks[0] * ranks[1] - 1)


def ask_all(server: Server) -> dict[str, dict]:
    """A long prompt, a hit on it, a crowd."""
    answers = {LONG.rid: traffic.answer(server, LONG)}
    answers[HIT.rid] = traffic.answer(server, HIT)
    return answers | traffic.answer_all(server, CROWD)


def assert_promises(
    server: Server, since: int, answers: dict[str, dict], rule: str = "prefix", *, radix: bool = True
) -> None:
    """Of the batches from the since-th on, which gave these answers."""
    batches = server.batches()[since:]
    traffic.assert_every_batch_keeps_the_budget(batches, BUDGET, FLOOR, rule)
    traffic.assert_chunks_follow_each_other(batches, answers)
    if radix:
        hit = answers[HIT.rid]["meta_info"]["cached_tokens"]
        assert hit >= len(SHARED) // 64 * 64
        first = server.chunks(HIT.rid, since)[0]
        # The first chunk on a cached prefix: what the engine never asks a sizer for.
        assert first[0] == hit
        assert first[1] * hit <= BUDGET
    assert not server.state()["degraded"]


@on_guarded
def test_the_default_keeps_the_budget_and_answers_the_same(guarded: Server) -> None:
    """The same questions to the engine as users start it."""
    expected = stock.answers()
    guarded.flush()
    before = len(guarded.batches())
    answers = ask_all(guarded)
    for rid, made in answers.items():
        traffic.assert_same(made, expected[rid])
    assert_promises(guarded, before, answers)
    traffic.assert_log_agrees(guarded)


@on_guarded
def test_a_short_request_does_not_wait_for_a_long_prompt(guarded: Server) -> None:
    """A request of 200 tokens that arrives while a long prompt is prefilled gets its pass after a few chunks."""
    expected = stock.answers()
    guarded.flush()
    done: dict[str, dict] = {}
    # At the floor all along: eighty chunks, of which the short one needs a third.
    with traffic.budget(guarded, FLOOR, back_to=BUDGET):
        long = threading.Thread(target=lambda: done.update(long=traffic.answer(guarded, LONG)))
        before, counts = len(guarded.batches()), guarded.state()["counts"]
        long.start()
        traffic.wait_until(lambda: len(guarded.batches()) > before + 5)
        done["c2"] = traffic.answer(guarded, CROWD[1])
        long.join()
    order = [rid for batch in guarded.batches()[before:] for rid, _, _ in batch["reqs"]]
    assert order.index("c2") < len(order) - 1 - order[::-1].index("long"), "the long prompt was through first"
    for rid in ("long", "c2"):
        traffic.assert_same(done[rid], expected[rid])
    after = guarded.state()["counts"]
    assert after["passes_for_waiting"] > counts.get("passes_for_waiting", 0)
    assert after["passes_for_decoding"] >= counts.get("passes_for_decoding", 0) + CROWD[1].new_tokens - 1


@on_guarded
def test_a_second_long_prompt_does_not_stand_in_the_way(guarded: Server) -> None:
    """The engine stops at the first request that does not fit; a short one behind a second long prompt gets in."""
    guarded.flush()

    def ask(tokens: int, seed: int, rid: str) -> threading.Thread:
        thread = threading.Thread(target=guarded.generate, args=(traffic.prompt(tokens, seed),), kwargs={"rid": rid})
        thread.start()
        return thread

    with traffic.budget(guarded, FLOOR, back_to=BUDGET):
        before = len(guarded.batches())
        threads = [ask(10_000, 71, "way71")]
        traffic.wait_until(lambda: len(guarded.batches()) > before + 2)
        threads.append(ask(6_000, 72, "way72"))
        # It stands in the queue before the short one comes.
        traffic.wait_until(lambda: traffic.load(guarded, "num_waiting_reqs") == 1)
        guarded.generate(traffic.prompt(150, 73), rid="way-short")
        for thread in threads:
            thread.join()
    order = [rid for batch in guarded.batches()[before:] for rid, _, _ in batch["reqs"]]
    assert order.index("way-short") < order.index("way72"), "the second long prompt ran before the short one"


@on_guarded
def test_abort_of_a_long_prompt_gives_everything_back(guarded: Server) -> None:
    """Aborted in the middle of its chunks, with a short one in between: pool and counts return to the start."""
    guarded.flush()
    aborted: list[dict] = []
    with traffic.budget(guarded, FLOOR, back_to=BUDGET):
        before = len(guarded.batches())
        long = threading.Thread(target=lambda: aborted.append(traffic.answer(guarded, LONG)))
        long.start()
        traffic.wait_until(lambda: len(guarded.batches()) > before + 5)
        short = threading.Thread(target=traffic.answer, args=(guarded, CROWD[1]))
        short.start()
        traffic.wait_until(lambda: guarded.chunks("c2", before))
        guarded.abort("long")
        long.join()
        short.join()
    assert aborted[0]["meta_info"]["finish_reason"]["type"] == "abort"
    traffic.assert_nothing_is_left(guarded)
    traffic.assert_same(traffic.answer(guarded, HIT), stock.answers()["hit"])


@on_guarded
def test_the_budget_changes_while_serving(guarded: Server) -> None:
    """A new budget is in force for the next chunks, without a restart; nonsense changes nothing."""
    other = BUDGET // 2
    guarded.flush()
    with traffic.budget(guarded, other, back_to=BUDGET):
        before = len(guarded.batches())
        guarded.generate(traffic.prompt(5_000, 55), rid="smaller")
        traffic.assert_every_batch_keeps_the_budget(guarded.batches()[before:], other, FLOOR)
        smaller = Budget(other, "prefix", page=64, chunk_min=FLOOR, chunk_max=asks.CHUNK_TOKENS)
        for prefix, tokens in guarded.chunks("smaller"):
            assert tokens == min(chunk_tokens(smaller, prefix), 5_000 - prefix)
        for nonsense in (0, -5, 1.5):
            assert not traffic.change_budget(guarded, nonsense)
        assert guarded.state()["budget_in_force"] == other


@pytest.mark.more
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
