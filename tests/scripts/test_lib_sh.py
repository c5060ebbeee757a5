"""scripts/lib.sh: the virtual environment that quickstart and test make, also after a first try that was cut short."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, clean_environ

pytestmark = pytest.mark.slow

MAKE = '. "./lib.sh"; make_venv requirements/none.txt; echo made'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with lib.sh and requirements that need no package index."""
    shutil.copy(ROOT / "scripts" / "lib.sh", tmp_path)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "none.txt").write_text("# nothing\n")
    return tmp_path


def sh(checkout: Path, script: str = MAKE, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-euc", script], cwd=checkout, env=clean_environ(**env), capture_output=True, text=True, check=False
    )


def has_pip(checkout: Path) -> bool:
    python = checkout / ".venv" / "bin" / "python"
    return subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


def test_a_venv_that_was_cut_short_is_made_again(checkout: Path) -> None:
    """Ctrl-C while .venv is being made leaves one without pip; the next run makes it whole, the one after is quick."""
    process = subprocess.Popen(
        ["sh", "-euc", MAKE],
        cwd=checkout,
        env=clean_environ(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline_s = time.monotonic() + 60
    while not (checkout / ".venv" / "bin" / "python").exists() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) != 0
    assert not has_pip(checkout)
    done = sh(checkout)
    assert "left incomplete" in done.stdout
    assert done.stdout.endswith("made\n"), done.stderr
    assert has_pip(checkout)
    assert sh(checkout).stdout == "made\n"
    assert sorted(path.name for path in checkout.iterdir()) == [".cache", ".venv", "lib.sh", "requirements"]


def test_a_venv_of_somebody_else_is_left_alone(checkout: Path) -> None:
    """A broken .venv that this script did not make is named and not touched."""
    mine = checkout / ".venv" / "mine"
    mine.parent.mkdir()
    mine.write_text("precious")
    done = sh(checkout)
    assert done.returncode == 1
    assert f"{checkout}/.venv has no working pip and was not made by this script" in done.stderr
    assert mine.read_text() == "precious"


def test_no_python_ends_the_script(checkout: Path) -> None:
    """Without a Python that fits, the message is the end: nothing is made and nothing runs after it."""
    tools = checkout / "tools"
    tools.mkdir()
    for tool in ("sh", "mkdir", "mv", "rm", "cat", "cksum", "cut"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    done = sh(checkout, PATH=str(tools))
    assert done.returncode == 1
    assert done.stderr.startswith("dynchunk: no Python from 3.11 to 3.13 with venv found")
    assert "made" not in done.stdout
    assert not (checkout / ".venv").exists()
