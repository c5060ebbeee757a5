"""What is in force is one module's state; each test starts from an empty one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from dynchunk import in_force
from dynchunk.agreement import Outbox
from dynchunk.latency_sizing import LatencySizing
from dynchunk.policy.turns import Turns


@pytest.fixture(autouse=True)
def nothing_in_force(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fresh = {
        "limits": None,
        "floors": {},
        "truncation_align": type(None),
        "turns": Turns(every=0),
        "outbox": Outbox(),
        "latency": LatencySizing(),
        "release": None,
        "primed": None,
        "meter": None,
        "prefills": None,
        "listeners": [],
        "when_idle": [],
        "hidden": None,
        "degraded": False,
        "counts": Counter(),
        "_said": set(),
    }
    for name, value in fresh.items():
        monkeypatch.setattr(in_force, name, value)
    yield
