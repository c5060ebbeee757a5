"""The main job, on the real engine: chunks follow the rule, answers do not change, and what is wrong does not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynchunk.policy.budget import Budget, chunk_tokens
from scripts.reference import EngineEndedError, Server
from tests.engine import asks, stock, traffic
from tests.engine.warm import serving

pytestmark = pytest.mark.engine
guarded_group = pytest.mark.xdist_group("guarded")

LIMITS = Budget(asks.BUDGET, "prefix", page=64, chunk_min=asks.FLOOR, chunk_max=asks.CHUNK_TOKENS)


@pytest.fixture(scope="module")
def answers(guarded: Server) -> dict[int, dict]:
    """Greedy answers of the guarded engine to prompts of several lengths (token count -> answer)."""
    guarded.flush()
    return {n: traffic.answer(guarded, ask) for n, ask in asks.LADDER.items()}


@guarded_group
@pytest.mark.parametrize("n", [n for n in asks.LADDER if n > asks.CHUNK_TOKENS])
def test_chunks_of_a_long_prompt_follow_the_rule(guarded: Server, answers: dict[int, dict], n: int) -> None:
    """Every chunk is exactly the rule's, the last one what is left."""
    prefix = 0
    for seen_prefix, tokens in guarded.chunks(f"r{n}"):
        assert seen_prefix == prefix
        assert tokens == min(chunk_tokens(LIMITS, prefix), n - prefix)
        prefix += tokens
    assert prefix == n


@guarded_group
def test_the_longest_prompt_meets_every_part_of_the_ladder(guarded: Server, answers: dict[int, dict]) -> None:
    """The engine's own chunk, many sizes below it, and the floor: the rule above was held where it says something."""
    sizes = {tokens for _, tokens in guarded.chunks(f"r{max(asks.LADDER)}")}
    assert {asks.CHUNK_TOKENS, asks.FLOOR} <= sizes
    assert len(sizes) > 10


@guarded_group
def test_the_engines_own_log_agrees_with_the_trace(guarded: Server, answers: dict[int, dict]) -> None:
    """The engine logs the same chunk sizes: the trace is not a story of our own."""
    traffic.assert_log_agrees(guarded)


@guarded_group
def test_a_short_prompt_runs_at_full_speed(guarded: Server, answers: dict[int, dict]) -> None:
    """A prompt within the static size is one chunk, as in the stock engine."""
    assert guarded.chunks("r1024") == [(0, 1024)]
    assert guarded.chunks("r700") == [(0, 700)]


@guarded_group
def test_answers_are_the_stock_engines(answers: dict[int, dict]) -> None:
    """Greedy answers are equal token by token, log probabilities within the rounding."""
    expected = stock.answers()
    for answer in answers.values():
        traffic.assert_same(answer, expected[answer["meta_info"]["id"]])


@guarded_group
def test_server_info_shows_what_is_in_force(guarded: Server) -> None:
    """Hooks, budget, minimum, maximum, page and static size are visible from outside."""
    state = guarded.state()
    assert state["mode"] == "on"
    effective = state["effective"]
    assert {k: effective[k] for k in ("budget", "rule", "page", "chunk_min", "chunk_max", "static")} == {
        "budget": asks.BUDGET,
        "rule": "prefix",
        "page": 64,
        "chunk_min": asks.FLOOR,
        "chunk_max": asks.CHUNK_TOKENS,
        "static": asks.CHUNK_TOKENS,
    }
    assert state["hooks"]["sizer"]["outcome"] == "applied"
    assert state["hooks"]["cache_release"]["outcome"] == "no device"


@guarded_group
def test_each_process_leaves_one_line(guarded: Server) -> None:
    """The process that was started and the scheduler each wrote one line and one JSON line; nobody else did."""
    lines = guarded.log.read_text().splitlines()
    assert len([line for line in lines if line.startswith("dynchunk-json: ")]) == 2
    said = [line for line in lines if line.startswith("dynchunk [") and ": 0." in line]
    assert len(said) == 2
    assert "pp0tp0" in said[1]
    assert f"budget {asks.BUDGET:,}" in said[1]


def test_what_cannot_be_guarded_does_not_start(tmp_path: Path) -> None:
    """The engine ends, with every reason and the cure in the log. What else is refused: scheduler_patch_checks.py."""
    environ = {"DYNCHUNK_BUDGET": "nan", "DYNCHUNK_PAG": "64"}
    with pytest.raises(EngineEndedError, match="the engine ended with"), serving(tmp_path, *asks.STATIC, **environ):
        pass
    said = (tmp_path / "server.log").read_text()
    assert "did you mean DYNCHUNK_PAGE?" in said
    assert "DYNCHUNK_BUDGET" in said
