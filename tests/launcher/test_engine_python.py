"""Which Python runs the engine, where the tools are in another one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher import engine_python
from tests.conftest import ROOT, clean_environ

PYTHON = sys.executable


def python_at(path: Path, site: Path | None = None) -> str:
    """A Python without site packages; with `site` on its path, if given."""
    path.parent.mkdir(exist_ok=True)
    found = f'PYTHONPATH="{site}" ' if site else ""
    path.write_text(f'#!/bin/sh\n{found}exec {PYTHON} -S "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A folder that has `sglang` in it, which must not be imported."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "launch_server.py").write_text("")
    return package.parent


def test_the_engine_may_be_in_another_python(tmp_path: Path, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools' own has none (a .venv made for the tests alone), the one on PATH has."""
    tools = python_at(tmp_path / "venv" / "python")
    other = python_at(tmp_path / "bin" / "python3", engine)
    monkeypatch.setattr(sys, "executable", tools)
    assert engine_python.find({"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}) == (other, [tools, other])


def test_ones_own_python_comes_first(tmp_path: Path, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an engine here nobody else is asked; the engine's PYTHONPATH counts."""
    tools = python_at(tmp_path / "venv" / "python")
    python_at(tmp_path / "bin" / "python3", engine)
    monkeypatch.setattr(sys, "executable", tools)
    environ = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PYTHONPATH": str(engine)}
    assert engine_python.find(environ) == (tools, [tools])


@pytest.mark.parametrize("made", ["", "sglang/docs"])
def test_no_engine_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str) -> None:
    """Nor is a folder that is only called so one, such as a clone of the engine's repository."""
    (tmp_path / "clone" / made).mkdir(parents=True)
    tools = python_at(tmp_path / "venv" / "python")
    broken = tmp_path / "bin" / "python3"
    broken.parent.mkdir()
    broken.write_text("#!/nowhere\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", tools)
    environ = {"PATH": str(tmp_path / "bin"), "PYTHONPATH": str(tmp_path / "clone")}
    assert engine_python.find(environ) == (None, [tools, str(broken)])


@pytest.mark.parametrize("dry_run", [False, True])
def test_serve_says_where_it_looked(tmp_path: Path, dry_run: bool) -> None:
    """No module named sglang is no message; a dry run shows everything all the same."""
    code = (
        "import sys; sys.path[0:0] = [{!r}, {!r}]; sys.executable = {!r}\n"
        "from launcher.__main__ import app; app(sys.argv[1:])"
    ).format(str(ROOT / "adapter"), str(ROOT), python_at(tmp_path / "venv" / "python"))
    done = subprocess.run(
        [PYTHON, "-c", code, "serve", "--env-file", "/dev/null", *["--dry-run"] * dry_run],
        env=clean_environ(MODEL_PATH="/m", PATH="/nowhere"),
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout if dry_run else done.stderr
    assert done.returncode == (0 if dry_run else 1)
    assert f"SGLang is in none of the Pythons here: {tmp_path / 'venv' / 'python'}." in said
    assert "--model-path /m" in done.stdout
