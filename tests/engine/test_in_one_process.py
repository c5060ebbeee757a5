"""Checks that import the engine without serving, each file's in one warm process, so that no test worker imports it."""

from __future__ import annotations

import pytest

from scripts.engine_wheels import VERSIONS
from tests.engine import wheels

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("file", ["reference_platform", "release_hook", "scheduler_patch", "budget_at_start"])
def test_against_the_installed_engine(file: str) -> None:
    """None fails and none is skipped; what each promises is in its file."""
    assert wheels.ONLY_PASSED.search(wheels.run_checks(VERSIONS[-1], f"{file}_checks.py"))
