"""The real PrefillAdder of each supported engine version, from its wheel, driven through random queues."""

from __future__ import annotations

import pytest

from scripts.bench import soak_admission
from scripts.engine_wheels import VERSIONS
from tests.engine import wheels

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("version", VERSIONS)
def test_no_world_breaks_a_promise(version: str) -> None:
    """Worlds that hypothesis draws (and shrinks), and seeded queues as in scripts/bench/soak_admission.py, which runs a
    million passes of them; the hooks are in place, or it would mean nothing.
    """
    names = ("admission_properties", "turns_properties", "controls_properties", "soak_checks")
    assert wheels.ONLY_PASSED.search(wheels.run_checks(version, *(f"{name}.py" for name in names)))


def test_the_judge_can_fail() -> None:
    """Without DynChunk's hooks the same worlds break the promises at once: the checks are not empty."""
    with pytest.raises(RuntimeError, match='"failed"'):
        soak_admission.run_version("0.5.23", passes=15_000, seed=7, hooks=False)
