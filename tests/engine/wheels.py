"""Checks that run against each supported engine version, in a process that imports it from its wheel."""

from __future__ import annotations

import os
import re
from pathlib import Path

from scripts.engine_wheels import unpacked
from tests.conftest import BOOT, ROOT, clean_environ
from tests.engine import warm

SOME_PASSED = re.compile(r"^\d+ passed(, \d+ skipped)?(, \d+ warnings?)? in ", re.MULTILINE)
ONLY_PASSED = re.compile(r"^\d+ passed(, \d+ warnings?)? in ", re.MULTILINE)


def environ(version: str, **more: str) -> dict[str, str]:
    """This version in front of the installed one, with our boot folder in front of all."""
    path = os.pathsep.join(map(str, [BOOT, unpacked(version), ROOT / "adapter", ROOT]))
    ours = {"PYTHONPATH": path, "ENGINE_VERSION": version, "OMP_NUM_THREADS": "1", warm.WARM: warm.address()}
    return clean_environ(**ours, **more)


def run_checks(version: str, *files: str, **more: str) -> str:
    """Run files of checks under pytest. -> its output; raises AssertionError with it where a check failed."""
    command = ["python", "-m", "pytest", "-q", "-rs", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = warm.run(
        [*command, "--override-ini", "pythonpath=", *(str(Path("tests", "engine", file)) for file in files)],
        env=environ(version, **more),
        cwd=ROOT,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout
