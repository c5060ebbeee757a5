"""The load that other programs are tried beside: it is there while they run, and gone afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from tests.conftest import ROOT, clean_environ

pytestmark = pytest.mark.slow

# Says who runs beside it, and waits to be told to go on.
WAITS = "import os, sys; print(os.getppid(), flush=True); sys.stdin.readline(); sys.exit(7)"


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.dev.busy_neighbour", *arguments],
        cwd=ROOT,
        env=clean_environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def loads(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Its children, once the command is running."""
    assert process.stdout is not None
    assert process.stdout.readline() == f"{process.pid}\n"
    return psutil.Process(process.pid).children()


def test_it_ends_as_its_command_ends() -> None:
    """Beside the command there are so many busy processes and one that takes memory; then none, and its exit code."""
    process = start("--cores", "2", "--gib", "0.05", "--", sys.executable, "-c", WAITS)
    children = loads(process)
    assert len(children) == 4
    process.communicate("\n", timeout=60)
    assert process.returncode == 7
    assert not any(child.is_running() for child in children)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_when_it_is_told_to(sent: signal.Signals) -> None:
    """Nothing of it is left, nor of its command."""
    process = start("--cores", "1", "--gib", "0.05", "--", sys.executable, "-c", WAITS)
    children = loads(process)
    process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not any(child.is_running() for child in children)


def test_it_ends_by_itself() -> None:
    """After so many minutes, with nobody to tell it."""
    process = start("--cores", "1", "--gib", "0.01", "--minutes", "0.001")
    process.communicate(timeout=60)
    assert process.returncode == 0
