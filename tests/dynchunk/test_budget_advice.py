"""What measured peaks lead to: a line for the operator, or a change on all ranks where the budget is `auto`."""

from __future__ import annotations

import pytest

from dynchunk import in_force
from dynchunk.budget_advice import BudgetAdvice
from dynchunk.peak import PeakMeter
from dynchunk.policy.budget import Budget

GIB = 1 << 30


class FakeMemory:
    """Takes what a row and key costs, as told."""

    def __init__(self) -> None:
        self.bytes = 0

    def mark(self) -> None:
        """Nothing."""

    def transient_bytes(self) -> int:
        return self.bytes


class Prefill:
    def __init__(self, prefix: int, rows: int) -> None:
        self.reqs = [("r", prefix, rows)]


def measured(bytes_per_pair: int) -> PeakMeter:
    memory = FakeMemory()
    meter = PeakMeter(memory, 1)
    for rows in (512, 1024, 2048):
        for prefix in range(0, 100_000, 10_000):
            prefill = Prefill(prefix, rows)
            memory.bytes = bytes_per_pair * rows * (prefix + rows)
            meter.before(prefill)
            meter.after(prefill)
    return meter


@pytest.mark.parametrize("adopt", [False, True])
def test_a_raise_is_said_once_and_sent_only_where_the_budget_is_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], adopt: bool
) -> None:
    """6 bytes where 14.5 were assumed: the headroom at start allows more."""
    monkeypatch.setattr(in_force, "limits", Budget(200_000_000, "prefix", 64, 256, 2048))
    advice = BudgetAdvice(
        measured(6), {"pp0tp0": 4 * GIB, "pp0tp1": 3 * GIB}, adopt=adopt, may_raise=True, own_rows=2048**2
    )
    for _ in range(3):
        advice.when_idle()
    allowed = (3 * GIB * 85 // 100 // 6 - 2048**2) // 1_000_000 * 1_000_000
    updates = in_force.outbox.take()
    assert [(u.kind, *u.values) for u in updates] == ([("budget", allowed, False)] if adopt else [])
    said = capsys.readouterr().err
    assert said.count(f"{allowed:,}") >= 1
    assert said.count("what was measured allows") == 1


def test_a_budget_that_is_about_right_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    right = 3 * GIB * 85 // 100 // 6
    monkeypatch.setattr(in_force, "limits", Budget(right, "prefix", 64, 256, 2048))
    advice = BudgetAdvice(measured(6), {"pp0tp0": 3 * GIB}, adopt=True, may_raise=True, own_rows=0)
    advice.when_idle()
    assert not in_force.outbox.take()


@pytest.mark.parametrize(("by_operator", "may_raise"), [(True, True), (False, False)])
def test_an_operators_budget_and_other_stages_are_respected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by_operator: bool, may_raise: bool
) -> None:
    """`./dynchunk budget 1e8` stays; and one pipeline stage's measurement raises nothing for the others."""
    monkeypatch.setattr(in_force, "limits", Budget(100_000_000, "prefix", 64, 256, 2048))
    monkeypatch.setattr(in_force, "set_by_operator", by_operator)
    advice = BudgetAdvice(measured(6), {"pp0tp0": 3 * GIB}, adopt=True, may_raise=may_raise, own_rows=0)
    advice.when_idle()
    assert not in_force.outbox.take()
    assert "what was measured allows" in capsys.readouterr().err
