"""The real PrefillAdder of each supported engine version, from its wheel, driven through random queues."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import soak_admission
from scripts.engine_wheels import VERSIONS, unpacked
from tests.conftest import BOOT, ROOT, clean_environ

pytestmark = pytest.mark.engine

PROPERTIES = [str(Path("tests", "engine", f"{name}_properties.py")) for name in ("admission", "turns", "controls")]


@pytest.mark.parametrize("version", VERSIONS)
def test_hypothesis_finds_no_violation(version: str) -> None:
    """Worlds that hypothesis draws (and shrinks) break no promise; the hooks are in place, or it would mean nothing."""
    path = [BOOT, unpacked(version), ROOT / "adapter", ROOT]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"),
            *("--override-ini", "pythonpath=", *PROPERTIES),
        ],
        cwd=ROOT,
        env=clean_environ(PYTHONPATH=os.pathsep.join(map(str, path))),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "16 passed" in done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_a_short_soak(version: str) -> None:
    """Seeded queues as in scripts/bench/soak_admission.py, which runs a million passes of them."""
    seen = soak_admission.run_version(version, passes=15_000, seed=7)
    assert seen["version"] == version
    assert int(str(seen["passes"])) >= 15_000
    assert seen["queues"] > 10


def test_the_judge_can_fail() -> None:
    """Without DynChunk's hooks the same worlds break the promises at once: the checks are not empty."""
    with pytest.raises(RuntimeError, match='"failed"'):
        soak_admission.run_version("0.5.23", passes=15_000, seed=7, hooks=False)
