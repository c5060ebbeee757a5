"""The entry rank's half: what is timed, what is sent, and that it always ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dynchunk import journal
from dynchunk.agreement import Outbox
from dynchunk.latency_learning import TIMING, Learning
from dynchunk.latency_sizing import LatencySizing
from dynchunk.model_file import ModelFile
from dynchunk.policy import latency
from dynchunk.policy.admission import Cut
from dynchunk.policy.budget import Budget
from dynchunk.policy.calibration import Update

LIMITS = Budget(10**12, "prefix", page=64, chunk_min=64, chunk_max=2048)
CUT = Cut(64, 64)
PLANTED = latency.from_ms(1e-6, 0.02, 8, 4e-4)


@dataclass
class Prefill:
    mode: str = "extend"
    reqs: list[tuple[str, int, int]] = field(default_factory=list)


def serve(sizing: LatencySizing, learning: Learning, outbox: Outbox, number: int, mode: str = "extend") -> list[Update]:
    """One long request, timed chunk by chunk as the planted model says. -> the updates that the stream brought."""
    prefix, total, adopted = 0, 16_000, []
    while prefix < total:
        cap = sizing.cap(LIMITS, CUT, f"r{number}", prefix, total - prefix, first=prefix == 0)
        tokens = min(2048 if cap is None else cap, total - prefix)
        ms = latency.in_ms(latency.predict(PLANTED, prefix, tokens))
        learning.timed(Prefill(mode, [(f"r{number}", prefix, tokens)]), ms)
        prefix += tokens
        for update in outbox.take():
            coefficients, calibrating, reason = update.values
            model = None if coefficients is None else latency.Model(*coefficients)
            adopted.append(Update(model, calibrating, reason))
            sizing.adopt(adopted[-1])
    learning.when_idle()
    return adopted


def started() -> tuple[LatencySizing, Learning, Outbox]:
    sizing, outbox = LatencySizing(latency.parse_mode("equal"), least=64), Outbox()
    sizing.start(LIMITS, CUT)
    return sizing, Learning(sizing, outbox, None), outbox


def test_the_planted_model_is_learned_and_sent() -> None:
    sizing, learning, outbox = started()
    for number in range(8):
        serve(sizing, learning, outbox, number)
    model = sizing.shared.model
    assert model is not None
    assert latency.predict(model, 30_000, 1024) == pytest.approx(latency.predict(PLANTED, 30_000, 1024), rel=0.02)


def test_chunks_that_never_run_alone_end_the_sweep() -> None:
    """With mixed chunk and steady decoding no chunk says anything of its own time."""
    sizing, learning, outbox = started()
    adopted = [update for number in range(12) for update in serve(sizing, learning, outbox, number, "mixed")]
    assert [update.calibrating for update in adopted] == [False]
    assert "no chunk of them ran alone" in adopted[0].reason
    assert sizing.state()["state"] == "fixed"


def test_a_model_that_is_dropped_is_taken_out_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_hooks", {})
    kept = ModelFile(str(tmp_path / "m.json"), {"engine": "e"})
    kept.save(PLANTED)
    sizing, outbox = LatencySizing(latency.parse_mode("equal"), least=64), Outbox()
    sizing.start(LIMITS, CUT)
    learning = Learning(sizing, outbox, kept)
    assert [update.values[0] for update in outbox.take()] == [(PLANTED.a, PLANTED.b, PLANTED.c, PLANTED.gamma)]
    sizing.adopt(Update(PLANTED, calibrating=False, reason="file"))
    sizing.cap(LIMITS, CUT, "r", 0, 16_000, first=True)
    for _ in range(40):  # ten times what it says
        learning.timed(Prefill(reqs=[("r", 0, 2048)]), 10 * latency.in_ms(latency.predict(PLANTED, 0, 2048)))
    assert not Path(kept.path).exists()


def test_a_broken_timer_ends_the_sweep() -> None:
    """Without times no model will ever stand, and every other prompt would run in quarter chunks for good."""
    sizing, learning, outbox = started()
    serve(sizing, learning, outbox, 0)
    learning.broke("trace")
    assert not outbox.take()
    learning.broke(TIMING)
    [update] = outbox.take()
    assert update.values == (None, False, "no latency model: forward timing is broken")
    learning.broke(TIMING)
    assert not outbox.take()


def test_another_engines_model_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Giving up takes away this engine's model; any other file that the setting names stays."""
    monkeypatch.setattr(journal, "_hooks", {})
    path = tmp_path / "m.json"
    other = ModelFile(str(path), {"engine": "other"})
    other.save(PLANTED)
    ModelFile(str(path), {"engine": "e"}).forget()
    assert other.load() == PLANTED
    path.write_text("precious, and no model")
    other.forget()
    assert path.exists()
