"""DYNCHUNK_LATENCY on the real engine: learned while serving, alike on all ranks, and given up where it cannot be.

What a mode makes of a model, and what becomes of times that mean nothing, needs no engine: tests/dynchunk.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.reference import Server
from tests.engine import asks, stock, traffic
from tests.engine.asks import BUDGET, LONG
from tests.engine.warm import serving

pytestmark = pytest.mark.engine

FLOOR = 64
FAULTS = Path(__file__).parent / "faults"
ENVIRON = {
    "DYNCHUNK_BUDGET": str(BUDGET),
    "DYNCHUNK_CHUNK_MIN": str(FLOOR),
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
}
AT_MOST = 16  # long prompts until it has learned or given up


def learn(server: Server, tokens: int = 6_000) -> dict:
    """Serve long prompts, one at a time, until the sweep ends. -> the state then."""
    for number in range(AT_MOST):
        server.flush()
        server.tokens(traffic.prompt(tokens, 300 + number), rid=f"learn{number}")
        state = server.state()["latency"]
        if state["state"] != "calibrating":
            return state
    raise AssertionError(f"still calibrating after {AT_MOST} long prompts: {state}")


def assert_said_once_a_rank(server: Server, words: str) -> None:
    """A rank writes its log when it likes."""
    traffic.wait_until(lambda: server.log.read_text().count(words) >= 2, what=f"not said by both ranks: {words}")
    assert server.log.read_text().count(words) == 2, f"not once a rank: {words}"


@pytest.mark.parametrize(
    ("layout", "mode", "fault"),
    [
        pytest.param("--pp-size", "pipeline", "", marks=pytest.mark.xdist_group("latency pp")),
        # One rank takes longer over everything, and the model file is another engine's.
        pytest.param("--tp", "equal", "slow", marks=pytest.mark.xdist_group("latency tp")),
        pytest.param("--tp", "40ms", "", marks=[pytest.mark.xdist_group("latency ms"), pytest.mark.more]),
    ],
)
def test_ranks_agree_while_learning_and_after(tmp_path: Path, layout: str, mode: str, fault: str) -> None:
    """Two ranks, the consensus checker on: from the sweep to the model every batch is the same on both.

    Whatever the noise of this machine made of the timings, the answer is the stock engine's and the budget holds.
    """
    expected = stock.answers()
    kept = tmp_path / "model.json"
    ours = ENVIRON | {"DYNCHUNK_LATENCY": mode, "DYNCHUNK_MODEL_FILE": str(kept)}
    if fault:
        kept.write_text(json.dumps({"belongs_to": {"engine": "0.4.2"}, "ticks": {"a": 1, "b": 1, "c": 1, "gamma": 1}}))
        ours["FAULT"] = fault
    with serving(tmp_path, *asks.STATIC, layout, "2", engine_path=(FAULTS,) if fault else (), **ours) as server:
        if fault:
            assert server.state()["latency"]["state"] == "calibrating"
            assert server.log.read_text().count("is of another engine: engine is") == 1
        state = learn(server)
        swept = [max(new for _, new in server.chunks(f"learn{n}")) for n in range(2)]
        assert swept == [1024, 256], "the two arms of the sweep"
        made = {"long": traffic.answer(server, LONG)}
        traffic.assert_same(made["long"], expected["long"])
        traffic.assert_every_batch_keeps_the_budget(server.batches(), BUDGET, FLOOR)
        traffic.assert_chunks_follow_each_other(server.batches(), made)
        traffic.assert_ranks_agree(server)
        assert not server.state()["degraded"]
        assert_said_once_a_rank(server, state["reason"])
        # A model that is dropped after is taken out of its file again: what it says is what the server says now.
        now = server.state()["latency"]
        if now["state"] == "model":
            ticks = json.loads(kept.read_text())["ticks"]
            assert {name: int(value) for name, value in ticks.items()} == now["model_ticks"]


@pytest.mark.xdist_group("broken beside")
def test_faults_beside_the_decisions_change_none(tmp_path: Path) -> None:
    """Every fit fails, and one rank cannot write its trace: latency is given up, that hook takes itself out, and the
    budget and the answers stand.
    """
    expected = stock.answers()
    ours = ENVIRON | {"DYNCHUNK_LATENCY": "equal", "FAULT": "fit,forward"}
    with serving(tmp_path, *asks.STATIC, "--tp", "2", engine_path=(FAULTS,), **ours) as server:
        state = learn(server)
        assert state["state"] == "fixed"
        assert_said_once_a_rank(server, "broken by the test in a fit")
        made = {"long": traffic.answer(server, LONG)}
        traffic.assert_same(made["long"], expected["long"])
        assert max(new for _, new in server.chunks("long")) == asks.CHUNK_TOKENS
        traffic.assert_every_batch_keeps_the_budget(server.batches(), BUDGET, FLOOR)
        traffic.assert_chunks_follow_each_other(server.batches(), made)
        assert not server.state()["degraded"]
        [ranks_trace] = traffic.ranks_traces(server)
        assert server.log.read_text().count("broken by the test in a trace") == 1
        # Up to the fault, and no line more.
        assert [b["reqs"] for b in server.batches(ranks_trace)] == [b["reqs"] for b in server.batches()[:4]]
