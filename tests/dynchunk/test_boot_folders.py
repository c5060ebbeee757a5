"""More than one start hook on the path: each runs once, and none calls another in a circle."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import BOOT, ROOT, run_python

SEEN = "import sys; print(getattr(sys, 'theirs', 0), type(sys.meta_path[0]).__name__, len(sys.meta_path))"
# As other tools do it: look along the whole path without one's own folder.
CHAINING = """
import os, sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
sys.theirs = getattr(sys, "theirs", 0) + 1
here = os.path.dirname(os.path.abspath(__file__))
spec = PathFinder.find_spec("sitecustomize", [e for e in sys.path if os.path.abspath(e) != here])
if spec is not None and sys.theirs < 5:
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
"""


@pytest.fixture
def another(tmp_path: Path) -> Path:
    """The boot folder of another copy of DynChunk."""
    copy = tmp_path / "copy" / "adapter"
    shutil.copytree(ROOT / "adapter", copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy / "boot"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Another tool's folder with a start hook that only counts."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys\nsys.theirs = getattr(sys, 'theirs', 0) + 1\n")
    return folder


@pytest.mark.parametrize("order", ["ours another theirs", "another ours theirs", "ours another ours theirs"])
def test_two_copies_on_the_path(another: Path, theirs: Path, order: str) -> None:
    """An image's copy and a checkout's: one import watch, and the tool behind them is started once."""
    folders = {"ours": BOOT, "another": another, "theirs": theirs}
    done = run_python(SEEN, path=tuple(folders[name] for name in order.split()))
    count, first, finders = done.stdout.split()
    assert (count, first) == ("1", "ImportWatch"), done.stderr
    assert int(finders) == 1 + int(run_python("import sys; print(len(sys.meta_path))", path=()).stdout)
    assert done.stderr == ""


def test_a_folder_that_is_there_twice_runs_once(theirs: Path) -> None:
    """PYTHONPATH grows by prefixing; the same folder comes up again and again."""
    done = run_python(SEEN, path=(BOOT, theirs, BOOT, BOOT))
    assert done.stdout.split()[:2] == ["1", "ImportWatch"], done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_another_tool_that_runs_what_it_shadows(tmp_path: Path, first: str) -> None:
    """Two hooks that each run the other's would never end."""
    (tmp_path / "sitecustomize.py").write_text(CHAINING)
    done = run_python(SEEN, path=(tmp_path, BOOT) if first == "theirs" else (BOOT, tmp_path))
    assert done.stdout.split()[:2] == ["1", "ImportWatch"], done.stderr
