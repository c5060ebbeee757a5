"""The main job, on the real engine: chunks follow the rule, `off` is stock, answers do not change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dynchunk.policy.budget import Budget, chunk_tokens
from scripts.reference import EngineEndedError, Server, prompt, serving

pytestmark = pytest.mark.engine

BUDGET = 12_000_000
LIMITS = Budget(BUDGET, "prefix", page=64, chunk_min=256, chunk_max=2048)
STATIC = ("--chunked-prefill-size", "2048")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("guarded"), *STATIC, DYNCHUNK_BUDGET=str(BUDGET)) as server:
        yield server


@pytest.fixture(scope="module")
def answers(guarded: Server) -> dict[int, list[int]]:
    """Greedy answers of the guarded engine to prompts of several lengths (token count -> generated tokens)."""
    return {n: guarded.tokens(prompt(n, n), max_new_tokens=12, rid=f"r{n}") for n in (40_000, 9_000, 2_048, 700)}


def test_chunks_of_a_40k_prompt_follow_the_rule(guarded: Server, answers: dict[int, list[int]]) -> None:
    """Every chunk of a 40,000-token prompt is exactly the rule's, the last one what is left."""
    chunks = guarded.chunks("r40000")
    prefix = 0
    for seen_prefix, tokens in chunks:
        assert seen_prefix == prefix
        assert tokens == min(chunk_tokens(LIMITS, prefix), 40_000 - prefix)
        prefix += tokens
    assert prefix == 40_000
    assert len({tokens for _, tokens in chunks}) > 10


def test_the_engines_own_log_agrees_with_the_trace(guarded: Server, answers: dict[int, list[int]]) -> None:
    """The engine logs the same chunk sizes: the trace is not a story of our own."""
    logged = [
        int(line.partition("#new-token: ")[2].partition(",")[0])
        for line in guarded.log.read_text().splitlines()
        if "Prefill batch" in line
    ]
    traced = [batch["rows"] for batch in guarded.batches()]
    assert traced == logged[-len(traced) :]


def test_a_short_prompt_runs_at_full_speed(guarded: Server, answers: dict[int, list[int]]) -> None:
    """A prompt within the static size is one chunk, as in the stock engine."""
    assert guarded.chunks("r2048") == [(0, 2048)]
    assert guarded.chunks("r700") == [(0, 700)]


def test_server_info_shows_what_is_in_force(guarded: Server) -> None:
    """Hooks, budget, minimum, maximum, page and static size are visible from outside."""
    state = guarded.state()
    assert state["mode"] == "on"
    effective = state["effective"]
    assert {k: effective[k] for k in ("budget", "rule", "page", "chunk_min", "chunk_max", "static")} == {
        "budget": BUDGET,
        "rule": "prefix",
        "page": 64,
        "chunk_min": 256,
        "chunk_max": 2048,
        "static": 2048,
    }
    assert state["hooks"]["sizer"]["outcome"] == "applied"
    assert state["hooks"]["cache_release"]["outcome"] == "no device"


def test_each_process_leaves_one_line(guarded: Server) -> None:
    """The process that was started and the scheduler each wrote one line and one JSON line; nobody else did."""
    lines = guarded.log.read_text().splitlines()
    assert len([line for line in lines if line.startswith("dynchunk-json: ")]) == 2
    said = [line for line in lines if line.startswith("dynchunk [") and ": 0." in line]
    assert len(said) == 2
    assert "pp0tp0" in said[1]
    assert f"budget {BUDGET:,}" in said[1]


def test_off_is_the_stock_engine_and_answers_are_the_same(
    tmp_path: Path, guarded: Server, answers: dict[int, list[int]]
) -> None:
    """With DYNCHUNK_MODE=off chunks are static and nothing of ours speaks; greedy answers are equal token by token."""
    with serving(tmp_path, *STATIC, DYNCHUNK_MODE="off") as stock:
        for n, expected in answers.items():
            assert stock.tokens(prompt(n, n), max_new_tokens=12, rid=f"r{n}") == expected
        assert stock.state() == {}
        assert not stock.trace.exists()
        log = stock.log.read_text()
        assert "dynchunk [" not in log
        assert "dynchunk-json" not in log
        sizes = [
            int(line.partition("#new-token: ")[2].partition(",")[0])
            for line in log.splitlines()
            if "Prefill batch" in line
        ]
        assert sizes.count(2048) >= 40_000 // 2048 + 9_000 // 2048


def test_answers_differ_from_prompt_to_prompt(answers: dict[int, list[int]]) -> None:
    """The comparison above means something: the model answers different prompts differently."""
    assert len({tuple(tokens) for tokens in answers.values()}) == len(answers)


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        (("--chunked-prefill-size", "-1", "--mem-fraction-static", "0.5"), {}, "chunked prefill is off"),
        (STATIC, {"DYNCHUNK_PAGE": "96"}, "DYNCHUNK_PAGE=96 is not a multiple of the engine's page of 64"),
        (STATIC, {"DYNCHUNK_BUDGET": "nan", "DYNCHUNK_PAG": "64"}, "did you mean DYNCHUNK_PAGE?"),
    ],
)
def test_what_cannot_be_guarded_does_not_start(
    tmp_path: Path, flags: tuple[str, ...], environ: dict[str, str], said: str
) -> None:
    """The engine ends, with the reason and the cure in the log."""
    with pytest.raises(EngineEndedError, match="the engine ended with"), serving(tmp_path, *flags, **environ):
        pass
    assert said in (tmp_path / "server.log").read_text()
