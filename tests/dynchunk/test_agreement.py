"""What ranks have in common: compared at start over a real store, changed by updates in order."""

from __future__ import annotations

import pickle
from datetime import timedelta

import pytest

from dynchunk import agreement, in_force
from dynchunk.agreement import DisagreementError, Outbox, Update, compare, differences
from dynchunk.policy.budget import Budget


class FakeStore:
    """Stands for torch's store between processes; tests/engine has the real one."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not all(key in self.values for key in keys):
            raise TimeoutError

    def get(self, key: str) -> bytes:
        return self.values[key]


def join(settings: list[dict[str, object]]) -> dict[str, dict[str, object]]:
    """The last rank arrives when all others have published, and compares. -> everybody's report, as it sees them."""
    store = FakeStore()
    for rank, mine in enumerate(settings[:-1]):
        with pytest.raises(DisagreementError, match="has not said"):
            compare(store, rank, len(settings), mine, rank_name=f"pp0tp{rank}", report={"free": rank})
    last = len(settings) - 1
    return compare(store, last, len(settings), settings[-1], rank_name=f"pp0tp{last}", report={"free": last})


def test_equal_settings_agree() -> None:
    """Ranks that run under the same settings start, whatever they report, and read each other's reports."""
    reports = join([{"DYNCHUNK_BUDGET": 1}, {"DYNCHUNK_BUDGET": 1}, {"DYNCHUNK_BUDGET": 1}])
    assert reports == {"pp0tp0": {"free": 0}, "pp0tp1": {"free": 1}, "pp0tp2": {"free": 2}}


def test_a_difference_names_rank_knob_and_both_values() -> None:
    """Two hosts with different .env files are told which knob, on which rank, and both values."""
    with pytest.raises(DisagreementError) as caught:
        join([{"DYNCHUNK_BUDGET": 200_000_000, "DYNCHUNK_PAGE": None}, {"DYNCHUNK_BUDGET": 150_000_000}])
    message = str(caught.value)
    assert "DYNCHUNK_BUDGET: 200000000 on rank 0 (pp0tp0), 150000000 on rank 1 (pp0tp1)" in message
    assert "DYNCHUNK_PAGE" not in message  # absent and None are the same
    assert differences([{"name": "a", "x": 1}, {"name": "b", "x": 2}]) == ["x: 1 on rank 0 (a), 2 on rank 1 (b)"]


def test_a_rank_without_dynchunk_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that never says anything does not leave the others waiting for ever."""
    monkeypatch.setattr(agreement, "MISSING_RANK_S", 0)
    with pytest.raises(DisagreementError, match=r"rank 1 has not said.*without DynChunk"):
        compare(FakeStore(), 0, 2, {}, rank_name="pp0tp0", report={})


def test_updates_travel_in_order_once() -> None:
    """The outbox gives each update away once, in the order of posting, with rising versions; they can be pickled."""
    outbox = Outbox()
    outbox.post("budget", 1)
    outbox.post("budget", 2)
    taken = outbox.take()
    assert [(u.version, u.values) for u in taken] == [(1, (1,)), (2, (2,))]
    assert outbox.take() == []
    assert pickle.loads(pickle.dumps(taken)) == taken


def test_a_failure_takes_the_others_along(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank whose own code fails falls back for good, says so once, and posts that to all ranks."""
    in_force.limits = Budget(1, "prefix", 64, 64, 64)
    assert in_force.active() is not None
    in_force.degrade("broken")
    in_force.degrade("broken again")
    assert in_force.active() is None
    assert [u.kind for u in in_force.outbox.take()] == ["degrade"]
    assert Update(1, "degrade", ("broken",)).kind == "degrade"
