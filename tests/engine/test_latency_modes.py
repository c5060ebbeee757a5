"""DYNCHUNK_LATENCY on the real engine: learned while serving, alike on all ranks, and given up where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.reference import Server, prompt, serving
from tests.engine import traffic
from tests.engine.traffic import Ask

pytestmark = pytest.mark.engine

BUDGET = 8_000_000
FLOOR = 64
STATIC = ("--chunked-prefill-size", "1024")
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
        server.tokens(prompt(tokens, 300 + number), rid=f"learn{number}")
        state = server.state()["latency"]
        if state["state"] != "calibrating":
            return state
    raise AssertionError(f"still calibrating after {AT_MOST} long prompts: {state}")


def assert_ranks_agree(folder: Path, server: Server) -> None:
    [other] = folder.glob("trace.jsonl.*")
    assert [b["reqs"] for b in server.batches(other)] == [b["reqs"] for b in server.batches()]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict:
    with serving(tmp_path_factory.mktemp("stock"), *STATIC, DYNCHUNK_MODE="off") as server:
        return traffic.answer(server, Ask.of("long", 12_000, 1))


@pytest.mark.parametrize(("layout", "mode"), [("--pp-size", "pipeline"), ("--tp", "equal"), ("--tp", "40ms")])
def test_ranks_agree_while_learning_and_after(tmp_path: Path, stock: dict, layout: str, mode: str) -> None:
    """Two ranks, the consensus checker on: from the sweep to the model every batch is the same on both.

    Whatever the noise of this machine made of the timings, the answer is the stock engine's and the budget holds.
    """
    kept = tmp_path / "model.json"
    ours = ENVIRON | {"DYNCHUNK_LATENCY": mode, "DYNCHUNK_MODEL_FILE": str(kept)}
    with serving(tmp_path, *STATIC, layout, "2", engine_path=(), **ours) as server:
        state = learn(server)
        swept = [max(new for _, new in server.chunks(f"learn{n}")) for n in range(2)]
        assert swept == [1024, 256], "the two arms of the sweep"
        made = {"long": traffic.answer(server, Ask.of("long", 12_000, 1))}
        traffic.assert_same(made["long"], stock)
        traffic.assert_every_batch_keeps_the_budget(server.batches(), BUDGET, FLOOR)
        traffic.assert_chunks_follow_each_other(server.batches(), made)
        assert_ranks_agree(tmp_path, server)
        assert not server.state()["degraded"]
        assert server.log.read_text().count(state["reason"]) == 2, "not once a rank"
        if state["state"] == "model":
            assert {name: int(value) for name, value in json.loads(kept.read_text())["ticks"].items()} == state[
                "model_ticks"
            ]


@pytest.mark.parametrize(
    ("fault", "said"), [("noise", "no latency model, chunks are sized by memory alone"), ("fit", "broken by the test")]
)
def test_what_cannot_be_learned_is_given_up(tmp_path: Path, fault: str, said: str) -> None:
    """Times that mean nothing, or a fit that fails: the sweep ends, said once a rank, and memory alone sizes chunks."""
    ours = ENVIRON | {"DYNCHUNK_LATENCY": "equal", "FAULT": fault}
    with serving(tmp_path, *STATIC, "--tp", "2", engine_path=(FAULTS,), **ours) as server:
        state = learn(server)
        assert state["state"] == "fixed"
        assert said in state["reason"]
        assert server.log.read_text().count(said) == 2
        server.tokens(prompt(9_000, 1), rid="after")
        assert max(new for _, new in server.chunks("after")) == 1024
        traffic.assert_every_batch_keeps_the_budget(server.batches(), BUDGET, FLOOR)
        assert_ranks_agree(tmp_path, server)


def test_a_slow_rank_and_the_model_of_another_engine(tmp_path: Path) -> None:
    """One rank takes longer over everything, and the model file is another engine's: served, agreed, said once."""
    kept = tmp_path / "model.json"
    theirs = {"belongs_to": {"engine": "0.4.2"}, "ticks": {"a": 1, "b": 1, "c": 1, "gamma": 1}}
    kept.write_text(json.dumps(theirs))
    ours = ENVIRON | {"DYNCHUNK_LATENCY": "equal", "DYNCHUNK_MODEL_FILE": str(kept), "FAULT": "slow"}
    with serving(tmp_path, *STATIC, "--tp", "2", engine_path=(FAULTS,), **ours) as server:
        assert server.state()["latency"]["state"] == "calibrating"
        assert server.log.read_text().count("is of another engine: engine is") == 1
        learn(server)
        assert_ranks_agree(tmp_path, server)
