"""The indexer hooks against the real modules of each supported engine version, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.engine_wheels import VERSIONS, unpacked
from tests.conftest import BOOT, ROOT, clean_environ

pytestmark = pytest.mark.engine


def run_checks(version: str, file: str, **environ: str) -> str:
    """Run one file of checks with this version's wheel in front; its output."""
    path = [BOOT, unpacked(version), ROOT / "adapter", ROOT]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"),
            *("--override-ini", "pythonpath=", str(Path("tests", "engine", file))),
        ],
        cwd=ROOT,
        env=clean_environ(PYTHONPATH=os.pathsep.join(map(str, path)), ENGINE_VERSION=version, **environ),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_limits_and_hooks(version: str) -> None:
    """Every limit is in force, every hook gives the engine's own bits and holds what it says."""
    output = run_checks(version, "score_checks.py")
    assert " passed" in output
    # Skipped is only what this version does not have.
    assert "skipped" not in output or version in ("0.5.20", "0.5.21", "0.5.22")
