"""The health probe: right answers, and small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pytest_httpserver import HTTPServer

from tests.conftest import ROOT, clean_environ

PROBE = ROOT / "launcher" / "health.py"


def probe(**environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "dynchunk", "health"], env=clean_environ(**environ), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (500, 1)])
def test_it_says_what_the_engine_says(httpserver: HTTPServer, status: int, code: int) -> None:
    """Healthy on 200 only; an engine that is still loading answers 503."""
    httpserver.expect_request("/health").respond_with_data("", status=status)
    done = probe(HOST="0.0.0.0", PORT=str(httpserver.port))
    assert done.returncode == code
    assert str(status) in done.stdout


def test_nobody_there() -> None:
    """A refused connection is unhealthy, in one line."""
    done = probe(PORT="1")
    assert done.returncode == 1
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_settings_it_cannot_read() -> None:
    """A probe that crashes would look like an unhealthy engine without a reason."""
    done = probe(PORT="http")
    assert done.returncode == 1
    assert done.stdout.startswith("unhealthy: NODE_RANK or PORT")


def test_on_other_hosts_it_looks_for_the_process(tmp_path: Path) -> None:
    """Hosts other than the head serve no HTTP: healthy while an engine process lives."""
    name = f"sglang::stands_for_a_scheduler_{tmp_path.name}"
    with subprocess.Popen([sys.executable, "-c", "input()", name], stdin=subprocess.PIPE) as engine:
        done = probe(NODE_RANK="1")
        assert done.returncode == 0, done.stdout
        engine.communicate(b"\n")


def test_it_stays_small(httpserver: HTTPServer) -> None:
    """Under 30 MB at its peak, with neither the start hook nor torch or the engine in it."""
    httpserver.expect_request("/health").respond_with_data("")
    code = (
        "import runpy, sys\n"
        "try: runpy.run_path(sys.argv[1], run_name='__main__')\n"
        "except SystemExit as e: print(e.code)\n"
        # Not ru_maxrss: a child inherits the peak of the process that started it.
        "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')][0])\n"
        "print([m for m in sys.modules if m.partition('.')[0] in ('torch', 'sglang', 'dynchunk', 'sitecustomize')])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", code, PROBE],
        env=clean_environ(PORT=str(httpserver.port), PYTHONPATH=str(ROOT / "adapter" / "boot")),
        capture_output=True,
        text=True,
        check=True,
    )
    _, exit_code, peak_kib, loaded = done.stdout.splitlines()
    assert exit_code == "0"
    assert int(peak_kib) * 1024 < 30_000_000
    assert loaded == "[]"
