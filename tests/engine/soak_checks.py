"""Seeded queues against the adder of one engine version; test_versions.py runs this once for each."""

from __future__ import annotations

from scripts.bench import soak_admission

PASSES = 15_000


def test_a_short_soak() -> None:
    """No violation, no lost chunk and no livelock in many passes of many queues."""
    seen = soak_admission.soak(PASSES, seed=7)
    assert seen["passes"] >= PASSES
    assert seen["queues"] > 10
