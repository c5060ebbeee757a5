"""Every `python -m scripts.NAME` that the project names can be started as it is written, from a checkout."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT, clean_environ

pytestmark = pytest.mark.slow


def named_tools() -> list[str]:
    """The modules that documents and source files name after `python -m`."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docker-images/**/*.md")]
    files += [path for folder in ("adapter", "launcher", "scripts") for path in (ROOT / folder).rglob("*.py")]
    found: set[str] = set()
    for path in files:
        found |= set(re.findall(r"python3? -m (scripts\.[a-z_]+(?:\.[a-z_]+)*)", path.read_text(encoding="utf-8")))
    return sorted(found)


@pytest.mark.parametrize("tool", named_tools())
def test_a_tool_that_is_named_can_be_started(tool: str) -> None:
    """Without PYTHONPATH: importing it is what a newcomer's first try does."""
    environ = clean_environ()
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-c", f"import {tool}"], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_some_are_named() -> None:
    assert "scripts.verify.gpu_check" in named_tools()
