"""What a row and key costs, measured while the real engine serves, and the budget that follows from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.reference import prompt
from scripts.verify import engine
from tests.engine import asks, traffic
from tests.engine.warm import serving

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("measured")]

REFERENCE_BYTES = 24  # fp32 scores of the tiny model's 6 heads; see docker-images/cpu-reference/README.md


def test_auto_budget_and_the_measured_coefficient(tmp_path: Path) -> None:
    """Two ranks work out one budget from the memory at start; a long prompt's peaks show the coefficient behind it.

    The next start takes that coefficient from the report.
    """
    flags = ("--tp", "2", *asks.STATIC)
    with serving(tmp_path / "first", *flags, DYNCHUNK_BUDGET="auto") as server:
        state = server.state()
        budget = state["effective"]["budget"]
        assert f"= {budget:,} token^2 (reference:" in state["hooks"]["budget"]["detail"]
        assert "the least of 2 ranks" in state["hooks"]["budget"]["detail"]

        def said() -> list[str]:
            return [line for line in server.log.read_text().splitlines() if ": 0." in line and "pp0tp" in line]

        traffic.wait_until(lambda: len(said()) == 2)
        assert [f"budget {budget:,} token^2" in line for line in said()] == [True, True], "not the same on both ranks"
        # Chunks of several sizes on several products of rows and keys, so that there is a line to see. None takes less
        # than 32 MiB: what is smaller glibc may keep for the next one, and then it is no transient.
        for pairs in (8_000_000, 6_000_000, 4_000_000):
            assert traffic.change_budget(server, pairs)
            traffic.wait_for_budget(server, pairs)
            server.tokens(prompt(14_000, pairs))
        found = server.state()["coefficient"]
        assert found["trusted"], found
        # Each of two ranks has half the heads.
        assert 0.8 < found["bytes_per_pair"] / (REFERENCE_BYTES / 2) < 1.25, found
        measured = engine.coefficient(server.info())
    report = tmp_path / "run.json"
    report.write_text(json.dumps({"coefficient": measured}))
    environ = {"DYNCHUNK_BUDGET": "auto", "DYNCHUNK_REPORT": str(report)}
    with serving(tmp_path / "second", *flags, **environ) as server:
        hooks = server.state()["hooks"]
        assert hooks["report"]["outcome"] == "applied"
        assert "(measured by an earlier run on this engine and device)" in hooks["budget"]["detail"]
